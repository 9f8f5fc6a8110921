"""Nodes that do not come back: what an operator is told of them, and what a word of theirs ends."""

from __future__ import annotations

from common.api import (
    ApiError,
    ApiErrorCode,
    Describe,
    Description,
    Done,
    GetStatus,
    ListLoans,
    Loans,
    Operate,
    Status,
)
from common.model import JobId, JobState, NodeName, NodeRole
from coordinator.engine.state.events import OperatorAction
from coordinator.service.coordinator import Coordinator
from tests.harness.cluster.coordinator import Cell, job, make_settings, on_loan, running

SETTINGS = make_settings()
MISSING = NodeName("t1")


async def why(cell: Cell, kind: str, name: str) -> str:
    """All sentences of `explain`."""
    answer = await cell.ask(Describe(kind=kind, name=name))
    assert isinstance(answer, Description), answer
    return "\n".join(answer.why)


async def confirm_dead(cell: Cell, name: str) -> object:
    """An operator's word, and the answer to it."""
    return await cell.ask(Operate(action=OperatorAction.CONFIRM_DEAD, target=name), tenant="ops")


async def rebuilt_without(cell: Cell, *missing: str) -> tuple[Coordinator, JobId]:
    """A gang over all nodes ran; JetStream is lost, and these nodes never speak again."""
    first = await cell.lead()
    count = len(cell.agents)
    job_id = await running(cell, first, "gang", workers=(count, count))
    await cell.leaders[0].crash()
    cell.records.clear()
    cell.key.entry = None
    for name in missing:
        cell.agents[name].is_silent = True
    again = await cell.lead("two")
    await cell.until(lambda: job_id in again.engine.state.jobs)
    await cell.clock.advance(3 * SETTINGS.lost_after_s)
    return again, job_id


async def test_a_rebuilt_gang_names_the_node_that_it_waits_for() -> None:
    """Nobody has heard that node since the journal was lost, and yet it is known from the ledgers
    of the others, with what an operator can do; time alone starts nothing anew."""
    async with Cell(training=2) as cell:
        again, job_id = await rebuilt_without(cell, MISSING)
        assert MISSING not in again.engine.state.nodes
        assert f"aryl node confirm-dead {MISSING}" in await why(cell, "job", job_id)
        attempt = job(again, job_id).attempt.number
        await cell.clock.advance(100.0)
        assert job(again, job_id).attempt.number == attempt
        assert again.engine.check() == []


async def test_confirming_its_death_lets_the_gang_queue_again() -> None:
    """A node fault, free of charge: it waits for two nodes, and starts when there are two."""
    async with Cell(training=2) as cell:
        again, job_id = await rebuilt_without(cell, MISSING)
        assert isinstance(await confirm_dead(cell, MISSING), Done)
        await cell.until(lambda: job(again, job_id).state == JobState.PENDING)
        entry = job(again, job_id)
        assert (entry.counts.node_faults, entry.counts.own_faults) == (1, 0)
        assert "confirm-dead" not in await why(cell, "job", job_id)
        assert again.engine.check() == []
        refused = await confirm_dead(cell, MISSING)
        assert isinstance(refused, ApiError)
        assert refused.code == ApiErrorCode.NOT_FOUND


async def test_one_of_two_missing_nodes_is_not_enough() -> None:
    """The other one's workers may still compute; its word is awaited as well."""
    async with Cell(training=3) as cell:
        again, job_id = await rebuilt_without(cell, "t1", "t2")
        await confirm_dead(cell, "t1")
        state = job(again, job_id).state
        assert state != JobState.PENDING
        told = await why(cell, "job", job_id)
        assert "confirm-dead t2" in told
        assert "confirm-dead t1" not in told
        await confirm_dead(cell, "t2")
        await cell.until(lambda: job(again, job_id).state == JobState.PENDING)


async def test_a_node_that_comes_back_after_all_completes_its_gang() -> None:
    """Its ledger has what was missing: nothing is awaited, nothing was restarted."""
    async with Cell(training=2) as cell:
        again, job_id = await rebuilt_without(cell, MISSING)
        cell.agents[MISSING].is_silent = False
        await cell.until(lambda: len(job(again, job_id).workers) == 2)
        assert job(again, job_id).attempt.awaited_nodes == []
        assert job(again, job_id).state == JobState.RUNNING
        assert "confirm-dead" not in await why(cell, "job", job_id)
        assert again.engine.check() == []


