"""`aryl-coordinator`: wiring, signals and shutdown; nothing else."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from common import subjects, systemd
from common.access import ADVICE, AccessError
from common.bus import Bus, NatsBus, connect_nats, leave
from common.clock import Clock, SystemClock
from common.errors import ArylError, ConfigError, Fenced
from common.log import set_up
from common.monitoring.page import renderer, serving
from common.mqttpeers import MqttPeers
from common.settings import load
from coordinator import plugins
from coordinator.service.api.handlers import Api
from coordinator.service.cancellation import end
from coordinator.service.coordinator import Coordinator
from coordinator.service.decision_loop import DAY_S
from coordinator.service.history.keeper import IndexKeeper, directory
from coordinator.service.journal.history_stream import History
from coordinator.service.journal.journal_stream import Journal
from coordinator.service.journal.snapshot_stream import Snapshots
from coordinator.service.leadership.jetstream_key import leader_lease
from coordinator.service.leadership.process import ProcessId, this_process
from coordinator.service.leadership.renewal_thread import in_thread
from coordinator.service.metrics.page import make_registry
from coordinator.service.ports import LeasePort
from coordinator.service.settings import CoordinatorSettings, check, warnings

log = logging.getLogger(__name__)

GC_THRESHOLDS = (50_000, 20, 20)
"""Reports are many small objects without cycles: a search for cycles after each 700 of them took a
third of a report's time."""
EXIT_FENCED = 75
"""Another coordinator leads: start again as a standby (systemd restarts it)."""


async def run(
    settings: CoordinatorSettings, *, process: Callable[[], ProcessId | None] = this_process
) -> None:
    """Run one coordinator from connect to disconnect.

    It has three connections. Reports have their own, so that no flood of them delays a renewal or a
    journal's answer; the lease has its own, on the thread that renews it.

    Args:
        process: names this process to the standbys of its machine.

    Raises:
        Fenced: another coordinator leads.
        Unavailable: NATS or the journal does not answer.
    """
    clock = SystemClock()
    holder = f"{settings.name}-{socket.gethostname()}-{os.getpid()}"
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(_connected(settings, clock))
        reports = await stack.enter_async_context(_connected(settings, clock))
        lease = await stack.enter_async_context(
            in_thread(lambda: _lease(settings, clock=clock, process=process))
        )
        coordinator = _coordinator(settings, holder, bus, reports=reports, lease=lease, clock=clock)
        page = renderer(make_registry(coordinator))
        await stack.enter_async_context(serving(settings.metrics, page, clock=clock))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, coordinator.stop)
        ready = asyncio.create_task(_say_ready(coordinator), name="ready")
        try:
            await coordinator.run(Api(coordinator).serve)
        finally:
            systemd.stopping()
            await end(ready)


@contextlib.asynccontextmanager
async def _connected(settings: CoordinatorSettings, clock: Clock) -> AsyncGenerator[NatsBus]:
    """One connection to NATS, closed when the block ends."""
    bus = await connect_nats(
        settings.nats_url,
        identity=settings.name,
        clock=clock,
        insecure=settings.insecure,
        access=settings.access,
        inbox=subjects.coordinator_inbox(settings.cell),
    )
    try:
        yield bus
    finally:
        await leave(bus, clock=clock)


@contextlib.asynccontextmanager
async def _lease(
    settings: CoordinatorSettings, *, clock: Clock, process: Callable[[], ProcessId | None]
) -> AsyncGenerator[LeasePort]:
    """The leader's lease on a connection of its own, for the thread that keeps it."""
    async with _connected(settings, clock) as bus:
        yield leader_lease(
            bus,
            cell=settings.cell,
            clock=clock,
            ttl_s=settings.leader_ttl_s,
            margin_s=settings.leader_margin_s,
            nonce=secrets.token_hex(8),
            replicas=settings.journal_replicas,
            process=process,
        )


def _coordinator(
    settings: CoordinatorSettings,
    holder: str,
    bus: NatsBus,
    *,
    reports: NatsBus,
    lease: LeasePort,
    clock: Clock,
) -> Coordinator:
    replicas = settings.journal_replicas
    journal = Journal(
        bus,
        cell=settings.cell,
        writer=holder,
        clock=clock,
        replicas=replicas,
        is_shortened=settings.journal_kept_days > 0,
    )
    snapshots = Snapshots(
        bus,
        cell=settings.cell,
        clock=clock,
        new_name=lambda: secrets.token_hex(8),
        replicas=replicas,
    )
    history = History(
        bus,
        cell=settings.cell,
        kept_s=settings.history_kept_days * DAY_S,
        replicas=replicas,
    )
    name = f"history-{settings.cell}-{settings.name}.sqlite3"
    path = directory(settings.history_index_dir) / name
    peers = MqttPeers if settings.has_mqtt_agents else _as_it_is
    return Coordinator(
        settings,
        holder=holder,
        clock=clock,
        bus=peers(bus),
        reports=peers(reports),
        journal=journal,
        snapshots=snapshots,
        lease=lease,
        progress=systemd.watchdog,
        bus_counters=(bus.counters, reports.counters),
        history=history,
        index=IndexKeeper(history, path=path, clock=clock),
    )


def _as_it_is(bus: NatsBus) -> Bus:
    return bus


async def _say_ready(coordinator: Coordinator) -> None:
    """Report READY once the bus is connected; a standby is ready too, it only does not lead."""
    systemd.ready("standing by")
    log.info("standing by: another coordinator leads")
    await coordinator.leading.wait()
    systemd.status("leading")
    log.info("leading")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="aryl-coordinator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="coordinator.toml")
    parser.add_argument("--check", action="store_true", help="check the file and exit")
    parser.add_argument("--log-format", choices=["plain", "json"], default="plain")
    parser.add_argument("--log-level", default="INFO")
    args = parser.parse_args(argv)
    set_up(level=args.log_level, style=args.log_format)
    gc.set_threshold(*GC_THRESHOLDS)
    for problem in plugins.problems():
        log.warning("%s", problem)
    try:
        settings = _settings(args.config)
        for warning in warnings(settings):
            log.warning("%s", warning)
        if args.check:
            return 0
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run(settings))
    except (ArylError, ExceptionGroup) as error:
        return status_of(error)
    return 0


def status_of(error: BaseException) -> int:
    """Log one line for an error, even if it is alone in a group of concurrent tasks.

    Returns:
        The exit status.

    Raises:
        Exception: an error that a reader of the log cannot act on.
    """
    found = _alone(error)
    match found:
        case Fenced():
            log.error("stepping down: %s", found)
            return EXIT_FENCED
        case AccessError():
            log.error("%s; %s", found, ADVICE[found.cause])
        case ArylError():
            log.error("%s", found)
        case _:
            raise error
    return 2


def _alone(error: BaseException) -> BaseException:
    """The error of a group with one member; of several errors, that another coordinator leads."""
    exceptions = tuple(_alone(one) for one in getattr(error, "exceptions", ()))
    fenced = [one for one in exceptions if isinstance(one, Fenced)]
    if fenced:
        return fenced[0]
    return exceptions[0] if len(exceptions) == 1 else error


def _settings(path: Path) -> CoordinatorSettings:
    """The settings of a file, checked.

    Raises:
        ConfigError: names the file, the field and what was expected.
    """
    settings = load(path, CoordinatorSettings)
    try:
        check(settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return settings


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loops where it is installed; None: asyncio's."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
