"""`aryl-agent`: wiring, signals and shutdown; nothing else."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import secrets
import signal
import sys
from pathlib import Path
from typing import cast

from agent import boots
from agent.agent import Agent
from agent.duties import Duties
from agent.fake_fleet import load_fleet
from agent.go_home import go_home, hung_after_s, is_away, lease_left_s
from agent.holder import END_S, Heartbeat, beating, end_if_hung, monotonic_s
from agent.hooks import SystemCommands
from agent.inference import checked_url, engine_named
from agent.ledger import Ledger, exclusive, is_disk_error, peek
from agent.left_commands import end_left
from agent.life import Life
from agent.machine import ThisMachine
from agent.node import Node
from agent.resort import last_resort
from agent.sampling import make_sampler
from agent.server_processes import checked_units
from agent.settings import WORKERS_DIR, AgentSettings, Starter
from agent.state import first_memory
from agent.workers import make_runner
from common import natsrules, systemd
from common.bus import connect_nats, leave
from common.clock import Clock, SystemClock
from common.errors import ArylError, ConfigError, Unavailable
from common.failure_rules import read_rules
from common.log import set_up
from common.model import NodeRole
from common.settings import load

log = logging.getLogger(__name__)

ADOPT_S = 60.0
"""Looking at all workers once; a disk may have to be waited for."""
INSTANCE_BYTES = 8
"""Of chance, so that no two starts of an agent are taken for one."""
LOCK_RETRY_S = 0.5
LOCK_LOOK_S = 0.05
"""Of a `--go-home` that has just ended a hung agent: before another one is started."""


def make_node(
    settings: AgentSettings, *, clock: Clock, fake_nvml: Path | None, duties: Duties
) -> Node:
    """A node on this machine's processes, files and GPUs.

    Raises:
        ConfigError: the ledger is another node's or another version's.
        Unavailable: it is there and cannot be read.
    """
    state_dir = Path(settings.state_dir)
    boot_id = clock.boot_id()
    ledger = Ledger(state_dir)
    memory = ledger.load() or first_memory(settings, boot_id)
    if memory.node != settings.node:
        raise ConfigError(f"state_dir: {state_dir} belongs to node {memory.node}")
    boot_id = boots.this_boot(state_dir / WORKERS_DIR, known=memory.boot_id, seen=boot_id)
    life = Life(settings, memory, boot_id=boot_id, now_s=clock.now_s())
    return Node(
        settings,
        life,
        ledger=ledger,
        clock=clock,
        runner=make_runner(settings, clock=clock),
        sampler=make_sampler(
            settings,
            clock=clock,
            fake_nvml=fake_nvml,
            is_server_wanted=lambda: memory.role not in (NodeRole.ON_LOAN, NodeRole.VACATING),
            is_health_wanted=lambda: memory.role != NodeRole.ON_LOAN,
        ),
        commands=SystemCommands(clock, state_dir=state_dir),
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
        node = make_node(settings, clock=clock, fake_nvml=fake_nvml, duties=duties)
        heartbeat.is_needed = lambda: is_away(node.life.memory)
        heartbeat.is_well = lambda: not duties.overdue()
        stack.push_async_callback(node.close)
        with duties.leg("adopt", within_s=ADOPT_S):
            adopted = await node.runner.adopt()
        if adopted:
            log.info("adopted %s", ", ".join(str(key) for key in adopted))
        bus = await connect_nats(
            settings.nats_url,
            identity=settings.node,
            clock=clock,
            insecure=settings.insecure,
            access=settings.access,
            timeout_s=None,
        )
        stack.push_async_callback(leave, bus, clock=clock)
        agent = Agent(
            node,
            bus=bus,
            clock=clock,
            last_resort=last_resort(settings, config=config, fake_nvml=fake_nvml, clock=clock),
            bus_counters=bus.counters,
            instance=secrets.token_hex(INSTANCE_BYTES),
        )
        systemd.ready(f"node {settings.node}")
        await agent.run()


async def _take_node(
    stack: contextlib.AsyncExitStack,
    state_dir: Path,
    clock: Clock,
    *,
    within_s: float | None = None,
) -> Heartbeat:
    """Hold the node's lock, and beat; wait while a `--go-home` or a dying agent still has it.

    No server command of whoever had it before is left then.

    Raises:
        Unavailable: somebody else still has it after `within_s`.
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
    """`--go-home`; a living agent does that by itself, and one that hangs is ended.

    Raises:
        Unavailable: an agent that is alive holds the node, or the ledger cannot be read.
    """
    clock = SystemClock()
    state_dir = Path(settings.state_dir)
    async with contextlib.AsyncExitStack() as stack:
        try:
            heartbeat = await _take_node(stack, state_dir, clock, within_s=0.0)
        except Unavailable:
            if _is_home(state_dir):
                log.info("node %s: it is not away, and its agent is there", settings.node)
                return
            patience_s = _patience_s(settings, state_dir, clock.now_s())
            await end_if_hung(state_dir, patience_s=patience_s, clock=clock)
            heartbeat = await _take_node(stack, state_dir, clock, within_s=END_S)
        duties = Duties(monotonic_s)
        node = make_node(settings, clock=clock, fake_nvml=fake_nvml, duties=duties)
        heartbeat.is_well = lambda: not duties.overdue()
        stack.push_async_callback(node.close)
        with duties.leg("adopt", within_s=ADOPT_S):
            await node.runner.adopt()
        said = await go_home(node, clock=clock)
        log.info("node %s: %s", settings.node, said or "it is not away")


