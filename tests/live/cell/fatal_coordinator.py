"""A coordinator that kills itself, as kill -9 would, at one exact point of one job's submit.

Run by tests/live/cell/test_submit_points.py as a process of a real cell. Must not differ from
`coordinator.service.daemon` in anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
from enum import StrEnum
from pathlib import Path

from common import subjects
from common.api import Submit
from common.bus import BusMessage, NatsBus, connect_nats
from common.clock import SystemClock
from common.log import set_up
from common.messages import decode
from common.settings import load
from coordinator.engine.record import decode_record
from coordinator.engine.state.events import JobSubmitted
from coordinator.service.api.handlers import Api
from coordinator.service.coordinator import Coordinator
from coordinator.service.journal.jetstream import TIMEOUT_S
from coordinator.service.journal.journal_stream import Journal
from coordinator.service.journal.snapshot_stream import Snapshots
from coordinator.service.leadership.jetstream_key import leader_lease
from coordinator.service.settings import CoordinatorSettings


class Point(StrEnum):
    """Where it dies."""

    BEFORE_APPEND = "before-append"
    BEFORE_REPLY = "before-reply"
    AFTER_REPLY = "after-reply"


def die() -> None:
    """SIGKILL: nothing is flushed, closed or given up."""
    os.kill(os.getpid(), signal.SIGKILL)


class FatalJournal(Journal):
    """The real journal; its owner dies before or after it writes one job."""

    point = Point.BEFORE_APPEND
    job = ""

    async def append(self, record: bytes) -> int:
        """As `Journal.append`, for those who live to see it."""
        events = [entry.event for entry in decode_record(record, sequence=0).entries]
        is_it = any(isinstance(e, JobSubmitted) and e.spec.name == self.job for e in events)
        if is_it and self.point == Point.BEFORE_APPEND:
            die()
        sequence = await super().append(record)
        if is_it and self.point == Point.BEFORE_REPLY:
            die()
        return sequence


async def run(settings: CoordinatorSettings, point: Point, job: str) -> None:
    """Lead until the job comes."""
    clock = SystemClock()
    bus = await connect_nats(settings.nats_url, identity=settings.name, clock=clock)
    journal = FatalJournal(bus, cell=settings.cell, writer=settings.name, clock=clock)
    journal.point, journal.job = point, job
    coordinator = Coordinator(
        settings,
        holder=settings.name,
        clock=clock,
        bus=bus,
        journal=journal,
        snapshots=Snapshots(
            bus, cell=settings.cell, clock=clock, new_name=lambda: secrets.token_hex(8)
        ),
        lease=leader_lease(
            bus,
            cell=settings.cell,
            clock=clock,
            ttl_s=settings.leader_ttl_s,
            margin_s=settings.leader_margin_s,
            nonce=secrets.token_hex(8),
        ),
    )
    api = Api(coordinator)

    async def serve(message: BusMessage) -> None:
        await api.serve(message)
        if point == Point.AFTER_REPLY and _submits(message, job):
            await _until_sent(bus)
            die()

    await coordinator.run(serve)


def _submits(message: BusMessage, job: str) -> bool:
    _tenant, _user, verb = subjects.api_caller(message.subject)
    return verb == Submit.__struct_config__.tag and decode(message.data, Submit).spec.name == job


async def _until_sent(bus: NatsBus) -> None:
    """A round trip: NATS takes what a connection sends in order, so the reply is there by then."""
    await bus.jetstream(timeout_s=TIMEOUT_S).account_info()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--point", type=Point, required=True)
    parser.add_argument("--job", required=True)
    given = parser.parse_args()
    set_up(level="INFO", style="plain")
    asyncio.run(run(load(given.config, CoordinatorSettings), given.point, given.job))


if __name__ == "__main__":
    main()
