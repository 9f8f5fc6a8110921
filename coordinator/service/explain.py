"""Why a job, node or loan is where it is, from the state that decisions use. Pure."""

from __future__ import annotations

from common.model import JobState, NodeRole
from coordinator.engine import estimates, loans, silence
from coordinator.engine.context import Context
from coordinator.engine.engine import Engine
from coordinator.engine.loan_entries import LoanEntry
from coordinator.engine.state import JobEntry, NodeEntry
from coordinator.policies.decisions import Decision
from coordinator.policies.words import counted
from coordinator.service import rows


def job(engine: Engine, entry: JobEntry) -> tuple[str, ...]:
    """All blockers of a waiting job, or what a running one is doing."""
    match entry.state:
        case JobState.PENDING:
            return (*_pending(engine, entry),)
        case JobState.STARTING:
            waiting = sorted(
                f"worker {i} on {w.node} is {w.phase or 'not yet taken'}"
                for i, w in entry.workers.items()
                if w.phase != "ready"
            )
            if entry.store is not None and entry.store.phase not in ("ready", "running"):
                phase = entry.store.phase or "not yet taken"
                waiting.append(f"its rendezvous store on {entry.store.node} is {phase}")
            return ("its gang waits until every node is ready", *waiting, *_awaited(entry))
        case JobState.PREEMPTING:
            left = sorted({w.node for w in entry.workers.values()})
            stopping = f"its workers are stopping on {', '.join(left)}; then it waits again"
            return (stopping, *_unknown(engine, entry))
        case JobState.RUNNING | JobState.RESIZING:
            return (*_running(engine, entry), *_unknown(engine, entry), *_awaited(entry))
        case JobState.SUSPENDED:
            return (_suspended(engine, entry), *_unknown(engine, entry))
        case _:
            return (entry.error,) if entry.error else ()


def _suspended(engine: Engine, entry: JobEntry) -> str:
    """Since when, and who computes on its GPUs meanwhile."""
    mine = {uuid for worker in entry.workers.values() for uuid in worker.gpu_uuids}
    others = sorted(
        job.job_id
        for job in engine.state.live()
        if job.state in (JobState.STARTING, JobState.RUNNING, JobState.RESIZING)
        and any(mine & set(worker.gpu_uuids) for worker in job.workers.values())
    )
    since_s = engine.state.now_s - (entry.suspended_at_s or engine.state.now_s)
    return (
        f"it keeps its GPUs and has been suspended for {since_s:.0f} s while "
        f"{', '.join(others) or 'nobody'} computes on them"
    )


def _awaited(entry: JobEntry) -> list[str]:
    """Nodes without which a gang that was rebuilt from ledgers is not whole."""
    return [
        f"it was rebuilt from ledgers, and {name}, which was given others of its workers, was not "
        f"heard since: they may be running. If it is dead: aryl node confirm-dead {name}"
        for name in entry.awaited_nodes
    ]


def _pending(engine: Engine, entry: JobEntry) -> list[str]:
    blockers = engine.blockers(entry.job_id)
    reasons = list(blockers)
    if engine.state.is_frozen:
        reasons.insert(0, rows.FROZEN)
    place = engine.queue_place(entry.job_id)
    if place is not None:
        reasons.append(
            f"it is number {place[0]} of {place[1]} that wait, in the order of policy "
            f"{engine.policy.name}"
        )
    reasons += [
        f"lending {name} is recommended and waits for an operator (aryl loan approve {name})"
        for name in sorted(engine.state.recommendations)
        if blockers
    ]
    if not blockers and not engine.state.is_frozen:
        reasons.append("nothing: it starts in the next scheduling pass")
    if entry.preemption_count:
        reasons.append(f"it was preempted {counted(entry.preemption_count, 'time')}")
    return reasons


def _running(engine: Engine, entry: JobEntry) -> tuple[str, ...]:
    flexible = sum(1 for worker in entry.workers.values() if worker.is_flexible)
    running = counted(entry.running_workers, "worker runs", "workers run")
    said = [f"{running}, {flexible} of them flexible"]
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
    return (*said, *engine.standing(entry.job_id))


