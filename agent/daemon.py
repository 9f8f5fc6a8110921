"""`aryl-agent`: wiring, signals and shutdown; nothing else."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

from agent.agent import Agent
from agent.fake_fleet import load_fleet
from agent.go_home import go_home
from agent.hooks import SystemCommands
from agent.ledger import Ledger, exclusive
from agent.life import Life
from agent.machine import ThisMachine
from agent.node import Node
from agent.resort import last_resort
from agent.sampling import make_sampler
from agent.settings import AgentSettings
from agent.state import first_memory
from agent.workers import make_runner
from common import systemd
from common.bus import connect_nats
from common.clock import Clock, SystemClock
from common.errors import ArylError, ConfigError, Unavailable
from common.log import set_up
from common.model import NodeRole
from common.settings import load

log = logging.getLogger(__name__)

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOCK_RETRY_S = 0.5


def make_node(settings: AgentSettings, *, clock: Clock, fake_nvml: Path | None) -> Node:
    """A node on this machine's processes, files and GPUs.

    Raises:
        ConfigError: the ledger is another node's or another version's.
    """
    state_dir = Path(settings.state_dir)
    boot_id = BOOT_ID.read_text().strip()
    ledger = Ledger(state_dir)
    memory = ledger.load() or first_memory(settings, boot_id)
    if memory.node != settings.node:
        raise ConfigError(f"state_dir: {state_dir} belongs to node {memory.node}")
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
        ),
        commands=SystemCommands(clock),
        machine=ThisMachine(),
    )


async def run_agent(settings: AgentSettings, *, config: Path, fake_nvml: Path | None) -> None:
    """One agent until cancelled.

    Raises:
        ConfigError: the settings do not fit this machine.
        Unavailable: the ledger cannot be written.
    """
    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        await _take_node(stack, Path(settings.state_dir), clock)
        node = make_node(settings, clock=clock, fake_nvml=fake_nvml)
        stack.push_async_callback(node.close)
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
        stack.push_async_callback(bus.close)
        agent = Agent(
            node,
            bus=bus,
            clock=clock,
            last_resort=last_resort(settings, config=config, fake_nvml=fake_nvml, clock=clock),
            progress=systemd.watchdog,
            bus_counters=bus.counters,
        )
        systemd.ready(f"node {settings.node}")
        await agent.run()


async def _take_node(
    stack: contextlib.AsyncExitStack, state_dir: Path, clock: Clock, *, wait: bool = True
) -> None:
    """Hold the node's lock; wait while a `--go-home` or a dying agent still has it."""
    is_told = False
    while True:
        try:
            stack.enter_context(exclusive(state_dir))
        except Unavailable as error:
            if not wait:
                raise
            if not is_told:
                log.warning("waiting: %s", error)
                is_told = True
            await clock.sleep(LOCK_RETRY_S)
        else:
            return


async def bring_home(settings: AgentSettings, *, fake_nvml: Path | None) -> None:
    """`--go-home`; a living agent does that by itself.

    Raises:
        Unavailable: an agent holds the node, or the ledger cannot be written.
    """
    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        await _take_node(stack, Path(settings.state_dir), clock, wait=False)
        node = make_node(settings, clock=clock, fake_nvml=fake_nvml)
        stack.push_async_callback(node.close)
        await node.runner.adopt()
        said = await go_home(node, clock=clock)
        log.info("node %s: %s", settings.node, said or "it is not away")


async def run_all(
    configs: list[tuple[Path, AgentSettings]], *, fake_nvml: Path | None, is_going_home: bool
) -> None:
    """Every node named, in one process, until a signal or the first error."""
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    assert me is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, me.cancel)
    async with asyncio.TaskGroup() as group:
        for path, settings in configs:
            if is_going_home:
                doing = bring_home(settings, fake_nvml=fake_nvml)
            else:
                doing = run_agent(settings, config=path, fake_nvml=fake_nvml)
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
        configs = [(path, _checked(path)) for path in args.config]
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
        wanted, rest = group.split(ArylError)
        for found in _flat(wanted) if wanted else ():
            log.error("%s", found)
        if rest is not None:
            raise rest from None
        return 2
    finally:
        systemd.stopping()
    return 0


def _checked(path: Path) -> AgentSettings:
    settings = load(path, AgentSettings)
    try:
        settings.check()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return settings


def _flat(group: BaseExceptionGroup[ArylError]) -> list[ArylError]:
    found: list[ArylError] = []
    for error in group.exceptions:
        found += _flat(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


if __name__ == "__main__":
    sys.exit(main())
