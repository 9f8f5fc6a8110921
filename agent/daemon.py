"""`aryl-agent`: wiring, signals and shutdown; nothing else."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from prometheus_client import CollectorRegistry

from agent.agent import Agent
from agent.core.node_lifecycle import Life
from agent.core.state import Memory, first_memory, hung_after_s, is_away, lease_left_s
from agent.driver import Node
from agent.go_home import call_all, go_home
from agent.gpu.fake.fleet import load_fleet
from agent.hooks.runner import SystemCommands
from agent.hooks.running_command import CommandRecord, end_left
from agent.lease.last_resort import last_resort
from agent.metrics_page import KEPT, CountedSampler, make_registry
from agent.proc.sessions import END_S
from agent.settings import WORKERS_DIR, AgentSettings
from agent.settings_file import check_rack, check_state_dir, checked, way_home
from agent.shim.files import is_disk_error
from agent.storage.accepted_settings import keep
from agent.storage.file_ownership import give_all
from agent.storage.ledger import Ledger, exclusive, peek
from agent.storage.node_lock import Heartbeat, beating, end_if_hung, monotonic_s, read
from agent.telemetry.machine import ThisMachine
from agent.telemetry.page_probe import as_json, as_text, probe
from agent.telemetry.sample import make_sampler
from agent.watchdog import Duties
from agent.workers import boot_check
from agent.workers.shim_runner import make_runner
from common import systemd
from common.bus import NatsBus, connect_nats, leave
from common.children import watch_without_threads
from common.clock import Clock, SystemClock
from common.errors import ArylError, ConfigError, Unavailable
from common.log import set_up
from common.model import NodeRole
from common.monitoring.families import Kept
from common.monitoring.page import renderer, serving

if TYPE_CHECKING:
    from common.mqttbus import MqttBus

log = logging.getLogger(__name__)

ADOPT_S = 60.0
"""Limit of one look at all workers; it may have to wait for a disk."""
INSTANCE_BYTES = 8
"""Random bytes, so that no two starts of an agent have the same name."""
LOCK_RETRY_S = 0.5
LOCK_LOOK_S = 0.05
"""Wait of a `--go-home` that has just ended a hung agent: before another agent starts."""


def make_node(
    settings: AgentSettings,
    *,
    clock: Clock,
    fake_nvml: Path | None,
    duties: Duties,
    is_known_boot: bool = False,
    kept: Kept | None = None,
) -> Node:
    """A node on this machine's processes, files and GPUs.

    is_known_boot: the ledger is of this boot, whatever boot id is visible here.
    kept: counts the samples for a metrics page.

    Raises:
        ConfigError: the ledger belongs to another node or another version.
        Unavailable: the ledger exists and cannot be read.
    """
    state_dir = Path(settings.state_dir)
    boot_id = clock.boot_id()
    ledger = Ledger(state_dir)
    memory = ledger.load() or first_memory(settings, boot_id)
    if memory.node != settings.node:
        raise ConfigError(f"state_dir: {state_dir} belongs to node {memory.node}")
    if is_known_boot:
        boot_id = memory.boot_id
    boot_id = boot_check.this_boot(state_dir / WORKERS_DIR, known=memory.boot_id, seen=boot_id)
    life = Life(settings, memory, boot_id=boot_id, now_s=clock.now_s(), is_behind=ledger.is_behind)
    sampler = make_sampler(
        settings,
        clock=clock,
        fake_nvml=fake_nvml,
        is_server_wanted=lambda: memory.role not in (NodeRole.ON_LOAN, NodeRole.VACATING),
        is_health_wanted=lambda: memory.role != NodeRole.ON_LOAN,
    )
    return Node(
        settings,
        life,
        ledger=ledger,
        clock=clock,
        runner=make_runner(settings, clock=clock),
        sampler=sampler if kept is None else CountedSampler(sampler, settings.node, kept),
        commands=SystemCommands(clock, record=CommandRecord(state_dir)),
        machine=ThisMachine(),
        duties=duties,
    )


async def run_agent(
    settings: AgentSettings, *, config: Path, fake_nvml: Path | None, duties: Duties
) -> None:
    """One agent until cancelled.

    Raises:
        ConfigError: the settings do not fit this machine.
        Unavailable: the ledger cannot be read.
    """
    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        heartbeat = await _take_node(stack, Path(settings.state_dir), clock)
        registry = CollectorRegistry()
        kept = Kept(KEPT, registry)
        node = make_node(settings, clock=clock, fake_nvml=fake_nvml, duties=duties, kept=kept)
        _keep(settings)
        heartbeat.is_needed = lambda: is_away(node.life.memory)
        heartbeat.is_well = lambda: not duties.overdue()
        stack.push_async_callback(node.close)
        with duties.leg("adopt", within_s=ADOPT_S):
            adopted = await node.runner.adopt()
        if adopted:
            log.info("adopted %s", ", ".join(str(key) for key in adopted))
        bus = await _connect(settings, clock)
        stack.push_async_callback(leave, bus, clock=clock)
        agent = Agent(
            node,
            bus=bus,
            clock=clock,
            last_resort=last_resort(settings, config=config, fake_nvml=fake_nvml, clock=clock),
            bus_counters=bus.counters,
            instance=secrets.token_hex(INSTANCE_BYTES),
        )
        page = renderer(make_registry(agent, registry))
        await stack.enter_async_context(serving(settings.metrics, page, clock=clock))
        systemd.ready(f"node {settings.node}")
        await agent.run()


async def _connect(settings: AgentSettings, clock: Clock) -> NatsBus | MqttBus:
    """The bus of the settings, which connects in the background."""
    connect: Callable[..., Awaitable[NatsBus | MqttBus]] = connect_nats
    if settings.mqtt_url:
        from common.mqttbus import connect_mqtt  # its libraries are for sites that need it

        connect = connect_mqtt
    return await connect(
        settings.mqtt_url or settings.nats_url,
        identity=settings.node,
        clock=clock,
        insecure=settings.insecure,
        access=settings.access,
        timeout_s=None,
    )


async def _take_node(
    stack: contextlib.AsyncExitStack,
    state_dir: Path,
    clock: Clock,
    *,
    within_s: float | None = None,
) -> Heartbeat:
    """Hold the node's lock, and beat; wait while a `--go-home` or a dying agent still has it.

    Afterwards no server command of the previous holder is left.

    Raises:
        Unavailable: another process still has it after `within_s`.
    """
    is_told = False
    began_at_s = clock.now_s()
    while True:
        try:
            stack.enter_context(exclusive(state_dir))
        except Unavailable as error:
            if within_s is not None and clock.now_s() - began_at_s >= within_s:
                raise
            if not is_told:
                log.warning("waiting: %s", error)
                is_told = True
            await clock.sleep(LOCK_RETRY_S if within_s is None else LOCK_LOOK_S)
        else:
            await end_left(state_dir, clock=clock)
            return await stack.enter_async_context(beating(state_dir, clock))


async def bring_home(settings: AgentSettings, *, fake_nvml: Path | None) -> None:
    """`--go-home`: return the node; a live agent does that by itself, and one that hangs is ended.

    Raises:
        Unavailable: a live agent holds the node, or the ledger cannot be read.
    """
    clock = SystemClock()
    state_dir = Path(settings.state_dir)
    was_held = False
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(give_all, state_dir)  # root may bring home the node of another account
        try:
            heartbeat = await _take_node(stack, state_dir, clock, within_s=0.0)
        except Unavailable:
            if _is_home(state_dir):
                log.info("node %s: it is not away, and its agent runs", settings.node)
                return
            patience_s = _patience_s(settings, state_dir, clock.now_s())
            await end_if_hung(state_dir, patience_s=patience_s, clock=clock)
            heartbeat = await _take_node(stack, state_dir, clock, within_s=END_S)
            was_held = True
        duties = Duties(monotonic_s)
        node = make_node(
            settings, clock=clock, fake_nvml=fake_nvml, duties=duties, is_known_boot=was_held
        )
        heartbeat.is_well = lambda: not duties.overdue()
        stack.push_async_callback(node.close)
        with duties.leg("adopt", within_s=ADOPT_S):
            await node.runner.adopt()
        said = await go_home(node, clock=clock)
        if not said and (memory := peek(state_dir)) is not None and is_away(memory):
            raise Unavailable(
                f"{state_dir}: node {settings.node} is {memory.role}, and with these settings it"
                " cannot return: correct them"
            )
        log.info("node %s: %s", settings.node, said or "it is not away")


def _keep(settings: AgentSettings) -> None:
    """Store the settings of this start, for a return after the settings file has become invalid."""
    try:
        keep(Path(settings.state_dir), settings)
    except OSError as error:  # the file still has them; an agent that did not start has nothing
        log.warning(
            "settings not saved in state_dir: %s; only the settings file can return the node", error
        )


def _is_home(state_dir: Path) -> bool:
    """True if the process that holds the node has it at home.

    Otherwise a last resort that failed then would run for ever, because it has fired and is never
    disarmed.
    """
    memory = peek(state_dir)
    return memory is not None and not is_away(memory)


def _patience_s(settings: AgentSettings, state_dir: Path, now_s: float) -> float:
    """How long the process that holds the node, and should return it, may be silent.

    Raises:
        Unavailable: by its ledger, the node need not be on its way home.
    """
    memory = peek(state_dir)
    left_s = 0.0 if memory is None else lease_left_s(memory, now_s)
    if memory is None or not _is_of_this_boot(state_dir, memory) or left_s > 0:
        raise Unavailable(f"{state_dir}: another agent works on this node")
    return hung_after_s(settings, memory)


def _is_of_this_boot(state_dir: Path, memory: Memory) -> bool:
    """True if a ledger that another process holds is of this boot.

    The proof is the boot id seen here, the one that its live holder sees, or a live worker.
    """
    seen, holder = SystemClock().boot_id(), read(state_dir)
    if holder is not None and holder.is_running(state_dir) and memory.boot_id == holder.boot_id:
        return True
    return memory.boot_id == boot_check.this_boot(
        state_dir / WORKERS_DIR, known=memory.boot_id, seen=seen
    )


async def run_all(
    configs: list[tuple[Path, AgentSettings]], *, fake_nvml: Path | None, is_going_home: bool
) -> None:
    """Run every named node in one process, until a signal or the first error."""
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    assert me is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, me.cancel)
    nodes: list[Duties] = []

    def progress() -> None:
        """Feed the shared watchdog only while every node makes progress."""
        if not any(duties.overdue() for duties in nodes):
            systemd.watchdog()

    async with asyncio.TaskGroup() as group:
        for path, settings in configs:
            if is_going_home:
                doing = bring_home(settings, fake_nvml=fake_nvml)
            else:
                nodes.append(Duties(monotonic_s, progress=progress))
                doing = run_agent(settings, config=path, fake_nvml=fake_nvml, duties=nodes[-1])
            group.create_task(doing, name=f"agent {settings.node}")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="aryl-agent", description=__doc__)
    parser.add_argument(
        "--config", type=Path, action="append", required=True,
        help="agent.toml; repeat it to run several nodes in one process",
    )  # fmt: skip
    parser.add_argument(
        "--fake-nvml", type=Path, help="TOML file of fake GPUs, for a machine without any"
    )
    parser.add_argument(
        "--state-dir", type=Path, action="append",
        help="state_dir of a node whose file cannot be read; once for each --config, or not at "
            "all",
    )  # fmt: skip
    parser.add_argument(
        "--go-home", action="store_true", help="return a lent node to its service and exit"
    )
    parser.add_argument("--check", action="store_true", help="check the files and exit")
    parser.add_argument(
        "--probe", action="store_true",
        help="with --check: read each metrics page once and show the parsed values",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", choices=["text", "json"], default="text", help="output format of --probe"
    )
    parser.add_argument("--log-format", choices=["plain", "json"], default="plain")
    parser.add_argument("--log-level", default="INFO")
    args = parser.parse_args(argv)
    if args.state_dir is None:
        args.state_dir = [None] * len(args.config)
    elif len(args.state_dir) != len(args.config):
        parser.error("--state-dir: give it once for each --config, or not at all")
    if args.probe and not args.check:
        parser.error("--probe: only with --check")
    set_up(level=args.log_level, style=args.log_format)
    named: list[tuple[Path, Path | None]] = list(zip(args.config, args.state_dir, strict=True))
    try:
        configs = _configs(args, named)
        if args.fake_nvml is not None:
            load_fleet(args.fake_nvml)  # its reading child would only fail again and again
        if args.check:
            return _probe([settings for _, settings in configs], args) if args.probe else 0
        watch_without_threads()
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(run_all(configs, fake_nvml=args.fake_nvml, is_going_home=args.go_home))
    except ArylError as error:
        return _refused([error], args, named)
    except BaseExceptionGroup as group:
        found = _flat(cast("BaseException", group))
        if not all(isinstance(one, ArylError) or is_disk_error(one) for one in found):
            raise
        return _refused(found, args, named)
    finally:
        systemd.stopping()
    return 0


def _probe(configs: list[AgentSettings], args: argparse.Namespace) -> int:
    """Show the result of each page; the exit status is 1 if one has no load."""
    pages = asyncio.run(probe(configs, SystemClock()))
    sys.stdout.write((as_json(pages) if args.output == "json" else as_text(pages)) + "\n")
    return 0 if all(page.is_understood for page in pages) else 1


def _configs(
    args: argparse.Namespace, named: list[tuple[Path, Path | None]]
) -> list[tuple[Path, AgentSettings]]:
    """Read every file's settings.

    Raises:
        ConfigError: the settings of one file are invalid.
    """
    if args.go_home:
        return [(path, way_home(path, state_dir=state_dir)) for path, state_dir in named]
    configs = [(path, checked(path)) for path, _ in named]
    for (path, settings), (_, state_dir) in zip(configs, named, strict=True):
        try:
            check_state_dir(path, settings, state_dir)
            check_rack(path, settings)
        except ConfigError as error:
            if args.check:
                raise
            log.warning("%s", error)
    return configs


def _refused(
    errors: Sequence[BaseException],
    args: argparse.Namespace,
    named: list[tuple[Path, Path | None]],
) -> int:
    """The exit status of a process that could not do what it was asked.

    Invalid settings keep their agents from starting until an operator corrects them. So every node
    of theirs that is away gets a last resort.
    """
    for error in errors:
        log.error("%s", error)
    is_start = not (args.check or args.go_home)
    if is_start and any(isinstance(error, ConfigError) for error in errors):
        call_all(named, fake_nvml=args.fake_nvml)
    return 2


def _flat(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    parts = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return [found for part in parts for found in _flat(part)]


if __name__ == "__main__":
    sys.exit(main())
