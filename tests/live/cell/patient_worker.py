"""The demo's training job, but it goes on until the test lets it end.

Run as a job of tests/live/cell/test_policies.py, in a gang of one. Must not differ from
`coordinator.demo.worker` in anything else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from coordinator.demo.worker import Leader, options_of

LOOK_S = 0.1


class PatientLeader(Leader):
    """It has done its work at the step at which it finds a file named `go` in $OUT."""

    _go = Path(os.environ.get("OUT", "")) / "go"

    def _end(self, step: int) -> int | None:
        if self._go.exists():
            self.total_steps = max(1, step)
        return super()._end(step)

    def _idle_s(self, now_s: float, reported_at_s: float) -> float:
        return min(LOOK_S, super()._idle_s(now_s, reported_at_s))


if __name__ == "__main__":
    sys.exit(PatientLeader(options_of(None), os.environ).run())
