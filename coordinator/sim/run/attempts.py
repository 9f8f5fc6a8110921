"""The true state of a simulated job and its attempt: work, workers, pace, pauses. Data only."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from common.model import NodeName, WorkerKey
from common.profile import NO_PROFILE, JobProfile
from coordinator.workloads.records import SpeedUp


class Saves(StrEnum):
    """The part of a job's work that outlives its gang."""

    NEVER = "never"
    """Nothing: it starts over (Lyra, EuroSys'23, section 4)."""
    ON_REQUEST = "on_request"
    """All, when it is asked to stop; nothing when its node dies."""
    PERIODIC = "periodic"
    """Work done at its last regular save."""


class Attempt(Struct):
    """A gang that computes, or waits for its missing workers."""

    number: int
    multiplier: int
    at_s: float
    """Until when its work is counted."""
    paused_until_s: float = 0.0
    whole_at_s: float | None = None
    workers: dict[WorkerKey, NodeName] = field(default_factory=dict[WorkerKey, NodeName])
    elsewhere: dict[WorkerKey, int] = field(default_factory=dict[WorkerKey, int])
    """GPUs of workers on another GPU type than the attempt's: one slows the whole gang down."""
    profile: JobProfile = NO_PROFILE
    rate: float = 0.0
    """Reference work per second now."""
    is_whole: bool = False
    """The workers of a gang are there, if perhaps suspended."""
    suspended: set[WorkerKey] = field(default_factory=set[WorkerKey])
    pause_left_s: float = 0.0
    """Start of the pause in which it was suspended."""
    share: float = 1.0
    """Part of its GPUs' time that is its own."""
    is_packed: bool = False
    computed_s: float = 0.0
    is_leaving: bool = False
    """It was asked to stop, cannot save and computes on for nothing until it ends."""
    version: int = 0

    def admits(self, key: WorkerKey) -> bool:
        """True if a worker that begins now belongs to this gang. If not, a coordinator that lost
        its journal used its number again.

        A gang that was asked to leave, or without any worker left, takes no worker in, and none of
        its workers begins twice.
        """
        is_over = self.is_leaving or not self.workers
        return key.attempt == self.number and key not in self.workers and not is_over


class Truth(Struct):
    """The truth about one job; work in worker-seconds of the reference GPU type.

    lost_gpu_s: GPU-seconds of its computing that were thrown away.
    """

    work_s: float
    speedup: SpeedUp
    gpus_per_worker: int
    saves: Saves
    path: str
    heterogeneous_speed_ratio: float = 0.0
    done_s: float = 0.0
    saved_s: float = 0.0
    saved_at_s: float = 0.0
    unsaved_gpu_s: float = 0.0
    lost_gpu_s: float = 0.0
    attempt: Attempt | None = None

    def done_by_s(self, now_s: float) -> float:
        """Work done and not lost by an instant, in worker-seconds, including uncounted work;
        `done_s` is of when its workers last changed. Changes nothing.
        """
        attempt = self.attempt
        if attempt is None:
            return self.done_s
        computed_s = max(0.0, now_s - max(attempt.at_s, attempt.paused_until_s))
        return min(self.work_s, self.done_s + computed_s * attempt.rate)
