"""Deadlines by prediction and autoscaling: a reconstruction of the IJCNN 2019 framework.

A job states its deadline and the range of workers it may use (Xing et al., IJCNN 2019; only its
abstract is public, so each rule here is ours). Training time is predicted from measured step times,
refitted online. Jobs are admitted by deadline with the rule of Moore and Hodgson (Management
Science 15(1), 1968). A job that would miss its deadline grows; an early one shrinks while others
wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import inf

import msgspec
from msgspec import Struct

from common.model import JobState, NodeName, Ratio
from coordinator.policies.contract.decisions import Allocation, PendingReason, Placement, earliest
from coordinator.policies.contract.free_gpus import FreeGpus, fill
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.knobs import Period, Seconds
from coordinator.policies.parts.blockers_for_all import answers
from coordinator.policies.parts.grants import Grant, carry_out
from coordinator.policies.parts.memory import recalled
from coordinator.policies.parts.pooling import Pool, by_deadline, pools
from coordinator.policies.policy import Parts, Policy, joint
from coordinator.policies.schedulers.qos.demands import Wish, most_in_time, wish_of
from coordinator.policies.schedulers.qos.prediction import Margin, Memory, Steps, refitted
from coordinator.policies.schedulers.qos.reach import Reach
from coordinator.policies.schedulers.qos.reasons import stopped_for
from coordinator.policies.schedulers.qos.sizes import least_in_time


class QosKnobs(Struct, frozen=True, kw_only=True):
    """Knobs of `qos`.

    margin: factor on the predicted remaining time.
    tick_s: time between two checks of the predictions while a job has a deadline.
    slack_ratio: a job that would end before its deadline by this share of its window gives workers
        back while other jobs wait.
    resize_every_s: at most one resize of a job in this time, unless a deadline needs it; a job
        that is in time is not preempted for others within this time after a start or a resize.
    resize_cost_s: running time in seconds that a resize must save.
    fills_idle: give GPUs that no waiting job can use to running jobs, by deadline.
    """

    margin: Margin = 1.1
    tick_s: Period = 30.0
    slack_ratio: Ratio = 0.2
    resize_every_s: Seconds = 60.0
    resize_cost_s: Seconds = 5.0
    fills_idle: bool = True


class _Pass:
    """One GPU type."""

    def __init__(
        self, knobs: QosKnobs, snapshot: ClusterSnapshot, pool: Pool, steps: Steps, reach: Reach
    ) -> None:
        self._knobs = knobs
        self._reach = reach
        self._now_s = snapshot.now_s
        kept = pool.kept_gpus()
        self._gpus = pool.gpus - sum(kept.values())
        self._kind = pool.gpu_type
        wishes = [
            wish_of(
                job,
                pool,
                steps,
                now_s=snapshot.now_s,
                margin=knobs.margin,
                most_gpus=reach.most(job, 1, self._gpus + kept.get(job.job_id, 0)),
            )
            for job in pool.jobs
        ]
        self.wishes = sorted(wishes, key=lambda wish: wish.rank)
        self._later: list[Wish] = []

    def grants(self) -> list[Grant]:
        """The jobs that run with their worker counts, in order of precedence."""
        admitted, self._later = most_in_time(
            self.wishes, self._gpus, self._now_s, stops=not any(map(self._is_new, self.wishes))
        )
        left = self._gpus
        for wish in admitted:
            # Others of its tenant may have taken what that had left for it.
            most = min(wish.need or 0, self._most(wish, left))
            if most >= wish.job.workers.min:
                left -= self._give(wish, most)
        left = self._keep(admitted, left, is_first=True)
        names = {wish.job.job_id for wish in admitted}
        rest = [wish for wish in self.wishes if wish.job.job_id not in names]
        # Jobs that can still be in time first; of the others, running jobs first.
        rest.sort(key=self._urgency)
        for wish in rest:
            base = wish.job.workers.min
            if base <= self._most(wish, left):
                left -= self._give(wish, base)
                wish.why = self._leftover(wish)
        waits = any(wish.workers == 0 for wish in rest)
        left = self._keep(self.wishes, left, is_first=False)
        if not waits and self._knobs.fills_idle:
            self._fill(left)
        for wish in admitted:
            wish.why = self._in_time(wish) + wish.why
        return [
            Grant(
                job=wish.job,
                workers=wish.workers * wish.factor,
                gpu_type=self._kind,
                reason=f"{counted(wish.workers, 'worker')}: {wish.why}",
            )
            for wish in (*admitted, *rest)
            if wish.workers > 0
        ]

    def _most(self, wish: Wish, left: int) -> int:
        """Workers that it can have where a number of GPUs is left, within its tenant's limit."""
        gpus = left + wish.workers * wish.gpus_each
        return self._reach.most(wish.job, wish.gpus_each, gpus)

    def _give(self, wish: Wish, workers: int) -> int:
        """Give it this number of workers in all; the GPUs come from the rest."""
        gpus = (workers - wish.workers) * wish.gpus_each
        wish.workers = workers
        self._reach.take(wish.job, workers * wish.gpus_each)
        return gpus

    def _urgency(self, wish: Wish) -> tuple[bool, bool]:
        return not wish.is_urgent, not wish.is_urgent and wish.job.state == JobState.PENDING

    def _keep(self, wishes: Iterable[Wish], left: int, *, is_first: bool) -> int:
        """Running jobs keep what they have beyond their need, after those that wait for it.

        is_first: before those; so do only who was resized a moment ago, and who is not early
            enough that it would be worth another resize.
        """
        for wish in sorted(wishes, key=lambda each: each.rank):
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
            most = min(job.workers.max, self._most(wish, left))
            best = wish.time.fastest(wish.workers, most)
            saved_s = wish.time.left_s(wish.workers) - wish.time.left_s(best)
            if best > wish.workers and saved_s > self._knobs.resize_cost_s:
                left -= self._give(wish, best)
                wish.why += ", and no job waits for the rest"

    def _rests(self, job: JobView) -> bool:
        last_s = job.resizes.latest_at_s
        return last_s is not None and self._now_s < last_s + self._knobs.resize_every_s

    def _is_new(self, wish: Wish) -> bool:
        """It started or was resized so recently that a job in time is not moved again: otherwise
        two equally good orders would alternate without end.
        """
        job = wish.job
        if not wish.runs:
            return False
        instants = (job.attempt.started_at_s, job.resizes.latest_at_s)
        since_s = max((at_s for at_s in instants if at_s is not None), default=-inf)
        return self._now_s < since_s + self._knobs.resize_every_s

    def _is_early(self, wish: Wish) -> bool:
        deadline_s = wish.job.deadline_at_s
        if deadline_s is None:
            return True
        window_s = deadline_s - wish.job.submitted_at_s
        early_s = deadline_s - self._now_s - wish.time.left_s(max(1, wish.present))
        return early_s > self._knobs.slack_ratio * window_s

    def _in_time(self, wish: Wish) -> str:
        if wish.workers == 0:
            return ""
        return (
            f"{wish.time.left_s(wish.workers):.0f} s predicted by {wish.time.source}, deadline in "
            f"{(wish.job.deadline_at_s or 0.0) - self._now_s:.0f} s"
        )

    def _leftover(self, wish: Wish) -> str:
        if wish.job.deadline_at_s is None:
            return "no deadline: on GPUs that jobs with deadlines leave"
        if any(wish is each for each in self._later):
            return (
                "it can wait and meet its deadline: for now on GPUs that jobs with less time leave"
            )
        return "its deadline cannot be met with those of others: on the GPUs that they leave"


