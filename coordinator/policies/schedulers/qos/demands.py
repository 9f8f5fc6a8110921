"""Demands: what each job needs to meet its deadline on one GPU type, and the possible maximum."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.contract.free_gpus import present_workers
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.parts.pooling import Pool, stays
from coordinator.policies.parts.restart_cost import loss_gpu_s, loss_s
from coordinator.policies.schedulers.qos.prediction import Prediction, Steps
from coordinator.policies.schedulers.qos.timeline import Piece, Plan, Timeline

Rank = tuple[float, float, float, str]
Gives = tuple[float, Rank]

SHORT_S = 1e-3
"""A plan that is shorter may be none at a later instant, for rounding."""


class Wish(Struct, kw_only=True):
    """One job in a pass. need: fewest workers that meet its deadline; None: none do, or it has no
    deadline. most: workers that it can have at all. held: those of its base gang where it runs and
    may not be stopped: no plan takes their GPUs. workers: what it gets. gpus_each, factor: GPUs of
    a worker of its reference type here, and how many workers it takes for one of those.
    """

    job: JobView
    time: Prediction
    need: int | None
    most: int
    gpus_each: int
    factor: int
    held: int = 0
    workers: int = 0
    why: str = ""

    @property
    def is_urgent(self) -> bool:
        """It has a deadline that can be met."""
        return self.need is not None

    @property
    def rank(self) -> Rank:
        """By deadline, ties by laxity; jobs without one, or that miss it in any case, come last."""
        job = self.job
        deadline_s = inf if job.deadline_at_s is None or not self.is_urgent else job.deadline_at_s
        return (deadline_s, self.time.laxity_s(job), job.submitted_at_s, job.job_id)

    @property
    def present(self) -> int:
        """Workers that it has, in workers of the reference type."""
        return present_workers(self.job) // self.factor

    @property
    def runs(self) -> bool:
        """It has workers now."""
        return self.job.state != JobState.PENDING

    def plan(self, begins_s: float, now_s: float) -> Plan | None:
        """The fewest workers that meet its deadline from an instant on, until it is done as
        predicted; None: none do. Who runs and does not begin now has been stopped, or grows then:
        what its base gang does until then is not counted on.
        """
        late_s = begins_s - now_s
        if late_s > 0:
            late_s += self.lost_s(now_s)
        need = self.need
        if late_s > 0 and need is not None:
            need = self.time.need((self.job.deadline_at_s or 0.0) - late_s, self.most)
        if need is None:
            return None
        end_s = now_s + late_s + self.time.expected_s(need)
        return (Piece(begins_s, end_s, need - self.held),)

    def lost_s(self, now_s: float) -> float:
        """Seconds of repeated work if it does not get its present need."""
        return loss_s(self.job, now_s) if self.runs and not self.held else 0.0

    def frees_gpu_s(self, now_s: float) -> float:
        """GPU-seconds that it still needs, less those that a stop would throw away."""
        need = self.need or self.held
        gives = (need - self.held) * self.gpus_each
        left_gpu_s = gives * self.time.left_s(max(1, need))
        if not self.runs or self.held:
            return left_gpu_s
        return left_gpu_s - loss_gpu_s(self.job, now_s)


def wish_of(
    job: JobView,
    pool: Pool,
    steps: Steps,
    *,
    now_s: float,
    margin: float,
    most_gpus: int | None = None,
) -> Wish:
    """The need of a job from a pool, with predictions multiplied by a factor.

    A pre-run is due when its gang has to begin, with as many workers as it can have, to be in time.

    most_gpus: that it may have; None: all of the pool.
    """
    job = _due_before_gang(job, margin)
    factor = pool.factor(job)
    time = Prediction(job, steps, now_s, margin, gpu_type=pool.gpu_type, factor=factor)
    each = job.gpus_per_worker * factor
    most = min(job.workers.max, (pool.gpus if most_gpus is None else most_gpus) // each)
    need = None if job.deadline_at_s is None else time.need(job.deadline_at_s, most)
    held = job.workers.min if stays(job) else 0
    return Wish(
        job=job, time=time, need=need, most=most, gpus_each=each, factor=factor, held=held,
        workers=held,
    )  # fmt: skip


def _due_before_gang(job: JobView, margin: float) -> JobView:
    behind = job.behind
    if behind is None or job.deadline_at_s is None:
        return job
    least = behind.workers.min
    rate = job.profile.rate(job.profile.fastest(least, behind.workers.max), base=least)
    return replace(job, deadline_at_s=job.deadline_at_s - margin * behind.work_s / rate)


def most_in_time(
    wishes: Iterable[Wish], gpus: int, now_s: float, *, stops: bool = True
) -> tuple[list[Wish], list[Wish]]:
    """The most jobs that can be in time together, of demands in order of rank: those that have to
    run now, and those that can wait until others end.

    A running job goes on, unless more jobs are in time without it: a stop that lets no more in does
    not help.

    stops: whether a job that is in time may be stopped for others now.
    """
    urgent = [wish for wish in wishes if wish.is_urgent]
    running = [wish for wish in urgent if wish.runs]
    best = Line(gpus, now_s)
    best.add(running)
    best.is_settled = True
    best.add([wish for wish in urgent if not wish.runs])
    if stops and running and len(best.plans) < len(urgent):
        other = Line(gpus, now_s)
        other.add(urgent)
        if len(other.plans) > len(best.plans):
            best = other
    chosen = [wish for wish in urgent if wish.job.job_id in best.plans]
    starts_s = {name: plan[0].start_s for name, plan in best.plans.items()}
    now = [wish for wish in chosen if starts_s[wish.job.job_id] <= now_s]
    return now, [wish for wish in chosen if starts_s[wish.job.job_id] > now_s]


class Line:
    """The jobs in time, and when each begins: by deadline, each as early as those before it allow.

    Moore and Hodgson (Management Science 15(1), 1968), with GPU-time for time: when one more does
    not fit by its deadline, the one that frees the most GPU-time makes room for it, if that is room
    enough. is_settled: no earlier one makes room for others.
    """

    def __init__(self, gpus: int, now_s: float) -> None:
        self._free = Timeline(now_s, gpus)
        self._now_s = now_s
        # jobs that make room for others, the last first
        self._movable: list[tuple[Gives, Wish]] = []
        self._gives: dict[str, Gives] = {}
        self.plans: dict[str, Plan] = {}
        self.is_settled = False

    def add(self, wishes: Iterable[Wish]) -> None:
        """As many more as fit, in their order."""
        if self.is_settled:
            self._movable.clear()
        for wish in wishes:
            if self._place(wish) or not self._movable or self._movable[-1][0] < self._given(wish):
                continue
            _, out = self._movable.pop()
            plan = self.plans.pop(out.job.job_id)
            self._free.give(plan, out.gpus_each)
            if not self._place(wish):
                self._take(out, plan)

    def _given(self, wish: Wish) -> Gives:
        """GPU-time that it gives free where it makes room; of equals the last by rank does."""
        name = wish.job.job_id
        if name not in self._gives:
            self._gives[name] = (wish.frees_gpu_s(self._now_s), wish.rank)
        return self._gives[name]

    def _place(self, wish: Wish) -> bool:
        """At the first instant from which its GPUs are free until it is done."""
        at_s: float | None = self._free.start_s
        while at_s is not None:
            plan = wish.plan(at_s, self._now_s)
            if plan is None:
                return False
            if self._free.has_room(plan, wish.gpus_each):
                self._take(wish, plan)
                return True
            at_s = self._next_s(wish, plan[0])
        return False

    def _next_s(self, wish: Wish, piece: Piece) -> float | None:
        """The next instant at which one that has no room may have it; None: there is none.

        With as many workers it ends the later the later it begins, and has no room before the step
        that blocks it is over. From where it needs more it may be done before that step begins.
        """
        if piece.end_s - piece.start_s < SHORT_S:
            return self._free.first_s(piece.start_s, lambda _: True)
        same = _Same(wish, piece, self._now_s)
        gpus = piece.workers * wish.gpus_each
        begins_s = self._free.room_s(piece.start_s, gpus, same.until_s)
        return self._free.first_s(piece.start_s, same.is_over) if begins_s is None else begins_s

    def _take(self, wish: Wish, plan: Plan) -> None:
        self._free.take(plan, wish.gpus_each)
        self.plans[wish.job.job_id] = plan
        insort(self._movable, (self._given(wish), wish))


class _Same:
    """One job with as many workers as in a plan, if it begins then or later.

    They are the fewest that meet its deadline: so the later it begins the later it ends.
    """

    def __init__(self, wish: Wish, piece: Piece, now_s: float) -> None:
        self._now_s = now_s
        self._lost_s = wish.lost_s(now_s)
        self._deadline_s = wish.job.deadline_at_s or 0.0
        workers = piece.workers + wish.held
        self._left_s = wish.time.left_s(workers)
        self._lasts_s = wish.time.expected_s(workers)
        due_s = self._deadline_s - self._late_s(piece.start_s)
        self._counts_as = wish.time.counts_as(workers, due_s)

    def until_s(self, begins_s: float) -> float | None:
        """When it ends; None: so late it needs others."""
        late_s = self._late_s(begins_s)
        if self._left_s > (self._deadline_s - late_s - self._now_s) * self._counts_as:
            return None
        return self._now_s + late_s + self._lasts_s

    def is_over(self, begins_s: float) -> bool:
        """Whether it needs others so late."""
        return self.until_s(begins_s) is None

    def _late_s(self, begins_s: float) -> float:
        late_s = begins_s - self._now_s
        return late_s + self._lost_s if late_s > 0 else late_s
