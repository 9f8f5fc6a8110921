"""What tests of real coordinators keep things in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.harness.servers import running_nats
from tests.service.places import JetStream


@pytest.fixture
async def jetstream(tmp_path: Path) -> AsyncIterator[JetStream]:
    """The real one, on a nats-server of the test's own."""
    async with running_nats(tmp_path / "nats") as server, AsyncExitStack() as stack:
        yield JetStream(server, stack)
