"""Detects whether this machine has rebooted, where the boot id alone cannot be trusted.

systemd-nspawn and LXD lay a boot id of the container over the kernel's. A daemon for which a unit's
settings mount another /proc still sees the kernel's: one boot then has two ids.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from agent.workers.record import is_shim_alive, key_of, read_record
from common.clock import BOOT_ID
from common.errors import ConfigError

log = logging.getLogger(__name__)

PID_1 = Path("/proc/1/root")


def check(seen: str, *, root: Path = PID_1) -> None:
    """Compare the boot id that this agent sees with that of PID 1, whose children its shims are.

    An agent without the right to look there passes: `this_boot` detects a difference by its
    workers.

    Raises:
        ConfigError: they differ.
    """
    try:
        theirs = (root / BOOT_ID.relative_to("/")).read_text("ascii").strip()
    except (OSError, ValueError):
        return
    if theirs and theirs != seen:
        raise ConfigError(_two_names(seen, "PID 1", theirs))


def this_boot(run_dir: Path, *, known: str, seen: str) -> str:
    """The boot id that counts: `seen`, but `known` while a worker proves that there was no boot.

    Only agents start shims, after they wrote down the present boot. A shim that lives before this
    agent has started any has therefore seen no boot since then.

    Args:
        run_dir: the directories of workers.
        known: the boot id in the node's ledger.
        seen: the boot id that this process reads now.
    """
    for directory in sorted(run_dir.iterdir()) if run_dir.is_dir() else ():
        theirs = _living(directory, seen)
        if theirs and theirs != seen:
            log.error("configuration: %s", _two_names(seen, f"worker {directory.name}", theirs))
        if theirs and known != seen:
            log.error("configuration: %s", _two_names(seen, "the node's ledger", known))
            return known
    return seen


def _living(directory: Path, seen: str) -> str:
    """The boot id that a living shim wrote; empty when none lives there."""
    if key_of(directory) is None:
        return ""
    try:
        record = read_record(directory)
    except (msgspec.DecodeError, OSError):
        return ""
    return record.boot_id if record and is_shim_alive(directory, record, seen) else ""


def _two_names(seen: str, other: str, theirs: str) -> str:
    return (
        f"{BOOT_ID}: this agent sees {seen}, {other} {theirs}, in one boot: the file is masked, as "
        "in a container, for one of them only; run the agent where it sees what PID 1 sees"
    )
