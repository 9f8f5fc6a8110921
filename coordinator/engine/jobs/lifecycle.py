"""The life of a job: submit, gang start, exits, faults, preemption.

All changes of a job's state go through `common.job_state_table`.

A worker may end by a stop order that the journal lost. The node's report then gives the cause of
the stop, and it is recorded as if the order were known.

Each pass also counts, per tenant, the waiting jobs and their seconds of waiting by pending reason,
as the policy reports them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from common.history import Detail
from common.job_state_table import JobEvent, next_state
from common.messages import OrderPhase, WorkerPhase
from common.model import FINAL_JOB_STATES, GpuUuid, JobId, JobState, NodeName, StopReason, WorkerKey
from coordinator.engine.jobs import (
    array_tasks,
    ended_workers,
    estimates,
    gang_reservations,
    numbers,
    preemption_loss,
    prerun_spec,
    rendezvous,
    start_gate,
)
from coordinator.engine.jobs import (
    retry as jobs_retry,
)
from coordinator.engine.state import context as state_context
from coordinator.engine.state import usage
from coordinator.engine.state.array_entry import ArrayTask
from coordinator.engine.state.context import Context, hold_gpus, release_gpus
from coordinator.engine.state.events import JobCancelRequested, JobSubmitted
from coordinator.engine.state.job_groups import WaitEntry, WorkEstimate
from coordinator.engine.state.tables import (
    AfterVacating,
    ClusterState,
    Ending,
    JobEntry,
    LoanEntry,
    NodeEntry,
    WorkerEntry,
)
from coordinator.policies.contract.decisions import Wait


class Line:
    """How many jobs of each tenant wait, and of each user live; derived from the state, never
    saved.

    It is kept up job by job, so that a submission costs the same however many jobs wait.
    """

    def __init__(self, state: ClusterState) -> None:
        self._tenant_of: dict[JobId, str] = {}
        self._user_of: dict[JobId, tuple[str, str]] = {}
        self.live_by_user: dict[tuple[str, str], int] = {}
        """Users, by tenant and name, that have jobs which have not ended, and how many."""
        self.count_by_tenant: dict[str, int] = {}
        """Tenants of which a job waits, and of how many."""
        self.note(state, state.live_jobs)

    def note(self, state: ClusterState, changed: Iterable[JobId]) -> None:
        """Learn which jobs an event changed."""
        counts = self.count_by_tenant
        for job_id in changed:
            job = state.jobs.get(job_id)
            self._note_user(job_id, job)
            waits = job is not None and job.state == JobState.PENDING
            if waits == (job_id in self._tenant_of):
                continue
            if job is not None and waits:
                self._tenant_of[job_id] = job.tenant
                counts[job.tenant] = counts.get(job.tenant, 0) + 1
                continue
            tenant = self._tenant_of.pop(job_id)
            counts[tenant] -= 1
            if not counts[tenant]:
                del counts[tenant]

    def _note_user(self, job_id: JobId, job: JobEntry | None) -> None:
        lives = job is not None and job.finished_at_s is None
        if lives == (job_id in self._user_of):
            return
        counts = self.live_by_user
        if job is not None and lives:
            whose = self._user_of[job_id] = (job.tenant, job.user)
            counts[whose] = counts.get(whose, 0) + 1
            return
        whose = self._user_of.pop(job_id)
        counts[whose] -= 1
        if not counts[whose]:
            del counts[whose]


def told(state: ClusterState, waits: Iterable[Wait], now_s: float) -> bool:
    """Record the pending reason of each waiting job from now on; jobs that are not named have none.

    Returns True if any job has a pending reason now.
    """
    kinds: dict[JobId, str] = {job_id: wait.kind for wait in waits for job_id in wait.jobs}
    is_any = False
    for job_id in state.live_jobs:
        if job_id in state.gated_jobs:
            continue
        job = state.jobs[job_id]
        kind = kinds.get(job_id, "") if job.state == JobState.PENDING else ""
        if kind != job.wait.kind:
            settle(job, now_s, kind)
        is_any |= bool(kind)
    return is_any


def settle(job: JobEntry, now_s: float, kind: str = "") -> None:
    """Count its wait up to now; from now on it waits for `kind`, or for nothing."""
    wait = job.wait
    if wait.kind:
        wait.spent_s[wait.kind] = wait.spent_s.get(wait.kind, 0.0) + now_s - wait.since_s
    wait.kind, wait.since_s = kind, now_s


def spent_s(job: JobEntry, now_s: float) -> dict[str, float]:
    """Seconds by kind, up to now."""
    wait, spent = job.wait, dict(job.wait.spent_s)
    if wait.kind:
        spent[wait.kind] = spent.get(wait.kind, 0.0) + max(0.0, now_s - wait.since_s)
    return spent


def carried_out(job: JobEntry, node: NodeName, reason: StopReason) -> bool:
    """Whether its node stopped a worker for what ends its job, which is ended then as it was to."""
    if reason == StopReason.CANCEL:
        job.after_vacating, job.cancelled_by = AfterVacating.CANCEL, f"an order to {node}"
    elif reason == StopReason.TIME_LIMIT:
        at_time_limit(job)
    else:
        return False
    return True


def at_time_limit(job: JobEntry) -> None:
    """A job has run for as long as it may."""
    limit_s = job.spec.time_limit_s
    job.error = "ran into its time_limit_s" + ("" if limit_s is None else f" of {limit_s:g} s")
    job.after_vacating = AfterVacating.FAIL


def why_stopped(node: NodeName, reason: StopReason) -> str:
    """In words, why a node stopped a worker of a job that goes on."""
    if reason == StopReason.GANG_TIMEOUT:
        return f"its gang was not ready in time, by an earlier order to {node}"
    return f"{node} went home by itself ({reason})"


PORT_TAKEN_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a rendezvous store exits with it if its port is taken."""

