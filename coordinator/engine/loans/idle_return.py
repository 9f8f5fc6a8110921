"""Lent nodes that training does not use: they return to their service after `idle_return_s`.

A usable node on which nothing ran for that time returns at the next loan pass, unless a waiting job
could use it. Its service then has one more node for a burst or another node's failure. It is not
lent again before a job could use it, nor within its service's hold-off.

A policy's loan pass considers only a service's need, so without this rule an unused node would stay
lent until load rises. An infeasible job keeps no node lent, because it never starts. Neither does a
job that may not use the node: by its GPU type or size, by the job's selection, or because it is a
lent node.
"""

from __future__ import annotations

from common.model import JobId, JobState, NodeName
from coordinator.engine.jobs.node_selection import Excluded
from coordinator.engine.loans.recall import call_home, is_idle, is_lent
from coordinator.engine.state import mixed_nodes
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import ClusterState, NodeEntry
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.tenants.infeasible import Fleet, Wish, wish_of


def note_idle(ctx: Context) -> None:
    """Learn which of the nodes that this event has changed are lent and idle, and since when."""
    since_s = ctx.state.idle_loans_since_s
    for name in ctx.changed_nodes:
        node = ctx.state.nodes.get(name)
        if node is not None and is_lent(node) and is_idle(node):
            since_s.setdefault(name, ctx.now_s)
        else:
            since_s.pop(name, None)


class Users:
    """The waiting jobs that could use a lent node, now or when others have ended.

    A job behind a shut gate is none: it is in no queue.

    Args:
        fleet: the nodes, services and tenants of a snapshot.
        excluded: the nodes that jobs may not use by their selections.
        lends: whether the policy may lend further nodes.
    """

    def __init__(
        self, state: ClusterState, fleet: ClusterSnapshot, excluded: Excluded, *, lends: bool
    ) -> None:
        waiting = [
            job for job in state.live() if job.state == JobState.PENDING and not job.gate.is_shut
        ]
        self._fleet = Fleet(fleet, lends=lends, tenants={job.tenant for job in waiting})
        self._nodes = {node.name: node for node in fleet.nodes}
        self._alike: dict[tuple[Wish, str, bool], JobId] = {}
        """One job of each kind: thousands may ask for the same."""
        for job in waiting:
            wish = wish_of(job.spec, excluded.of(job.spec))
            self._alike.setdefault((wish, job.tenant, job.spec.is_elastic), job.job_id)

    def of(self, node: NodeEntry) -> JobId | None:
        """The first job that could use a node; None: no job could."""
        parts = [self._nodes[name] for name in mixed_nodes.names(node) if name in self._nodes]
        for (wish, tenant, is_elastic), job_id in self._alike.items():
            if self._fleet.why_never(wish, tenant):
                continue
            if any(self._fleet.may_use(wish, part, is_elastic=is_elastic) for part in parts):
                return job_id
        return None


def is_due(ctx: Context) -> bool:
    """Whether any node was idle for long enough; never while the cell is frozen."""
    return bool(_idle_for_long(ctx))


def _idle_for_long(ctx: Context) -> list[NodeName]:
    limit_s, since_s = ctx.settings.idle_return_s, ctx.state.idle_loans_since_s
    if limit_s is None or ctx.state.is_frozen:
        return []
    return sorted(name for name, at_s in since_s.items() if ctx.now_s - at_s >= limit_s)


def give_back(ctx: Context, users: Users) -> None:
    """Recall the nodes that were idle for long enough, and that no waiting job could use."""
    for name in _idle_for_long(ctx):
        node = ctx.state.nodes.get(name)
        if node is None or not (is_lent(node) and is_idle(node)) or users.of(node) is not None:
            continue
        idle_s = ctx.now_s - ctx.state.idle_loans_since_s[name]
        reason = f"nothing ran on it for {idle_s:.0f} s, and no waiting job could use it"
        call_home(ctx, node, f"{reason} (idle_return_s)")


def in_words(ctx: Context, node: NodeEntry, user: JobId | None) -> str:
    """The fate of an idle lent node, as text; empty for any other node, or without a limit.

    user: a waiting job that could use it.
    """
    limit_s, since_s = ctx.settings.idle_return_s, ctx.state.idle_loans_since_s.get(node.name)
    if limit_s is None or since_s is None or ctx.state.is_frozen:
        return ""
    idle = f"nothing has run on it for {ctx.now_s - since_s:.0f} s"
    if user is not None:
        return f"{idle}; it stays lent, because job {user} waits and could use it"
    return (
        f"{idle}, and no waiting job could use it: it returns at the first loan pass after "
        f"{limit_s:g} s (idle_return_s)"
    )
