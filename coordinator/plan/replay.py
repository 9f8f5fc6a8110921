"""A span of a journal under other settings: its facts from outside are played, nodes are simulated.

From outside come submissions, orders of people, loads, and what befell nodes: silence, boots,
faults. What nodes and jobs answered to decisions is simulated, with the lengths that were
measured; a job has the work that it really had. So the run under the settings of the time shows how
near the simulation is, and a run under others is to be compared with that one.
"""

from __future__ import annotations

from functools import partial
from statistics import median

from msgspec import Struct, structs

from common.messages import DesiredState
from common.model import JobId, JobState, NodeName, NodeRole
from coordinator.engine.jobs import estimates
from coordinator.engine.state.accounting import (
    Durations,
    durations,
    queueing_s,
)
from coordinator.engine.state.events import (
    ArrayThrottled,
    Event,
    GpuFact,
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
    OperatorAction,
    OperatorAsked,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState, Counters, JobEntry
from coordinator.plan.lengths import REPORT_S, NodeLengths
from coordinator.plan.orders import JobOrder, fits
from coordinator.plan.story import Story, with_changes
from coordinator.sim.run.cluster import Delays, NodeSpec
from coordinator.sim.run.resume import estimated_left_s, resumed
from coordinator.sim.run.runtime import RunRules
from coordinator.sim.run.simulation import Passes

TELLS_AFTER_S = 30.0
"""A job that reports progress does so this long after a start, and again each time that twice as
long has passed."""
COALESCE_S = 0.1
"""As the live loop by default."""


class Way(Struct, frozen=True, kw_only=True):
    """One way that the span went, in numbers.

    jct_s: of the jobs that finished in all ways, which are `jobs_compared`.
    queueing_s: of all jobs that were there, with their waits until the end of the span.
    lent_gpu_h, on_loan_held_gpu_h: GPU-hours of nodes on loan, and those that workers held.
    training_gpu_ratio: GPUs held over GPUs there, in the training pool; None without any.
    orders_unfit: orders about jobs that did not fit those jobs any more, such as a cancel of one
        that had ended by then.
    """

    name: str
    jobs_compared: int
    jobs_finished: int
    jobs_failed: int
    jct_s: Durations
    queueing_s: Durations
    preemptions: int
    lost_gpu_s: float
    loans: int
    reclaims: int
    reclaims_late: int
    lent_gpu_h: float
    on_loan_held_gpu_h: float
    training_gpu_ratio: float | None
    orders_unfit: int = 0


class _Ended(Struct, kw_only=True):
    """The state at the end of one way, and the counters at its beginning."""

    name: str
    began: Counters
    state: ClusterState
    orders_unfit: int = 0


class _Played:
    """One playing of a story, with other settings than those of the time."""

    def __init__(self, story: Story, *, policy: str, changes: dict[str, str]) -> None:
        self._story = story
        self._policy, self._changes = policy, changes
        settings = self._settings(story.settings)
        self.engine = story.engine(settings)
        self.began = structs.replace(self.engine.state.counters)
        self._lengths = NodeLengths(story.after, _last_settings(story))
        self._gpus: dict[NodeName, tuple[GpuFact, ...]] = {}
        self.orders_unfit = 0
        self._tasks_s = _task_works_s(story)
        self._boots = {node.name: node.boot_id for node in self.engine.state.nodes.values()}
        self.sim = resumed(
            self.engine,
            delays=self._lengths.of,
            left_s=self._left_s,
            loan_pass_at_s=_first_loan_pass_s(story),
            passes=Passes(coalesce_s=COALESCE_S),
            holds_loads=False,
            rules=RunRules(
                progress_after_s=TELLS_AFTER_S if story.is_telling else None,
                is_progress_repeated=True,
            ),
        )
        self.sim.exit_code = self._exit_code

    def run(self) -> ClusterState:
        """Play the story to its end; the state then."""
        plan = [(entry.now_s, partial(self._happen, entry.event)) for entry in self._story.entries]
        self.sim.loop.plan(plan)
        self.sim.ask_pass()
        self.sim.loop.run(self._story.ended_s)
        return self.engine.state

    def _settings(self, settings: EngineSettings) -> EngineSettings:
        return with_changes(settings, policy=self._policy, changes=self._changes)

    # --- facts from outside -----------------------------------------------------------------

    def _happen(self, event: Event) -> None:
        match event:
            case JobSubmitted():
                self.sim.handle(event)
            case LoadMeasured():
                self.sim.measured(event)
            case LoadUnknown() if self._serves(event.node):
                self.sim.handle(event)
            case (
                JobCancelRequested()
                | JobsHeld()
                | JobsReleased()
                | JobsRequeued()
                | JobChanged()
                | ArrayThrottled()
            ):
                self._order(event)
            case OperatorAsked() if self._is_possible(event):
                self.sim.handle(event)
            case LeaderStarted() if event.settings is not None:
                self._lead(event, event.settings)
            case NodeReported():
                self._reported(event)
            case NodeSilent():
                self._silent(event)
            case _:
                pass  # an answer of a node or a job, or a pass: those are the simulation's own

    def _lead(self, event: LeaderStarted, told: EngineSettings) -> None:
        """Only new settings matter: that a leader was away is no decision."""
        settings = self._settings(told)
        if settings == self.engine.settings:
            return
        epoch = self.engine.state.epoch + 1
        self.sim.handle(LeaderStarted(epoch=epoch, holder=event.holder, settings=settings))
        for node in self.sim.nodes.values():
            if node.is_up:
                node.report_soon()

    def _order(self, order: JobOrder) -> None:
        """Give an order of a person; the engine carries it out as far as it fits."""
        self.orders_unfit += not fits(self.engine.state, order)
        self.sim.handle(order)

    def _serves(self, name: NodeName) -> bool:
        node = self.sim.nodes.get(name)
        return node is not None and node.role == NodeRole.SERVING

    def _is_possible(self, event: OperatorAsked) -> bool:
        """An order about a loan needs that loan, and only an idle node can be removed."""
        match event.action:
            case OperatorAction.APPROVE_LOAN:
                return event.target in self.engine.state.recommendations
            case OperatorAction.REVOKE_LOAN:
                return event.target in self.engine.state.loans
            case _:
                return True

    def _silent(self, event: NodeSilent) -> None:
        node = self.sim.nodes.get(event.node)
        if node is not None:
            node.is_up = False
            self.sim.handle(event)

    def _reported(self, event: NodeReported) -> None:
        """Take what befell a node from its report; what the node holds is the simulation's own."""
        node = self.sim.nodes.get(event.node)
        if node is None:
            self._join(event)
            return
        boot_id, self._boots[event.node] = self._boots.get(event.node), event.boot_id
        if boot_id not in (None, event.boot_id):
            if node.is_up:
                node.crash()
            node.boot()
            node.learn(boot_id=event.boot_id)
        elif not node.is_up:
            node.is_up = True
            node.learn()
            self.sim.catch_up(event.node)
        facts = self._gpus.get(event.node)
        if facts != event.gpus:
            self._gpus[event.node] = event.gpus
            if facts is not None or node.last_report.gpus != event.gpus:
                node.learn(gpus=event.gpus)
        if node.last_report.labels != event.labels:
            node.learn(labels=event.labels)
        if node.last_report.ledger_error != (event.rival or event.ledger_error):
            node.learn(ledger_error=event.rival or event.ledger_error)

    def _join(self, event: NodeReported) -> None:
        spec = NodeSpec(
            name=event.node,
            home_pool=event.home_pool,
            gpu_type=event.gpus[0].gpu_type if event.gpus else "",
            gpus=len(event.gpus),
            service=event.service,
            rack=event.rack,
            labels=event.labels,
            cpus=event.cpus,
            memory_bytes=event.memory_bytes,
        )
        node = self.sim.join(spec)
        self._boots[event.node], self._gpus[event.node] = event.boot_id, event.gpus
        said = structs.replace(
            node.last_report, boot_id=event.boot_id, gpus=event.gpus, detail=event.detail
        )
        entry = self._story.after.nodes.get(event.node)
        nothing = DesiredState(node=event.node, epoch=0, generation=0, role=node.role)
        delays = Delays(report_s=REPORT_S) if entry is None else self._lengths.of(entry)
        node.take_up(said, desired=nothing, delays=delays, is_up=True)
        node.learn()

    # --- jobs -------------------------------------------------------------------------------

    def _left_s(self, job: JobEntry) -> float | None:
        """The work that a job really had left; of one that ran on at the end, its estimate.

        A task that never entered the line has the median work of its array's tasks that succeeded.
        """
        end = self._story.ends.get(job.job_id)
        task = job.array_task
        if task is not None and end is None and job.job_id not in self._story.after.jobs:
            known_s = self._tasks_s.get(task.array_id)
            return estimated_left_s(job, self.engine.state.now_s)[0] if known_s is None else known_s
        if end is None or end.state == JobState.CANCELLED:
            known = self._story.after.jobs.get(job.job_id)
            if known is None or end is not None:
                return None
            ahead_s, _ = estimated_left_s(known, self._story.ended_s)
            done_s = estimates.attempt_worker_s(known, self._story.ended_s)
            return None if ahead_s is None else ahead_s + done_s
        if end.state == JobState.FAILED and end.exit_code is None:
            return None  # its time limit, or an order, ended it and will again
        done_s = estimates.attempt_worker_s(job, self._story.began_s)
        return max(0.0, end.work_s - done_s)

    def _exit_code(self, job_id: JobId) -> int:
        end = self._story.ends.get(job_id)
        return 0 if end is None else end.exit_code or 0


def _task_works_s(story: Story) -> dict[JobId, float]:
    """The median work of the tasks of each array that succeeded in the span."""
    found: dict[JobId, list[float]] = {}
    for job_id, end in story.ends.items():
        job = story.after.jobs.get(job_id)
        if job is not None and job.array_task is not None and end.state == JobState.SUCCEEDED:
            found.setdefault(job.array_task.array_id, []).append(end.work_s)
    return {array_id: median(works_s) for array_id, works_s in found.items()}


def _first_loan_pass_s(story: Story) -> float:
    """When the first loan pass of the span was: the later ones count from it."""
    passes = (one.now_s for one in story.entries if isinstance(one.event, LoanPassDue))
    return next(passes, story.ended_s)


def _last_settings(story: Story) -> EngineSettings:
    found = story.settings
    for entry in story.entries:
        if isinstance(entry.event, LeaderStarted) and entry.event.settings is not None:
            found = entry.event.settings
    return found


def replay(story: Story, *, policy: str, changes: dict[str, str]) -> tuple[Way, ...]:
    """What happened; the same simulated; and, where anything is changed, what would have been."""
    began = story.engine(story.settings).state.counters
    ways = [_Ended(name="happened", began=began, state=story.after)]
    ways.append(_played(story, "simulated", policy="", changes={}))
    if policy or changes:
        ways.append(_played(story, "changed", policy=policy, changes=changes))
    return _ways(story, ways)


def _played(story: Story, name: str, *, policy: str, changes: dict[str, str]) -> _Ended:
    played = _Played(story, policy=policy, changes=changes)
    state = played.run()
    return _Ended(name=name, began=played.began, state=state, orders_unfit=played.orders_unfit)


def _ways(story: Story, ways: list[_Ended]) -> tuple[Way, ...]:
    """The numbers of each way over the span."""
    before = story.engine(story.settings).state
    mine = [
        {job_id: job for job_id, job in way.state.jobs.items() if _is_of(job, before)}
        for way in ways
    ]
    common = [
        job_id
        for job_id in mine[0]
        if all(job_id in jobs and jobs[job_id].state == JobState.SUCCEEDED for jobs in mine)
    ]
    return tuple(
        _way(way, jobs, common, story.ended_s) for way, jobs in zip(ways, mine, strict=True)
    )


def _is_of(job: JobEntry, before: ClusterState) -> bool:
    """True if a job was there in the span."""
    return job.job_id in before.live_jobs or job.job_id not in before.jobs


def _way(way: _Ended, jobs: dict[JobId, JobEntry], common: list[JobId], ended_s: float) -> Way:
    began, ended = way.began, way.state.counters
    jct_s = [(jobs[one].finished_at_s or 0.0) - jobs[one].submitted_at_s for one in common]
    there_gpu_s = ended.training_gpu_s - began.training_gpu_s
    held_gpu_s = ended.training_held_gpu_s - began.training_held_gpu_s
    lost_gpu_s = ended.preemption_cost_gpu_s + ended.resize_cost_gpu_s
    lost_before_gpu_s = began.preemption_cost_gpu_s + began.resize_cost_gpu_s
    return Way(
        name=way.name,
        jobs_compared=len(common),
        jobs_finished=ended.jobs_finished - began.jobs_finished,
        jobs_failed=ended.jobs_failed - began.jobs_failed,
        jct_s=durations(jct_s),
        queueing_s=durations([queueing_s(job, ended_s) for job in jobs.values()]),
        preemptions=ended.preemptions - began.preemptions,
        lost_gpu_s=lost_gpu_s - lost_before_gpu_s,
        loans=ended.loans - began.loans,
        reclaims=ended.reclaims - began.reclaims,
        reclaims_late=ended.reclaims_late - began.reclaims_late,
        lent_gpu_h=(ended.on_loan_gpu_s - began.on_loan_gpu_s) / 3600.0,
        on_loan_held_gpu_h=(ended.on_loan_held_gpu_s - began.on_loan_held_gpu_s) / 3600.0,
        training_gpu_ratio=held_gpu_s / there_gpu_s if there_gpu_s else None,
        orders_unfit=way.orders_unfit,
    )
