"""The frozen view of one job that policies decide on.

A group of a view that has nothing to say is a shared constant: most jobs of a long line wait for
their first start.
"""

from __future__ import annotations

from collections.abc import Set

from msgspec.structs import replace

from common.model import GpuUuid, JobId, JobState, NodeName
from coordinator.engine import reach
from coordinator.engine.jobs import estimates, migration, node_selection, prerun_spec
from coordinator.engine.jobs import retry as jobs_retry
from coordinator.engine.nodes import lost_records, windows
from coordinator.engine.state import mixed_nodes
from coordinator.engine.state.context import NONE_BARRED, Context, barred_uuids
from coordinator.engine.state.copied_fields import copier
from coordinator.engine.state.tables import JobEntry, NodeEntry, StepTimes, WorkerEntry
from coordinator.policies.contract.estimates import Source
from coordinator.policies.contract.job_groups import (
    ANY_NODE,
    NO_ATTEMPT,
    NO_PREEMPTIONS,
    NO_PROGRESS,
    NO_RESIZES,
    NO_STEP_TIMES,
    NOTHING_TO_SAVE,
    AttemptView,
    Behind,
    EstimateView,
    NodeLimits,
    PreemptionsView,
    ProgressView,
    ResizesView,
    SavesView,
    StepTimesView,
)
from coordinator.policies.contract.node_names import NodeNames, with_more
from coordinator.policies.contract.snapshot import JobView, WorkerView


def seen_job(
    ctx: Context, job_id: JobId, fleet: reach.FleetGpus, excluded: node_selection.Excluded
) -> JobView | None:
    """A job that has not ended. One that rests before its next try, or waits behind a shut gate, is
    not put to a policy.
    """
    job = ctx.state.jobs[job_id] if job_id in ctx.state.live_jobs else None
    if job is None or jobs_retry.rests(job) or lost_records.is_held(ctx.state, job_id):
        return None
    if job.state == JobState.PENDING and job.gate.is_shut:
        return None
    seen, time_s = _job_view(ctx, job, fleet, excluded.of(job.spec)), job.spec.prerun.time_s
    if not prerun_spec.is_on(job) or time_s is None:
        return seen
    ran_s = prerun_spec.computed_s(job, ctx.now_s)
    computes = job.attempt.ran_at_s is not None and job.state != JobState.SUSPENDED
    return replace(
        seen,
        estimate=EstimateView(
            remaining_work_s=0.0 if job.retry.is_prerun_over else max(0.0, time_s - ran_s),
            source=Source.PRERUN,
            work_rate=int(computes),
            whole_work_s=time_s,
        ),
        steps=NO_STEP_TIMES,
        behind=_behind(job, fleet),
    )


def _behind(job: JobEntry, fleet: reach.FleetGpus) -> Behind | None:
    """The gang that a job is when its pre-run is over; what that saves is not known before."""
    gang, workers = job.spec.prerun.gang, reach.reach_behind(fleet, job)
    if gang is None or workers is None:
        return None
    return Behind(
        workers=workers,
        gpus_per_worker=gang.gpus_per_worker,
        work_s=job.estimate.expected_work_s,
        estimate_source=job.estimate.source,
    )


_copied = copier(
    JobView,
    JobEntry,
    groups=("attempt", "spec", "spec.checkpoint"),
    # the fleet limits the size of a job, and the groups of a view are frozen
    computed=(
        "workers", "gpu", "profile", "estimate", "progress", "saves", "steps", "attempt", "resizes",
    ),
)  # fmt: skip
_copied_steps = copier(StepTimesView, StepTimes)


def _job_view(ctx: Context, job: JobEntry, fleet: reach.FleetGpus, excluded: NodeNames) -> JobView:
    """One job, frozen; no larger than the fleet. excluded: nodes that it may not use."""
    span, behind = reach.reach_of(fleet, job), reach.reach_behind(fleet, job)
    longest = span.workers.max if behind is None else max(span.workers.max, behind.max)
    spec, gpus = job.spec, estimates.computing_gpus(job)
    return JobView(
        **_copied(job),
        waiting_since_s=job.wait.pending_since_s if job.state == JobState.PENDING else None,
        deadline_at_s=None if spec.deadline_s is None else job.submitted_at_s + spec.deadline_s,
        workers=span.workers,
        most_on=span.most_on,
        gpu=reach.whole_only(fleet, spec.gpu),
        nodes=_node_limits(ctx, job, excluded),
        profile=reach.shortened(spec.profile, longest),
        placed=_worker_views(ctx, job),
        held=migration.held(ctx, job),
        is_resizable=(
            job.state == JobState.RUNNING and spec.is_elastic and job.after_vacating is None
        ),
        attempt=_attempt(job),
        preemptions=_preemptions(job),
        resizes=_resizes(job),
        as_of_s=ctx.now_s,
        estimate=_estimate(job, ctx.now_s),
        progress=_progress(job, gpus, ctx.now_s),
        saves=_saves(job, gpus, ctx.now_s),
        steps=_steps(job, ctx.now_s),
    )


def _estimate(job: JobEntry, now_s: float) -> EstimateView:
    work_s, source = estimates.remaining_work(job, now_s)
    return EstimateView(
        remaining_work_s=work_s,
        source=source,
        work_rate=estimates.pace(job) if job.attempt.ran_at_s is not None else 0,
        least_work_s=estimates.least_work_s(job),
        estimated_left_s=estimates.estimated_left(job, now_s),
        whole_work_s=job.estimate.expected_work_s,
    )


