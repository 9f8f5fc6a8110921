"""A small real cell for tests: every part a process of its own, and helpers to look at it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from common.api import (
    Cancel,
    Describe,
    Description,
    Done,
    GetStatus,
    JobRow,
    Jobs,
    ListJobs,
    ListLoans,
    ListNodes,
    LoanRow,
    Loans,
    NodeRow,
    Nodes,
    Operate,
    Status,
    Submit,
    Submitted,
)
from common.bus import Bus, connect_nats
from common.clock import SystemClock
from common.errors import ArylError
from common.model import (
    FINAL_JOB_STATES,
    CheckpointSpec,
    JobSpec,
    JobState,
    NodeRole,
)
from coordinator.client import Client
from coordinator.demo.cell import COORDINATOR, Cell
from coordinator.demo.plan import CELL, HERE, SERVICE, CellPlan, Periods
from coordinator.demo.supervise import mentioning
from coordinator.engine.record import Record, decode_record
from coordinator.service.journal.journal_stream import Journal
from coordinator.service.ports import Lost
from tests.harness.builders import make_spec
from tests.harness.live.commands import aryl, environ_of

PATIENCE_S = 45.0
"""How long a test waits for what must come; nothing is measured by it."""
ANSWER_S = 2.0
"""When a submitter asks again: a coordinator that was killed will not answer any more."""
LOOK_S = 0.1
PERIODS = Periods(
    report_s=0.5,
    pass_s=0.5,
    loan_pass_s=0.5,
    load_sample_s=0.5,
    lease_ttl_s=4.0,
    grace_s=2.0,
    device_free_s=1.0,
    warm_up_s=3.0,
    reclaim_deadline_s=15.0,
    hold_off_s=1.0,
    unknown_load_s=4.0,
    resize_cooldown_s=1.0,
    min_runtime_s=1.0,
    lost_after_s=8.0,
    leader_ttl_s=3.0,
    rebuild_wait_s=1.0,
)

HOME = (NodeRole.TRAINING, NodeRole.SERVING)
_NUMBERS = itertools.count(1)
"""Of request ids: the tests that share a cell may give jobs of theirs the same name."""

T = TypeVar("T")


class LiveHarness:
    """A running cell, its files, and what a submitter and an operator do with it."""

    def __init__(self, cell: Cell, bus: Bus, directory: Path) -> None:
        self.cell = cell
        self.client = Client(bus, cell=CELL, tenant="ops", user="test")
        self._submitter = Client(bus, cell=CELL, tenant="ops", user="test", timeout_s=ANSWER_S)
        self.directory = directory
        self._bus = bus
        self._before: dict[str, Any] = {}

    async def turn(self, directory: Path) -> LiveHarness:
        """The same cell for one of the tests that share it, with files of the test's own."""
        out = directory / "out"
        out.mkdir()
        harness = LiveHarness(self.cell, self._bus, out)
        harness._before = await self.figures()
        return harness

    async def tidy(self) -> None:
        """Leave an idle cell to the next test: no job, no loan, and every node open and at home."""
        for row in await self.jobs():
            if row.state not in FINAL_JOB_STATES:
                await self.client.ask(Cancel(job_id=row.job_id), Done)
        for node in (await self.client.ask(ListNodes(), Nodes)).rows:
            if node.is_cordoned:
                await self.client.ask(Operate(action="uncordon", target=node.node), Done)
        is_lending = any(node.server_port for node in self.cell.nodes)
        if is_lending:
            await self.client.ask(Operate(action="recall", target=SERVICE), Done)

        async def is_idle() -> bool:
            rows = (await self.client.ask(ListNodes(), Nodes)).rows
            return all(row.role in HOME and not (row.jobs or row.gpus_held) for row in rows)

        await self.until("the cell is idle", is_idle)
        if is_lending:
            await self.client.ask(Operate(action="end_recall", target=SERVICE), Done)

    async def submit(self, spec: JobSpec, *, request_id: str | None = None) -> str:
        """Submit until somebody acknowledges it; the job's id."""
        request = Submit(spec=spec, request_id=request_id or f"{spec.name}-{next(_NUMBERS)}")

        async def ask() -> str | None:
            return (await self._submitter.ask(request, Submitted)).job_id

        return await self.until(f"{spec.name} is acknowledged", ask)

    def training(
        self,
        name: str,
        *,
        work_s: float,
        workers: tuple[int, int] = (1, 1),
        gpus: int = 1,
        save_every_s: float = 2.0,
    ) -> JobSpec:
        """A job of the demo's worker, which speaks the whole job contract."""
        script = str(HERE / "worker.py")
        options = (f"--work-s={work_s:g}", "--step-s=0.1", "--save-s=0.1")
        return make_spec(
            name=name,
            command=(
                sys.executable, "-I", "-S", script, *options, f"--save-every-s={save_every_s:g}"
            ),
            workers=workers,
            gpus_per_worker=gpus,
            checkpoint=CheckpointSpec(
                path=str(self.cell.checkpoint_root / name), grace_s=PERIODS.grace_s
            ),
        )  # fmt: skip

    def shell(self, name: str, script: str, *, worker_count: int = 1, gpus: int = 1) -> JobSpec:
        """A job that is a few lines of shell; $OUT is a directory of the test's."""
        return make_spec(
            name=name,
            command=("sh", "-c", script),
            env={"OUT": str(self.directory)},
            workers=(worker_count, worker_count),
            gpus_per_worker=gpus,
        )

    def said(self, pattern: str) -> list[str]:
        """Lines of the files that jobs wrote into $OUT."""
        lines: list[str] = []
        for path in sorted(self.directory.glob(pattern)):
            lines += path.read_text().splitlines()
        return lines

    async def aryl(
        self, *words: str, code: int = 0, tenant: str = "ops", user: str = "test"
    ) -> tuple[str, str]:
        """Give a command, which ends with this code; its standard output and error."""
        environ = environ_of(self.cell.nats.url, tenant=tenant, user=user)
        said = await aryl(environ, *words)
        assert said.code == code, said
        return said.out, said.err

    async def jobs(self) -> tuple[JobRow, ...]:
        return (await self.client.ask(ListJobs(), Jobs)).rows

    async def job(self, job_id: str) -> JobRow:
        return next(row for row in await self.jobs() if row.job_id == job_id)

    async def phases(self, job_id: str) -> dict[str, str]:
        """The phase of a job's workers, by node."""
        found = await self.client.ask(Describe(kind="job", name=job_id), Description)
        return {worker.node: worker.phase for worker in found.workers}

    async def node(self, name: str) -> NodeRow:
        rows = (await self.client.ask(ListNodes(), Nodes)).rows
        return next(row for row in rows if row.node == name)

    async def loans(self) -> tuple[LoanRow, ...]:
        return (await self.client.ask(ListLoans(is_live_only=False), Loans)).rows

    async def status(self) -> Status:
        return await self.client.ask(GetStatus(), Status)

    async def figures(self) -> dict[str, Any]:
        return (await self.status()).figures

    async def counted(self) -> dict[str, int]:
        """The figures that count something, since this test's turn began."""
        found = await self.figures()
        counts = {name: count for name, count in found.items() if isinstance(count, int)}
        return {name: count - (self._before.get(name) or 0) for name, count in counts.items()}

    async def journal(self) -> list[tuple[int, Record]]:
        """Every record that the cell's coordinators have written, read from JetStream."""
        clock = SystemClock()
        bus = await connect_nats(self.cell.nats.url, identity="reader", clock=clock)
        try:
            journal = Journal(bus, cell=CELL, writer="reader", clock=clock)
            await journal.open()
            found = [one async for one in journal.read(1)]
            left = [one for one in found if not isinstance(one, Lost)]
            return [(s, decode_record(data, sequence=s)) for s, data in left]
        finally:
            await bus.close()

    async def until_logged(self, unit: str, text: str) -> None:
        """Wait until a unit's log has a text."""
        path = self.cell.run_dir / "logs" / f"{unit}.log"

        async def is_there() -> bool:
            return path.exists() and text in path.read_text()

        await self.until(f"{unit} logs {text!r}", is_there)

    async def until_worker_runs(self) -> int:
        """Wait until a job has written its pid into $OUT/pids; the first one."""

        async def look() -> int | None:
            lines = self.said("pids")
            return int(lines[0]) if lines else None

        return await self.until("a worker runs", look)

    async def until(
        self, what: str, look: Callable[[], Awaitable[T | None]], *, within_s: float = PATIENCE_S
    ) -> T:
        """Look until it is so; a cell that does not answer now is asked again."""
        last = "nothing"
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        while loop.time() < end_s:
            try:
                found = await look()
            except (ArylError, aiohttp.ClientError) as error:
                last = f"{type(error).__name__}: {error}"
            else:
                last = repr(found)
                if found:
                    return found
            await asyncio.sleep(LOOK_S)
        raise AssertionError(f"never so: {what}; last seen: {last}\n{await self._story()}")

    async def until_job(self, job_id: str, what: str, is_so: Callable[[JobRow], bool]) -> JobRow:
        """Wait for a job's row that satisfies a condition."""

        async def look() -> JobRow | None:
            row = await self.job(job_id)
            return row if is_so(row) else None

        return await self.until(f"{job_id} {what}", look)

    async def until_state(self, job_id: str, state: JobState) -> JobRow:
        return await self.until_job(job_id, f"is {state}", lambda row: row.state == state)

    async def until_role(self, role: NodeRole, count: int = 1) -> list[str]:
        """Wait until this many nodes have a role; their names."""

        async def look() -> list[str] | None:
            rows = (await self.client.ask(ListNodes(), Nodes)).rows
            names = [row.node for row in rows if row.role == role]
            return names if len(names) == count else None

        return await self.until(f"{count} nodes are {role}", look)

    async def _story(self) -> str:
        """What a person wants to read when a test has failed."""
        parts: list[str] = []
        with contextlib.suppress(ArylError):
            parts += [repr(row) for row in await self.jobs()]
            parts += [repr(row) for row in (await self.client.ask(ListNodes(), Nodes)).rows]
        for path in sorted((self.cell.run_dir / "logs").glob("*.log")):
            parts += [f"--- {path.name}", *path.read_text().splitlines()[-25:]]
        return "\n".join(parts)

    def kill(self, unit: str) -> None:
        """kill -9 of a unit's process; the supervisor starts another one."""
        self.cell.units.signal(unit, signal.SIGKILL)

    def kill_agent(self, node: str) -> None:
        self.kill(self.cell.agent_unit(node))

    async def end_for_good(self, node: str) -> None:
        """kill -9 of the coordinator, nats-server and a node's agent; nothing starts them again."""
        await self.cell.units.kill(COORDINATOR, self.cell.agent_unit(node))
        await self.cell.kill_nats()

    async def kill_nats(self) -> None:
        """kill -9 of nats-server, and wait until another one runs."""
        killed = self.cell.nats.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)

        async def is_started() -> bool:
            return self.cell.nats.pid not in (None, killed)

        await self.until("nats-server is started again", is_started)

    async def kill_coordinator(self) -> None:
        """kill -9, and wait until another one runs."""
        starts = self.cell.units.starts(COORDINATOR)
        self.kill(COORDINATOR)

        async def is_started() -> bool:
            return self.cell.units.starts(COORDINATOR) > starts

        await self.until("a coordinator is started again", is_started)

    async def serving(self) -> set[str]:
        """Nodes that answer health checks and that the router sends requests to."""
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{self.cell.router_url}/nodes") as answer:
                routed: dict[str, Any] = await answer.json()
            found: set[str] = set()
            for node in self.cell.nodes:
                if not node.server_port or node.name not in str(routed):
                    continue
                url = f"http://127.0.0.1:{node.server_port}/health"
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url) as health:
                        if health.status == 200:
                            found.add(node.name)
            return found

    @contextlib.asynccontextmanager
    async def load(self, *, req_per_s: float) -> AsyncIterator[None]:
        """Requests to the service at a steady rate for as long as the block runs."""
        running: set[asyncio.Task[None]] = set()
        async with aiohttp.ClientSession() as session:

            async def ask() -> None:
                url = f"{self.cell.router_url}/v1/completions"
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.post(url, json={"prompt": "x"}) as answer:
                        await answer.read()

            async def drive() -> None:
                loop = asyncio.get_running_loop()
                due_s = loop.time()
                while True:
                    task = asyncio.create_task(ask())
                    running.add(task)
                    task.add_done_callback(running.discard)
                    due_s += 1 / req_per_s  # a busy machine makes no request rarer
                    await asyncio.sleep(max(0.0, due_s - loop.time()))

            driving = asyncio.create_task(drive())
            try:
                yield
            finally:
                driving.cancel()
                await asyncio.gather(driving, *running, return_exceptions=True)


@contextlib.asynccontextmanager
async def running_cell(directory: Path, **changes: Any) -> AsyncIterator[LiveHarness]:
    """A cell that is ready, and nothing of it afterwards."""
    values: dict[str, Any] = {"gpus_per_node": 4, "peak_req_per_s": 20.0, "periods": PERIODS}
    plan = CellPlan(**(values | changes))
    out = directory / "out"
    out.mkdir()
    cell = Cell(plan, directory / "cell", clock=SystemClock())
    try:
        await cell.start_nats()
        await cell.start()
        bus = await connect_nats(cell.nats.url, identity="test", clock=SystemClock())
        try:
            harness = LiveHarness(cell, bus, out)
            await cell.ready(harness.client)
            yield harness
        finally:
            await bus.close()
    finally:
        await cell.stop()
        assert mentioning(cell.run_dir) == []


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
