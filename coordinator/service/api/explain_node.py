"""Explains the state of a node or loan, from the same state that decisions use. Pure."""

from __future__ import annotations

from common.messages import CommandReport, GpuHealth, process_named
from common.model import NodeRole, Pool
from coordinator.engine.engine import Engine
from coordinator.engine.jobs import gang_reservations
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.nodes import gpu_faults, start_failures
from coordinator.engine.nodes import maintenance as nodes_maintenance
from coordinator.engine.nodes import membership as nodes_membership
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import LoanEntry, NodeEntry
from coordinator.policies.contract.text import counted
from coordinator.service.api import explain_windows


def _silent(engine: Engine, entry: NodeEntry, refused_report: str) -> list[str]:
    said: list[str] = []
    if refused_report:
        said.append(f"its latest report was refused: {refused_report}")
    if entry.role == NodeRole.LOST:
        said.append("silence proves nothing: its workers count as running until it is heard")
        if not nodes_maintenance.why_not(engine.state, entry):
            said.append(
                f"it holds nothing; if it will not come back: aryl node remove {entry.name}"
            )
    return said


def reasons(
    engine: Engine,
    entry: NodeEntry,
    *,
    now_s: float | None = None,
    slow_command: CommandReport | None = None,
    refused_report: str = "",
) -> tuple[str, ...]:
    """Why a node does what it does; now_s: engine time; None: of the last event.

    slow_command: the command that moves its server and has not ended, and its running time.
    refused_report: why the latest of its reports was refused; empty: it was taken, or none came.
    """
    at_s = engine.state.now_s if now_s is None else now_s
    said = [f"it is {entry.role}, wanted: {entry.desired.role}"]
    if not entry.contact.is_heard:
        said.append("it has not reported to this coordinator yet, so it gets no orders")
    said += _silent(engine, entry, refused_report)
    said += _closed(engine, entry, at_s)
    said += explain_windows.of_node(engine, entry, at_s)
    if closed := start_failures.why(engine.state, entry):
        said.append(closed)
    if detail := _detail(entry):
        said.append(detail)
    said += _overdue(engine, entry, at_s, slow_command)
    said += _belongs(engine, entry, at_s)
    said += engine.explain.why_kept(entry.name)
    if entry.lease is not None:
        said.append(f"lent by {entry.lease.service} under lease {entry.lease.lease_id}")
    if idle := engine.explain.why_idle(entry.name, at_s):
        said.append(idle)
    if unknown := entry.ledger.unknown_workers:
        said.append(f"holds {counted(len(unknown), 'worker')} that its ledger must explain")
    ctx = Context(engine.state, engine.settings, at_s)
    said += _sick_gpus(entry)
    said += gpu_faults.told(ctx, entry)
    said += [
        f"GPU {uuid} is used by {process_named(pid)}, which no worker was granted it for"
        f"{_beside(entry)}"
        for uuid, pid in sorted(entry.trespassed.items())
    ]
    for job_entry, worker in loans_lifecycle.held_on(ctx, entry):
        if worker.key.is_store:
            said.append(f"rendezvous store of {job_entry.job_id}")
            continue
        kind = "flexible" if worker.is_flexible else "base"
        said.append(f"{kind} worker {worker.key.worker_index} of {job_entry.job_id}")
    said += gang_reservations.told(entry)
    return tuple(said)


def _closed(engine: Engine, entry: NodeEntry, now_s: float) -> list[str]:
    """Why no new work comes to a node: by whose order, and until when running work may go on.

    now_s: engine time.
    """
    if not entry.cordon.is_cordoned:
        return []
    if not entry.cordon.is_draining:
        return [f"cordoned {entry.cordon.reason}"]
    drain = engine.state.drains.get(entry.name)
    if drain is None:
        return [f"drained {entry.cordon.reason}"]
    left_s = max(0.0, drain.until_s - now_s)
    return [
        f"drained {entry.cordon.reason}; what runs there may go on for {left_s:.0f} s, and is "
        "preempted then"
    ]


def _detail(entry: NodeEntry) -> str:
    """The agent's own detail, without the lease, which has a sentence of its own."""
    lease = None if entry.lease is None else f"lease {entry.lease.lease_id}"
    return "; ".join(part for part in entry.detail.split("; ") if part != lease)


