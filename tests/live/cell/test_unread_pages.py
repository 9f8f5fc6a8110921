"""Metrics pages that cannot be read, on a real cell: no load is taken for none."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientError, ClientSession, web

from common.api import Describe, Description, Events, GetEvents, UnknownLoadRow
from common.model import NodeRole
from tests.harness.live.cell import LiveHarness, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

REQUESTS = 100
"""At 16 a second the cell makes some 12 loan passes meanwhile."""


class Pages:
    """A proxy between agents and metrics pages, which can keep its answers to itself."""

    def __init__(self) -> None:
        self.url = ""
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncGenerator[Pages]:
        """Answer `/PORT/metrics` for as long as the block runs."""
        application = web.Application()
        application.router.add_get("/{port}/metrics", self._answer)
        runner = web.AppRunner(application, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            self.url = f"http://127.0.0.1:{port}"
            yield self
        finally:
            self.may_answer.set()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        await self.may_answer.wait()
        url = f"http://127.0.0.1:{request.match_info['port']}/metrics"
        try:
            async with ClientSession() as session, session.get(url) as page:
                return web.Response(text=await page.text(), status=page.status)
        except ClientError:  # the server starts or is stopped
            return web.Response(status=502)

    def put_before(self, config: Path) -> None:
        """Have an agent that starts anew read its server's page here."""
        text = config.read_text()
        found = re.sub(r'"http://127\.0\.0\.1:(\d+)/metrics"', rf'"{self.url}/\1/metrics"', text)
        assert found != text
        config.write_text(found)


async def asked(harness: LiveHarness) -> None:
    """Wait for so many requests more that the cell has decided several times meanwhile."""
    before = (await harness.cell.router_stats())["requests_total"]

    async def is_over() -> bool:
        return bool((await harness.cell.router_stats())["requests_total"] >= before + REQUESTS)

    await harness.until(f"{REQUESTS} requests more", is_over)


async def service(harness: LiveHarness) -> Description:
    return await harness.client.ask(Describe(kind="service", name="chat"), Description)


async def test_pages_that_go_slow_lend_nothing_and_bring_home_what_is_lent(tmp_path: Path) -> None:
    """And no request is refused, though a job wants more nodes than there are."""
    async with (
        Pages().open() as pages,
        running_cell(tmp_path, training_nodes=1, inference_nodes=3) as harness,
    ):
        names = [node.name for node in harness.cell.nodes if node.server_port]
        for node in harness.cell.nodes:
            if node.server_port:
                pages.put_before(node.config)
                harness.kill_agent(node.name)
        spec = harness.training("elastic", work_s=600, workers=(4, 12), save_every_s=600)
        await harness.submit(msgspec.structs.replace(spec, expected_runtime_s=600.0))
        await harness.until_role(NodeRole.ON_LOAN, 2)

        pages.may_answer.clear()
        await harness.until_role(NodeRole.SERVING, 3)
        lent = await harness.loans()
        assert {loan.state for loan in lent} == {"returned"}
        assert all("unknown for more than 4 s" in loan.reclaim_reason for loan in lent)

        async def is_told() -> bool:
            found = (await service(harness)).service
            unknown = found.load_unknown if found else None
            return isinstance(unknown, UnknownLoadRow) and unknown.nodes == tuple(names)

        await harness.until("the load of all nodes is unknown", is_told)
        assert (await harness.status()).loads_unknown == ("chat (3 of 3 nodes)",)
        # Ten a node, so it needs all three with the one of headroom: no sample falls to a half.
        async with harness.load(req_per_s=16.0):
            await asked(harness)
            assert len(await harness.loans()) == len(lent)
            assert len(await harness.serving()) == 3
            pages.may_answer.set()

            async def is_known() -> bool:
                found = (await service(harness)).service
                return found is not None and found.load_unknown is msgspec.UNSET

            await harness.until("the load is known again", is_known)
            await asked(harness)
            assert len(await harness.serving()) == 3
        rows = (await harness.client.ask(GetEvents(subject="service/chat"), Events)).rows
        told = [row.what for row in rows if row.subject == "chat" and "load" in row.what]
        assert told[:1] + told[-1:] == ["load unknown", "load known again"]
        assert (await harness.cell.router_stats())["refused_total"] == 0
        await harness.until_role(NodeRole.ON_LOAN, 2)
