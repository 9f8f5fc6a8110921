"""The question of a plan, as a coordinator hands it to the process that plays it."""

from __future__ import annotations

import msgspec
from msgspec import Struct, structs

from common.model import JobId
from common.plans import Plan, PlanKind
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state import live_part
from coordinator.engine.state.settings import EngineSettings

SIZE_BYTES = 4
"""Of the number in front that says how long the question without the state is."""


class WhatIf(Struct, frozen=True, kw_only=True):
    """A change in question, and the cell that it would meet.

    state: the live part of the state, see `state.live_part`.
    now_s: engine time of the question.
    loan_pass_at_s: when the next loan pass is due without an event.
    """

    request: Plan
    tenant: str
    user: str
    settings: EngineSettings
    now_s: float
    loan_pass_at_s: float
    state: bytes = b""

    @property
    def has_change(self) -> bool:
        """False where only the time ahead is in question, so that one run answers it."""
        return self.request.kind != PlanKind.QUEUE and not self.is_of_waiting_job

    @property
    def is_of_waiting_job(self) -> bool:
        """True if the question is when a job starts that waits already, without any change."""
        return self.request.kind == PlanKind.JOB and self.request.spec is None

    def engine(self, settings: EngineSettings | None = None) -> Engine:
        """A copy of the cell's engine, to be changed at will; with other settings if given."""
        return Engine(settings or self.settings, decode_state(self.state))


def ask(
    engine: Engine, request: Plan, *, tenant: str, user: str, now_s: float, loan_pass_at_s: float
) -> bytes:
    """A question as bytes; the engine stays as it is.

    The state is megabytes, and a leader encodes it once: it stands behind the rest as it is.
    """
    question = WhatIf(
        request=request,
        tenant=tenant,
        user=user,
        settings=engine.settings,
        now_s=now_s,
        loan_pass_at_s=loan_pass_at_s,
    )
    head = msgspec.msgpack.encode(question)
    size = len(head).to_bytes(SIZE_BYTES, "big")
    depends_on = () if request.spec is None else request.spec.depends_on or ()
    named = [JobId(each.job) for each in depends_on]
    return b"".join((size, head, live_part.encoded(engine.state, also=named)))


def read(data: bytes) -> WhatIf:
    """A question from its bytes."""
    end = SIZE_BYTES + int.from_bytes(data[:SIZE_BYTES], "big")
    question = msgspec.msgpack.decode(data[SIZE_BYTES:end], type=WhatIf)
    return structs.replace(question, state=data[end:])