def _is_home(state_dir: Path) -> bool:
    """Whether whoever holds the node has it at home. A last resort that failed then would be run
    again for ever, as nobody disarms what has fired already."""
    memory = peek(state_dir)
    return memory is not None and not is_away(memory)


def _patience_s(settings: AgentSettings, state_dir: Path, now_s: float) -> float:
    """How long whoever holds the node, and should be on its way home, may be silent.

    Raises:
        Unavailable: it need not be on its way home, as far as its ledger says.
    """
    memory = peek(state_dir)
    left_s = 0.0 if memory is None else lease_left_s(memory, now_s)
    if memory is None or memory.boot_id != SystemClock().boot_id() or left_s > 0:
        raise Unavailable(f"{state_dir}: another agent works on this node")
    return hung_after_s(settings, memory)


async def run_all(
    configs: list[tuple[Path, AgentSettings]], *, fake_nvml: Path | None, is_going_home: bool
) -> None:
    """Every node named, in one process, until a signal or the first error."""
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    assert me is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, me.cancel)
    nodes: list[Duties] = []

    def progress() -> None:
        """They share the unit's watchdog: one that gets nowhere must not be fed by the others."""
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
        help="agent.toml; give it several times to run several nodes in one process",
    )  # fmt: skip
    parser.add_argument(
        "--fake-nvml", type=Path, help="describes the GPUs of a machine without any"
    )
    parser.add_argument("--go-home", action="store_true", help="bring a lent node home and exit")
    parser.add_argument("--check", action="store_true", help="check the files and exit")
    parser.add_argument("--log-format", choices=["plain", "json"], default="plain")
    parser.add_argument("--log-level", default="INFO")
    args = parser.parse_args(argv)
    set_up(level=args.log_level, style=args.log_format)
    try:
        configs = [(path, _checked(path, is_going_home=args.go_home)) for path in args.config]
        if args.fake_nvml is not None:
            load_fleet(args.fake_nvml)  # the child that reads it could only fail again and again
        if args.check:
            return 0
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(run_all(configs, fake_nvml=args.fake_nvml, is_going_home=args.go_home))
    except ArylError as error:
        log.error("%s", error)
        return 2
    except BaseExceptionGroup as group:
        found = _flat(cast("BaseException", group))
        if not all(isinstance(one, ArylError) or is_disk_error(one) for one in found):
            raise
        for one in found:
            log.error("%s", one)
        return 2
    finally:
        systemd.stopping()
    return 0


def _checked(path: Path, *, is_going_home: bool) -> AgentSettings:
    settings = load(path, AgentSettings)
    try:
        settings.check()
        if not is_going_home:  # which needs none of this, and must not fail for it
            _check_outside(settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return settings


def _check_outside(settings: AgentSettings) -> None:
    """What an agent would refuse later, or never have an answer from.

    Raises:
        ConfigError: names the field.
    """
    natsrules.server_urls(settings.nats_url, access=settings.access, insecure=settings.insecure)
    read_rules(settings.failure_rules)
    if settings.worker_starter == Starter.SYSTEMD:  # others inherit what this process sees
        boots.check(SystemClock().boot_id())
    server = settings.server
    if server is not None:
        if warning := settings.warning():
            log.warning("%s", warning)
        engine_named(server.engine)
        checked_url(server.metrics_url, "server.metrics_url")
        checked_url(server.health_url, "server.health_url")
        checked_units(server.units)


def _flat(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    parts = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return [found for part in parts for found in _flat(part)]


if __name__ == "__main__":
    sys.exit(main())
