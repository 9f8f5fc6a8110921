"""Maintenance: drain a node, and remove a node from the cell.

A drained node takes no more work. Its running work may continue until the drain's deadline, if it
has one. The deadline is an instant of engine time, kept in the state, so it survives a change of
leader and replays. It is an order, not a decision, so it also holds while the cell is frozen.

Only a silent node with no dependents may be removed: no worker that may still run, no loan, no work
that the cell knows from it alone. An operator first ends these by `confirm_dead`. Removal is no
ban: a node of this name that reports again joins as a new node.
"""

from __future__ import annotations

from common.model import NodeRole
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.state.context import Context, keys_on
from coordinator.engine.state.tables import ClusterState, DrainEntry, NodeEntry
from coordinator.policies.contract.text import some

REMOVED = "removed from the cell"
"""How the last line of a node's story begins."""
NAMED = 4
"""Jobs that a refusal names; more are counted."""


def why_not(state: ClusterState, node: NodeEntry) -> str:
    """Why a node may not be removed, and what to do first; empty when it may be."""
    name = node.name
    if node.role != NodeRole.LOST:
        return (
            f"node {name} is {node.role}, not lost: let it end its work (aryl node drain {name}), "
            "stop its agent, and try again when it is lost"
        )
    open_now = _held(state, node) or _loan(state, node) or _unread(state, node)
    if not open_now:
        return ""
    return f"node {name}: {open_now}; if it is certainly off: aryl node confirm-dead {name}"


def _held(state: ClusterState, node: NodeEntry) -> str:
    left = {left.key for left in node.ledger.left_reservations}  # these never run
    job_ids = {key.job_id for key in keys_on(node) - left}  # also of workers that are still to come
    for job in state.live():
        workers = (*job.workers.values(), *(() if job.store is None else (job.store,)))
        if any(worker.node == node.name for worker in workers):
            job_ids.add(job.job_id)
    return f"it may still run {some(sorted(job_ids), NAMED)}" if job_ids else ""


def _loan(state: ClusterState, node: NodeEntry) -> str:
    for loan in state.loans.values():
        if loan.node == node.name and loan.returned_at_s is None:
            return f"its loan {loan.lease_id} is open"
    return ""


def _unread(state: ClusterState, node: NodeEntry) -> str:
    """Work that only its ledger knows: the journal was lost, and it fell silent since."""
    if node.name in state.doubted_nodes:
        return "journal records were lost, and it has not shown since what it runs"
    job_ids = {key.job_id for key in node.ledger.unknown_workers}
    for job in state.live():
        if node.name in job.attempt.awaited_nodes:
            job_ids.add(job.job_id)
    jobs = some(sorted(job_ids), NAMED)
    return f"only its ledger knows what it runs of {jobs}" if jobs else ""


def remove(ctx: Context, node: NodeEntry, said: str) -> None:
    """Carry out the order, or return why nothing was changed.

    Args:
        said: the operator, and the reason.
    """
    why = why_not(ctx.state, node)
    if why:
        ctx.log_event(node.name, "not removed", why)
        return
    state, name = ctx.state, node.name
    # An agent of this name may be alive after all, and obeys nothing that is older than its orders.
    state.least_generation = max(state.least_generation, node.desired.generation)
    del state.nodes[name]
    # Its loan recommendations go with the next loan pass, as for any lost node.
    state.drains.pop(name, None)
    if state.windows.pop(name, None) is not None:
        ctx.changed_jobs.update(state.live_jobs)  # which left it alone
    state.unknown_loads.pop(name, None)
    state.closed_until_s.pop(name, None)
    state.idle_loans_since_s.pop(name, None)
    ctx.changed_nodes[name] = None
    ctx.log_event(name, REMOVED, said)


def begin(ctx: Context, node: NodeEntry, said: str, deadline_s: float | None) -> None:
    """Drain a node that was cordoned; an earlier drain of it is forgotten.

    Flexible workers leave at once in any case, because they cost their jobs no restart.

    Args:
        said: the operator, and the reason.
        deadline_s: seconds for which base workers may go on; None: they are preempted at once.
    """
    reason = f"{node.name} is drained {said}"
    node.cordon.is_draining = True
    ctx.state.drains.pop(node.name, None)
    if deadline_s is None:
        loans_lifecycle.clear_node(ctx, node, reason)
        return
    ctx.state.drains[node.name] = DrainEntry(until_s=ctx.now_s + deadline_s, reason=reason)
    loans_lifecycle.release_flexible(ctx, node)


def end(ctx: Context, node: NodeEntry) -> None:
    """The node may be used again; workers that still run there run on."""
    node.cordon.is_draining = False
    ctx.state.drains.pop(node.name, None)


def settle(ctx: Context) -> None:
    """Preempt, with its grace, what still runs where a deadline is over."""
    for name, drain in sorted(ctx.state.drains.items()):
        if ctx.now_s < drain.until_s:
            continue
        del ctx.state.drains[name]
        node = ctx.state.nodes[name]  # one that is removed takes its drain along
        held = {job.job_id for job, _ in loans_lifecycle.held_on(ctx, node)}
        ctx.log_event(
            name, "drain deadline", f"still there: {', '.join(sorted(held)) or 'nothing'}"
        )
        loans_lifecycle.clear_node(ctx, node, f"{drain.reason}, and its deadline is over")


def next_s(state: ClusterState) -> float | None:
    """The first deadline."""
    return min((drain.until_s for drain in state.drains.values()), default=None)
