"""Gandiva's reactive mode: where a job goes that waits, and how others make room. Pure.

Algorithm 1 of Gandiva (OSDI'18, section 4.1): nodes of its own gang size, empty nodes, any free
GPUs, else in turns with a gang of its size. Elastic jobs have agreed to grow on their own node and
to shrink at once when somebody comes (section 3.4). Must not know the engine.
"""

from __future__ import annotations

from common.model import JobId, JobState, NodeName
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import Placement, Resize, Start
from coordinator.policies.floor import present_workers
from coordinator.policies.snapshot import JobView, WorkerView
from coordinator.policies.systems.gandiva.board import Board, Place, gang_of
from coordinator.policies.systems.gandiva.turns import Turns


def start_on_free(board: Board) -> None:
    """Place the jobs that wait on free GPUs, by priority and submission: steps 1 to 3."""
    for job in _waiting(board):
        place, where = board.find(job), "free GPUs"
        if place is None:
            place, where = _make_room(board, job), "GPUs that elastic jobs give back"
        if place is not None:
            _begin(board, job, place, where)


def start_in_turns(board: Board, turns: Turns, *, jobs_per_gpu: int) -> tuple[Hold, ...]:
    """Place those that still wait where they take turns, step 4; why the others wait on."""
    return tuple(
        Hold(job_id=job.job_id, blockers=(why,))
        for job in _waiting(board)
        if (why := _start(board, turns, job, jobs_per_gpu))
    )


def _waiting(board: Board) -> list[JobView]:
    waiting = board.of(JobState.PENDING)
    waiting.sort(key=lambda job: (-job.priority, job.submitted_at_s, job.job_id))
    return waiting


def _start(board: Board, turns: Turns, job: JobView, jobs_per_gpu: int) -> str:
    host = _host(board, turns, job, jobs_per_gpu)
    if host is None:
        _shrink_hosts(board, job)
        return (
            f"of {job.workers.min} workers of {job.gpus_per_worker} GPUs not all have free GPUs, "
            f"and no gang of this size has a turn that is over and less than {jobs_per_gpu} jobs "
            "on its GPUs"
        )
    place = board.on_seat(job, host)
    assert place is not None
    for rival in sorted(board.rivals(board.seat(host))):
        turns.put_aside(board.jobs[rival], f"{job.job_id} has come and gets its first turn")
    _begin(board, job, place, f"in turns with {host.job_id}")
    return ""


def _begin(board: Board, job: JobView, place: Place, where: str) -> None:
    gpu_type, placements = place
    factor = job.gpu.worker_multiplier.get(gpu_type, 1)
    count = job.workers_on(gpu_type).min
    board.take(job, place)
    board.decide(
        job,
        Start(
            job_id=job.job_id,
            gpu_type=gpu_type,
            placements=placements,
            estimated_runtime_s=job.work_left_s(board.now_s) * factor / count,
            estimate_source=job.estimate_source,
            reason=f"{count * job.gpus_per_worker} GPUs of type {gpu_type} on {len(placements)} "
            f"nodes: {where}",
        ),
    )


def _host(board: Board, turns: Turns, job: JobView, jobs_per_gpu: int) -> JobView | None:
    """Step 4: a gang of its size, the least loaded seat first, whose turn is over."""
    hosts = [
        host
        for host in board.of(JobState.RUNNING, JobState.SUSPENDED)
        if board.gpus.get(host.job_id)
        and not _is_grown(host)
        and 0 < board.depth(board.seat(host)) < jobs_per_gpu
        and board.on_seat(job, host) is not None
    ]
    hosts.sort(key=lambda host: (board.depth(board.seat(host)), host.job_id))
    for host in hosts:
        rivals = (board.jobs[name] for name in board.rivals(board.seat(host)))
        if all(turns.is_over(rival, for_priority=job.priority) for rival in rivals):
            return host
    return None


def _is_grown(job: JobView) -> bool:
    return any(worker.is_flexible for worker in job.placed)


# --- grow and shrink --------------------------------------------------------------------------


def _make_room(board: Board, job: JobView) -> Place | None:
    """Take flexible workers back, if the gang fits then; no more of them than it needs."""
    grown = [
        other
        for other in board.of(JobState.RUNNING)
        if other.is_resizable and any(_may_go(worker) for worker in other.placed)
    ]
    all_of_them = [worker for other in grown for worker in other.placed if _may_go(worker)]
    board.floor.vacate(all_of_them)
    place = board.find(job)
    if place is None:
        board.floor.stay(all_of_them)
        return None
    missing: dict[NodeName, int] = {}
    board.floor.stay(all_of_them)
    for placement in place[1]:
        gpus = placement.worker_count * job.gpus_per_worker
        missing[placement.node] = gpus - board.floor.free[placement.node]
    for other in grown:
        _shrink(board, other, missing, job.job_id)
    return place


def _shrink_hosts(board: Board, job: JobView) -> None:
    """Gangs that it could take turns with give back what they have grown by, for the next pass."""
    for other in board.of(JobState.RUNNING):
        is_alike = other.gpu_type is not None and job.accepts(other.gpu_type)
        if other.is_resizable and is_alike and gang_of(other) == _gang_on(job, other):
            missing = {worker.node: worker.gpus * len(other.placed) for worker in other.placed}
            _shrink(board, other, missing, job.job_id)


def _gang_on(job: JobView, host: JobView) -> int:
    return job.workers_on(host.gpu_type or "").min * job.gpus_per_worker


def _may_go(worker: WorkerView) -> bool:
    return worker.is_flexible and not worker.is_leaving


def _shrink(board: Board, job: JobView, missing: dict[NodeName, int], beneficiary: JobId) -> None:
    """The newest workers first: they stand farthest from the base gang."""
    leaving: list[WorkerView] = []
    for worker in sorted(filter(_may_go, job.placed), key=lambda worker: -worker.worker_index):
        if missing.get(worker.node, 0) > 0:
            missing[worker.node] -= worker.gpus
            leaving.append(worker)
    if leaving:
        board.floor.vacate(leaving)
        indices = tuple(sorted(worker.worker_index for worker in leaving))
        why = f"{beneficiary} has come and needs their GPUs"
        board.decide(job, Resize(job_id=job.job_id, removed_workers=indices, reason=why))


def grow_all(board: Board) -> None:
    """Elastic jobs take the idle GPUs of the node that they stand on, up to all of it."""
    cooldown_s = board.snapshot.resize_cooldown_s
    for job in board.of(JobState.RUNNING):
        nodes = {worker.node for worker in job.placed if not worker.is_leaving}
        if not job.is_resizable or len(nodes) != 1 or job.gpu_type is None:
            continue
        node = next(iter(nodes))
        if (job.last_resized_at_s or -cooldown_s) + cooldown_s > board.now_s:
            continue
        board.floor.avoided = job.avoid_nodes
        room = board.floor.rooms(job.gpu_type, job.gpus_per_worker).get(node, 0)
        more = min(room, job.workers_on(job.gpu_type).max - present_workers(job))
        if more > 0:
            added = Placement(node=node, worker_count=more, is_flexible=True)
            board.floor.take((added,), job.gpus_per_worker)
            why = f"{more} workers more: GPUs of {node} have been idle and nobody waits"
            board.decide(job, Resize(job_id=job.job_id, added=(added,), reason=why))
