"""An agent that can start no thread, as where a job has filled the task limit, goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agent.lease import renewal
from tests.harness.node.task_limit import WITHOUT_TASKS
from tests.tables import each_row

ROOT = Path(renewal.__file__).parents[2]

FETCH = """
try:
    await page_fetcher(clock)("http://127.0.0.1:1/", 1.0)
except Unavailable as error:
    print(error)
"""
ARM = """
try:
    await KeeperLastResort(Path("orders"), ("true",), clock=clock).arm(60.0)
except Unavailable as error:
    print(error)
"""
BEAT = """
async with beating(Path(), clock):
    await clock.sleep(3 * BEAT_S)
print("can't start new thread")
"""


@each_row("doing", [FETCH, ARM, BEAT])
def test_a_thread_that_cannot_start_ends_no_agent(tmp_path: Path, doing: str) -> None:
    """A page is unread, a last resort is armed later and a beat is missed, and no more."""
    lines = "".join(f"    {line}\n" for line in doing.strip().splitlines())
    script = f"""
import asyncio
import resource
from pathlib import Path
from agent.lease.last_resort import KeeperLastResort
from agent.storage.node_lock import BEAT_S, beating
from agent.telemetry.page_fetch import page_fetcher
from common.clock import SystemClock
from common.errors import Unavailable

clock = SystemClock()

async def main():
{lines}
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))  # a loop closes with a thread

asyncio.run(main())
"""
    done = subprocess.run(
        [*WITHOUT_TASKS, sys.executable, "-c", script],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "can't start new thread" in done.stdout) == (0, True), done.stderr