def _unknown(engine: Engine, entry: JobEntry) -> list[str]:
    """Its workers on LOST nodes: what must happen before they count as gone, and when."""
    said: list[str] = []
    for name in sorted({worker.node for worker in entry.workers.values()}):
        since_s = engine.state.nodes[name].silent_since_s
        if since_s is None:
            continue
        end_s = silence.certain_end_s(engine.settings, entry.spec)
        if end_s is None:
            said.append(
                f"{name} is lost: its workers there count as running until it is heard or "
                f"confirmed dead (aryl node confirm-dead {name}); the job has no stop_after_s"
            )
            continue
        left_s = max(0.0, since_s + end_s - engine.state.now_s)
        said.append(
            f"{name} is lost: unless it is heard, its workers there count as ended in "
            f"{left_s:.0f} s (stop_after_s, grace and margin: {end_s:.0f} s of silence)"
        )
    return said


def estimate(engine: Engine, entry: JobEntry) -> str:
    """The run-time estimate and where it comes from."""
    work_s, source = estimates.remaining_work(entry, engine.state.now_s)
    workers = max(entry.running_workers, entry.spec.workers.min)
    pace = estimates.pace(entry) or entry.spec.workers.min
    over_s = estimates.outlived_s(entry, engine.state.now_s)
    if over_s and entry.attempt_ran_at_s is not None:
        source = (
            f"{source}; it has outlived that by {over_s / pace:.0f} s, and as much again is assumed"
        )
    return f"{work_s / pace:.0f} s left with {counted(workers, 'worker')} (source: {source})"


def node(engine: Engine, entry: NodeEntry) -> tuple[str, ...]:
    """Why a node does what it does."""
    said = [f"it is {entry.role}, wanted: {entry.desired_role}"]
    if not entry.is_heard:
        said.append("this coordinator has not heard it yet, so it is ordered nothing")
    if entry.role == NodeRole.LOST:
        said.append("silence proves nothing: its workers count as running until it is heard")
    if entry.is_cordoned:
        said.append(f"cordoned {entry.cordon_reason}")
    if entry.detail:
        said.append(entry.detail)
    said += _overdue(engine, entry)
    said += engine.why_kept(entry.name)
    if entry.lease is not None:
        said.append(f"lent by {entry.lease.service} under lease {entry.lease.lease_id}")
    if entry.unknown_workers:
        said.append(
            f"holds {counted(len(entry.unknown_workers), 'worker')} that its ledger must explain"
        )
    ctx = Context(engine.state, engine.settings, engine.state.now_s)
    for job_entry, worker in loans.held_on(ctx, entry):
        if worker.key.is_store:
            said.append(f"rendezvous store of {job_entry.job_id}")
            continue
        kind = "flexible" if worker.is_flexible else "base"
        said.append(f"{kind} worker {worker.key.worker_index} of {job_entry.job_id}")
    return tuple(said)


def _overdue(engine: Engine, entry: NodeEntry) -> list[str]:
    """That a node was asked back and is later than its service was promised."""
    lease_id = entry.last_lease_id
    found = None if lease_id is None else engine.state.loans.get(lease_id)
    late_s = 0.0 if found is None else rows.overdue_s(found, engine.state.now_s)
    if found is None or late_s <= 0:
        return []
    promise = (
        f"{found.lapse_deadline_s or 0.0:g} s after its lease ended by itself"
        if found.reclaim_ordered_at_s is None
        else f"deadline {found.reclaim_deadline_s or 0.0:g} s"
    )
    return [
        f"{found.service} should have had it back {late_s:.0f} s ago ({promise}): a late reclaim; "
        "workers that do not end within their grace are killed, and a node whose GPUs stay busy is "
        "quarantined"
    ]


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
    if entry.is_lapsed:
        said.append("it ended by itself: the node heard no renewal until its TTL ran out")
    said += [f"stage {name}: {took:.2f} s" for name, took in entry.stage_durations_s.items()]
    return tuple(said)


def describe(decision: Decision) -> str:
    """One line for the log: what and why."""
    fields = {
        name: getattr(decision, name)
        for name in ("job_id", "node", "service", "added", "removed_workers")
        if getattr(decision, name, None)
    }
    what = " ".join(f"{name}={value}" for name, value in fields.items())
    return f"{type(decision).__name__} {what}: {decision.reason}"
