"""Fixtures that every area shares: a real nats-server and a bus on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.bus import NatsBus, connect_nats
from common.clock import SystemClock
from coordinator.service.natsserver import NatsServer
from tests.servers import running_nats


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A nats-server of this test's own, on a free port, with an empty store."""
    async with running_nats(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def nats_bus(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    """A bus on `nats_server`, identity `test`."""
    bus = await connect_nats(nats_server.url, identity="test", clock=SystemClock())
    yield bus
    await bus.close()
