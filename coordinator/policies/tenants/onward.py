"""The passes that would follow one, while nothing comes or ends: whether they come round. Must not
know a policy, nor the engine.

A policy and the guarantees decide by two different orders, and each may undo what the other did.
A stop of the one makes a job due by the other, what gives way to that job changes what the policy
would have stopped for, and so on, in circles. So a stop of a policy counts only where the passes
after it, each on what the one before leaves, lead to no cell that was there before. Whoever is on
a circle sees itself again: each of its passes that stops somebody is refused, and it is left.
"""

from __future__ import annotations

from collections.abc import Callable

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


def comes_round(snapshot: ClusterSnapshot, first: Settled, follow: Follow) -> bool:
    """Whether the passes after one lead to a cell in which one of them, or it, began: the same
    jobs on the same GPUs. One that starts and stops nobody ends them.

    first: of the snapshot. follow: the passes after it, which are asked for nothing but what they
    decide.
    """
    found, cell = first, snapshot
    seen = {_holdings(cell)}
    for _ in range(MOST_PASSES):
        cell = after(cell, found.kept, Flow(cell))
        there = _holdings(cell)
        if there in seen:
            return True
        seen.add(there)
        found = follow(cell, found.made.allocation.memory)
        if not _moving(found, cell):
            return False
    return _holdings(after(cell, found.kept, Flow(cell))) in seen


def beneficiaries(first: Settled, snapshot: ClusterSnapshot) -> set[JobId]:
    """Jobs that the policy would start or grow on what it stops others for, though they may give
    way in the end."""
    flow, own = Flow(snapshot), first.own_stops()
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
