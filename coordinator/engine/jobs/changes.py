"""Changes of a job after its submission: priority, limits, workers, dependencies, nodes.

The new spec is checked as at submission. What has begun with the old one goes on: a worker range
keeps its minimum while the job has workers, and workers beyond a lower maximum are released by a
resize in the next pass. Workers stay where they are, whatever nodes the job requires from now on.
"""

from __future__ import annotations

from typing import cast

from msgspec import UNSET
from msgspec.structs import asdict, replace

from common.jobspec import Misfit, misfit
from common.model import (
    FINAL_JOB_STATES,
    NODE_FIELDS,
    Dependency,
    JobChange,
    JobId,
    JobSpec,
    JobState,
    WorkerRange,
)
from coordinator.engine.jobs import estimates, prerun_spec, start_gate
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import AfterVacating, ClusterState, JobEntry
from coordinator.policies.contract.decisions import Resize

LISTS = ("depends_on", *NODE_FIELDS)
"""Fields that an empty list unsets."""
NOTHING = Misfit("", "nothing is changed: expected a new value of at least one field")


def changed(spec: JobSpec, change: JobChange) -> JobSpec:
    """A spec with the new values; during a pre-run the worker range is that of the gang after
    it."""
    fields = {name: value for name, value in asdict(change).items() if value is not UNSET}
    workers, gang = fields.get("workers"), spec.prerun.gang
    if gang is not None and fields.pop("workers", None) is not None:
        fields["prerun"] = replace(spec.prerun, gang=replace(gang, workers=workers))
    for name in LISTS:
        if fields.get(name) == ():
            fields[name] = UNSET
    return replace(spec, **fields)


def why_not(state: ClusterState, job: JobEntry, change: JobChange) -> Misfit | None:
    """The first field that cannot be changed like this, and why; None: all can.

    The field `job_id` stands for the job, which cannot be changed at all, and no field for all.
    """
    if job.state in FINAL_JOB_STATES:
        return Misfit("job_id", f"job {job.job_id} is {job.state}")
    if job.after_vacating not in (None, AfterVacating.REQUEUE):
        return Misfit("job_id", f"job {job.job_id} is ending")
    if change == JobChange():
        return NOTHING
    found = misfit(changed(prerun_spec.submitted(job), change))
    if found is not None:
        return found
    for field, what in (
        ("deadline_s", deadline_misfit(state, job.submitted_at_s, change)),
        ("workers", _workers_misfit(job, change)),
        ("depends_on", _dependency_misfit(state, job, change)),
    ):
        if what:
            return Misfit(field, what)
    return None


def deadline_misfit(state: ClusterState, submitted_at_s: float, change: JobChange) -> str:
    """Why a new deadline cannot be met any more; empty when it can."""
    if change.deadline_s is UNSET or change.deadline_s is None:
        return ""
    age_s = state.now_s - submitted_at_s
    if change.deadline_s > age_s:
        return ""
    return (
        f"{change.deadline_s:g} s after its submission, which was {age_s:.0f} s ago: expected a "
        "later one"
    )


def _workers_misfit(job: JobEntry, change: JobChange) -> str:
    if change.workers is UNSET or job.state == JobState.PENDING:
        return ""
    before = prerun_spec.submitted(job)
    if change.workers.min != before.workers.min:
        return (
            f"min is {change.workers.min}, and job {job.job_id} is {job.state}: expected "
            f"{before.workers.min} as before; only max changes while it has workers"
        )
    if not before.has_store and changed(before, change).has_store:
        return "it runs without a rendezvous store and cannot grow: requeue it first"
    return ""


def _dependency_misfit(state: ClusterState, job: JobEntry, change: JobChange) -> str:
    if change.depends_on is UNSET:
        return ""
    if job.state not in (JobState.PENDING, JobState.PREEMPTING):
        return f"job {job.job_id} is {job.state} and waits for nothing"
    return dependency_misfit(state, job.job_id, change.depends_on)


