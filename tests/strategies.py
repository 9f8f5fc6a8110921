"""Snapshots of generated clusters: consistent ones only, as the engine would take them.

On some nodes, some GPUs come free for nobody: they are not well, or a stranger computes on them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobState, Mode, NodeRole, Preemptibility
from coordinator.policies.aryl.knapsack import Group
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    LoadSample,
    NodeView,
    ServiceView,
    WorkerView,
)
from tests.draws import pick, together, whole
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)

GPU_TYPES = ("H100", "H100", "A100")  # one is common, so that jobs compete
KINDS = (Preemptibility.FULL, Preemptibility.FULL, Preemptibility.SEMI, Preemptibility.NON)
SERVICES = ("chat", "search")
ROLES = (
    NodeRole.TRAINING,
    NodeRole.TRAINING,
    NodeRole.ON_LOAN,
    NodeRole.ON_LOAN,
    NodeRole.SERVING,
    NodeRole.SERVING,
    NodeRole.DRAINING,
    NodeRole.WARMING,
)
TAKING = (NodeRole.TRAINING, NodeRole.ON_LOAN)


@st.composite
def groups(draw: st.DrawFn, *, is_moving: bool = False) -> Group:
    """One elastic job as the knapsack sees it; whole numbers keep sums exact enough to compare."""
    extra_max = draw(whole(1, 4))
    return Group(
        work_s=float(draw(whole(0, 2000))),
        base_workers=draw(whole(1, 4)),
        extra_max=extra_max,
        gpus_per_worker=draw(pick(1, 2, 4)),
        current=draw(whole(0, extra_max)) if is_moving else 0,
        change_cost_s=5.0 if is_moving else 0.0,
    )


@st.composite
def rated_groups(draw: st.DrawFn, *, is_moving: bool = False) -> Group:
    """One with measured rates, which rise and fall as they please."""
    group = draw(groups(is_moving=is_moving))
    rate = st.integers(1, 12).map(lambda tenths: tenths / 2)
    count = group.extra_max + 1
    rates = tuple(draw(st.lists(rate, min_size=count, max_size=count)))
    return replace(group, rates=rates)


class _Shell:
    """A node while workers are put on it."""

    def __init__(self, name: str, role: NodeRole, gpu_type: str, service: str) -> None:
        self.name, self.role, self.gpu_type, self.service = name, role, gpu_type, service
        self.is_reclaimed = False
        self.is_cordoned = False
        self.serving_since_s = 0.0
        self.idle_barred_gpus = 0
        self.is_ill = False
        self.workers: list[WorkerView] = []

    @property
    def free_gpus(self) -> int:
        """Room for one worker more; leaving ones still hold theirs here."""
        return 8 - sum(worker.gpus for worker in self.workers)

    def view(self) -> NodeView:
        return make_node_view(
            self.name,
            role=self.role,
            gpu_type=self.gpu_type,
            workers=self.workers,
            is_reclaimed=self.is_reclaimed,
            is_drained_by_operator=self.is_cordoned,
            serving_since_s=self.serving_since_s,
            service=self.service,
            barred_gpus=min(self.idle_barred_gpus, self.free_gpus),
        )


NODES = together(
    ROLES, GPU_TYPES, SERVICES, range(6), range(10), (0.0, NOW_S - 100.0), range(5), range(3)
)


def _shell(number: int, drawn: tuple[Any, ...]) -> _Shell:
    role, gpu_type, service, reclaimed, cordoned, serving_since_s, ill, barred_gpus = drawn
    shell = _Shell(f"n{number}", role, gpu_type, service)
    shell.is_reclaimed = role == NodeRole.ON_LOAN and reclaimed == 0
    shell.is_cordoned = cordoned == 0
    shell.serving_since_s = serving_since_s
    if role in TAKING:
        shell.is_ill = ill == 4
        shell.idle_barred_gpus = barred_gpus if shell.is_ill else 0
    return shell


def _may_run(shell: _Shell, job: JobView, gpu_type: str, *, is_flexible: bool) -> bool:
    if shell.gpu_type != gpu_type or shell.free_gpus < job.gpus_per_worker:
        return False
    if shell.role == NodeRole.TRAINING:
        return True
    if shell.role != NodeRole.ON_LOAN or job.grace_s > 60.0:
        return False
    return job.preemptibility == Preemptibility.FULL or (
        is_flexible and job.preemptibility == Preemptibility.SEMI
    )


JOBS = together(
    range(1, 4),  # fewest workers
    (0, 2, 6, 1),  # and flexible ones
    (2, 1, 4, 2, 8),
    ((), ("H100",), (), ("A100", "H100"), ("B200",)),
    ({}, {"A100": 2}),
    (600.0, 2400.0, 12_000.0, 60_000.0),
    range(6),
    (0, 0, 0, 1),
    KINDS,
    (10.0, 30.0, 60.0, 90.0),
    range(4),
    range(3),
)
PLACES = together(range(2520), range(27_720), (None, NOW_S - 10.0))
WORKERS = together(range(2520), range(4), range(6))
"""Of up to nine nodes each one is as likely, also by the remainder of a number below 2520."""


def _job(name: str, drawn: tuple[Any, ...], shells: list[_Shell]) -> JobView:
    """One that waits."""
    least, more, gpus, types, multiplier, work_s, came, priority, kind, grace_s, lost, avoids = (
        drawn
    )
    job = make_job_view(
        name,
        workers=(least, least + more),
        gpus_per_worker=gpus,
        types=types,
        multiplier=multiplier,
        remaining_work_s=work_s,
        submitted_at_s=float(came),
        priority=priority,
        preemptibility=kind,
        grace_s=grace_s,
        unsaved_gpu_s=float(lost * 100),
    )
    return job_with(job, nodes_avoided=(shells[0].name,)) if avoids == 2 else job


def _running(
    draw: st.DrawFn, name: str, drawn: tuple[Any, ...], shells: list[_Shell]
) -> JobView | None:
    """One that is put on the shells; None where it does not fit."""
    job = _job(name, drawn, shells)
    kind, number, last_resized_at_s = draw(PLACES)
    types = [s.gpu_type for s in shells if s.role in TAKING] or GPU_TYPES
    gpu_type = types[kind % len(types)]
    span = job.workers_on(gpu_type)
    placed: list[WorkerView] = []
    for index in range(span.min + number % (span.max - span.min + 1)):
        is_flexible = index >= span.min
        fits = [s for s in shells if _may_run(s, job, gpu_type, is_flexible=is_flexible)]
        if not fits:
            break
        at, leaves, barred = draw(WORKERS)
        shell = fits[at % len(fits)]
        worker = make_worker_view(
            name,
            index,
            shell.name,
            gpus=job.gpus_per_worker,
            is_flexible=is_flexible,
            is_leaving=is_flexible and leaves == 0,
            barred_gpus=barred % (min(2, job.gpus_per_worker) + 1) if shell.is_ill else 0,
        )
        shell.workers.append(worker)
        placed.append(worker)
    if len(placed) < span.min:
        for worker in placed:
            next(s for s in shells if s.name == worker.node).workers.remove(worker)
        return None
    is_resizing = any(worker.is_leaving for worker in placed)
    return make_job_view(
        name,
        state=JobState.RESIZING if is_resizing else JobState.RUNNING,
        workers=(job.workers.min, job.workers.max),
        gpus_per_worker=job.gpus_per_worker,
        types=job.gpu.types and (gpu_type,),
        multiplier=job.gpu.worker_multiplier,
        remaining_work_s=job.estimate.remaining_work_s,
        preemptibility=job.preemptibility,
        grace_s=job.grace_s,
        gpu_type=gpu_type,
        placed=placed,
        unsaved_gpu_s=job.saves.unsaved_gpu_s,
        resizes_latest_at_s=last_resized_at_s,
    )


LOADS = together(range(5), *[range(26)] * 4)
HOSTS = together(
    (Mode.ACT, Mode.ACT, Mode.RECOMMEND, Mode.OBSERVE),
    range(3),
    (0.0, 0.02, 0.3),
    (120.0, 120.0, 400.0),
    range(10),
)


def _service(draw: st.DrawFn, name: str) -> ServiceView:
    step_s = 300.0
    count, *loads = draw(LOADS)
    mode, min_serving, headroom_ratio, return_s, recalled = draw(HOSTS)
    samples = [
        LoadSample(NOW_S - step_s * (count - 1 - i), float(load))
        for i, load in enumerate(loads[:count])
    ]
    return make_service_view(
        name,
        mode=mode,
        min_serving=min_serving,
        headroom_ratio=headroom_ratio,
        return_s=return_s,
        load=samples,
        is_recalled=recalled == 0,
    )


SIZES = together(range(1, 10), range(7), range(7), (0.0, 60.0))


@st.composite
def snapshots(draw: st.DrawFn) -> ClusterSnapshot:
    """A whole cluster: training and inference nodes, running and waiting jobs, two services."""
    node_count, running_count, waiting_count, resize_cooldown_s = draw(SIZES)
    shells = [_shell(number, draw(NODES)) for number in range(node_count)]
    running = [_running(draw, f"r{n}", draw(JOBS), shells) for n in range(running_count)]
    waiting = [_job(f"w{n}", draw(JOBS), shells) for n in range(waiting_count)]
    return make_snapshot(
        nodes=[shell.view() for shell in shells],
        jobs=[job for job in (*running, *waiting) if job is not None],
        services=[_service(draw, name) for name in SERVICES],
        resize_cooldown_s=resize_cooldown_s,
    )


@cache
def _hosts(*names: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), min_size=1, max_size=3)


@st.composite
def lent_clusters(draw: st.DrawFn) -> ClusterSnapshot:
    """Lent nodes full of small gangs, and services that want some of them back."""
    names = [f"n{number}" for number in range(draw(whole(2, 7)))]
    owners = [draw(pick("chat", "chat", "search")) for _ in names]
    free = dict.fromkeys(names, 8)
    jobs: list[JobView] = []
    for number in range(draw(whole(1, 7))):
        name, gpus = f"r{number}", draw(pick(2, 1, 4))
        hosts = draw(_hosts(*names))
        base = draw(whole(1, len(hosts)))
        placed: list[WorkerView] = []
        for index, host in enumerate(host for host in hosts if free[host] >= gpus):
            free[host] -= gpus
            placed.append(make_worker_view(name, index, host, gpus=gpus, is_flexible=index >= base))
        if len(placed) < base:
            continue
        jobs.append(
            make_job_view(
                name,
                state=JobState.RUNNING,
                workers=(base, len(hosts) + 1),
                gpus_per_worker=gpus,
                placed=placed,
                unsaved_gpu_s=float(draw(whole(0, 3)) * 100),
            )
        )
    workers = [worker for job in jobs for worker in job.placed]
    nodes = [
        make_node_view(
            name,
            role=NodeRole.ON_LOAN,
            workers=[worker for worker in workers if worker.node == name],
            service=owner,
        )
        for name, owner in zip(names, owners, strict=True)
    ]
    services = [
        make_service_view(name, load=10.0 * draw(whole(0, len(names))), min_serving=0)
        for name in SERVICES
    ]
    return make_snapshot(nodes=nodes, jobs=jobs, services=services)
