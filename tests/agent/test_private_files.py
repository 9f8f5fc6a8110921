"""The files of a node's state are its account's alone, under any umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from pathlib import Path

import pytest

from agent.core.state import first_memory
from agent.storage.ledger import Ledger, exclusive
from tests.agent.bench import settings
from tests.tables import each_row

CLOSED = 0o600
NAMES = ("ledger", "ledger.current", "ledger.torn", "lock")


@pytest.fixture(autouse=True)
def wide_umask() -> Generator[None]:
    """Of a last resort, which is no child of the agent's unit, or wider."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    """Of every file."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


async def saved(directory: Path, generation: int) -> None:
    """A record more, as whoever holds the node writes it."""
    memory = first_memory(settings(), "boot")
    memory.generation = generation
    with exclusive(directory):
        ledger = Ledger(directory)
        ledger.load()
        await ledger.save(memory)
        ledger.close()


async def test_ledger_and_lock_are_made_for_their_account_alone(tmp_path: Path) -> None:
    """They say who works here and on which GPUs."""
    await saved(tmp_path, 1)
    assert modes(tmp_path) == {"ledger": CLOSED, "ledger.current": CLOSED, "lock": CLOSED}


@each_row("open_to_others", ["ledger", "lock", "ledger.new", "ledger.torn"])
async def test_files_that_others_may_read_are_closed_to_them(
    tmp_path: Path, open_to_others: str
) -> None:
    """Those of an earlier version, and what a crash left of a rewrite; a torn end is so, too."""
    await saved(tmp_path, 1)
    (tmp_path / open_to_others).touch()
    (tmp_path / open_to_others).chmod(0o644)
    with (tmp_path / "ledger").open("ab") as file:
        file.write(b"torn")
    await saved(tmp_path, 2)
    assert modes(tmp_path) == dict.fromkeys(NAMES, CLOSED)


async def test_a_ledger_that_is_only_appended_to_is_closed_too(tmp_path: Path) -> None:
    """One that was never rewritten, for the disk was full then."""
    await saved(tmp_path, 1)
    ledger = Ledger(tmp_path)
    assert ledger.load() is not None
    (tmp_path / "ledger").chmod(0o644)
    memory = first_memory(settings(), "boot")
    memory.generation = 2
    await ledger.save(memory)
    ledger.close()
    assert modes(tmp_path)["ledger"] == CLOSED
