"""Splits a snapshot into chunks that fit into messages, and joins them again. Pure."""

from __future__ import annotations

import binascii
from typing import NamedTuple

from msgspec import Struct

MAX_CHUNK_BYTES = 512 * 1024
"""A snapshot's pieces: well below the smallest payload limit that servers come with."""


class Chunk(Struct, frozen=True, kw_only=True):
    """One piece of a snapshot."""

    snapshot: str
    """The save that it belongs to: two coordinators may write at once around a takeover."""
    sequence: int
    index: int
    count: int
    checksum: int
    """CRC-32 of the whole."""
    data: bytes


def split(sequence: int, data: bytes, *, name: str) -> list[Chunk]:
    """A snapshot of this name as chunks of at most `MAX_CHUNK_BYTES`; at least one."""
    pieces = [data[i : i + MAX_CHUNK_BYTES] for i in range(0, len(data), MAX_CHUNK_BYTES)] or [b""]
    checksum = binascii.crc32(data)
    return [
        Chunk(
            snapshot=name,
            sequence=sequence,
            index=index,
            count=len(pieces),
            checksum=checksum,
            data=piece,
        )
        for index, piece in enumerate(pieces)
    ]


class Whole(NamedTuple):
    """A snapshot without missing chunks."""

    name: str
    sequence: int
    data: bytes


def join(chunks: list[Chunk]) -> Whole | None:
    """The set that was completed last and is whole, from chunks in the order of the stream."""
    sets: dict[str, dict[int, Chunk]] = {}
    newest: Whole | None = None
    for chunk in chunks:
        found = sets.setdefault(chunk.snapshot, {})
        found[chunk.index] = chunk
        if len(found) == chunk.count:
            data = b"".join(found[index].data for index in sorted(found))
            if binascii.crc32(data) == chunk.checksum:
                newest = Whole(chunk.snapshot, chunk.sequence, data)
    return newest
