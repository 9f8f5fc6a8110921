"""A real `python -m agent.daemon` on a real nats-server, with fake GPUs and a pretend server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import msgspec

from agent.core.state import Memory
from agent.lease import last_resort_process
from agent.storage.ledger import Ledger
from common import subjects
from common.bus import BusMessage, NatsBus, connect_nats
from common.clock import SystemClock
from common.messages import (
    DesiredReply,
    DesiredState,
    LogReply,
    LogRequest,
    NodeReport,
    RenewReply,
    RenewRequest,
    StopOrder,
    WorkerOrder,
    WorkerPhase,
    WorkerReport,
    decode,
    encode,
)
from common.model import GpuUuid, JobId, Lease, LeaseId, NodeRole, ServiceName, WorkerKey
from coordinator.demo.nats_server import NatsServer
from tests.harness.node.workers import PATIENCE_S, WorkerHarness, is_alive, kill, make_order
from tests.harness.servers import running_nats

ROOT = Path(__file__).parents[3]
NODE_SITE = Path(__file__).parent / "node_site"
"""Says of packages that only a coordinator has that they are not there."""
LOOK_S = 0.05
KEY = WorkerKey(JobId("job-1"), 1, 0)
PAGE = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:request_success_total 7\n"


class DaemonHarness:
    """One node's files and processes, and a coordinator that says what a test wants."""

    def __init__(self, directory: Path, *, nats_url: str) -> None:
        self.directory = directory
        self.nats_url = nats_url
        self.clock = SystemClock()
        self.use_state_dir(directory / "state")
        self.reports: list[NodeReport] = []
        self.is_renewing = True
        self.bus: NatsBus | None = None
        self.nats: NatsServer | None = None
        self.port = 0
        self._processes: list[asyncio.subprocess.Process] = []
        self._generation = 0
        self.fleet = directory / "fleet.toml"
        self.fleet.write_text(
            # A name of its own: processes of another test are on other GPUs.
            f'name = "{uuid.uuid4()}"\n[[gpu]]\ncount = 2\nmodel = "H100"\nmemory_bytes = 80000\n'
        )

    def use_state_dir(self, path: Path) -> None:
        """Where the agent of the next settings file keeps its state."""
        self.state_dir = path
        self.workers = WorkerHarness(path / "workers")

    # --- files --------------------------------------------------------------------------------

    def config(self, *, name: str = "agent", inference: bool = False, **changes: Any) -> Path:
        """A settings file; `changes` replace or add keys, None removes one."""
        values: dict[str, object] = {
            "cell": "c1",
            "node": "n1",
            "home_pool": "inference" if inference else "training",
            "nats_url": self.nats_url,
            "state_dir": str(self.state_dir),
            "report_period_s": 0.2,
            "step_period_s": 0.1,
            "worker_starter": "detached",
            "last_resort": "detached",
            "is_root_allowed": True,
            "vacate_grace_s": 1.0,
        }
        if inference:
            values["service"] = "chat"
        lines = [
            f"{key} = {json.dumps(value)}"
            for key, value in (values | changes).items()
            if value is not None
        ]
        path = self.directory / f"{name}.toml"
        path.write_text("\n".join(lines + (self._server() if inference else [])) + "\n")
        return path

    def _server(self) -> list[str]:
        url, up, routed = f"http://127.0.0.1:{self.port}", self.mark("up"), self.mark("routed")
        commands = {
            "start": f"touch {up}", "stop": f"rm -f {up}",
            "route": f"touch {routed}", "unroute": f"rm -f {routed}",
        }  # fmt: skip
        return [
            "[server]",
            f'health_url = "{url}/health"',
            f'metrics_url = "{url}/metrics"',
            *(f"{name} = {json.dumps(['sh', '-c', text])}" for name, text in commands.items()),
        ]

    def mark(self, name: str) -> Path:
        """A file whose presence means something; `up` is the pretend server."""
        return self.directory / name

    def memory(self) -> Memory | None:
        """What the ledger has on disk; read while no agent writes."""
        return Ledger(self.state_dir).load()

    # --- processes ----------------------------------------------------------------------------

    async def spawn(
        self, *arguments: str, cwd: Path = ROOT, program: str = "agent.daemon"
    ) -> asyncio.subprocess.Process:
        """The daemon with these arguments."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", program, *arguments,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": f"{NODE_SITE}:{ROOT}"},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._processes.append(process)
        return process

    async def start(
        self, config: Path, *, cwd: Path = ROOT, program: str = "agent.daemon"
    ) -> asyncio.subprocess.Process:
        """An agent, as soon as it has reported for the first time."""
        known = len(self.reports)
        process = await self.spawn(
            "--config", str(config), "--fake-nvml", str(self.fleet), cwd=cwd, program=program
        )
        await self.until(
            lambda: len(self.reports) > known or process.returncode is not None, "a first report"
        )
        assert process.returncode is None, await said(process)
        return process

    async def run(self, *arguments: str) -> tuple[int | None, str]:
        """The daemon to its end: exit status and what it said."""
        process = await self.spawn(*arguments)
        async with self.clock.timeout(PATIENCE_S):
            _, error = await process.communicate()
        return process.returncode, error.decode()

    async def close(self) -> None:
        """Leave no process behind: agents, then what would bring the node home, then workers."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.communicate()
        resort = self.state_dir / "last-resort.json"
        resort.unlink(missing_ok=True)
        if self.state_dir.is_dir():
            await self.until(lambda: is_free(resort), "the keeper has left")
        await self.workers.close()
        if self.bus is not None:
            await self.bus.close()

    # --- the coordinator's side ---------------------------------------------------------------

    async def open(self) -> None:
        """Listen to the node, answer its renewals, and serve health and metrics pages."""
        self.bus = await connect_nats(self.nats_url, identity="peer", clock=self.clock)
        await self.bus.subscribe(subjects.node_report("c1"), self._on_report)
        await self.bus.subscribe(subjects.node_renew("c1"), self._on_renew)

    async def _on_report(self, message: BusMessage) -> None:
        self.reports.append(decode(message.data, NodeReport))

    async def _on_renew(self, message: BusMessage) -> None:
        if not self.is_renewing:
            return
        asked = decode(message.data, RenewRequest)
        reply = RenewReply(lease_id=asked.lease_id, nonce=asked.nonce, is_granted=True, epoch=1)
        await message.respond(encode(reply))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One HTTP request to the pretend server, which answers while it is up."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            status = "200 OK" if self.mark("up").exists() else "503 Service Unavailable"
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(PAGE)}\r\nConnection: close\r\n\r\n"
            writer.write((head + PAGE).encode())
            await writer.drain()
        writer.close()

    async def want(
        self,
        role: NodeRole,
        *orders: WorkerOrder,
        ttl_s: float | None = None,
        stops: tuple[StopOrder, ...] = (),
        acknowledged: tuple[WorkerKey, ...] = (),
    ) -> None:
        """A newer desired state, accepted."""
        assert self.bus is not None
        self._generation += 1
        desired = DesiredState(
            node="n1", epoch=1, generation=self._generation, role=role, workers=orders,
            stops=stops, acknowledged=acknowledged,
            lease=None if ttl_s is None else Lease(
                lease_id=LeaseId("l1-1"), service=ServiceName("chat"), ttl_s=ttl_s
            ),
        )  # fmt: skip
        subject = subjects.node_desired("c1", "n1")
        answer = await self.bus.request(subject, encode(desired), timeout_s=PATIENCE_S)
        reply = decode(answer, DesiredReply)
        assert reply.is_accepted, reply.error

    async def log(self, key: WorkerKey) -> LogReply:
        """A worker's log, as the coordinator asks for it."""
        assert self.bus is not None
        request = encode(LogRequest(node="n1", key=key, max_bytes=10_000))
        subject = subjects.node_logs("c1", "n1")
        return decode(await self.bus.request(subject, request, timeout_s=PATIENCE_S), LogReply)

    # --- looking ------------------------------------------------------------------------------

    def gpu(self, index: int = 0) -> GpuUuid:
        """One of the node's GPUs."""
        return self.reports[-1].gpus[index].uuid

    def worker(self, key: WorkerKey) -> WorkerReport | None:
        """What the last report says of a worker."""
        if not self.reports:
            return None
        return next((worker for worker in self.reports[-1].workers if worker.key == key), None)

    async def until(self, fact: Callable[[], bool], what: str) -> None:
        """Look until it is so."""
        try:
            async with self.clock.timeout(PATIENCE_S):
                while not fact():
                    await self.clock.sleep(LOOK_S)
        except TimeoutError:
            last = self.reports[-1] if self.reports else "no report"
            raise AssertionError(f"not in {PATIENCE_S:g} s: {what}; last report: {last}") from None

    async def until_phase(self, key: WorkerKey, phase: WorkerPhase | None) -> None:
        """Look until the node says this of a worker; None is no word of it."""

        def is_so() -> bool:
            worker = self.worker(key)
            return bool(self.reports) and (worker.phase if worker else None) == phase

        await self.until(is_so, f"{key} is {phase}")

    async def until_role(self, role: NodeRole) -> None:
        """Look until the node says that it has a role."""
        await self.until(
            lambda: bool(self.reports) and self.reports[-1].role == role, f"the node is {role}"
        )


