"""Explains the state of a job, node or loan, from the same state that decisions use. Pure."""

from __future__ import annotations

from common.messages import CommandReport, GpuHealth, OrderPhase, process_named
from common.model import JobState, NodeRole, Pool
from coordinator.engine.engine import Engine
from coordinator.engine.jobs import (
    estimates,
    gang_reservations,
    rendezvous,
    stalls,
)
from coordinator.engine.jobs import (
    lifecycle as jobs_lifecycle,
)
from coordinator.engine.jobs import (
    retry as jobs_retry,
)
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.nodes import (
    gpu_faults,
    lost_records,
    start_failures,
)
from coordinator.engine.nodes import (
    lost as nodes_lost,
)
from coordinator.engine.nodes import (
    maintenance as nodes_maintenance,
)
from coordinator.engine.nodes import (
    membership as nodes_membership,
)
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import JobEntry, LoanEntry, NodeEntry, WorkerEntry
from coordinator.policies.contract.text import counted
from coordinator.service.api import explain_job, explain_windows, rows


def job(engine: Engine, entry: JobEntry, *, now_s: float | None = None) -> tuple[str, ...]:
    """All blockers of a waiting job, or what a running one is doing.

    now_s: engine time; None: of the last event.
    """
    at_s = _or_last_event(engine, now_s)
    return (*_job(engine, entry, at_s), *explain_job.prerun_reasons(entry))


def _job(engine: Engine, entry: JobEntry, at_s: float) -> tuple[str, ...]:
    if ends := explain_job.stopping_reasons(entry, now_s=at_s):
        if ended_by := jobs_retry.why_ended(entry, engine.settings):
            ends = (*ends, ended_by)
        return (*ends, *_unknown(engine, entry, at_s))
    match entry.state:
        case JobState.PENDING:
            return tuple(_pending(engine, entry, at_s))
        case JobState.STARTING:
            waiting = sorted(
                f"worker {i} on {_not_ready(w)}"
                for i, w in entry.workers.items()
                if not jobs_lifecycle.is_ready(w)
            )
            if entry.store is not None and not rendezvous.is_ready(entry):
                waiting.append(f"its rendezvous store on {_not_ready(entry.store)}")
            doubted = lost_records.why_no_timeout(engine.state, entry)
            waiting += [doubted] if doubted else []
            return ("its gang waits until every node is ready", *waiting, *_awaited(entry))
        case JobState.RUNNING | JobState.RESIZING:
            drained, lost = (
                explain_job.drain_reasons(engine, entry, at_s),
                _unknown(engine, entry, at_s),
            )
            stalled = _stalled(entry, at_s)
            return (*stalled, *_running(engine, entry), *drained, *lost, *_awaited(entry))
        case JobState.SUSPENDED:
            said = explain_job.suspension_reason(engine, entry, now_s=at_s)
            return (
                said,
                *explain_job.drain_reasons(engine, entry, at_s),
                *_unknown(engine, entry, at_s),
            )
        case JobState.CANCELLED:
            return (f"cancelled by {entry.cancelled_by}",) if entry.cancelled_by else ()
        case _:
            ended_by = jobs_retry.why_ended(entry, engine.settings)
            not_again = f"it is not tried again: {ended_by}" if ended_by else ""
            return tuple(why for why in (entry.error, not_again) if why)


def _stalled(entry: JobEntry, at_s: float) -> tuple[str, ...]:
    """A running job without progress, and what will happen to it."""
    words = stalls.in_words(entry, at_s)
    if not words:
        return ()
    timeout_s = stalls.timeout_of(entry)
    if timeout_s is None:
        then = "it goes on as it is: it has no stall_timeout_s"
    else:
        left_s = max(0.0, timeout_s - (stalls.quiet_s(entry, at_s) or 0.0))
        then = f"it is started again in {left_s:.0f} s (stall_timeout_s {timeout_s:g} s)"
    return (f"STALLED: {words}", then)


def _or_last_event(engine: Engine, now_s: float | None) -> float:
    return engine.state.now_s if now_s is None else now_s


def _not_ready(worker: WorkerEntry) -> str:
    """Where a worker is being prepared, its stage, and the wait that its node reports."""
    why = f": {worker.waits_for}" if worker.waits_for else ""
    return f"{worker.node} is {worker.phase or 'not yet taken'}{why}"


def _awaited(entry: JobEntry) -> list[str]:
    """Nodes that a gang rebuilt from ledgers still lacks."""
    return [
        f"it was rebuilt from ledgers, and {name}, which has other workers of it, has not reported "
        f"since: they may run. If it is dead: aryl node confirm-dead {name}"
        for name in entry.attempt.awaited_nodes
    ]


