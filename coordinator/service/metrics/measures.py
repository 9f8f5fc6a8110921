"""Counters and histograms of what passes through a leader: decisions, passes, records, outcomes.

Outcomes of jobs and loans are found by the event lines that each record adds: a line names a job or
a node, and the entry of that job, or of that node's loans, says what happened. What was there when
this leader began counts as known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct
from prometheus_client import CollectorRegistry

from common.model import JobId, LeaseId, NodeName
from common.monitoring.families import Kept
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import Event, LoanPassDue, PassDue
from coordinator.engine.state.settings import ServiceSettings
from coordinator.engine.state.tables import ClusterState, Counters, JobEntry, LoanEntry
from coordinator.policies.contract.decisions import Decision, Preempt
from coordinator.service.metrics.cell_state import OTHERS, TENANTS_MAX
from coordinator.service.metrics.table import KEPT

RECLAIM, POLICY, NODE, ORDER = "reclaim", "policy", "node", "order"
"""Causes of preemptions."""
RESIZE, MIGRATION = "resize", "migration"
"""Further causes of lost work."""
DECISION_KINDS = (
    "start", "resize", "preempt", "suspend", "resume", "migrate", "reject", "loan", "reclaim",
    "recommend",
)  # fmt: skip
ENDS = ("in_time", "late", "gone")
_KINDS = {
    "reclaim": loan_outcome.is_reclaim,
    "lapse": loan_outcome.is_lapse,
    "turn_back": loan_outcome.is_turn_back,
}


class _Known(Struct):
    """The counts so far of a job that has not ended.

    cause: of its latest preemption.
    ran_attempt: the number of its attempt that runs; None: none does. The start of a rebuilt one
        may turn out to be earlier, so it does not tell attempts apart.
    """

    preemptions: int = 0
    lost_gpu_s: float = 0.0
    queueing_s: float = 0.0
    ran_attempt: int | None = None
    cause: str = NODE


class Measures:
    """Keeps what a scrape cannot read from the engine's state."""

    def __init__(
        self, registry: CollectorRegistry, *, services: Sequence[ServiceSettings] = ()
    ) -> None:
        self._kept = Kept(KEPT, registry)
        self._jobs: dict[JobId, _Known] = {}
        self._loans: dict[LeaseId, None] = {}
        """Loans that are open."""
        self._taken: int | None = None
        """Number of the last event line that was looked at."""
        self._costs = Counters()
        """The totals of the cell, as they were counted last."""
        self._tenants: dict[str, None] = {}
        """Tenants with a series of their own."""
        self._preempted: set[JobId] = set()
        """Jobs that the policy stopped in the record in hand."""
        self._begin_at_zero([service.name for service in services])

    def _begin_at_zero(self, services: Iterable[str]) -> None:
        """Show each known series from the start: the first event is an increase from 0."""
        count = self._kept.count
        for kind in DECISION_KINDS:
            count("aryl_decisions_total", kind, amount=0)
        for cause in (RECLAIM, POLICY, NODE, ORDER):
            count("aryl_preemptions_total", cause, amount=0)
        for cause in (RECLAIM, POLICY, NODE, ORDER, RESIZE, MIGRATION):
            count("aryl_lost_gpu_seconds_total", cause, amount=0)
        for service in services:
            for kind in _KINDS:
                for end in ENDS:
                    count("aryl_returns_total", service, kind, end, amount=0)
            count("aryl_reclaim_predicted_lost_gpu_seconds_total", service, amount=0)
            count("aryl_reclaim_realised_lost_gpu_seconds_total", service, amount=0)

    # --- what the decider does ----------------------------------------------------------------

    def handled(self, event: Event, outcome: Outcome, took_s: float) -> None:
        """Count one fact that the engine took."""
        if isinstance(event, PassDue | LoanPassDue):
            kind = "schedule" if isinstance(event, PassDue) else "loan"
            self._kept.observe("aryl_pass_duration_seconds", took_s, kind)
        for refused in outcome.refused:
            self._kept.count("aryl_decisions_refused_total", kind_of(refused.decision))

    def decided(self, decisions: Sequence[Decision]) -> None:
        """Count the decisions of a record that is in the journal; call it before `journaled`."""
        for decision in decisions:
            self._kept.count("aryl_decisions_total", kind_of(decision))
            if isinstance(decision, Preempt):
                self._preempted.add(decision.job_id)

    def appended(self, size_bytes: int, took_s: float) -> None:
        """Count a record that is in the journal."""
        self._kept.count("aryl_journal_records_total")
        self._kept.count("aryl_journal_bytes_total", amount=size_bytes)
        self._kept.observe("aryl_journal_append_duration_seconds", took_s)

    def saved(self) -> None:
        """Count a snapshot."""
        self._kept.count("aryl_snapshots_total")

    # --- what became of jobs and loans --------------------------------------------------------

    def journaled(self, state: ClusterState) -> None:
        """Look at what the lines of the latest records are about; all of them are in the journal.

        The first call only notes what there is.
        """
        end = state.stories_dropped + len(state.stories)
        if self._taken is None:
            self._taken = end
            self._note_all(state)
            return
        new = min(end - self._taken, len(state.stories))
        self._taken = max(self._taken, end)
        subjects = dict.fromkeys(line.subject for line in state.stories[-new:]) if new > 0 else {}
        lost: dict[str, float] = {}
        for subject in subjects:
            if (job := state.jobs.get(JobId(subject))) is not None:
                self._look_at_job(state, job, lost)
                continue
            self._jobs.pop(JobId(subject), None)  # a task that its array took back
            node = state.nodes.get(NodeName(subject))
            if node is not None and node.homecoming.lease_id is not None:
                self._loans[node.homecoming.lease_id] = None
        self._preempted.clear()
        self._count_lost(state.counters, lost)
        if subjects:
            self._look_at_loans(state)

    def _note_all(self, state: ClusterState) -> None:
        self._jobs = {job.job_id: _known(job) for job in state.live()}
        self._loans = {
            loan.lease_id: None for loan in state.loans.values() if loan.returned_at_s is None
        }
        self._costs = _costs(state.counters)

    def _look_at_job(self, state: ClusterState, job: JobEntry, lost: dict[str, float]) -> None:
        """Count the news of a job, and put the work that its preemption lost into `lost`."""
        before = self._jobs.get(job.job_id) or _Known()
        now = _known(job)
        now.cause = before.cause
        if now.preemptions > before.preemptions:
            now.cause = _cause(job, self._preempted)
            new = now.preemptions - before.preemptions
            self._kept.count("aryl_preemptions_total", now.cause, amount=new)
        if now.ran_attempt is not None and now.ran_attempt != before.ran_attempt:
            waited_s = max(0.0, now.queueing_s - before.queueing_s)
            tenant = self._tenant(job.tenant)
            self._kept.observe("aryl_job_queueing_seconds", waited_s, tenant)
        more_gpu_s = now.lost_gpu_s - before.lost_gpu_s
        if more_gpu_s > 0 and job.loss is not None and job.loss.is_booked:
            lost[now.cause] = lost.get(now.cause, 0.0) + more_gpu_s
        if job.job_id in state.live_jobs:
            self._jobs[job.job_id] = now
        else:
            self._jobs.pop(job.job_id, None)

    def _tenant(self, name: str) -> str:
        """The tenant, while it is one of the first `TENANTS_MAX`; else the rest in one."""
        if len(self._tenants) < TENANTS_MAX:
            self._tenants[name] = None
        return name if name in self._tenants else OTHERS

    def _count_lost(self, counters: Counters, lost: dict[str, float]) -> None:
        """Count the work that was lost since the last record.

        The cell's totals say how much; what the jobs lost says by which cause.
        """
        now, before = _costs(counters), self._costs
        self._costs = now
        name = "aryl_lost_gpu_seconds_total"
        resize_gpu_s = now.resize_cost_gpu_s - before.resize_cost_gpu_s
        migration_gpu_s = now.migration_cost_gpu_s - before.migration_cost_gpu_s
        self._kept.count(name, RESIZE, amount=resize_gpu_s)
        self._kept.count(name, MIGRATION, amount=migration_gpu_s)
        preemption_gpu_s = now.preemption_cost_gpu_s - before.preemption_cost_gpu_s
        shares = lost if lost else {NODE: 1.0}
        for cause, share in shares.items():
            amount = preemption_gpu_s * share / sum(shares.values())
            self._kept.count(name, cause, amount=amount)

    def _look_at_loans(self, state: ClusterState) -> None:
        for lease_id in list(self._loans):
            loan = state.loans.get(lease_id)
            if loan is None or loan.returned_at_s is not None:
                del self._loans[lease_id]
                if loan is not None and loan_outcome.has_left(loan):
                    self._ended(loan)

    def _ended(self, loan: LoanEntry) -> None:
        """Count the end of a loan whose node had left its service."""
        service = loan.service
        end = "late" if loan_outcome.is_late(loan) else "gone" if loan.ended_reason else "in_time"
        for kind, is_one in _KINDS.items():
            self._kept.count("aryl_returns_total", service, kind, end, amount=float(is_one(loan)))
        took_s = loan_outcome.reclaim_s(loan)
        if took_s is None:
            return
        self._kept.observe("aryl_reclaim_duration_seconds", took_s, service)
        if loan.reclaim_deadline_s:
            used = took_s / loan.reclaim_deadline_s
            self._kept.observe("aryl_reclaim_deadline_used_ratio", used, service)
        for stage, stage_s in loan.stage_durations_s.items():
            self._kept.observe("aryl_reclaim_stage_seconds", stage_s, service, stage)
        predicted, realised = loan.predicted_cost_gpu_s, loan.realised_cost_gpu_s
        self._kept.count("aryl_reclaim_predicted_lost_gpu_seconds_total", service, amount=predicted)
        self._kept.count("aryl_reclaim_realised_lost_gpu_seconds_total", service, amount=realised)


def kind_of(decision: Decision) -> str:
    """The kind of a decision, as it stands in a label."""
    return type(decision).__name__.lower()


def _known(job: JobEntry) -> _Known:
    return _Known(
        preemptions=job.counts.preemptions,
        lost_gpu_s=job.lost_gpu_s,
        queueing_s=job.wait.queueing_s,
        ran_attempt=None if job.attempt.ran_at_s is None else job.attempt.number,
    )


def _cause(job: JobEntry, preempted: Collection[JobId]) -> str:
    if job.loss is not None and job.loss.lease_id is not None:
        return RECLAIM
    if job.loss is not None and job.loss.is_ordered:
        return ORDER
    return POLICY if job.job_id in preempted else NODE


def _costs(counters: Counters) -> Counters:
    return Counters(
        preemption_cost_gpu_s=counters.preemption_cost_gpu_s,
        resize_cost_gpu_s=counters.resize_cost_gpu_s,
        migration_cost_gpu_s=counters.migration_cost_gpu_s,
    )
