"""Nodes on which one worker after another fails to start: they are closed for a while.

A node that can start nothing is idle, so every policy prefers it. It would draw one job after
another of the whole cell (a "black hole node"), each free of charge. A single job avoids the node
by itself (`jobs.retry.node_fault`); here the node is closed to all jobs. It is tried again after
`retry_backoff_max_s`, with one job, and reopens once a worker has started on it. A reboot or an
operator (uncordon) also reopens it.

Storage that does not respond may be one job's own, and that fault follows the job to every node. It
closes a node only where the directories of two jobs hang there within that time.
"""

from __future__ import annotations

from common.faults import Fault
from common.messages import OrderPhase, WorkerPhase
from common.model import JobSpec
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import WorkerFact
from coordinator.engine.state.node_groups import FailedStarts, HungStart
from coordinator.engine.state.tables import ClusterState, NodeEntry, WorkerEntry
from coordinator.policies.contract.text import counted

NODES_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""The part of a job's PATH that is its node's in any case."""
HUNG_KEPT = 8
"""Per node; a further hang there is no news."""
MOST = 3
"""This number of refusals in a row closes a node. One may be chance, for example while systemd
reloads.
"""


def heard(
    ctx: Context, node: NodeEntry, worker: WorkerEntry, fact: WorkerFact, *, is_node_fault: bool
) -> None:
    """Learn from the news of one worker whether its node can start any."""
    if fact.phase == WorkerPhase.REFUSED:
        if is_node_fault and worker.stop is None and not wants_gone_gpu(node, worker):
            _refused(ctx, node, worker, fact)
        return
    has_run = fact.phase == WorkerPhase.RUNNING or fact.exit_code is not None
    if (node.failed_starts.refused or node.failed_starts.hung) and has_run and not is_node_fault:
        forget(ctx, node, f"{worker.key} has started there")


def wants_gone_gpu(node: NodeEntry, worker: WorkerEntry) -> bool:
    """True if it was placed on a missing GPU: that is no evidence against the rest of the node."""
    there = {slot.uuid for slot in node.gpus if not slot.is_gone}
    return not there.issuperset(worker.gpu_uuids)


def _refused(ctx: Context, node: NodeEntry, worker: WorkerEntry, fact: WorkerFact) -> None:
    """An attempt counts once, however many workers it has there, and only if its gang was ready. A
    node's report on a reserved worker may be due to the job's own storage, and the jobs of one
    user would close one node after another.
    """
    key, last = worker.key, node.failed_starts.last
    if worker.order != OrderPhase.RUN:
        return
    if last is not None and (key.job_id, key.attempt) == (last.job_id, last.attempt):
        return
    node.failed_starts.last = key
    rest_s = ctx.settings.retry_backoff_max_s
    job = ctx.job(key.job_id)
    is_hung = fact.fault == Fault.STORAGE
    storage = _begins_in(job.spec) if job is not None and is_hung else ""
    if storage:
        count = node.failed_starts.refused + _hung(ctx, node, storage, within_s=rest_s)
    else:
        count = node.failed_starts.refused = node.failed_starts.refused + 1
    is_shown = not storage or len({hung.directory for hung in node.failed_starts.hung}) > 1
    if count < MOST or not is_shown or node.failed_starts.closed_reason or rest_s <= 0:
        return
    times = counted(count, "start")
    node.failed_starts.closed_reason = f"it refused {times} in a row, the last: {fact.error}"
    ctx.state.closed_until_s[node.name] = ctx.now_s + rest_s
    ctx.log_event(
        node.name, "takes nothing new", f"{node.failed_starts.closed_reason}; for {rest_s:.0f} s"
    )
    _changed(ctx, node)


def _begins_in(spec: JobSpec) -> str:
    """The storage that a worker needs to begin and that need not be its node's; empty: none.

    A worker begins in its directory and runs its program, which is looked up along its own PATH if
    it has one; its node checks its checkpoint before. The report does not name the one that hangs.
    """
    if spec.workdir != "/":
        return spec.workdir
    directory, _, program = spec.command[0].rpartition("/")
    if directory.startswith("/"):
        return directory
    looked_in = spec.env.get("PATH", "").split(":") if program == spec.command[0] else []
    own = (part for part in looked_in if part.startswith("/") and part not in NODES_PATH)
    return spec.checkpoint.path or next(own, "")


def _hung(ctx: Context, node: NodeEntry, directory: str, *, within_s: float) -> int:
    """Remember a start for which storage did not answer; how many there were within some time."""
    recent = [hung for hung in node.failed_starts.hung if hung.at_s > ctx.now_s - within_s]
    node.failed_starts.hung = [*recent, HungStart(directory, ctx.now_s)][-HUNG_KEPT:]
    return len(node.failed_starts.hung)


def forget(ctx: Context, node: NodeEntry, why: str) -> None:
    """The cause of its failed starts is gone, or may be."""
    _open(ctx, node, why)
    node.failed_starts = FailedStarts()


def settle(ctx: Context) -> None:
    """Try nodes again that were closed for long enough; one more refusal closes them again."""
    for name, until_s in sorted(ctx.state.closed_until_s.items()):
        if ctx.now_s >= until_s:
            _open(ctx, ctx.state.nodes[name], "it is tried again")


def next_s(state: ClusterState) -> float | None:
    """When the first of them is tried again."""
    return min(state.closed_until_s.values(), default=None)


def why(state: ClusterState, node: NodeEntry) -> str:
    """In words, why nothing new begins on a node, and how long yet; empty for one that is open."""
    closed = node.failed_starts.closed_reason
    if not closed:
        return ""
    left_s = max(0.0, state.closed_until_s[node.name] - state.now_s)
    return (
        f"nothing new is placed on it for {left_s:.0f} s, and it is not lent: {closed} "
        f"(aryl node uncordon {node.name} when that is mended)"
    )


def _open(ctx: Context, node: NodeEntry, why: str) -> None:
    if node.failed_starts.closed_reason:
        node.failed_starts.closed_reason = ""
        del ctx.state.closed_until_s[node.name]
        ctx.log_event(node.name, "takes new work again", why)
        _changed(ctx, node)


def _changed(ctx: Context, node: NodeEntry) -> None:
    ctx.changed_nodes[node.name] = None
    ctx.needs_pass = ctx.needs_loan_pass = True