def order(harness: DaemonHarness, script: str) -> WorkerOrder:
    """A few lines of shell on the node's first GPU; $OUT is the test's directory."""
    given = make_order("sh", "-c", script, env={"OUT": str(harness.directory)}, grace_s=1.0)
    return msgspec.structs.replace(given, gpu_uuids=(harness.gpu(),))


WAITING = "echo $$ >> $OUT/pids; mkfifo $OUT/go; read line < $OUT/go; echo bye; exit 5"
"""A worker that writes down its pid and runs until `let_go`."""


async def let_go(harness: DaemonHarness) -> None:
    """Have a worker that waits end by itself."""
    await harness.until(harness.mark("go").is_fifo, "the worker waits")
    descriptor = os.open(harness.mark("go"), os.O_RDWR)  # it waits for nobody to read
    os.write(descriptor, b"\n")
    await harness.until(lambda: not is_alive(pids(harness)[-1]), "the worker has ended")
    os.close(descriptor)


def pids(harness: DaemonHarness) -> list[int]:
    """Of every worker that has begun."""
    path = harness.mark("pids")
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


async def lend(harness: DaemonHarness, *, ttl_s: float) -> int:
    """Bring the node on loan with a worker that would never end by itself; its pid."""
    await harness.until_role(NodeRole.SERVING)
    assert harness.mark("routed").exists()
    await harness.want(NodeRole.ON_LOAN, ttl_s=ttl_s)
    await harness.until_role(NodeRole.ON_LOAN)
    assert not harness.mark("up").exists()
    await harness.want(NodeRole.ON_LOAN, order(harness, WAITING), ttl_s=ttl_s)
    await harness.until_phase(KEY, WorkerPhase.RUNNING)
    await harness.until(lambda: bool(pids(harness)), "the worker has begun")
    return pids(harness)[0]


