"""The life of a loan as the coordinator sees it: made, confirmed, reclaimed, returned.

Each service is promised its lent nodes within a reclaim deadline; this module derives it.

It also keeps the stages of an ordered return, from the load that caused it to the node's last
report. Instants of two machines' clocks are never compared.
"""

from __future__ import annotations

from common.history import LoanRecord, StoryKind
from common.messages import GpuHealth, process_named
from common.model import Lease, LeaseId, NodeName, NodeRole, ServiceName, StopReason
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.loans import unknown_loads
from coordinator.engine.state import context as state_context
from coordinator.engine.state.context import Context, keys_on, sick_slots
from coordinator.engine.state.events import NodeReported
from coordinator.engine.state.loan_outcome import (
    has_left,
    is_lapse,
    is_late,
    is_reclaim,
    is_turn_back,
    overdue_s,
)
from coordinator.engine.state.tables import JobEntry, LoanEntry, NodeEntry, WorkerEntry
from coordinator.policies.contract.decisions import Loan, Reclaim


def load_age_s(ctx: Context, loan: LoanEntry) -> float:
    """How old the load of a loan's service is by which a policy decides now, in seconds."""
    service = ctx.state.services.get(loan.service)
    return ctx.now_s - service.load[-1].at_s if service is not None and service.load else 0.0


def of_reclaim(loan: LoanEntry, event: NodeReported, *, home_at_s: float) -> dict[str, float]:
    """All stages of a reclaim, in seconds and in order.

    The node reports how long its own stages took and how long ago they were over; the rest, on
    this clock, is how long the call took until its node acted on it. Of a node that
    does not report how long ago, only its stages are known. After a reboot on the way
    the rest cannot be divided, so all of it is `unattended`.
    """
    own_s = dict(event.stage_durations_s)
    ordered_at_s, called_at_s = loan.reclaim_ordered_at_s, loan.called_home_at_s
    if event.home_ago_s is None or ordered_at_s is None:
        return own_s
    if loan.is_lapsed or loan.turned_back:
        # During a delayed reclaim the node was not called yet; its own stages count from the call.
        way_s = sum(own_s.values()) + event.home_ago_s
        wait_s = max(0.0, home_at_s - ordered_at_s - way_s)
        return {"decide": loan.decide_s, "wait": wait_s} | own_s | {"heard": event.home_ago_s}
    if called_at_s is None:
        return own_s
    heard_s = min(event.home_ago_s, home_at_s - called_at_s)
    # Less than zero for a node whose lease had ended before the call, without a report: see
    # `agent.core.return_timing`, which counts from there.
    rest_s = max(0.0, home_at_s - called_at_s - sum(own_s.values()) - heard_s)
    stages_s = {"decide": loan.decide_s}
    if called_at_s > ordered_at_s:
        stages_s["wait"] = called_at_s - ordered_at_s
    if event.boot_id == loan.called_home_boot_id:
        stages_s["notify"] = rest_s
    else:
        own_s["unattended"] = own_s.get("unattended", 0.0) + rest_s
    return stages_s | own_s | {"heard": heard_s}


def reclaim_s(ctx: Context, service: ServiceName) -> float:
    """The reclaim deadline of a service, in seconds: of one that is no longer in the settings, the
    last one that it had; of one that never was in any, the TTL of its leases."""
    promised_s = known_s(ctx, service)
    return ctx.settings.lease_ttl_s if promised_s is None else promised_s


def known_s(ctx: Context, service: ServiceName) -> float | None:
    """As `reclaim_s`; None for a service without any promise so far."""
    settings = ctx.service_settings(service)
    if settings is not None:
        return settings.reclaim_deadline_s
    entry = ctx.state.services.get(service)
    return None if entry is None else entry.reclaim_deadline_s


_DRAINING, _ON_LOAN, _SERVING = NodeRole.DRAINING, NodeRole.ON_LOAN, NodeRole.SERVING
"""Members of an enum are slow to look up, and every report asks for these."""

