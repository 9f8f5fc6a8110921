"""One run of a plan: the first instant on a copy of the engine, and the time after it, simulated.

A run notes what each job and each node comes to. It does not know whether it is the run with the
change or the one without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from common.model import (
    FINAL_JOB_STATES,
    Dependency,
    DependencyKind,
    JobId,
    JobState,
    NodeName,
    StopReason,
)
from common.plans import PlanKind
from coordinator.engine.jobs import start_gate
from coordinator.engine.jobs.prerun_spec import submitted
from coordinator.engine.jobs.start_gate import Gated
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.context import keys_on
from coordinator.engine.state.tables import ClusterState, JobEntry
from coordinator.engine.what_if import WhatIf
from coordinator.plan.decide import JOB_ID, Change, Decided, decide
from coordinator.plan.lengths import NodeLengths
from coordinator.policies.contract.decisions import Decision, Start
from coordinator.sim.run.resume import estimated_left_s, resumed
from coordinator.sim.run.runtime import RunRules

BY_LIMIT = "its time limit"
"""The source of the end of a job that has no estimate."""


class Stop(Struct, frozen=True, kw_only=True):
    """A preemption: when, in seconds from the question, and what it throws away at most."""

    in_s: float
    lost_gpu_s: float
    reason: str


class Noted(Struct, kw_only=True):
    """What a job comes to; instants are seconds from the question.

    source: of the estimate of its work, or its time limit; empty: its end is unknown.
    """

    job_id: JobId
    name: str
    tenant: str
    was_waiting: bool
    source: str = ""
    worker_count: int = 0
    preemptions: int = 0
    starts: list[float] = field(default_factory=list[float])
    stops: list[Stop] = field(default_factory=list[Stop])
    nodes: tuple[NodeName, ...] = ()
    """The nodes of its first start, or else where it ran at the time of the question."""
    gpus: int = 0
    """The GPUs of its first start."""
    ended_in_s: float | None = None
    shrunk_by: int = 0
    """Flexible workers that it gives up in the first instant."""


class Step(Struct, frozen=True, kw_only=True):
    """A decision in a run, in seconds from the question; 0: of the first instant."""

    in_s: float
    decision: Decision


class Run:
    """A copy of the cell from the question on.

    Args:
        drained: a node whose end of work is looked for; None: of none.
    """

    def __init__(
        self, question: WhatIf, change: Change, *, drained: NodeName | None = None
    ) -> None:
        self.own = JobId(question.request.target) if question.is_of_waiting_job else JOB_ID
        """The job or the array in question."""
        self.engine = question.engine(change.settings)
        self.state: ClusterState = self.engine.state
        self.began_s = max(question.now_s, self.state.now_s)
        self.jobs = {job.job_id: self._noted(job) for job in self.state.live()}
        self._open = dict(self.jobs)
        """The jobs among them that have not ended."""
        self.lengths = NodeLengths(self.state, question.settings)
        self.decided: Decided = decide(
            self.engine, change, now_s=self.began_s, loan_pass_at_s=question.loan_pass_at_s
        )
        own = start_gate.gated(self.state, self.own)
        self.own_number = 0 if own is None else own.number
        self.never = self.engine.explain.why_never(self.own)
        self.waits_for = self._waits_for()
        self.steps: list[Step] = []
        self._note_new()
        self._asked = frozenset(self.jobs)
        """The jobs that were there at the question."""
        self._waiting_arrays = dict.fromkeys(self.state.live_arrays)
        """The arrays that were there at the question, until one of their tasks starts."""
        self._is_of_queue = question.request.kind == PlanKind.QUEUE
        self._may_run: dict[JobId, bool] = {}
        """Whether the fleet could run a waiting job, where that was asked."""
        self._hear(self.decided.decisions)
        self._drained = drained
        self._seen = (-1, -1)
        self.empty_in_s: float | None = None
        self._look()
        self._note_shrunk()
        settings = question.settings
        period_s = settings.loan_period_s
        next_s = self.began_s + period_s if self.decided.has_loan_pass else question.loan_pass_at_s
        self.simulation = resumed(
            self.engine,
            delays=self.lengths.of,
            left_s=self._left_s,
            loan_pass_at_s=next_s,
            rules=RunRules(restart_s=settings.restart_p99_s, resize_s=settings.resize_p99_s),
        )
        self.simulation.hear = self._hear
        self.simulation.follow(self.decided.last)
        self.played_s = 0.0
        self.is_cut = False
        """The time limit ended it."""

    # --- playing ----------------------------------------------------------------------------

    def play(
        self, horizon_s: float, *, is_over: Callable[[], bool], is_done: Callable[[Run], bool]
    ) -> None:
        """Play on up to a horizon, until it is done, or until the time for it is over."""
        loop, until_s = self.simulation.loop, self.began_s + horizon_s
        while True:
            next_s = loop.next_s()
            if next_s is None or next_s > until_s:
                self.played_s = horizon_s
                return
            if next_s > loop.now_s:  # an instant is played as a whole
                self.played_s = loop.now_s - self.began_s
                if is_done(self):
                    return
                if is_over():
                    self.is_cut = True
                    return
            loop.step()
            self._look()

    def is_own(self, job_id: JobId) -> bool:
        """Whether a job is the one in question, or a task of the array in question."""
        return job_id == self.own or job_id.rpartition("_")[0] == self.own

    @property
    def own_starts(self) -> list[Noted]:
        """The job in question once it has started, or the tasks that have."""
        return [one for one in self.jobs.values() if one.starts and self.is_own(one.job_id)]

    @property
    def drained_is_held(self) -> bool:
        """Whether something still runs on the node that is drained."""
        return self._drained is not None and self.empty_in_s is None

    @property
    def is_settled(self) -> bool:
        """True if no job that was there at the question waits and may start, or is about to, and no
        array waits for its first task; of a queue for its next one.
        """
        arrays = map(self.state.arrays.get, self._waiting_arrays)
        if any(array is not None and self._array_waits(array) for array in arrays):
            return False
        waiting = (self.state.jobs[job_id] for job_id in self._open if job_id in self._asked)
        return not any(self._waits(job) for job in waiting)

    def _waits(self, job: JobEntry) -> bool:
        if job.state == JobState.PENDING:
            return self._may_start(job)
        return job.state in (JobState.STARTING, JobState.PREEMPTING)

    def _array_waits(self, array: ArrayEntry) -> bool:
        """Whether a task of an array is to start that counts, and may. Tasks in the line are jobs;
        behind a throttle the next one starts at the end of a task, if that is known.
        """
        if array.started_at_s is None:
            return not array.is_over and self._may_start(array)
        if not self._is_of_queue or not array.waiting or not self._may_start(array):
            return False
        notes = map(self.jobs.get, array.live)
        return not array.live or any(noted is None or noted.source for noted in notes)

    def _may_start(self, one: Gated) -> bool:
        """Whether a waiting job or array may start: no person holds it, what it depends on moves,
        and the fleet could run it."""
        gate = one.gate
        if gate.held_by or gate.never or not all(map(self.moves, gate.depends_on)):
            return False
        job_id = start_gate.id_of(one)
        if job_id not in self._may_run:
            self._may_run[job_id] = not self.engine.explain.why_never(job_id)
        return self._may_run[job_id]

    def moves(self, each: Dependency) -> bool:
        """Whether a dependency comes to hold or to fail without another dependency: its job runs
        and has an estimate, or may start. A chain of them goes on with the first one.
        """
        whole = JobId(each.job.rpartition("_")[0])
        other = start_gate.gated(self.state, each.job) or self.state.arrays.get(whole)
        if other is None or other.started_at_s is None:
            return other is not None and not other.gate.is_shut and self._may_start(other)
        if isinstance(other, ArrayEntry) or each.when == DependencyKind.STARTED:
            return True
        noted = self.jobs.get(other.job_id)
        return noted is None or bool(noted.source)

    def _in_s(self) -> float:
        return self.state.now_s - self.began_s

    # --- notes ------------------------------------------------------------------------------

    def _noted(self, job: JobEntry) -> Noted:
        left_s, source = estimated_left_s(job, self.began_s)
        if left_s is None:
            source = "" if submitted(job).time_limit_s is None else BY_LIMIT
        return Noted(
            job_id=job.job_id,
            name=submitted(job).name,
            tenant=job.tenant,
            was_waiting=job.state == JobState.PENDING,
            source=source,
            worker_count=_stays(job),
            preemptions=job.counts.preemptions,
            nodes=tuple(sorted({worker.node for worker in job.workers.values()})),
        )

    def _note_new(self) -> None:
        """The job in question is there now, or the tasks of it that wait in the line."""
        for job in self.state.live():
            if job.job_id not in self.jobs:
                self._note(job)

    def _note(self, job: JobEntry) -> Noted:
        noted = self.jobs[job.job_id] = self._open[job.job_id] = self._noted(job)
        return noted

    def _waits_for(self) -> tuple[str, ...]:
        """Why the job in question does not start in a pass now; of an array, its first task."""
        own = start_gate.gated(self.state, self.own)
        if own is None:
            return ()
        if start_gate.kind(own) is not None:
            is_real = self.own != JOB_ID
            return (*start_gate.why_shut(self.state, own, advises=is_real), *self.never)
        first = next(iter(own.live), self.own) if isinstance(own, ArrayEntry) else self.own
        return self.engine.explain.blockers(first)

    def _left_s(self, job: JobEntry) -> float | None:
        return estimated_left_s(job, self.state.now_s)[0]

    def _hear(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            self.steps.append(Step(in_s=self._in_s(), decision=decision))
            if isinstance(decision, Start):
                self._note_start(decision)

    def _note_start(self, decision: Start) -> None:
        job = self.state.jobs[decision.job_id]
        noted = self.jobs.get(decision.job_id)
        if noted is None:  # a task that entered the line since
            noted = self._note(job)
            noted.was_waiting = True
        if not noted.starts:
            noted.nodes = tuple(dict.fromkeys(place.node for place in decision.placements))
            noted.gpus = sum(len(worker.gpu_uuids) for worker in job.workers.values())
        noted.starts.append(self._in_s())
        if noted.was_waiting and job.array_task is not None:
            self._waiting_arrays.pop(job.array_task.array_id, None)

    def _look(self) -> None:
        """Note what an event has changed: preemptions, ends, the drained node."""
        if self._drained is not None and self.empty_in_s is None:
            node = self.state.nodes.get(self._drained)
            if node is None or not (keys_on(node) or node.name in self.state.windows):
                self.empty_in_s = self._in_s()
        seen = (self.state.counters.preemptions, len(self.state.live_jobs))
        if seen == self._seen:
            return
        self._seen = seen
        for noted in list(self._open.values()):
            job = self.state.jobs.get(noted.job_id)
            if job is None or job.state in FINAL_JOB_STATES:
                noted.ended_in_s = self._in_s()
                del self._open[noted.job_id]
            elif job.counts.preemptions > noted.preemptions:
                noted.preemptions = job.counts.preemptions
                lost_gpu_s = 0.0 if job.loss is None else job.loss.gpu_s
                reason = self._reason(job.job_id)
                noted.stops.append(Stop(in_s=self._in_s(), lost_gpu_s=lost_gpu_s, reason=reason))

    def _note_shrunk(self) -> None:
        for noted in self.jobs.values():
            job = self.state.jobs.get(noted.job_id)
            if job is None:
                continue
            released = [one for one in job.workers.values() if one.stop == StopReason.RELEASE]
            if released and not noted.stops:
                noted.shrunk_by = max(0, noted.worker_count - _stays(job))

    def _reason(self, job_id: JobId) -> str:
        """The reason of the last event line of a job."""
        lines = (line for line in reversed(self.state.stories) if line.subject == job_id)
        return next((line.reason for line in lines), "")


def _stays(job: JobEntry) -> int:
    """Workers without an order to stop."""
    return sum(worker.stop is None for worker in job.workers.values())


def unstarted(noted: Noted) -> Noted:
    """A task in a run in which it has not started, from one in which it has."""
    return Noted(job_id=noted.job_id, name=noted.name, tenant=noted.tenant, was_waiting=True)


def ends(run: Run, *, before_s: float) -> list[Noted]:
    """The jobs that ended by their estimates before an instant, in that order."""
    found = [
        noted
        for noted in run.jobs.values()
        if noted.ended_in_s is not None and noted.ended_in_s <= before_s and noted.source
    ]
    return sorted(found, key=lambda noted: (noted.ended_in_s or 0.0, noted.job_id))
