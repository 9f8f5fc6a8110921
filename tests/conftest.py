"""What every area shares: a real nats-server, a bus on it, and how hypothesis runs."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Generator
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from common.bus import NatsBus, connect_nats
from common.clock import SystemClock
from coordinator.service.natsserver import NatsServer
from tests.servers import running_nats

# How fast a machine makes an example is no property of ours: no deadline, and slowness is no fault.
# The gate gives one tree one answer, so its examples are the same each time; to look for new ones:
# pytest --hypothesis-profile=explore
settings.register_profile(
    "gate", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("gate"), derandomize=False)
settings.load_profile("gate")


HERE = Path(__file__).parent
COMPUTING = {"engine", "policies", "sim", "workloads"}
"""Areas of tests that wait for nothing."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is looked for among thousands of tests, which stay, nor among them later on."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole cells begin first, in three workers of four or five; the others compute.

    A cell waits more than it computes, and a long one that began last would be waited for alone.
    pytest-xdist with `--dist worksteal` gives each worker a part of the list without gaps to begin
    with, so the list is put together of such parts.
    """
    parts = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with_cells = -(-3 * parts // 5)
    by_area: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_area.setdefault(_area(item.path), []).append(item)
    cells = by_area.pop("cell", [])
    computing = [item for area in sorted(COMPUTING) for item in by_area.pop(area, [])]
    others = [item for area in by_area.values() for item in area]
    length = -(-len(items) // parts)
    at = min(len(computing), length * (parts - with_cells))
    first, rest = computing[:at], iter([*others, *computing[at:]])
    ordered: list[pytest.Item] = []
    for part in range(with_cells):
        begun = cells[part::with_cells]
        ordered += [*begun, *islice(rest, max(0, length - len(begun)))]
    items[:] = [*ordered, *first, *rest]


@cache
def _area(path: Path) -> str:
    """The directory of `tests` that a file is in; empty where it is in none."""
    return path.parent.name if path.parent.parent == HERE else ""


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
