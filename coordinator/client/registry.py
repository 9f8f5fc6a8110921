"""The cell that runs on this machine, as a file with a lock.

The process that starts a cell holds `cell.lock` for as long as the cell runs, and describes it in
`cell.json`. A client reads the file and checks that the process still lives. The lock, not the
file, decides whether a cell runs: the kernel releases it however its holder ends.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from common.decoding import UNREADABLE
from common.errors import ConfigError
from common.procfs import start_ticks

SCHEMA_VERSION = 1


class CellInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that runs here.

    pid, start_ticks: its process; the start time, in clock ticks since boot, distinguishes it from
        a later process with the same pid.
    run_dir: the directory of its files.
    nats_url: empty until its nats-server runs: it is being started, and cannot be reached yet.
    """

    cell: str
    nats_url: str
    pid: int
    start_ticks: int
    run_dir: str
    started_at_s: float
    schema_version: int = SCHEMA_VERSION


class _VersionOnly(msgspec.Struct):
    schema_version: int = SCHEMA_VERSION


class CellRuns(ConfigError):  # noqa: N818 - a state of this machine, not a mistake
    """Another cell is in the way: one machine and user run one at a time."""

    @classmethod
    def of(cls, other: CellInfo) -> CellRuns:
        """Says which process it is and how to stop it."""
        return cls(
            f"cell {other.cell} runs here already, as process {other.pid}; "
            f"stop it with Ctrl-C where it runs or `kill {other.pid}`"
        )


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """The registry's directory: $ARYL_HOME, else $XDG_RUNTIME_DIR/aryl, else /tmp/aryl-<uid>."""
    if environ.get("ARYL_HOME"):
        return Path(environ["ARYL_HOME"])
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "aryl"
    return Path(f"/tmp/aryl-{os.getuid()}")


def find(directory: Path | None = None) -> CellInfo | None:
    """The cell that runs here and can be reached; None without one, also if it is dead.

    Raises:
        ConfigError: the directory belongs to another user or others can write to it, or the cell is
            of another version.
    """
    info = _shown(directory or home())
    return info if info is not None and info.nats_url and _lives(info) else None


def left_behind(directory: Path | None = None) -> CellInfo | None:
    """A cell whose process was killed: it could not stop its own processes.

    Its file stays until the next cell is registered. Errors as `find`.
    """
    info = _shown(directory or home())
    return info if info is not None and not _lives(info) else None


def _lives(info: CellInfo) -> bool:
    return 0 < start_ticks(info.pid) == info.start_ticks


def _shown(directory: Path) -> CellInfo | None:
    if not directory.exists():
        return None
    _check_owner(directory)
    return read_file(directory / "cell.json")


class Entry:
    """The displayed fields of a registered cell."""

    def __init__(self, path: Path, info: CellInfo) -> None:
        self._path = path
        self._info = info

    def show(self, *, nats_url: str) -> None:
        """Its nats-server runs: from now on the cell is found."""
        self._info = msgspec.structs.replace(self._info, nats_url=nats_url)
        _write(self._path, self._info)


@contextmanager
def register(info: CellInfo, directory: Path | None = None) -> Generator[Entry]:
    """Hold the lock and show `info` for as long as the block runs.

    To be entered before the first process of the cell: a killed one is found by its file.

    Raises:
        CellRuns: a cell runs here already.
        ConfigError: the directory is not ours alone.
    """
    directory = directory or home()
    _make(directory)
    shown = directory / "cell.json"
    lock = os.open(directory / "cell.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(lock, shown)
        _write(shown, info)
        try:
            yield Entry(shown, info)
        finally:
            # Before the lock goes: the next holder's file must not be taken for ours.
            with suppress(FileNotFoundError):
                shown.unlink()
    finally:
        os.close(lock)


def _lock(lock: int, shown: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = read_file(shown)
        if other is None:
            raise CellRuns(
                f"a cell is just starting or stopping here ({shown.parent}); try again"
            ) from None
        raise CellRuns.of(other) from None


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory}: {error.strerror}; set ARYL_HOME to a directory of your own"
        ) from None
    _check_owner(directory)


def _check_owner(directory: Path) -> None:
    """Another user's directory could send us to another user's cell."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(
            f"{directory} is not a directory of yours; set ARYL_HOME to one that only you can use"
        )
    if found.st_mode & 0o022:
        raise ConfigError(f"{directory}: others can write to it; `chmod 700 {directory}`")


def read_file(path: Path) -> CellInfo | None:
    """None of a file that is not there or is damaged.

    Raises:
        ConfigError: it is of another version of `aryl`, which may mean something else by its words.
    """
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_VersionOnly).schema_version
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"{path}: field schema_version: {version}, expected {SCHEMA_VERSION}: a cell of "
                "another version of aryl runs here or was killed; use that version, or stop the "
                "cell and remove the file"
            )
        return msgspec.json.decode(data, type=CellInfo)
    except (FileNotFoundError, *UNREADABLE):
        return None


def _write(path: Path, info: CellInfo) -> None:
    """Write all or nothing: a reader must never see half of it."""
    draft = path.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(info) + b"\n")
    draft.replace(path)