def _pending(engine: Engine, entry: JobEntry, now_s: float) -> list[str]:
    blockers = engine.explain.blockers(entry.job_id)
    reasons = list(blockers)
    if engine.state.is_frozen and not entry.gate.is_shut:
        reasons.insert(0, rows.FROZEN)
    place = engine.explain.queue_place(entry.job_id)
    if place is not None:
        at, count = place
        line = f"number {at} of {count} that wait, in the order of policy {engine.policy.name}"
        all_anew = (
            f"one of {count} that wait; policy {engine.policy.name} ranks all of them at each pass"
        )
        reasons.append(f"it is {line if engine.policy.is_ordered else all_anew}")
    reasons += [
        f"lending {name} is recommended and waits for an operator (aryl loan approve {name})"
        for name in engine.explain.recommended()
        if blockers and not entry.gate.is_shut
    ]
    if not blockers and not engine.state.is_frozen:
        reasons.append("nothing: it starts in the next scheduling pass")
    said = jobs_retry.why_failed(entry)
    if said and not jobs_retry.why_waiting(entry, now_s):
        reasons.append(f"its latest try ended: {said}")
    reasons += _restarts(entry)
    if entry.counts.preemptions:
        reasons.append(f"it was preempted {counted(entry.counts.preemptions, 'time')}")
    if entry.counts.node_faults:
        times = counted(entry.counts.node_faults, "time")
        reasons.append(f"its nodes failed it {times}, which costs it no try")
    return reasons


def _restarts(entry: JobEntry) -> list[str]:
    """The used part of the retry budget of a job that has failed by its own fault."""
    used, most = jobs_retry.restarts_used(entry), entry.spec.retry.max_restarts
    return [f"{used} of {counted(most, 'restart')} used (retry.max_restarts)"] if used else []


def _running(engine: Engine, entry: JobEntry) -> tuple[str, ...]:
    flexible = sum(1 for worker in entry.workers.values() if worker.is_flexible)
    running = counted(entry.running_workers, "worker runs", "workers run")
    said = [f"{running}, {flexible} of them flexible"]
    if entry.attempt.endpoint:
        said.append(f"its rendezvous is at {entry.attempt.endpoint}")
    said += _restarts(entry)
    lent = sorted(
        {
            worker.node
            for worker in entry.workers.values()
            if engine.state.nodes[worker.node].lease is not None
        }
    )
    if lent:
        said.append(f"on lent nodes: {', '.join(lent)}; they may be taken back")
    if entry.state == JobState.RESIZING:
        said.append("a resize is under way")
        said += [
            f"worker {index} on {_not_ready(worker)}"
            for index, worker in sorted(entry.workers.items())
            if worker.order == OrderPhase.RESERVE and worker.stop is None
        ]
    return (*said, *engine.explain.standing(entry.job_id))


def _unknown(engine: Engine, entry: JobEntry, now_s: float) -> list[str]:
    """The workers of a job on LOST nodes: how and when they will count as gone."""
    said: list[str] = []
    for name in sorted({worker.node for worker in entry.workers.values()}):
        since_s = engine.state.nodes[name].contact.silent_since_s
        if since_s is None:
            continue
        end_s = nodes_lost.certain_end_s(engine.settings, entry.spec)
        if end_s is None:
            said.append(
                f"{name} is lost: its workers there count as running until it is heard or "
                f"confirmed dead (aryl node confirm-dead {name}); the job has no stop_after_s"
            )
            continue
        left_s = max(0.0, since_s + end_s - now_s)
        said.append(
            f"{name} is lost: unless it is heard, its workers there count as ended in "
            f"{left_s:.0f} s (stop_after_s, grace and margin: {end_s:.0f} s of silence)"
        )
    return said


def estimate(engine: Engine, entry: JobEntry, *, now_s: float | None = None) -> str:
    """The run-time estimate and where it comes from; now_s as of `job`."""
    at_s = _or_last_event(engine, now_s)
    work_s, source = estimates.remaining_work(entry, at_s)
    workers = max(entry.running_workers, entry.spec.workers.min)
    pace = estimates.pace(entry) or entry.spec.workers.min
    over_s = estimates.outlived_s(entry, at_s)
    if over_s and entry.attempt.ran_at_s is not None:
        source = (
            f"{source}; it has outlived that by {over_s / pace:.0f} s, and as much again is assumed"
        )
    return f"{work_s / pace:.0f} s left with {counted(workers, 'worker')} (source: {source})"


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


def node(
    engine: Engine,
    entry: NodeEntry,
    *,
    now_s: float | None = None,
    slow_command: CommandReport | None = None,
    refused_report: str = "",
) -> tuple[str, ...]:
    """Why a node does what it does; now_s as of `job`.

    slow_command: the command that moves its server and has not ended, and its running time.
    refused_report: why the latest of its reports was refused; empty: it was taken, or none came.
    """
    at_s = _or_last_event(engine, now_s)
    said = [f"it is {entry.role}, wanted: {entry.desired.role}"]
    if not entry.contact.is_heard:
        said.append("it has not reported to this coordinator yet, so it gets no orders")
    said += _silent(engine, entry, refused_report)
    said += explain_job.closed_reasons(engine, entry, at_s)
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


def loan(entry: LoanEntry) -> tuple[str, ...]:
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
