"""Decisions as the rows of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

from common.model import JobId
from common.plans import PlanStep
from coordinator.plan.run import Noted, Step
from coordinator.policies.contract.decisions import (
    Loan,
    Migrate,
    Placement,
    Preempt,
    Reclaim,
    Recommend,
    Reject,
    Resize,
    Resume,
    Start,
    Suspend,
    placed_count,
)
from coordinator.policies.contract.text import counted


def step_row(step: Step, jobs: Mapping[JobId, Noted]) -> PlanStep:
    """One decision as a row."""
    decision = step.decision
    match decision:
        case Loan() | Reclaim() | Recommend():
            action, what = _of_node(decision)
            subject, whose = str(decision.node), str(decision.service)
        case Start() | Resize() | Preempt() | Reject() | Suspend() | Resume() | Migrate():
            action, what = _of_job(decision)
            subject, whose = str(decision.job_id), whose_job(jobs.get(decision.job_id))
        case _:
            assert_never(decision)
    return PlanStep(
        in_s=step.in_s,
        action=action,
        subject=subject,
        whose=whose,
        what=what,
        reason=decision.reason,
    )


def whose_job(noted: Noted | None) -> str:
    """The name of a job, and its tenant."""
    return "" if noted is None else f"{noted.name} ({noted.tenant})"


def _of_node(decision: Loan | Reclaim | Recommend) -> tuple[str, str]:
    match decision:
        case Loan():
            return "lend", ""
        case Recommend():
            return "recommend", str(decision.action)
        case Reclaim():
            stops = counted(decision.predicted_preemptions, "job")
            return "recall", f"within {decision.deadline_s:.0f} s, stops {stops}"


def _of_job(
    decision: Start | Resize | Preempt | Reject | Suspend | Resume | Migrate,
) -> tuple[str, str]:
    match decision:
        case Start():
            return "start", _placed(decision.placements)
        case Resize():
            return _resize(decision)
        case Preempt():
            whom = f", for {decision.beneficiary}" if decision.beneficiary else ""
            return "stop", f"loses {decision.predicted_cost_gpu_s:.0f} GPU-s{whom}"
        case Migrate():
            return "migrate", f"to {_placed(decision.placements)}"
        case Reject() | Suspend() | Resume():
            return type(decision).__name__.lower(), ""


def _resize(decision: Resize) -> tuple[str, str]:
    more, less = placed_count(decision.added), len(decision.removed_workers)
    added = f"{counted(more, 'worker')} more on {_names(decision.added)}" if more else ""
    removed = f"{counted(less, 'worker')} fewer" if less else ""
    action = "grow" if more > less else "shrink"
    return action, ", ".join(filter(None, (added, removed)))


def _placed(placements: Iterable[Placement]) -> str:
    places = tuple(placements)
    return f"{counted(placed_count(places), 'worker')} on {_names(places)}"


def _names(placements: Iterable[Placement]) -> str:
    return ", ".join(dict.fromkeys(str(place.node) for place in placements))
