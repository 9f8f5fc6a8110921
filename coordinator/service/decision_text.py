"""Decisions as text, for the log and for events."""

from __future__ import annotations

from coordinator.policies.contract.decisions import Decision


def describe(decision: Decision) -> str:
    """One line for the log: the decision and its reason."""
    fields = {
        name: getattr(decision, name)
        for name in ("job_id", "node", "service", "added", "removed_workers")
        if getattr(decision, name, None)
    }
    what = " ".join(f"{name}={value}" for name, value in fields.items())
    return f"{type(decision).__name__} {what}: {decision.reason}"
