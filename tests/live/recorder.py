"""Watches a live cell from outside: servers by their health, nodes by the router, leaders by their
answers, requests by their client. Must not know faults, nor judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import aiohttp
from msgspec import Struct

from common.api import GetStatus, Status
from common.clock import SystemClock
from common.errors import ArylError
from coordinator.client import Client
from tests.live.hurt_cell import LiveCell
from tests.live.recording import Down, Lead, Up

LOOK_S = 0.25
ANSWER_S = 2.0
STATUS_S = 0.1
GAP_S = 2.0
"""Two looks further apart than this are no proof of what was between them."""


def now_s() -> float:
    """The boot clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _Seen(Struct):
    down_since_s: float | None = None
    up_since_s: float | None = None
    looked_at_s: float = 0.0


class Recorder:
    """Looks again and again until cancelled; its lists are true at any time."""

    def __init__(self, cell: LiveCell, client: Client, *, calm_req_per_s: float) -> None:
        self.downs: list[Down] = []
        self.ups: list[Up] = []
        self.leads: list[Lead] = []
        self.answered = 0
        self.refused = 0
        self.req_per_s = calm_req_per_s
        self._cell = cell
        self._client = client
        self._urls = {
            node.name: f"http://127.0.0.1:{node.server_port}/health"
            for node in cell.nodes
            if node.server_port
        }
        self._seen = {name: _Seen() for name in self._urls}
        self._clock = SystemClock()
        self._asked: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Watch until cancelled."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._for_ever(lambda: self._look(session), LOOK_S))
            group.create_task(self._for_ever(self._ask_status, STATUS_S))
            group.create_task(self._drive(session))

    async def _for_ever(self, look: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while True:
            await look()
            await self._clock.sleep(pause_s)

    def finish(self) -> tuple[tuple[Down, ...], tuple[Up, ...]]:
        """All spells, those that last included."""
        downs, ups = list(self.downs), list(self.ups)
        for name, seen in self._seen.items():
            if seen.down_since_s is not None:
                downs.append(Down(node=name, begin_s=seen.down_since_s, end_s=None))
            if seen.up_since_s is not None:
                ups.append(Up(node=name, begin_s=seen.up_since_s, end_s=seen.looked_at_s))
        return tuple(downs), tuple(ups)

    @property
    def do_all_serve(self) -> bool:
        """Whether every node of the service was up at the last look."""
        return all(seen.down_since_s is None for seen in self._seen.values())

    # --- servers

    async def _look(self, session: aiohttp.ClientSession) -> None:
        routed = await self._routed(session)
        health = await asyncio.gather(*(self._is_healthy(session, n) for n in self._urls))
        if routed is None:
            return
        for name, is_healthy in zip(self._urls, health, strict=True):
            self._note(name, is_up=is_healthy, serves=is_healthy and name in routed)

    async def _routed(self, session: aiohttp.ClientSession) -> set[str] | None:
        """Nodes that the router sends to; None where it does not answer."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(f"{self._cell.router_url}/nodes") as answer:
                nodes: dict[str, dict[str, object]] = await answer.json()
                return {name for name, node in nodes.items() if node["is_routed"]}
        return None

    async def _is_healthy(self, session: aiohttp.ClientSession, name: str) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(self._urls[name]) as answer:
                return answer.status == 200
        return False

    def _note(self, name: str, *, is_up: bool, serves: bool) -> None:
        seen, at_s = self._seen[name], now_s()
        if serves and seen.down_since_s is not None:
            self.downs.append(Down(node=name, begin_s=seen.down_since_s, end_s=at_s))
            seen.down_since_s = None
        elif not serves and seen.down_since_s is None:
            seen.down_since_s = at_s
        is_gap = at_s - seen.looked_at_s > GAP_S
        if seen.up_since_s is not None and (not is_up or is_gap):
            self.ups.append(Up(node=name, begin_s=seen.up_since_s, end_s=seen.looked_at_s))
            seen.up_since_s = None
        if is_up and seen.up_since_s is None:
            seen.up_since_s = at_s
        seen.looked_at_s = at_s

    # --- leaders and requests

    async def _ask_status(self) -> None:
        with contextlib.suppress(ArylError):
            epoch = (await self._client.ask(GetStatus(), Status)).epoch
            if not self.leads or epoch > self.leads[-1].epoch:
                self.leads.append(Lead(epoch=epoch, at_s=now_s()))

    async def _drive(self, session: aiohttp.ClientSession) -> None:
        """Requests at a steady rate, whatever is answered."""
        try:
            while True:
                task = asyncio.create_task(self._request(session))
                self._asked.add(task)
                task.add_done_callback(self._asked.discard)
                await self._clock.sleep(1 / self.req_per_s)
        finally:
            for task in tuple(self._asked):
                task.cancel()
            await asyncio.gather(*self._asked, return_exceptions=True)

    async def _request(self, session: aiohttp.ClientSession) -> None:
        url = f"{self._cell.router_url}/v1/completions"
        is_answered = False
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=5 * ANSWER_S)
            async with session.post(url, json={"prompt": "x"}, timeout=timeout) as answer:
                await answer.read()
                is_answered = answer.status == 200
        self.answered += is_answered
        self.refused += not is_answered