_NOT_LENT = (NodeRole.SERVING, NodeRole.QUARANTINED, NodeRole.WARMING)
"""Roles from which warming up, by a boot or out of quarantine, says nothing of a loan."""

DURATIONS_KEPT = 10_000
"""The number of returns kept for the figures."""


def lend(ctx: Context, decision: Loan) -> str:
    """Commit a loan; returns why not, or an empty string."""
    why = why_not_lent(ctx, decision.node)
    if why:
        return why
    node = ctx.state.nodes[decision.node]
    ctx.state.recommendations.pop(node.name, None)  # it is carried out, and not withdrawn
    lease_id = LeaseId(f"l{ctx.state.epoch}-{ctx.state.next_lease_number}")
    ctx.state.next_lease_number += 1
    node.lease = Lease(lease_id=lease_id, service=decision.service, ttl_s=ctx.settings.lease_ttl_s)
    node.desired.role = NodeRole.ON_LOAN
    node.homecoming.lease_id = lease_id
    ctx.state.loans[lease_id] = LoanEntry(
        lease_id=lease_id,
        node=node.name,
        service=decision.service,
        decided_at_s=ctx.now_s,
        reason=decision.reason,
    )
    ctx.state.counters.loans += 1
    ctx.log_event(node.name, f"lend (lease {lease_id})", decision.reason)
    ctx.touch(node.name)
    return ""


def why_not_lent(ctx: Context, name: NodeName) -> str:
    """Why a node cannot be lent now, whichever policy decides; empty if it can be."""
    node = ctx.state.nodes.get(name)
    if node is None or not node.contact.is_heard:
        return f"{name} was not heard"
    return _why_not(ctx, node)


def _why_not(ctx: Context, node: NodeEntry) -> str:
    """Why a node that was heard is not lent; empty when it may be."""
    if node.role != NodeRole.SERVING or node.desired.role != NodeRole.SERVING:
        return f"{node.name} is {node.role}"
    if node.cordon.is_cordoned or node.cordon.is_closing:
        near = "not lent: its maintenance window is near"
        return f"{node.name} is {'cordoned' if node.cordon.is_cordoned else near}"
    if closed := node.ledger.error or node.failed_starts.closed_reason:
        return f"{node.name} takes nothing new: {closed}"
    if not node.gpus:
        return f"{node.name} has no GPU that a worker could have"
    if node.is_out:
        return f"{node.name} takes nothing new after a fault of its GPUs"
    if unknown := unknown_loads.why_not_lent(ctx.state, node.name):
        return unknown
    if sick := sick_slots(node):
        # Its server runs beside that GPU. Once stopped it might never be healthy again, and no
        # deadline could be kept: the agent waits for each GPU to be free.
        is_out = sick[0].health == GpuHealth.OK
        what = "gone" if sick[0].is_gone else "out after a fault" if is_out else sick[0].health
        return f"{node.name} is not lent: its GPU {sick[0].uuid} is {what}"
    if node.trespassed:
        # No worker would get it, and its server may not find room beside that process again.
        uuid, pid = min(node.trespassed.items())
        who = process_named(pid)
        return (
            f"{node.name} is not lent: its GPU {uuid} is used by {who}, which is not its server's"
        )
    if node.homecoming.lease_id is not None and _is_open(ctx, node.homecoming.lease_id):
        # It may not know yet that it was recalled: two loans of a node could not be told apart.
        return f"{node.name} was not heard to have ended loan {node.homecoming.lease_id}"
    return ""


def _is_open(ctx: Context, lease_id: LeaseId) -> bool:
    loan = ctx.state.loans.get(lease_id)
    return loan is not None and loan.returned_at_s is None


