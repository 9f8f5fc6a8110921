"""The agent's ledger: an append-only file of what must outlive a restart. Knows files, no rules.

Each record is a whole `Memory`, framed by length and checksum and synced to disk before anybody
acts on it; the last whole record counts, so a torn write at the end costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from agent.state import Memory
from common.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

COMPACT_BYTES = 1 << 20
_FRAME = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Memory)


class LedgerPort(Protocol):
    """Where a memory is kept."""

    def load(self) -> Memory | None:
        """The last whole record; None of a new node."""
        ...

    async def save(self, memory: Memory) -> None:
        """Return when this memory is on disk; one that did not change costs nothing."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


class Ledger:
    """The ledger in a file of the state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "ledger"
        self._file: BinaryIO | None = None
        self._last = b""
        self._lock = asyncio.Lock()

    def load(self) -> Memory | None:
        """The last whole record. What follows it is a torn write and is cut off.

        Raises:
            ConfigError: the file is of another version of Aryl.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        payload, end = last_record(data)
        if end < len(data):
            log.warning("ledger: %d bytes after the last whole record are dropped", len(data) - end)
            self._set_aside(data[end:])
        self._last = payload
        if not payload:
            return None
        try:
            memory = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._path}: not a ledger of this version: {error}") from error
        self._rewrite(payload)
        return memory

    def _set_aside(self, tail: bytes) -> None:
        self._path.with_suffix(".torn").write_bytes(tail)

    async def save(self, memory: Memory) -> None:
        """Return when this memory is on disk; one that did not change costs nothing.

        Raises:
            Unavailable: the disk took it not.
        """
        payload = _encoder.encode(memory)
        async with self._lock:
            if payload == self._last:
                return
            try:
                await asyncio.to_thread(self._write, payload)
            except OSError as error:
                raise Unavailable(f"ledger {self._path}: {error}") from error
            self._last = payload

    def _write(self, payload: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
        if self._file.tell() > COMPACT_BYTES:
            self._rewrite(payload)
            return
        self._file.write(frame(payload))
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def _rewrite(self, payload: bytes) -> None:
        """A fresh file with one record, in place of the old one at once or not at all."""
        fresh = self._path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(frame(payload))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        _sync_dir(self._path.parent)
        self.close()

    def close(self) -> None:
        """Let the file go; the next save opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def last_record(data: bytes) -> tuple[bytes, int]:
    """(payload, end) of the last whole record before the first broken one; (b"", 0) of none."""
    payload, offset = b"", 0
    while offset + _FRAME.size <= len(data):
        size, checksum = _FRAME.unpack_from(data, offset)
        start = offset + _FRAME.size
        body = data[start : start + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            break
        payload, offset = body, start + size
    return payload, offset


def frame(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _sync_dir(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(state_dir: Path) -> Generator[None]:
    """Hold the node: an agent and a `--go-home` never work on it at the same time.

    Raises:
        Unavailable: somebody else holds it.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    with (state_dir / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(f"{state_dir}: another agent works on this node") from None
        yield
