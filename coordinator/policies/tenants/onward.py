"""The passes that would follow one, while nothing comes or ends: whether they come round. Must not
know a policy, nor the engine.

A policy and the guarantees decide by two different orders, and each may undo what the other did.
A stop of the one makes a job due by the other, what gives way to that job changes what the policy
would have stopped for, and so on, in circles. So a stop of a policy counts only where its job does
not come and go in the passes after it, each on what the one before leaves. Whoever is on a circle
sees itself again: its pass is made without the stops of the circle, and the circle is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.model import JobId, NodeName
from coordinator.policies.decisions import Preempt, Start
from coordinator.policies.snapshot import ClusterSnapshot
from coordinator.policies.tenants.aftermath import after
from coordinator.policies.tenants.flow import Flow, job_of
from coordinator.policies.tenants.settling import Settled

MOST_PASSES = 4
"""So many passes are looked ahead: circles of up to five are found, and most rows end after one. A
longer row is of jobs that find their places one after the other, as in a cell whose policy was
changed, and costs as much time as it has passes."""

Follow = Callable[[ClusterSnapshot, bytes], Settled]
"""One pass of the policy and of what guarantees make of it."""

Holdings = frozenset[tuple[JobId, NodeName, int]]


def in_turns(snapshot: ClusterSnapshot, first: Settled, follow: Follow) -> set[JobId]:
    """Jobs that come and go in the passes after one, as these lead to a cell in which one of them,
    or it, began: the same jobs on the same GPUs. None where a pass that starts and stops nobody
    ends them first, or where nothing comes round in so few.

    first: of the snapshot. follow: the passes after it, which are asked for nothing but what they
    decide.
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
    """Jobs that the policy would start or grow on what it stops some for, though they may give way
    in the end.

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
    """Whether somebody who waits starts in a pass, or one who has GPUs stops."""
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
