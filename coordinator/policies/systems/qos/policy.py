"""Deadlines by prediction and autoscaling: a reconstruction of the IJCNN 2019 framework.

A job states its deadline and the range of workers it may use (Xing et al., IJCNN 2019; only its
abstract is public, so each rule here is ours). Training time is predicted from measured step
times, refitted online; jobs are admitted by deadline as Moore and Hodgson do it (Management
Science 15(1), 1968); whoever would miss grows, whoever is early shrinks while others wait.
Must not know nodes: who gets how many workers is carried out by the floor.
"""

from __future__ import annotations

from math import inf

import msgspec
from msgspec import Struct

from common.model import JobState, NodeName, Ratio
from coordinator.policies.answers import answers
from coordinator.policies.blockers import Hold
from coordinator.policies.deadlines.predict import (
    Margin,
    Memory,
    Prediction,
    Steps,
    refitted,
)
from coordinator.policies.decisions import Allocation, Placement
from coordinator.policies.floor import Floor, Pool, fill, pools, present_workers
from coordinator.policies.granting import Grant, carry_out
from coordinator.policies.knob_types import Period, Seconds
from coordinator.policies.policy import Parts, Policy, joint
from coordinator.policies.recall import recalled
from coordinator.policies.setbacks import loss_gpu_s
from coordinator.policies.snapshot import ClusterSnapshot, JobView


class QosKnobs(Struct, frozen=True, kw_only=True):
    """What can be turned.

    margin: what is predicted to be left counts so many times. tick_s: predictions are looked at so
        often while a job with a deadline is there.
    slack_ratio: a job that would end earlier than its deadline by this part of its window gives
        workers back while others wait. resize_every_s: at most one resize of a job in so long.
    resize_cost_s: running time that a resize must save.
    fills_idle: workers that nobody waits for go to running jobs, by deadline.
    """

    margin: Margin = 1.1
    tick_s: Period = 30.0
    slack_ratio: Ratio = 0.2
    resize_every_s: Seconds = 60.0
    resize_cost_s: Seconds = 5.0
    fills_idle: bool = True


class _Wish(Struct, kw_only=True):
    """One job in a pass. need: fewest workers that meet its deadline; None: none do, or it has no
    deadline. workers: what it gets."""

    job: JobView
    time: Prediction
    need: int | None
    gpus_each: int
    factor: int
    workers: int = 0
    why: str = ""

    @property
    def is_urgent(self) -> bool:
        """Class A of the reconstruction: it has a deadline that can be met."""
        return self.need is not None

    @property
    def rank(self) -> tuple[float, float, float, str]:
        """By deadline, ties by laxity; who has none, or misses it in any case, comes last."""
        job = self.job
        deadline_s = inf if job.deadline_at_s is None or not self.is_urgent else job.deadline_at_s
        return (deadline_s, self.time.laxity_s(job), job.submitted_at_s, job.job_id)

    @property
    def present(self) -> int:
        """Workers that it has, in workers of the reference type."""
        return present_workers(self.job) // self.factor


