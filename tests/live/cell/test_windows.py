"""A maintenance window on a real cell, by the CLI: what starts before it, and what it does then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from common.api import WindowRow
from common.model import CheckpointSpec, JobState
from tests.harness.live.cell import LiveHarness, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

IN_S = 35
"""Long enough for a job of two seconds with its start (15 s, start_p99_s) and its grace (2 s)."""


async def submitted(harness: LiveHarness, name: str, *, limit_s: float | None = None) -> str:
    spec = harness.shell(name, "exec sleep 600", gpus=2)
    return await harness.submit(
        replace(spec, time_limit_s=limit_s, checkpoint=CheckpointSpec(grace_s=2.0))
    )


async def test_a_node_is_empty_when_its_window_begins(tmp_path: Path) -> None:
    """A job with a short limit runs before; one without waits and is told why; what was there goes
    on until then. The serving node that closes is not lent to the one that waits.
    """
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=1) as harness:
        there = await submitted(harness, "there")
        await harness.until_state(there, JobState.RUNNING)
        _, err = await harness.aryl(
            "node", "drain", "train-1", "infer-1", "--at", f"now+{IN_S}", "--yes",
            "--reason", "cooling",
        )  # fmt: skip
        assert f"still there then: {there} (no time limit)" in err
        window = (await harness.node("train-1")).window
        assert isinstance(window, WindowRow)
        assert window.reason == "by ops/test: cooling"
        waits = await submitted(harness, "waits")
        short = await submitted(harness, "short", limit_s=2.0)
        await harness.until_job(short, "has run", lambda row: row.started_at_s is not None)
        out, _ = await harness.aryl("explain", "job", waits)
        assert "train-1 closes in " in out
        assert f"and {waits} has no time limit" in out
        row = await harness.until_job(there, "is stopped", lambda row: row.preemption_count == 1)
        assert (await harness.job(short)).state == JobState.FAILED, "by its time limit"
        assert (await harness.job(waits)).started_at_s is None
        assert row.attempt == 1
        out, _ = await harness.aryl("node", "list", "-o", "json")
        rows = {one["node"]: one for one in json.loads(out)["nodes"]}
        assert [rows[name]["is_draining"] for name in ("train-1", "infer-1")] == [True, True]
        assert not await harness.loans()
        out, _ = await harness.aryl("events", "--for", "train-1")
        assert "window begins" in out
