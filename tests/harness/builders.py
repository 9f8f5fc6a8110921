"""Specs, views and snapshots with defaults for all that a test does not care about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import structs

from common.model import (
    GpuRequest,
    JobId,
    JobSpec,
    JobState,
    Mode,
    NodeName,
    NodeRole,
    Pool,
    Preemptibility,
    ServiceName,
    WorkerRange,
)
from coordinator.policies.contract import job_groups
from coordinator.policies.contract.job_groups import EstimateView
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    LoadSample,
    NodeView,
    ServiceView,
    WorkerView,
)

NOW_S = 100_000.0
SERVICE = ServiceName("chat")


def make_spec(
    name: str = "j",
    *,
    command: tuple[str, ...] = ("train",),
    workers: tuple[int, int] = (1, 1),
    **fields: Any,
) -> JobSpec:
    """What a user submits: one command, by default on one worker of one GPU.

    fields: of `JobSpec`, as they are.
    """
    least, most = workers
    return JobSpec(name=name, command=command, workers=WorkerRange(min=least, max=most), **fields)


def make_worker_view(
    job: str,
    index: int,
    node: str,
    *,
    gpus: int = 1,
    is_flexible: bool = False,
    is_leaving: bool = False,
    barred_gpus: int = 0,
) -> WorkerView:
    """One worker; of its GPUs so many come free for nobody."""
    return WorkerView(
        job_id=JobId(job),
        worker_index=index,
        node=NodeName(node),
        gpus=gpus,
        freed_gpus=gpus - barred_gpus,
        is_flexible=is_flexible,
        is_leaving=is_leaving,
    )


def make_node_view(
    name: str,
    *,
    role: NodeRole = NodeRole.TRAINING,
    gpu_type: str = "H100",
    gpus: int = 8,
    workers: Iterable[WorkerView] = (),
    free_gpus: int | None = None,
    is_reclaimed: bool = False,
    is_drained_by_operator: bool = False,
    serving_since_s: float | None = 0.0,
    service: str | None = None,
    barred_gpus: int = 0,
) -> NodeView:
    """One node; free GPUs are what its staying workers leave over.

    barred_gpus: that come free for nobody and that no worker has; with those of its workers, on all
    of them sits a process that nobody was granted.
    """
    workers = tuple(workers)
    if free_gpus is None:
        free_gpus = gpus - barred_gpus
        for worker in workers:
            free_gpus -= worker.gpus - worker.freed_gpus if worker.is_leaving else worker.gpus
    barred_gpus += sum(worker.gpus - worker.freed_gpus for worker in workers)
    at_home = role == NodeRole.TRAINING
    takes_workers = at_home or (role == NodeRole.ON_LOAN and not is_reclaimed)
    return NodeView(
        name=NodeName(name),
        home_pool=Pool.TRAINING if at_home else Pool.INFERENCE,
        role=role,
        gpu_type=gpu_type,
        gpus=gpus,
        free_gpus=free_gpus,
        is_schedulable=takes_workers and not is_drained_by_operator,
        service=None if at_home else ServiceName(service or SERVICE),
        is_reclaimed=is_reclaimed,
        is_drained_by_operator=is_drained_by_operator,
        serving_since_s=serving_since_s if role == NodeRole.SERVING else None,
        workers=workers,
        trespassed_gpus=barred_gpus,
        barred_gpus=barred_gpus,
    )


def make_job_view(
    job_id: str,
    *,
    state: JobState = JobState.PENDING,
    workers: tuple[int, int] = (1, 1),
    gpus_per_worker: int = 1,
    types: tuple[str, ...] = (),
    multiplier: Mapping[str, int] | None = None,
    remaining_work_s: float = 3600.0,
    submitted_at_s: float = 0.0,
    priority: int = 0,
    preemptibility: Preemptibility = Preemptibility.FULL,
    grace_s: float = 30.0,
    gpu_type: str | None = None,
    placed: Iterable[WorkerView] = (),
    is_resizable: bool | None = None,
    **fields: Any,
) -> JobView:
    """One job; a running elastic one can be resized.

    fields: others, of the view or of its groups; see `job_with`.
    """
    if is_resizable is None:
        is_resizable = state == JobState.RUNNING and workers[1] > workers[0]
    if gpu_type is None and state != JobState.PENDING:
        gpu_type = "H100"
    made = JobView(
        job_id=JobId(job_id),
        state=state,
        submitted_at_s=submitted_at_s,
        workers=WorkerRange(min=workers[0], max=workers[1]),
        gpus_per_worker=gpus_per_worker,
        gpu=GpuRequest(types=types, worker_multiplier=dict(multiplier or {})),
        priority=priority,
        preemptibility=preemptibility,
        estimate=EstimateView(remaining_work_s=remaining_work_s, source="declared"),
        grace_s=grace_s,
        gpu_type=gpu_type,
        placed=tuple(placed),
        is_resizable=is_resizable,
    )
    return job_with(made, **fields) if fields else made


def _group_fields() -> dict[str, tuple[str, str]]:
    """The fields of the groups of a job by the names that `job_with` takes, without `Behind`."""
    own = {each.name: each for each in structs.fields(JobView)}
    kinds = {name: type(each.default) for name, each in own.items()} | {"estimate": EstimateView}
    found = [
        (group, each.name)
        for group, kind in kinds.items()
        if kind.__module__ == job_groups.__name__
        for each in structs.fields(kind)
    ]
    counts = Counter(name for _, name in found)
    alone = {n: (group, n) for group, n in found if counts[n] == 1 and n not in own}
    return alone | {f"{group}_{name}": (group, name) for group, name in found}


_GROUP_FIELDS = _group_fields()


def job_with(job: JobView, **fields: Any) -> JobView:
    """The same job with other values of some fields.

    fields: of the view, or of one of its groups: `attempt_number` is `attempt.number`. A name that
        only one group has stands alone: `started_at_s` is `attempt.started_at_s`.
    """
    changes: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        if name in _GROUP_FIELDS:
            group, inner = _GROUP_FIELDS[name]
            groups.setdefault(group, {})[inner] = value
        else:
            changes[name] = value
    for group, inside in groups.items():
        changes[group] = structs.replace(changes.get(group, getattr(job, group)), **inside)
    return structs.replace(job, **changes)


def make_service_view(
    name: str = SERVICE,
    *,
    mode: Mode = Mode.ACT,
    capacity_per_node: float = 10.0,
    min_serving: int = 1,
    headroom_ratio: float = 0.0,
    reclaim_deadline_s: float = 300.0,
    return_s: float = 120.0,
    max_grace_s: float = 60.0,
    hold_off_s: float = 600.0,
    loan_period_s: float = 300.0,
    load: Iterable[LoadSample] | float = (),
    is_recalled: bool = False,
) -> ServiceView:
    """One service; a number as load is a single sample taken now."""
    samples = (LoadSample(NOW_S, load),) if isinstance(load, float | int) else tuple(load)
    return ServiceView(
        name=ServiceName(name),
        mode=mode,
        capacity_per_node=capacity_per_node,
        min_serving=min_serving,
        headroom_ratio=headroom_ratio,
        reclaim_deadline_s=reclaim_deadline_s,
        return_s=return_s,
        max_grace_s=max_grace_s,
        hold_off_s=hold_off_s,
        loan_period_s=loan_period_s,
        load=samples,
        is_recalled=is_recalled,
    )


def make_snapshot(
    *,
    nodes: Iterable[NodeView] = (),
    jobs: Iterable[JobView] = (),
    services: Iterable[ServiceView] = (),
    now_s: float = NOW_S,
    is_frozen: bool = False,
    resize_cooldown_s: float = 0.0,
) -> ClusterSnapshot:
    """A snapshot, sorted as the engine sorts it."""
    return ClusterSnapshot(
        now_s=now_s,
        nodes=tuple(sorted(nodes, key=lambda node: node.name)),
        jobs=tuple(sorted(jobs, key=lambda job: job.job_id)),
        services=tuple(sorted(services, key=lambda service: service.name)),
        is_frozen=is_frozen,
        resize_cooldown_s=resize_cooldown_s,
    )


def make_cluster(
    held: Mapping[str, Mapping[str, int]],
    *,
    role: NodeRole = NodeRole.ON_LOAN,
    flexible: Mapping[str, Mapping[str, int]] | None = None,
    gpus: int = 8,
) -> tuple[list[NodeView], list[JobView]]:
    """Nodes and running jobs from "GPUs per job, per node"; one worker per job, node and kind."""
    flexible = flexible or {}
    placed: dict[str, list[WorkerView]] = {}
    nodes: list[NodeView] = []
    for name in sorted({*held, *flexible}):
        here: list[WorkerView] = []
        for is_flexible, kind in ((False, held), (True, flexible)):
            for job, count in sorted(kind.get(name, {}).items()):
                mine = placed.setdefault(job, [])
                worker = make_worker_view(job, len(mine), name, gpus=count, is_flexible=is_flexible)
                mine.append(worker)
                here.append(worker)
        nodes.append(make_node_view(name, role=role, gpus=gpus, workers=here))
    jobs = [
        make_job_view(
            job,
            state=JobState.RUNNING,
            workers=(max(1, sum(not worker.is_flexible for worker in mine)), len(mine) + 1),
            gpus_per_worker=mine[0].gpus,
            placed=mine,
        )
        for job, mine in sorted(placed.items())
    ]
    return nodes, jobs
