"""GPUs shared by several workers: which of them compute, in turns or packed.

A worker that shares a GPU either computes or is suspended with its whole gang. One worker computes
alone unless packing is allowed; then at most two compute, if their memory is known to fit. A GPU is
charged once: to the workers that compute on it, in equal parts
(docs/decisions/0014-sharing-gpus.md).
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from common.job_state_table import JobEvent
from common.messages import GpuHealth, OrderPhase, process_named
from common.model import GpuUuid, JobId, JobState, NodeName, WorkerKey
from common.profile import JobProfile, packed_speed_ratio
from coordinator.engine.jobs import estimates
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.state import mixed_nodes as parts
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import GpuSlot, JobEntry, NodeEntry, WorkerEntry
from coordinator.policies.contract.decisions import Placement, Resume, Suspend

MAX_PACKED = 2
"""Workers that may compute on one GPU at a time (Gandiva, OSDI'18, section 3.3, packs pairs)."""

COMPUTING_STATES = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RESIZING})
"""States of jobs whose workers compute, or will as soon as their gang is ready."""


# --- who computes where -----------------------------------------------------------------------


def keys_of(slot: GpuSlot) -> Iterable[WorkerKey]:
    """Workers that have a GPU now, computing or not."""
    return slot.guests if slot.holder is None else (slot.holder, *slot.guests)


def _find(ctx: Context, key: WorkerKey) -> tuple[JobEntry, WorkerEntry] | None:
    worker = ctx.worker(key)
    return None if worker is None else (ctx.state.jobs[key.job_id], worker)


def computing_on(ctx: Context, slot: GpuSlot) -> list[JobEntry]:
    """Jobs that compute on a GPU or are about to; one that was ordered to stop does so no more."""
    found = (_find(ctx, key) for key in keys_of(slot))
    return [
        job
        for job, worker in (pair for pair in found if pair is not None)
        if worker.stop is None and job.state in COMPUTING_STATES
    ]


def why_not_beside(
    ctx: Context, job: JobEntry, node: NodeEntry, uuids: Iterable[GpuUuid], *, is_packed: bool
) -> str:
    """Why a job may not compute on GPUs together with the present jobs; empty if it may."""
    wanted = set(uuids)
    for slot in node.gpus:
        if slot.uuid not in wanted:
            continue
        others = [other for other in computing_on(ctx, slot) if other is not job]
        if not others:
            continue
        if not is_packed:
            return f"{others[0].job_id} computes on GPU {slot.uuid}"
        if len(others) >= MAX_PACKED:
            return f"{len(others)} jobs compute on GPU {slot.uuid}"
        why = _memory_is_short(slot, [job, *others])
        if why:
            return why
    return ""


def _memory_is_short(slot: GpuSlot, packed: list[JobEntry]) -> str:
    """True if packed jobs would not fit: each keeps all its memory on the device. Unknown memory is
    no reason.
    """
    wanted = sum(job.spec.profile.gpu_memory_bytes or 0 for job in packed)
    if slot.memory_bytes and wanted > slot.memory_bytes:
        return f"GPU {slot.uuid} has {slot.memory_bytes} bytes, {wanted} asked"
    return ""


def why_not_on(ctx: Context, job: JobEntry, placement: Placement, gpus: int) -> str:
    """Why workers may not have exactly the GPUs that their placement names."""
    node, kind = parts.there(ctx.state, placement.node)
    named = set(placement.gpu_uuids)
    slots = [slot for slot in node.gpus if slot.uuid in named and slot.gpu_type == kind]
    if len(slots) != len(placement.gpu_uuids) or len(slots) != gpus:
        return f"{node.name}: {len(placement.gpu_uuids)} GPUs named, {len(slots)} there, {gpus} due"
    for slot in slots:
        if slot.health != GpuHealth.OK or slot.nominee is not None:
            return f"GPU {slot.uuid} is {slot.health} or promised to {slot.nominee}"
        if slot.is_gone:
            return f"GPU {slot.uuid} is gone from {node.name}"
        if slot.uuid in node.out_uuids:
            return f"GPU {slot.uuid} is out after a fault"
        if slot.uuid in node.trespassed:
            return f"GPU {slot.uuid} is used by {process_named(node.trespassed[slot.uuid])}"
        if any(key.job_id == job.job_id for key in keys_of(slot)):
            return f"{job.job_id} has GPU {slot.uuid} already"
    return ""


# --- suspend and resume -----------------------------------------------------------------------


def suspend(ctx: Context, decision: Suspend) -> str:
    """Commit a suspension; returns why not, or an empty string."""
    job = ctx.job(decision.job_id)
    if job is None or job.state != JobState.RUNNING or job.after_vacating is not None:
        return f"{decision.job_id} does not run"
    put_aside(ctx, job, decision.reason)
    job.counts.suspensions += 1
    ctx.state.counters.suspensions += 1
    return ""


def put_aside(ctx: Context, job: JobEntry, reason: str) -> None:
    """A running job keeps its GPUs and computes no more."""
    estimates.settle_work(job, ctx.now_s)
    jobs_lifecycle.fire(ctx, job, JobEvent.SUSPEND, reason)
    job.suspension.since_s = ctx.now_s
    job.resizes.forget()
    job.attempt.is_packed = False
    ctx.state.suspended_jobs[job.job_id] = None
    _order_anew(ctx, job)


