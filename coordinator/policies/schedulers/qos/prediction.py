"""Training time by worker count, from measured step times: a step takes a + b / workers. Pure.

Non-negative least squares over what was seen of a model (IJCNN 2019 predicts training time; this
form is Optimus', EuroSys 2018, section 3.2, reduced to data-parallel workers).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Annotated

from msgspec import Meta, Struct

from common.profile import JobProfile
from coordinator.policies.contract.snapshot import JobView

MODELS_KEPT, SIZES_KEPT = 256, 16

Margin = Annotated[float, Meta(ge=1, le=10)]
"""The predicted rest counts this many times."""


class Sample(Struct, frozen=True, array_like=True):
    """Seconds per step with a number of workers of one GPU type; the newest measurement counts."""

    workers: int
    step_s: float


Steps = Mapping[str, tuple[Sample, ...]]
"""By model and batch, else the job itself; and by GPU type."""


class Memory(Struct, frozen=True, array_like=True):
    """The memory of step times; the latest models last."""

    steps: dict[str, tuple[Sample, ...]] = {}


@lru_cache(maxsize=4096)
def _useful(profile: JobProfile, base: int, most: int) -> int:
    """The largest count up to which each worker more makes a job faster, by its profile."""
    if not profile.speedup:
        return most
    rising = pairwise(range(base, most + 1))
    return next((low for low, high in rising if profile.speed(high) <= profile.speed(low)), most)


def key_of(job: JobView, gpu_type: str) -> str:
    """Jobs of one model, batch and worker size share measurements on GPUs of one type."""
    model = job.profile.model or job.job_id
    return f"{model}/{job.profile.batch_size or 0}/{job.gpus_per_worker}/{gpu_type}"


def refitted(memory: Memory, jobs: Iterable[JobView]) -> Memory:
    """The step times that running jobs measured since; the same object where none did.

    Beyond the models that are kept none goes that trains now before one that does not. Of these it
    is the one whose step times changed longest ago, as it stood when something was last noted.
    """
    steps = dict(memory.steps)
    for job in jobs:
        if job.steps.step_time_s is None or not job.steps.workers or not job.steps.gpu_type:
            continue
        key, sample = (
            key_of(job, job.steps.gpu_type),
            Sample(job.steps.workers, job.steps.step_time_s),
        )
        seen = steps.pop(key, ())
        if sample in seen:
            steps[key] = seen
            continue
        others = (each for each in seen if each.workers != sample.workers)
        steps[key] = (*others, sample)[-SIZES_KEPT:]
    while len(steps) > MODELS_KEPT:
        del steps[next(iter(steps))]
    return memory if steps == memory.steps else Memory(steps)


def fit(samples: Iterable[Sample]) -> tuple[float, float]:
    """(a, b) of a + b / workers, neither below zero, by least squares.

    With one size alone all of the step is taken to shrink with workers: a is 0. Where the best
    unbounded pair has a negative part, the best with that part at zero is the bounded optimum.
    """
    seen = tuple(samples)
    count = len(seen)
    xs = [1.0 / sample.workers for sample in seen]
    ys = [sample.step_s for sample in seen]
    sum_x, sum_y = sum(xs), sum(ys)
    sum_xx = sum(x * x for x in xs)
    sum_xy = sum(x * y for x, y in zip(xs, ys, strict=True))
    spread = count * sum_xx - sum_x * sum_x
    if count < 2 or spread <= 1e-12 * sum_xx:
        return 0.0, sum_xy / sum_xx
    b = (count * sum_xy - sum_x * sum_y) / spread
    a = (sum_y - b * sum_x) / count
    if a < 0:
        return 0.0, sum_xy / sum_xx
    if b < 0:
        return sum_y / count, 0.0
    return a, b


class Prediction:
    """How long a job still takes by worker count, times a margin.

    By measured step times where they are of at least two sizes, or the job has no profile; else by
    its profile, else in proportion. source: which of these.

    Args:
        gpu_type: where it is to run: only measurements there show how fast it is.
        factor: workers there that stand for one of its reference type, in which all are counted.
    """

    def __init__(
        self,
        job: JobView,
        steps: Steps,
        now_s: float,
        margin: float,
        *,
        gpu_type: str,
        factor: int = 1,
    ) -> None:
        self._job = job
        self._now_s = now_s
        self._margin = margin
        self._factor = factor
        self._left_s: dict[int, float] = {}
        self._is_measured_here = bool(job.steps.workers) and job.steps.gpu_type == gpu_type
        samples = steps.get(key_of(job, gpu_type), ())
        has_fit = len(samples) >= 2 or (len(samples) == 1 and not job.profile.speedup)
        self._fit = fit(samples) if has_fit else None
        self.source = "its profile" if job.profile.speedup else job.estimate.source
        if self._fit is not None:
            self.source = f"step times of {len(samples)} sizes"

    def left_s(self, workers: int) -> float:
        """Seconds left with this number of workers, with the margin."""
        found = self._left_s.get(workers)
        if found is None:
            found = self._left_s[workers] = self._reckoned_s(workers)
        return found

    def _reckoned_s(self, workers: int) -> float:
        job = self._job
        if self._fit is None:
            return self._margin * job.estimate_left_s(self._now_s) / job.rate(workers)
        if job.steps.steps_left is not None and self._is_measured_here:
            since_s = self._now_s - job.as_of_s if job.progress.computing_gpus else 0.0
            here_s = job.steps.step_time_s or 0.0
            left_s = max(0.0, job.steps.steps_left * here_s - since_s)
            here = job.steps.workers / self._factor
            return self._margin * left_s * self._step(workers) / self._step(here)
        # The remaining work is known only in work of its base gang.
        base_s = job.estimate_left_s(self._now_s) / job.workers.min
        return self._margin * base_s * self._step(workers) / self._step(job.workers.min)

    def expected_s(self, workers: int) -> float:
        """The same without the margin: when it is done if all goes as predicted."""
        return self.left_s(workers) / self._margin

    def _step(self, workers: float) -> float:
        a, b = self._fit or (0.0, 1.0)
        return a + b / (workers * self._factor)

    def need(self, deadline_s: float, most: int) -> int | None:
        """The fewest workers that meet a deadline; None: none up to `most` do.

        With the margin; where none do, those that are in time if all goes just as predicted: who
        can still be in time is not given up for want of a margin.
        """
        window_s = deadline_s - self._now_s
        least = self._job.workers.min
        counts = range(least, self.fastest(least, most) + 1) if most >= least else range(0)
        for allowed_s in (window_s, window_s * self._margin):
            at = bisect_left(counts, True, key=lambda count: self.left_s(count) <= allowed_s)
            if at < len(counts):
                return counts[at]
        return None

    def counts_as(self, count: int, deadline_s: float) -> float:
        """The factor by which the time until a deadline counts, if this number of workers is the
        fewest that meets it.

        More workers are never slower. So they are also the fewest for any earlier deadline that
        they still meet.
        """
        return 1.0 if self.left_s(count) <= deadline_s - self._now_s else self._margin

    def fastest(self, least: int, most: int) -> int:
        """The count from which on one more worker is no gain."""
        if self._fit is not None:
            return most if self._fit[1] > 0 else least
        return max(least, min(most, _useful(self._job.profile, self._job.workers.min, most)))

    def laxity_s(self, job: JobView) -> float:
        """Seconds between its predicted end with its base gang and its deadline; 0 without one."""
        if job.deadline_at_s is None:
            return 0.0
        return job.deadline_at_s - self._now_s - self.left_s(job.workers.min)
