"""Accounts of the GPUs that jobs hold, as intervals: who, on which node, from when to when. Pure.

The rules are those of the cell's counters (`accounting.GpuTally`): a GPU counts for its holder
while its node is of the training pool or on loan. So all intervals of jobs add up to
`training_held_gpu_s` and `on_loan_held_gpu_s`, and those of lent nodes to `on_loan_gpu_s`. A GPU
that n workers share counts as 1/n for each of them.

A use is open while nothing about it changes. Closed uses of a job go into a record of the history
when the job holds nothing any more, and earlier if there are many.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.history import (
    AttemptRecord,
    Interval,
    JobRecord,
    LentRecord,
    LossRecord,
    Requested,
    StoryKind,
    Use,
    WaitRecord,
)
from common.model import JobId, JobSpec, JobState, NodeName, NodeRole, Pool
from coordinator.engine.state.array_entry import ArrayEntry, Places
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import ClusterState, HeldUse, JobEntry, JobUse, NodeEntry
from coordinator.policies.contract.text import counted

TRAINING, LOAN = "training", "loan"
"""Pools of a use."""
NO_JOB = JobId("")
"""Stands for the GPUs of a lent node as a whole."""
RECORD_USES = 64
"""Closed uses of a job that make a record before the job holds nothing."""
HOUR_S = 3600.0

_Key = tuple[JobId, int, str]
"""Job, attempt and GPU type."""


def held(node: NodeEntry) -> dict[_Key, float]:
    """The GPUs of a node that count now, by job, attempt and type."""
    is_training = node.home_pool == Pool.TRAINING
    if not is_training and node.role != NodeRole.ON_LOAN:
        return {}
    found: dict[_Key, float] = {}
    for slot in node.gpus:
        holder = slot.holder
        if not is_training:
            key = (NO_JOB, 0, slot.gpu_type)
            found[key] = found.get(key, 0.0) + 1.0
        if holder is None:
            continue
        share = 1.0 / (1 + len(slot.guests))
        for worker in (holder, *slot.guests):
            key = (worker.job_id, worker.attempt, slot.gpu_type)
            found[key] = found.get(key, 0.0) + share
    return found


def _place(node: NodeEntry) -> tuple[str, str]:
    """The pool of the uses of a node, and the service that lent it."""
    if node.home_pool == Pool.TRAINING:
        return TRAINING, ""
    return LOAN, node.service or ""


def opened(node: NodeEntry, since_s: float) -> list[HeldUse]:
    """The open uses of a node, as if all of them began at one instant."""
    pool, service = _place(node)
    return [
        HeldUse(
            job_id=job_id,
            attempt=attempt,
            gpu_type=gpu_type,
            gpus=gpus,
            pool=pool,
            service=service,
            since_s=since_s,
        )
        for (job_id, attempt, gpu_type), gpus in held(node).items()
    ]


def begin(state: ClusterState) -> None:
    """Open the uses that a state of an earlier version does not have."""
    for name, node in state.nodes.items():
        if name not in state.held_uses and (found := opened(node, state.now_s)):
            state.held_uses[name] = found
            for use in found:
                _of(state, use.job_id).open_count += 1
    state.job_uses.pop(NO_JOB, None)


def _of(state: ClusterState, job_id: JobId) -> JobUse:
    found = state.job_uses.get(job_id)
    if found is None:
        found = state.job_uses[job_id] = JobUse()
    return found


def update(ctx: Context, names: Iterable[NodeName]) -> None:
    """Close the changed uses of these nodes, open the new ones, and record the finished ones."""
    touched: dict[JobId, None] = {}
    for name in names:
        node = ctx.state.nodes.get(name)
        old = ctx.state.held_uses.get(name, ())
        new = [] if node is None else opened(node, ctx.now_s)
        if old or new:
            _change(ctx, name, old, new, touched)
    for job_id in touched:
        _record(ctx, job_id)


def _change(
    ctx: Context,
    name: NodeName,
    old: Iterable[HeldUse],
    new: list[HeldUse],
    touched: dict[JobId, None],
) -> None:
    state = ctx.state
    fresh = {_key(use): use for use in new}
    kept: list[HeldUse] = []
    for use in old:
        same = fresh.get(_key(use))
        if same is not None and _is_same(use, same):
            kept.append(use)
            del fresh[_key(use)]
            continue
        touched[use.job_id] = None
        _close(ctx, name, use)
    for use in fresh.values():
        kept.append(use)
        if use.job_id != NO_JOB:
            _of(state, use.job_id).open_count += 1
    if kept:
        state.held_uses[name] = kept
    else:
        state.held_uses.pop(name, None)


def _key(use: HeldUse) -> _Key:
    return use.job_id, use.attempt, use.gpu_type


def _is_same(one: HeldUse, other: HeldUse) -> bool:
    return (one.gpus, one.pool, one.service) == (other.gpus, other.pool, other.service)


def as_use(use: HeldUse, node: str, until_s: float) -> Use:
    """An open use as if it ended at an instant."""
    return Use(
        node=node,
        gpu_type=use.gpu_type,
        gpus=use.gpus,
        pool=use.pool,
        service=use.service,
        began_at_s=use.since_s,
        ended_at_s=until_s,
    )


def _close(ctx: Context, name: NodeName, use: HeldUse) -> None:
    closed = as_use(use, name, ctx.now_s)
    if use.job_id == NO_JOB:
        if closed.gpu_s > 0:
            said = f"{use.gpus:g} GPUs for {ctx.now_s - use.since_s:.0f} s"
            record = LentRecord(uses=(closed,))
            ctx.log_event(name, "was lent", said, kind=StoryKind.LENT, detail=record)
        return
    job = _of(ctx.state, use.job_id)
    job.open_count -= 1
    if closed.gpu_s <= 0:
        return  # held for no time
    job.closed.append((use.attempt, closed))
    sort = f"{use.pool}/{use.gpu_type}"
    job.held_gpu_s[sort] = job.held_gpu_s.get(sort, 0.0) + closed.gpu_s
    if job.nodes_of != use.attempt:
        job.nodes_of, job.nodes = use.attempt, []
    if name not in job.nodes:
        job.nodes.append(name)


def _record(ctx: Context, job_id: JobId) -> None:
    """Put the closed uses of a job into records, once it holds nothing or has many."""
    found = ctx.state.job_uses.get(job_id)
    if found is None or (found.open_count and len(found.closed) < RECORD_USES):
        return
    entry = ctx.state.jobs.get(job_id)
    by_attempt: dict[int, list[Use]] = {}
    for attempt, use in found.closed:
        by_attempt.setdefault(attempt, []).append(use)
    found.closed = []
    for attempt, uses in by_attempt.items():
        for first in range(0, len(uses), RECORD_USES):
            _put(ctx, job_id, entry, attempt, tuple(uses[first : first + RECORD_USES]))
    if not found.open_count and job_id not in ctx.state.live_jobs and job_id not in ctx.ended_jobs:
        del ctx.state.job_uses[job_id]


def _put(
    ctx: Context, job_id: JobId, entry: JobEntry | None, attempt: int, uses: tuple[Use, ...]
) -> None:
    record = AttemptRecord(
        job_id=job_id,
        tenant=entry.tenant if entry else "",
        user=entry.user if entry else "",
        attempt=attempt,
        uses=uses,
    )
    hours = sum(use.gpu_s for use in uses) / HOUR_S
    nodes = counted(len({use.node for use in uses}), "node")
    said = f"held {hours:.3g} GPU-hours on {nodes}"
    ctx.log_event(job_id, f"attempt {attempt}", said, kind=StoryKind.ATTEMPT, detail=record)


def lost(ctx: Context, job: JobEntry, cause: str, gpu_s: float, *, service: str = "") -> LossRecord:
    """Note work of a job that was lost, by its cause; the caller records it."""
    costs = _of(ctx.state, job.job_id).lost_gpu_s
    costs[cause] = costs.get(cause, 0.0) + gpu_s
    return LossRecord(
        job_id=job.job_id,
        tenant=job.tenant,
        user=job.user,
        cause=cause,
        gpu_s=gpu_s,
        service=service,
    )


def record_ends(ctx: Context) -> None:
    """Record the account of each job that this event ended."""
    for job_id in ctx.ended_jobs:
        job = ctx.state.jobs.get(job_id)
        used = ctx.state.job_uses.get(job_id) or JobUse()
        if job is not None:
            ended = _job_record(ctx.state, job, used)
            said = ended.error or f"waited {ended.waited_s:.0f} s"
            ctx.log_event(job_id, ended.state, said, kind=StoryKind.JOB, detail=ended)
        if not used.open_count:
            ctx.state.job_uses.pop(job_id, None)


def record_cancelled_tasks(ctx: Context, array: ArrayEntry, places: Places) -> None:
    """Record the tasks of an array that were cancelled before their turn, in one account."""
    indices = array.text_of(places)
    spec = array.spec
    record = JobRecord(
        job_id=f"{array.array_id}_[{indices}]",
        name=spec.name,
        tenant=array.tenant,
        user=array.user,
        submitted_at_s=array.submitted_at_s,
        ended_at_s=ctx.now_s,
        state=JobState.CANCELLED,
        gpus=spec.base_demand_gpus,
        number=array.number,
        array_number=array.number,
        array_indices=indices,
        min_workers=spec.workers.min,
        gpus_per_worker=spec.gpus_per_worker,
        requested=_requested(spec),
    )
    said = f"{counted(len(places), 'task')} before their turn"
    ctx.log_event(array.array_id, JobState.CANCELLED, said, kind=StoryKind.JOB, detail=record)


def _requested(spec: JobSpec) -> Requested:
    return Requested(
        priority=spec.priority,
        time_limit_s=spec.time_limit_s,
        gpu_types=spec.gpu.types,
        cpus_per_worker=spec.cpus_per_worker,
        memory_bytes_per_worker=spec.memory_bytes_per_worker,
        workdir=spec.workdir,
        title=spec.env.get("SLURM_JOB_NAME", ""),
        comment=spec.env.get("SLURM_JOB_COMMENT", ""),
    )


def _job_record(state: ClusterState, job: JobEntry, used: JobUse) -> JobRecord:
    ended_at_s = job.finished_at_s or 0.0
    task = job.array_task
    array = None if task is None else state.arrays.get(task.array_id)
    ran = {one.key.worker_index for one in job.ended.workers.values() if not one.key.is_store}
    wait = open_wait(job, ended_at_s)
    return JobRecord(
        job_id=job.job_id,
        name=job.spec.name,
        tenant=job.tenant,
        user=job.user,
        submitted_at_s=job.submitted_at_s,
        started_at_s=job.started_at_s,
        ended_at_s=ended_at_s,
        state=job.state,
        exit_code=job.exit_code,
        error=job.error,
        attempts=job.attempt.number,
        preemptions=job.counts.preemptions,
        waited_s=job.wait.queueing_s + (wait.ended_at_s - wait.began_at_s if wait else 0.0),
        last_wait=wait,
        gpus=job.spec.base_demand_gpus,
        held_gpu_s=dict(used.held_gpu_s),
        lost_gpu_s=dict(used.lost_gpu_s),
        nodes=tuple(sorted(used.nodes)),
        workers=job.clock.most_workers or min(len(ran), job.spec.workers.max),
        worker_s=job.clock.held_worker_s,
        attempt_started_at_s=job.attempt.ran_at_s,
        number=job.number,
        array_number=0 if array is None else array.number,
        array_indices="" if task is None else str(task.index),
        min_workers=job.spec.workers.min,
        gpus_per_worker=job.spec.gpus_per_worker,
        failure="" if job.retry.failure is None else job.retry.failure.reason,
        requested=_requested(job.spec),
    )


def waited(ctx: Context, job: JobEntry) -> WaitRecord:
    """The wait of a job that ends now, by a start or by a shut gate; the caller records it."""
    return WaitRecord(
        job_id=job.job_id,
        tenant=job.tenant,
        user=job.user,
        gpus=job.spec.base_demand_gpus,
        began_at_s=job.wait.pending_since_s,
        ended_at_s=ctx.now_s,
    )


def open_wait(job: JobEntry, until_s: float) -> Interval | None:
    """The wait of a job that its gang has not ended, up to an instant; as in `accounting`.

    Time behind a shut gate is no wait.
    """
    since_s = job.wait.pending_since_s
    if job.attempt.ran_at_s is not None or job.gate.is_shut or until_s <= since_s:
        return None
    return Interval(since_s, until_s)
