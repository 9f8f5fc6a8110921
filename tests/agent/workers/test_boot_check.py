"""One boot may have two names, and a boot ends every worker: which of the two it was."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from agent.shim import files as shim_files
from agent.workers import boot_check
from common.clock import BOOT_ID
from common.errors import ConfigError
from common.messages import WorkerPhase
from common.model import StopReason, WorkerKey
from tests.harness.node.workers import WorkerHarness, is_alive, make_order, make_workers

pytestmark = pytest.mark.slow

WAIT = ("sleep", "600")
SEEN = shim_files.boot_id()


harness = pytest.fixture(make_workers)


def rewrite(harness: WorkerHarness, key: WorkerKey, **changes: object) -> None:
    """Change what the shim wrote; it writes again only when something happens."""
    path = harness.directory(key) / shim_files.STATUS_FILE
    shim_files.write_json(str(path), harness.raw(key) | changes, is_durable=False)


async def test_a_worker_whose_shim_lives_is_not_over_by_another_boot_id(
    harness: WorkerHarness,
) -> None:
    """A container masks the boot id for the shim or for the agent: the worker runs all the same, is
    not started a second time, hears its orders and ends as any other."""
    key = await harness.start(make_order(*WAIT))
    first = await harness.status(key)
    rewrite(harness, key, boot_id="masked")
    seen = await harness.status(key)
    assert (seen.phase, seen.pid, seen.shim_pid) == (first.phase, first.pid, first.shim_pid)
    assert (seen.phase, seen.error) == (WorkerPhase.RUNNING, "")
    assert await harness.new_runner().adopt() == (key,)
    await harness.start(make_order(*WAIT))
    assert (await harness.status(key)).pid == first.pid
    await harness.runner.stop(key, StopReason.CANCEL, 0.0)
    await harness.until_exited(key)
    assert not is_alive(first.pid)


async def test_what_a_dead_shim_of_another_boot_id_left_is_ended_before_it_is_over(
    harness: WorkerHarness,
) -> None:
    """Whoever has the directory's mark in its environment lives in this boot: while it does, the
    worker holds its GPUs."""
    key = await harness.start(make_order(*WAIT))
    first = await harness.status(key)
    os.kill(first.shim_pid, signal.SIGKILL)
    await harness.until(lambda: not is_alive(first.shim_pid), "the shim is dead")
    rewrite(harness, key, boot_id="masked")
    status = await harness.status(key)
    assert status.phase == WorkerPhase.STOPPING
    assert (await harness.until_exited(key)).error.startswith("shim lost")
    assert not is_alive(first.pid)


@pytest.mark.parametrize("is_another", [True, False])
async def test_after_a_boot_every_worker_is_over(harness: WorkerHarness, is_another: bool) -> None:
    """The numbers of a record of another boot may be anybody's by now, once in a while with the
    very start that is written there: nobody is signalled, and nothing lives."""
    key = await harness.start(make_order("true"))
    await harness.until_exited(key)
    lock = str(harness.directory(key) / shim_files.LOCK_FILE)
    await harness.until(lambda: not shim_files.is_locked(lock), "its shim has ended, too")
    bystander = await asyncio.create_subprocess_exec(*WAIT)
    try:
        ticks = shim_files.start_ticks(bystander.pid)
        numbers = {"pid": bystander.pid, "start_ticks": ticks, "shim_pid": bystander.pid}
        rewrite(
            harness, key, **numbers, shim_start_ticks=ticks + is_another, boot_id="another",
            phase="running", ended_boot_s=None,
        )  # fmt: skip
        status = await harness.status(key)
        assert status.phase == WorkerPhase.EXITED
        assert "booted" in status.error
        assert is_alive(bystander.pid)
    finally:
        bystander.kill()
        await bystander.wait()


async def test_a_living_worker_proves_that_there_was_no_boot(
    harness: WorkerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever sees another boot id than the ledger's goes on in the ledger's boot as long as
    something of it runs, and says what is wrong; nothing else is taken for a proof."""
    key = await harness.start(make_order(*WAIT))
    shim_pid = (await harness.status(key)).shim_pid
    with caplog.at_level(logging.ERROR):
        assert boot_check.this_boot(harness.run_dir, known=SEEN, seen=SEEN) == SEEN
        assert caplog.messages == []
        assert boot_check.this_boot(harness.run_dir, known="ledger's", seen=SEEN) == "ledger's"
        rewrite(harness, key, boot_id="masked")
        assert boot_check.this_boot(harness.run_dir, known=SEEN, seen=SEEN) == SEEN
    ledger, worker = caplog.messages
    assert ledger.startswith(f"configuration: {BOOT_ID}: this agent sees {SEEN}, the node's ledger")
    assert f"worker {key} masked" in worker
    await harness.runner.stop(key, StopReason.CANCEL, 0.0)
    await harness.until_exited(key)
    await harness.until(lambda: not is_alive(shim_pid), "the shim has ended")
    assert boot_check.this_boot(harness.run_dir, known="ledger's", seen=SEEN) == SEEN
    assert boot_check.this_boot(harness.run_dir / "none", known="ledger's", seen=SEEN) == SEEN


def test_a_boot_id_that_pid_1_does_not_see_is_a_configuration_error(tmp_path: Path) -> None:
    """The agent's start says which file and both ids; what it may not read proves nothing."""
    boot_check.check(SEEN, root=tmp_path)
    path = tmp_path / BOOT_ID.relative_to("/")
    path.parent.mkdir(parents=True)
    path.write_text(f"{SEEN}\n")
    boot_check.check(SEEN, root=tmp_path)
    path.write_text("masked\n")
    with pytest.raises(ConfigError, match=f"{BOOT_ID}: this agent sees {SEEN}, PID 1 masked"):
        boot_check.check(SEEN, root=tmp_path)


def test_a_lock_is_looked_at_and_not_taken(tmp_path: Path) -> None:
    """A shim that begins at that moment gets it; one that is gone holds nothing."""
    path = str(tmp_path / "lock")
    assert not shim_files.is_locked(path)
    assert not Path(path).exists()
    held = shim_files.take_lock(path)
    assert held is not None
    assert shim_files.is_locked(path)
    os.close(held)
    assert not shim_files.is_locked(path)
    again = shim_files.take_lock(path)
    assert again is not None
    os.close(again)