def _all(knobs: QosKnobs, snapshot: ClusterSnapshot, memory: Memory) -> tuple[list[_Pass], Memory]:
    memory = refitted(memory, snapshot.jobs)
    steps = memory.steps
    floor = FreeGpus(snapshot)
    reach = Reach(snapshot)
    size = partial(least_in_time, now_s=snapshot.now_s, margin=knobs.margin)
    found = pools(snapshot, floor, order=by_deadline, size=size, resizes=True)
    return [_Pass(knobs, snapshot, pool, steps, reach) for pool in found], memory


def _allocate(knobs: QosKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    passes, after = _all(knobs, snapshot, recalled(memory, Memory))
    grants = [grant for each in passes for grant in each.grants()]
    plan = carry_out(snapshot, grants, place=_one_node_or_spread, why=stopped_for(snapshot))
    is_ticking = any(job.deadline_at_s is not None for job in snapshot.jobs)
    tick_s = snapshot.now_s + knobs.tick_s if is_ticking else None
    return Allocation(
        decisions=plan.decisions,
        memory=msgspec.msgpack.encode(after),
        wake_at_s=earliest(plan.wake_at_s, tick_s),
    )


def _hold(knobs: QosKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    passes, _ = _all(knobs, snapshot, recalled(memory, Memory))
    grants = [grant for each in passes for grant in each.grants()]
    plan = carry_out(snapshot, grants, place=_one_node_or_spread)
    waiting = (wish for each in passes for wish in each.wishes if wish.workers == 0)
    notes = {wish.job.job_id: _why(wish) for wish in sorted(waiting, key=lambda wish: wish.rank)}
    return answers(snapshot, plan.decisions, plan.holds, notes)


def _one_node_or_spread(
    floor: FreeGpus, job: JobView, gpu_type: str, count: int
) -> tuple[Placement, ...]:
    """The fullest node where the gang fits whole; else the emptiest nodes first."""
    rooms = floor.rooms(gpu_type, job.gpus_per_worker)
    if any(room >= count for room in rooms.values()):
        whole = {name: room for name, room in rooms.items() if room >= count}
        return fill(whole, sorted(whole, key=lambda name: (floor.free[name], name)), count)
    order: list[NodeName] = sorted(rooms, key=lambda name: (-floor.free[name], name))
    return fill(rooms, order, count)


def _why(wish: Wish) -> str:
    if wish.need is None and wish.job.deadline_at_s is not None:
        return f"no size meets its deadline ({wish.time.source}); it waits for idle GPUs"
    if wish.need is None:
        return "it has no deadline; jobs before it leave no room for its base gang"
    return (
        f"it needs {counted(wish.need, 'worker')} to meet its deadline ({wish.time.source}); "
        "jobs with earlier deadlines or less GPU-time hold them"
    )


QOS: Policy = joint(
    "qos",
    "most jobs within their deadlines, by predicted training time, with autoscaling",
    knobs=QosKnobs(),
    allocate=_allocate,
    pending_reasons=_hold,
    parts=Parts(
        order="deadline, laxity", size="fewest workers in time", place="one node, else spread"
    ),
)
