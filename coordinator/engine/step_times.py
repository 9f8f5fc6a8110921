"""How long a job's steps take with one worker count, from its own words. Must not know policies."""

from __future__ import annotations

from msgspec import Struct


class StepTimes(Struct, kw_only=True):
    """What was measured of one job.

    step_time_s: seconds a step with `workers` workers on `gpu_type`, between two words of one
        attempt and one worker count; None before. told_at_s: when it last said how far it is.
    anchor_of: attempt and resizes at the word from which is measured, and where and when it was.
    """

    step_time_s: float | None = None
    workers: int = 0
    gpu_type: str = ""
    told_at_s: float = 0.0
    anchor_of: tuple[int, int] = (0, 0)
    anchor_step: int = 0
    anchor_at_s: float = 0.0

    def told(
        self, step: int, now_s: float, *, of: tuple[int, int], workers: int, gpu_type: str = ""
    ) -> bool:
        """A running job says how far it is; `workers` is 0 while their number changes.

        Returns whether its gang is that of its last word.
        """
        self.told_at_s = now_s
        if self.anchor_of != of or workers == 0 or step < self.anchor_step:
            self.anchor_of, self.anchor_step, self.anchor_at_s = of, step, now_s
            return False
        if step > self.anchor_step and now_s > self.anchor_at_s:
            self.step_time_s = (now_s - self.anchor_at_s) / (step - self.anchor_step)
            self.workers, self.gpu_type = workers, gpu_type
        return True
