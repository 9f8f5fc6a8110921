"""Why a waiting job does not start: every blocker, in sentences. Must not change anything."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from common.model import JobId, NodeRole, Preemptibility
from coordinator.policies.index import shape
from coordinator.policies.placement import Room, types_in_order
from coordinator.policies.snapshot import ClusterSnapshot, JobShape, JobView


class Hold(Struct, frozen=True, kw_only=True):
    """Why a waiting job does not start now: every blocker, not the first."""

    job_id: JobId
    blockers: tuple[str, ...]


def holds(
    snapshot: ClusterSnapshot, room: Room, held: Iterable[JobView], *, is_strict: bool = False
) -> list[Hold]:
    """One for each held job; jobs of one shape share the work of looking.

    is_strict: the first blocks the others, whatever they need.
    """
    seen: dict[JobShape, tuple[str, ...]] = {}
    head: JobView | None = None
    found: list[Hold] = []
    for job in held:
        if is_strict and head is not None:
            blockers: tuple[str, ...] = (
                f"behind {head.job_id}, which does not fit (the order is strict)",
            )
        else:
            key = shape(job)
            if key not in seen:
                seen[key] = blockers_of(snapshot, room, job)
            blockers = seen[key]
        head = head or job
        found.append(Hold(job_id=job.job_id, blockers=blockers))
    return found


def blockers_of(snapshot: ClusterSnapshot, room: Room, job: JobView) -> tuple[str, ...]:
    """All that stands between a job and its start, type by type."""
    found: list[str] = []
    present = {node.gpu_type for node in snapshot.nodes}
    wanted = types_in_order(room, job)
    wanted += sorted(present - set(wanted)) if not job.gpu.types else []
    if not wanted:
        return ("no nodes are known",)
    for gpu_type in wanted:
        if gpu_type in present:
            found += _of_type(snapshot, room, job, gpu_type)
        else:
            found.append(f"GPU type {gpu_type} not present")
    return (*found, *_excluded_loans(room, job, wanted))


def _of_type(snapshot: ClusterSnapshot, room: Room, job: JobView, gpu_type: str) -> list[str]:
    nodes = [node for node in snapshot.nodes if node.gpu_type == gpu_type]
    size, count = job.gpus_per_worker, job.workers_on(gpu_type).min
    available = {
        name: room.available(name) for name in room.hosts(job, gpu_type, is_flexible=False)
    }
    open_count = sum(1 for gpus in available.values() if gpus)
    slots = sum(gpus // size for gpus in available.values())
    found = [
        f"needs {count * size} GPUs of type {gpu_type}, {count} workers of {size}; "
        f"{sum(available.values())} free on {open_count} nodes, "
        f"room for {min(slots, count)} workers"
    ]
    largest = max(node.gpus for node in nodes)
    if largest < size:
        found.append(f"no node of type {gpu_type} has {size} GPUs; the largest has {largest}")
    cordoned = sum(1 for node in nodes if node.is_drained_by_operator)
    if cordoned:
        found.append(f"{cordoned} nodes of type {gpu_type} cordoned")
    serving = sum(1 for node in nodes if node.service and node.role != NodeRole.ON_LOAN)
    if serving:
        found.append(f"{serving} nodes of type {gpu_type} not lent to training")
    silent = sum(
        1
        for node in nodes
        if not node.is_schedulable
        and not node.is_drained_by_operator
        and node.role not in (NodeRole.SERVING, NodeRole.DRAINING)
        and not (node.service and node.role != NodeRole.ON_LOAN)
    )
    if silent:
        found.append(f"{silent} nodes of type {gpu_type} take no workers now")
    return found


def _excluded_loans(room: Room, job: JobView, wanted: list[str]) -> list[str]:
    lent = [
        node
        for node in room.nodes.values()
        if node.role == NodeRole.ON_LOAN and node.gpu_type in wanted
    ]
    if not lent:
        return []
    if job.preemptibility == Preemptibility.NON:
        return ["preemptibility non: lent nodes excluded"]
    if job.preemptibility == Preemptibility.SEMI:
        return ["preemptibility semi: lent nodes excluded for its base gang"]
    services = sorted({node.service for node in lent if node.service is not None})
    return [
        f"on-loan nodes of {name} excluded: its grace {job.grace_s:g} s exceeds "
        f"{room.max_grace_s(name):g} s"
        for name in services
        if job.grace_s > room.max_grace_s(name)
    ]