def reclaim(ctx: Context, decision: Reclaim) -> str:
    """Commit a reclaim; what still runs there is released or preempted, never left."""
    node = ctx.state.nodes.get(decision.node)
    if node is None or node.lease is None or node.desired.role != NodeRole.ON_LOAN:
        return f"{decision.node} is not lent"
    loan = ctx.state.loans[node.lease.lease_id]
    node.homecoming.reclaim_at_s = note_order(ctx, loan, decision)
    loan.called_home_at_s, loan.called_home_boot_id = ctx.now_s, node.boot_id
    node.desired.role = NodeRole.SERVING
    node.lease = None
    ctx.log_event(node.name, f"reclaim (lease {loan.lease_id})", decision.reason)
    clear_node(ctx, node, f"{node.name} goes back to {loan.service}: {decision.reason}", loan)
    ctx.touch(node.name)
    return ""


def note_order(ctx: Context, loan: LoanEntry, decision: Reclaim) -> float:
    """Remember when and why a loan was called back; returns when its node must be home.

    The promise is that of the first order, as its service has missed the node since then: another
    one, while the first waits, can only bring it forward.
    """
    ordered_at_s, within_s = loan.reclaim_ordered_at_s, decision.deadline_s
    if ordered_at_s is None:
        ordered_at_s, loan.decide_s = ctx.now_s, 0.0
        # for a loan that has not left, the outcome is still unknown
        ctx.state.counters.reclaims += has_left(loan)
    elif loan.reclaim_deadline_s is not None:
        within_s = min(loan.reclaim_deadline_s, ctx.now_s - ordered_at_s + within_s)
    loan.reclaim_ordered_at_s, loan.reclaim_deadline_s = ordered_at_s, within_s
    loan.reclaim_reason = decision.reason
    loan.predicted_preemptions = decision.predicted_preemptions
    loan.predicted_cost_gpu_s = decision.predicted_cost_gpu_s
    return ordered_at_s + within_s


def close(ctx: Context, node: NodeEntry, why: str) -> None:
    """End the open loan of a node that will not come back to its service by it.

    The caller sets the node's desired state from now on.
    """
    loan = ctx.state.latest_loan(node)
    node.lease = node.homecoming.lease_id = node.homecoming.reclaim_at_s = None
    if loan is None or loan.returned_at_s is not None:
        return
    loan.returned_at_s, loan.ended_reason = ctx.now_s, why
    _count_late(ctx, loan)
    ctx.log_event(node.name, f"loan {loan.lease_id} ended", why)
    _account(ctx, loan)
    state_context.forget_loans(ctx)


def workers_on(ctx: Context, node: NodeEntry) -> list[tuple[JobEntry, WorkerEntry]]:
    """Live workers of a node with their jobs, by job id and index."""
    found: list[tuple[JobEntry, WorkerEntry]] = []
    all_jobs = ctx.state.jobs
    for key in sorted(keys_on(node)):
        job = all_jobs.get(key.job_id)
        if job is not None and job.attempt.number == key.attempt:  # as `Context.worker` has it
            worker = job.workers.get(key.worker_index)
            if worker is not None:
                found.append((job, worker))
    return found


def held_on(ctx: Context, node: NodeEntry) -> list[tuple[JobEntry, WorkerEntry]]:
    """As `workers_on`, followed by the rendezvous stores of the node, by job id."""
    found = workers_on(ctx, node)
    for key in sorted(node.ledger.stores):
        job = ctx.state.jobs.get(key.job_id)
        if job is not None and job.store is not None and job.store.key == key:
            found.append((job, job.store))
    return found


def release_flexible(ctx: Context, node: NodeEntry) -> None:
    """Release the flexible workers of a node, and leave the others where they are."""
    for job, worker in workers_on(ctx, node):
        if worker.is_flexible and worker.stop is None and job.after_vacating is None:
            jobs_lifecycle.stop_workers(
                ctx, job, StopReason.RELEASE, only=(worker.key.worker_index,)
            )


