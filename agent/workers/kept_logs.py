"""Keeps the logs of workers that have ended and left the worker table. An edge.

<directory>/<key>.log     the worker's last output
<directory>/<key>.log.1   the part before it that its shim moved aside, where there is one
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from msgspec import Struct

from agent.shim import files as shim_files
from agent.workers.record import directory_name, file_tail
from common.clock import Clock
from common.model import WorkerKey

SUFFIX = ".log"
OLD_SUFFIX = ".log.1"


class _Kept(Struct, frozen=True, order=True):
    """One worker's log: the newer of its files decides its age."""

    kept_at_ns: int
    name: str
    size_bytes: int


class KeptLogs:
    """A directory of logs that never outgrows its limits; the oldest go first.

    Args:
        directory: on the file system of the workers' directories, because logs are moved there.
        max_count: logs of this many workers are kept.
        max_bytes: and no more than this in all.
        scan: how the directory is listed.

    Several workers may be forgotten at one time, and an operator may clean up meanwhile. A log that
    has disappeared when its turn comes needs no removal, and a missing directory is made again.
    """

    def __init__(
        self,
        directory: Path,
        *,
        clock: Clock,
        max_count: int,
        max_bytes: int,
        scan: Callable[[Path], Iterable[os.DirEntry[str]]] = os.scandir,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._scan = scan

    def keep(self, key: WorkerKey, worker_directory: Path) -> None:
        """Take the log out of a worker's directory; after a crash in between, take the rest of it.

        Raises:
            ConfigError: the key is not a valid place.
            OSError: the file cannot be moved.
        """
        name = directory_name(key)
        now_s = self._clock.wall_s()
        for source, suffix in (
            (shim_files.LOG_FILE, SUFFIX),
            (shim_files.OLD_LOG_FILE, OLD_SUFFIX),
        ):
            path = worker_directory / source
            # A link in a job's own directory could name any file of this machine.
            if not _is_plain(path):
                continue
            with suppress(FileNotFoundError):  # it went with its worker's directory
                os.utime(path, (now_s, now_s), follow_symlinks=False)
                self._move(path, self._directory / f"{name}{suffix}")
        self.prune()

    def _move(self, path: Path, target: Path) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            path.replace(target)
        except FileNotFoundError:  # the directory went as soon as it was made: once more
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.replace(target)

    def tail(self, key: WorkerKey, max_bytes: int) -> bytes | None:
        """The end of a log; None when it was never kept, or is no longer.

        Raises:
            ConfigError: the key is not a valid place.
        """
        name = directory_name(key)
        newest, older = self._directory / f"{name}{SUFFIX}", self._directory / f"{name}{OLD_SUFFIX}"
        if not newest.exists() and not older.exists():
            return None
        data = file_tail(newest, max_bytes)
        if len(data) < max_bytes:
            data = file_tail(older, max_bytes - len(data)) + data
        return data

    def prune(self) -> None:
        """Remove the oldest logs beyond the limits."""
        fitting: list[_Kept] = []
        for log in sorted(self._all(), reverse=True):
            if log.size_bytes > self._max_bytes:  # it must not push out all the others
                self._remove(log)
            else:
                fitting.append(log)
        sums_bytes = accumulate(log.size_bytes for log in fitting)
        for index, (log, sum_bytes) in enumerate(zip(fitting, sums_bytes, strict=True)):
            if index >= self._max_count or sum_bytes > self._max_bytes:
                self._remove(log)

    def _remove(self, log: _Kept) -> None:
        for suffix in (SUFFIX, OLD_SUFFIX):
            (self._directory / f"{log.name}{suffix}").unlink(missing_ok=True)

    def _all(self) -> Iterator[_Kept]:
        found: dict[str, _Kept] = {}
        try:
            entries = list(self._scan(self._directory))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            suffix = next((s for s in (OLD_SUFFIX, SUFFIX) if entry.name.endswith(s)), None)
            if suffix is None:
                continue
            try:
                seen = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # pruned by another one that is forgotten at the same time
                continue
            name = entry.name.removesuffix(suffix)
            known = found.get(name) or _Kept(0, name, 0)
            found[name] = _Kept(
                max(known.kept_at_ns, seen.st_mtime_ns), name, known.size_bytes + seen.st_size
            )
        yield from found.values()


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False