READY_PHASES = (WorkerPhase.READY, WorkerPhase.RUNNING)

ACTIVE_JOB_STATES = frozenset(
    {JobState.STARTING, JobState.RUNNING, JobState.RESIZING, JobState.SUSPENDED}
)


RESTARTS_SILENCE = frozenset({JobEvent.GANG_READY, JobEvent.RESIZED, JobEvent.RESUME})
"""After these a job is silent for a while, because its ranks meet again."""


def fire(
    ctx: Context,
    job: JobEntry,
    event: JobEvent,
    reason: str = "",
    *,
    detail: Detail | None = None,
) -> None:
    """Move a job along its life cycle and tell its story; `detail` is the record of the line."""
    job.state = next_state(job.state, event, who=job.job_id)
    if job.gaps.stalled_since_s is not None:
        stall_over(ctx, job, f"it is {job.state}")
    if event in RESTARTS_SILENCE:
        job.gaps.changed(ctx.now_s)
    if job.wait.kind:
        settle(job, ctx.now_s)
    ctx.changed_jobs[job.job_id] = None
    ctx.log_event(job.job_id, f"{event} -> {job.state}", reason, detail=detail)
    if event == JobEvent.GANG_READY or job.state in FINAL_JOB_STATES:
        start_gate.passed(ctx, job.job_id)


def stall_over(ctx: Context, job: JobEntry, why: str) -> None:
    """A job is STALLED no more."""
    since_s, job.gaps.stalled_since_s = job.gaps.stalled_since_s, None
    ctx.changed_jobs[job.job_id] = None
    ctx.log_event(
        job.job_id, "stall over", f"after {ctx.now_s - (since_s or ctx.now_s):.0f} s: {why}"
    )


def gang_changes(ctx: Context, job: JobEntry) -> None:
    """Workers of a gang that runs come or go: what that costs it is measured from here.

    Call it when its work up to now is settled and before its workers are others.
    """
    job.gaps.changed(ctx.now_s)
    price = job.resizes.changes(ctx.now_s, job.clock.attained_gpu_s, attempt=job.attempt.number)
    if price is not None:
        preemption_loss.resized(ctx, job, price)