def clear_node(ctx: Context, node: NodeEntry, reason: str, loan: LoanEntry | None = None) -> None:
    """Release the flexible workers of a node; preempt the jobs whose base runs there."""
    for job, worker in held_on(ctx, node):
        if worker.stop is not None or job.after_vacating is not None:
            continue
        if worker.is_flexible:
            jobs_lifecycle.stop_workers(
                ctx, job, StopReason.RELEASE, only=(worker.key.worker_index,)
            )
        else:
            jobs_lifecycle.preempt(ctx, job, reason, loan=loan)


def role_reported(
    ctx: Context, node: NodeEntry, event: NodeReported, *, old_role: NodeRole
) -> None:
    """A lent node moved: the loan began, ended by itself, or is home."""
    if node.homecoming.lease_id is not None:
        _note_left(ctx, node, event, old_role=old_role)
    node.homecoming.stage_durations_s = event.stage_durations_s
    if node.lease is not None:
        loan = ctx.state.loans[node.lease.lease_id]
        if node.role == _ON_LOAN and event.lease_id == loan.lease_id:
            if loan.begun_at_s is None:
                was_reclaim, loan.begun_at_s = is_reclaim(loan), ctx.now_s
                ctx.state.counters.reclaims += is_reclaim(loan) and not was_reclaim
                ctx.log_event(node.name, f"on loan (lease {loan.lease_id})", loan.reason)
        elif _has_gone_home(node, loan) or _has_let_go(ctx, node, event):
            _went_home(ctx, node, loan, event)
    elif node.role == _ON_LOAN and node.desired.role == _SERVING:
        _adopt_lease(ctx, node, event)
    if node.role == _SERVING and (old_role != _SERVING or _never_left(ctx, node, event)):
        _home(ctx, node, event)


def _note_left(ctx: Context, node: NodeEntry, event: NodeReported, *, old_role: NodeRole) -> None:
    """Note that a node stopped its server for a loan not yet reported begun, or drained past its
    deadline.

    Its drain may have ended before the recall reached it. The roles on its way show it. Where no
    report fell into the way, its measured stages do: a node forgets those of the way before when it
    takes a lease. A server that quarantine restarts was not stopped for a loan.
    """
    loan = _not_begun(ctx, node)
    if loan is None or (node.lease is not None and node.role == _ON_LOAN):
        return  # it begins
    stages_s = event.stage_durations_s
    loan.is_server_stopped = (
        node.role in (NodeRole.ON_LOAN, NodeRole.VACATING)
        or (node.role == NodeRole.WARMING and old_role not in _NOT_LENT)
        or ("device_free" in stages_s and stages_s != node.homecoming.stage_durations_s)
    )
    if node.role == _DRAINING or (old_role == _DRAINING and event.is_move_heard):
        loan.is_drain_late = overdue_s(loan, ctx.now_s) > 0
    ctx.state.counters.reclaims += is_reclaim(loan)


def drained(ctx: Context, node: NodeEntry, *, until_s: float) -> None:
    """A node is not heard from now on that was until an instant; if it drained, it did so then.

    Its next report may be that it serves, and is no word of when it began to.
    """
    loan = _not_begun(ctx, node) if node.role == _DRAINING else None
    if loan is not None:
        loan.is_drain_late = overdue_s(loan, until_s) > 0
        ctx.state.counters.reclaims += is_reclaim(loan)


def _not_begun(ctx: Context, node: NodeEntry) -> LoanEntry | None:
    """The open loan of a node that is not known to have left its service for it."""
    loan = ctx.state.latest_loan(node)
    return None if loan is None or loan.returned_at_s is not None or has_left(loan) else loan


def _has_gone_home(node: NodeEntry, loan: LoanEntry) -> bool:
    """Whether a node that we still want on loan has left that road by itself."""
    if loan.begun_at_s is not None:
        return node.role != NodeRole.LOST
    return node.role in (NodeRole.QUARANTINED, NodeRole.VACATING, NodeRole.WARMING)


def _never_left(ctx: Context, node: NodeEntry, event: NodeReported) -> bool:
    """Whether a loan that was called back is over without any report of the node's having moved.

    The call may overtake the order to go, and a way there and back fit between two reports.
    """
    return (
        node.lease is None and node.homecoming.lease_id is not None and _lets_go(ctx, node, event)
    )


