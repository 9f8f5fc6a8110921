"""How a job runs, as far as its file states it: model, scaling, cost of spreading or sharing. Pure.

Everything is optional: a policy that needs a missing value documents what it assumes instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from msgspec import Meta, Struct

Rate = Annotated[float, Meta(gt=0, le=1e12)]
SpeedRatio = Annotated[float, Meta(gt=0, le=1)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Workers = Annotated[int, Meta(ge=1, le=100_000)]
BatchSize = Annotated[int, Meta(ge=1, le=1 << 40)]


class JobProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a job runs, by its user or a profiler.

    model: the model that is trained; jobs of one model share the learned speeds.
    speedup: points (workers, speed), by workers; only ratios of speeds count. Empty: linear.
    rack_speed_ratio: part of its speed on one node that the same gang reaches on several of one
        rack.
    far_speed_ratio: part of its speed on one node that the same gang reaches over several racks.
    skew_ratio: share of the largest tensor in the model; large ones suffer from spreading
        (Tiresias, NSDI'19, section 3.3). None: not stated.
    gpu_busy_ratio: how busy it keeps its GPUs alone; decides with the memory which jobs may share a
        GPU (Gandiva, OSDI'18).
    gpu_memory_bytes: device memory of one worker on each of its GPUs.
    batch_size: global batch in examples.
    max_batch_size: the largest global batch that trains well; None: it is fixed.
    """

    model: Annotated[str, Meta(max_length=256)] = ""
    speedup: tuple[tuple[Workers, Rate], ...] = ()
    rack_speed_ratio: SpeedRatio = 1.0
    far_speed_ratio: SpeedRatio = 1.0
    skew_ratio: SpeedRatio | None = None
    gpu_busy_ratio: SpeedRatio | None = None
    gpu_memory_bytes: Bytes | None = None
    batch_size: BatchSize | None = None
    max_batch_size: BatchSize | None = None

    def speed(self, workers: float) -> float:
        """Speed of this number of workers, in the unit of `speedup`; linear without one.

        Linear between two points, above the largest as at the largest, below the smallest in
        proportion.
        """
        if workers <= 0:
            return 0.0
        points = self.speedup
        if not points:
            return float(workers)  # a part of a worker is one on a smaller GPU type
        at = bisect_right(points, workers, key=lambda point: point[0])
        if at == 0:
            size, rate = points[0]
            return rate * workers / size
        size, rate = points[at - 1]
        if at == len(points) or size == workers:
            return rate
        next_size, next_rate = points[at]
        return rate + (next_rate - rate) * (workers - size) / (next_size - size)

    def rate(self, workers: float, *, base: int) -> float:
        """Work per second of this number of workers, where `base` workers do `base` a second.

        The unit of estimates: worker-seconds of the base gang's pace.
        """
        return base * self.speed(workers) / self.speed(base) if self.speedup else workers

    def fastest(self, least: int, most: int) -> int:
        """The fewest workers of a range that are as fast as any of it; `most` without a table."""
        if not self.speedup:
            return most
        # On a line between two points the faster one is an end.
        sizes = [least, *(size for size, _ in self.speedup if least < size < most), most]
        return max(sizes, key=lambda size: (self.speed(size), -size))

    def locality_ratio(self, nodes: int, racks: int) -> float:
        """Part of its speed on one node that a gang reaches on a number of nodes and racks."""
        if nodes <= 1:
            return 1.0
        return self.rack_speed_ratio if racks <= 1 else self.far_speed_ratio

    def misfit(self) -> str:
        """An error that types cannot express; empty without one."""
        if any(high[0] <= low[0] for low, high in pairwise(self.speedup)):
            return "speedup: worker counts must grow from one point to the next"
        if self.far_speed_ratio > self.rack_speed_ratio:
            return (
                f"far_speed_ratio is {self.far_speed_ratio:g}, expected at most rack_speed_ratio, "
                f"which is {self.rack_speed_ratio:g}"
            )
        if self.max_batch_size is not None and self.max_batch_size < (self.batch_size or 1):
            return (
                f"max_batch_size is {self.max_batch_size}, expected at least batch_size, which is "
                f"{self.batch_size or 1}"
            )
        return ""


PACKED_THROUGHPUT = (
    *((0.5, 2.0), (0.616, 1.46), (0.668, 1.39), (0.762, 1.17)),
    *((0.872, 0.84), (0.94, 0.87), (0.989, 0.89)),
)
"""(busy share of each of two equal jobs alone on a GPU, their joint throughput on one GPU, as a
multiple of one alone): measured by Gandiva (OSDI'18, section 4.2) for RHN, SCRNN, MI-LSTM, LSTM,
ResNet-50 and ResNeXt-50. Two jobs that each keep it half busy do not meet; that point is ours."""


def packed_speed_ratio(own: JobProfile, others: Sequence[JobProfile]) -> float:
    """Part of its speed alone that a job reaches on a GPU that other jobs share.

    It follows from the mean of their busy shares alone, linear between measured points. A job
    without a stated share counts as keeping the GPU busy. More than two jobs together reach the
    speed of two.
    """
    if not others:
        return 1.0
    busy = [1.0 if each.gpu_busy_ratio is None else each.gpu_busy_ratio for each in (own, *others)]
    mean = sum(busy) / len(busy)
    at = bisect_right(PACKED_THROUGHPUT, mean, key=lambda point: point[0])
    if at == 0:
        together = PACKED_THROUGHPUT[0][1]
    elif at == len(PACKED_THROUGHPUT):
        together = PACKED_THROUGHPUT[-1][1]
    else:
        (low, low_rate), (high, high_rate) = PACKED_THROUGHPUT[at - 1 : at + 1]
        together = low_rate + (high_rate - low_rate) * (mean - low) / (high - low)
    return together / len(busy)


NO_PROFILE = JobProfile()
"""The profile of a job that states none."""
