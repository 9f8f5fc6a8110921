"""The engine: handle(event, now_s) -> outcome. One object owns the cluster state.

Theory of operation
===================

    reports, submits,              Engine                         driver
    operator orders,  event  +--------------------+  Outcome
    loads, time    --------> | 1 dispatch         | ---------->  commands: desired states to push
                             | 2 settle           |              needs_pass: PassDue follows
    PassDue,                 | 3 indexes          |              wake_at_s: PassDue at that time
    LoanPassDue    --------> | 4 outcome          |              decisions: to the journal
                             +--------------------+
                                |  snapshot   ^  decisions
                                v             |
                              policy (a pure function)

There is one loop, and the driver runs it. It journals a fact, calls `handle` with it, carries out
the commands, and feeds back what happens as the next facts. `_step` does the same four things for
each fact:

1. Dispatch it by type to its handler in `jobs`, `nodes` or `loans`. A handler changes the tables
   (`state.tables`) through a `Context` and marks which nodes and jobs changed.
2. Settle what follows from the change by fixed rules, in the order of `follow_ups`: time limits of
   nodes, migrations, shared GPUs, unused loans, arrays.
3. Bring the indexes that are derived from the tables up to date: the GPU tally, the view for
   policies, timers, the line of waiting jobs, the orders per node.
4. Return the outcome: desired states to push, decisions, refusals, and when a pass is due.

A pass is an event like any other. `PassDue` shows the policy a snapshot and commits its decisions
one by one; `LoanPassDue` does so for loans. A decision is a proposal: the tenants' rules
(`view.allowed`) and `commit` check it against the present state, and refuse it with a reason if it
does not fit.

Nodes get desired states, not messages: each push is complete, so the last one alone is enough. Its
generation grows with each push, its epoch with each leader, so that a node ignores stale ones.

Guarantees:

- Pure: no clock, socket, file or chance. Time is an argument and never decreases.
- Deterministic: the same events at the same instants give byte-identical decisions, whatever
  PYTHONHASHSEED. The live coordinator, the simulator and replay differ only in who calls `handle`.
- Recoverable: a snapshot (`encode_state`) and the later events rebuild the same state.
- Consistent: `check` lists every broken invariant (`invariants`); tests call it after each event.

People are answered by `Engine.explain`, which changes nothing (`explain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import assert_never

import msgspec

from common.decoding import UNREADABLE
from common.errors import ProtocolError
from common.messages import DesiredState
from common.model import JobId, NodeName, ServiceName
from coordinator.engine import (
    follow_ups,
    invariants,
    operator_actions,
    view,
)
from coordinator.engine.commit import commit
from coordinator.engine.desired import Orders, desired_state
from coordinator.engine.explain import Explainer
from coordinator.engine.jobs import (
    array_orders,
    arrays,
    changes,
    deadlines,
    gpu_sharing,
    numbers,
    person_orders,
    progress,
    stalls,
)
from coordinator.engine.jobs import (
    lifecycle as jobs_lifecycle,
)
from coordinator.engine.jobs.deadlines import Deadlines
from coordinator.engine.loans import (
    delayed_reclaim,
    idle_return,
    shadow_mode,
    unknown_loads,
)
from coordinator.engine.loans import (
    lifecycle as loans_lifecycle,
)
from coordinator.engine.nodes import (
    lost as nodes_lost,
)
from coordinator.engine.nodes import (
    lost_records,
    start_failures,
)
from coordinator.engine.nodes import (
    maintenance as nodes_maintenance,
)
from coordinator.engine.nodes import (
    membership as nodes_membership,
)
from coordinator.engine.nodes import (
    recovery as nodes_recovery,
)
from coordinator.engine.nodes import (
    reports as nodes_reports,
)
from coordinator.engine.nodes import windows as nodes_windows
from coordinator.engine.state import accounting, older_forms, orders, usage
from coordinator.engine.state.commands import AskLedger, Command, Outcome, PushDesired
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import (
    ArrayThrottled,
    Event,
    JobCancelRequested,
    JobChanged,
    JobsHeld,
    JobsReleased,
    JobsRequeued,
    JobSubmitted,
    LeaderStarted,
    LoadMeasured,
    LoadUnknown,
    LoanPassDue,
    NodeReported,
    NodeSilent,
    OperatorAsked,
    OrderRefused,
    OrdersRecovered,
    PassDue,
    ProgressReported,
    ProgressStopped,
    RecordsLost,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState, ServiceEntry
from coordinator.policies.contract.decisions import Decision
from coordinator.policies.contract.snapshot import ClusterSnapshot, LoadSample
from coordinator.policies.registry import policy


class Engine:
    """The cluster and what may happen to it."""

    def __init__(self, settings: EngineSettings, state: ClusterState | None = None) -> None:
        self.state = state or ClusterState()
        self._tally = accounting.GpuTally(self.state)
        usage.begin(self.state)
        self._views = view.Views(self.state)
        self._deadlines = Deadlines(self.state)
        self._orders = Orders()
        self._gpus_said: nodes_reports.Said = {}
        self._line = jobs_lifecycle.Line(self.state)
        self.explain = Explainer(self, self._views, self._line)
        """Why a job waits, why a node is not lent, which loans wait for an approval."""
        self._tells_waits = True
        """True if the policy reported a pending reason for any job."""
        self._policy_wake_at_s: float | None = None
        """The wake-up time of the last pass. Not saved, because a new leader begins with a pass."""
        self._configure(settings)

    def _configure(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.policy = policy(settings.policy)
        for service in settings.services:
            name = ServiceName(service.name)
            entry = self.state.services.get(name)
            if entry is None:
                entry = ServiceEntry(name=name, mode=service.mode, configured_mode=service.mode)
                entry.is_recalled = self.state.is_recalled
                self.state.services[name] = entry
            elif entry.configured_mode != service.mode:
                entry.mode = entry.configured_mode = service.mode
            entry.reclaim_deadline_s = service.reclaim_deadline_s

    def handle(self, event: Event, *, now_s: float) -> Outcome:
        """Take one fact; return the commands and the decisions.

        `now_s` never decreases; an earlier instant counts as the last one.
        """
        return self._step(event, (), now_s=now_s)

    def carry_out(self, decisions: Sequence[Decision], *, now_s: float) -> Outcome:
        """Carry out decisions of the journal as they were made; those that do not fit are refused.

        Where earlier records are lost, events alone would lead to other decisions.
        """
        return self._step(None, decisions, now_s=now_s)

    def _step(self, event: Event | None, decisions: Sequence[Decision], *, now_s: float) -> Outcome:
        state = self.state
        before_s, now_s = state.now_s, max(now_s, state.now_s)
        state.now_s = now_s
        self._tally.integrate(state.counters, now_s)
        ctx = Context(state, self.settings, now_s)
        if isinstance(event, LeaderStarted):
            self._led_until(ctx, before_s)
        if event is not None:
            ctx.order = orders.of(event)
            self._dispatch(ctx, event)
            ctx.order = None
        for decision in decisions:
            commit(ctx, decision)
        follow_ups.settle(ctx)
        if ctx.changed_nodes:
            self._tally.update(state, ctx.changed_nodes)
            usage.update(ctx, ctx.changed_nodes)
        if ctx.ended_jobs:
            usage.record_ends(ctx)
        self._views.note(ctx)
        self.explain.forget()
        if ctx.changed_jobs:
            self._deadlines.note(state, ctx.changed_jobs)
            self._line.note(state, ctx.changed_jobs)
            self._orders.note(ctx.changed_jobs)
        return Outcome(
            commands=self._commands(ctx) if ctx.dirty_nodes or ctx.ask_ledgers else (),
            decisions=tuple(ctx.decisions),
            refused=tuple(ctx.refused),
            needs_pass=ctx.needs_pass,
            needs_loan_pass=ctx.needs_loan_pass,
            wake_at_s=self._wake_at_s(),
        )

    def _wake_at_s(self) -> float | None:
        """The first instant at which time alone changes something, or the policy asked for."""
        wake_at_s = self._deadlines.next_s()
        policy_s = self._policy_wake_at_s
        if policy_s is not None and (wake_at_s is None or policy_s < wake_at_s):
            wake_at_s = policy_s
        state = self.state
        if state.awaited or state.drains or state.closed_until_s or state.windows:
            each = (
                delayed_reclaim.next_s,
                nodes_maintenance.next_s,
                start_failures.next_s,
                nodes_windows.next_s,
            )
            ends_s = (wake_at_s, *(next_s(state) for next_s in each))
            wake_at_s = min(end_s for end_s in ends_s if end_s is not None)
        return wake_at_s

    def _dispatch(self, ctx: Context, event: Event) -> None:  # noqa: C901 - one flat table
        match event:
            case NodeReported():  # first, as nearly all are
                nodes_reports.reported(ctx, event, self._gpus_said)
            case LeaderStarted():
                self._leader_started(ctx, event)
            case JobSubmitted():
                (arrays.submit if arrays.is_array(event) else jobs_lifecycle.submit)(ctx, event)
            case JobCancelRequested():
                is_array = event.job_id in self.state.arrays
                (arrays.cancel if is_array else jobs_lifecycle.cancel)(ctx, event)
            case JobsHeld() | JobsReleased() | JobsRequeued() | JobChanged():
                person_orders.act(ctx, event)
                array_orders.act(ctx, event)
            case ArrayThrottled():
                arrays.throttle(ctx, event)
            case ProgressReported():
                progress.reported(ctx, event)
            case ProgressStopped():
                stalls.stopped(ctx, event)
            case NodeSilent():
                nodes_lost.silent(ctx, event)
            case LoadMeasured():
                self._load_measured(ctx, event)
            case LoadUnknown():
                unknown_loads.told(ctx, event)
            case OrdersRecovered():
                nodes_recovery.recovered(ctx, event)
            case OperatorAsked():
                operator_actions.act(ctx, event, partial(self.explain.why_not_approved, within=ctx))
            case OrderRefused():
                orders.refused(ctx, event)
            case RecordsLost():
                lost_records.records_lost(ctx, event)
            case PassDue():
                self._scheduling_pass(ctx)
            case LoanPassDue():
                self._loan_pass(ctx)
            case _:
                assert_never(event)

    def _led_until(self, ctx: Context, until_s: float) -> None:
        """The last leader took its last fact at this instant, and heard its nodes until then."""
        for node in self.state.nodes.values():
            if node.contact.is_heard:
                loans_lifecycle.drained(ctx, node, until_s=until_s)

    def _leader_started(self, ctx: Context, event: LeaderStarted) -> None:
        self.state.epoch = max(self.state.epoch + 1, event.epoch)
        self.state.clock = event.clock
        if event.settings is not None:
            self._configure(event.settings)
            ctx.settings = event.settings
            nodes_windows.reckon(ctx)
        for node in self.state.nodes.values():
            node.contact.is_heard = False
            if node.contact.silent_since_s is not None:
                node.contact.silent_since_s = ctx.now_s
        self._views.forget(self.state)
        self.explain.forget_settings()
        ctx.log_event("cell", f"epoch {self.state.epoch}", f"{event.holder} leads")
        nodes_membership.leader_started(ctx)

    def _load_measured(self, ctx: Context, event: LoadMeasured) -> None:
        service = self.state.services.get(event.service)
        settings = ctx.service_settings(event.service)
        if service is None or settings is None:
            return
        unknown_loads.looked(ctx, event.service)
        if event.is_known:
            service.load.append(LoadSample(ctx.now_s, event.load))
            service.season = service.season.after(ctx.now_s, event.load)
            del service.load[: -self.settings.load_window_samples]
        lent, ready = _lent_and_ready(self.state, event.service)
        capacity = ready * settings.capacity_per_node
        if lent and event.load > capacity * (1.0 - settings.headroom_ratio):
            ctx.needs_loan_pass = True
        shadow_mode.load_measured(ctx, event.service, event.load)

    def _scheduling_pass(self, ctx: Context) -> None:
        self.state.pass_id += 1
        self.state.counters.passes += 1
        for job in self._deadlines.due(self.state, ctx.now_s):
            deadlines.time_is_up(ctx, job)
        self._deadlines.seen(ctx.now_s)
        if self.state.live_arrays:
            arrays.refill(ctx)
        for resize in changes.shrinks(ctx) if self.state.oversized_jobs else ():
            commit(ctx, resize)
        snapshot = self._views.snapshot(ctx)
        allocation = self.policy.allocate(snapshot, self.policy_memory())
        self.state.policy_memory = allocation.memory
        self.state.policy_memory_of = self._policy_name()
        self._policy_wake_at_s = allocation.wake_at_s
        for decision in view.allowed(ctx, snapshot, allocation.decisions):
            commit(ctx, decision)
        if allocation.waits or self._tells_waits:
            self._tells_waits = jobs_lifecycle.told(self.state, allocation.waits, ctx.now_s)
        may_resume = not (self.policy.shares_gpus or self.state.is_frozen)
        if self.state.suspended_jobs and may_resume:
            gpu_sharing.resume_all(ctx)
        ctx.needs_pass = False  # what this pass changed is already in it

    def _policy_name(self) -> str:
        return self.settings.policy.partition(":")[0]  # with other knobs it is the same policy

    def policy_memory(self) -> bytes:
        """The policy's memory; empty if another policy wrote it before a switch."""
        is_own = self.state.policy_memory_of == self._policy_name()
        return self.state.policy_memory if is_own else b""

    def _loan_pass(self, ctx: Context) -> None:
        shadow_mode.tidy(ctx)
        decisions = self.policy.lend(self._views.snapshot(ctx))
        for decision in decisions:
            commit(ctx, decision)
        if self._lends_on_demand() and idle_return.is_due(ctx):
            fleet, lends = self._views.fleet(ctx), self.policy.lends
            users = idle_return.Users(ctx.state, fleet, self._views.excluded, lends=lends)
            idle_return.give_back(ctx, users)
        shadow_mode.withdraw(ctx)
        ctx.needs_loan_pass = False

    def _lends_on_demand(self) -> bool:
        """Whether an idle node that came home stays there: not where whatever is spare is lent."""
        return self.policy.lends_on_demand

    @property
    def gpu_counts(self) -> accounting.Counts:
        """GPUs held and there now: in the training pool, and on loan."""
        return self._tally.counts

    # --- what leaves ------------------------------------------------------------------------

    def _commands(self, ctx: Context) -> tuple[Command, ...]:
        commands: list[Command] = [AskLedger(node) for node in sorted(ctx.ask_ledgers)]
        for name in sorted(ctx.dirty_nodes):
            node = self.state.nodes.get(name)
            if node is None:
                continue
            node.desired.generation += 1
            if node.contact.is_heard:
                commands.append(PushDesired(name))
        return tuple(commands)

    def desired(self, name: NodeName) -> DesiredState:
        """The desired state of a node now; complete, so that the last one is enough."""
        ctx = Context(self.state, self.settings, self.state.now_s)
        return desired_state(ctx, self.state.nodes[name], self._orders)

    def may_renew(self, name: NodeName, lease_id: str) -> str:
        """Why a lease may not be renewed; empty when it may."""
        node = self.state.nodes.get(name)
        if node is None or not node.contact.is_heard:
            return "the node was not heard"
        if node.lease is None or node.lease.lease_id != lease_id:
            return "the loan was called back"
        return ""

    def awaited_silence_s(self) -> dict[NodeName, float]:
        """For LOST nodes, the `unanswered_s` at which a `NodeSilent` changes something."""
        return nodes_lost.awaited(self.state, self.settings)

    def watched_stalls(self, now_s: float) -> dict[JobId, stalls.Watch]:
        """Jobs of which a `ProgressStopped` changes something, and the silence that it takes."""
        return stalls.watched(self.state, self.settings, now_s)

    def snapshot(self) -> ClusterSnapshot:
        """The snapshot that a policy would see now; for `explain` and `plan`."""
        return self._views.asked(Context(self.state, self.settings, self.state.now_s))

    def waiting_jobs(self, tenant: str) -> int:
        """How many jobs of a tenant wait; an array counts as its tasks in the line, and as one more
        while others are behind them. Behind a shut gate it counts as if that were open.
        """
        in_line = self._line.count_by_tenant.get(tenant, 0)
        return in_line + arrays.waiting_counts(self.state, tenant)

    def jobs_of_user(self, tenant: str, user: str) -> int:
        """How many jobs of a user have not ended; each task of an array is one."""
        live = self._line.live_by_user.get((tenant, user), 0)
        return live + arrays.waiting_tasks(self.state, tenant, user)

    def check(
        self, *, are_copies_too: bool = True, beside_idle: invariants.BesideIdle | None = None
    ) -> list[str]:
        """Broken invariants, as sentences; empty when all is well. Tests call it often.

        are_copies_too: also compare the derived data (tally, views, orders) with a fresh build,
            which takes several times as long.
        beside_idle: what the caller saw after the passes before. Given where nothing happened since
            the last pass, so that guarantees are met where they can be.
        """
        ctx = Context(self.state, self.settings, self.state.now_s)
        faults = [
            *invariants.gpu_faults(self.state),
            *invariants.lease_faults(ctx),
            *invariants.job_faults(self.state),
            *invariants.array_faults(self.state),
            *invariants.size_faults(self.state),
            *invariants.gate_faults(self.state),
            *invariants.figure_faults(self.state),
            *invariants.store_faults(self.state),
            *invariants.sharing_faults(ctx),
            *invariants.closure_faults(self.state),
            *invariants.window_faults(self.state),
        ]
        if are_copies_too:
            faults += invariants.tally_faults(self._tally, accounting.GpuTally(self.state))
            faults += invariants.usage_faults(self.state)
            faults += invariants.view_faults(self._views.asked(ctx), *view.made_anew(ctx))
            faults += invariants.order_faults(ctx, self._orders)
            faults += invariants.line_faults(self._line, jobs_lifecycle.Line(self.state))
        if beside_idle is not None:
            seen = self._views.asked(ctx)
            faults += invariants.starved(seen)
            faults += invariants.crowded_out(seen)
            faults += beside_idle.faults(seen)
        return faults

    def encode_state(self) -> bytes:
        """The whole state as one blob, for a snapshot. Views are rebuilt, as a reader rebuilds
        them.
        """
        self._views.forget(self.state)
        return msgspec.msgpack.encode(self.state)


def _lent_and_ready(state: ClusterState, service: ServiceName) -> tuple[int, int]:
    """Counts of a service's nodes with a lease, and of those that serve and do not close soon;
    (0, 0) without a lease.
    """
    leased = [node for node in state.nodes.values() if node.lease is not None]
    lent = sum([node.service == service for node in leased])
    if not lent:
        return 0, 0
    own = [node for node in state.nodes.values() if node.service == service]
    return lent, sum(
        [node.serving_since_s is not None and not node.cordon.is_closing for node in own]
    )


def decode_state(blob: bytes) -> ClusterState:
    """The state from `Engine.encode_state`.

    Raises:
        ProtocolError: the bytes are no state, or one of a newer version. An older version is read
            by `older_forms`.
    """
    try:
        state = msgspec.msgpack.decode(older_forms.brought_up(blob), type=ClusterState)
    except UNREADABLE as error:
        raise ProtocolError(f"snapshot: {error}") from error
    numbers.give_missing(state)
    return state
