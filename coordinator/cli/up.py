"""`aryl up`: a whole cell on this machine, the main job on it, and one table at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Generator
from math import inf
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from common.clock import Clock, SystemClock
from common.errors import ArylError, ConfigError
from common.log import set_up
from common.procfs import start_ticks
from coordinator import plugins
from coordinator.cli.output import Format, OutputOption, fields, put_json
from coordinator.cli.run_report import progress_view, progress_words, run_table
from coordinator.cli.session import PlainConsole, console, exit_code, report, say
from coordinator.client import registry
from coordinator.demo.cell import Cell
from coordinator.demo.plan import CELL, AgentBus, CellPlan
from coordinator.demo.supervise import sweep
from coordinator.demo.workload import Run, Workload, play
from coordinator.policies.contract.text import counted
from coordinator.policies.registry import policy as find_policy
from coordinator.service.cancellation import beside, end, is_done_first
from coordinator.web.address import Address
from coordinator.web.guard import Guard

log = logging.getLogger(__name__)

LOOK_S = 1.0
PLAIN_LINE_S = 10.0
QUIET_LINE_S = 60.0
"""While nothing changes a line says so this often only: an empty cell may run for days."""
LAST_LOOK_S = 4.0
"""A user waits for the table, and a hanging NATS or coordinator may hang for ever."""
USER = "trace"
SMALL_SERVICE_NODES = 2
RUN_DIR_PREFIX = "aryl-cell-"


def register(app: typer.Typer) -> None:
    """Add `aryl up`."""
    app.command("up")(up)


def up(
    nodes: Annotated[
        str, typer.Option(help="Number of training and inference nodes, as TRAINING+INFERENCE.")
    ] = "6+6",
    gpus_per_node: Annotated[
        int, typer.Option(min=1, max=16, help="Number of GPUs of each node.")
    ] = 8,
    agents_per_process: Annotated[
        int, typer.Option(min=1, help="Agents in one process; more saves memory.")
    ] = 1,
    speed: Annotated[
        float,
        typer.Option(
            min=1.0, help="Trace seconds per real second, for arrivals, running times and load."
        ),
    ] = 120.0,
    duration: Annotated[
        float | None,
        typer.Option(min=1.0, help="Duration in seconds; default: 120, or until Ctrl-C."),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Scheduling policy; `aryl policies` lists them.")
    ] = "aryl",
    bus: Annotated[
        AgentBus, typer.Option(help="Protocol of the agents: NATS, or MQTT with nats-server.")
    ] = AgentBus.NATS,
    no_workload: Annotated[
        bool,
        typer.Option("--no-workload", help="Start an empty cell for experiments, until Ctrl-C."),
    ] = False,
    no_dashboard: Annotated[
        bool, typer.Option("--no-dashboard", help="Serve no page for browsers.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep logs and files of the cell.")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Start a whole cell here, run the demo workload on it, print a table, stop it."""
    plan = make_plan(nodes, gpus_per_node, agents_per_process, policy, speed=speed, bus=bus)
    _log_to_stderr()
    length_s = duration if duration is not None or no_workload else 120.0
    try:
        asyncio.run(_up(plan, speed=speed, length_s=length_s, is_empty=no_workload,
                        is_kept=keep, has_dashboard=not no_dashboard, output=output))  # fmt: skip
    except ArylError as error:
        report(error)
        raise typer.Exit(exit_code(error)) from None


def make_plan(
    nodes: str,
    gpus_per_node: int,
    agents_per_process: int,
    policy: str,
    *,
    speed: float,
    bus: AgentBus = AgentBus.NATS,
) -> CellPlan:
    """The cell that the options describe.

    Raises:
        ConfigError: an option does not fit; names it.
    """
    training, plus, inference = nodes.partition("+")
    if not (plus and training.isdecimal() and inference.isdecimal()) or int(training) < 1:
        raise ConfigError(
            f"--nodes: {nodes!r}, expected TRAINING+INFERENCE such as 6+6, with a training node"
        )
    if speed == inf:
        raise ConfigError("--speed: inf, expected a number of trace seconds per second")
    if int(training) + int(inference) > 200:
        raise ConfigError(f"--nodes: {nodes}: a machine runs at most 200 agents")
    plugins.load()
    find_policy(policy)
    return CellPlan(
        training_nodes=int(training),
        inference_nodes=int(inference),
        # With two nodes none could ever be lent next to one that serves and one of headroom.
        headroom_nodes=1 if int(inference) > SMALL_SERVICE_NODES else 0,
        gpus_per_node=gpus_per_node,
        agents_per_process=agents_per_process,
        policy=policy,
        bus=bus,
    )


