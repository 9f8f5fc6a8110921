"""What must hold of the state after every event, as sentences. Must not repair anything."""

from __future__ import annotations

from math import isclose

from msgspec import structs

from common.messages import OrderPhase
from common.model import FINAL_JOB_STATES, JobState
from coordinator.engine.accounting import GpuTally
from coordinator.engine.state import ClusterState
from coordinator.policies.index import index_of
from coordinator.policies.snapshot import ClusterSnapshot, JobView

TOLERANCE = 1e-6


def gpu_faults(state: ClusterState) -> list[str]:
    """Every GPU is claimed by exactly the workers that hold it or were promised it."""
    faults: list[str] = []
    claims: dict[str, list[str]] = {}
    for job in state.jobs.values():
        for worker in job.workers.values():
            for uuid in worker.gpu_uuids:
                claims.setdefault(uuid, []).append(str(worker.key))
    for node in state.nodes.values():
        for slot in node.gpus:
            holders = sorted(str(k) for k in (slot.holder, slot.nominee) if k is not None)
            if sorted(claims.get(slot.uuid, [])) != holders:
                faults.append(f"GPU {slot.uuid}: {claims.get(slot.uuid)} claim, {holders} hold it")
    return faults


def job_faults(state: ClusterState) -> list[str]:
    """Ended and waiting jobs hold nothing, and nobody runs before its gang is ready."""
    faults: list[str] = []
    for job in state.jobs.values():
        if job.state in FINAL_JOB_STATES and job.workers:
            faults.append(f"job {job.job_id} is {job.state} and holds workers")
        if job.state == JobState.PENDING and job.workers:
            faults.append(f"job {job.job_id} waits and holds workers")
        if job.state == JobState.STARTING and any(
            w.order == OrderPhase.RUN for w in job.workers.values()
        ):
            faults.append(f"job {job.job_id}: a worker runs before its gang is ready")
    return faults


def store_faults(state: ClusterState) -> list[str]:
    """A rendezvous store is there only beside a live attempt, on the node that was ordered it."""
    faults: list[str] = []
    ordered = {key: name for name, node in state.nodes.items() for key in node.stores}
    for job in state.jobs.values():
        if job.store is None:
            continue
        if job.state in FINAL_JOB_STATES or job.state == JobState.PENDING:
            faults.append(f"job {job.job_id} is {job.state} and has a rendezvous store")
        if ordered.pop(job.store.key, None) != job.store.node or job.store.gpu_uuids:
            faults.append(f"job {job.job_id}: its store is not on {job.store.node}, without GPUs")
    faults += [f"{name} is ordered {key}, which no job has" for key, name in ordered.items()]
    return faults


def tally_faults(kept: GpuTally, fresh: GpuTally) -> list[str]:
    """GPUs are counted as they would be if they were counted anew now."""
    if kept.counts != fresh.counts:
        return [f"stale tally of GPUs: {kept.counts}, now {fresh.counts}"]
    return []


def view_faults(kept: ClusterSnapshot, fresh: ClusterSnapshot) -> list[str]:
    """Views that snapshots share are what they would be if they were made anew now."""
    if len(kept.nodes) != len(fresh.nodes) or len(kept.jobs) != len(fresh.jobs):
        return ["a view is missing, or one too many is kept"]
    faults = [
        f"stale view of {old.name}: {old}, now {new}"
        for old, new in zip(kept.nodes, fresh.nodes, strict=True)
        if old != new
    ]
    faults += [
        f"stale view of {old.job_id}: {old}, now {new}"
        for old, new in zip(kept.jobs, fresh.jobs, strict=True)
        if not _is_alike(old, new, fresh.now_s)
    ]
    if kept.index != index_of(kept.nodes, kept.jobs):
        faults.append("the index is not that of the snapshot")
    return faults


def _is_alike(old: JobView, new: JobView, now_s: float) -> bool:
    """Whether two views of different instants say the same of now."""
    same_instant = structs.replace(
        new,
        as_of_s=old.as_of_s,
        remaining_work_s=old.remaining_work_s,
        lost_if_preempted_gpu_s=old.lost_if_preempted_gpu_s,
    )
    return (
        same_instant == old
        and isclose(old.work_left_s(now_s), new.work_left_s(now_s), abs_tol=TOLERANCE)
        and isclose(old.lost_gpu_s(now_s), new.lost_gpu_s(now_s), abs_tol=TOLERANCE)
    )