def submit(
    ctx: Context,
    event: JobSubmitted,
    *,
    task: ArrayTask | None = None,
    submitted_at_s: float | None = None,
) -> None:
    """A new job waits; a repeated id is the same job.

    task: of the array that it is a part of. submitted_at_s: None: now; it waits from now on.
    """
    if event.job_id in ctx.state.jobs:
        return
    work_s, source = estimates.whole_work(ctx.state, ctx.settings, event.tenant, event.spec)
    job = JobEntry(
        job_id=event.job_id,
        spec=prerun_spec.begun(ctx, event.tenant, event.spec),
        tenant=event.tenant,
        user=event.user,
        submitted_at_s=ctx.now_s if submitted_at_s is None else submitted_at_s,
        array_task=task,
        wait=WaitEntry(pending_since_s=ctx.now_s),
        estimate=WorkEstimate(expected_work_s=work_s, source=source),
    )
    numbers.give(ctx.state, job)
    ctx.state.jobs[event.job_id] = job
    ctx.state.live_jobs[event.job_id] = None
    ctx.changed_jobs[event.job_id] = None
    ctx.state.counters.jobs_submitted += 1
    ctx.log_event(event.job_id, "submitted", f"by {event.tenant}/{event.user}")
    start_gate.submitted(ctx, ctx.state.jobs[event.job_id])
    ctx.needs_pass = True


def cancel(ctx: Context, event: JobCancelRequested) -> None:
    """End a job on request; one that already ended stays as it is."""
    job = ctx.job(event.job_id)
    if job is None or job.state in FINAL_JOB_STATES:
        return
    job.after_vacating = AfterVacating.CANCEL
    job.cancelled_by = job.cancelled_by or event.by
    ctx.changed_jobs[job.job_id] = None
    if job.workers:
        ctx.log_event(job.job_id, "cancelling", f"asked by {event.by}")
        stop_workers(ctx, job, StopReason.CANCEL)
        return
    end(ctx, job, JobEvent.CANCEL, f"asked by {event.by}")


def add_worker(
    ctx: Context,
    job: JobEntry,
    node: NodeEntry,
    kind: str,
    *,
    is_flexible: bool,
    shared: Collection[GpuUuid] = (),
) -> WorkerEntry:
    """Give a job one more worker on GPUs of one type of a node, in phase reserve; it may run there.

    shared: the GPUs that it has together with others; empty: free ones.
    """
    key = next_key(job)
    gpus = job.spec.gpus_per_worker * (
        job.spec.gpu.gpus_for_one(kind, job.attempt.gpu_type or "") or 1
    )
    worker = WorkerEntry(
        key=key,
        node=node.name,
        gpu_uuids=hold_gpus(ctx, node, gpus, key, shared=shared, kind=kind),
        is_flexible=is_flexible,
        is_other_type=kind != job.attempt.gpu_type,
        generation=node.desired.generation + 1,
    )
    job.workers[key.worker_index] = worker
    ctx.changed_jobs[job.job_id] = None
    job.attempt.next_worker_index += 1
    ctx.touch(node.name)
    return worker


def next_key(job: JobEntry) -> WorkerKey:
    """The key of the next worker of the present attempt."""
    return WorkerKey(job.job_id, job.attempt.number, job.attempt.next_worker_index)


