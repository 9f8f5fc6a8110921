"""Floods of events: no journal record grows larger than nats-server takes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from msgspec import structs

from common.api import ApiError, ApiErrorCode, Submit, Submitted
from common.bus import NatsBus, connect_nats
from common.clock import SystemClock
from common.errors import ConfigError, Fenced
from common.jobspec import MAX_SPEC_BYTES
from common.messages import decode
from common.model import JobId, JobState
from common.natsrules import MAX_PAYLOAD_BYTES
from coordinator.demo.nats_server import find_binary
from coordinator.engine.state.events import JobSubmitted
from coordinator.service.decision_loop import BATCH_BYTES
from coordinator.service.journal.journal_stream import Journal
from tests.harness.cluster.coordinator import CELL, Cell, job, make_spec
from tests.harness.fakes import MemoryJournal
from tests.harness.servers import client_url

FLOOD = 120
"""Jobs at once: with the largest environment of each three records, and no more than fit."""


async def test_a_flood_of_submits_is_written_in_several_records_in_order() -> None:
    """Each is acknowledged, once, in the order of their arrival; then they run."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        before = len(cell.journal())
        spec = make_spec("flood")
        padding = {"X": "x" * (MAX_SPEC_BYTES - 1000)}
        asked = [
            cell.request(
                Submit(
                    spec=structs.replace(spec, name=f"j{number}", env=padding),
                    request_id=f"r{number}",
                )
            )
            for number in range(FLOOD)
        ]
        replies = await cell.meanwhile(
            asyncio.gather(*(cell.caller.request(*one, timeout_s=30.0) for one in asked))
        )
        ids = [decode(reply, Submitted).job_id for reply in replies]
        flood = cell.journal()[before:]
        wrote = [
            [
                entry.event.job_id
                for entry in record.entries
                if isinstance(entry.event, JobSubmitted)
            ]
            for _, record in flood
        ]
        assert [job_id for record in wrote for job_id in record] == ids
        assert sum(bool(record) for record in wrote) >= FLOOD * MAX_SPEC_BYTES // BATCH_BYTES
        assert max(map(len, cell.records)) < BATCH_BYTES + 2 * MAX_SPEC_BYTES < MAX_PAYLOAD_BYTES
        entries = [job(coordinator, JobId(job_id)) for job_id in ids]
        await cell.until(lambda: any(entry.state == JobState.RUNNING for entry in entries))


class SmallJournal(MemoryJournal):
    """A journal whose server takes no record of a job."""

    async def append(self, record: bytes) -> int:
        """As the real one, which looks before it sends."""
        if b"job_submitted" in record:
            raise ConfigError("nats-server: max_payload is 1, expected at least 2")
        return await super().append(record)


async def test_who_cannot_write_a_record_steps_down_and_says_why() -> None:
    """Trying again would be for ever; whoever asked hears that nothing was promised."""
    async with Cell() as cell:
        await cell.lead(journal=SmallJournal(cell.records))
        reply = await cell.ask(Submit(spec=make_spec(), request_id="r"))
        assert isinstance(reply, ApiError)
        assert reply.code == ApiErrorCode.UNAVAILABLE
        with pytest.raises(Fenced, match="max_payload is 1"):
            await cell.meanwhile(cell.leaders[0].task)


@pytest.mark.nats
async def test_a_server_that_takes_too_little_is_refused_before_the_first_record(
    tmp_path: Path,
) -> None:
    """With NATS's own default a flood would be refused for ever; the error says what to set."""
    config = tmp_path / "nats.conf"
    ports = json.dumps(str(tmp_path))
    config.write_text(
        f'listen: "127.0.0.1:-1"\nports_file_dir: {ports}\njetstream {{ store_dir: {ports} }}\n'
    )
    server = await asyncio.create_subprocess_exec(
        str(find_binary()), "-c", str(config), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        bus = await connect_nats(await client_url(tmp_path), identity="c", clock=SystemClock())
        journal = Journal(bus, cell=CELL, writer="w", clock=SystemClock())
        with pytest.raises(ConfigError, match=f"max_payload is .*{MAX_PAYLOAD_BYTES}"):
            await journal.open()
        await bus.close()
    finally:
        server.terminate()
        await server.wait()


@pytest.mark.nats
async def test_a_record_that_no_server_would_take_is_no_reason_to_try_again(
    nats_bus: NatsBus,
) -> None:
    """The error names the setting, and the journal is as it was."""
    journal = Journal(nats_bus, cell=CELL, writer="w", clock=SystemClock())
    await journal.open()
    with pytest.raises(ConfigError, match=r"max_payload is .* for one journal record"):
        await journal.append(bytes(MAX_PAYLOAD_BYTES + 1))
    assert await journal.append(b"one") == 1
