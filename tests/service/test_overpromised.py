"""Guarantees that the cell cannot keep all: said by whoever takes the lead and knows the nodes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coordinator.engine.state.settings import TenantSettings
from tests.service.cell import Cell, make_settings

SAID = (
    "tenants: {} GPUs are guaranteed, and the training nodes have 8: "
    "not all guarantees can be kept at a time"
)


@pytest.mark.parametrize(("gpus", "is_said"), [(9, True), (8, False)])
async def test_the_next_leader_says_that_guarantees_are_too_many(
    gpus: int, *, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Only roots count, as children have part of theirs; a new cell knows no node and says nothing.

    What a service may lend is not counted: nobody may count on it.
    """
    tenants = (
        TenantSettings(name="division", guarantee_gpus=gpus),
        TenantSettings(name="team", parent="division", guarantee_gpus=gpus),
    )
    made = make_settings()
    settings = replace(made, engine=replace(made.engine, tenants=tenants))
    async with Cell(training=1, inference=1) as cell:
        await cell.lead("one", settings)
        assert "are guaranteed" not in caplog.text
        await cell.leaders[0].crash()
        await cell.lead("two", settings)
    assert (SAID.format(gpus) in caplog.text) == is_said