def stop_workers(
    ctx: Context, job: JobEntry, reason: StopReason, *, only: tuple[int, ...] | None = None
) -> None:
    """Order workers of a job to stop, all of them or some by index. Repeating it changes nothing.

    The order alone ends reservations that no node can run, see `gang_reservations`; the job may be
    over by that.
    """
    estimates.settle_work(job, ctx.now_s)
    ctx.changed_jobs[job.job_id] = None
    if reason == StopReason.RELEASE and any(_computes(job, index) for index in only or ()):
        gang_changes(ctx, job)
    for index, worker in job.workers.items():
        if worker.stop is not None or (only is not None and index not in only):
            continue
        worker.stop, worker.stop_ordered_at_s = reason, ctx.now_s
        worker.stop_grace_s = job.spec.checkpoint.grace_s
        ctx.touch(worker.node)
    for worker in job.workers.values():
        ctx.touch(worker.node)  # the others learn the new worker count
    ctx.needs_pass = True
    leave_reservations(ctx, job)


def _computes(job: JobEntry, index: int) -> bool:
    """Whether a worker of the gang was ordered to run and not to stop."""
    worker = job.workers.get(index)
    return worker is not None and worker.stop is None and worker.order == OrderPhase.RUN


def leave_reservations(ctx: Context, job: JobEntry) -> None:
    """Let a job go on without stopped workers that no node can run."""
    if gang_reservations.leave(ctx, job):
        _settle(ctx, job)


def preempt(
    ctx: Context,
    job: JobEntry,
    reason: str,
    *,
    loan: LoanEntry | None = None,
    stake: estimates.Stake | None = None,
    is_ordered: bool = False,
) -> None:
    """Preempt a whole job; it queues again when its last worker has ended.

    loan: the loan whose end needs the stop; it bears the preemption and its cost. A gang that had
        not run yet loses nothing and is not counted.
    stake: work at stake, and until when it was done; None: what its present workers have not saved.
    is_ordered: a person ordered it.
    """
    if job.state not in ACTIVE_JOB_STATES or job.after_vacating is not None:
        return
    if job.attempt.ran_at_s is not None:
        preemption_loss.ordered(ctx, job, loan, stake, is_ordered=is_ordered)
    fire(ctx, job, JobEvent.PREEMPT, reason)
    job.after_vacating = AfterVacating.REQUEUE
    stop_workers(ctx, job, StopReason.PREEMPT)
    finish_attempt_if_empty(ctx, job)


def worker_phase_changed(ctx: Context, job: JobEntry, worker: WorkerEntry) -> None:
    """A node reported a new phase of a live worker: a gang or a resize may be complete."""
    if job.state == JobState.STARTING:
        _run_when_ready(ctx, job)
    elif job.state == JobState.RESIZING:
        end_resize_when_done(ctx, job)


def is_ready(worker: WorkerEntry) -> bool:
    """Whether a worker could run now, as its node says."""
    return worker.phase in READY_PHASES


def is_base_there(job: JobEntry) -> bool:
    """Whether as many base workers are placed as the gang needs; of a rebuilt one some may miss."""
    base = sum(1 for worker in job.workers.values() if not worker.is_flexible)
    return base >= job.spec.workers_on(job.attempt.gpu_type or "").min


def _run_when_ready(ctx: Context, job: JobEntry) -> None:
    """Order the gang to run once every node of it is ready: a part of it could only wait."""
    # The last worker is mostly the last to be ready, and all of them are checked: look there first.
    if not (all(map(is_ready, reversed(job.workers.values()))) and is_base_there(job)):
        return
    if not rendezvous.is_ready(job):
        return
    job.attempt.endpoint = (job.store or job.workers[min(job.workers)]).endpoint
    job.attempt.gang_deadline_s = None
    job.attempt.ran_at_s = job.clock.at_s = ctx.now_s
    job.clock.worker_s = job.clock.held_worker_s = 0.0
    job.clock.most_workers = 0
    job.saves.attained_gpu_s = job.clock.attained_gpu_s
    job.estimate.measured_left_s = None
    job.suspension.before_attempt_s = job.suspension.total_s
    job.attempt.succeeded_workers, job.retry.refused_by = [], {}
    job.wait.queueing_s += ctx.now_s - job.wait.pending_since_s
    waited = usage.waited(ctx, job)
    if job.started_at_s is None:
        job.started_at_s = ctx.now_s
    job.attempt.start_step = job.saves.step
    for worker in job.workers.values():
        worker.order = OrderPhase.RUN
        ctx.touch(worker.node)
    fire(ctx, job, JobEvent.GANG_READY, f"workers ready: {len(job.workers)}", detail=waited)


