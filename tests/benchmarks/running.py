"""A nats-server, coordinators and a pretend fleet as real processes, for benchmarks."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from common.api import GetStatus, Status, Submit, Submitted
from common.bus import NatsBus, connect_nats
from common.clock import SystemClock
from common.errors import ArylError
from coordinator.client import Client
from coordinator.demo.nats_server import NatsServer
from coordinator.demo.supervise import Supervisor, Unit
from tests.harness.builders import make_spec

ROOT = Path(__file__).parents[2]
CELL = "bench"
LIMIT_S = 120.0
ASK_S = 2.0
SPEC = make_spec(name="bench", command=("true",), workers=(1, 1), gpus_per_worker=1)


class RunningCell:
    """The processes of one cell, and a caller."""

    def __init__(self, directory: Path, url: str, units: Supervisor, bus: NatsBus) -> None:
        self.units = units
        self.client = Client(bus, cell=CELL, tenant="ops", user="bench", timeout_s=10.0)
        self._directory = directory
        self._url = url
        self._asking = Client(bus, cell=CELL, tenant="ops", user="bench", timeout_s=ASK_S)
        self._config = directory / "coordinator.toml"
        self._config.write_text(f'cell = "{CELL}"\nnats_url = "{url}"\n')

    def start_coordinator(self, machine: str) -> None:
        """With the default settings, on a machine that no other coordinator can look at."""
        argv = ("--config", str(self._config), "--machine", machine)
        self._start(machine, "tests.service.elsewhere", *argv)

    async def until_stands_by(self, machine: str) -> None:
        """Wait until a coordinator listens for the lease; its log has the words."""
        log = self._directory / "logs" / f"{machine}.log"
        async with asyncio.timeout(LIMIT_S):
            while not log.exists() or "standing by" not in log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    def start_fleet(self, nodes: int, *, hz: float = 1.0) -> None:
        """So many nodes that report so often."""
        argv = ("--url", self._url, "--cell", CELL, "--nodes", str(nodes), "--hz", str(hz))
        self._start("fleet", "tests.benchmarks.fleet", *argv)

    def _start(self, name: str, module: str, *argv: str) -> None:
        env = {"PYTHONPATH": str(ROOT)}
        command = (sys.executable, "-m", module, *argv)
        self.units.start(Unit(name=name, argv=command, env=env, is_restarted=False))

    def cpu_s(self, name: str) -> float:
        """CPU time of a process so far."""
        fields = Path(f"/proc/{self.units.pid(name)}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def submit(self, request_id: str) -> float:
        """Submit one job; the seconds that it took."""
        began_s = time.monotonic()
        await self.client.ask(Submit(spec=SPEC, request_id=request_id), Submitted)
        return time.monotonic() - began_s

    async def until_led(self, *, above_epoch: int = 0, nodes_heard: int = 0) -> Status:
        """Ask until a leader of a later epoch answers, which hears so many nodes."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    found = await self._asking.ask(GetStatus(), Status)
                    if found.epoch > above_epoch and found.nodes_heard >= nodes_heard:
                        return found
                except ArylError:
                    pass
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_cell(directory: Path) -> AsyncGenerator[RunningCell]:
    """A nats-server and nothing else yet; no process outlives the block."""
    clock = SystemClock()
    nats = NatsServer(directory / "nats", clock=clock)
    units = Supervisor(directory / "logs", clock=clock)
    url = await nats.start()
    bus = await connect_nats(url, identity="bench", clock=clock)
    try:
        yield RunningCell(directory, url, units, bus)
    finally:
        await bus.close()
        await units.stop()
        await nats.stop()
