"""The live part of a state, for a copy that is played ahead: without the past.

No pass reads ended jobs, event lines or loans that are over. A cell that has lived for years would
copy mostly those. The newest ended loans stay: their stages tell how long a way home takes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import structs

from common.model import JobId, LeaseId
from coordinator.engine.state.tables import ClusterState, LoanEntry

ENDED_LOANS_KEPT = 200
"""Enough for a median of each stage, and some 100 kB."""


def encoded(state: ClusterState, *, also: Iterable[JobId] = ()) -> bytes:
    """The live part of a state as one blob; `Engine` decides by it what it decides by the whole.

    also: ended jobs that stay in it, as far as the state has them: a new job depends on them.

    The state stays as it is, and so do views that are derived from it.
    """
    named = [job_id for job_id in also if job_id in state.jobs]
    part = structs.replace(
        state,
        jobs={job_id: state.jobs[job_id] for job_id in (*named, *state.live_jobs)},
        loans=_loans(state),
        stories=[],
    )
    return msgspec.msgpack.encode(part)


def _loans(state: ClusterState) -> dict[LeaseId, LoanEntry]:
    """Loans that may still change, and the newest ended ones, in their order."""
    kept: set[str | None] = {node.homecoming.lease_id for node in state.nodes.values()}
    kept |= {node.lease.lease_id for node in state.nodes.values() if node.lease is not None}
    kept |= {job.loss.lease_id for job in state.live() if job.loss is not None}
    newest = len(state.loans) - ENDED_LOANS_KEPT
    return {
        lease_id: loan
        for place, (lease_id, loan) in enumerate(state.loans.items())
        if place >= newest or loan.returned_at_s is None or lease_id in kept
    }