def end_resize_when_done(ctx: Context, job: JobEntry) -> None:
    """End a resize when its new workers are ready and its released ones are gone."""
    added = [w for w in job.workers.values() if w.order == OrderPhase.RESERVE and w.stop is None]
    if added and all(is_ready(worker) for worker in added):
        estimates.settle_work(job, ctx.now_s)
        ctx.changed_jobs[job.job_id] = None
        gang_changes(ctx, job)
        for worker in added:
            worker.order = OrderPhase.RUN
        for worker in job.workers.values():
            ctx.touch(worker.node)
        added = []
    if not added and all(worker.stop is None for worker in job.workers.values()):
        job.attempt.gang_deadline_s = None
        fire(ctx, job, JobEvent.RESIZED, f"{job.running_workers} workers")
        ctx.needs_pass = True


def worker_gone(ctx: Context, job: JobEntry, worker: WorkerEntry, ending: Ending) -> None:
    """A worker ended: free its GPUs and see what that means for its job."""
    if worker.key.is_store:
        _store_gone(ctx, job, worker, ending)
        return
    estimates.settle_work(job, ctx.now_s)
    _leaves_gang(ctx, job, worker)
    ended_at_s = ctx.now_s if ending.ended_at_s is None else ending.ended_at_s
    stake = estimates.stake(job, ctx.now_s, ended_at_s)  # with the work of this worker
    ending = replace(ending, has_begun=worker.phase != WorkerPhase.REFUSED)
    release_gpus(ctx, worker.node, worker.key)
    estimates.computes_no_more(job, worker, ctx.now_s, ended_at_s)
    ctx.changed_jobs[job.job_id] = None
    ended_workers.left(job, worker, ended_at_s)
    for other in job.workers.values():
        ctx.touch(other.node)
    if _has_finished(ending):
        if not worker.is_flexible:  # the base alone says when the work is done
            job.attempt.succeeded_workers.append(worker.key.worker_index)
    elif worker.stop is not None:
        _count_release(ctx, job, worker)
        jobs_retry.learned(ctx, job, worker.node, ending)
    elif ending.said_reason is not None:
        _sent_home(ctx, job, worker, ending.said_reason, stake)
    elif (ending.is_node_fault or ending.refused) and _goes_on_without(job, worker):
        job.counts.node_faults += 1
        if ending.refused:
            jobs_retry.left_alone(ctx, job, worker.node)
        elif not ending.has_begun:
            jobs_retry.left_for_now(ctx, job, {worker.node})
        ctx.log_event(job.job_id, "flexible worker lost", ending.in_words)
    else:
        _fault(ctx, job, worker.node, ending)
    jobs_retry.peer_left(job, worker, ended_at_s)
    _settle(ctx, job)


def _leaves_gang(ctx: Context, job: JobEntry, worker: WorkerEntry) -> None:
    """A worker left without an order to stop. Where its gang goes on, that is a resize."""
    if _computes(job, worker.key.worker_index) and _goes_on_without(job, worker):
        gang_changes(ctx, job)