def _belongs(engine: Engine, entry: NodeEntry, now_s: float) -> list[str]:
    """The reason that keeps a node out of its pool's work, by its agent's settings and the
    cell's.
    """
    if entry.home_pool == Pool.TRAINING:
        if entry.role not in (NodeRole.TRAINING, NodeRole.LOST, NodeRole.QUARANTINED):
            return [f"it is of the training pool now, and still {entry.role}: it takes no workers"]
        return []
    said: list[str] = []
    if entry.role == NodeRole.TRAINING:
        said.append("it is of the inference pool now, and still training: it takes no workers")
    ctx = Context(engine.state, engine.settings, now_s)
    if nodes_membership.is_unknown(ctx, entry):
        known = ", ".join(sorted(s.name for s in engine.settings.services)) or "none"
        said.append(
            f"its service {entry.service} is not in the settings of this cell (services: {known}), "
            "so it is not lent"
        )
    found = engine.state.latest_loan(entry)
    if found is not None and found.returned_at_s is None and found.reclaim_reason:
        since_s = now_s - (found.reclaim_ordered_at_s or 0.0)
        said.append(
            f"{found.service} has wanted it back for {since_s:.0f} s of "
            f"{found.reclaim_deadline_s or 0.0:g} s: {found.reclaim_reason}"
        )
    return said


def _sick_gpus(entry: NodeEntry) -> list[str]:
    """GPUs that no new worker gets, and whether they are still there."""
    return [
        f"GPU {slot.uuid} is gone from it, and {slot.holder} was not heard to have ended"
        if slot.is_gone
        else f"GPU {slot.uuid} is {slot.health}: nothing new is placed on it"
        for slot in entry.gpus
        if slot.is_gone or slot.health != GpuHealth.OK
    ]


def _beside(entry: NodeEntry) -> str:
    """The effect of a foreign process on a GPU of this node."""
    if entry.home_pool == Pool.TRAINING:
        return ": nothing new is placed on it"
    return " and that is not its server's: nothing new is placed on it, and the node is not lent"


def _overdue(
    engine: Engine, entry: NodeEntry, now_s: float, slow_command: CommandReport | None
) -> list[str]:
    """A node that is late on its way home: its promised deadline and its service."""
    found = engine.state.latest_loan(entry)
    late_s = 0.0 if found is None else loan_outcome.overdue_s(found, now_s)
    if found is None or late_s <= 0:
        return []
    kind, promise = "reclaim", f"deadline {found.reclaim_deadline_s or 0.0:g} s"
    if loan_outcome.is_turn_back(found):
        kind = "way back"
        promise = f"{found.turn_back_deadline_s or 0.0:g} s after it turned back by itself"
    elif loan_outcome.is_lapse(found):
        kind = "lapse"
        promise = f"{found.lapse_deadline_s or 0.0:g} s after its lease ended by itself"
    return [
        f"{found.service} should have had it back {late_s:.0f} s ago ({promise}): a late {kind}; "
        f"{_waits_for(slow_command)}"
    ]


def _waits_for(slow_command: CommandReport | None) -> str:
    """The next step that a late node waits for."""
    if slow_command is not None:
        return (
            f"its {slow_command.name} command has run for {slow_command.running_s:.0f} s and has "
            "not ended"
        )
    return (
        "workers that do not end within their grace are killed, and a node whose GPUs stay busy is "
        "quarantined"
    )


def loan_reasons(entry: LoanEntry) -> tuple[str, ...]:
    """Why a loan was made, and why it ended."""
    said = [f"lent because {entry.reason}"]
    if entry.reclaim_reason:
        said.append(f"taken back because {entry.reclaim_reason}")
        said.append(
            f"predicted {counted(entry.predicted_preemptions, 'preemption')} and "
            f"{entry.predicted_cost_gpu_s:.0f} GPU-s lost, realised "
            f"{entry.realised_preemptions} and {entry.realised_cost_gpu_s:.0f}"
        )
    if entry.ended_reason:
        said.append(f"it ended: {entry.ended_reason}")
    if entry.turned_back:
        said.append(f"its node turned back before it began: {entry.turned_back}")
    if entry.is_lapsed:
        said.append("it ended by itself: the node heard no renewal until its TTL ran out")
    said += [f"stage {name}: {took:.2f} s" for name, took in entry.stage_durations_s.items()]
    return tuple(said)
