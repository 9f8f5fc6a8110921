"""A worker on a simulated node, and its report."""

from __future__ import annotations

from msgspec import Struct

from common.failures import Failure
from common.messages import WorkerOrder, WorkerPhase
from common.model import StopReason
from coordinator.engine.state.events import WorkerFact


class Held(Struct):
    order: WorkerOrder
    phase: WorkerPhase
    exit_code: int | None = None
    stop_reason: StopReason | None = None
    failure: Failure | None = None
    is_switching: bool = False
    """It is about to be suspended or to be resumed."""
    ended_at_s: float | None = None
    said: WorkerFact | None = None
    """Its last reported fact."""

    def fact(self, endpoint: str, now_s: float) -> WorkerFact:
        """The fact to report of it; the same value again while nothing changed."""
        said = self.said
        if (
            said is None
            or said.phase is not self.phase
            or said.stop_reason is not self.stop_reason
            or self.ended_at_s is not None  # its end is longer ago each time
        ):
            said = self.said = WorkerFact(
                key=self.order.key,
                phase=self.phase,
                endpoint=endpoint,
                exit_code=self.exit_code,
                stop_reason=self.stop_reason,
                failure=self.failure,
                ended_ago_s=0.0 if self.ended_at_s is None else now_s - self.ended_at_s,
            )
        return said
