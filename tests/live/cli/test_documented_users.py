"""The NATS users of docs/reference.md on a real server: each may do its part, and no other's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from common import streams, subjects
from common.api import ApiErrorCode, GetStatus
from common.bus import connect_nats
from common.clock import SystemClock
from common.messages import NodeReport, encode
from common.model import NodeRole, Pool
from common.natscalls import round_trip
from common.natsclient import NatsClient
from coordinator.cli.session import EXIT_UNREACHABLE
from coordinator.client import EXIT_CODES
from coordinator.demo.nats_server import find_binary
from coordinator.service.journal.journal_stream import Journal
from tests.harness.live.commands import aryl, environ_of
from tests.harness.node.daemon import DaemonHarness
from tests.harness.servers import client_url
from tests.test_docs_examples import INSTALL, REFERENCE, block_with, file_of

pytestmark = [pytest.mark.nats, pytest.mark.slow]

PATIENCE_S = 60.0
EXIT_DENIED = EXIT_CODES[ApiErrorCode.DENIED]
CELL = "prod"


def nats_conf(directory: Path) -> str:
    """The pages' configuration; only where it listens and stores is of this machine."""
    users = block_with(REFERENCE, "authorization {")
    text = file_of(INSTALL, "/etc/aryl/nats.conf").replace('include "users.conf"', users)
    assert users in text
    text = re.sub(r"^tls .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r'listen: "[^"]*"', 'listen: "127.0.0.1:-1"', text)
    text = re.sub(r'store_dir: "[^"]*"', f"store_dir: {json.dumps(str(directory / 'js'))}", text)
    return f"{text}\nports_file_dir: {json.dumps(str(directory))}\n"


class Site(NamedTuple):
    """A nats-server with the page's users, the page's coordinator, and where both are."""

    directory: Path
    address: str

    def url(self, user: str) -> str:
        """The URL that the page gives to a user."""
        [password] = re.findall(rf'user: "{user}", password: "([^"]*)"', REFERENCE)
        return f"nats://{user}:{password}@{self.address}"

    async def aryl(self, *arguments: str, tenant: str = "ops") -> tuple[int, str]:
        """A command as Ada gives it; exit code, and what it printed."""
        environ = environ_of(self.url("ops-ada"), cell=CELL, tenant=tenant, user="ada")
        async with asyncio.timeout(PATIENCE_S):
            said = await aryl(environ, *arguments)
        return said.code, said.out or said.err

    async def asked(self, *arguments: str) -> Any:
        """An answer as JSON, as soon as somebody leads who can give it."""
        async with asyncio.timeout(2 * PATIENCE_S):
            while True:
                code, text = await self.aryl(*arguments)
                if code != EXIT_UNREACHABLE:
                    break
                await SystemClock().sleep(0.2)
        assert code == 0, text
        return json.loads(text)

    async def until(self, *arguments: str, has: dict[str, object]) -> None:
        """Ask until some row of the answer has these fields."""
        async with asyncio.timeout(2 * PATIENCE_S):
            while True:
                rows = (await self.asked(*arguments, "-o", "json"))[f"{arguments[0]}s"]
                if any(has.items() <= row.items() for row in rows):
                    return
                await SystemClock().sleep(0.2)


@contextlib.asynccontextmanager
async def program(*argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process for the block."""
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """The page, followed."""
    (tmp_path / "nats.conf").write_text(nats_conf(tmp_path))
    async with program(str(find_binary()), "-c", str(tmp_path / "nats.conf")):
        site = Site(tmp_path, (await client_url(tmp_path)).removeprefix("nats://"))
        config = tmp_path / "coordinator.toml"
        config.write_text(
            f'cell = "{CELL}"\nnats_url = "{site.url("coordinator")}"\nrebuild_wait_s = 0.0\n'
            "pass_period_s = 1.0\n"
        )
        module = ("-m", "coordinator.service.daemon", "--config", str(config))
        async with program(sys.executable, *module):
            yield site


async def test_a_person_a_node_and_the_coordinator_speak_as_documented(site: Site) -> None:
    """Ada's questions are answered, her job runs on the node, and the node says that it ended."""
    harness = DaemonHarness(site.directory, nats_url=site.url("train-1"))
    config = harness.config(cell=CELL, node="train-1")
    try:
        await harness.spawn("--config", str(config), "--fake-nvml", str(harness.fleet))
        await site.until("node", "list", has={"node": "train-1", "role": "training"})
        job = await site.asked(
            "job", "submit", "--name", "hello", "--gpus-per-worker", "1", "-o", "json", "--", "true"
        )
        await site.until(
            "job", "list", "--all", has={"job_id": job["job_id"], "state": "succeeded"}
        )
    finally:
        await harness.close()


async def test_a_person_speaks_for_no_other_tenant(site: Site) -> None:
    """The server lets nothing of it through, and she hears at once what she may not, as whom."""
    await site.asked("status", "-o", "json")
    code, text = await site.aryl("--timeout", "3600", "status", tenant="team")
    assert code == EXIT_DENIED, text
    assert "team/ada (NATS user ops-ada) has no permission" in text
    assert "aryl.v1.prod." in text
    assert "next: compare cell, node, tenant and user" in text


async def say(url: str, subject: str, data: bytes, *, reply: str, count: int = 1) -> None:
    """Send with these credentials, and see that the server took it."""
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    client = NatsClient()
    await client.connect(url, error_cb=note)
    for _ in range(count):
        await client.publish(subject, data, reply=reply)
    await round_trip(client)
    await client.close()
    assert refused == []


async def test_nobody_uses_the_coordinators_rights_by_the_subject_of_an_answer(site: Site) -> None:
    """A node deletes no journal, a watcher deposes no leader, and a tenant writes no record."""
    before = (await site.asked("status", "-o", "json"))["status"]
    report = NodeReport(
        node="train-1", boot_id="b", sequence=1, home_pool=Pool.TRAINING, role=NodeRole.TRAINING,
        epoch=0, generation=0, instance="one", period_s=1.0,
    )  # fmt: skip
    await say(
        site.url("train-1"), subjects.node_report(CELL, "train-1"), encode(report),
        reply=f"$JS.API.STREAM.DELETE.{streams.journal(CELL)}",
    )  # fmt: skip
    await say(
        site.url("watch-cron"), subjects.api(CELL, "watch", "cron", "get_status"),
        encode(GetStatus()), reply=streams.leader_subject(CELL),
    )  # fmt: skip
    await say(
        site.url("research-grace"), subjects.api(CELL, "research", "grace", "get_status"),
        encode(GetStatus()), reply=subjects.journal(CELL), count=50,
    )  # fmt: skip
    job = ("job", "submit", "--name", "j", "--gpus-per-worker", "1", "-o", "json", "--", "true")
    assert (await site.asked(*job))["job_id"]
    after = (await site.asked("status", "-o", "json"))["status"]
    assert after["epoch"] == before["epoch"]
    assert after["bad_messages"] - before["bad_messages"] == 52
    bus = await connect_nats(
        site.url("coordinator"), identity="look", clock=SystemClock(),
        inbox=subjects.coordinator_inbox(CELL),
    )  # fmt: skip
    try:
        journal = Journal(bus, cell=CELL, writer="look", clock=SystemClock())
        await journal.open()
        kept = [one async for one in journal.read(1)]
        assert isinstance(kept[0], tuple)
        assert kept[0][0] == 1
        assert journal.foreign_count == 0
    finally:
        await bus.close()
