"""Finds the live processes that hold fake GPUs, from /proc.

The table of processes is real: a job that got a GPU by UUID in CUDA_VISIBLE_DEVICES holds that GPU
for as long as its process lives, whatever Aryl believes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from agent.proc.process_tree import environ_of
from common.decoding import UNREADABLE
from common.model import NonNegativeInt, Ratio
from common.procfs import stat_fields, ticks_of

BUSY_ENV = "ARYL_FAKE_GPU_BUSY_RATIO"
MEMORY_ENV = "ARYL_FAKE_GPU_MEMORY_BYTES"
USAGE_FILE_ENV = "ARYL_FAKE_GPU_USAGE_FILE"
VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"
MPS_ENV = "CUDA_MPS_PIPE_DIRECTORY"
"""A process that has it computes through the Multi-Process Service of that directory (CUDA's own
variable)."""

YOUNG_SCANS = 4
"""A process is read again this often: between fork and exec it still shows its parent's
environment."""
FORGET_SCANS = 15
"""A process without GPUs is read again after this many scans: its pid may belong to another
process, or it may have called exec."""
MAX_ENVIRON_BYTES = 1_000_000
KERNEL_THREAD = 0x0020_0000
"""PF_KTHREAD among the flags of /proc/PID/stat: it has no environment. A kernel thread that becomes
a program loses the flag."""


class Usage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process's usage of each GPU it holds; None is the GPU model's default."""

    busy_ratio: Ratio | None = None
    memory_bytes: NonNegativeInt | None = None


class Holder(Struct, frozen=True, kw_only=True):
    """One live process and the fake GPUs that it was given."""

    pid: int
    uuids: tuple[str, ...]
    usage: Usage
    is_mps_client: bool = False


class _Entry(Struct, kw_only=True):
    start_ticks: int
    scans: int = 0
    uuids: tuple[str, ...] = ()
    is_mps_client: bool = False
    usage: Usage = Usage()
    usage_file: Path | None = None
    usage_mtime_ns: int = -1


class ProcessTable:
    """Scans /proc; cheap enough for a dozen agents at 1 Hz on two cores.

    An environment is read when its process is new, a few times while it is young, and then only
    every `FORGET_SCANS` scans; processes that hold a GPU are checked by start time at each scan.
    """

    def __init__(self, uuids: Collection[str], proc: Path = Path("/proc")) -> None:
        self._uuids = frozenset(uuids)
        self._proc = proc
        self._entries: dict[int, _Entry] = {}

    def scan(self) -> list[Holder]:
        """Every process that holds one of the GPUs now, by pid."""
        pids = _pids(self._proc)
        for pid in self._entries.keys() - pids:
            del self._entries[pid]
        holders: list[Holder] = []
        for pid in sorted(pids):
            entry = self._look_at(pid)
            if entry is not None and entry.uuids:
                self._refresh_usage(entry)
                holders.append(
                    Holder(
                        pid=pid,
                        uuids=entry.uuids,
                        usage=entry.usage,
                        is_mps_client=entry.is_mps_client,
                    )
                )
        return holders

    def _look_at(self, pid: int) -> _Entry | None:
        entry = self._entries.get(pid)
        if entry is not None:
            entry.scans += 1
            is_settled = entry.scans > YOUNG_SCANS
            if is_settled and not entry.uuids and (entry.scans + pid) % FORGET_SCANS:
                return entry
        fields = stat_fields(pid, proc=str(self._proc))
        ticks = ticks_of(fields)
        if not ticks:
            self._entries.pop(pid, None)
            return None
        if entry is None or entry.start_ticks != ticks:
            entry = self._entries[pid] = _Entry(start_ticks=ticks)
        elif entry.scans > YOUNG_SCANS and entry.uuids:
            return entry
        if int(fields[6]) & KERNEL_THREAD:
            entry.uuids = ()
        else:
            self._read_environ(pid, entry)
        return entry

    def _read_environ(self, pid: int, entry: _Entry) -> None:
        environ = _environ(pid, self._proc)
        visible = environ.get(VISIBLE_ENV, "").split(",")
        entry.uuids = tuple(uuid for uuid in visible if uuid in self._uuids)
        entry.is_mps_client = bool(environ.get(MPS_ENV))
        if not entry.uuids:
            return
        file = environ.get(USAGE_FILE_ENV, "")
        if not file:
            entry.usage, entry.usage_file = _usage_of(environ), None
        elif entry.usage_file != Path(file):
            entry.usage, entry.usage_file, entry.usage_mtime_ns = Usage(), Path(file), -1

    def _refresh_usage(self, entry: _Entry) -> None:
        """Refresh the usage; a missing or half-written file leaves the last one in force."""
        if entry.usage_file is None:
            return
        try:
            mtime_ns = entry.usage_file.stat().st_mtime_ns
            if mtime_ns == entry.usage_mtime_ns:
                return
            entry.usage = msgspec.json.decode(entry.usage_file.read_bytes(), type=Usage)
        except (OSError, *UNREADABLE):
            return
        entry.usage_mtime_ns = mtime_ns


def _pids(proc: Path) -> set[int]:
    # scandir, not iterdir: no Path object for each of some hundred processes, each second.
    with os.scandir(proc) as entries:
        return {int(entry.name) for entry in entries if entry.name.isdigit()}


def _environ(pid: int, proc: Path) -> dict[str, str]:
    """Environment of a process; empty where access is denied, which is no error."""
    data = environ_of(pid, proc=proc, max_bytes=MAX_ENVIRON_BYTES)
    if VISIBLE_ENV.encode() not in data:
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0"))
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def _usage_of(environ: Mapping[str, str]) -> Usage:
    """The usage that a process states for itself; an invalid value is ignored."""
    values: dict[str, str] = {}
    for field, name in (("busy_ratio", BUSY_ENV), ("memory_bytes", MEMORY_ENV)):
        with suppress(KeyError, msgspec.ValidationError):
            msgspec.convert({field: environ[name]}, Usage, strict=False)
            values[field] = environ[name]
    return msgspec.convert(values, Usage, strict=False)