async def test_a_node_that_comes_back_without_its_worker_ends_the_wait() -> None:
    """What an agent does not report does not run: the gang is a node fault and starts anew."""
    async with Cell(training=2) as cell:
        again, job_id = await rebuilt_without(cell, MISSING)
        attempt = job(again, job_id).attempt.number
        cell.agents[MISSING].node.crash()
        cell.agents[MISSING].node.boot()
        cell.agents[MISSING].is_silent = False
        await cell.until(lambda: job(again, job_id).attempt.number == attempt + 1)
        entry = job(again, job_id)
        assert (entry.counts.node_faults, entry.counts.own_faults) == (1, 0)
        await cell.until(lambda: job(again, job_id).state == JobState.RUNNING)
        assert again.engine.state.awaiting_jobs == {}
        assert again.engine.check() == []


async def test_a_node_that_is_late_for_its_service_is_told_and_counted() -> None:
    """From its deadline on, whether or not it ever comes home, and once."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        cell.agents["i0"].is_silent = True
        await cell.ask(Operate(action=OperatorAction.RECALL), tenant="ops")
        status = await cell.ask(GetStatus())
        assert isinstance(status, Status)
        assert (status.recalled_services, status.is_recalled) == (("chat",), True)
        deadline_s = SETTINGS.engine.services[0].reclaim_deadline_s
        await cell.clock.advance(deadline_s - 2.0)
        assert await late(cell) == (0, [False])
        assert "late reclaim" not in await why(cell, "node", "i0")
        await cell.clock.advance(12.0)
        assert await late(cell) == (1, [True])
        assert "late reclaim" in await why(cell, "node", "i0")
        cell.agents["i0"].is_silent = False
        node = coordinator.engine.state.nodes[NodeName("i0")]
        await cell.until(lambda: node.role == NodeRole.SERVING)
        assert await late(cell) == (1, [True])
        assert "late reclaim" not in await why(cell, "node", "i0")


async def test_a_node_whose_lease_ended_by_itself_is_late_like_any_other() -> None:
    """Nobody asked for it back, and its service waits all the same: for what its TTL leaves of the
    deadline, whether or not it ever comes home, and once."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        await on_loan(cell, coordinator)
        [loan] = coordinator.engine.state.loans.values()
        cell.agents["i0"].node.crash()
        cell.agents["i0"].node.boot()
        await cell.until(lambda: loan.is_lapsed)
        cell.agents["i0"].is_silent = True
        settings = SETTINGS.engine
        await cell.clock.advance(
            settings.services[0].reclaim_deadline_s - settings.lease_ttl_s - 2.0
        )
        assert await late(cell, "lapses") == (0, [False])
        assert "late lapse" not in await why(cell, "node", "i0")
        await cell.clock.advance(12.0)
        assert await late(cell, "lapses") == (1, [True])
        told = await why(cell, "node", "i0")
        assert "after its lease ended by itself): a late lapse" in told
        cell.agents["i0"].is_silent = False
        node = coordinator.engine.state.nodes[NodeName("i0")]
        await cell.until(lambda: node.role == NodeRole.SERVING)
        count, (is_late, *_) = await late(cell, "lapses")
        assert (count, is_late) == (1, True)
        assert "late lapse" not in await why(cell, "node", "i0")


async def late(cell: Cell, figure: str = "reclaims") -> tuple[object, list[bool]]:
    """Late ones as `status` counts them, never without one, and of each loan whether it is late."""
    status, loans = await cell.ask(GetStatus()), await cell.ask(ListLoans(is_live_only=False))
    assert isinstance(status, Status)
    assert isinstance(loans, Loans)
    count = status.figures[f"{figure}_late"]
    of = {"reclaims": "reclaims", "lapses": "leases_lapsed"}
    others = {f"{name}_late" for name in of if name != figure}
    assert [status.figures[name] for name in others] == [0]
    assert count == 0 or status.figures[of[figure]] == count
    return count, [row.is_late for row in loans.rows]
