"""Streams of the coordinator on JetStream: how they are created, and read in order."""

from __future__ import annotations

import binascii
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple, cast

import nats.js.errors
from nats.js import JetStreamContext, api

from common.bus import NatsBus
from common.errors import ConfigError, Unavailable
from common.natscalls import jetstream_as_unavailable
from coordinator.service.ports import Lost

TIMEOUT_S = 5.0
"""One JetStream call; longer than most elections, so a write rarely stays ambiguous."""
WRITER_HEADER = "Aryl-Writer"
"""Every record has it; a coordinator wrote no message without it."""
CHECKSUM_HEADER = "Aryl-Checksum"
"""CRC-32 of a record: one that was changed on its way to the disk and back is no record."""
CONSUMER_IDLE_S = 30.0
"""The server removes a reader that fetches nothing for this long."""
FETCH_COUNT = 500
"""Messages of one batch, where they are small."""
_FETCH_BYTES = 16 * 1024 * 1024


def stream_config(name: str, subject: str, replicas: int) -> api.StreamConfig:
    """A stream that keeps all that is written, on disk, and takes no more when it is full."""
    return api.StreamConfig(
        name=name,
        subjects=[subject],
        description="Aryl: do not edit; docs/operate.md says how to back it up",
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW,
        num_replicas=replicas,
        allow_direct=False,
    )


async def ensure_stream(bus: NatsBus, config: api.StreamConfig) -> api.StreamInfo:
    """Create a stream if it is missing; the server's answer about it.

    Raises:
        ConfigError: it is there and may forget records.
        Unavailable: JetStream does not answer.
    """
    assert config.name is not None
    stream = bus.jetstream(timeout_s=TIMEOUT_S)
    with jetstream_as_unavailable(config.name, are_api_errors_too=True):
        try:
            info = await stream.stream_info(config.name)
        except nats.js.errors.NotFoundError:
            info = await stream.add_stream(config)  # pyright: ignore[reportUnknownMemberType]
    _check_keeps(info.config)
    return info


def _check_keeps(config: api.StreamConfig) -> None:
    limits = {
        "max_age": config.max_age,
        "max_msgs": config.max_msgs,
        "max_msgs_per_subject": config.max_msgs_per_subject,
    }
    bad = [f"{key} = {value}" for key, value in limits.items() if value and value > 0]
    if config.storage != api.StorageType.FILE:
        bad.append(f"storage = {config.storage}")
    if config.discard != api.DiscardPolicy.NEW:
        bad.append(f"discard = {config.discard}")
    if bad:
        raise ConfigError(f"stream {config.name}: {', '.join(bad)}: it would forget records")


class StreamMessage(NamedTuple):
    """A message as it is in a stream."""

    sequence: int
    data: bytes
    is_record: bool
    is_sound: bool
    """Its checksum is right."""


def is_ours(headers: Mapping[str, str] | None) -> bool:
    """Whether a coordinator wrote the message with these headers."""
    return headers is not None and WRITER_HEADER in headers


def headers_of(message: api.RawStreamMsg) -> Mapping[str, str] | None:
    """The headers of a message that was requested by its sequence."""
    return cast("Mapping[str, str] | None", message.headers)  # pyright: ignore[reportUnknownMemberType]


def checksum(record: bytes) -> str:
    """CRC-32 of a record, in hexadecimal digits."""
    return f"{binascii.crc32(record):08x}"


def message_of(sequence: int, data: bytes, headers: Mapping[str, str] | None) -> StreamMessage:
    """A message, and whether its checksum is right."""
    expected = (headers or {}).get(CHECKSUM_HEADER)
    is_sound = expected == checksum(data)
    return StreamMessage(sequence, data, is_ours(headers), is_sound)


async def read_in_order(
    bus: NatsBus,
    name: str,
    subject: str,
    from_sequence: int,
    *,
    to_sequence: int | None = None,
) -> AsyncGenerator[StreamMessage | Lost]:
    """Messages of a stream in order, to its end at the time of the call; none of a missing stream.

    A sequence that does not arrive is requested once more by itself: it is `Lost` if the server has
    nothing there, as after damage to a file of the stream.

    Raises:
        Unavailable: JetStream did not answer, or an existing message did not arrive.
    """
    stream = bus.jetstream(timeout_s=TIMEOUT_S)
    try:
        with jetstream_as_unavailable(name):
            state = (await stream.stream_info(name)).state
    except nats.js.errors.NotFoundError:
        return
    sequence = max(from_sequence, state.first_seq)
    end = state.last_seq if to_sequence is None else min(to_sequence, state.last_seq)
    count = max(1, min(FETCH_COUNT, _FETCH_BYTES * state.messages // max(1, state.bytes)))
    while sequence <= end:
        there = await _next_sequence(stream, name, subject, sequence, end=end)
        if there > sequence:
            yield Lost(sequence, there - 1)
            sequence = there
            continue
        delivered = _delivered(stream, name, subject, sequence, end=end, count=count)
        async with contextlib.aclosing(delivered):
            async for message in delivered:
                if message.sequence != sequence:
                    break  # missing messages are requested
                yield message
                sequence += 1
        if sequence == there:
            # A connection that broke in between; the caller starts again.
            raise Unavailable(f"{name}: message {there} did not arrive")


async def _delivered(
    stream: JetStreamContext, name: str, subject: str, sequence: int, *, end: int, count: int
) -> AsyncGenerator[StreamMessage]:
    """The deliveries of a consumer from a sequence on; ends where nothing more arrives in time."""
    first = sequence
    with jetstream_as_unavailable(name, are_api_errors_too=True):
        consumer = await _consumer(stream, name, subject, sequence)
        try:
            while sequence <= end:
                try:
                    batch = await consumer.fetch(min(count, end - sequence + 1), timeout=TIMEOUT_S)
                except TimeoutError:
                    if sequence == first:
                        raise  # it is there, and does not arrive
                    return
                for message in batch:
                    sequence = message.metadata.sequence.stream + 1
                    yield message_of(sequence - 1, message.data, message.headers)
        finally:
            await consumer.unsubscribe()


async def _next_sequence(
    stream: JetStreamContext, name: str, subject: str, sequence: int, *, end: int
) -> int:
    """The first sequence from this one on that has a message; `end + 1`: none up to there."""
    try:
        with jetstream_as_unavailable(name):
            found = await stream.get_msg(name, seq=sequence, next=True, subject=subject)
    except nats.js.errors.NotFoundError:
        return end + 1
    except nats.js.errors.APIError as error:
        raise Unavailable(f"{name}: {error.description}") from error
    return min(found.seq or sequence, end + 1)


async def _consumer(
    stream: JetStreamContext, name: str, subject: str, sequence: int
) -> JetStreamContext.PullSubscription:
    config = api.ConsumerConfig(
        deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=sequence,
        ack_policy=api.AckPolicy.NONE,
        inactive_threshold=CONSUMER_IDLE_S,
        mem_storage=True,
        num_replicas=1,
    )
    options: dict[str, Any] = {"stream": name, "config": config}
    return await stream.pull_subscribe(subject, **options)
