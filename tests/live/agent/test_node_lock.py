"""Who has a node, by the kernel's word and by what its files say, which may be of another boot."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from agent.proc.process_tree import has_lock
from agent.settings import AgentSettings
from agent.storage import node_lock
from agent.storage.ledger import exclusive
from common.clock import SystemClock
from common.errors import Unavailable
from common.settings import load
from tests.harness.node.daemon import DaemonHarness
from tests.harness.node.lent_node import home, make_lent, make_quiet_harness
from tests.harness.node.workers import PATIENCE_S

CLOCK = SystemClock()
EARLIER = "00000000-0000-4000-8000-000000000000"

pytestmark = pytest.mark.slow
quiet_harness = pytest.fixture(make_quiet_harness)


async def test_the_word_of_a_holder_that_is_gone_makes_no_ledger_one_of_this_boot(
    quiet_harness: DaemonHarness,
) -> None:
    """After a boot an agent has taken the node and not yet written who it is: ledger and holder's
    file agree with each other, and its leases and workers are over all the same."""
    harness = quiet_harness
    settings = load(await make_lent(harness, boot_id=EARLIER), AgentSettings)
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    said = f"{EARLIER} {gone.pid:010d} {1:020d} {7:012d} {0.0:020.6f}\n"
    node_lock.path_in(harness.state_dir).write_text(said)
    with (
        exclusive(harness.state_dir),
        pytest.raises(Unavailable, match=r"another agent works on this node$"),
    ):
        await home(settings, harness)


def locks() -> str:
    """The kernel's table of all that is locked."""
    return Path("/proc/locks").read_text()


async def test_who_waits_for_a_lock_does_not_have_it(tmp_path: Path) -> None:
    """The kernel names both in one table."""
    path = tmp_path / "lock"
    path.touch()
    other = tmp_path / "other"
    other.touch()
    script = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX)"
    with exclusive(tmp_path):
        waits = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(path))
        async with CLOCK.timeout(PATIENCE_S):
            while f" {waits.pid} " not in locks():
                await CLOCK.sleep(0.02)
        assert has_lock(os.getpid(), path)
        assert not has_lock(os.getpid(), other)
        assert not has_lock(waits.pid, path)
        assert not has_lock(os.getpid(), tmp_path / "none")
    assert await waits.wait() == 0
    assert not has_lock(os.getpid(), path)


async def test_a_lock_of_another_kind_on_the_same_file_is_not_that_lock(tmp_path: Path) -> None:
    """One by fcntl(2) keeps nobody from the node, so whoever has it is not the node's holder."""
    path = tmp_path / "lock"
    script = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); input()"
    )
    with exclusive(tmp_path):
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, str(path), stdin=asyncio.subprocess.PIPE
        )
        async with CLOCK.timeout(PATIENCE_S):
            while f" {other.pid} " not in locks():
                await CLOCK.sleep(0.02)
        assert not has_lock(other.pid, path)
        assert has_lock(os.getpid(), path)
        await other.communicate(b"\n")