def dependency_misfit(
    state: ClusterState, job_id: JobId, dependencies: tuple[Dependency, ...]
) -> str:
    """Why a job cannot depend on these; empty when it can."""
    for each in dependencies:
        if each.job != job_id and start_gate.standing(state, each.job) is None:
            return f"no job {each.job!r}; expected the id or number of one (aryl job list --all)"
    if start_gate.leads_to(state, dependencies, job_id):
        return f"job {job_id} would wait for itself"
    return ""


def carry_out(ctx: Context, job: JobEntry, change: JobChange, by: str) -> None:
    """Give a job its new spec; `why_not` has found nothing."""
    before = prerun_spec.submitted(job)
    if job.submitted_spec is None:
        job.submitted_spec = before
    estimates.settle_work(job, ctx.now_s)
    job.spec = changed(job.spec, change)
    now = prerun_spec.submitted(job)
    ctx.changed_jobs[job.job_id] = None
    ctx.needs_pass = True
    ctx.log_event(job.job_id, "changed", f"by {by}: {in_words(before, change)}")
    if change.deadline_s is not UNSET:
        job.is_promised = False  # the promise was of another deadline
    if now.workers.min != before.workers.min:
        _estimate(ctx, job, now)
    if change.depends_on is not UNSET:
        start_gate.depend_on(ctx, job, change.depends_on)
    if job.workers:
        ctx.state.oversized_jobs[job.job_id] = None
        for worker in job.workers.values():
            ctx.touch(worker.node)  # its ledger has what is rebuilt if the journal is lost


def _estimate(ctx: Context, job: JobEntry, spec: JobSpec) -> None:
    """The work of a job counts in workers of its minimum gang, which is another one now."""
    estimates.forget_measured(job)
    work_s, source = estimates.whole_work(ctx.state, ctx.settings, job.tenant, spec)
    job.estimate.expected_work_s, job.estimate.source = work_s, source


def in_words(before: JobSpec, change: JobChange) -> str:
    """The old and the new value of each changed field."""
    return ", ".join(
        f"{name} {_word(getattr(before, name))} -> {_word(value)}"
        for name, value in asdict(change).items()
        if value is not UNSET
    )


def _word(value: object) -> str:
    if value is None or value is UNSET or value == ():
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, WorkerRange):
        return f"{value.min}:{value.max}"
    if isinstance(value, tuple):
        each = cast("tuple[Dependency | str, ...]", value)
        return " ".join(
            f"{one.when}:{one.job}" if isinstance(one, Dependency) else one for one in each
        )
    return str(value)


def shrinks(ctx: Context) -> list[Resize]:
    """Resizes that bring jobs down to the maximum to which people changed them.

    A gang that is not whole yet, or is suspended, is left until it runs. In a frozen cell nothing
    is resized.
    """
    found: list[Resize] = []
    for job_id in list(ctx.state.oversized_jobs):
        job = ctx.job(job_id)
        extra = [] if job is None else _extra_workers(job)
        if job is None or not extra:
            del ctx.state.oversized_jobs[job_id]
        elif job.state in (JobState.RUNNING, JobState.RESIZING) and not ctx.state.is_frozen:
            most = job.spec.workers_on(job.attempt.gpu_type or "").max
            reason = f"a person changed its maximum, which is {most} now"
            found.append(Resize(job_id=job_id, removed_workers=tuple(extra), reason=reason))
    return found


def _extra_workers(job: JobEntry) -> list[int]:
    """Flexible workers beyond the maximum, the latest first; none of a job that is ending."""
    if job.after_vacating is not None:
        return []
    stay = [index for index, worker in job.workers.items() if worker.stop is None]
    over = len(stay) - job.spec.workers_on(job.attempt.gpu_type or "").max
    flexible = [index for index in sorted(stay, reverse=True) if job.workers[index].is_flexible]
    return flexible[: max(0, over)]
