"""Explanations of the present state: why a job waits, why a node is not lent, which loans wait for
an approval.

They answer people and change nothing; a query leaves no trace in the next decision. An answer is
what a pass would decide now, not what the last pass decided.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from common.model import JobId, JobSpec, JobState, NodeName, Preemptibility
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.jobs import prerun_spec, start_gate
from coordinator.engine.jobs import retry as jobs_retry
from coordinator.engine.jobs.node_selection import Selection, selection_of
from coordinator.engine.loans import idle_return, shadow_mode
from coordinator.engine.loans import lifecycle as loans_lifecycle
from coordinator.engine.nodes import lost_records, windows
from coordinator.engine.state.context import Context
from coordinator.engine.state.mixed_nodes import names
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState, JobEntry, Recommendation
from coordinator.engine.view import Views
from coordinator.policies.contract.snapshot import NodeView
from coordinator.policies.policy import Policy
from coordinator.policies.tenants.infeasible import Fleet, wish_of


class Explained(Protocol):
    """The engine as an explanation reads it; settings and policy may be others at each query."""

    state: ClusterState
    settings: EngineSettings
    policy: Policy

    def policy_memory(self) -> bytes:
        """The memory that the policy would get in a pass now."""
        ...


class Explainer:
    """Answers about one engine.

    Answers that cost a pass are kept until the next event; the engine then calls `forget`. The
    fleet for `why_never` is kept until a node, a tenant or a setting changes.
    """

    def __init__(self, engine: Explained, views: Views, line: jobs_lifecycle.Line) -> None:
        # A cycle would keep the whole cell until the garbage collector runs.
        self._engine: Explained = weakref.proxy(engine)
        self._views = views
        self._line = line
        self._pending_reasons: dict[JobId, tuple[str, ...]] | None = None
        self._recommended: dict[NodeName, Recommendation] | None = None
        self._open: dict[NodeName, NodeView] | None = None
        """The nodes that take workers."""
        self._few: dict[tuple[Selection, int], str] = {}
        """How many nodes fit jobs, by what they ask of them and their GPUs of a worker."""
        self._room: dict[tuple[Selection | None, int, Preemptibility], dict[str, int]] = {}
        """Workers that fit on free GPUs of each type, by the same."""
        self._users: idle_return.Users | None = None
        """The waiting jobs that could use a lent node."""
        self._fleet: Fleet | None = None
        self._fleet_of = (0, frozenset[str]())
        """The mark of the nodes in the fleet, and the tenants that it knows."""

    def forget(self) -> None:
        """An event changed the state."""
        self._pending_reasons = self._recommended = None
        self._open = self._users = None
        self._few.clear()
        self._room.clear()

    def forget_settings(self) -> None:
        """The settings may be others."""
        self._fleet = None

    # --- jobs -------------------------------------------------------------------------------

    def blockers(self, job_id: JobId) -> tuple[str, ...]:
        """Why a waiting job would not start in a pass now; empty if it would.

        The end of its latest try comes first, while that bars it from any node; then reasons that
        no waiting cures.
        """
        state = self._engine.state
        job = state.jobs.get(job_id)
        if job is None:
            return ()
        if job.state == JobState.PENDING and job.gate.is_shut:
            return (*start_gate.why_shut(state, job), *self.why_never(job_id))
        if doubted := lost_records.why_held(state, job_id):
            return (doubted, *self.why_never(job_id))
        said = jobs_retry.why_waiting(job, state.now_s)
        if jobs_retry.rests(job):
            return (said, *self.why_never(job_id))
        held = self._held().get(job_id, ())
        if not held:
            return ()
        never, closing = self.why_never(job_id), windows.why_waiting(self._now(), job)
        few = never or self._why_few(job)
        if closing and not never and self._has_room_but_for_windows(job):
            few, closing = (*closing, *few), ()  # lists show the first reason alone
        first = ((said,) if said else ()) + few
        if state.services:
            first += jobs_retry.why_not_lent(job, state.now_s)
        return (*first, *(why for why in held if why not in first), *closing)

    def why_never(self, job_id: JobId) -> tuple[str, ...]:
        """Why a waiting job could not run even if all nodes were open and empty; empty if it could.

        A limit of its tenant is one of these reasons. Of an array, the same of its tasks.
        """
        state = self._engine.state
        if job_id in state.live_arrays:
            array = state.arrays[job_id]
            return self._why_never(array.spec, array.tenant)
        job = state.jobs.get(job_id)
        if job is None or job.state != JobState.PENDING:
            return ()
        return self._why_never(prerun_spec.submitted(job), job.tenant)

    def why_no_node(self, spec: JobSpec) -> str:
        """Why no node fits what a job asks of nodes by labels and names; empty if one does."""
        return self._views.excluded.why_none(spec)

    def _why_never(self, spec: JobSpec, tenant: str) -> tuple[str, ...]:
        fleet, excluded = self._whole_fleet(tenant), self._views.excluded
        if none := excluded.why_none(spec):
            return (none,)
        return fleet.why_never(wish_of(spec, excluded.of(spec)), tenant)

    def _why_few(self, job: JobEntry) -> tuple[str, ...]:
        """How many nodes fit a job by their labels, where it asks for any."""
        selection = selection_of(job.spec)
        if selection is None:
            return ()
        like = (selection, job.spec.gpus_per_worker)
        if like not in self._few:  # many jobs ask the same of nodes
            free = {name: node.free_gpus for name, node in self._open_nodes().items()}
            self._few[like] = self._views.excluded.why_waiting(job.spec, free)
        return (self._few[like],)

    def _has_room_but_for_windows(self, job: JobEntry) -> bool:
        """Whether the base gang of a job fits on free GPUs of one type, and would not without the
        nodes that close too early for it.
        """
        spec = job.spec
        like = (selection_of(spec), spec.gpus_per_worker, spec.preemptibility)
        if like not in self._room:
            excluded = self._views.excluded.of(spec)
            nodes = [node for name, node in self._open_nodes().items() if name not in excluded]
            self._room[like] = _room(nodes, spec)
        barred = windows.barred(self._now(), job)
        parts = [name for each in barred for name in names(self._engine.state.nodes[each])]
        closing = _room([n for name in parts if (n := self._open_nodes().get(name))], spec)
        factors, kinds = spec.gpu.worker_multiplier, filter(spec.gpu.accepts, self._room[like])
        room = {
            kind: self._room[like][kind] - spec.workers.min * factors.get(kind, 1) for kind in kinds
        }
        return any(left >= 0 for left in room.values()) and all(
            left < closing.get(kind, 0) for kind, left in room.items()
        )

    def _open_nodes(self) -> dict[NodeName, NodeView]:
        """The nodes that take workers."""
        if self._open is None:
            nodes = self._views.fleet(self._now()).nodes
            self._open = {node.name: node for node in nodes if node.is_schedulable}
        return self._open

    def queue_place(self, job_id: JobId) -> tuple[int, int] | None:
        """Position in the policy's queue, from 1, and its length; None if the job would start now.

        Jobs that a pass would start now are not counted, because they no longer wait.
        """
        held = list(self._held())
        return (held.index(job_id) + 1, len(held)) if job_id in held else None

    def standing(self, job_id: JobId) -> tuple[str, ...]:
        """How a job that has GPUs stands by the policy's own measure, if it has one, and where
        it may have no more."""
        engine = self._engine
        snapshot = self._views.asked(self._now())
        said = engine.policy.standing(snapshot, engine.policy_memory(), job_id)
        job = engine.state.jobs.get(job_id)
        if job is None:
            return said
        said += jobs_retry.why_not_growing(job, engine.state.now_s)
        if not engine.state.services:
            return said
        return said + jobs_retry.why_not_lent(job, engine.state.now_s)

    def _held(self) -> dict[JobId, tuple[str, ...]]:
        """The pending reasons of each job that a pass would not start now, in queue order."""
        if self._pending_reasons is None:
            snapshot = self._views.asked(self._now())
            held = self._engine.policy.pending_reasons(snapshot, self._engine.policy_memory())
            self._pending_reasons = {hold.job_id: hold.blockers for hold in held}
        return self._pending_reasons

    def _whole_fleet(self, tenant: str) -> Fleet:
        """The fleet, which knows a tenant: made again only where a node or a setting changed."""
        fleet = self._views.fleet(self._now())
        mark, known = self._fleet_of
        if self._fleet is None or mark != self._views.fleet_mark or tenant not in known:
            known = frozenset(self._line.count_by_tenant)
            self._fleet = Fleet(fleet, tenants=known)
            self._fleet_of = self._views.fleet_mark, known
        return self._fleet

    # --- nodes and loans --------------------------------------------------------------------

    def why_kept(self, name: NodeName) -> tuple[str, ...]:
        """Why a node that serves is not lent; empty for any other node."""
        said = self._engine.policy.not_lent_reasons(self._views.asked(self._now()), name)
        if name not in self.recommended():
            return said
        return (*said, f"its loan is recommended (aryl loan approve {name})")

    def why_idle(self, name: NodeName, now_s: float) -> str:
        """The fate of a lent node on which nothing runs; empty for any other node."""
        engine = self._engine
        ctx = Context(engine.state, engine.settings, now_s)
        if name not in engine.state.idle_loans_since_s or not engine.policy.lends_on_demand:
            return ""
        if self._users is None:
            fleet, lends = self._views.fleet(self._now()), engine.policy.lends
            self._users = idle_return.Users(engine.state, fleet, self._views.excluded, lends=lends)
        node = engine.state.nodes[name]
        return idle_return.in_words(ctx, node, self._users.of(node))

    def recommended(self) -> dict[NodeName, Recommendation]:
        """The recommendations that an approval would carry out now, by node."""
        if self._recommended is None:
            self._recommended = self._recommended_at(self._now())
        return self._recommended

    def why_not_approved(self, name: NodeName, *, within: Context | None = None) -> str:
        """Why an approval of a recommended loan would be refused now; empty when it would not.

        within: the event that approves it, and what it has changed until now; None: a query.
        """
        ctx = within or self._now()
        if name in self._recommended_at(ctx):
            return ""
        kept = self._engine.policy.not_lent_reasons(self._views.asked(ctx), name)[1:]
        return (
            loans_lifecycle.why_not_lent(ctx, name)
            or "; ".join(kept)
            or "no loan pass would lend it now"
        )

    def _recommended_at(self, ctx: Context) -> dict[NodeName, Recommendation]:
        if not ctx.state.recommendations:
            return {}
        return shadow_mode.standing(ctx, self._engine.policy.lend(self._views.asked(ctx)))

    def _now(self) -> Context:
        engine = self._engine
        return Context(engine.state, engine.settings, engine.state.now_s)


def _room(nodes: Iterable[NodeView], spec: JobSpec) -> dict[str, int]:
    """How many workers of a job fit on the free GPUs of nodes, by GPU type."""
    found: dict[str, int] = {}
    for node in nodes:
        if node.service is None or spec.preemptibility == Preemptibility.FULL:
            count = node.free_gpus // spec.gpus_per_worker
            found[node.gpu_type] = found.get(node.gpu_type, 0) + count
    return found