def resume(ctx: Context, decision: Resume) -> str:
    """Commit a resumption; returns why not, or an empty string."""
    job = ctx.job(decision.job_id)
    if job is None or job.state != JobState.SUSPENDED or job.after_vacating is not None:
        return f"{decision.job_id} is not suspended"
    for worker in job.workers.values():
        node = ctx.state.nodes[worker.node]
        why = why_not_beside(ctx, job, node, worker.gpu_uuids, is_packed=decision.is_packed)
        if why:
            return why
    estimates.settle_work(job, ctx.now_s)  # nothing was computed until now
    jobs_lifecycle.fire(ctx, job, JobEvent.RESUME, decision.reason)
    job.attempt.is_packed = decision.is_packed
    _order_anew(ctx, job)
    return ""


def resume_all(ctx: Context) -> None:
    """Resume suspended jobs where no other job computes: the present policy takes no turns."""
    for job_id in sorted(ctx.state.suspended_jobs):
        why = "the policy shares no GPUs, and no job computes on its GPUs"
        resume(ctx, Resume(job_id=job_id, reason=why))


def found_together(
    ctx: Context, node: NodeEntry, found: Container[JobId], aside: Container[JobId]
) -> None:
    """Workers found in a ledger compute on the same GPUs: the lost journal had packed them.

    An order states that a worker shares, not that it may be packed, nor which came first. So each
    worker found counts as packed.

    found: jobs whose workers the ledger had and the journal did not.
    aside: those among them that the ledger has as suspended. A job that another node still had as
        running, because it had not received the order, is suspended where another job computes.
    """
    for slot in node.gpus if node.name in ctx.state.shared_nodes else ():
        for job in computing_on(ctx, slot):
            is_aside = job.job_id in aside and job.state == JobState.RUNNING
            if is_aside and len(computing_on(ctx, slot)) > 1:
                put_aside(ctx, job, f"it had been suspended on {node.name}")
        packed = computing_on(ctx, slot)
        for job in packed if len(packed) > 1 else ():
            if job.job_id in found and not job.attempt.is_packed:
                job.attempt.is_packed = True
                ctx.changed_jobs[job.job_id] = None


def _order_anew(ctx: Context, job: JobEntry) -> None:
    for worker in job.workers.values():
        ctx.touch(worker.node)
    ctx.changed_jobs[job.job_id] = None


# --- what follows of an event -----------------------------------------------------------------


def settle(ctx: Context) -> None:
    """After an event: which jobs are no longer suspended, and by how many workers each GPU is now
    shared.

    Work up to now was done at the shares of before, so it is counted before they change.
    """
    for job_id in [one for one in ctx.changed_jobs if one in ctx.state.suspended_jobs]:
        job = ctx.job(job_id)
        if job is None or job.state != JobState.SUSPENDED:
            del ctx.state.suspended_jobs[job_id]
            if job is not None:
                _count_pause(ctx, job)
    if not ctx.state.shared_nodes:
        return
    # The handler that lets a worker compute, or stops it, orders its node again or releases its
    # GPUs.
    touched: dict[JobId, JobEntry] = {}
    for name in sorted({**ctx.dirty_nodes, **ctx.changed_nodes}):
        if name in ctx.state.shared_nodes:
            _share_anew(ctx, name, touched)
    for _, shared in sorted(touched.items()):
        _slow_down(ctx, shared)


def _count_pause(ctx: Context, job: JobEntry) -> None:
    """It goes on, or its attempt is over: the time that it was suspended is known."""
    job.suspension.total_s += ctx.now_s - (job.suspension.since_s or ctx.now_s)
    job.suspension.since_s = None


def _share_anew(ctx: Context, name: NodeName, touched: dict[JobId, JobEntry]) -> None:
    """The share of each worker on a node: 1 over the number of workers that compute on its GPUs."""
    node = ctx.state.nodes.get(name)
    if node is None or not any(slot.guests for slot in node.gpus):
        # a worker that is alone there gets its new share below, once
        del ctx.state.shared_nodes[name]
    if node is None:
        return
    parts: dict[WorkerKey, list[float]] = {}
    for slot in node.gpus:
        part = 1.0 / max(1, len(computing_on(ctx, slot)))
        for key in keys_of(slot):
            parts.setdefault(key, []).append(part)
    for key, found in parts.items():
        pair = _find(ctx, key)
        if pair is None:
            continue
        job, worker = pair
        touched[job.job_id] = job
        if worker.stop is not None:
            continue  # during its grace it computes at its earlier share
        share = sum(found) / len(found)
        if share != worker.share:
            estimates.settle_work(job, ctx.now_s)
            worker.share = share
            ctx.changed_jobs[job.job_id] = None


def _slow_down(ctx: Context, job: JobEntry) -> None:
    """A gang is as slow as its slowest worker."""
    ratio = min((_packed_ratio(ctx, job, worker) for worker in job.workers.values()), default=1.0)
    if ratio != job.attempt.packed_speed_ratio:
        estimates.settle_work(job, ctx.now_s)
        job.attempt.packed_speed_ratio = ratio
        ctx.changed_jobs[job.job_id] = None


def _packed_ratio(ctx: Context, job: JobEntry, worker: WorkerEntry) -> float:
    if worker.share == 1.0 or worker.order != OrderPhase.RUN:
        return 1.0
    uuids = set(worker.gpu_uuids)
    ratio = 1.0
    for slot in ctx.state.nodes[worker.node].gpus:
        if slot.uuid in uuids and slot.guests:
            others: list[JobProfile] = [
                other.spec.profile for other in computing_on(ctx, slot) if other is not job
            ]
            ratio = min(ratio, packed_speed_ratio(job.spec.profile, others))
    return ratio
