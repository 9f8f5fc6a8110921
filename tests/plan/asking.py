"""Questions about an engine, answered in this process; tests nothing."""

from __future__ import annotations

import time
from typing import Any

from common.plans import Plan, Planned
from coordinator.engine import what_if
from coordinator.engine.engine import Engine
from coordinator.engine.what_if import WhatIf
from coordinator.plan.answer import answer


def question(
    engine: Engine, *, now_s: float | None = None, loan_pass_in_s: float = 60.0, **request: Any
) -> WhatIf:
    """A question of tenant ops, as it comes out of the pipe; by default at the last event."""
    now_s = engine.state.now_s if now_s is None else now_s
    data = what_if.ask(
        engine,
        Plan(**request),
        tenant="ops",
        user="ada",
        now_s=now_s,
        loan_pass_at_s=now_s + loan_pass_in_s,
    )
    return what_if.read(data)


def plan(engine: Engine, **request: Any) -> Planned:
    """The answer to a question."""
    return answer(question(engine, **request), clock_s=time.monotonic)
