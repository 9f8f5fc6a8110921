"""What a node says of one worker. Pure; must not know orders to come or who reads it."""

from __future__ import annotations

from agent.state import Facts, Held, WorkerFact
from common.messages import WorkerPhase, WorkerReport


def phase_of(held: Held, fact: WorkerFact, facts: Facts) -> WorkerPhase:
    """As its shim says; a store is only on its way until it listens, else nobody could join it."""
    is_new = fact.phase == WorkerPhase.RUNNING and held.phase != WorkerPhase.RUNNING
    if not (held.order.key.is_store and is_new):
        return fact.phase
    port = int(held.endpoint.rpartition(":")[2] or 0)
    return WorkerPhase.RUNNING if port in facts.listening_ports else WorkerPhase.RESERVING


def worker_report(
    held: Held, fact: WorkerFact | None, *, waits_for: str, now_s: float
) -> WorkerReport:
    """What is said of a held worker at an instant.

    fact: the last word of its shim, if there was one. waits_for: why it cannot begin yet.
    """
    saved_at_s = held.saved_at_s if held.is_over or fact is None else fact.saved_at_s
    return WorkerReport(
        key=held.order.key,
        phase=held.phase,
        gpu_uuids=held.order.gpu_uuids,
        is_flexible=held.order.is_flexible,
        endpoint=held.endpoint,
        exit_code=held.exit_code,
        stop_reason=held.stop_reason,
        error=held.error or waits_for,
        progress=fact.progress if fact else None,
        checkpoint=held.checkpoint or (fact.checkpoint if fact else None),
        saved_ago_s=_ago_s(saved_at_s, now_s),
        running_s=held.running_s or (fact.running_s if fact else 0.0),
        ended_ago_s=_ago_s(held.ended_at_s, now_s),
        failure=held.failure,
        fault=held.fault,
        refused_for=held.refused_for,
    )


def _ago_s(at_s: float | None, now_s: float) -> float:
    return 0.0 if at_s is None else max(0.0, now_s - at_s)
