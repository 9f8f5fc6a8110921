"""Gandiva's reactive mode: where a waiting job goes, and how others make room. Pure.

Algorithm 1 of Gandiva (OSDI'18, section 4.1): nodes of its own gang size, empty nodes, any free
GPUs, else turns with a gang of its size.
"""

from __future__ import annotations

from common.model import JobState
from coordinator.policies.contract.decisions import PendingReason, Start
from coordinator.policies.contract.free_gpus import GangShape, gang_shape
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.schedulers.gandiva.board import Board, Place, gives_way
from coordinator.policies.schedulers.gandiva.growing import make_room, shrink_hosts
from coordinator.policies.schedulers.gandiva.time_slices import Slices
from coordinator.policies.tenants.queues import submission


def start_on_free(board: Board) -> None:
    """Place the jobs that wait on free GPUs, by priority and submission: steps 1 to 3."""
    in_vain = set[GangShape]()
    for job in _waiting(board):
        shape = gang_shape(job)
        if shape in in_vain:
            continue  # all that could be free would not do, and since then it is no more
        place, where = board.find(job), "free GPUs"
        if place is None:
            place, where = make_room(board, job), "GPUs that elastic jobs give back"
        if place is None:
            in_vain.add(shape)
        else:
            _begin(board, job, place, where)


def start_in_turns(board: Board, turns: Slices, *, jobs_per_gpu: int) -> tuple[PendingReason, ...]:
    """Place those that still wait where they take turns, step 4; why the others wait on."""
    holds: list[PendingReason] = []
    in_vain: dict[GangShape, str] = {}
    for job in _waiting(board):
        tenant = job.tenant if board.snapshot.tenants else ""
        # No job before it has a lower priority, so a turn that was not over then is not over now.
        like = (*gang_shape(job), tenant, gives_way(job))
        why = in_vain.get(like) or _start(board, turns, job, jobs_per_gpu)
        if why:
            in_vain[like] = why
            holds.append(PendingReason(job_id=job.job_id, blockers=(why,)))
    return tuple(holds)


def _waiting(board: Board) -> list[JobView]:
    waiting = board.of(JobState.PENDING)
    waiting.sort(key=submission)
    return waiting


def _start(board: Board, turns: Slices, job: JobView, jobs_per_gpu: int) -> str:
    host = _host(board, turns, job, jobs_per_gpu)
    if host is None:
        shrink_hosts(board, job)
        return (
            f"not all of its {counted(job.workers.min, 'worker')} of "
            f"{counted(job.gpus_per_worker, 'GPU')} have free GPUs, and no gang of this "
            f"size has a turn that is over and less than {counted(jobs_per_gpu, 'job')} on its GPUs"
            f"{'' if gives_way(job) else ', all behind it: this job cannot be preempted'}"
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
            estimate_source=job.estimate.source,
            reason=f"{counted(count * job.gpus_per_worker, 'GPU')} of type {gpu_type} on "
            f"{counted(len(placements), 'node')}: {where}",
        ),
    )


def _host(board: Board, turns: Slices, job: JobView, jobs_per_gpu: int) -> JobView | None:
    """Step 4: a gang of its size, the least loaded seat first, whose turn is over."""
    hosts = [
        host
        for host in board.of(JobState.RUNNING, JobState.SUSPENDED)
        if board.gpus.get(host.job_id)
        and not _is_grown(host)
        and 0 < board.depth(board.seat(host)) < jobs_per_gpu
        and board.may_come(job, host)
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
