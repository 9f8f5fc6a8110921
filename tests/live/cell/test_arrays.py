"""A job array through the command line of a real cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.model import JobState
from tests.live.cell.house import House, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

TASK = """
set -e
echo "$ARYL_ARRAY_INDEX $ARYL_ARRAY_COUNT $ARYL_ARRAY_MIN-$ARYL_ARRAY_MAX $ARYL_CHECKPOINT_PATH" \
  > $OUT/begun-$ARYL_ARRAY_INDEX
ls $OUT | grep -c running- >> $OUT/beside || true
touch $OUT/running-$ARYL_ARRAY_INDEX
while [ ! -e $OUT/go ]; do sleep 0.1; done
rm $OUT/running-$ARYL_ARRAY_INDEX
[ $ARYL_ARRAY_INDEX != 4 ] || exit 9
"""


async def rows(house: House, *arguments: str) -> list[dict[str, Any]]:
    """The rows of `aryl job list`."""
    out, _ = await house.aryl("job", "list", "-o", "json", *arguments)
    found: list[dict[str, Any]] = json.loads(out)["jobs"]
    return found


async def test_an_array_runs_throttled_fails_by_index_and_is_cancelled_by_range(
    tmp_path: Path,
) -> None:
    """Twenty tasks of which three run at once: one fails, a range is cancelled, others succeed."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as house:
        out, _ = await house.aryl(
            "job", "submit", "--name", "sweep", "--array", "0-19%3", "--checkpoint",
            f"{house.directory}/save-{{index}}", "--env", f"OUT={house.directory}", "-o", "name",
            "--", "sh", "-c", TASK,
        )  # fmt: skip
        array = out.strip()

        async def are_three() -> bool:
            return len(list(house.directory.glob("running-*"))) == 3

        await house.until("three tasks run", are_three)
        [row] = await rows(house)
        assert (row["job_id"], row["state"], row["gpus"]) == (array, "running", 3)
        counts = {"indices": "0-19", "throttle": 3, "tasks": 20, "waiting": 17, "running": 3}
        ranges = {"waiting": "3-19", "running": "0-2"}
        ended = {"succeeded": 0, "failed": 0, "cancelled": 0}
        assert row["array"] == counts | ended | {"ranges": ranges, "unstarted": ""}
        tasks = [one["job_id"] for one in await rows(house, "--tasks")]
        assert tasks == [array, f"{array}_0", f"{array}_1", f"{array}_2"]
        table, _ = await house.aryl("job", "list")
        assert f"{array}_[0-19%3]" in table
        assert "17 waiting, 3 running" in table

        _, said = await house.aryl("job", "cancel", f"{array}_[15-25]", code=3)
        assert "no task 20" in said
        await house.aryl("job", "cancel", f"{array}_[10-12,15-19]")
        _, said = await house.aryl("job", "logs", f"{array}_7", code=3)
        assert "not in the line yet" in said
        await house.aryl("job", "throttle", array, "4")
        (house.directory / "go").touch()
        row = dict(json.loads((await house.aryl("job", "describe", array, "-o", "json"))[0]))
        assert row["description"]["job"]["array"]["ranges"]["cancelled"] == "10-12,15-19"
        over = await house.until_state(array, JobState.FAILED)
        assert (over.exit_code, over.error) == (9, "task 4 failed")
        [row] = await rows(house, "--all")
        assert [row["array"][state] for state in ("succeeded", "failed", "cancelled")] == [11, 1, 8]
        ran = [int(line.split()[0]) for line in house.said("begun-*")]
        assert sorted(ran) == [*range(10), 13, 14]
        assert f"7 20 0-19 {house.directory}/save-7" in house.said("begun-7")
        assert max(map(int, house.said("beside"))) <= 3
        shown, _ = await house.aryl("job", "describe", "sweep_4")
        assert f"{array}, task 4" in shown
        figures = await house.figures()
        assert (figures["jobs_finished"], figures["jobs_failed"]) == (11, 1)