def _store_gone(ctx: Context, job: JobEntry, store: WorkerEntry, ending: Ending) -> None:
    """A rendezvous store ended that the coordinator had not stopped: the attempt is over.

    The store is not restarted under the gang, because its data is gone. A TCPStore keeps its keys
    in memory, and launchers that met in a new one would wait for each other's keys for ever. A
    signal, or a node that lost the store, is charged to no budget, and neither is a port that was
    taken. A store that exits by itself, or never came to listen, is the job's own failure.
    """
    if job.store is not store:
        return
    rendezvous.ended(ctx, job)
    if job.after_vacating is not None:
        return  # the attempt is ending as it is
    if ending.said_reason is not None:
        why = f"{store.node} went home by itself with its rendezvous store ({ending.said_reason})"
        preempt(ctx, job, why, loan=ctx.loan_of(store.node))
        return
    code = ending.exit_code
    was_killed = code is not None and code < 0 and job.attempt.ran_at_s is not None
    is_free = ending.is_node_fault or was_killed or code == PORT_TAKEN_EXIT_CODE
    error = f"its rendezvous store on {store.node} ended: {ending.error or f'exit code {code}'}"
    _fault(ctx, job, store.node, replace(ending, error=error, is_node_fault=is_free))
    finish_attempt_if_empty(ctx, job)


def _has_finished(ending: Ending) -> bool:
    """Whether the worker finished its work: it left with 0, and no order to stop had reached it.

    An order may be on its way meanwhile; a worker that ended because of one says so.
    """
    is_asked = ending.said_reason is not None
    return ending.exit_code == 0 and not (is_asked or ending.error or ending.is_node_fault)


def _count_release(ctx: Context, job: JobEntry, worker: WorkerEntry) -> None:
    if worker.stop == StopReason.RELEASE:
        ctx.state.counters.flexible_workers_released += 1
        ctx.log_event(job.job_id, "flexible worker released", f"from {worker.node}")


def _goes_on_without(job: JobEntry, worker: WorkerEntry) -> bool:
    """Whether a worker's loss only shrinks its gang: the base meets again without it."""
    is_whole = job.state in (JobState.RUNNING, JobState.RESIZING, JobState.SUSPENDED)
    return worker.is_flexible and is_whole


def _sent_home(
    ctx: Context, job: JobEntry, worker: WorkerEntry, reason: StopReason, stake: estimates.Stake
) -> None:
    """The node stopped a worker by itself: its lease ended, or an order that the journal lost asked
    for it; that order is carried out. Only the former is a preemption by the node.
    """
    if carried_out(job, worker.node, reason):
        stop_workers(ctx, job, reason)
        return
    why = why_stopped(worker.node, reason)
    if _goes_on_without(job, worker):
        ctx.state.counters.flexible_workers_released += reason != StopReason.GANG_TIMEOUT
        ctx.log_event(job.job_id, "flexible worker lost", why)
        return
    if estimates.is_all_saved(job):
        stake = stake._replace(gpu_s=0.0)  # it saved in its grace, before the coordinator knew
    preempt(ctx, job, why, loan=ctx.loan_of(worker.node), stake=stake)


def end_stalled(ctx: Context, job: JobEntry, ending: Ending) -> None:
    """A job that reports no progress any more is asked to save and to leave, by its own fault."""
    node = job.workers[min(job.workers)].node
    _fault(ctx, job, node, ending, asks=StopReason.PREEMPT)
    finish_attempt_if_empty(ctx, job)


def _fault(
    ctx: Context,
    job: JobEntry,
    node: NodeName,
    ending: Ending,
    *,
    asks: StopReason = StopReason.FINISHED,
) -> None:
    """Count a fault. Three budgets never mix: preemptions and node faults are free, own faults
    count.

    asks: the reason given to its other workers.
    """
    if job.state not in ACTIVE_JOB_STATES:
        return
    ending = jobs_retry.judged(ctx, job, node, ending)
    job.exit_code, job.error = ending.exit_code, ending.in_words
    if ending.is_node_fault:
        job.counts.node_faults += 1
        jobs_retry.node_fault(ctx, job, node, is_in_vain=not ending.has_begun)
        may_retry = True
    else:
        may_retry = jobs_retry.own_fault(ctx, job, node, ending)
    said = ending.error or f"exit code {ending.exit_code}"
    said += f": {ending.failure}" if ending.failure else ""
    job.after_vacating = AfterVacating.REQUEUE if may_retry else AfterVacating.FAIL
    fire(ctx, job, JobEvent.WORKER_FAILED, f"{ending.whose}: {said}")
    stop_workers(ctx, job, asks)


