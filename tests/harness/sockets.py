"""Short paths for unix sockets, whose names have a limit that directories do not have."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def short_path(directory: Path) -> Iterator[Path]:
    """The directory by its descriptor: a few bytes, for this process and for its children.

    A socket's path may have 107 bytes at most, and a temporary directory alone may have more.
    """
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)
