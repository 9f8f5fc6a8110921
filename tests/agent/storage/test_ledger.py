"""The agent's ledger: what was written is there again, whatever broke in between."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from agent.core.state import MEMORY_VERSION, Memory, WorkerState, first_memory
from agent.storage.ledger import COMPACT_BYTES, Ledger, exclusive, frame, peek
from common.errors import ConfigError, Unavailable
from tests.harness.node.life import order, settings
from tests.tables import each_row


def memory(generation: int = 0) -> Memory:
    """A node's memory at a generation, with one worker."""
    found = first_memory(settings(), "boot-1")
    found.generation = generation
    found.workers["j1.1.0"] = WorkerState(order=order())
    return found


async def test_the_last_save_is_what_a_new_process_loads(tmp_path: Path) -> None:
    """Orders included, with their whole specs."""
    ledger = Ledger(tmp_path)
    assert ledger.load() is None
    for generation in range(5):
        await ledger.save(memory(generation))
    ledger.close()
    assert Ledger(tmp_path).load() == memory(4)


@pytest.mark.parametrize("cut", [1, 5, 20])
async def test_a_torn_last_record_costs_only_itself(tmp_path: Path, cut: int) -> None:
    """Power may fail in the middle of a write; the record before it counts."""
    ledger = Ledger(tmp_path)
    await ledger.save(memory(1))
    await ledger.save(memory(2))
    ledger.close()
    path = tmp_path / "ledger"
    path.write_bytes(path.read_bytes()[:-cut])
    again = Ledger(tmp_path)
    assert again.load() == memory(1)
    await again.save(memory(3))
    again.close()
    assert Ledger(tmp_path).load() == memory(3)


class Disk:
    """A disk that says what was done to it, in order; names are those of files and directories."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def write(self, fd: int, data: bytes) -> int:
        """As `os.write`."""
        self.done.append(("write", self._name(fd)))
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """As `os.fsync`."""
        self.done.append(("sync", self._name(fd)))
        os.fsync(fd)

    def said(self) -> list[tuple[str, str]]:
        """What was done since somebody asked."""
        done, self.done = self.done, []
        return done

    @staticmethod
    def _name(fd: int) -> str:
        return Path(f"/proc/self/fd/{fd}").readlink().name


async def test_what_was_saved_is_on_disk_with_its_name(tmp_path: Path) -> None:
    """Bytes are synced before anybody relies on them, and so is the directory that a file is new
    in: the first ledger, and the fresh one that takes the place of the old."""
    disk, home = Disk(), tmp_path / "node"
    ledger = Ledger(home, write=disk.write, sync=disk.sync)
    await ledger.save(memory(1))
    assert disk.said() == [("write", "ledger"), ("sync", "ledger"), ("sync", "node")]
    await ledger.save(memory(2))
    assert disk.said() == [("write", "ledger"), ("sync", "ledger")]
    ledger.close()
    again = Ledger(home, write=disk.write, sync=disk.sync)
    assert again.load() == memory(2)
    assert disk.said() == [("write", "ledger.new"), ("sync", "ledger.new"), ("sync", "node")]


@each_row("zeros", [7, 8, 20, 4096])
async def test_zeros_at_the_end_cost_nothing(tmp_path: Path, zeros: int) -> None:
    """What a power cut leaves of a write whose length reached the disk and whose bytes did not."""
    ledger = Ledger(tmp_path)
    await ledger.save(memory(1))
    ledger.close()
    path = tmp_path / "ledger"
    path.write_bytes(path.read_bytes() + bytes(zeros))
    again = Ledger(tmp_path)
    assert again.load() == memory(1)
    await again.save(memory(2))
    again.close()
    assert Ledger(tmp_path).load() == memory(2)


async def test_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    """A record that does not match its checksum never becomes the truth."""
    ledger = Ledger(tmp_path)
    await ledger.save(memory(1))
    size = (tmp_path / "ledger").stat().st_size
    await ledger.save(memory(2))
    ledger.close()
    data = bytearray((tmp_path / "ledger").read_bytes())
    data[size + 30] ^= 1
    (tmp_path / "ledger").write_bytes(data)
    assert Ledger(tmp_path).load() == memory(1)
    assert (tmp_path / "ledger.torn").exists()


async def test_a_memory_that_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    """A quiet node does not wear its disk."""
    ledger = Ledger(tmp_path)
    await ledger.save(memory(1))
    size = (tmp_path / "ledger").stat().st_size
    await ledger.save(memory(1))
    ledger.close()
    assert (tmp_path / "ledger").stat().st_size == size


async def test_a_long_ledger_is_compacted(tmp_path: Path) -> None:
    """It stays near one megabyte however long the agent lives."""
    ledger = Ledger(tmp_path)
    await ledger.save(memory(0))
    one = (tmp_path / "ledger").stat().st_size
    for generation in range(1, 2 * COMPACT_BYTES // one):
        await ledger.save(memory(generation))
        assert (tmp_path / "ledger").stat().st_size <= COMPACT_BYTES + 2 * one
    ledger.close()
    assert Ledger(tmp_path).load() == memory(2 * COMPACT_BYTES // one - 1)


async def test_a_ledger_of_something_else_is_refused(tmp_path: Path) -> None:
    """The error names the file; nothing is overwritten."""
    (tmp_path / "ledger").write_bytes(frame(b"\x01"))
    with pytest.raises(ConfigError, match="ledger"):
        Ledger(tmp_path).load()
    assert (tmp_path / "ledger").read_bytes() == frame(b"\x01")


@pytest.mark.parametrize("torn", [b"", b"torn"])
def test_a_ledger_of_a_newer_version_is_refused_and_left_as_it_is(
    tmp_path: Path, torn: bytes
) -> None:
    """What an older agent would read wrong, and then write back, would cost a newer one its
    workers; a file that it cannot read for other reasons is told apart by the field's name."""
    newer = {**msgspec.to_builtins(memory(1)), "version": MEMORY_VERSION + 1, "role": "of then"}
    path = tmp_path / "ledger"
    path.write_bytes(frame(msgspec.msgpack.encode(newer)) + torn)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"version: {MEMORY_VERSION + 1}, .*newer agent"):
        Ledger(tmp_path).load()
    assert peek(tmp_path) is None
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("ledger", before)]
    newer["role"] = "serving"  # all of it would fit
    path.write_bytes(frame(msgspec.msgpack.encode(newer)))
    assert peek(tmp_path) is None
    with pytest.raises(ConfigError, match="version"):
        Ledger(tmp_path).load()


def test_two_agents_never_work_on_one_node(tmp_path: Path) -> None:
    """The second one is told; after the first has left it may."""
    with exclusive(tmp_path), pytest.raises(Unavailable, match="another agent"):  # noqa: SIM117 - shows which of the two fails
        with exclusive(tmp_path):
            pass
    with exclusive(tmp_path):
        pass


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
