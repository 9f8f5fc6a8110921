"""Infeasible jobs of a workload, found before the run begins.

A job is infeasible if an empty cluster has no room for it, if no loan will ever hold it, or if the
limits of its tenant never allow it. Under every policy it would wait for ever, and the run would be
useless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.errors import ConfigError
from common.model import JobId, JobSpec, NodeRole, Pool, ServiceName
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    NodeView,
    ServiceView,
    TenantView,
)
from coordinator.policies.contract.text import counted
from coordinator.policies.tenants.infeasible import Fleet, wish_of
from coordinator.policies.tenants.tenancy import Tenancy
from coordinator.policies.tenants.tree import NOBODY
from coordinator.sim.run.cluster import NodeSpec
from coordinator.workloads.records import Source, WorkloadJob


def check_fits(
    jobs: Sequence[WorkloadJob],
    names: Mapping[JobId, str],
    specs: Sequence[NodeSpec],
    source: Source,
) -> None:
    """Look at each job in the cluster.

    Args:
        names: of the trace, by id.

    Raises:
        ConfigError: a job whose base gang would not fit the empty cluster.
    """
    counts: dict[tuple[str, int], int] = {}
    for spec in specs:
        counts[spec.gpu_type, spec.gpus] = counts.get((spec.gpu_type, spec.gpus), 0) + 1
    kinds = sorted({kind for kind, _ in counts})
    for job in jobs:
        accepted = [kind for kind in kinds if job.spec.accepts(kind)]
        if any(
            _places(job.spec, kind, counts) >= job.spec.workers_on(kind).min for kind in accepted
        ):
            continue
        asked = _asked(job.spec, accepted)
        name = names[job.job_id]
        place = source.place(name, is_of_type=not accepted)
        raise ConfigError(
            f"{place}job {name}: {asked} can never fit this cluster, which has "
            + ", ".join(
                f"{counted(counts[kind, gpus], 'node')} of {gpus} {kind}"
                for kind, gpus in sorted(counts)
            )
        )


def _asked(spec: JobSpec, accepted: Sequence[str]) -> str:
    """The base gang in words, on each GPU type where it is not as many workers on all of them.

    accepted: those of the cluster's types that the job accepts.
    """
    size, fewest = spec.gpus_per_worker, {kind: spec.workers_on(kind).min for kind in accepted}
    of = " or ".join(spec.gpu.types) or "any type"
    if set(fewest.values()) <= {spec.workers.min}:
        return f"{counted(spec.workers.min, 'worker')} of {counted(size, 'GPU')} ({of})"
    each = " or ".join(f"{fewest[kind]} on {kind}" for kind in accepted)
    return f"workers of {counted(size, 'GPU')}, {each} ({of})"


def _places(spec: JobSpec, gpu_type: str, counts: Mapping[tuple[str, int], int]) -> int:
    """Workers of an attempt on a GPU type that the empty cluster has room for."""
    found = 0
    for (kind, gpus), count in counts.items():
        each = spec.gpu.gpus_for_one(kind, gpu_type)
        if each is not None:
            found += count * (gpus // (each * spec.gpus_per_worker))
    return found


def check_loans(
    jobs: Sequence[WorkloadJob],
    names: Mapping[JobId, str],
    specs: Sequence[NodeSpec],
    source: Source,
    settings: EngineSettings,
) -> None:
    """Check each job in the empty cluster with the most nodes lent at one time.

    A service keeps some of its nodes whatever its load is, and lends none to a job with a longer
    grace than it allows.

    Args:
        names: of the trace, by id.
        settings: where there are no services, nothing is lent and no job is checked.

    Raises:
        ConfigError: a job whose base gang would need more.
    """
    if not settings.services:
        return
    nodes = tuple(_idle_node(spec) for spec in sorted(specs, key=lambda spec: spec.name))
    services = tuple(_idle_service(settings, service) for service in settings.services)
    fleet = Fleet(ClusterSnapshot(now_s=0.0, nodes=nodes, jobs=(), services=services))
    for job in jobs:
        if why := fleet.why_never(wish_of(job.spec)):
            name = names[job.job_id]
            raise ConfigError(f"{source.place(name)}job {name}: {'; '.join(why)}")


def _idle_node(spec: NodeSpec) -> NodeView:
    is_home = spec.home_pool == Pool.TRAINING
    return NodeView(
        name=spec.name,
        home_pool=spec.home_pool,
        role=NodeRole.TRAINING if is_home else NodeRole.SERVING,
        gpu_type=spec.gpu_type,
        gpus=spec.gpus,
        free_gpus=spec.gpus,
        is_schedulable=is_home,
        service=spec.service,
    )


def _idle_service(settings: EngineSettings, service: ServiceSettings) -> ServiceView:
    return ServiceView(
        name=ServiceName(service.name),
        mode=service.mode,
        capacity_per_node=service.capacity_per_node,
        min_serving=service.min_serving,
        headroom_ratio=service.headroom_ratio,
        reclaim_deadline_s=service.reclaim_deadline_s,
        return_s=settings.return_s(service),
        max_grace_s=service.max_grace_s,
        hold_off_s=service.hold_off_s,
        loan_period_s=settings.loan_period_s,
    )


def check_limits(
    jobs: Sequence[WorkloadJob],
    names: Mapping[JobId, str],
    specs: Sequence[NodeSpec],
    source: Source,
    tenants: Sequence[TenantView],
    *,
    lends: bool,
) -> None:
    """Check each job with all other tenants idle.

    Args:
        names: of the trace, by id.
        tenants: those with settings; without any there are no limits.
        lends: whether inference nodes may ever be lent; else their GPUs are no room.

    Raises:
        ConfigError: a job whose base gang is more than its tenant may ever use.
    """
    if not tenants:
        return
    nothing = ClusterSnapshot(now_s=0.0, nodes=(), jobs=(), tenants=tuple(tenants))
    nobody = Tenancy(nothing, (job.tenant or NOBODY for job in jobs))
    ever = (spec for spec in specs if lends or spec.home_pool == Pool.TRAINING)
    idle = nobody.idle(sum(spec.gpus for spec in ever))
    kinds = {spec.gpu_type for spec in specs}
    for job in jobs:
        accepted = [kind for kind in kinds if job.spec.accepts(kind)]
        fewest = min(job.spec.workers_on(kind).min for kind in accepted)
        why = idle.why_never(job.tenant, fewest * job.spec.gpus_per_worker)
        if why:
            name = names[job.job_id]
            raise ConfigError(f"{source.place(name)}job {name}: {why}")
