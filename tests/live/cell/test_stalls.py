"""A real job that tells its steps and then hangs is seen as stalled, and ended for its next try."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from common.api import Events, GetEvents, JobRow
from common.model import CheckpointSpec, JobState, RetrySpec
from tests.harness.live.cell import PERIODS, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

HANGS = """
import json, os, socket, time
shim = socket.socket(socket.AF_UNIX)
shim.connect(os.environ["ARYL_CONTROL_SOCKET"])
def say(**line):
    shim.sendall(json.dumps(line).encode() + b"\\n")
say(type="hello")
for step in range(1, 8):
    say(type="progress", step=step)
    time.sleep(0.5)
with open(os.environ["OUT"] + "/told", "w") as file:
    file.write("told\\n")
while True:
    time.sleep(1.0)
"""
TIMEOUT_S = 4.0


def waits(row: JobRow) -> bool:
    """Whether it was ended once and is to be tried again."""
    return row.state == JobState.PENDING and row.attempt == 1


async def test_a_job_that_hangs_is_stalled_and_ended_by_its_timeout(tmp_path: Path) -> None:
    """It computed and told steps, then none: an own fault of the class stalled, with its story."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as harness:
        spec = msgspec.structs.replace(
            harness.shell("hangs", ""),
            command=(sys.executable, "-I", "-S", "-c", HANGS),
            checkpoint=CheckpointSpec(grace_s=PERIODS.grace_s),
            stall_timeout_s=TIMEOUT_S,
            retry=RetrySpec(max_restarts=1),
        )
        job_id = await harness.submit(spec)
        row = await harness.until_job(job_id, "waits for its next try", waits)
        assert harness.said("told") == ["told"]
        assert row.failure is not None
        assert row.failure.reason == "stalled"
        assert row.error.startswith("stalled: no step after 7 for ")
        assert row.preemption_count == 0
        told = (await harness.client.ask(GetEvents(subject=job_id), Events)).rows
        what = [line.what for line in told]
        assert what.index("stalled") < what.index("stall over")
