"""What is said of a suspended job: since when, and who computes on its GPUs meanwhile. Pure.

Must not know policies: whose turn comes when is theirs.
"""

from __future__ import annotations

from common.model import JobState
from coordinator.engine.engine import Engine
from coordinator.engine.state.tables import JobEntry

COMPUTING = (JobState.STARTING, JobState.RUNNING, JobState.RESIZING)


def suspension_reason(engine: Engine, entry: JobEntry, *, now_s: float) -> str:
    """One sentence. now_s: engine time."""
    others = sorted(
        job_id
        for job_id in {
            key.job_id
            for worker in entry.workers.values()
            for slot in engine.state.nodes[worker.node].gpus
            if slot.uuid in worker.gpu_uuids
            for key in (slot.holder, *slot.guests)
            if key is not None
        }
        if engine.state.jobs[job_id].state in COMPUTING
    )
    since_s = 0.0 if entry.suspended_at_s is None else now_s - entry.suspended_at_s
    return (
        f"it keeps its GPUs and has been suspended for {since_s:.0f} s while "
        f"{', '.join(others) or 'nobody'} computes on them"
    )
