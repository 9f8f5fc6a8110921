"""One pending reason for each waiting job, even where a pass left it open. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.model import JobId, JobState
from coordinator.policies.contract.decisions import Decision, PendingReason, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot

NOWHERE = "the nodes of no GPU type that it accepts take workers now and would hold its base gang"
"""Why a job competes for no GPUs: see `pooling.chosen_types`."""


def answers(
    snapshot: ClusterSnapshot,
    decisions: Iterable[Decision],
    holds: Iterable[PendingReason],
    notes: Mapping[JobId, str],
) -> tuple[PendingReason, ...]:
    """The reasons of the placement, else those that the policy noted, both in the policy's own
    order.

    A job without either competes for no GPUs, and stands last.
    """
    started = {decision.job_id for decision in decisions if isinstance(decision, Start)}
    waiting = [
        job.job_id
        for job in snapshot.jobs
        if job.state == JobState.PENDING and job.job_id not in started
    ]
    said = {hold.job_id: hold.blockers for hold in holds}
    said |= {job_id: (why,) for job_id, why in notes.items() if job_id not in said}
    line = dict.fromkeys((*said, *waiting))
    there = set(waiting)
    return tuple(
        PendingReason(job_id=job_id, blockers=said.get(job_id, (NOWHERE,)))
        for job_id in line
        if job_id in there
    )