async def _up(
    plan: CellPlan, *, speed: float, length_s: float | None, is_empty: bool, is_kept: bool,
    has_dashboard: bool, output: Format,
) -> None:  # fmt: skip
    clock = SystemClock()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    async with _running_cell(plan, clock, stop=stop, is_kept=is_kept) as cell:
        if cell is None:
            return
        if is_empty:
            say("the cell is ready: aryl status, aryl job submit -- COMMAND; Ctrl-C here ends it")
        client = await cell.client(user=USER)
        # A job that a visitor submits to an empty cell takes as long as it takes.
        workload = Workload(cell, client, speed=1.0 if is_empty else speed, clock=clock)
        async with contextlib.AsyncExitStack() as stack:
            if has_dashboard:
                say(f"dashboard: {await stack.enter_async_context(_dashboard(cell, clock))}")
            if not is_empty:
                playing = beside(play(cell, workload, speed=speed), name="workload", broke=stop.set)
                await stack.enter_async_context(playing)
            await _watch(workload, clock, stop=stop, length_s=length_s, output=output)
        if not await workload.last_look(limit_s=LAST_LOOK_S):
            say(without_last_look(workload))
        run = workload.run()
        say("stopping the cell")
    _show(run, workload, output)


@contextlib.asynccontextmanager
async def _dashboard(cell: Cell, clock: Clock) -> AsyncGenerator[str]:
    """Serve the dashboard of a cell for the block; its value is the URL."""
    from coordinator.web.server import Dashboard, serving  # only here: it takes long

    client = await cell.client(user="dashboard")
    dashboard = Dashboard(client, cell=CELL, guard=Guard(token=None), clock=clock)
    async with contextlib.AsyncExitStack() as stack:
        try:
            url = await stack.enter_async_context(serving(dashboard, Address()))
        except ConfigError:  # another program has its port
            url = await stack.enter_async_context(serving(dashboard, Address(port=0)))
        yield url


def without_last_look(workload: Workload) -> str:
    """The figures that are missing when the last query failed."""
    if workload.status is None:
        return f"no coordinator answered in the last {LAST_LOOK_S:g} s, nor before"
    return (
        f"no coordinator answered in the last {LAST_LOOK_S:g} s: the figures are "
        f"{workload.age_s:.0f} s old, and what happened since is missing from them"
    )


@contextlib.asynccontextmanager
async def _running_cell(
    plan: CellPlan, clock: Clock, *, stop: asyncio.Event, is_kept: bool
) -> AsyncGenerator[Cell | None]:
    """A cell that is ready and shown in the registry; None when it was stopped before."""
    other = registry.find()
    if other is not None:
        raise registry.CellRuns.of(other)
    await _end_predecessor(clock)
    run_dir = Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX))
    cell = Cell(plan, run_dir, clock=clock)
    info = registry.CellInfo(
        cell=CELL,
        nats_url="",
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()),
        run_dir=str(run_dir),
        started_at_s=clock.wall_s(),
    )
    try:
        # Before the first process and until after the last one: whenever this process is killed,
        # the next cell finds its leftovers.
        with registry.register(info) as entry:
            try:
                entry.show(nats_url=await cell.start_nats())
                say(f"starting {counted(len(cell.nodes), 'agent')}; logs are in {run_dir / 'logs'}")
                await cell.start()
                client = await cell.client(user=USER)
                is_ready = await is_ready_first(cell.ready(client), stop=stop)
                if is_ready:
                    _say_pages(cell)
                else:
                    say("stopped before the cell was ready")
                yield cell if is_ready else None
            finally:
                await cell.stop()
    finally:
        if is_kept:
            say(f"logs and files are left in {run_dir}")
        else:
            cell.remove()