async def said(process: asyncio.subprocess.Process) -> str:
    """What a process that ended wrote to stderr."""
    _, error = await process.communicate()
    return error.decode()


async def kill_9(process: asyncio.subprocess.Process) -> None:
    """The process gets no chance to do anything more."""
    kill(process.pid)
    await process.communicate()


async def end(process: asyncio.subprocess.Process) -> int | None:
    """SIGTERM, and its exit status."""
    os.kill(process.pid, signal.SIGTERM)
    async with SystemClock().timeout(PATIENCE_S):
        await process.communicate()
    return process.returncode


def is_free(resort: Path) -> bool:
    """Whether no keeper waits for this file."""
    lock_fd = last_resort_process.take_lock(str(resort))
    if lock_fd is not None:
        os.close(lock_fd)
    return lock_fd is not None


async def make_daemon_harness(tmp_path: Path) -> AsyncGenerator[DaemonHarness]:
    """The body of a fixture."""
    async with running_nats(tmp_path / "nats") as nats:
        harness = DaemonHarness(tmp_path, nats_url=nats.url)
        harness.nats = nats
        server = await asyncio.start_server(harness.serve, "127.0.0.1", 0)
        harness.port = server.sockets[0].getsockname()[1]
        try:
            await harness.open()
            yield harness
        finally:
            await asyncio.shield(harness.close())
            server.close()
            await server.wait_closed()
