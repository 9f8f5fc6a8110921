"""Plans on a real cell: what they say then happens, and asking changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.api import Done as DoneReply
from common.api import Operate
from common.model import JobState
from coordinator.plan.replay import replay
from coordinator.plan.story import read
from tests.harness.live.cell import LiveHarness, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]


async def asked(harness: LiveHarness, *words: str, code: int = 0) -> Any:
    """The JSON of a command, which ends with this code."""
    out, _ = await harness.aryl("--timeout", "30", *words, "-o", "json", code=code)
    return json.loads(out) if out else None


async def test_what_a_plan_says_then_happens(tmp_path: Path) -> None:
    """A job starts where its plan says; the drain preempts whom its plan names; exit codes differ.

    The journal of all this is near its own simulation.
    """
    async with running_cell(tmp_path, training_nodes=2, inference_nodes=1) as harness:
        spec = msgspec.structs.replace(
            harness.training("steady", work_s=600, gpus=4), expected_runtime_s=600.0
        )
        file = tmp_path / "steady.json"
        file.write_bytes(msgspec.json.encode(spec))
        found = await asked(harness, "plan", "job", str(file), code=1)
        start = found["plan"]["start"]
        assert start["in_s"] == 0.0, found
        assert await harness.jobs() == ()
        job_id = await harness.submit(spec)
        row = await harness.until_state(job_id, JobState.RUNNING)
        assert list(row.nodes) == start["nodes"]

        idle = ({"train-1", "train-2"} - set(row.nodes)).pop()
        found = await asked(harness, "plan", "drain", row.nodes[0], code=1)
        [effect] = found["plan"]["effects"]
        assert (effect["job_id"], effect["what"]) == (job_id, "preempted")
        found = await asked(harness, "plan", "recall")
        assert found["plan"]["has_changes"] is False
        await asked(harness, "plan", "drain", "no-such-node", code=3)

        await harness.client.ask(Operate(action="drain", target=row.nodes[0]), DoneReply)
        await harness.until_job(job_id, "was preempted", lambda row: row.preemption_count == 1)
        row = await harness.until_job(
            job_id, "runs again", lambda row: row.state == JobState.RUNNING
        )
        assert row.nodes == (idle,)
        records = await harness.journal()
        found = await asked(harness, "replay")
        assert found["replay"]["differences"] == 0
    happened, simulated = replay(read(records), policy="", changes={})
    assert simulated.preemptions == happened.preemptions == 1
    assert simulated.jobs_failed == happened.jobs_failed == 0
