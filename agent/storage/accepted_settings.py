"""Keeps the settings that an agent accepted last, for a return after their file has changed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from agent.settings import AgentSettings
from agent.shim import files as shim_files
from agent.storage import file_ownership

FILE = "settings.json"
OWNER_ONLY = 0o600
"""A URL may hold a password, and a command a token."""


def keep(state_dir: Path, settings: AgentSettings) -> None:
    """Write the settings to disk; synced when it returns. Unchanged settings cost no write.

    Raises:
        OSError: the disk refuses it; the earlier file is whole.
    """
    told = _told(msgspec.structs.replace(settings, state_dir=str(state_dir.absolute())))
    path = state_dir / FILE
    if shim_files.read_json(str(path)) == told:
        return
    try:
        shim_files.write_json(
            str(path),
            told,
            is_durable=True,
            mode=OWNER_ONLY,
            owned=lambda fd: file_ownership.give(fd, state_dir),
        )
    except OSError:
        with suppress(OSError):  # a full disk needs that space back
            path.with_name(f"{FILE}.new").unlink()
        raise


def kept(state_dir: Path) -> AgentSettings | None:
    """The settings that `keep` wrote last.

    None if there are none, or of another version of Aryl.
    """
    told = shim_files.read_json(str(state_dir / FILE))
    try:
        return None if told is None else msgspec.convert(told, AgentSettings)
    except msgspec.ValidationError:
        return None


def _told(values: Struct) -> dict[str, object]:
    """The settings that differ from the defaults.

    A key that is left out cannot disturb another version that does not have it.
    """
    told: dict[str, object] = {}
    for field in msgspec.structs.fields(values):
        value, make = getattr(values, field.name), field.default_factory
        if value != (field.default if make is msgspec.NODEFAULT else make()):
            is_table = isinstance(value, Struct)
            told[field.encode_name] = _told(value) if is_table else _as_read(value)
    return told


def _as_read(value: object) -> object:
    """The value as read from a file, where a tuple is a list."""
    return msgspec.json.decode(msgspec.json.encode(value))
