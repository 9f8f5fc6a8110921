"""A nats-server that is kept: one that ended, and one whose disk was full; real servers."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from common.bus import NatsBus, connect_nats
from common.clock import SystemClock
from common.errors import ArylError
from coordinator.demo.nats_keeper import NatsKeeper, takes_writes, write_error
from coordinator.demo.nats_server import NatsServer
from coordinator.service.journal.journal_stream import Journal
from tests.demo.processes import LIMIT_S
from tests.harness.node.workers import kill
from tests.harness.servers import running_nats
from tests.service.places import records

pytestmark = [pytest.mark.nats, pytest.mark.slow]


class Kept:
    """A kept server and a journal on it."""

    def __init__(self, server: NatsServer, bus: NatsBus) -> None:
        self.server = server
        self.has_room = True
        self.asked = 0
        clock = SystemClock()
        self.keeper = NatsKeeper(server, clock=clock, has_room=self._room)
        self.journal = Journal(bus, cell="c", writer="w", clock=clock)

    def _room(self, directory: Path) -> bool:
        self.asked += 1
        return self.has_room and takes_writes(directory)

    @property
    def pid(self) -> int:
        """The server's process; 0 between two of them."""
        return self.server.pid or 0

    def fill_disk(self) -> None:
        """No file of this server can grow any more: what a full disk is to it, and to nobody else.

        A server that is started anew is not meant by it.
        """
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    async def takes_records(self) -> bool:
        """Whether the journal can be written."""
        try:
            await self.journal.append(b"record")
        except ArylError:
            return False
        return True


async def until(fact: Callable[[], Awaitable[bool]], what: str) -> None:
    """Look until it is so."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await fact():  # noqa: ASYNC110 - a process has no event
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"not in {LIMIT_S:g} s: {what}") from None


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    """A server that is kept, with a journal that takes records."""
    async with running_nats(tmp_path / "nats") as server:
        bus = await connect_nats(server.url, identity="w", clock=SystemClock())
        found = Kept(server, bus)
        await found.keeper.start()
        await found.journal.open()
        assert await found.takes_records()
        try:
            yield found
        finally:
            await found.keeper.leave_alone()
            await bus.close()


async def test_a_server_whose_disk_was_full_is_started_anew_when_there_is_room(kept: Kept) -> None:
    """Not before: it would only fail again. All that was acknowledged is there."""
    kept.has_room = False
    first = kept.pid
    kept.fill_disk()
    assert not await kept.takes_records()
    assert "write error" in await write_error(kept.server.monitoring_url)

    async def is_looked_at() -> bool:
        return kept.asked >= 2

    await until(is_looked_at, "somebody looks for room")
    assert kept.pid == first
    kept.has_room = True
    await until(kept.takes_records, "the journal takes records again")
    assert kept.pid not in (0, first)
    assert [data for _, data in await records(kept.journal)][:1] == [b"record"]


async def test_a_server_that_is_well_is_left_as_it_is(kept: Kept) -> None:
    """Nobody tries its disk, and its health page says nothing."""
    assert await write_error(kept.server.monitoring_url) == ""
    assert await write_error("http://127.0.0.1:1") == ""
    assert kept.asked == 0


async def test_a_server_that_ended_is_started_again(kept: Kept) -> None:
    """As systemd would; on the same port, so that whoever knew it finds it."""
    url, first = kept.server.url, kept.pid
    kill(first)

    async def is_another() -> bool:
        return kept.pid not in (0, first)

    await until(is_another, "there is another one")
    assert kept.server.url == url
    await until(kept.takes_records, "the journal takes records")


def test_a_disk_that_takes_nothing_has_no_room(tmp_path: Path) -> None:
    """And a try leaves nothing behind where there is some."""
    assert takes_writes(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not takes_writes(Path("/proc/self"))
    assert not takes_writes(tmp_path / "missing")
