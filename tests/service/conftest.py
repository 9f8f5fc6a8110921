"""Fixtures of the coordinator's tests: the places that it keeps things in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.harness.servers import running_nats
from tests.service.places import JetStream, Memory, Place


@pytest.fixture
async def jetstream(tmp_path: Path) -> AsyncIterator[JetStream]:
    """Only the real one, for what has no fake."""
    async with running_nats(tmp_path / "nats") as server, AsyncExitStack() as stack:
        yield JetStream(server, stack)


@pytest.fixture(params=["memory", pytest.param("jetstream", marks=pytest.mark.nats)])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """Both of them, one after the other."""
    if request.param == "memory":
        yield Memory()
        return
    async with running_nats(tmp_path / "nats") as server, AsyncExitStack() as stack:
        yield JetStream(server, stack)
