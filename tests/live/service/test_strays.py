"""A real coordinator on a real nats-server, and what others publish on its journal's subject."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.js.errors import NotFoundError

from common import subjects
from common.bus import connect_nats
from common.clock import SystemClock
from common.errors import ProtocolError
from coordinator.demo.nats_server import NatsServer
from coordinator.service.daemon import run
from coordinator.service.journal.jetstream import CHECKSUM_HEADER, WRITER_HEADER
from coordinator.service.settings import CoordinatorSettings
from tests.harness.inbox import PATIENCE_S
from tests.harness.servers import running_nats

pytestmark = [pytest.mark.nats, pytest.mark.slow]

CELL = "c"


@contextlib.asynccontextmanager
async def coordinator(server: NatsServer) -> AsyncIterator[asyncio.Task[None]]:
    """A coordinator that writes a record several times a second."""
    settings = CoordinatorSettings(
        cell=CELL, nats_url=server.url, rebuild_wait_s=0.0, pass_period_s=0.2, coalesce_s=0.05
    )
    running = asyncio.create_task(run(settings))
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def publish(server: NatsServer, data: bytes, headers: dict[str, str] | None = None) -> int:
    """Somebody writes on the journal's subject; the sequence that it got."""
    bus = await connect_nats(server.url, identity="somebody", clock=SystemClock())
    try:
        stream = bus.jetstream(timeout_s=PATIENCE_S)
        return (await stream.publish(subjects.journal(CELL), data, headers=headers)).seq
    finally:
        await bus.close()


async def last_sequence(server: NatsServer) -> int:
    """Where the journal ends now."""
    bus = await connect_nats(server.url, identity="reader", clock=SystemClock())
    try:
        stream = bus.jetstream(timeout_s=PATIENCE_S)
        with contextlib.suppress(NotFoundError):  # nobody has led yet
            return (await stream.stream_info(f"ARYL_JOURNAL_{CELL}")).state.last_seq
        return 0
    finally:
        await bus.close()


async def until_beyond(server: NatsServer, sequence: int, running: asyncio.Task[None]) -> None:
    """Wait until the coordinator has written past a sequence."""
    async with asyncio.timeout(PATIENCE_S * 3):
        while await last_sequence(server) <= sequence:
            assert not running.done(), running.exception()
            await asyncio.sleep(0.05)


async def test_a_stray_message_on_the_journals_subject_ends_no_coordinator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The leader writes on behind it, and so does the next one, which meets it when it reads."""
    caplog.set_level("INFO")
    async with running_nats(tmp_path / "nats") as server:
        async with coordinator(server) as leader:
            await until_logged(caplog, "leading", leader)
            stray = await publish(server, b"garbage")
            await until_beyond(server, stray, leader)
        assert f"sequences {stray} to {stray}" in caplog.text
        end = await publish(server, b"\xc1")
        caplog.clear()
        async with coordinator(server) as leader:
            await until_beyond(server, end, leader)
        assert "ignored 2 foreign messages" in caplog.text


async def test_a_coordinators_record_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    """It may hold a job, so it is not passed over: the error has its sequence and what to do."""
    async with running_nats(tmp_path / "nats") as server:
        async with coordinator(server) as leader:
            await until_beyond(server, 0, leader)
        garbage = b"\xc1"
        checksum = f"{binascii.crc32(garbage):08x}"
        headers = {WRITER_HEADER: "aryl-coordinator-of-tomorrow", CHECKSUM_HEADER: checksum}
        torn = await publish(server, garbage, headers)
        async with coordinator(server) as again:
            with pytest.raises(ProtocolError, match=f"record {torn}.*a coordinator wrote it"):
                await ended(again)


async def ended(running: asyncio.Task[None]) -> None:
    """Wait until a coordinator ends; its error."""
    async with asyncio.timeout(PATIENCE_S * 3):
        await asyncio.wait({running})
    running.result()


async def until_logged(
    caplog: pytest.LogCaptureFixture, text: str, running: asyncio.Task[None]
) -> None:
    """Wait until the coordinator has said something."""
    async with asyncio.timeout(PATIENCE_S * 3):
        while text not in caplog.messages:  # a log has no event
            assert not running.done(), running.exception()
            await asyncio.sleep(0.05)
