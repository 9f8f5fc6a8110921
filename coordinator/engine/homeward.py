"""Calling a lent node home by order, which is no policy's choice: when it must be back, and at what
price. Must not know who ordered it, nor why.
"""

from __future__ import annotations

from math import fsum

from common.model import JobId
from coordinator.engine import estimates, jobs, loans, promised
from coordinator.engine.context import Context
from coordinator.engine.state import JobEntry, NodeEntry
from coordinator.policies.decisions import Reclaim


def call_home(ctx: Context, node: NodeEntry, reason: str) -> None:
    """Take a lent node back; one that is not lent stays as it is.

    An order, not a decision: it also holds while the cell is frozen.
    """
    if node.lease is None:
        return
    hit, released = _hit(ctx, node)
    decision = Reclaim(
        node=node.name,
        service=node.lease.service,
        deadline_s=promised.reclaim_s(ctx, node.lease.service),
        predicted_preemptions=len(hit),
        predicted_cost_gpu_s=fsum(estimates.lost_if_preempted(job, ctx.now_s) for job in hit),
        released_workers=released,
        reason=reason,
    )
    if not loans.reclaim(ctx, decision):
        ctx.decisions.append(decision)


def _hit(ctx: Context, node: NodeEntry) -> tuple[list[JobEntry], int]:
    """Jobs that an order now would preempt, each once, and how many workers it would release.

    As they count when it is carried out: a gang that has not run yet is no preemption.
    """
    hit: dict[JobId, JobEntry] = {}
    released = 0
    for job, worker in loans.held_on(ctx, node):
        if worker.stop is not None or job.after_vacating is not None:
            continue
        if worker.is_flexible:
            released += 1
        elif job.state in jobs.ACTIVE_JOB_STATES and job.attempt_ran_at_s is not None:
            hit[job.job_id] = job
    return list(hit.values()), released
