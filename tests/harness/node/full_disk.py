"""Disks that take no more, for tests: a small tmpfs where the account may mount one, and a `write`
that fails as one would. Must not know what is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

LIBC = ctypes.CDLL(None, use_errno=True)
"""Its mount(2): a test may mount a hundred disks, and a process for each costs more than they."""
MNT_DETACH = 2


class Writes:
    """`os.write` of a disk that a test fills and empties."""

    def __init__(self) -> None:
        self.room_bytes: int | None = None
        """What it still takes; None is as much as one likes."""
        self.error = errno.ENOSPC

    def __call__(self, fd: int, data: bytes) -> int:
        """As `os.write`: what fits first, the error after that.

        Raises:
            OSError: there is no room for a single byte.
        """
        if self.room_bytes is None:
            return os.write(fd, data)
        if self.room_bytes == 0:
            raise OSError(self.error, os.strerror(self.error))
        written = os.write(fd, data[: self.room_bytes])
        self.room_bytes -= written
        return written


class SmallDisk:
    """A file system of a few megabytes of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filling = path / "filling"

    def fill(self) -> None:
        """Leave no room for a single byte."""
        with self._filling.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"x" * size)

    def empty(self) -> None:
        """Make room again."""
        self._filling.unlink(missing_ok=True)

    def freeze(self) -> bool:
        """Take no write at all, as after an error of the device (mount(8), errors=remount-ro).

        Returns:
            Whether it is so; not while somebody has a file there open for writing.
        """
        argv = ("mount", "-o", "remount,ro", str(self.path))
        return subprocess.run(argv, check=False, capture_output=True).returncode == 0

    def thaw(self) -> None:
        """Take writes again."""
        subprocess.run(("mount", "-o", "remount,rw", str(self.path)), check=True)


@contextlib.contextmanager
def small_disk(path: Path, *, size_bytes: int = 8 << 20) -> Generator[SmallDisk]:
    """A disk mounted at a new directory; the test is skipped where nobody may mount one."""
    path.mkdir()
    target, options = os.fsencode(path), f"size={size_bytes}".encode()
    if LIBC.mount(b"aryl-test", target, b"tmpfs", 0, options):
        pytest.skip(f"cannot mount a tmpfs here: {os.strerror(ctypes.get_errno())}")
    try:
        yield SmallDisk(path)
    finally:
        assert LIBC.umount2(target, MNT_DETACH) == 0