def _say_pages(cell: Cell) -> None:
    """Print where the metrics of the cell are."""
    first, *others = cell.agent_metrics
    more = f" and {counted(len(others), 'more agent')}" if others else ""
    say(f"metrics: http://{cell.coordinator_metrics}/metrics, http://{first}/metrics{more}")
    say(f"all of them: prometheus --config.file {cell.prometheus_path}")


async def is_ready_first(
    becoming_ready: Coroutine[object, object, object], *, stop: asyncio.Event
) -> bool:
    """Wait until it is done; False when it was stopped before, and then it has ended as well.

    Raises:
        Exception: its own error.
    """
    starting = asyncio.create_task(becoming_ready, name="start")
    try:
        return await is_done_first(starting, told=stop)
    finally:
        await end(starting)


async def _end_predecessor(clock: Clock) -> None:
    """End what an `aryl up` that was killed has left running; its files stay."""
    dead = registry.left_behind()
    # Only what `aryl up` itself has made: a registry file that says "/" must end nothing.
    if dead is None or not Path(dead.run_dir).name.startswith(RUN_DIR_PREFIX):
        return
    count = await sweep(Path(dead.run_dir), clock=clock)
    if count:
        say(
            f"ended {counted(count, 'process', 'processes')} of cell {dead.cell}, which process "
            f"{dead.pid} left behind when it was killed; its files are in {dead.run_dir}"
        )


async def _watch(
    workload: Workload, clock: Clock, *, stop: asyncio.Event, length_s: float | None,
    output: Format,
) -> None:  # fmt: skip
    """Show the cell until its time is over or a user stops it."""
    began_at_s = clock.now_s()
    errors = PlainConsole(stderr=True)
    is_live = errors.is_terminal and output != Format.JSON
    live = Live(console=errors, refresh_per_second=4, transient=True) if is_live else None
    lines = ProgressLines()
    async with contextlib.AsyncExitStack() as block:
        await block.enter_async_context(_looking(workload, clock))
        if live is not None:
            block.enter_context(above(live))
        while not stop.is_set():
            elapsed_s = clock.now_s() - began_at_s
            if length_s is not None and elapsed_s >= length_s:
                return
            if live is not None:
                live.update(progress_view(workload, elapsed_s, length_s))
            elif line := lines.at(elapsed_s, progress_words(workload), length_s):
                say(line)
            left_s = LOOK_S if length_s is None else min(LOOK_S, length_s - elapsed_s)
            with contextlib.suppress(TimeoutError):
                async with clock.timeout(max(0.01, left_s)):
                    await stop.wait()


@contextlib.contextmanager
def above(live: Live) -> Generator[None]:
    """Show a live view; log lines meanwhile stand above it.

    The view takes standard error over while it shows, and would paint over other output.
    """
    try:
        with live:
            _log_to_stderr()
            yield
    finally:
        _log_to_stderr()


def _log_to_stderr() -> None:
    set_up(level="WARNING", style="plain")


class ProgressLines:
    """Which lines a log is given."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._quiet_until_s = 0.0
        self._words = ""

    def at(self, elapsed_s: float, words: str, length_s: float | None) -> str:
        """The line of this moment; empty when it is too early, or when nothing has changed."""
        is_news = words != self._words or elapsed_s >= self._quiet_until_s
        if elapsed_s < self._next_s or not is_news:
            return ""
        self._next_s, self._quiet_until_s = elapsed_s + PLAIN_LINE_S, elapsed_s + QUIET_LINE_S
        self._words = words
        when = f"{elapsed_s:4.0f} s" + (f" of {length_s:.0f}" if length_s is not None else "")
        return f"{when}: {words}"


@contextlib.asynccontextmanager
async def _looking(workload: Workload, clock: Clock) -> AsyncGenerator[None]:
    """Poll the figures in parallel to the block.

    It is separate from the display: a coordinator that does not answer delays a query for many
    seconds, and meanwhile the display must show how old the figures are.
    """

    async def look() -> None:
        while True:
            await workload.observe()
            await clock.sleep(LOOK_S)

    await workload.observe()
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(look(), name="look")
        yield
        looking.cancel()


def _show(run: Run, workload: Workload, output: Format) -> None:
    if output == Format.JSON:
        put_json(fields(run))
        return
    out = console(os.environ)
    out.print(run_table(run, workload.loans), soft_wrap=False)
    sys.stdout.flush()
