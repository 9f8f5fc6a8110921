"""What an operator is told of a service that Aryl does not act for alone. Pure."""

from __future__ import annotations

from common.api import LoanRow
from common.model import Mode, ServiceName
from coordinator.engine.engine import Engine
from coordinator.policies.contract.text import counted

RECOMMENDED = "recommended"


def observe_reasons(engine: Engine, name: str) -> tuple[str, ...]:
    """What was watched or is recommended, in sentences."""
    entry = engine.state.services[ServiceName(name)]
    said: list[str] = []
    if entry.mode == Mode.OBSERVE:
        away = [n for n, s in engine.state.shadow_loans.items() if s.service == name]
        said.append(
            f"only watched: {counted(entry.shadow_loan_count, 'loan')} would have been made and "
            f"{entry.shadow_reclaim_count} taken back, {entry.shadow_late_count} of them late"
        )
        if away:
            said.append(f"would be lent now: {', '.join(sorted(away))}")
    said += [
        f"recommends to lend {row.node}: {row.reason} (aryl loan approve {row.node})"
        for row in recommended(engine)
        if row.service == name
    ]
    return tuple(said)


def recommended(engine: Engine) -> tuple[LoanRow, ...]:
    """Loans that an operator can approve now, as rows; without a lease its node names each."""
    return tuple(
        LoanRow(
            lease_id=name,
            node=name,
            service=found.service,
            state=RECOMMENDED,
            decided_at_s=found.at_s,
            begun_at_s=None,
            reclaim_ordered_at_s=None,
            returned_at_s=None,
            reclaim_deadline_s=None,
            reclaim_s=None,
            lapse_s=None,
            is_late=False,
            reason=found.reason,
            reclaim_reason="",
            predicted_preemptions=0,
            realised_preemptions=0,
            predicted_cost_gpu_s=0.0,
            realised_cost_gpu_s=0.0,
        )
        for name, found in engine.recommended().items()
    )