def _progress(job: JobEntry, gpus: float, now_s: float) -> ProgressView:
    attained_gpu_s = estimates.attained_gpu_s(job, now_s)
    if job.progress is None and not attained_gpu_s and not gpus:
        return NO_PROGRESS
    return ProgressView(
        attained_gpu_s=attained_gpu_s,
        computing_gpus=gpus,
        step=None if job.progress is None else job.progress.step,
        step_gpu_s=job.clock.progress_gpu_s,
    )


def _saves(job: JobEntry, gpus: float, now_s: float) -> SavesView:
    saves_when_asked = job.spec.checkpoint.path is not None
    if job.attempt.ran_at_s is None and not saves_when_asked:
        return NOTHING_TO_SAVE
    return SavesView(
        unsaved_gpu_s=estimates.lost_if_preempted(job, now_s),
        unsaved_gpus=gpus,
        has_saved=estimates.has_saved(job),
        saves_when_asked=saves_when_asked,
    )


def _steps(job: JobEntry, now_s: float) -> StepTimesView:
    if job.steps.step_time_s is None:
        return NO_STEP_TIMES
    return StepTimesView(**_copied_steps(job.steps), steps_left=estimates.steps_left(job, now_s))


def _attempt(job: JobEntry) -> AttemptView:
    attempt = job.attempt
    if not attempt.number:
        return NO_ATTEMPT
    return AttemptView(
        number=attempt.number,
        started_at_s=attempt.ran_at_s,
        first_started_at_s=job.started_at_s,
        suspended_at_s=job.suspension.since_s,
        is_packed=attempt.is_packed,
    )


def _preemptions(job: JobEntry) -> PreemptionsView:
    wasted_gpu_s = max(0.0, job.lost_gpu_s - job.resizes.lost_gpu_s)
    if not job.counts.preemptions and not wasted_gpu_s and job.back_off is None:
        return NO_PREEMPTIONS
    return PreemptionsView(
        count=job.counts.preemptions,
        latest_at_s=job.preempted_at_s,
        wasted_gpu_s=wasted_gpu_s,
        back_off=job.back_off,
    )


def _resizes(job: JobEntry) -> ResizesView:
    if job.resized_at_s is None and not job.resizes.recent_s:
        return NO_RESIZES
    return ResizesView(latest_at_s=job.resized_at_s, cost_s=job.resizes.cost_s)


def _node_limits(ctx: Context, job: JobEntry, excluded: NodeNames) -> NodeLimits:
    avoided = _avoided(ctx, job, excluded)
    wants_no_loan = job.retry.no_loan_until_s is not None
    if not (avoided or wants_no_loan or ctx.state.windows):
        return ANY_NODE
    return NodeLimits(
        avoided=avoided,
        excluded=excluded,
        longest_s=windows.longest_s(ctx, job) if ctx.state.windows else None,
        wants_no_loan=wants_no_loan,
    )


def _avoided(ctx: Context, job: JobEntry, excluded: NodeNames) -> NodeNames:
    """The nodes that a job leaves alone, with all their parts."""
    names, found = job.retry.avoid_nodes, list[NodeName]()
    if ctx.state.windows:
        names = sorted({*names, *windows.barred(ctx, job)})
    if not names:
        return excluded  # one value for all jobs that ask the same of nodes
    for name in names:
        node = ctx.state.nodes.get(name)
        found += [name] if node is None else mixed_nodes.names(node)
    return with_more(excluded, tuple(found))


def worker_view(
    worker: WorkerEntry, barred: Set[GpuUuid], name: NodeName | None = None
) -> WorkerView:
    """barred: GPUs of its node that stay occupied. name: its part of the node; None: the node's
    own.
    """
    uuids = worker.gpu_uuids
    lost = tuple([uuid for uuid in uuids if uuid in barred]) if barred else ()
    return WorkerView(
        job_id=worker.key.job_id,
        worker_index=worker.key.worker_index,
        node=name or worker.node,
        gpus=len(uuids),
        freed_gpus=len(uuids) - len(lost),
        is_flexible=worker.is_flexible,
        is_leaving=worker.stop is not None,
        is_other_type=worker.is_other_type,
        gpu_uuids=uuids,
        barred_uuids=lost,
    )


def _worker_views(ctx: Context, job: JobEntry) -> tuple[WorkerView, ...]:
    """The workers that a job has, by index."""
    found: list[WorkerView] = []
    name, barred, node, is_mixed = None, NONE_BARRED, None, False
    for _, worker in sorted(job.workers.items()):
        if worker.node != name:  # a gang mostly stands node by node
            name = worker.node
            node = ctx.state.nodes.get(name)
            barred = NONE_BARRED if node is None else barred_uuids(node)
            is_mixed = node is not None and len(mixed_nodes.kinds(node)) > 1
        part = _part_name(node, worker) if is_mixed and node is not None else None
        found.append(worker_view(worker, barred, part))
    return tuple(found)


def _part_name(node: NodeEntry, worker: WorkerEntry) -> NodeName:
    return mixed_nodes.name_of(node, mixed_nodes.kind_of(node, worker.gpu_uuids))
