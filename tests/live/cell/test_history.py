"""Orders, decisions and GPU time of a real cell, by the commands, through a leader's death."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from common.api import Cancel, Done
from common.model import JobState
from tests.harness.live.cell import LiveHarness, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]


async def lines(harness: LiveHarness, *words: str, tenant: str = "ops") -> list[dict[str, Any]]:
    """The lines that a command prints as JSON."""
    out, _ = await harness.aryl(*words, "-o", "json", tenant=tenant, user="ada")
    found: list[dict[str, Any]] = json.loads(out)["lines"]
    return found


async def test_the_past_of_a_cell_is_known_whoever_leads(tmp_path: Path) -> None:
    """An order before the death of a leader and one after it, the account of a job that ended, and
    a report that counts what still runs."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as harness:
        ended = await harness.submit(harness.shell("short", "true"))
        await harness.until_state(ended, JobState.SUCCEEDED)
        runs = await harness.submit(harness.shell("long", "sleep 600", gpus=2))
        await harness.until_state(runs, JobState.RUNNING)
        await harness.kill_coordinator()
        await harness.until_state(runs, JobState.RUNNING)
        await harness.aryl("node", "cordon", "nosuch", code=3, user="ada")

        async def is_on_record() -> list[dict[str, Any]]:
            return [one for one in await lines(harness, "audit") if one["kind"] == "refused"]

        [line] = await harness.until("the refused order is on record", is_on_record)
        order = line["detail"]
        assert (order["tenant"], order["user"], order["target"]) == ("ops", "ada", "nosuch")
        assert "no node 'nosuch'" in order["refused"]
        assert "aryl" in order["client"]
        assert line["at"].startswith("20")
        told = [one["detail"]["target"] for one in await lines(harness, "audit", "--user", "test")]
        assert told == [ended, runs]

        kinds = [one["kind"] for one in await lines(harness, "history", "--job", ended)]
        assert kinds == ["order", "decision", "event", "event", "attempt", "job"]
        [account] = await lines(harness, "history", "--job", ended, "--kind", "job")
        assert account["detail"]["state"] == "succeeded"
        assert account["detail"]["nodes"] == ["train-1"]
        assert await lines(harness, "history", tenant="other") == []

        out, _ = await harness.aryl("report", "usage", "--by", "job", "-o", "csv")
        hours = {row["job"]: float(row["used_gpu_h"]) for row in csv.DictReader(io.StringIO(out))}
        assert set(hours) == {ended, runs}
        assert hours[runs] > hours[ended] > 0.0
        await harness.client.ask(Cancel(job_id=runs), Done)