def _has_let_go(ctx: Context, node: NodeEntry, event: NodeReported) -> bool:
    """Whether a node that acts on our latest order holds no lease: it gave the loan up.

    An agent that turns back while draining serves again without ever having been on loan.
    """
    return node.role == NodeRole.SERVING and _lets_go(ctx, node, event)


def _lets_go(ctx: Context, node: NodeEntry, event: NodeReported) -> bool:
    """Whether a node that acts on our latest order holds no lease."""
    is_current = event.epoch == ctx.state.epoch and event.generation >= node.desired.generation
    return is_current and event.lease_id is None


def _adopt_lease(ctx: Context, node: NodeEntry, event: NodeReported) -> None:
    """A new leader adopts the leases that it finds, unless the loan was called back."""
    if event.lease_id is None or event.lease_id in ctx.state.loans:
        return
    service = node.service
    if service is None:
        return
    node.lease = Lease(lease_id=event.lease_id, service=service, ttl_s=ctx.settings.lease_ttl_s)
    node.desired.role = NodeRole.ON_LOAN
    node.homecoming.lease_id = event.lease_id
    ctx.state.loans[event.lease_id] = LoanEntry(
        lease_id=event.lease_id,
        node=node.name,
        service=service,
        decided_at_s=ctx.now_s,
        begun_at_s=ctx.now_s,
        reason="adopted: the node holds this lease",
    )
    ctx.state.counters.loans += 1  # this loan was never counted, and its end will be
    ctx.log_event(node.name, f"lease {event.lease_id} adopted", "found on the node")
    ctx.touch(node.name)


def _went_home(ctx: Context, node: NodeEntry, loan: LoanEntry, event: NodeReported) -> None:
    """The node went home by itself: its lease ended, or it gave the loan up before it began, and no
    order had reached it."""
    promised_s = known_s(ctx, loan.service)
    turned_back = None if loan.begun_at_s is not None else event.turned_back
    if turned_back is not None and turned_back.lease_id == loan.lease_id:
        loan.turned_back, loan.turned_back_at_s = turned_back.reason, ctx.now_s
        loan.turn_back_deadline_s = promised_s
        ctx.state.counters.turn_backs += is_turn_back(loan)
        ctx.log_event(node.name, f"turned back (lease {loan.lease_id})", turned_back.reason)
    else:
        loan.is_lapsed, loan.lapsed_at_s = True, ctx.now_s
        if promised_s is not None:
            ttl_s = ctx.settings.lease_ttl_s if node.lease is None else node.lease.ttl_s
            loan.lapse_deadline_s = max(0.0, promised_s - ttl_s)
        ctx.state.counters.leases_lapsed += loan.reclaim_ordered_at_s is None
        ctx.log_event(node.name, f"lease {loan.lease_id} ended by itself", node.detail)
    node.lease = None
    node.desired.role = NodeRole.SERVING
    clear_node(ctx, node, f"{node.name} went home by itself", loan)
    ctx.touch(node.name)


def _home(ctx: Context, node: NodeEntry, event: NodeReported) -> None:
    """The node serves again: close its loan and compare with the deadline."""
    node.homecoming.reclaim_at_s = None
    loan = ctx.state.latest_loan(node)
    if loan is None or loan.returned_at_s is not None or node.lease is not None:
        return
    node.homecoming.lease_id = None
    loan.returned_at_s = ctx.now_s
    state_context.forget_loans(ctx)
    loan.stage_durations_s = dict(event.stage_durations_s)
    if loan.lapsed_at_s is not None and has_left(loan):
        loan.lapse_s = _way_s(ctx, loan, loan.lapsed_at_s)
    if loan.turned_back_at_s is not None and has_left(loan):
        loan.turn_back_s = _way_s(ctx, loan, loan.turned_back_at_s)
    if loan.reclaim_ordered_at_s is not None:
        _reclaimed(ctx, node, loan, event)
    elif loan.lapse_s is not None:
        _keep_duration(ctx.state.counters.lapse_s, loan.lapse_s)
        _tell_home(ctx, node, loan, _since(loan))
    elif loan.turn_back_s is not None:
        _keep_duration(ctx.state.counters.turn_back_s, loan.turn_back_s)
        _tell_home(ctx, node, loan, _since(loan))
    _account(ctx, loan)