def _settle(ctx: Context, job: JobEntry) -> None:
    if job.state in FINAL_JOB_STATES:
        return
    if _is_done(job):
        job.after_vacating = AfterVacating.SUCCEED
        if job.workers:
            stop_workers(ctx, job, StopReason.FINISHED)
    elif job.after_vacating is None:
        if job.state == JobState.RESIZING:
            end_resize_when_done(ctx, job)
        elif job.state == JobState.STARTING:
            _run_when_ready(ctx, job)
    finish_attempt_if_empty(ctx, job)


def _is_done(job: JobEntry) -> bool:
    """True if the base gang has finished its work, even if an order to stop was on its way.
    Finished work does not run again.
    """
    if job.after_vacating not in (None, AfterVacating.REQUEUE):
        return False
    base_left = any(not worker.is_flexible for worker in job.workers.values())
    base = job.spec.workers_on(job.attempt.gpu_type or "").min
    is_active = job.state in ACTIVE_JOB_STATES or job.state == JobState.PREEMPTING
    return is_active and not base_left and len(job.attempt.succeeded_workers) >= base


def finish_attempt_if_empty(ctx: Context, job: JobEntry) -> None:
    """When the last worker of a finished attempt has left: decide the job's next state."""
    if job.workers or job.after_vacating is None:
        return
    preemption_loss.settle(ctx, job)
    after = job.after_vacating
    if after == AfterVacating.SUCCEED:
        job.exit_code, job.error = 0, ""
        if job.attempt.ran_at_s is not None and job.attempt.number - job.retry.prerun_attempts <= 1:
            kept = ctx.settings.job_histories_kept
            estimates.record(ctx.state, job, job.clock.worker_s, kept=kept)
        end(ctx, job, JobEvent.SUCCEED)
    elif after == AfterVacating.FAIL:
        end(ctx, job, JobEvent.FAIL, job.error or f"exit code {job.exit_code}")
    elif after == AfterVacating.CANCEL:
        end(ctx, job, JobEvent.CANCEL, f"asked by {job.cancelled_by}" if job.cancelled_by else "")
    else:
        _requeue(ctx, job)


def _requeue(ctx: Context, job: JobEntry) -> None:
    rendezvous.leave(ctx, job)
    job.after_vacating = None
    job.attempt.succeeded_workers = []
    # else the job has waited all the time, because its nodes were never used
    if job.attempt.ran_at_s is not None:
        job.wait.pending_since_s = ended_workers.waits_since_s(job, ctx.now_s)
    estimates.attempt_ended(job)
    prerun_spec.settled(ctx, job)
    job.attempt.gang_deadline_s = None
    job.attempt.awaited_nodes = []
    job.attempt.gpu_type = None
    job.attempt.endpoint = ""
    fire(ctx, job, JobEvent.VACATED, "waits again")
    if job.array_task is not None:
        array_tasks.waits_again(ctx, job)
    ctx.needs_pass = True


def end(ctx: Context, job: JobEntry, event: JobEvent, reason: str = "") -> None:
    """A job has no worker any more and is over."""
    rendezvous.leave(ctx, job)
    job.finished_at_s = ctx.now_s
    ctx.ended_jobs.append(job.job_id)
    ctx.state.live_jobs.pop(job.job_id, None)
    job.after_vacating = None
    fire(ctx, job, event, reason)
    if job.array_task is not None:
        array_tasks.ended(ctx, job)
    counters = ctx.state.counters
    if event == JobEvent.SUCCEED:
        counters.jobs_finished += 1
        counters.jobs_finished_on_loan += job.was_on_loan
    elif event == JobEvent.FAIL:
        counters.jobs_failed += 1
    state_context.forget_jobs(ctx)
    ctx.needs_pass = True