class _Pass:
    """One GPU type."""

    def __init__(self, knobs: QosKnobs, snapshot: ClusterSnapshot, pool: Pool, steps: Steps):
        self._knobs = knobs
        self._now_s = snapshot.now_s
        self._gpus = pool.gpus
        self._kind = pool.gpu_type
        wishes = [self._wish(job, steps) for job in pool.jobs]
        self.wishes = sorted(wishes, key=lambda wish: wish.rank)

    def _wish(self, job: JobView, steps: Steps) -> _Wish:
        time = Prediction(job, steps, self._now_s, self._knobs.margin)
        factor = job.gpu.worker_multiplier.get(self._kind, 1)
        each = job.gpus_per_worker * factor
        most = min(job.workers.max, self._gpus // each)
        need = None if job.deadline_at_s is None else time.need(job.deadline_at_s, most)
        return _Wish(job=job, time=time, need=need, gpus_each=each, factor=factor)

    def grants(self) -> list[Grant]:
        """Who runs with how many workers, in order of precedence."""
        admitted = self._admitted()
        left = self._gpus - sum((wish.need or 0) * wish.gpus_each for wish in admitted)
        for wish in admitted:
            wish.workers = wish.need or 0
            wish.why = self._in_time(wish)
        left = self._keep(left, is_first=True)
        names = {wish.job.job_id for wish in admitted}
        rest = [wish for wish in self.wishes if wish.job.job_id not in names]
        # Who can still be in time first; of the others, who runs goes on.
        rest.sort(key=lambda w: not w.is_urgent and (1 + (w.job.state == JobState.PENDING)))
        for wish in rest:
            base = wish.job.workers.min
            if base * wish.gpus_each <= left:
                wish.workers, wish.why = base, self._leftover(wish)
                left -= base * wish.gpus_each
        waits = any(wish.workers == 0 for wish in rest)
        left = self._keep(left, is_first=False)
        if not waits and self._knobs.fills_idle:
            self._fill(left)
        return [
            Grant(
                job=wish.job,
                workers=wish.workers * wish.factor,
                gpu_type=self._kind,
                reason=f"{wish.workers} workers: {wish.why}",
            )
            for wish in (*admitted, *rest)
            if wish.workers > 0
        ]

    def _admitted(self) -> list[_Wish]:
        """The most jobs that can be in time together: Moore and Hodgson, with GPUs for time.

        By deadline; when one more does not fit, the one goes that gives the most GPU-time free,
        whether it runs or waits: who leaves less room to others is in time in its place.
        """
        chosen: list[_Wish] = []
        used = 0
        for wish in self.wishes:
            if wish.need is None:
                continue
            chosen.append(wish)
            used += wish.need * wish.gpus_each
            while used > self._gpus:
                out = max(chosen, key=lambda each: (self._frees_gpu_s(each), each.rank))
                chosen.remove(out)
                used -= (out.need or 0) * out.gpus_each
        return chosen

    def _frees_gpu_s(self, wish: _Wish) -> float:
        """GPU-seconds that it still needs, less those that a stop would throw away."""
        need = wish.need or 0
        left_gpu_s = need * wish.gpus_each * wish.time.left_s(max(1, need))
        if wish.job.state == JobState.PENDING:
            return left_gpu_s
        return left_gpu_s - loss_gpu_s(wish.job, self._now_s)

    def _keep(self, left: int, *, is_first: bool) -> int:
        """Running jobs keep what they have beyond their need, after those that wait for it.

        is_first: before those; so do only who was resized a moment ago, and who is not early
            enough that it would be worth another resize.
        """
        for wish in sorted(self.wishes, key=lambda each: each.rank):
            more = wish.present - wish.workers
            if wish.workers == 0 or more <= 0 or wish.job.state == JobState.PENDING:
                continue
            if is_first and not self._rests(wish.job) and self._is_early(wish):
                continue
            kept = min(more, left // wish.gpus_each)
            wish.workers += kept
            left -= kept * wish.gpus_each
        return left

    def _fill(self, left: int) -> None:
        for wish in self.wishes:
            job = wish.job
            if wish.workers == 0 or self._rests(job):
                continue
            most = min(job.workers.max, wish.workers + left // wish.gpus_each)
            best = wish.time.fastest(wish.workers, most)
            saved_s = wish.time.left_s(wish.workers) - wish.time.left_s(best)
            if best > wish.workers and saved_s > self._knobs.resize_cost_s:
                left -= (best - wish.workers) * wish.gpus_each
                wish.workers = best
                wish.why += ", and nobody waits for the rest"

    def _rests(self, job: JobView) -> bool:
        last_s = job.last_resized_at_s
        return last_s is not None and self._now_s < last_s + self._knobs.resize_every_s

    def _is_early(self, wish: _Wish) -> bool:
        deadline_s = wish.job.deadline_at_s
        if deadline_s is None:
            return True
        window_s = deadline_s - wish.job.submitted_at_s
        early_s = deadline_s - self._now_s - wish.time.left_s(max(1, wish.present))
        return early_s > self._knobs.slack_ratio * window_s

    def _in_time(self, wish: _Wish) -> str:
        return (
            f"{wish.time.left_s(wish.workers):.0f} s predicted by {wish.time.source}, deadline in "
            f"{(wish.job.deadline_at_s or 0.0) - self._now_s:.0f} s"
        )

    def _leftover(self, wish: _Wish) -> str:
        if wish.job.deadline_at_s is None:
            return "no deadline: on what jobs with deadlines leave"
        return "its deadline cannot be met with the others': on what they leave"


def spread(floor: Floor, job: JobView, gpu_type: str, count: int) -> tuple[Placement, ...]:
    """One node where the gang fits, the fullest such; else the emptiest nodes first."""
    rooms = floor.rooms(gpu_type, job.gpus_per_worker)
    if any(room >= count for room in rooms.values()):
        whole = {name: room for name, room in rooms.items() if room >= count}
        return fill(whole, sorted(whole, key=lambda name: (floor.free[name], name)), count)
    order: list[NodeName] = sorted(rooms, key=lambda name: (-floor.free[name], name))
    return fill(rooms, order, count)


def _all(knobs: QosKnobs, snapshot: ClusterSnapshot, memory: Memory) -> tuple[list[_Pass], Memory]:
    memory = refitted(memory, snapshot.jobs)
    steps = memory.steps
    floor = Floor(snapshot)
    return [_Pass(knobs, snapshot, pool, steps) for pool in pools(snapshot, floor)], memory


def _allocate(knobs: QosKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    passes, after = _all(knobs, snapshot, recalled(memory, Memory))
    grants = [grant for each in passes for grant in each.grants()]
    plan = carry_out(snapshot, grants, place=spread)
    wakes_s = [] if plan.wake_at_s is None else [plan.wake_at_s]
    if any(job.deadline_at_s is not None for job in snapshot.jobs):
        wakes_s.append(snapshot.now_s + knobs.tick_s)
    return Allocation(
        decisions=plan.decisions,
        memory=msgspec.msgpack.encode(after),
        wake_at_s=min(wakes_s, default=None),
    )


def _hold(knobs: QosKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[Hold, ...]:
    passes, _ = _all(knobs, snapshot, recalled(memory, Memory))
    grants = [grant for each in passes for grant in each.grants()]
    plan = carry_out(snapshot, grants, place=spread)
    waiting = (wish for each in passes for wish in each.wishes if wish.workers == 0)
    notes = {wish.job.job_id: _why(wish) for wish in waiting}
    return answers(snapshot, plan.decisions, plan.holds, notes)


def _why(wish: _Wish) -> str:
    if wish.need is None and wish.job.deadline_at_s is not None:
        return f"no size meets its deadline ({wish.time.source}); it waits for idle GPUs"
    if wish.need is None:
        return "it has no deadline; jobs with deadlines leave no room for its base gang"
    return (
        f"it needs {wish.need} workers to be in time ({wish.time.source}); jobs with earlier "
        "deadlines or less GPU-time hold them"
    )


QOS: Policy = joint(
    "qos",
    "most jobs in time: deadlines by predicted training time, autoscaling",
    knobs=QosKnobs(),
    allocate=_allocate,
    hold=_hold,
    parts=Parts(
        order="deadline, laxity", size="fewest workers in time", place="one node, else spread"
    ),
)
