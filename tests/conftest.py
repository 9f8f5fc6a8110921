"""What every area shares: a real nats-server, a bus on it, and how hypothesis runs."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Generator, Iterator
from enum import Enum, auto
from functools import cache
from itertools import groupby, islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from agent.shim.sockets import FOLDER_NOTE, remove_folder
from common.bus import NatsBus, connect_nats
from common.clock import SystemClock
from coordinator.demo.nats_server import NatsServer
from tests.harness.servers import running_nats

# How fast a machine makes an example is no property of ours: no deadline, and slowness is no fault.
# The gate gives one tree one answer, so its examples are the same each time; to look for new ones:
# pytest --hypothesis-profile=explore
settings.register_profile(
    "gate", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("gate"), derandomize=False)
settings.load_profile("gate")


HERE = Path(__file__).parent
COMPUTING = {"engine", "policies", "properties", "sim", "workloads"}
"""Areas of tests that wait for nothing."""

LIVE = "live"
"""The area of tests that start daemons and servers as processes; the marker of its tests, and of
those elsewhere that are slow because of a nats-server."""

WAITS_PER_CELL = 15
"""How many times as long a test of a cell takes as another one that waits."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is looked for among thousands of tests, which stay, nor among them later on."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, object, object]:
    """Live tests are marked before others choose by markers; what is left gets its order."""
    for item in items:
        if _area(item.path) == LIVE or all(map(item.get_closest_marker, ("nats", "slow"))):
            item.add_marker(LIVE)
    found = yield
    items[:] = _in_parts(items)
    return found


def _in_parts(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests that wait begin first, those of whole cells before all; the others compute.

    A long one that began last would be waited for alone, with both cores idle. So two thirds of the
    workers of pytest-xdist begin with tests that wait, and all but one of these with cells, which
    would be in each other's way if they were more; the others keep two cores busy meanwhile. With
    `--dist worksteal` it gives each worker a part of the list without gaps to begin with, so the
    list is put together of such parts. A file stays in one part: its tests may share a cell, and
    two workers would start one each.
    """
    parts = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with_waits = max(1, parts - max(1, parts // 3))
    kinds: dict[_Kind, list[pytest.Item]] = {kind: [] for kind in _Kind}
    for item in items:
        kinds[_kind(item)].append(item)
    begun: list[list[pytest.Item]] = [[] for _ in range(with_waits)]
    with_cells = max(1, with_waits - 1)
    for _, together in groupby(kinds[_Kind.CELL], key=lambda item: item.path):
        min(begun[:with_cells], key=len).extend(together)
    loads = [len(each) * WAITS_PER_CELL for each in begun]
    for item in kinds[_Kind.WAITS]:
        at = loads.index(min(loads))
        begun[at].append(item)
        loads[at] += 1
    length = -(-len(items) // parts)
    computing, alone = kinds[_Kind.COMPUTES], length * (parts - with_waits)
    rest = iter([*kinds[_Kind.OTHER], *computing[alone:]])
    ordered: list[pytest.Item] = []
    for each in begun:
        ordered += [*each, *islice(rest, max(0, length - len(each)))]
    return [*ordered, *computing[:alone], *rest]


class _Kind(Enum):
    """What a test does most of its time."""

    CELL = auto()
    WAITS = auto()
    COMPUTES = auto()
    OTHER = auto()


def _kind(item: pytest.Item) -> _Kind:
    area = _area(item.path)
    if area == LIVE and item.path.parent.name in (LIVE, "cell"):
        return _Kind.CELL if item.get_closest_marker("nats") is not None else _Kind.OTHER
    if area in COMPUTING:
        return _Kind.COMPUTES
    return _Kind.OTHER if item.get_closest_marker("slow") is None else _Kind.WAITS


@cache
def _area(path: Path) -> str:
    """The directory of `tests` that a file is in or below; empty where it is in none."""
    *directories, _ = path.relative_to(HERE).parts
    return directories[0] if directories else ""


@pytest.fixture(scope="session", autouse=True)
def without_socket_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Paths of tests are long, so shims put their sockets elsewhere; tests kill some of them."""
    yield
    for note in tmp_path_factory.getbasetemp().rglob(FOLDER_NOTE):
        remove_folder(str(note.parent))


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
