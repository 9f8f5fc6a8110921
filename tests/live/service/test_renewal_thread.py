"""The lease of a leader whose event loop is blocked: kept for a while, and not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from common.api import GetStatus, Status
from common.bus import Bus, connect_nats
from common.clock import SystemClock
from common.errors import Fenced, Unavailable
from coordinator.client import Client
from coordinator.service.daemon import EXIT_FENCED
from coordinator.service.leadership.jetstream_key import NatsKey
from coordinator.service.leadership.lease import LeaseValue
from coordinator.service.leadership.renewal_thread import in_thread
from coordinator.service.ports import LeasePort
from coordinator.service.settings import CoordinatorSettings
from tests.harness.fakes import FakeClock, MemoryKey, memory_lease
from tests.harness.inbox import PATIENCE_S
from tests.harness.servers import running_nats

CELL = "c"
TTL_S = 4.0
LIMIT_S = 120.0
"""Two interpreters start, and a lease runs out, on a busy machine."""
RENEWALS = 6
"""One each quarter of the TTL: so many take longer than the whole of it."""


@contextlib.asynccontextmanager
async def coordinator(
    config: Path, machine: str, block: Path
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """The real program on a machine of its own."""
    argv = ("--config", str(config), "--machine", machine, "--block", str(block))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.service.elsewhere", *argv, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Cell:
    """Two coordinators of one cell on a real nats-server, and who holds the lease."""

    def __init__(self, directory: Path, key: NatsKey, one: asyncio.subprocess.Process) -> None:
        self.one = one
        self._block = directory / "block-one"
        self._key = key

    def block(self) -> None:
        """The first one's event loop turns no more."""
        self._block.touch()

    def let_go(self) -> None:
        """It turns again."""
        self._block.unlink()

    async def held(self) -> tuple[LeaseValue, int]:
        """What stands in the key, and its revision."""
        entry = await self._key.get()
        assert entry is not None
        return msgspec.msgpack.decode(entry.value, type=LeaseValue), entry.revision

    async def until(self, *, epoch: int, revision: int = 0) -> int:
        """Wait for a holder, and for so many writes; returns the revision."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                with contextlib.suppress(AssertionError):
                    value, found = await self.held()
                    assert value.epoch <= epoch, "another one leads"
                    if value.epoch == epoch and found >= revision:
                        return found
                await asyncio.sleep(0.05)  # a key has no event; nothing is measured by it


async def until_it_answers(bus: Bus) -> None:
    """Wait for the leader to begin: with its lease alone it still reads the journal."""
    client = Client(bus, cell=CELL, tenant="ops", user="ada", timeout_s=PATIENCE_S)
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(Unavailable):
                await client.ask(GetStatus(), Status)
                return
            await asyncio.sleep(0.05)  # it has no event; nothing is measured by it


@contextlib.asynccontextmanager
async def blocked_cell(directory: Path, *, stall_s: float) -> AsyncGenerator[Cell]:
    """One coordinator that leads, its event loop blocked, and one that stands by."""
    config = directory / "coordinator.toml"
    async with running_nats(directory / "nats") as server, contextlib.AsyncExitStack() as stack:
        config.write_text(
            f'cell = "{CELL}"\nnats_url = "{server.url}"\nrebuild_wait_s = 0.0\n'
            f"leader_ttl_s = {TTL_S}\nleader_margin_s = 0.5\nleader_stall_s = {stall_s}\n"
        )
        bus = await connect_nats(server.url, identity="test", clock=SystemClock())
        stack.push_async_callback(bus.close)
        one = await stack.enter_async_context(coordinator(config, "one", directory / "block-one"))
        cell = Cell(directory, NatsKey(bus, cell=CELL, timeout_s=PATIENCE_S), one)
        await cell.until(epoch=1)
        await until_it_answers(bus)
        await stack.enter_async_context(coordinator(config, "two", directory / "block-two"))
        cell.block()
        yield cell


@pytest.mark.nats
@pytest.mark.slow
async def test_a_leader_whose_loop_is_blocked_keeps_its_lead(tmp_path: Path) -> None:
    """For longer than its TTL, by a thread that renews; afterwards it leads on."""
    async with blocked_cell(tmp_path, stall_s=100.0) as cell:
        _, revision = await cell.held()
        last = await cell.until(epoch=1, revision=revision + RENEWALS)
        cell.let_go()
        await cell.until(epoch=1, revision=last + RENEWALS)
        assert cell.one.returncode is None


@pytest.mark.nats
@pytest.mark.slow
async def test_a_leader_that_decides_nothing_more_is_replaced(tmp_path: Path) -> None:
    """The thread of a loop that stays blocked renews no more; the loop ends when it turns again."""
    async with blocked_cell(tmp_path, stall_s=2.0) as cell:
        await cell.until(epoch=2)
        cell.let_go()
        async with asyncio.timeout(LIMIT_S):
            assert await cell.one.wait() == EXIT_FENCED


# --- the thread, on a lease in memory ---------------------------------------------------------


@contextlib.asynccontextmanager
async def made(threads: list[int]) -> AsyncGenerator[LeasePort]:
    """A lease on virtual time, and the threads that make and leave it."""
    threads.append(threading.get_ident())
    yield memory_lease(MemoryKey(), clock=FakeClock(is_autojump=True))
    threads.append(threading.get_ident())


async def test_a_lease_on_a_thread_is_a_lease() -> None:
    """It is taken, kept and given up as any other one, and made and left on one other thread."""
    threads: list[int] = []
    async with in_thread(lambda: made(threads)) as lease:
        assert await lease.acquire("a", lambda: 41) == 42
        assert lease.valid_until_s > 0.0
        await lease.renew()
        with pytest.raises(Fenced, match="decisions made no progress"):
            await lease.keep(lambda: float("-inf"), stall_s=1.0)
        await lease.release()
        with pytest.raises(Fenced):
            await lease.renew()
    assert threads[0] == threads[1] != threading.get_ident()


class Unmakeable:
    """A lease that cannot be made."""

    async def __aenter__(self) -> LeasePort:
        raise Unavailable("no NATS")

    async def __aexit__(self, *_: object) -> None:
        raise AssertionError("it was never entered")


async def test_a_lease_that_cannot_be_made_ends_the_block_before_it_begins() -> None:
    """What the thread raises reaches the caller."""
    with pytest.raises(Unavailable, match="no NATS"):
        await contextlib.AsyncExitStack().enter_async_context(in_thread(Unmakeable))


def test_work_may_stall_for_less_than_the_watchdog_waits() -> None:
    """Else systemd kills the leader first, and its standby learns of no reason."""
    unit = Path(__file__).parents[3] / "systemd" / "aryl-coordinator.service"
    settings = CoordinatorSettings(cell="c", nats_url="nats://127.0.0.1:4222")
    assert f"WatchdogSec={settings.leader_stall_s + 10:.0f}s" in unit.read_text()
