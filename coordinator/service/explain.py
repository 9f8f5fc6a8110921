"""Why a job, node or loan is where it is, from the state that decisions use. Pure."""

from __future__ import annotations

from common.model import JobState, NodeRole
from coordinator.engine import estimates, loans
from coordinator.engine.context import Context
from coordinator.engine.engine import Engine
from coordinator.engine.state import JobEntry, LoanEntry, NodeEntry
from coordinator.policies.decisions import Decision


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
            return ("its gang waits until every node is ready", *waiting)
        case JobState.PREEMPTING:
            left = sorted({w.node for w in entry.workers.values()})
            return (f"its workers are stopping on {', '.join(left)}; then it waits again",)
        case JobState.RUNNING | JobState.RESIZING:
            return _running(engine, entry)
        case _:
            return (entry.error,) if entry.error else ()


def _pending(engine: Engine, entry: JobEntry) -> list[str]:
    blockers = engine.blockers(entry.job_id)
    reasons = list(blockers)
    if engine.state.is_frozen:
        reasons.insert(0, "the cell is frozen: no decisions are taken (aryl freeze --off)")
    place = engine.queue_place(entry.job_id)
    if place is not None:
        reasons.append(
            f"it is number {place[0]} of {place[1]} that wait, in the order of policy "
            f"{engine.policy.name}"
        )
    if not blockers and not engine.state.is_frozen:
        reasons.append("nothing: it starts in the next scheduling pass")
    if entry.preemption_count:
        reasons.append(f"it was preempted {entry.preemption_count} times")
    return reasons


def _running(engine: Engine, entry: JobEntry) -> tuple[str, ...]:
    flexible = sum(1 for worker in entry.workers.values() if worker.is_flexible)
    said = [f"{entry.running_workers} workers run, {flexible} of them flexible"]
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
    return tuple(said)


def estimate(engine: Engine, entry: JobEntry) -> str:
    """The run-time estimate and where it comes from."""
    work_s, source = estimates.remaining_work(entry, engine.state.now_s)
    workers = max(entry.running_workers, entry.spec.workers.min)
    return f"{work_s / workers:.0f} s left with {workers} workers (source: {source})"


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
    said += engine.why_kept(entry.name)
    if entry.lease is not None:
        said.append(f"lent by {entry.lease.service} under lease {entry.lease.lease_id}")
    if entry.unknown_workers:
        said.append(f"holds {len(entry.unknown_workers)} workers that its ledger must explain")
    ctx = Context(engine.state, engine.settings, engine.state.now_s)
    for job_entry, worker in loans.workers_on(ctx, entry):
        kind = "flexible" if worker.is_flexible else "base"
        said.append(f"{kind} worker {worker.key.worker_index} of {job_entry.job_id}")
    return tuple(said)


def loan(entry: LoanEntry) -> tuple[str, ...]:
    """Why a loan was made, and why it ended."""
    said = [f"lent because {entry.reason}"]
    if entry.reclaim_reason:
        said.append(f"taken back because {entry.reclaim_reason}")
        said.append(
            f"predicted {entry.predicted_preemptions} preemptions and "
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
