"""The simulating driver: the engine, a heap of events and simulated nodes; no clock, no socket.

It differs from the live coordinator only in who calls `Engine.handle` and who obeys its commands.
Passes run when something changed, never because time went by, unless an option asks for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import ceil

from msgspec import Struct

from common.messages import WorkerOrder
from common.model import JobId, JobSpec, NodeName, ServiceName, WorkerKey
from coordinator.engine.engine import Engine
from coordinator.engine.invariants import BesideIdle
from coordinator.engine.state.accounting import Figures, figures
from coordinator.engine.state.commands import Outcome, PushDesired
from coordinator.engine.state.events import (
    Event,
    JobSubmitted,
    LeaderStarted,
    LoadMeasured,
    LoanPassDue,
    NodeReported,
    OrdersRecovered,
    PassDue,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.contract.decisions import Decision
from coordinator.sim.run.cluster import Delays, NodeSpec, PretendNode
from coordinator.sim.run.fault_injection import Failing
from coordinator.sim.run.loop import LAST, LATE, URGENT, Loop
from coordinator.sim.run.outages import Crash, Outages
from coordinator.sim.run.runtime import RunRules, Runtime
from coordinator.sim.run.wire import Wire, WireRules
from coordinator.workloads.records import SpeedUp
from coordinator.workloads.shaping import linear

STEPS_PER_LOOK = 1000
COPIES_EVERY = 5
"""Events between two checks of the engine's derived data, where runs are checked: stale data stays
stale until its node or job changes again.
"""


class Submission(Struct, frozen=True, kw_only=True):
    """One job of a trace; `work_s` is its true work in worker-seconds. speedup: None is linear."""

    at_s: float
    job_id: JobId
    spec: JobSpec
    work_s: float
    speedup: SpeedUp | None = None
    tenant: str = "trace"
    user: str = "trace"


class Passes(Struct, frozen=True, kw_only=True):
    """When scheduling passes happen, in seconds.

    coalesce_s: facts are gathered this long; 0: one pass after all facts of an instant.
    grid_s: only at its multiples, as the paper's periodic scheduler; None: at any instant.
    period_s: also without a reason, at this interval, while there is a job; None: never.
    """

    coalesce_s: float = 0.0
    grid_s: float | None = None
    period_s: float | None = None


Watch = Callable[[float], None]
"""Called with the instant of each event just before the engine takes it."""


class Simulation:
    """One run.

    Args:
        rules: the costs of runs and stops of jobs.
        wire: how messages travel; by default none is lost.
        engine: one that has a cell already, whose time goes on; see `resume`. None: an empty one.
        check: check the engine's invariants after every event (tests).
    """

    def __init__(
        self,
        settings: EngineSettings,
        nodes: Iterable[NodeSpec],
        *,
        delays: Delays | None = None,
        rules: RunRules | None = None,
        wire: WireRules | None = None,
        passes: Passes | None = None,
        check: bool = False,
        keep_decisions: bool = True,
        engine: Engine | None = None,
    ) -> None:
        self.loop = Loop(0.0 if engine is None else engine.state.now_s)
        self.engine = engine or Engine(settings)
        self.decisions: list[Decision] = []
        self.wire = Wire(wire or WireRules())
        specs = tuple(nodes)
        self._delays = delays or Delays()
        self._type_of = {spec.name: spec.gpu_type for spec in specs}
        self._rack_of = {spec.name: spec.rack for spec in specs}
        self.runtime = Runtime(
            self.loop,
            rules or RunRules(),
            finished=self._finished,
            tell=self.handle,
            type_of=self._type_of,
            rack_of=self._rack_of,
        )
        self.events = 0
        """Facts that the engine has taken."""
        self._check = check
        self.beside_idle = BesideIdle()
        self._keep_decisions = keep_decisions
        self.watch: Watch | None = None
        self.hear: Callable[[Sequence[Decision]], None] | None = None
        """Called with decisions right after their event."""
        self.failing: Failing | None = None
        """Called with each worker that begins; without it jobs do not fail by themselves."""
        self._passes = passes or Passes()
        self._pass_is_due = False
        self._passed_at_s = float("-inf")
        self._loan_pass_is_due = False
        self._loan_pass_at_s = 0.0
        self._left = 0
        self._is_ticking = False
        self._wake_at_s: float | None = None
        self._alarm_at_s: float | None = None
        self._is_faulty = self.wire.is_lossy
        self._compares: set[NodeName] = set()
        self._pushes: set[NodeName] = set()
        self.exit_code: Callable[[JobId], int] = lambda job_id: 0
        """The exit code of a job whose work is done."""
        self.nodes = {spec.name: self._node(spec) for spec in specs}
        self._outages = Outages(
            self.loop,
            self.nodes,
            tell=self.handle,
            awaited_s=lambda: self.engine.awaited_silence_s(),
        )

    def _node(self, spec: NodeSpec) -> PretendNode:
        return PretendNode(
            spec,
            self.loop,
            self._delays,
            tell=self._told,
            started=partial(self._started, spec.name),
            stopped=self.runtime.stopped,
            asked=self.runtime.asked,
            crashed=self.runtime.crashed,
            suspended=self.runtime.suspended,
            resumed=self.runtime.resumed,
        )

    def join(self, spec: NodeSpec) -> PretendNode:
        """A node that comes later; it reports when it is asked to."""
        self._type_of[spec.name], self._rack_of[spec.name] = spec.gpu_type, spec.rack
        node = self.nodes[spec.name] = self._node(spec)
        return node

    # --- input ------------------------------------------------------------------------------

    def submit(self, submissions: Iterable[Submission]) -> None:
        """Let jobs arrive at their instants."""
        found = list(submissions)
        for submission in found:
            spec = submission.spec
            self.runtime.add(
                submission.job_id,
                work_s=submission.work_s,
                speedup=submission.speedup or linear(spec.workers),
                gpus_per_worker=spec.gpus_per_worker,
                path=spec.checkpoint.path,
            )
        self._left += len(found)
        self.loop.plan([(each.at_s, partial(self._arrive, each)) for each in found])

    def _arrive(self, submission: Submission) -> None:
        self._left -= 1
        if self._passes.period_s is not None and not self._is_ticking:
            self._is_ticking = True
            self.loop.after(self._passes.period_s, self._tick, priority=LATE)
        self.handle(
            JobSubmitted(
                job_id=submission.job_id,
                spec=submission.spec,
                tenant=submission.tenant,
                user=submission.user,
            )
        )

    def load(self, service: ServiceName, samples: Iterable[tuple[float, float]]) -> None:
        """Let a service's load be measured at instants: (seconds, requests per second).

        Samples are taken one by one as time comes to them, so they may go on for ever.
        """
        self._measure_next(service, iter(samples))

    def _measure_next(self, service: ServiceName, samples: Iterator[tuple[float, float]]) -> None:
        for at_s, load in samples:
            self.loop.at(at_s, partial(self._measure, service, load, samples))
            break

    def _measure(
        self, service: ServiceName, load: float, samples: Iterator[tuple[float, float]]
    ) -> None:
        self._measure_next(service, samples)
        self.measured(LoadMeasured(service=service, load=load))

    def measured(self, event: LoadMeasured) -> None:
        """A load was measured now; a loan pass follows where one is due."""
        self.handle(event)
        if self._loan_pass_is_overdue():
            self.ask_loan_pass()

    def crash(self, crashes: Iterable[Crash]) -> None:
        """Let nodes lose power at their instants."""
        for crash in crashes:
            self._is_faulty = True
            self.loop.at(crash.at_s, partial(self._outages.begin, crash))

    # --- running ----------------------------------------------------------------------------

    def go_on(self, *, loan_pass_at_s: float) -> None:
        """Go on with an engine that has a cell already, in place of `begin`; called once.

        Nodes with an order on its way get it.

        loan_pass_at_s: when a period will have passed since its last loan pass.
        """
        self._loan_pass_at_s = loan_pass_at_s
        for name, node in self.nodes.items():
            self._outages.heard(node.last_report)
            if node.is_up:
                self.catch_up(name)

    def begin(self) -> None:
        """A leader leads and every node reports; called once."""
        self.loop.at(
            0.0, lambda: self.handle(LeaderStarted(epoch=1, holder="sim")), priority=URGENT
        )
        for node in self.nodes.values():
            self.loop.at(0.0, node.report_soon)
        self.loop.at(0.0, self.ask_pass, priority=LATE)

    def run(self, until_s: float = float("inf")) -> Figures:
        """Begin, and run until nothing can happen any more, or until an instant."""
        self.begin()
        self.loop.run(until_s)
        return figures(self.engine.state)

    def run_jobs(self, look: Callable[[], None] = lambda: None) -> None:
        """Begin, and run until the last job has ended or can never run.

        Args:
            look: called now and then; its exception ends the run.
        """
        self.begin()
        self.loop.is_halted = not (self._left or self.engine.state.live_jobs)
        while self.loop.steps(STEPS_PER_LOOK) == STEPS_PER_LOOK:
            look()

    def _tick(self) -> None:
        """Periodic passes, as long as there is a job."""
        period_s = self._passes.period_s
        assert period_s is not None
        self.ask_pass()
        self._is_ticking = bool(self.engine.state.live_jobs)
        if self._is_ticking:
            self.loop.after(period_s, self._tick, priority=LATE)

    # --- the engine -------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Give one fact to the engine now, and carry out its commands."""
        now_s = self.loop.now_s
        if self.watch is not None:
            self.watch(now_s)
        self.events += 1
        outcome = self.engine.handle(event, now_s=now_s)
        if self._keep_decisions:
            self.decisions += outcome.decisions
        if self.hear is not None and outcome.decisions:
            self.hear(outcome.decisions)
        if self._check:
            copies = self.events % COPIES_EVERY == 0
            is_after_pass = isinstance(event, PassDue) and not outcome.needs_pass
            beside_idle = self.beside_idle if is_after_pass else None
            faults = self.engine.check(are_copies_too=copies, beside_idle=beside_idle)
            assert not faults, f"after {event}: {faults}"
        self.follow(outcome)

    def follow(self, outcome: Outcome) -> None:
        """Carry out the commands of an event that the engine has just taken."""
        for command in outcome.commands:
            if isinstance(command, PushDesired):  # as nearly all are; a match takes its time
                self._push_soon(command.node)
            else:
                self._ask_ledger(command.node)
        if outcome.needs_loan_pass:
            self.ask_loan_pass()
        if outcome.needs_pass:
            self.ask_pass()
        self._wake_at(outcome.wake_at_s)
        self.loop.is_halted = not (self._left or self.engine.state.live_jobs)

    def _wake_at(self, when_s: float | None) -> None:
        """The engine wants a pass at an instant at the latest; None: no more."""
        self._wake_at_s = when_s
        if when_s is None or when_s <= self._passed_at_s:
            return  # a pass of this instant has seen it
        if self._alarm_at_s is None or when_s < self._alarm_at_s:
            self._alarm_at_s = when_s
            self.loop.at(when_s, partial(self._woken, when_s), priority=LATE)

    def _woken(self, alarm_at_s: float) -> None:
        if alarm_at_s != self._alarm_at_s:
            return  # an earlier alarm has come since
        self._alarm_at_s = None
        if self._wake_at_s is not None and self._wake_at_s <= self.loop.now_s:
            self.ask_pass()
        else:
            self._wake_at(self._wake_at_s)

    def ask_pass(self) -> None:
        """One pass for all facts of an instant, or of the span that the options say."""
        if self._pass_is_due:
            return
        self._pass_is_due = True
        when_s = self.loop.now_s + self._passes.coalesce_s
        grid_s = self._passes.grid_s
        if grid_s is not None:
            when_s = ceil(when_s / grid_s) * grid_s
            if when_s <= self._passed_at_s:
                when_s += grid_s
        self.loop.at(when_s, self._pass, priority=LAST)

    def _pass(self) -> None:
        self._pass_is_due = False
        self._passed_at_s = self.loop.now_s
        if self._loan_pass_is_overdue():
            self._loan_pass()  # first, since it may free nodes
        self.handle(PassDue())

    def ask_loan_pass(self) -> None:
        """As `ask_pass`, for the loan pass; it comes before a scheduling pass."""
        if not self._loan_pass_is_due:
            self._loan_pass_is_due = True
            self.loop.after(0.0, self._loan_pass, priority=LATE)

    def _loan_pass(self) -> None:
        self._loan_pass_is_due = False
        self._loan_pass_at_s = self.loop.now_s + self.engine.settings.loan_period_s
        self.handle(LoanPassDue())

    def _loan_pass_is_overdue(self) -> bool:
        """As in the live coordinator: whenever it works and the last one is a period ago."""
        return bool(self.engine.settings.services) and self.loop.now_s >= self._loan_pass_at_s

    # --- the wire ---------------------------------------------------------------------------

    def _told(self, report: NodeReported) -> None:
        """A node's report arrives, or is sent again when it is lost."""
        if not self.wire.arrives():
            self._say_again(report.node)
            return
        self.handle(self._outages.heard(report))
        if self._is_faulty:
            self._compare_soon(report.node)

    def _say_again(self, name: NodeName) -> None:
        self.loop.after(self.wire.report_period_s, self.nodes[name].report_soon)

    def _push_soon(self, name: NodeName) -> None:
        """Send a node its desired state; of several in one instant the last is enough."""
        if name not in self._pushes:
            self._pushes.add(name)
            self.loop.after(0.0, partial(self._push, name))

    def _push(self, name: NodeName) -> None:
        self._pushes.discard(name)
        node = self.engine.state.nodes.get(name)
        if node is None or not node.contact.is_heard:
            return  # another coordinator leads by now, and orders nothing before a first report
        if self.wire.arrives():
            self.nodes[name].obey(self.engine.desired(name))
        if self._is_faulty:
            self._compare_soon(name)

    def catch_up(self, name: NodeName) -> None:
        """Send a node that lags its desired state."""
        if self._lags(name):
            self._push_soon(name)

    def _compare_soon(self, name: NodeName) -> None:
        """A node that lags gets its state again, not more often than from the live coordinator."""
        if name not in self._compares and self._lags(name):
            self._compares.add(name)
            self.loop.after(self.wire.push_retry_s, partial(self._compare, name))

    def _compare(self, name: NodeName) -> None:
        self._compares.discard(name)
        if self.nodes[name].is_up and self._lags(name):  # a silent one gets it when it reports
            self._push_soon(name)

    def _lags(self, name: NodeName) -> bool:
        state = self.engine.state
        node = state.nodes.get(name)
        if node is None or not node.contact.is_heard or node.desired.generation == 0:
            return False  # it was ordered nothing yet
        shown = (node.contact.epoch, node.contact.generation)
        return shown != (state.epoch, node.desired.generation)

    def _ask_ledger(self, name: NodeName) -> None:
        if not self.wire.arrives():
            self._say_again(name)  # the node's next report makes the engine ask again
            return
        node = self.nodes[name]
        recovered = OrdersRecovered(node=name, orders=node.orders(), began_ago_s=node.began_ago_s())
        self.loop.after(0.0, partial(self.handle, recovered))

    # --- jobs -------------------------------------------------------------------------------

    def _started(self, name: NodeName, order: WorkerOrder) -> None:
        if self.failing is not None:
            self.failing.started(name, order)
        if order.spec.prerun.gang is None:  # a pre-run's one GPU makes no headway worth counting
            self.runtime.started(name, order)

    def _finished(self, job_id: JobId, workers: dict[WorkerKey, NodeName]) -> None:
        for key, node in sorted(workers.items()):
            self.nodes[node].exited(key, self.exit_code(job_id))
