"""Snapshots of generated clusters: consistent ones only, as the engine would take them.

On some nodes, some GPUs come free for nobody: they are not well, or a stranger computes on them.
"""

from __future__ import annotations

from functools import cache

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
from tests.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)
from tests.draws import pick, whole

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
MULTIPLIERS = st.sampled_from(({}, {"A100": 2}))
LOADS = st.lists(st.integers(0, 25), max_size=4)


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


@st.composite
def _shells(draw: st.DrawFn) -> list[_Shell]:
    shells: list[_Shell] = []
    for number in range(draw(whole(1, 9))):
        shell = _Shell(
            f"n{number}",
            draw(pick(*ROLES)),
            draw(pick(*GPU_TYPES)),
            draw(pick(*SERVICES)),
        )
        shell.is_reclaimed = shell.role == NodeRole.ON_LOAN and draw(whole(0, 5)) == 0
        shell.is_cordoned = draw(whole(0, 9)) == 0
        shell.serving_since_s = draw(pick(0.0, NOW_S - 100.0))
        if shell.role in (NodeRole.TRAINING, NodeRole.ON_LOAN):
            shell.is_ill = draw(whole(0, 4)) == 4
            shell.idle_barred_gpus = draw(whole(0, 2)) if shell.is_ill else 0
        shells.append(shell)
    return shells


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


@st.composite
def _jobs(draw: st.DrawFn, name: str, shells: list[_Shell], *, is_running: bool) -> JobView | None:
    """One job; a running one is put on the shells, and is None where it does not fit."""
    least = draw(whole(1, 3))
    job = make_job_view(
        name,
        workers=(least, least + draw(pick(0, 2, 6, 1))),
        gpus_per_worker=draw(pick(2, 1, 4, 2, 8)),
        types=draw(pick((), ("H100",), (), ("A100", "H100"), ("B200",))),
        multiplier=draw(MULTIPLIERS),
        remaining_work_s=float(draw(pick(1, 4, 20, 100)) * 600),
        submitted_at_s=float(draw(whole(0, 5))),
        priority=draw(pick(0, 0, 0, 1)),
        preemptibility=draw(pick(*KINDS)),
        grace_s=draw(pick(10.0, 30.0, 60.0, 90.0)),
        lost_if_preempted_gpu_s=float(draw(whole(0, 3)) * 100),
    )
    if not is_running:
        avoided = draw(pick((), (), (shells[0].name,))) if shells else ()
        return replace(job, avoid_nodes=avoided)
    gpu_type = draw(pick(*GPU_TYPES))
    span = job.workers_on(gpu_type)
    placed: list[WorkerView] = []
    count = draw(whole(span.min, span.max))
    for index in range(count):
        is_flexible = index >= span.min
        fits = [s for s in shells if _may_run(s, job, gpu_type, is_flexible=is_flexible)]
        if not fits:
            break
        shell = draw(st.sampled_from(fits))
        worker = make_worker_view(
            name,
            index,
            shell.name,
            gpus=job.gpus_per_worker,
            is_flexible=is_flexible,
            is_leaving=is_flexible and draw(whole(0, 7)) == 0,
            barred_gpus=draw(whole(0, min(2, job.gpus_per_worker))) if shell.is_ill else 0,
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
        remaining_work_s=job.remaining_work_s,
        preemptibility=job.preemptibility,
        grace_s=job.grace_s,
        gpu_type=gpu_type,
        placed=placed,
        lost_if_preempted_gpu_s=job.lost_if_preempted_gpu_s,
        last_resized_at_s=draw(pick(None, NOW_S - 10.0)),
    )


@st.composite
def _services(draw: st.DrawFn, name: str) -> ServiceView:
    step_s = 300.0
    loads = draw(LOADS)
    samples = [
        LoadSample(NOW_S - step_s * (len(loads) - 1 - i), float(load))
        for i, load in enumerate(loads)
    ]
    return make_service_view(
        name,
        mode=draw(pick(Mode.ACT, Mode.ACT, Mode.RECOMMEND, Mode.OBSERVE)),
        min_serving=draw(whole(0, 2)),
        headroom_ratio=draw(pick(0.0, 0.02, 0.3)),
        return_s=draw(pick(120.0, 120.0, 400.0)),
        load=samples,
        is_recalled=draw(whole(0, 9)) == 0,
    )


SHELLS = _shells()
SERVICES_DRAWN = tuple(_services(name) for name in SERVICES)


@st.composite
def snapshots(draw: st.DrawFn) -> ClusterSnapshot:
    """A whole cluster: training and inference nodes, running and waiting jobs, two services."""
    shells = draw(SHELLS)
    running = [
        draw(_jobs(f"r{number}", shells, is_running=True)) for number in range(draw(whole(0, 6)))
    ]
    waiting = [
        draw(_jobs(f"w{number}", shells, is_running=False)) for number in range(draw(whole(0, 6)))
    ]
    return make_snapshot(
        nodes=[shell.view() for shell in shells],
        jobs=[job for job in (*running, *waiting) if job is not None],
        services=[draw(service) for service in SERVICES_DRAWN],
        resize_cooldown_s=draw(pick(0.0, 60.0)),
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
                lost_if_preempted_gpu_s=float(draw(whole(0, 3)) * 100),
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
