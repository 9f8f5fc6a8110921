"""Orders on a real cell, by the CLI: hold, dependencies, release, change, arrays, labels."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.model import Gate, JobState
from tests.harness.live.cell import LiveHarness, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveHarness]:
    """A cell of two nodes with four GPUs each."""
    directory = tmp_path_factory.mktemp("cell")
    async with running_cell(directory, training_nodes=2, inference_nodes=0) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def harness(shared: LiveHarness, tmp_path: Path) -> AsyncIterator[LiveHarness]:
    """The cell for one test, which leaves it idle."""
    harness = await shared.turn(tmp_path)
    yield harness
    await harness.tidy()


def job_file(harness: LiveHarness, spec: Any) -> str:
    """A job file with the command and the checkpoint of a spec."""
    path = harness.directory / f"{spec.name}.json"
    path.write_text(
        json.dumps(
            {
                "name": spec.name,
                "command": list(spec.command),
                "workers": {"min": 1, "max": 1},
                "gpus_per_worker": 4,
                "checkpoint": {"path": spec.checkpoint.path, "grace_s": spec.checkpoint.grace_s},
            }
        )
    )
    return str(path)


async def submitted(harness: LiveHarness, spec: Any, *flags: str) -> str:
    out, _ = await harness.aryl("job", "submit", job_file(harness, spec), *flags, "-o", "name")
    return out.strip()


async def test_jobs_run_in_the_order_that_people_give(harness: LiveHarness) -> None:
    """One is held and released, one follows it, and a running one goes on from its checkpoint."""
    first = await submitted(harness, harness.training("first", work_s=6.0), "--hold")
    second = await submitted(
        harness, harness.training("second", work_s=600.0), "--after", f"ok:{first}"
    )
    third = await submitted(
        harness, harness.training("third", work_s=1.0), "--after", f"not_ok:{first}"
    )
    rows = {row.job_id: row for row in await harness.jobs()}
    assert [rows[job].gate for job in (first, second, third)] == [
        Gate.HELD, Gate.DEPENDENCY, Gate.DEPENDENCY,
    ]  # fmt: skip
    out, _ = await harness.aryl("status")
    assert "3 pending (1 held, 2 after other jobs)" in out
    _, err = await harness.aryl("job", "change", second, "--after", f"ok:{second}", code=2)
    assert "would wait for itself" in err
    await harness.aryl("job", "release", first)
    await harness.until_state(first, JobState.SUCCEEDED)

    await harness.until_job(second, "has saved", lambda row: (row.step or 0) >= 40)
    _, err = await harness.aryl("job", "hold", second, code=4)
    assert f"aryl job requeue {second} --hold" in err
    await harness.aryl("job", "requeue", second, "--hold")
    row = await harness.until_job(second, "is held", lambda row: row.gate == Gate.HELD)
    assert (row.state, row.preemption_count) == (JobState.PENDING, 1)
    out, _ = await harness.aryl("explain", "job", third)
    assert f"it can never start: it waits for {first} to fail, which succeeded" in out
    await harness.aryl("job", "change", third, "--after", "none", "--priority", "5")
    await harness.until_state(third, JobState.SUCCEEDED)

    before = (await harness.job(second)).step or 0
    await harness.aryl("job", "release", second)
    row = await harness.until_job(second, "goes on", lambda row: row.step not in (None, before))
    assert row.attempt == 2
    assert (row.step or 0) >= before - 10, "it goes on from its checkpoint"
    await harness.aryl("job", "change", second, "--time-limit", "1s")
    row = await harness.until_state(second, JobState.FAILED)
    assert row.error == "ran into its time_limit_s of 1 s"
    out, _ = await harness.aryl("events", "--for", second)
    for what in ("dependencies hold", "held", "released", "changed"):
        assert what in out


async def test_an_array_is_held_follows_a_job_and_is_followed(harness: LiveHarness) -> None:
    """No task of it enters the line before its release and the end of what it waits for."""

    async def submit(name: str, *flags: str) -> str:
        words = ("job", "submit", "--name", name, *flags, "-o", "name", "--", "true")
        out, _ = await harness.aryl(*words)
        return out.strip()

    first = await submit("before", "--hold")
    array = await submit("sweep", "--array", "0-5%2", "--hold", "--after", f"ok:{first}")
    last = await submit("after", "--after", f"ok:{array}")
    task = await submit("after-task", "--after", f"ended:{array}_3")
    out, _ = await harness.aryl("job", "list")
    assert "6 held" in out
    out, _ = await harness.aryl("explain", "job", array)
    assert f"aryl job release {array}" in out
    assert f"{first} to succeed" in out
    await harness.aryl("job", "release", array)
    out, _ = await harness.aryl("explain", "job", array)
    assert "held by" not in out
    assert (await harness.job(array)).gate == Gate.DEPENDENCY
    _, err = await harness.aryl("job", "change", array, "--priority", "3")
    assert f"array {array} is changed" in err
    await harness.aryl("job", "release", first)
    for job_id in (array, task, last):
        await harness.until_state(job_id, JobState.SUCCEEDED)
    ended_at_s = (await harness.job(array)).finished_at_s
    started_at_s = (await harness.job(last)).started_at_s
    assert ended_at_s is not None and started_at_s is not None
    assert ended_at_s <= started_at_s


async def rows(harness: LiveHarness, *arguments: str) -> list[dict[str, Any]]:
    """The rows of `aryl job list`."""
    out, _ = await harness.aryl("job", "list", "-o", "json", *arguments)
    found: list[dict[str, Any]] = json.loads(out)["jobs"]
    return found


async def test_an_array_runs_throttled_fails_by_index_and_is_cancelled_by_range(
    harness: LiveHarness,
) -> None:
    """Twenty tasks of which three run at once: one fails, a range is cancelled, others succeed."""
    out, _ = await harness.aryl(
        "job", "submit", "--name", "throttled", "--array", "0-19%3", "--checkpoint",
        f"{harness.directory}/save-{{index}}", "--env", f"OUT={harness.directory}", "-o", "name",
        "--", "sh", "-c", TASK,
    )  # fmt: skip
    array = out.strip()

    async def are_three() -> bool:
        return len(list(harness.directory.glob("running-*"))) == 3

    await harness.until("three tasks run", are_three)
    [row] = await rows(harness)
    assert (row["job_id"], row["state"], row["gpus"]) == (array, "running", 3)
    counts = {"indices": "0-19", "throttle": 3, "tasks": 20, "waiting": 17, "running": 3}
    ranges = {"waiting": "3-19", "running": "0-2"}
    ended = {"succeeded": 0, "failed": 0, "cancelled": 0}
    assert row["array"] == counts | ended | {"ranges": ranges, "unstarted": ""}
    tasks = [one["job_id"] for one in await rows(harness, "--tasks")]
    assert tasks == [array, f"{array}_0", f"{array}_1", f"{array}_2"]
    table, _ = await harness.aryl("job", "list")
    assert f"{array}_[0-19%3]" in table
    assert "17 waiting, 3 running" in table

    _, said = await harness.aryl("job", "cancel", f"{array}_[15-25]", code=3)
    assert "no task 20" in said
    await harness.aryl("job", "cancel", f"{array}_[10-12,15-19]")
    _, said = await harness.aryl("job", "logs", f"{array}_7", code=3)
    assert "not in the line yet" in said
    await harness.aryl("job", "throttle", array, "4")
    (harness.directory / "go").touch()
    row = dict(json.loads((await harness.aryl("job", "describe", array, "-o", "json"))[0]))
    assert row["description"]["job"]["array"]["ranges"]["cancelled"] == "10-12,15-19"
    over = await harness.until_state(array, JobState.FAILED)
    assert (over.exit_code, over.error) == (9, "task 4 failed")
    [row] = [one for one in await rows(harness, "--all") if one["job_id"] == array]
    assert [row["array"][state] for state in ("succeeded", "failed", "cancelled")] == [11, 1, 8]
    ran = [int(line.split()[0]) for line in harness.said("begun-*")]
    assert sorted(ran) == [*range(10), 13, 14]
    assert f"7 20 0-19 {harness.directory}/save-7" in harness.said("begun-7")
    assert max(map(int, harness.said("beside"))) <= 3
    shown, _ = await harness.aryl("job", "describe", "throttled_4")
    assert f"{array}, task 4" in shown
    counted = await harness.counted()
    assert (counted["jobs_finished"], counted["jobs_failed"]) == (11, 1)


async def test_a_job_runs_where_its_labels_are(harness: LiveHarness) -> None:
    """An agent's labels and those of an operator count; what nobody has is said, and waited for."""
    node = next(plan for plan in harness.cell.nodes if plan.name == "train-2")
    drop_in = node.config.with_name(f"{node.config.name}.d") / "labels.toml"
    drop_in.parent.mkdir()
    drop_in.write_text('rack = "r7"\n[labels]\nnvlink = ""\n')
    harness.kill_agent("train-2")

    async def is_told() -> bool:
        out, _ = await harness.aryl("node", "list", "--label", "rack=r7", "-o", "name")
        return out.split() == ["train-2"]

    await harness.until("train-2 has reported its labels", is_told)

    async def submit(name: str, *flags: str) -> tuple[str, str]:
        words = ("job", "submit", "--name", name, *flags, "-o", "name", "--", "sleep", "600")
        out, err = await harness.aryl(*words)
        return out.strip(), err

    for name in ("a", "b"):
        job, err = await submit(name, "--gpus-per-worker", "2", "--require", "nvlink")
        assert not err
        row = await harness.until_state(job, JobState.RUNNING)
        assert row.nodes == ("train-2",)
    job, _ = await submit("other", "--exclude", "rack=r6,r7")
    assert (await harness.until_state(job, JobState.RUNNING)).nodes == ("train-1",)

    full, err = await submit("full", "--require", "nvlink")
    assert not err
    why, _ = await harness.aryl("explain", "job", full)
    assert "1 of 2 nodes fits what it asks of nodes (nvlink); all busy, closed or serving" in why
    nobody, err = await submit("nobody", "--require", "ib")
    assert "can never run here: no node has ib, which it requires" in err
    await harness.aryl("node", "label", "train-1", "ib", "nvlink")
    for job in (full, nobody):
        assert (await harness.until_state(job, JobState.RUNNING)).nodes == ("train-1",)
    out, _ = await harness.aryl("node", "describe", "train-1")
    assert "ib (operator), nvlink (operator)" in out
    out, _ = await harness.aryl("audit", "-o", "json")
    assert "ib nvlink" in out
    _, err = await harness.aryl("node", "label", "train-1", "ib=", code=2)
    assert "expected key=value, key or key-" in err
