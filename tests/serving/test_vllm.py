"""A service of real vLLM behind haproxy through lends, reclaims and the death of all daemons.

`make test-serving` runs it; it needs 3.4 GB for vLLM and some fifteen minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agent.hooks.route import TIMEOUT_S, haproxy_ask
from common.api import ListNodes, Nodes, Submit, Submitted
from common.clock import SystemClock
from common.errors import ArylError
from common.model import CheckpointSpec, NodeRole
from coordinator.client import Client
from coordinator.demo.cell import COORDINATOR
from tests.harness.builders import make_spec
from tests.serving.load import Figures, Load
from tests.serving.vllm_cell import BACKEND, GRACE_S, MODEL, VllmCell

VENV = Path(os.environ.get("ARYL_SERVING_VENV", ".venv-serving")).absolute()
PATIENCE_S = 480.0
LOOK_S = 0.5
QUIET_PER_S, BUSY_PER_S = 0.25, 2.5
"""One node carries the first with room to spare; the second needs two."""
HELD_REQUESTS = 10
"""Each state is held until so many more are served in it."""
RESULTS = os.environ.get("ARYL_SERVING_RESULTS")
"""A file for the figures of docs/benchmarks.md; none by default."""


class Story:
    """What happened, for docs/benchmarks.md."""

    def __init__(self, load: Load) -> None:
        self.parts: dict[str, dict[str, object]] = {}
        self._load = load
        self._began_s = time.monotonic()

    def part(self, name: str, **more: float) -> Figures:
        """End a part of the run."""
        figures = self._load.part()
        ordered = sorted(figures.latencies_s) or [0.0]
        self.parts[name] = {
            "served": figures.served,
            "streamed": figures.streamed,
            "failed": len(figures.failed),
            "p50_s": round(ordered[len(ordered) // 2], 2),
            "max_s": round(ordered[-1], 2),
            "took_s": round(time.monotonic() - self._began_s, 1),
            **{key: round(value, 1) for key, value in more.items()},
        }
        self._began_s = time.monotonic()
        return figures


@pytest.fixture
async def cell(tmp_path: Path) -> AsyncIterator[VllmCell]:
    """The cell, with everything in it started."""
    python = VENV / "bin/python"
    model = tmp_path / "model"
    model.mkdir()
    script = Path(__file__).with_name("tiny_model.py")
    subprocess.run(  # noqa: ASYNC221 - nothing else runs yet
        [python, script, model], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    running = VllmCell(tmp_path / "cell", clock=SystemClock(), python=python, model=model)
    try:
        await running.start_nats()
        await running.start()
        yield running
    finally:
        await running.stop()


async def roles(client: Client) -> dict[str, NodeRole]:
    """What each node is; of nobody where no coordinator answers."""
    with contextlib.suppress(ArylError):
        rows = (await client.ask(ListNodes(), Nodes)).rows
        return {row.node: row.role for row in rows if row.is_heard}
    return {}


async def until_lent(client: Client, count: int) -> tuple[str, ...]:
    """Return the lent nodes, once there are so many and the others serve."""
    clock = SystemClock()
    async with clock.timeout(PATIENCE_S):
        while True:
            now = await roles(client)
            lent = tuple(node for node, role in now.items() if role == NodeRole.ON_LOAN)
            serving = [node for node, role in now.items() if role == NodeRole.SERVING]
            if (len(lent), len(serving)) == (count, 2 - count):
                return lent
            await clock.sleep(LOOK_S)


async def until(holds: Callable[[], bool]) -> None:
    """Return once it holds."""
    clock = SystemClock()
    async with clock.timeout(PATIENCE_S):
        while not holds():
            await clock.sleep(LOOK_S)


async def held(load: Load) -> None:
    """Return when this state has served requests that were asked in it."""
    enough = load.figures.served + HELD_REQUESTS
    await until(lambda: load.figures.served >= enough)


def is_routed(cell: VllmCell, node: str) -> bool:
    """By haproxy itself: an operator's hand lets it have requests, and it is healthy."""
    lines = haproxy_ask(str(cell.socket), "show stat", TIMEOUT_S).splitlines()
    names = lines[0].lstrip("# ").split(",")
    rows = [dict(zip(names, line.split(","), strict=False)) for line in lines[1:]]
    return any(
        row.get("pxname") == BACKEND and row.get("svname") == node and row["status"] == "UP"
        for row in rows
    )


class Day:
    """What an operator's day does to the cell; each part ends in its figures."""

    def __init__(self, cell: VllmCell, client: Client, load: Load) -> None:
        self.story = Story(load)
        self._cell = cell
        self._client = client
        self._load = load
        self._daemons = (COORDINATOR, *(cell.agent_unit(node.name) for node in cell.nodes))

    async def quiet(self, name: str) -> None:
        """Little load lends a node."""
        self._load.set_rate(QUIET_PER_S)
        began_s = time.monotonic()
        await until_lent(self._client, 1)
        lent_s = time.monotonic() - began_s
        await held(self._load)
        self.story.part(name, lent_s=lent_s)

    async def busy(self, name: str) -> None:
        """Much load calls it home."""
        self._load.set_rate(BUSY_PER_S)
        began_s = time.monotonic()
        await until_lent(self._client, 0)
        home_s = time.monotonic() - began_s
        await held(self._load)
        self.story.part(name, home_s=home_s)

    async def all_dead(self, name: str) -> None:
        """Without any daemon the lent node comes home by itself."""
        [lent] = await until_lent(self._client, 1)
        await until(lambda: not is_routed(self._cell, lent))
        began_s = time.monotonic()
        await self._kill()
        await until(lambda: is_routed(self._cell, lent))
        home_s = time.monotonic() - began_s
        await held(self._load)
        self.story.part(name, home_s=home_s)
        await self._start()

    async def all_restarted(self, name: str) -> None:
        """All daemons die at once and are started at once, while a node is lent."""
        await self._kill()
        await self._start()
        await until_lent(self._client, 1)
        await held(self._load)
        self.story.part(name)

    async def _kill(self) -> None:
        await asyncio.gather(self._cell.units.kill(*self._daemons), self._cell.kill_nats())

    async def _start(self) -> None:
        await self._cell.start_nats()
        self._cell.start_daemons()


async def test_no_request_fails_through_lends_reclaims_and_the_death_of_all_daemons(
    cell: VllmCell,
) -> None:
    """Whatever the load does and whichever daemon dies, haproxy finds a vLLM that answers."""
    client = await cell.client(user="ann")
    await until_lent(client, 0)
    job = make_spec(
        name="elastic",
        command=("sleep", "1000000"),
        gpus_per_worker=1,
        workers=(2, 4),
        checkpoint=CheckpointSpec(grace_s=GRACE_S),  # all that the service lets a guest have
    )
    await client.ask(Submit(spec=job, request_id="one"), Submitted)
    load = Load(cell.router_url, model=MODEL, seed=24)
    day = Day(cell, client, load)
    asking = asyncio.create_task(load.run())
    try:
        await day.quiet("quiet: one node lent")
        await day.busy("busy: called home")
        await day.quiet("quiet: lent again")
        await day.all_restarted("all daemons killed and started while lent")
        await day.all_dead("all daemons dead: home by itself")
        await day.quiet("daemons started: lent again")
        await day.busy("busy: called home again")
    finally:
        load.set_rate(0.0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        last = day.story.part("the rest")
        if RESULTS:
            Path(RESULTS).write_text(f"{json.dumps(day.story.parts, indent=1)}\n")  # noqa: ASYNC240
    failed = [name for name, part in day.story.parts.items() if part["failed"]]
    assert failed == [], last.failed
