"""Livelock detection: would the following passes undo a preemption of this one?

A policy and the guarantees decide by two different orders, and each may undo what the other did. A
preemption by the policy makes a job due by its guarantee; jobs give way to that one; the policy
then decides otherwise, and so on in a cycle. So a preemption by the policy counts only where its
job does not come and go in the following passes, each on the cell that the one before leaves, while
no job arrives or ends. Where the passes reach a cycle, the pass is made without the preemptions of
the cycle.

A preemption is also of use only if the start that it serves lasts. The preempted job waits from
then on. Its tenant's guarantee, or that of another waiting job, may reclaim the GPUs; then the next
pass undoes the start, and the policy decides the same again. So a policy's preemptions count only
where nothing is reclaimed in the cell that they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import (
    Decision,
    Migrate,
    Placement,
    Preempt,
    Reject,
    Resize,
    Start,
)
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    NodeView,
    WorkerView,
)
from coordinator.policies.tenants.attempts import Settled
from coordinator.policies.tenants.gpu_flow import Flow, job_of, more_free, moves_of
from coordinator.policies.tenants.reclaim import given_back

Move = Start | Resize | Migrate | Preempt

ON_THE_WAY = (JobState.STARTING, JobState.RESIZING)
"""Soon these run, and may be stopped: what would be called back from them then counts as well."""


def short_lived(
    snapshot: ClusterSnapshot, made: Iterable[Decision], kept: Sequence[Decision]
) -> list[Move]:
    """Decisions of a policy that guarantees would undo after the pass, in the same order.

    These are starts and growth whose GPUs would be reclaimed, and those that replace a job that the
    pass stops and that would be due as much elsewhere.

    made: by the policy. kept: the remaining part of it, plus the give-back of the pass.

    Without a stop or shrink by the policy nothing is checked: a start on free GPUs gives way in the
    pass itself.
    """
    own = {each.job_id for each in made if isinstance(each, Move)}
    mine = [each for each in kept if isinstance(each, Move) and each.job_id in own]
    if not any(map(_is_stop, mine)) or not any(t.guarantee_gpus for t in snapshot.tenants):
        return []
    flow = Flow(snapshot)
    back = given_back(after(snapshot, kept, flow), (), is_patient=True).decisions
    called = {each.job_id for each in back if isinstance(each, Preempt | Resize)}
    if not called:
        return []
    takers = [(each, flow.taken(each)) for each in mine]
    if found := [each for each, taken in takers if taken and each.job_id in called]:
        return found
    gone = {each.job_id for each in mine if isinstance(each, Preempt)}
    due = gone & {each.job_id for each in back if isinstance(each, Start)}
    left = {worker.node for job_id in due for worker in flow.jobs[job_id].placed}
    found = [each for each, taken in takers if not left.isdisjoint(taken)]
    return found or [each for each in mine if each.job_id in due]


def _is_stop(decision: Move) -> bool:
    return isinstance(decision, Preempt) or (
        isinstance(decision, Resize) and bool(decision.removed_workers)
    )


def after(snapshot: ClusterSnapshot, decisions: Sequence[Decision], flow: Flow) -> ClusterSnapshot:
    """The cell after decisions: holders and waiting jobs.

    A job that starts, or is on the way, runs, and a rejected one waits no more. Turns of jobs that
    share GPUs, and nodes that are lent or come home, stay as they are.

    flow: of the snapshot.
    """
    free = more_free(moves_of(flow, decisions))
    jobs: dict[JobId, JobView] = {}
    for decision in decisions:
        if isinstance(decision, Move) and decision.job_id in flow.jobs:
            before = jobs.get(decision.job_id, flow.jobs[decision.job_id])
            jobs[decision.job_id] = _carried_out(before, decision, snapshot.now_s, flow)
    refused = {each.job_id for each in decisions if isinstance(each, Reject)}
    gone = jobs.keys() | refused
    came: dict[NodeName, list[WorkerView]] = {}
    for worker in (worker for job in jobs.values() for worker in job.placed):
        came.setdefault(worker.node, []).append(worker)
    there = (jobs.get(job.job_id, job) for job in snapshot.jobs if job.job_id not in refused)
    return replace(
        snapshot,
        index=None,
        nodes=tuple(
            _changed(node, free.get(node.name, 0), gone, came.get(node.name, ()))
            for node in snapshot.nodes
        ),
        jobs=tuple(
            replace(job, state=JobState.RUNNING) if job.state in ON_THE_WAY else job
            for job in there
        ),
    )


def _changed(
    node: NodeView, more: int, gone: Collection[JobId], came: Sequence[WorkerView]
) -> NodeView:
    """A node with more GPUs free, and with these workers in place of those of some jobs."""
    stay = [worker for worker in node.workers if worker.job_id not in gone]
    if not (more or came) and len(stay) == len(node.workers):
        return node
    workers = sorted([*stay, *came], key=lambda worker: (worker.job_id, worker.worker_index))
    return replace(node, free_gpus=node.free_gpus + more, workers=tuple(workers))


def _carried_out(job: JobView, decision: Move, now_s: float, flow: Flow) -> JobView:
    match decision:
        case Preempt():
            return replace(
                job,
                state=JobState.PENDING,
                gpu_type=None,
                placed=(),
                held=(),
                attempt=replace(job.attempt, started_at_s=None),
                waiting_since_s=now_s,
                is_resizable=False,
            )
        case Resize():
            gone = set(decision.removed_workers)
            stay = [worker for worker in job.placed if worker.worker_index not in gone]
            more = _workers(job, job.gpu_type or "", decision.added, flow, is_flexible=True)
            return replace(job, placed=(*stay, *more))
        case Start():
            workers = _workers(job, decision.gpu_type, decision.placements, flow)
            return replace(
                job,
                state=JobState.RUNNING,
                gpu_type=decision.gpu_type,
                placed=workers,
                attempt=replace(job.attempt, started_at_s=now_s),
                waiting_since_s=None,
                is_resizable=job.is_elastic,
            )
        case Migrate():
            workers = _workers(job, job.gpu_type or "", decision.placements, flow)
            return replace(job, state=JobState.RUNNING, placed=workers, held=())


def _workers(
    job: JobView,
    gpu_type: str,
    placements: Iterable[Placement],
    flow: Flow,
    *,
    is_flexible: bool = False,
) -> tuple[WorkerView, ...]:
    """Workers on these places, numbered beyond those that the job has."""
    found: list[WorkerView] = []
    first = max((worker.worker_index for worker in job.placed), default=-1) + 1
    for placement in placements:
        node = flow.nodes.get(placement.node)
        factor = None if node is None else job.gpu.gpus_for_one(node.gpu_type, gpu_type)
        gpus = job.gpus_per_worker * (factor or 1)
        for place in range(placement.worker_count):
            uuids = placement.gpu_uuids[place * gpus : (place + 1) * gpus]
            found.append(
                WorkerView(
                    job_id=job.job_id,
                    worker_index=first + len(found),
                    node=placement.node,
                    gpus=gpus,
                    freed_gpus=gpus,
                    is_flexible=placement.is_flexible or is_flexible,
                    gpu_uuids=uuids,
                )
            )
    return tuple(found)


MOST_PASSES = 4
"""The number of passes looked ahead: cycles of up to five are found, and most sequences end after
one. A longer sequence is of jobs that find their places one after another, as after a change of
policy, and costs as much time as it has passes.
"""

Follow = Callable[[ClusterSnapshot, bytes], Settled]
"""One pass of the policy and of what guarantees make of it."""

Holdings = frozenset[tuple[JobId, NodeName, int]]


def in_turns(snapshot: ClusterSnapshot, first: Settled, follow: Follow) -> set[JobId]:
    """Jobs that come and go in the following passes, if these lead back to an earlier cell: the
    same jobs on the same GPUs. None if a pass without starts and stops ends them first, or if no
    cell repeats within the limit.

    first: of the snapshot. follow: makes the passes after it, only for their decisions.
    """
    found, cell = first, snapshot
    row = [_holdings(cell)]
    for left in reversed(range(MOST_PASSES + 1)):
        cell = after(cell, found.kept, Flow(cell))
        there = _holdings(cell)
        if there in row:
            circle = row[row.index(there) :]
            always = frozenset[tuple[JobId, NodeName, int]].intersection(*circle)
            return {job_id for each in circle for job_id, *_ in each - always}
        row.append(there)
        if left:
            found = follow(cell, found.made.allocation.memory)
            if not _moving(found, cell):
                break
    return set()


def beneficiaries(first: Settled, snapshot: ClusterSnapshot, own: Iterable[JobId]) -> set[JobId]:
    """Jobs that the policy would start or grow on GPUs of jobs that it stops, though they may give
    way in the end.

    own: the jobs that it stops.
    """
    flow = Flow(snapshot)
    nodes = {worker.node for job_id in own for worker in flow.jobs[job_id].placed}
    return {
        job.job_id
        for each in first.made.kept
        if (job := job_of(flow, each)) is not None and not nodes.isdisjoint(flow.taken(each))
    }


def _moving(found: Settled, snapshot: ClusterSnapshot) -> bool:
    """True if a waiting job starts in a pass, or a job with GPUs stops."""
    placed = {job.job_id: bool(job.placed) for job in snapshot.jobs}
    return any(
        placed.get(each.job_id) is isinstance(each, Preempt)
        for each in found.kept
        if isinstance(each, Start | Preempt)
    )


def _holdings(snapshot: ClusterSnapshot) -> Holdings:
    return frozenset(
        (job.job_id, worker.node, worker.gpus * sum(w.node == worker.node for w in job.placed))
        for job in snapshot.jobs
        for worker in job.placed
        if not worker.is_leaving
    )
