"""Why each job that waits does not start: one answer for each, whatever a pass left open. Pure.

Must not know who decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.model import JobId, JobState
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import Decision, Start
from coordinator.policies.snapshot import ClusterSnapshot

NOWHERE = "the nodes of no GPU type that it accepts take workers now and would hold its base gang"
"""Why a job competes for no GPUs: see `pooling.chosen_types`."""


def answers(
    snapshot: ClusterSnapshot,
    decisions: Iterable[Decision],
    holds: Iterable[Hold],
    notes: Mapping[JobId, str],
) -> tuple[Hold, ...]:
    """What the placing of grants says, else what the policy noted, in order of id.

    A job of which neither says anything competes for no GPUs.
    """
    started = {decision.job_id for decision in decisions if isinstance(decision, Start)}
    told = {hold.job_id: hold.blockers for hold in holds}
    return tuple(
        Hold(job_id=job.job_id, blockers=told.get(job.job_id, (notes.get(job.job_id, NOWHERE),)))
        for job in snapshot.jobs
        if job.state == JobState.PENDING and job.job_id not in started
    )
