"""The simulating driver: the engine, a heap of events and pretend nodes; no clock, no socket.

Differs from the live coordinator only in who calls `Engine.handle` and who obeys its commands.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import assert_never

from msgspec import Struct

from common.messages import WorkerOrder
from common.model import JobId, JobSpec, NodeName, ServiceName, WorkerKey
from coordinator.engine.accounting import Figures, figures
from coordinator.engine.commands import AskLedger, PushDesired
from coordinator.engine.engine import Engine
from coordinator.engine.events import (
    Event,
    JobSubmitted,
    LeaderStarted,
    LoadMeasured,
    LoanPassDue,
    OrdersRecovered,
    PassDue,
)
from coordinator.engine.settings import EngineSettings
from coordinator.policies.decisions import Decision
from coordinator.sim.cluster import Delays, NodeSpec, PretendNode
from coordinator.sim.loop import LATE, URGENT, Loop


class Submission(Struct, frozen=True, kw_only=True):
    """One job of a trace; `work_s` is its true work in worker-seconds."""

    at_s: float
    job_id: JobId
    spec: JobSpec
    work_s: float


class _Running(Struct):
    """An attempt that computes: work left and how fast it goes."""

    attempt: int
    left_s: float
    at_s: float
    workers: dict[WorkerKey, NodeName]
    needed: int
    version: int = 0


class Simulation:
    """One run.

    Args:
        check: look at the engine's invariants after every event (tests).
    """

    def __init__(
        self,
        settings: EngineSettings,
        nodes: Iterable[NodeSpec],
        *,
        delays: Delays | None = None,
        pass_period_s: float = 30.0,
        check: bool = False,
    ) -> None:
        self.loop = Loop()
        self.engine = Engine(settings)
        self.decisions: list[Decision] = []
        self._check = check
        self._pass_period_s = pass_period_s
        self._work_s: dict[JobId, float] = {}
        self._running: dict[JobId, _Running] = {}
        self._pass_is_due = False
        self._loan_pass_is_due = False
        self._left = 0
        self._is_ticking = False
        self._wake_at_s: float | None = None
        self.nodes = {
            spec.name: PretendNode(
                spec,
                self.loop,
                delays or Delays(),
                tell=self.handle,
                started=partial(self._worker_started, spec.name),
                stopped=self._worker_stopped,
            )
            for spec in nodes
        }

    # --- input ------------------------------------------------------------------------------

    def submit(self, submissions: Iterable[Submission]) -> None:
        """Let jobs arrive at their instants."""
        for submission in submissions:
            self._left += 1
            self._work_s[submission.job_id] = submission.work_s
            self.loop.at(submission.at_s, partial(self._arrive, submission))

    def _arrive(self, submission: Submission) -> None:
        self._left -= 1
        if not self._is_ticking:
            self._is_ticking = True
            self.loop.after(self._pass_period_s, self._tick, priority=LATE)
        self.handle(
            JobSubmitted(
                job_id=submission.job_id, spec=submission.spec, tenant="trace", user="trace"
            )
        )

    def load(self, service: ServiceName, samples: Iterable[tuple[float, float]]) -> None:
        """Let a service's load be measured at instants: (seconds, requests per second)."""
        for at_s, load in samples:
            self.loop.at(at_s, partial(self.handle, LoadMeasured(service=service, load=load)))

    def run(self, until_s: float = float("inf")) -> Figures:
        """Run until the last job ended, or until an instant."""
        self.loop.at(
            0.0, lambda: self.handle(LeaderStarted(epoch=1, holder="sim")), priority=URGENT
        )
        for node in self.nodes.values():
            self.loop.at(0.0, node.report_soon)
        self.loop.at(0.0, self._tick, priority=LATE)
        self.loop.run(until_s)
        return figures(self.engine.state)

    def adopt_engine(self, engine: Engine) -> None:
        """Another coordinator takes over; the nodes stay as they are."""
        self.engine = engine

    def _tick(self) -> None:
        """Periodic passes, as long as anything can still happen."""
        self.ask_pass()
        self._is_ticking = bool(self._left or self.engine.state.live_jobs)
        if self._is_ticking:
            self.loop.after(self._pass_period_s, self._tick, priority=LATE)

    # --- the engine -------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Let one fact into the engine now, and carry out what it orders."""
        outcome = self.engine.handle(event, now_s=self.loop.now_s)
        self.decisions += outcome.decisions
        if self._check:
            faults = self.engine.check()
            assert not faults, f"after {event}: {faults}"
        for command in outcome.commands:
            match command:
                case PushDesired(desired=desired):
                    node = self.nodes[NodeName(desired.node)]
                    self.loop.after(0.0, partial(node.obey, desired))
                case AskLedger(node=name):
                    orders = self.nodes[name].orders()
                    recovered = OrdersRecovered(node=name, orders=orders)
                    self.loop.after(0.0, partial(self.handle, recovered))
                case _:
                    assert_never(command)
        if outcome.needs_loan_pass:
            self.ask_loan_pass()
        if outcome.needs_pass:
            self.ask_pass()
        self._wake_at(outcome.wake_at_s)

    def _wake_at(self, when_s: float | None) -> None:
        """The engine wants a pass at an instant at the latest."""
        if when_s is not None and (self._wake_at_s is None or when_s < self._wake_at_s):
            self._wake_at_s = when_s
            self.loop.at(when_s, self._woken, priority=LATE)

    def _woken(self) -> None:
        self._wake_at_s = None
        self.ask_pass()

    def ask_pass(self) -> None:
        """Coalesced: one pass after all facts of the same instant."""
        if not self._pass_is_due:
            self._pass_is_due = True
            self.loop.after(0.0, self._pass, priority=LATE)

    def _pass(self) -> None:
        self._pass_is_due = False
        self.handle(PassDue())

    def ask_loan_pass(self) -> None:
        """As `ask_pass`, for the loan pass."""
        if not self._loan_pass_is_due:
            self._loan_pass_is_due = True
            self.loop.after(0.0, self._loan_pass, priority=LATE)

    def _loan_pass(self) -> None:
        self._loan_pass_is_due = False
        self.handle(LoanPassDue())

    # --- how jobs run -----------------------------------------------------------------------

    def _worker_started(self, node: NodeName, order: WorkerOrder) -> None:
        job_id = order.key.job_id
        running = self._running.get(job_id)
        if running is None or running.attempt != order.key.attempt:
            multiplier = order.spec.gpu.worker_multiplier.get(order.gpu_type, 1)
            running = _Running(
                attempt=order.key.attempt,
                left_s=self._work_s[job_id] * multiplier,
                at_s=self.loop.now_s,
                workers={},
                needed=order.spec.workers_on(order.gpu_type).min,
            )
            self._running[job_id] = running
        self._advance(running)
        running.workers[order.key] = node
        self._schedule_finish(job_id, running)

    def _worker_stopped(self, key: WorkerKey) -> None:
        running = self._running.get(key.job_id)
        if running is None or running.attempt != key.attempt:
            return
        self._advance(running)
        running.workers.pop(key, None)
        self._schedule_finish(key.job_id, running)

    def _advance(self, running: _Running) -> None:
        """A gang that is not whole makes no progress; more workers go linearly faster."""
        elapsed_s = self.loop.now_s - running.at_s
        if len(running.workers) >= running.needed:
            running.left_s -= elapsed_s * len(running.workers)
        running.at_s = self.loop.now_s

    def _schedule_finish(self, job_id: JobId, running: _Running) -> None:
        running.version += 1
        version = running.version
        if len(running.workers) < running.needed:
            return
        delay_s = max(0.0, running.left_s) / len(running.workers)

        def finish() -> None:
            if self._running.get(job_id) is running and running.version == version:
                self._finish(job_id, running)

        self.loop.after(delay_s, finish)

    def _finish(self, job_id: JobId, running: _Running) -> None:
        del self._running[job_id]
        for key, node in sorted(running.workers.items()):
            self.nodes[node].exited(key, 0)
