"""Plans on a real cell: what they say then happens, and asking changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.api import Done as DoneReply
from common.api import Operate
from common.model import JobState
from coordinator.demo.plan import CELL
from coordinator.plan.replay import replay
from coordinator.plan.story import read
from tests.live.cell.house import House, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]


async def aryl(house: House, *words: str) -> tuple[int, Any]:
    """The command's exit code, and its JSON."""
    asked = (
        "--nats-url",
        house.cell.nats.url,
        "--cell",
        CELL,
        "--tenant",
        "ops",
        "--timeout",
        "30",
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coordinator.cli.main", *asked, *words, "-o", "json"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_CONFIG_HOME": "/nonexistent"},
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(out) if out else None


async def test_what_a_plan_says_then_happens(tmp_path: Path) -> None:
    """A job starts where its plan says; the drain preempts whom its plan names; exit codes differ.

    The journal of all this is near its own simulation.
    """
    async with running_cell(tmp_path, training_nodes=2, inference_nodes=1) as house:
        spec = msgspec.structs.replace(
            house.training("steady", work_s=600, gpus=4), expected_runtime_s=600.0
        )
        file = tmp_path / "steady.json"
        file.write_bytes(msgspec.json.encode(spec))
        code, found = await aryl(house, "plan", "job", str(file))
        start = found["plan"]["start"]
        assert (code, start["in_s"]) == (1, 0.0), found
        assert await house.jobs() == ()
        job_id = await house.submit(spec)
        row = await house.until_state(job_id, JobState.RUNNING)
        assert list(row.nodes) == start["nodes"]

        idle = ({"train-1", "train-2"} - set(row.nodes)).pop()
        code, found = await aryl(house, "plan", "drain", row.nodes[0])
        [effect] = found["plan"]["effects"]
        assert (code, effect["job_id"], effect["what"]) == (1, job_id, "preempted")
        code, found = await aryl(house, "plan", "recall")
        assert (code, found["plan"]["has_changes"]) == (0, False)
        code, _ = await aryl(house, "plan", "drain", "no-such-node")
        assert code == 3

        await house.client.ask(Operate(action="drain", target=row.nodes[0]), DoneReply)
        await house.until_job(job_id, "was preempted", lambda row: row.preemption_count == 1)
        row = await house.until_job(job_id, "runs again", lambda row: row.state == JobState.RUNNING)
        assert row.nodes == (idle,)
        records = await house.journal()
        code, found = await aryl(house, "replay")
        assert (code, found["replay"]["differences"]) == (0, 0)
    happened, simulated = replay(read(records), policy="", changes={})
    assert simulated.preemptions == happened.preemptions == 1
    assert simulated.jobs_failed == happened.jobs_failed == 0
