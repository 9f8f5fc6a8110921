"""Silent nodes: LOST after a timeout, and later the workers that have certainly ended there.

Silence proves nothing. Workers of a LOST node are unknown, not dead. They hold their job until the
node reports, an operator confirms its death, or the job's own `stop_after_s` has ended them. The
last is a lease, counted on two clocks. An agent informs its shims when it *sent* the last report
that a leader answered; a shim stops its worker `stop_after_s` after that instant, plus its grace. A
leader answers only reports that it received, and counts from the last one, or from the start of its
leadership. The leader's count therefore never starts before the shim's.
"""

from __future__ import annotations

from common.model import JobSpec, NodeName, NodeRole
from common.node_role_table import NodeEvent, next_role
from coordinator.engine.jobs import gang_reservations
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import NodeSilent
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState, Ending, JobEntry, NodeEntry, WorkerEntry

CLOCK_DRIFT_RATIO = 0.002
"""Two clocks differ by less: each runs at most 500 ppm off (adjtimex(2)), and that is doubled."""


def certain_end_s(settings: EngineSettings, spec: JobSpec) -> float | None:
    """Seconds without an answered report after which a node runs no worker of a job; None: never.

    `stop_after_s`, then the whole grace, then the margin for a late shim and the drift of the
    clocks.
    """
    if spec.stop_after_s is None:
        return None
    at_most_s = spec.stop_after_s + spec.checkpoint.grace_s
    return at_most_s * (1.0 + CLOCK_DRIFT_RATIO) + settings.silence_margin_s


def silent(ctx: Context, event: NodeSilent) -> None:
    """The node is LOST; whatever has certainly ended on it by now is a node fault of its job."""
    node = ctx.state.nodes.get(event.node)
    if node is None:
        return
    if node.role != NodeRole.LOST:
        _lose(ctx, node, event)
    for job, worker in loans_lifecycle.held_on(ctx, node):
        after_s = certain_end_s(ctx.settings, job.spec)
        if after_s is not None and event.unanswered_s >= after_s:
            spec = job.spec
            what = (
                f"{node.name} was not heard for {event.unanswered_s:.0f} s, so its worker stopped "
                f"itself: stop_after_s is {spec.stop_after_s:g} s, "
                f"its grace {spec.checkpoint.grace_s:g} s"
            )
            node_fault(ctx, job, worker, what)


def _lose(ctx: Context, node: NodeEntry, event: NodeSilent) -> None:
    loans_lifecycle.drained(ctx, node, until_s=ctx.ago(event.silent_s))
    node.role = next_role(node.role, NodeEvent.SILENT, who=node.name)
    node.serving_since_s = None
    node.contact.silent_since_s = ctx.now_s - event.silent_s
    ctx.changed_nodes[node.name] = None
    ctx.log_event(node.name, "lost", f"no report for {event.silent_s:.1f} s")
    ctx.needs_loan_pass = True
    for job in {job.job_id: job for job, _ in loans_lifecycle.workers_on(ctx, node)}.values():
        jobs_lifecycle.leave_reservations(ctx, job)


def awaited(state: ClusterState, settings: EngineSettings) -> dict[NodeName, float]:
    """LOST nodes on which something will have ended, each with the `unanswered_s` of the first."""
    found: dict[NodeName, float] = {}
    for name, node in state.nodes.items():
        if node.role != NodeRole.LOST:
            continue
        ctx = Context(state, settings, state.now_s)
        ends = (certain_end_s(settings, job.spec) for job, _ in loans_lifecycle.held_on(ctx, node))
        first_s = min((end_s for end_s in ends if end_s is not None), default=None)
        if first_s is not None:
            found[name] = first_s
    return found


def confirm_dead(ctx: Context, node_name: NodeName, by: str) -> None:
    """An operator vouches that a LOST node runs nothing: its workers are node faults now, and it
    will not come home from a loan. If it is heard again, it holds a lease that is over."""
    node = ctx.state.nodes[node_name]
    ctx.log_event(node_name, "confirmed dead", f"by {by}")
    loans_lifecycle.close(ctx, node, f"its node was confirmed dead by {by}")
    node.desired.role = node.home_role
    node.ledger.unknown_workers = []
    for job, worker in loans_lifecycle.held_on(ctx, node):
        node_fault(ctx, job, worker, f"{node.name} was confirmed dead by {by}")
    gang_reservations.release_all(ctx, node)


def node_fault(ctx: Context, job: JobEntry, worker: WorkerEntry, what: str) -> None:
    """A worker or store is gone and its node is to blame; not of a worker that its job gave up."""
    if job.worker(worker.key.worker_index) is not worker:
        return
    jobs_lifecycle.worker_gone(ctx, job, worker, Ending(error=what, is_node_fault=True))
