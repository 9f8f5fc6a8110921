"""A service that left the settings while its nodes are there, and lent: seen live and said."""

from __future__ import annotations

import logging

import msgspec
import pytest

from common.api import ApiError, Describe, Description, Events, GetEvents, ListLoans, Loans
from common.model import NodeName, NodeRole
from coordinator.service.settings import CoordinatorSettings
from tests.harness.cluster.coordinator import Cell, make_settings, on_loan


def renamed(name: str = "talk") -> CoordinatorSettings:
    """The same settings with the service under another name."""
    old = make_settings()
    [service] = old.engine.services
    new = msgspec.structs.replace(service, name=name)
    return msgspec.structs.replace(old, engine=msgspec.structs.replace(old.engine, services=(new,)))


async def why(cell: Cell, name: str) -> tuple[str, ...]:
    """The sentences of `explain node`."""
    answer = await cell.ask(Describe(kind="node", name=name))
    assert isinstance(answer, Description), answer
    return answer.why


async def test_a_node_lent_by_a_service_that_was_renamed_comes_home(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Within its old deadline; log, list and explanation say why."""
    async with Cell(inference=1) as cell:
        await on_loan(cell, await cell.lead())
        await cell.leaders[0].crash()
        with caplog.at_level(logging.WARNING):
            coordinator = await cell.lead("two", renamed())
        said = "service chat is not in the settings, so it is not lent; named by i0"
        assert said in [record.getMessage() for record in caplog.records]
        [loan] = coordinator.engine.state.loans.values()
        await cell.until(lambda: loan.reclaim_ordered_at_s is not None)
        answer = await cell.ask(ListLoans())
        assert isinstance(answer, Loans)
        assert (answer.rows[0].state, answer.rows[0].reclaim_deadline_s) == ("coming home", 60.0)
        reason = "its service chat is not in the settings of this cell"
        assert answer.rows[0].reclaim_reason == reason
        assert [s for s in await why(cell, "i0") if s.endswith(f" s of 60 s: {reason}")]
        node = coordinator.engine.state.nodes[NodeName("i0")]
        await cell.until(lambda: node.role == NodeRole.SERVING)
        assert loan.returned_at_s is not None
        assert coordinator.engine.state.counters.reclaims_late == 0
        assert (
            "its service chat is not in the settings of this cell (services: talk), so it is "
            "not lent" in await why(cell, "i0")
        )


async def test_a_service_that_is_named_and_not_known_is_no_blank_in_its_description() -> None:
    """Whoever asks for it hears which nodes name it."""
    async with Cell(inference=2) as cell:
        await cell.lead(settings=renamed())
        answer = await cell.ask(Describe(kind="service", name="chat"))
        assert isinstance(answer, ApiError)
        assert "i0, i1" in answer.message
        assert "not in the settings" in answer.message


async def test_a_node_of_an_unknown_service_is_told_of_in_the_events() -> None:
    """At its first report, and not again with each."""
    async with Cell(inference=1) as cell:
        await cell.lead(settings=renamed())
        await cell.clock.advance(30.0)
        answer = await cell.ask(GetEvents(subject="i0"))
        assert isinstance(answer, Events)
        told = [row for row in answer.rows if row.what == "service chat is not in the settings"]
        assert len(told) == 1
