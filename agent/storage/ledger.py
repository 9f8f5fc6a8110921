"""The agent's ledger: an append-only file of all that must outlive a restart.

Each record is a whole `Memory`, framed by length and checksum and synced to disk. The last whole
record counts, so a torn write at the end costs nothing. A full or read-only disk stops no reader. A
failed write leaves nothing behind that could cost a later record.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import zlib
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from agent.core.state import MEMORY_VERSION, Memory
from agent.shim.files import is_disk_error
from agent.storage import file_ownership
from agent.storage.node_lock import lock_path
from common.decoding import UNREADABLE
from common.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

COMPACT_BYTES = 1 << 20
SAVE_LIMIT_S = 5.0
"""A disk that takes longer counts as one that takes nothing: a node on its way home goes on."""
MARK_LIMIT_RATIO = 0.2
"""How long a save waits for the mark, as a share of its own limit."""
OWN_MODE = 0o600
_FRAME = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Memory)


class _Versioned(Struct):
    """The version, which is read first: the rest may have another meaning."""

    version: int = MEMORY_VERSION


_version_decoder = msgspec.msgpack.Decoder(_Versioned)


def peek(state_dir: Path) -> Memory | None:
    """The ledger's present memory, without touching it: another process may be writing.

    None for a new node, and for a ledger of another version.
    """
    try:
        payload, _ = last_record((state_dir / "ledger").read_bytes())
    except OSError:
        return None
    return peek_payload(payload)


def peek_payload(payload: bytes) -> Memory | None:
    """The memory of a record; None for an empty one, and for one of another version."""
    try:
        return _memory(payload) if payload else None
    except msgspec.DecodeError:
        return None


class LedgerPort(Protocol):
    """Where a memory is kept."""

    def load(self) -> Memory | None:
        """The last whole record; None for a new node."""
        ...

    async def save(self, memory: Memory) -> None:
        """Return when this memory is on disk; an unchanged one costs nothing.

        Raises:
            Unavailable: it is not on disk, and may be tried again.
        """
        ...

    def close(self) -> None:
        """Close the ledger."""
        ...


class Ledger:
    """The ledger in a file of the state directory; `load` comes before the first `save`.

    Args:
        write, sync: `os.write` and `os.fsync`; a test puts a full disk in their place, or one that
            records what would outlive a power cut.
        limit_s: how long one save may take.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        write: Callable[[int, bytes], int] = os.write,
        sync: Callable[[int], None] = os.fsync,
        limit_s: float = SAVE_LIMIT_S,
    ) -> None:
        self._path = state_dir / "ledger"
        self._write_some = write
        self._sync = sync
        self._fd: int | None = None
        self._end = 0
        """The end of the last whole record; the remains of a failed write are cut off there."""
        self._last = b""
        self._lock = asyncio.Lock()
        self._limit_s = limit_s
        self._writer: ThreadPoolExecutor | None = None
        """A thread of its own: a disk that hangs must not block the threads of other work."""
        self._writing: asyncio.Future[None] | None = None
        self._mark = _Mark(state_dir / "ledger.current", limit_s=limit_s * MARK_LIMIT_RATIO)
        self.is_behind = self._mark.was_behind
        """The last process with this ledger acted on a memory that no disk took. Its reports about
        workers without a status on disk are unknown."""

    def load(self) -> Memory | None:
        """The last whole record. Anything after it is a torn write and is cut off.

        A disk that takes no write is no reason to forget: the record counts, and the first `save`
        shows whether it can be written again.

        Raises:
            ConfigError: the file is of another version of Aryl; it is left unchanged.
            Unavailable: the file exists and cannot be read.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Unavailable(f"ledger {self._path}: {error}") from error
        payload, end = last_record(data)
        try:
            memory = _memory(payload) if payload else None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._path}: not a ledger of this version: {error}") from error
        self._end = end
        if end < len(data):
            dropped = len(data) - end
            log.warning("ledger: dropped %d bytes after the last complete record", dropped)
            with contextlib.suppress(OSError):  # it is kept for people, who can do without it
                self._keep_torn(data[end:])
        if memory is None:
            return None
        try:
            self._rewrite(payload)
        except OSError as error:
            log.warning("ledger %s: cannot be written now: %s", self._path, error)
        else:
            self._last = payload
        return memory

    def _keep_torn(self, data: bytes) -> None:
        fd = _open_own(self._path.with_suffix(".torn"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self._write_all(fd, data)
        finally:
            os.close(fd)

    async def save(self, memory: Memory) -> None:
        """Return when this memory is on disk; an unchanged one costs nothing.

        Raises:
            Unavailable: the disk refused it. The record before it counts, and it may be tried again
                any number of times.
        """
        payload = _encoder.encode(memory)
        async with self._lock:
            if payload == self._last:
                return
            self._last = b""  # after a failure the next one is written, to test the disk
            try:
                if self._writing is not None:  # of a save that took too long
                    await self._written(self._writing, within_s=0.0)
                self._writer = self._writer or ThreadPoolExecutor(1, "ledger")
                loop = asyncio.get_running_loop()
                self._writing = loop.run_in_executor(self._writer, self._append, payload)
                await self._written(self._writing, within_s=self._limit_s)
            except OSError as error:
                self._let_go()
                await self._mark.write(is_behind=True)
                raise Unavailable(f"ledger {self._path}: {error}") from error
            except Unavailable:
                await self._mark.write(is_behind=True)
                raise
            self._last = payload
            await self._mark.write(is_behind=False)

    async def _written(self, writing: asyncio.Future[None], *, within_s: float) -> None:
        """Return when a record is on disk.

        Raises:
            OSError: the disk refused it.
            Unavailable: the disk does not answer; the record may yet get there.
        """
        done, _ = await asyncio.wait({writing}, timeout=within_s)
        if not done:
            raise Unavailable(
                f"ledger {self._path}: the disk does not answer within {self._limit_s:g} s"
            )
        self._writing = None
        writing.result()

    def _append(self, payload: bytes) -> None:
        if self._end > COMPACT_BYTES:
            self._rewrite(payload)
            return
        if self._fd is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = _open_own(self._path, os.O_WRONLY | os.O_CREAT)
            os.ftruncate(self._fd, self._end)
            os.lseek(self._fd, self._end, os.SEEK_SET)
        record = frame(payload)
        self._write_all(self._fd, record)
        self._sync(self._fd)
        if self._end == 0:  # it may be new: its name has to be on disk too
            self._sync_dir()
        self._end += len(record)

    def _write_all(self, fd: int, data: bytes) -> None:
        while data:
            data = data[self._write_some(fd, data) :]

    def _rewrite(self, payload: bytes) -> None:
        """A fresh file with one record replaces the old one at once or not at all."""
        fresh, record = self._path.with_suffix(".new"), frame(payload)
        fd = _open_own(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self._write_all(fd, record)
            self._sync(fd)
        except OSError:
            with contextlib.suppress(OSError):  # a full disk needs that space back
                fresh.unlink()
            raise
        finally:
            os.close(fd)
        fresh.replace(self._path)
        self._let_go()
        self._end = len(record)
        self._sync_dir()

    def _sync_dir(self) -> None:
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._sync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        """Close the file and the thread; the next save has others.

        A write that the disk holds keeps both.
        """
        if self._writing is not None and not self._writing.done():
            return
        self._let_go()
        self._mark.close()
        if self._writer is not None:
            self._writer.shutdown(wait=False)
            self._writer = None

    def _let_go(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):  # some file systems report a failed write here
                os.close(fd)


class _Mark:
    """A file that is empty while its process acts on a memory that no disk took.

    The calls come from one save at a time and run in order, on a thread of their own: a record that
    the disk holds delays no mark, and a mark that it holds delays no save.
    """

    def __init__(self, path: Path, *, limit_s: float) -> None:
        self._path = path
        self._limit_s = limit_s
        self.was_behind = _is_empty(path)
        self._is_behind = True if self.was_behind else None
        """The mark as last written; None: this process has not written it yet."""
        self._is_wanted_behind: bool | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._writing: asyncio.Future[None] | None = None

    async def write(self, *, is_behind: bool) -> None:
        """Empty the mark or fill it, unless it is so already; waits at most the limit, and once."""
        is_under_way = self._writing is not None and not self._writing.done()
        if is_behind is (self._is_wanted_behind if is_under_way else self._is_behind):
            return
        self._is_wanted_behind = is_behind
        self._writer = self._writer or ThreadPoolExecutor(1, "ledger-mark")
        write = self._empty if is_behind else self._fill
        self._writing = asyncio.get_running_loop().run_in_executor(self._writer, write)
        await asyncio.wait({self._writing}, timeout=self._limit_s)

    def _empty(self) -> None:
        """Empty the mark: that needs no disk space.

        It need not outlive a boot, which ends all workers.
        """
        with contextlib.suppress(OSError):  # the disk is read-only, or has no room for a name
            os.close(_open_own(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
            self._is_behind = True

    def _fill(self) -> None:
        """Fill the mark: a disk that has no room for it is tried again with the next record."""
        with contextlib.suppress(OSError):
            fd = _open_own(self._path, os.O_WRONLY | os.O_CREAT)
            try:
                os.write(fd, b"current\n")
            finally:
                os.close(fd)
            self._is_behind = False

    def close(self) -> None:
        """Let the thread end; a write that the disk holds keeps it."""
        if self._writer is not None and (self._writing is None or self._writing.done()):
            self._writer.shutdown(wait=False)
            self._writer = None


def last_record(data: bytes) -> tuple[bytes, int]:
    """(payload, end) of the last whole record before the first broken one; (b"", 0) without any.

    No record is empty: a power cut leaves zeros where a file was extended and not yet written, and
    their checksum would be right.
    """
    payload, offset = b"", 0
    while offset + _FRAME.size <= len(data):
        size, checksum = _FRAME.unpack_from(data, offset)
        start = offset + _FRAME.size
        body = data[start : start + size]
        if size == 0 or len(body) < size or zlib.crc32(body) != checksum:
            break
        payload, offset = body, start + size
    return payload, offset


def _memory(payload: bytes) -> Memory:
    """The memory of a record.

    Raises:
        msgspec.DecodeError: no memory, or one of another version.
    """
    try:
        return _decoded(payload)
    except msgspec.DecodeError:
        raise
    except UNREADABLE as error:
        raise msgspec.DecodeError(str(error)) from error


def _decoded(payload: bytes) -> Memory:
    version = _version_decoder.decode(payload).version
    if version > MEMORY_VERSION:
        raise msgspec.ValidationError(
            f"version: {version}, written by a newer agent; this one reads up to {MEMORY_VERSION}"
        )
    return _decoder.decode(payload)


def _open_own(path: Path, flags: int) -> int:
    """Open a file for the node's account alone, whatever the umask.

    The last resort has another umask. An existing file that others may read is closed to them; no
    link is followed.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, OWN_MODE)
    file_ownership.give(fd, path.parent)
    with contextlib.suppress(OSError):  # another process's, or on a disk that takes no write
        if stat.S_IMODE(os.fstat(fd).st_mode) & ~OWN_MODE:
            os.fchmod(fd, OWN_MODE)
    return fd


def _is_empty(mark: Path) -> bool:
    """Whether a mark is there and empty."""
    try:
        return mark.stat().st_size == 0
    except OSError:
        return False


def frame(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


@contextlib.contextmanager
def exclusive(state_dir: Path) -> Generator[None]:
    """Hold the node: an agent and a `--go-home` never work on it at the same time.

    Raises:
        Unavailable: another process holds it, or the disk refuses the lock's file, which exists
            since the node's first agent.
        ConfigError: this account cannot have a lock there, whatever the disk does.
    """
    path = lock_path(state_dir)
    try:
        fd = _lock_file(path)
    except OSError as error:
        if is_disk_error(error):
            raise Unavailable(f"{path}: {error}") from error
        raise ConfigError(f"state_dir: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Unavailable(f"{state_dir}: another agent works on this node") from None
    else:
        yield
    finally:
        os.close(fd)


def _lock_file(path: Path) -> int:
    """The lock's descriptor; on a read-only disk for reading, which locks as well."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _open_own(path, os.O_WRONLY | os.O_CREAT)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
