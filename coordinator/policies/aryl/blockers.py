"""Reasons why a waiting job does not start: every blocker, as a sentence. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from common.model import JobId, NodeRole, Preemptibility, ServiceName
from coordinator.policies.aryl.gpu_types import types_in_order
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.decisions import PendingReason
from coordinator.policies.contract.index import shape
from coordinator.policies.contract.node_names import set_of
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobShape, JobView, NodeView
from coordinator.policies.contract.text import counted
from coordinator.policies.tenants.infeasible import NO_NODES, Fleet, Hosts, absent, wish_of


def holds(
    snapshot: ClusterSnapshot,
    room: PlacementState,
    held: Iterable[JobView],
    *,
    strict: Hosts | None = None,
) -> list[PendingReason]:
    """One pending reason for each held job; jobs of one shape share the computation.

    strict: the first job that waits for a GPU type which could host it blocks the others that want
        that type; None: it blocks none.
    """
    seen: dict[tuple[JobShape, int], tuple[str, ...]] = {}
    heads: dict[str, JobId] = {}
    found: list[PendingReason] = []
    fleet = Fleet(snapshot)
    for job in held:
        wanted = types_in_order(room, job)
        if strict and wanted and all(gpu_type in heads for gpu_type in wanted):
            ahead = sorted({heads[gpu_type] for gpu_type in wanted})
            does = "does" if len(ahead) == 1 else "do"
            blockers: tuple[str, ...] = (
                f"behind {', '.join(ahead)}, which {does} not fit (the order is strict)",
            )
        else:
            key = (shape(job), room.barred(job))
            if key not in seen:
                seen[key] = blockers_of(snapshot, room, job, fleet)
            blockers = (*seen[key], *(why for bar in room.bars if (why := bar.why(job))))
            for gpu_type in strict(job, wanted) if strict else ():
                heads.setdefault(gpu_type, job.job_id)
        found.append(PendingReason(job_id=job.job_id, blockers=blockers))
    return found


def beyond_the_policy(
    snapshot: ClusterSnapshot, found: Iterable[PendingReason]
) -> tuple[PendingReason, ...]:
    """Add the reasons that no policy decides.

    An infeasible job gets that reason alone, whatever a policy reports of it. A job that would not
    fit even on empty open nodes also gets the nodes that are not open: not lent, cordoned, or
    closed.
    """
    fleet, jobs = Fleet(snapshot), {job.job_id: job for job in snapshot.jobs}
    said: list[PendingReason] = []
    for hold in found:
        job = jobs[hold.job_id]
        if hold.blockers and (never := fleet.why_never(wish_of(job), job.tenant)):
            said.append(PendingReason(job_id=hold.job_id, blockers=never))
        elif hold.blockers:
            said.append(
                PendingReason(
                    job_id=hold.job_id, blockers=(*hold.blockers, *_all_shut(snapshot, job))
                )
            )
        else:
            said.append(hold)
    return tuple(said)


def _all_shut(snapshot: ClusterSnapshot, job: JobView) -> list[str]:
    """Nodes that are not open, where a job's gang would fit on none of its types without them."""
    types = dict.fromkeys(job.gpu.types or sorted({node.gpu_type for node in snapshot.nodes}))
    size, avoided, found = job.gpus_per_worker, job.nodes.avoided, list[str]()
    for gpu_type in types:
        nodes = [node for node in snapshot.nodes if node.gpu_type == gpu_type]
        open_ = (node for node in nodes if node.is_schedulable and node.name not in avoided)
        if sum(node.gpus // size for node in open_) >= job.workers_on(gpu_type).min:
            return []
        found += _shut(job, nodes, gpu_type)
    return found


def blockers_of(
    snapshot: ClusterSnapshot, room: PlacementState, job: JobView, fleet: Fleet | None = None
) -> tuple[str, ...]:
    """All that stands between a job and its start, type by type."""
    found: list[str] = []
    present = {node.gpu_type for node in snapshot.nodes}
    wanted = types_in_order(room, job)
    wanted += sorted(present - set(wanted)) if not job.gpu.types else []
    if not wanted:
        return (NO_NODES,)
    fleet = Fleet(snapshot) if fleet is None else fleet
    for gpu_type in wanted:
        if gpu_type in present:
            found += _of_type(snapshot, room, job, gpu_type, fleet)
        else:
            found.append(absent(gpu_type))
    return (*found, *_excluded_services(snapshot, room, job, wanted))


def _of_type(
    snapshot: ClusterSnapshot, room: PlacementState, job: JobView, gpu_type: str, fleet: Fleet
) -> list[str]:
    nodes = [node for node in snapshot.nodes if node.gpu_type == gpu_type]
    size, count = job.gpus_per_worker, job.workers_on(gpu_type).min
    available = {
        name: room.available(name) for name in room.hosts(job, gpu_type, is_flexible=False)
    }
    open_count = sum(1 for gpus in available.values() if gpus)
    held = sum(available.values()) - sum(room.free[name] for name in available)
    from_flexible = f" and {held} held by flexible workers that can be released," if held else ""
    slots = sum(gpus // size for gpus in available.values())
    found = [
        f"needs {counted(count * size, 'GPU')} of type {gpu_type}, "
        f"{counted(count, 'worker')} of {size}; "
        f"{sum(available.values()) - held} free{from_flexible} on {counted(open_count, 'node')}, "
        f"room for {counted(min(slots, count), 'worker')}"
    ]
    if never := fleet.of_type(wish_of(job), gpu_type):
        found.append(never)
    found += fleet.why_absent(wish_of(job), [gpu_type])
    return found + _shut(job, nodes, gpu_type) + _unusable(nodes)


def _shut(job: JobView, nodes: list[NodeView], gpu_type: str) -> list[str]:
    """Nodes of a type that are closed to a job now, whatever runs on them."""
    found: list[str] = []
    barred = set_of(job.nodes.excluded)
    open_to = [node for node in nodes if node.name not in barred]
    if excluded := len(nodes) - len(open_to):
        does = "does" if excluded == 1 else "do"
        found.append(
            f"{counted(excluded, 'node')} of type {gpu_type} {does} not fit what it asks of nodes"
        )
    nodes = open_to
    cordoned = sum(1 for node in nodes if node.is_drained_by_operator)
    if cordoned:
        found.append(f"{counted(cordoned, 'node')} of type {gpu_type} cordoned")
    # Of one that closes, the engine says why.
    avoided = [n.name for n in nodes if n.name in job.nodes.avoided and n.closes_at_s is None]
    if avoided:
        found.append(f"{', '.join(avoided)} left alone for now: an attempt of it failed there")
    serving = sum(1 for node in nodes if node.service and node.role != NodeRole.ON_LOAN)
    if serving:
        found.append(f"{counted(serving, 'node')} of type {gpu_type} not lent to training")
    silent = sum(
        1
        for node in nodes
        if not node.is_schedulable
        and not node.is_drained_by_operator
        and node.role not in (NodeRole.SERVING, NodeRole.DRAINING)
        and not (node.service and node.role != NodeRole.ON_LOAN)
    )
    if silent:
        found.append(f"{counted(silent, 'node')} of type {gpu_type} closed to workers now")
    return found


def _unusable(nodes: list[NodeView]) -> list[str]:
    """GPUs that look free on open nodes and are not available to any job."""
    open_nodes = [node for node in nodes if node.is_schedulable]
    sick = [(node, node.sick_gpus) for node in open_nodes if node.sick_gpus]
    taken = [(node, node.trespassed_gpus) for node in open_nodes if node.trespassed_gpus]
    return [
        f"{counted(sum(gpus for _, gpus in which), 'GPU')} {how}: "
        f"{', '.join(f'{gpus} on {node.name}' for node, gpus in which)}"
        for which, how in (
            (sick, "not well"),
            (taken, "used by foreign processes"),
        )
        if which
    ]


def _excluded_services(
    snapshot: ClusterSnapshot, room: PlacementState, job: JobView, wanted: list[str]
) -> list[str]:
    """Services whose nodes the job may not use, lent or not: none is lent for its sake either."""
    services = sorted(
        {node.service for node in snapshot.nodes if node.service and node.gpu_type in wanted}
    )
    return [why for name in services if (why := _excluded(room, job, name))]


def _excluded(room: PlacementState, job: JobView, service: ServiceName) -> str:
    if job.preemptibility == Preemptibility.NON:
        return f"service {service}: preemptibility non excludes the job from nodes that it lends"
    if job.preemptibility == Preemptibility.SEMI:
        return (
            f"service {service}: preemptibility semi excludes the base gang from nodes that it "
            "lends"
        )
    if service not in room.services:
        return f"service {service}: this cell has no settings of it, so its nodes are not lent"
    most_s = room.max_grace_s(service)
    if job.grace_s > most_s:
        return (
            f"service {service}: the job's grace {job.grace_s:g} s exceeds the {most_s:g} s that "
            f"{service} allows, so {service}'s nodes are not lent to it"
        )
    return ""
