"""Maintenance windows: a node is drained at an instant to come, and is prepared for it.

Until then nothing starts on the node that would not be over by then. The end of a job is its own
time limit, with the time of a start before it and the grace of a stop after it. An estimate is no
limit, so a job without a time limit does not start there. What runs there already goes on, and the
drain ends it.

A lent node is called home so early that the reclaim deadline of its service ends with the begin of
the window, and it is not lent any more one lease TTL before that. Limits of jobs do not count on
it: a loan may end at any time, and takes no more starts once it is about to.

From the instant at which a node is not lent any more, its service counts it as gone. Lent nodes
that replace it are then called home, and are home when the window begins.

A window is an order of an operator and is kept in the state: it survives a change of leader, and
holds while the cell is frozen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from common.model import JobId, JobState, NodeName, Pool
from coordinator.engine.jobs import node_selection
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.loans import recall
from coordinator.engine.nodes import maintenance
from coordinator.engine.state import mixed_nodes
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import ClusterState, JobEntry, NodeEntry, WindowEntry
from coordinator.policies.contract.text import some

NAMED = 4
"""Nodes that one reason names; more are counted."""
TOGETHER_S = 1.0
"""Windows that begin within this are one to people: each node of a rack has an order of its own."""
_COMPUTING = (JobState.RUNNING, JobState.RESIZING, JobState.SUSPENDED)


# --- the order ------------------------------------------------------------------------------------


def why_not(node: NodeEntry) -> str:
    """Why a node may not have a window; empty when it may."""
    if not node.cordon.is_draining:
        return ""
    return f"node {node.name} is drained already; to use it until then: aryl node uncordon"


def order(
    ctx: Context, node: NodeEntry, said: str, *, in_s: float, deadline_s: float | None
) -> None:
    """Give a node a window, in place of one that it has.

    Args:
        said: the operator, and the reason.
        in_s: when its drain begins, in seconds from now.
        deadline_s: as in `maintenance.begin`.
    """
    why = why_not(node)
    if why:
        ctx.log_event(node.name, "no window", why)
        return
    window = WindowEntry(at_s=ctx.now_s + in_s, reason=said, deadline_s=deadline_s)
    ctx.state.windows[node.name] = window
    _reckon(ctx, node, window)
    _changed(ctx, node)


def cancel(ctx: Context, node: NodeEntry) -> None:
    """The node has no window any more, if it had one. Nothing that ended for it comes back."""
    if ctx.state.windows.pop(node.name, None) is not None:
        node.cordon.is_closing = False
        _changed(ctx, node)


def reckon(ctx: Context) -> None:
    """The settings may be others: the instants of loans follow from them."""
    for name, window in sorted(ctx.state.windows.items()):
        _reckon(ctx, ctx.state.nodes[name], window)


def _reckon(ctx: Context, node: NodeEntry, window: WindowEntry) -> None:
    if node.service is None:
        window.lent_until_s = window.home_from_s = window.at_s
    else:
        window.home_from_s = window.at_s - loans_lifecycle.reclaim_s(ctx, node.service)
        window.lent_until_s = window.home_from_s - ctx.settings.lease_ttl_s
    window.next_s = window.lent_until_s
    node.cordon.is_closing = window.is_called_home = False


def _changed(ctx: Context, node: NodeEntry) -> None:
    """Which nodes a job leaves alone is part of its view, of any job."""
    ctx.changed_nodes[node.name] = None
    ctx.changed_jobs.update(ctx.state.live_jobs)


# --- its instants ---------------------------------------------------------------------------------


def next_s(state: ClusterState) -> float | None:
    """The next instant at which time alone changes something."""
    return min([window.next_s for window in state.windows.values()], default=None)


def is_due(ctx: Context) -> bool:
    """Whether the time of a stage has come; asked after each event."""
    return any(window.next_s <= ctx.now_s for window in ctx.state.windows.values())


def settle(ctx: Context) -> None:
    """Carry out the stages of windows whose time has come."""
    for name, window in sorted(ctx.state.windows.items()):
        if ctx.now_s < window.next_s:
            continue
        node = ctx.state.nodes[name]  # one that is removed takes its window along
        is_home_time = ctx.now_s >= window.home_from_s
        window.next_s = window.at_s if is_home_time else window.home_from_s
        if not node.cordon.is_closing:
            node.cordon.is_closing = True
            ctx.changed_nodes[name] = None
            ctx.needs_pass = ctx.needs_loan_pass = True
        if is_home_time and not window.is_called_home:
            window.is_called_home = True
            left_s = max(0.0, window.at_s - ctx.now_s)
            recall.call_home(ctx, node, f"{name} closes in {left_s:.0f} s, ordered {window.reason}")
        if ctx.now_s >= window.at_s:
            _begin(ctx, node, window)


def _begin(ctx: Context, node: NodeEntry, window: WindowEntry) -> None:
    cancel(ctx, node)
    ctx.log_event(node.name, "window begins", f"drained as ordered {window.reason}")
    node.cordon.is_cordoned, node.cordon.reason = True, window.reason
    maintenance.begin(ctx, node, window.reason, window.deadline_s)
    ctx.touch(node.name)
    ctx.needs_pass = ctx.needs_loan_pass = True


# --- the starts -----------------------------------------------------------------------------------


def longest_s(ctx: Context, job: JobEntry) -> float | None:
    """The longest that an attempt holds its nodes by the job's time limit, from the decision to
    start it; None: it has no time limit.
    """
    if job.spec.time_limit_s is None:
        return None
    return ctx.settings.start_p99_s + job.spec.time_limit_s + job.spec.checkpoint.grace_s


def ends_at_s(ctx: Context, job: JobEntry, *, is_new: bool = False) -> float:
    """When the attempt of a job is over by its time limit, or one that starts now; infinite without
    a limit.

    is_new: it starts now, although another attempt of the job computes.
    """
    whole_s = longest_s(ctx, job)
    if whole_s is None:
        return inf
    ran_at_s = job.attempt.ran_at_s
    if is_new or ran_at_s is None or job.state not in _COMPUTING:
        return ctx.now_s + whole_s
    return ran_at_s + whole_s - ctx.settings.start_p99_s  # it has started


def barred(ctx: Context, job: JobEntry) -> list[NodeName]:
    """The nodes on which no worker of a job may start now, because it would overrun a window."""
    if not ctx.state.windows:
        return []
    end_s = _view_ends_at_s(ctx, job)
    return [name for name, at_s in _of_training(ctx.state) if at_s < end_s]


def _of_training(state: ClusterState) -> list[tuple[NodeName, float]]:
    """The windows that the limits of jobs count for, and when each begins."""
    return [
        (name, window.at_s)
        for name, window in state.windows.items()
        if state.nodes[name].home_pool == Pool.TRAINING
    ]


def _view_ends_at_s(ctx: Context, job: JobEntry) -> float:
    """As `ends_at_s`, whatever a policy does with the job: one that cannot grow starts elsewhere
    only as a new attempt, with its whole limit before it again.
    """
    return ends_at_s(ctx, job, is_new=not job.spec.is_elastic)


def closes_at_s(state: ClusterState, node: NodeEntry) -> float | None:
    """When a node closes for jobs by their time limits; None: it has no such window."""
    window = state.windows.get(node.name) if state.windows else None
    return None if window is None or node.home_pool != Pool.TRAINING else window.at_s


def why_not_on(ctx: Context, job: JobEntry, node: NodeEntry, *, is_new: bool) -> str:
    """Why no worker of a job may start on a node now; empty when its window allows it."""
    window = ctx.state.windows.get(node.name)
    if window is None or node.home_pool != Pool.TRAINING:
        return ""
    end_s = ends_at_s(ctx, job, is_new=is_new)
    if end_s <= window.at_s:
        return ""
    return f"{_closes(ctx, [node.name], window.at_s)}, {_too_long(job, end_s - window.at_s)}"


def could_host(job: JobEntry, node: NodeEntry) -> bool:
    """Whether a job may use a node by its labels and its GPUs, whatever is on it now."""
    fits = any(
        job.spec.gpu.accepts(kind) and node.count_of(kind) >= job.spec.gpus_per_worker
        for kind in mixed_nodes.kinds(node)
    )
    return fits and not node_selection.why_not_on(job.spec, node)


def why_waiting(ctx: Context, job: JobEntry) -> tuple[str, ...]:
    """Which nodes that could host a job it leaves alone because they close; a sentence for each
    instant.
    """
    groups: list[tuple[float, list[NodeName]]] = []
    hosts = [name for name in barred(ctx, job) if could_host(job, ctx.state.nodes[name])]
    for at_s, name in sorted((ctx.state.windows[name].at_s, name) for name in hosts):
        if not groups or at_s - groups[-1][0] > TOGETHER_S:
            groups.append((at_s, []))
        groups[-1][1].append(name)
    end_s = ends_at_s(ctx, job)
    return tuple(
        f"{_closes(ctx, sorted(names), at_s)}, {_too_long(job, end_s - at_s)}"
        for at_s, names in groups
    )


def _closes(ctx: Context, names: list[NodeName], at_s: float) -> str:
    does = "closes" if len(names) == 1 else "close"
    return f"{some(names, NAMED)} {does} in {max(0.0, at_s - ctx.now_s):.0f} s"


def _too_long(job: JobEntry, over_s: float) -> str:
    if job.spec.time_limit_s is None:
        return f"and {job.job_id} has no time limit"
    return f"and {job.job_id} may run until {over_s:.0f} s after that by its time limit"


class Barred:
    """How many windows each job would overrun, as the views of jobs have it: time alone changes it.

    An order changes it as well, and marks all jobs as changed.
    """

    def __init__(self) -> None:
        self._counts: dict[JobId, int] = {}
        self._until_s = inf
        """No other job moves before."""

    def moved(self, ctx: Context, changed: Iterable[JobId]) -> list[JobId]:
        """The jobs for which that is no longer so.

        changed: the jobs whose views are stale already; after an order, all of them.
        """
        if not ctx.state.windows:
            self._counts, self._until_s = {}, inf
            return []
        before, looks = self._counts, changed
        if ctx.now_s >= self._until_s:
            looks, self._counts, self._until_s = ctx.state.live_jobs, {}, inf
        instants_s = sorted(at_s for _, at_s in _of_training(ctx.state))
        moved: list[JobId] = []
        for job_id in looks:
            if job_id in ctx.state.live_jobs:
                count = self._look(ctx, ctx.state.jobs[job_id], instants_s)
                if before.get(job_id) != count:
                    moved.append(job_id)
                self._counts[job_id] = count
        return moved

    def _look(self, ctx: Context, job: JobEntry, instants_s: list[float]) -> int:
        """How many windows a job would overrun, and when it will be another number."""
        end_s, whole_s = _view_ends_at_s(ctx, job), longest_s(ctx, job)
        count = bisect_left(instants_s, end_s)
        # The end of one that grows stays where it is.
        if count < len(instants_s) and whole_s is not None and end_s == ctx.now_s + whole_s:
            self._until_s = min(self._until_s, instants_s[count] - whole_s)
        return count


# --- what an order would find ---------------------------------------------------------------------


class Still(NamedTuple):
    """A job that a window finds on its node.

    over_s: how much later its time limit would end it; infinite without a limit.
    is_preempted: it has more than flexible workers there. These alone are released, and it runs on.
    """

    over_s: float
    is_preempted: bool


def clears_at_s(node: NodeEntry, window: WindowEntry) -> float:
    """When workers must leave a node for its window: a lent one is called home before it begins."""
    return window.at_s if node.lease is None else window.home_from_s


def still_there(ctx: Context, node: NodeEntry, window: WindowEntry) -> dict[JobId, Still]:
    """The jobs on a node whose time limit does not end them before they must leave it."""
    found: dict[JobId, Still] = {}
    at_s = clears_at_s(node, window)
    for job, worker in loans_lifecycle.held_on(ctx, node):
        over_s = ends_at_s(ctx, job) - at_s
        if worker.stop is None and job.after_vacating is None and over_s > 0:
            was = found.get(job.job_id)
            is_preempted = not worker.is_flexible or (was is not None and was.is_preempted)
            found[job.job_id] = Still(over_s, is_preempted)
    return found
