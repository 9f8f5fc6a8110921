"""What each job needs to be in time on the GPUs of one type, and the most that can be together.

Must not know who gets what beyond that, nor nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from msgspec import Struct

from common.model import JobState
from coordinator.policies.deadlines.predict import Prediction, Steps
from coordinator.policies.floor import Pool, present_workers
from coordinator.policies.setbacks import loss_gpu_s
from coordinator.policies.snapshot import JobView


class Wish(Struct, kw_only=True):
    """One job in a pass. need: fewest workers that meet its deadline; None: none do, or it has no
    deadline. workers: what it gets. gpus_each, factor: GPUs of a worker of its reference type here,
    and how many workers it takes for one of those.
    """

    job: JobView
    time: Prediction
    need: int | None
    gpus_each: int
    factor: int
    workers: int = 0
    why: str = ""

    @property
    def is_urgent(self) -> bool:
        """It has a deadline that can be met."""
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

    def frees_gpu_s(self, now_s: float) -> float:
        """GPU-seconds that it still needs, less those that a stop would throw away."""
        need = self.need or 0
        left_gpu_s = need * self.gpus_each * self.time.left_s(max(1, need))
        if self.job.state == JobState.PENDING:
            return left_gpu_s
        return left_gpu_s - loss_gpu_s(self.job, now_s)


def wish_of(job: JobView, pool: Pool, steps: Steps, *, now_s: float, margin: float) -> Wish:
    """What a job needs of a pool, with predictions taken so many times."""
    factor = job.gpu.worker_multiplier.get(pool.gpu_type, 1)
    time = Prediction(job, steps, now_s, margin, gpu_type=pool.gpu_type, factor=factor)
    each = job.gpus_per_worker * factor
    most = min(job.workers.max, pool.gpus // each)
    need = None if job.deadline_at_s is None else time.need(job.deadline_at_s, most)
    return Wish(job=job, time=time, need=need, gpus_each=each, factor=factor)


def most_in_time(wishes: Iterable[Wish], gpus: int, now_s: float) -> list[Wish]:
    """The most jobs that can be in time together, of wishes in order of rank.

    Moore and Hodgson (Management Science 15(1), 1968), with GPUs for time: by deadline; when one
    more does not fit, the one goes that gives the most GPU-time free, whether it runs or waits: who
    leaves less room to others is in time in its place.
    """
    chosen: list[Wish] = []
    used = 0
    for wish in wishes:
        if wish.need is None:
            continue
        chosen.append(wish)
        used += wish.need * wish.gpus_each
        while used > gpus:
            out = max(chosen, key=lambda each: (each.frees_gpu_s(now_s), each.rank))
            chosen.remove(out)
            used -= (out.need or 0) * out.gpus_each
    return chosen
