"""The key of the leader's lease on JetStream; `lease` has the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import nats.js.errors
from nats.js import api
from nats.js.kv import KeyValue

from common import streams
from common.bus import NatsBus
from common.clock import Clock
from common.natscalls import jetstream_as_unavailable
from coordinator.service.journal.jetstream import TIMEOUT_S
from coordinator.service.leadership.lease import KeyEntry, LeaderLease
from coordinator.service.leadership.process import ProcessId, has_ended, this_process


def leader_lease(
    bus: NatsBus,
    *,
    cell: str,
    clock: Clock,
    ttl_s: float,
    margin_s: float,
    nonce: str,
    replicas: int = 1,
    process: Callable[[], ProcessId | None] = this_process,
) -> LeaderLease:
    """The lease of this process, on one key of a KV bucket of its own; arguments as `LeaderLease`.

    replicas: of the bucket.
    process: names this process; one on another machine gives another name.

    Raises:
        ConfigError: the margin eats the TTL.
    """
    # Two attempts fit between the last renewal and the end of the lease.
    return LeaderLease(
        NatsKey(bus, cell=cell, timeout_s=min(TIMEOUT_S, ttl_s / 4), replicas=replicas),
        clock=clock,
        ttl_s=ttl_s,
        margin_s=margin_s,
        nonce=nonce,
        process=process(),
        has_ended=has_ended,
    )


class NatsKey:
    """`KeyPort` on a KV bucket.

    Plain compare-and-set by revision: in nats-py 2.16 each update loses a per-message TTL, and a
    watch is blind for seconds after a server restart.
    """

    def __init__(self, bus: NatsBus, *, cell: str, timeout_s: float, replicas: int = 1) -> None:
        self._bus = bus
        self._bucket = streams.leader_bucket(cell)
        self._timeout_s = timeout_s
        self._replicas = replicas

    async def get(self) -> KeyEntry | None:
        """The newest value, or None if there never was one."""
        with jetstream_as_unavailable("leader lease", are_api_errors_too=True):
            bucket = await self._open()
            try:
                entry = await bucket.get(streams.LEADER_KEY)
            except nats.js.errors.KeyDeletedError as error:
                # An operator deleted it by hand: its revision still fences.
                deleted = cast("KeyValue.Entry", error.entry)  # pyright: ignore[reportUnknownMemberType]
                return KeyEntry(b"", deleted.revision or 0)
            except nats.js.errors.KeyNotFoundError:
                return None
        return KeyEntry(entry.value or b"", entry.revision or 0)

    async def put(self, value: bytes, *, last_revision: int) -> int | None:
        """Write if the revision is still this one (0: there is none); the new revision."""
        with jetstream_as_unavailable("leader lease", are_api_errors_too=True):
            bucket = await self._open()
            try:
                return await bucket.update(streams.LEADER_KEY, value, last=last_revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                return None

    async def _open(self) -> KeyValue:
        stream = self._bus.jetstream(timeout_s=self._timeout_s)
        try:
            return await stream.key_value(self._bucket)
        except nats.js.errors.BucketNotFoundError:
            config = api.KeyValueConfig(
                bucket=self._bucket,
                description="Aryl: who leads this cell",
                history=1,
                storage=api.StorageType.FILE,
                replicas=self._replicas,
            )
            return await stream.create_key_value(config)  # pyright: ignore[reportUnknownMemberType]
