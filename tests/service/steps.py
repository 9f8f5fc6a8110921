"""Steps that several tests take on a cell: submit, run, lend; and what its journal says."""

from __future__ import annotations

from common.api import (
    Submit,
    Submitted,
)
from common.model import JobId, JobState, NodeRole
from coordinator.engine.state.events import LeaderStarted
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Decision
from coordinator.service.coordinator import Coordinator
from tests.service.cell import Cell, make_spec


async def submit(cell: Cell, name: str = "j", **spec: object) -> JobId:
    """A job in the journal."""
    reply = await cell.ask(Submit(spec=make_spec(name, **spec), request_id=f"r-{name}"))  # type: ignore[arg-type]
    assert isinstance(reply, Submitted)
    return JobId(reply.job_id)


def job(coordinator: Coordinator, job_id: JobId) -> JobEntry:
    """A job as the engine sees it."""
    return coordinator.engine.state.jobs[job_id]


async def running(cell: Cell, coordinator: Coordinator, name: str = "j", **spec: object) -> JobId:
    """A job whose workers compute, as the engine knows too."""
    job_id = await submit(cell, name, **spec)

    def is_running() -> bool:
        found = [key for a in cell.agents.values() for key in a.running() if key.job_id == job_id]
        entry = job(coordinator, job_id)
        return entry.state == JobState.RUNNING and len(found) == len(entry.workers)

    await cell.until(is_running)
    return job_id


async def on_loan(cell: Cell, coordinator: Coordinator) -> list[JobId]:
    """One job more than there are training nodes: they run, one of them on a lent node."""
    training = [name for name in cell.agents if name.startswith("t")]
    ids = [await running(cell, coordinator, f"f{number}") for number in range(len(training) + 1)]
    nodes = coordinator.engine.state.nodes.values()
    assert NodeRole.ON_LOAN in {node.role for node in nodes}
    return ids


def decisions(cell: Cell) -> list[Decision]:
    """All that the journal holds."""
    return [decision for _, record in cell.journal() for decision in record.decisions]


def starts(cell: Cell) -> list[LeaderStarted]:
    """Every takeover that the journal holds."""
    return [
        entry.event
        for _, record in cell.journal()
        for entry in record.entries
        if isinstance(entry.event, LeaderStarted)
    ]
