"""The one door: handle(event, now_s) -> outcome. Owns the state; knows no clock, socket or file.

The same events at the same instants give byte-identical decisions, whatever PYTHONHASHSEED; the
live coordinator, the simulator and replay differ only in who calls `handle`.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from common.messages import DesiredState, OrderPhase, StopOrder, WorkerOrder
from common.model import JobId, NodeName, ServiceName, StopReason
from coordinator.engine import (
    accounting,
    invariants,
    jobs,
    loans,
    nodes,
    operator,
    progress,
    view,
    watching,
)
from coordinator.engine.commands import AskLedger, Command, Outcome, PushDesired
from coordinator.engine.commit import commit
from coordinator.engine.context import Context
from coordinator.engine.deadlines import Deadlines
from coordinator.engine.events import (
    Event,
    JobCancelRequested,
    JobSubmitted,
    LeaderStarted,
    LoadMeasured,
    LoanPassDue,
    NodeReported,
    NodeSilent,
    OperatorAsked,
    OrdersRecovered,
    PassDue,
    ProgressReported,
)
from coordinator.engine.settings import EngineSettings
from coordinator.engine.state import ClusterState, JobEntry, NodeEntry, ServiceEntry, WorkerEntry
from coordinator.policies.bundles import policy
from coordinator.policies.snapshot import ClusterSnapshot, LoadSample

STALE_GRACE_S = 10.0
"""Grace of a worker that nobody wants any more."""


class Engine:
    """The cluster and what may happen to it."""

    def __init__(self, settings: EngineSettings, state: ClusterState | None = None) -> None:
        self.state = state or ClusterState()
        self._tally = accounting.GpuTally(self.state)
        self._views = view.Views(self.state)
        self._deadlines = Deadlines(self.state)
        self._holds: dict[JobId, tuple[str, ...]] | None = None
        self._policy_wake_at_s: float | None = None
        """What the last pass asked for; not saved, as whoever starts to lead begins with one."""
        self.settings = settings
        self.policy = policy(settings.policy)
        self._configure(settings)

    def _configure(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.policy = policy(settings.policy)
        for service in settings.services:
            name = ServiceName(service.name)
            entry = self.state.services.get(name)
            if entry is None:
                entry = ServiceEntry(name=name, mode=service.mode, configured_mode=service.mode)
                self.state.services[name] = entry
            elif entry.configured_mode != service.mode:
                entry.mode = entry.configured_mode = service.mode

    def handle(self, event: Event, *, now_s: float) -> Outcome:
        """Take one fact; return what to order and what was decided.

        `now_s` never decreases; an earlier instant counts as the last one.
        """
        now_s = max(now_s, self.state.now_s)
        self.state.now_s = now_s
        self._tally.integrate(self.state.counters, now_s)
        ctx = Context(self.state, self.settings, now_s)
        self._dispatch(ctx, event)
        self._tally.update(self.state, ctx.changed_nodes)
        self._views.note(ctx)
        self._holds = None
        self._deadlines.note(self.state, ctx.changed_jobs)
        return Outcome(
            commands=self._commands(ctx),
            decisions=tuple(ctx.decisions),
            refused=tuple(ctx.refused),
            needs_pass=ctx.needs_pass,
            needs_loan_pass=ctx.needs_loan_pass,
            wake_at_s=self._wake_at_s(),
        )

    def _wake_at_s(self) -> float | None:
        """The earlier of what time alone changes about a job and what the policy asked for."""
        wishes = (self._deadlines.next_s(self.state), self._policy_wake_at_s)
        return min((at_s for at_s in wishes if at_s is not None), default=None)

    def _dispatch(self, ctx: Context, event: Event) -> None:  # noqa: C901 - one flat table
        match event:
            case LeaderStarted():
                self._leader_started(ctx, event)
            case JobSubmitted():
                jobs.submit(ctx, event)
            case JobCancelRequested():
                jobs.cancel(ctx, event)
            case NodeReported():
                nodes.reported(ctx, event)
            case ProgressReported():
                progress.reported(ctx, event)
            case NodeSilent():
                nodes.silent(ctx, event)
            case LoadMeasured():
                self._load_measured(ctx, event)
            case OrdersRecovered():
                nodes.recovered(ctx, event)
            case OperatorAsked():
                operator.act(ctx, event)
            case PassDue():
                self._scheduling_pass(ctx)
            case LoanPassDue():
                self._loan_pass(ctx)
            case _:
                assert_never(event)

    def _leader_started(self, ctx: Context, event: LeaderStarted) -> None:
        self.state.epoch = max(self.state.epoch + 1, event.epoch)
        if event.settings is not None:
            self._configure(event.settings)
            ctx.settings = event.settings
        for node in self.state.nodes.values():
            node.is_heard = False
        self._views.forget(self.state)
        ctx.tell("cell", f"epoch {self.state.epoch}", f"{event.holder} leads")

    def _load_measured(self, ctx: Context, event: LoadMeasured) -> None:
        service = self.state.services.get(event.service)
        settings = ctx.service_settings(event.service)
        if service is None or settings is None:
            return
        service.load.append(LoadSample(ctx.now_s, event.load))
        del service.load[: -self.settings.load_window_samples]
        ready = sum(
            1
            for node in self.state.nodes.values()
            if node.service == event.service and node.serving_since_s is not None
        )
        lent = any(node.lease and node.service == event.service for node in self._nodes())
        if lent and event.load > ready * settings.capacity_per_node * (
            1.0 - settings.headroom_ratio
        ):
            ctx.needs_loan_pass = True
        watching.load_measured(ctx, event.service, event.load)

    def _nodes(self) -> list[NodeEntry]:
        return list(self.state.nodes.values())

    def _scheduling_pass(self, ctx: Context) -> None:
        self.state.pass_id += 1
        self.state.counters.passes += 1
        for job in self._deadlines.due(self.state, ctx.now_s):
            jobs.time_is_up(ctx, job)
        allocation = self.policy.allocate(self._views.snapshot(ctx), self.state.policy_memory)
        self.state.policy_memory = allocation.memory
        self._policy_wake_at_s = allocation.wake_at_s
        for decision in allocation.decisions:
            commit(ctx, decision)
        ctx.needs_pass = False  # what this pass changed is already in it

    def _loan_pass(self, ctx: Context) -> None:
        watching.tidy(ctx)
        decisions = self.policy.lend(self._views.snapshot(ctx))
        for decision in decisions:
            commit(ctx, decision)
        watching.withdraw(ctx, decisions)
        ctx.needs_loan_pass = False

    # --- what leaves ------------------------------------------------------------------------

    def _commands(self, ctx: Context) -> tuple[Command, ...]:
        commands: list[Command] = [AskLedger(node) for node in sorted(ctx.ask_ledgers)]
        for name in sorted(ctx.dirty_nodes):
            node = self.state.nodes.get(name)
            if node is None:
                continue
            node.generation += 1
            if node.is_heard:
                commands.append(PushDesired(self.desired(name)))
        return tuple(commands)

    def desired(self, name: NodeName) -> DesiredState:
        """What a node should be now; complete, so that the last one is enough."""
        node = self.state.nodes[name]
        orders: list[WorkerOrder] = []
        stops: list[StopOrder] = []
        for job, worker in self._wanted_on(node):
            orders.append(self._order(job, worker))
            if worker.stop is not None:
                stops.append(
                    StopOrder(key=worker.key, reason=worker.stop, grace_s=worker.stop_grace_s)
                )
        stops += [
            StopOrder(key=key, reason=StopReason.STALE, grace_s=STALE_GRACE_S)
            for key in node.stale_stops
        ]
        reclaim_in_s = None
        if node.reclaim_at_s is not None:
            reclaim_in_s = max(0.0, node.reclaim_at_s - self.state.now_s)
        return DesiredState(
            node=node.name,
            epoch=self.state.epoch,
            generation=node.generation,
            role=node.desired_role,
            lease=node.lease,
            reclaim_in_s=reclaim_in_s,
            workers=tuple(orders),
            stops=tuple(stops),
            acknowledged=tuple(node.acknowledged),
        )

    def _wanted_on(self, node: NodeEntry) -> list[tuple[JobEntry, WorkerEntry]]:
        found = {worker.key: (job, worker) for job, worker in self._placed_on(node)}
        return [found[key] for key in sorted(found)]

    def _placed_on(self, node: NodeEntry) -> list[tuple[JobEntry, WorkerEntry]]:
        ctx = Context(self.state, self.settings, self.state.now_s)
        return loans.workers_on(ctx, node)

    def _order(self, job: JobEntry, worker: WorkerEntry) -> WorkerOrder:
        return WorkerOrder(
            key=worker.key,
            spec=job.spec,
            tenant=job.tenant,
            user=job.user,
            submitted_at_s=job.submitted_at_s,
            gpu_uuids=worker.gpu_uuids,
            gpu_type=job.gpu_type or "",
            is_flexible=worker.is_flexible,
            phase=worker.order,
            worker_count=max(1, job.running_workers)
            if worker.order == OrderPhase.RUN
            else len(job.workers),
            endpoint=job.endpoint,
            preemption_count=job.preemption_count,
        )

    def may_renew(self, name: NodeName, lease_id: str) -> str:
        """Why a lease may not be renewed; empty when it may."""
        node = self.state.nodes.get(name)
        if node is None or not node.is_heard:
            return "the node was not heard"
        if node.lease is None or node.lease.lease_id != lease_id:
            return "the loan was called back"
        return ""

    def snapshot(self) -> ClusterSnapshot:
        """What a policy would see now; for `explain` and `plan`."""
        return self._views.snapshot(Context(self.state, self.settings, self.state.now_s))

    def blockers(self, job_id: JobId) -> tuple[str, ...]:
        """Why a waiting job would not start in a pass now; empty when it would."""
        return self._held().get(job_id, ())

    def queue_place(self, job_id: JobId) -> tuple[int, int] | None:
        """Place in the policy's own order, from 1, and how many wait on; None when it would start.

        Those that a pass would start now are not counted: they wait no longer.
        """
        held = list(self._held())
        return (held.index(job_id) + 1, len(held)) if job_id in held else None

    def why_kept(self, name: NodeName) -> tuple[str, ...]:
        """Why a node that serves is not lent; empty for any other node."""
        return self.policy.keep(self.snapshot(), name)

    def _held(self) -> dict[JobId, tuple[str, ...]]:
        if self._holds is None:
            self._holds = {hold.job_id: hold.blockers for hold in self.policy.hold(self.snapshot())}
        return self._holds

    def check(self) -> list[str]:
        """Broken invariants, as sentences; empty when all is well. Tests call it often."""
        ctx = Context(self.state, self.settings, self.state.now_s)
        fresh = view.Views(self.state).snapshot(ctx)
        return [
            *invariants.gpu_faults(self.state),
            *invariants.job_faults(self.state),
            *invariants.view_faults(self._views.snapshot(ctx), fresh),
        ]

    def encode_state(self) -> bytes:
        """The whole state as one blob, for a snapshot."""
        return msgspec.msgpack.encode(self.state)


def decode_state(blob: bytes) -> ClusterState:
    """The state from `Engine.encode_state`."""
    return msgspec.msgpack.decode(blob, type=ClusterState)