def _account(ctx: Context, loan: LoanEntry) -> None:
    """Record the account of a loan that is over."""
    ended_at_s = ctx.now_s if loan.returned_at_s is None else loan.returned_at_s
    record = LoanRecord(
        lease_id=loan.lease_id,
        node=loan.node,
        service=loan.service,
        decided_at_s=loan.decided_at_s,
        begun_at_s=loan.begun_at_s,
        reclaim_ordered_at_s=loan.reclaim_ordered_at_s,
        ended_at_s=ended_at_s,
        outcome=_outcome(loan),
        is_late=is_late(loan),
        preemptions=loan.realised_preemptions,
        lost_gpu_s=loan.realised_cost_gpu_s,
        stage_durations_s=dict(loan.stage_durations_s),
    )
    said = f"{record.outcome} after {ended_at_s - loan.decided_at_s:.0f} s"
    what = f"loan {loan.lease_id} over"
    ctx.log_event(loan.node, what, said, kind=StoryKind.LOAN, detail=record)


def _outcome(loan: LoanEntry) -> str:
    if loan.ended_reason:
        return "ended"
    if not has_left(loan):
        return "cancelled"
    if is_turn_back(loan):
        return "turned_back"
    return "lapsed" if is_lapse(loan) else "returned"


def _reclaimed(ctx: Context, node: NodeEntry, loan: LoanEntry, event: NodeReported) -> None:
    """A node that was ordered home is; its lease may have lapsed while the order waited."""
    assert loan.reclaim_ordered_at_s is not None
    if not has_left(loan):
        ctx.state.counters.loans_cancelled += 1
        return
    took_s = ctx.now_s - loan.reclaim_ordered_at_s
    loan.stage_durations_s = of_reclaim(loan, event, home_at_s=ctx.now_s)
    _keep_duration(ctx.state.counters.reclaim_s, took_s)
    said = f"{took_s:.1f} s of {loan.reclaim_deadline_s or 0.0:.1f} s"
    if since := _since(loan):
        said += f", {since}"
    _tell_home(ctx, node, loan, said)


def _since(loan: LoanEntry) -> str:
    """How long ago a node that was not recalled went home; empty for one that was."""
    if loan.lapse_s is not None:
        return f"{loan.lapse_s:.1f} s after its lease ended by itself"
    return "" if loan.turn_back_s is None else f"{loan.turn_back_s:.1f} s after it turned back"


def _tell_home(ctx: Context, node: NodeEntry, loan: LoanEntry, how: str) -> None:
    _count_late(ctx, loan)
    ctx.log_event(node.name, "home again" + (", late" if is_late(loan) else ""), how)


def _count_late(ctx: Context, loan: LoanEntry) -> None:
    """It is over: was a promise broken by it?"""
    counters = ctx.state.counters
    if loan.reclaim_ordered_at_s is not None:
        counters.reclaims_late += is_late(loan)
    elif is_turn_back(loan):
        counters.turn_backs_late += is_late(loan)
    else:
        counters.lapses_late += is_late(loan)


def _way_s(ctx: Context, loan: LoanEntry, heard_at_s: float) -> float:
    """Seconds of a return that was not ordered.

    The node's own measure counts, from the end of its lease: the leader may have received the
    report of its begin late, or of its end long after. A node without a measure is judged by the
    reports.
    """
    return sum(loan.stage_durations_s.values()) or ctx.now_s - heard_at_s


def _keep_duration(kept: list[float], took_s: float) -> None:
    kept.append(took_s)
    del kept[:-DURATIONS_KEPT]
