"""A keeper at the moments when somebody arms while it ends: no order is lost between two looks."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.lease import last_resort_process
from agent.lease.last_resort import KEEPER
from agent.proc.process_tree import has_lock
from common.clock import SystemClock
from tests.harness.node.last_resort_keeper import KeeperHarness, Look, make_keeper_harness
from tests.harness.node.task_limit import WITHOUT_TASKS

pytestmark = pytest.mark.slow
harness = pytest.fixture(make_keeper_harness)


class Gate:
    """Holds a command of shell until a test lets it go."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.waiting = f"read go < {path}"

    def open(self, times: int) -> None:
        """Let so many commands go."""
        os.write(self._fd, b"\n" * times)

    def close(self) -> None:
        """Hold nobody any more."""
        os.close(self._fd)


@pytest.fixture
async def gate(tmp_path: Path) -> AsyncGenerator[Gate, None]:
    """One in the test's directory."""
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open(10)  # whatever a test that failed left waiting
    gate.close()


def due_now(harness: KeeperHarness, words: str) -> str:
    """Orders to say some words in a file now."""
    argv = ["sh", "-c", f"echo {words} >> {harness.mark}"]
    now_s = SystemClock().now_s()
    return json.dumps({"boot_id": last_resort_process.boot_id(), "fire_at_s": now_s, "argv": argv})


async def test_what_is_armed_while_the_command_runs_stays_armed(
    harness: KeeperHarness, gate: Gate
) -> None:
    """The node was lent anew before the way home of its last loan had ended."""
    resort = harness.new_resort(f"echo fired >> {harness.mark}; {gate.waiting}")
    await resort.arm(0.0)
    await harness.until(lambda: harness.fired_count == 1, "the command runs")
    await resort.arm(0.0)  # the same command: only the instant tells it from what is done
    gate.open(2)
    await harness.until(lambda: not harness.keepers(), "the keeper left")
    assert harness.fired_count == 2
    assert not harness.path.exists()


async def test_what_is_disarmed_while_the_command_runs_is_done(
    harness: KeeperHarness, gate: Gate
) -> None:
    """The keeper then finds nothing to remove, and leaves without a word."""
    await harness.new_resort(f"echo fired >> {harness.mark}; {gate.waiting}").arm(0.0)
    await harness.until(lambda: harness.fired_count == 1, "the command runs")
    await harness.resort.disarm()
    gate.open(1)
    await harness.until(lambda: not harness.keepers(), "the keeper left")
    assert harness.fired_count == 1
    assert harness.path.with_name(f"{harness.path.name}.log").read_text() == ""


def put(harness: KeeperHarness, text: str) -> None:
    """Another file in the place of the keeper's, as whoever arms puts it there."""
    new = harness.path.with_name("new")
    new.write_text(text)
    new.replace(harness.path)


async def test_a_keeper_goes_where_its_directory_goes(tmp_path: Path) -> None:
    """Its lock does: whoever arms in the new place finds it taken, and must find a keeper."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    async with asynccontextmanager(make_keeper_harness)(old) as harness:
        await harness.resort.arm(600.0)
        lock = harness.path.with_name(f"{harness.path.name}.lock")
        await harness.until(
            lambda: any(has_lock(pid, lock) for pid in harness.keepers()), "it is kept"
        )
        old.rename(new)
        moved = KeeperHarness(new)
        await moved.resort.arm(0.0)
        await harness.until(lambda: not harness.keepers(), "the keeper left")
        assert (moved.fired_count, moved.keepers()) == (1, [])


async def start_keeper(
    harness: KeeperHarness, *before: str, stderr: int | None = None
) -> asyncio.subprocess.Process:
    """A keeper as an agent starts it, and not detached; `before` are words before its command."""
    return await asyncio.create_subprocess_exec(
        *before, sys.executable, "-I", "-S", str(KEEPER), str(harness.path), stderr=stderr
    )


async def begun(harness: KeeperHarness, look: Look, keeper: asyncio.subprocess.Process) -> None:
    """Return when the keeper looks; one that has left does so no more."""
    await harness.until(
        lambda: look.is_begun() or keeper.returncode is not None, "the keeper looks"
    )
    assert keeper.returncode is None, "the keeper left without a look"


async def test_a_keeper_that_leaves_looks_again_when_its_lock_is_free(
    harness: KeeperHarness,
) -> None:
    """Who armed before that saw the lock taken and started no other one; who arms after it sees
    the lock free."""
    first = Look(harness.path, 1)
    keeper = await start_keeper(harness)
    await begun(harness, first, keeper)
    assert last_resort_process.take_lock(str(harness.path)) is None
    last = Look(harness.path, 2)
    first.answer("")
    await begun(harness, last, keeper)
    lock_fd = last_resort_process.take_lock(str(harness.path))
    assert lock_fd is not None
    os.close(lock_fd)
    put(harness, due_now(harness, "fired"))
    last.answer(due_now(harness, "armed"))
    assert await keeper.wait() == 0
    assert harness.fired_count == 1


async def test_what_is_armed_between_the_last_look_and_the_end_stays_armed(
    harness: KeeperHarness,
) -> None:
    """A keeper removes the order that it looked at, and no other one that has come since."""
    first = Look(harness.path, 1)
    keeper = await start_keeper(harness)
    await begun(harness, first, keeper)
    second = Look(harness.path, 2)
    done = due_now(harness, "done")
    first.answer(done)
    await begun(harness, second, keeper)
    put(harness, due_now(harness, "fired"))
    second.answer(done)
    assert await keeper.wait() == 0
    assert harness.fired_count == 1


async def test_a_keeper_that_can_start_no_process_stays(harness: KeeperHarness) -> None:
    """A job that fills its account's task limit fills that of the keeper, which must outlive it."""
    put(harness, due_now(harness, "fired"))
    keeper = await start_keeper(harness, *WITHOUT_TASKS, stderr=asyncio.subprocess.PIPE)
    assert keeper.stderr is not None
    assert (await keeper.stderr.readline()).endswith(b"Resource temporarily unavailable\n")
    harness.path.unlink()
    assert (await keeper.stderr.read(), await keeper.wait()) == (b"", 0)


async def test_orders_that_cannot_be_read_for_a_while_stay_armed(harness: KeeperHarness) -> None:
    """A machine without a free descriptor hides the file, which is no disarm."""
    first = Look(harness.path, 1)
    keeper = await start_keeper(harness, stderr=asyncio.subprocess.PIPE)
    assert keeper.stderr is not None
    await begun(harness, first, keeper)
    put(harness, due_now(harness, "put"))
    order = json.loads(due_now(harness, "fired"))
    order["fire_at_s"] += 1.0
    before = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (0, before[1]))
    first.answer(json.dumps(order))
    # The orders stand: it runs their command, which has no descriptor either.
    assert b"Too many open files" in await keeper.stderr.readline()
    resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, before)
    put(harness, json.dumps(order))
    assert await keeper.wait() == 0
    assert harness.fired_count == 1
