"""How people are told why a job failed and what it waited for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.api import Describe, Description, JobRow, Jobs, ListJobs
from common.failure_rules import read_rules
from common.model import JobState
from coordinator import plain_text
from coordinator.cli import columns
from coordinator.cli.describe import _facts, _why
from tests.cli.fake_cell import FakeCell, aryl
from tests.tables import each_row

ROW = JobRow(
    job_id="j1",
    name="train",
    tenant="t",
    user="u",
    state=JobState.FAILED,
    attempt=1,
    worker_count=0,
    min_workers=1,
    max_workers=1,
    gpus_per_worker=1,
    gpus=0,
    nodes=(),
    submitted_at_s=0.0,
    started_at_s=10.0,
    finished_at_s=20.0,
    queueing_s=10.0,
    preemption_count=0,
    exit_code=1,
    failure=read_rules().failure("gpu_out_of_memory", line="CUDA out of memory. Tried 2 GiB"),
    waited_s={"fragmentation": 90.0, "fair_share": 3600.0},
)


def test_a_job_in_full_says_what_failed_with_its_class_and_what_it_waited_for() -> None:
    """The line of the log is there, and kinds of waiting in order of name."""
    found = Description(kind="job", name="j1", job=ROW)
    lines = [str(line) for line in _facts(found, 100.0, is_wide=False)]
    [failure] = [line for line in lines if line.startswith("failure")]
    assert failure.split("  ", 1)[1].strip() == (
        "GPU out of memory (CUDA out of memory. Tried 2 GiB); retry: never; who has to look: engine"
    )
    [waited] = [line for line in lines if line.startswith("waited for")]
    assert waited.split("  ", 1)[1].strip() == "fair_share 1h, fragmentation 1m 30s"


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.SUCCEEDED])
def test_an_explanation_says_what_a_job_waited_for(state: JobState) -> None:
    """Each kind with its own sum, in text and in JSON, of jobs that wait and that have ended."""
    row = replace(ROW, state=state)
    cell = FakeCell({Describe: Description(kind="job", name="j1", job=row)})
    lines = aryl(cell, "explain", "job", "j1").out.splitlines()
    assert "- up to now it has waited for: fair_share 1h, fragmentation 1m 30s" in lines
    told = aryl(cell, "explain", "job", "j1", "-o", "json").json["explanation"]
    assert told["waited_s"] == {"fair_share": 3600.0, "fragmentation": 90.0}


def test_where_nothing_is_told_apart_nothing_is_said() -> None:
    """Most policies say no kinds: then there is no line, and the sums of JSON are empty."""
    row = replace(ROW, state=JobState.PENDING, waited_s={})
    cell = FakeCell({Describe: Description(kind="job", name="j1", job=row)})
    assert "waited for" not in aryl(cell, "explain", "job", "j1").out
    told = aryl(cell, "explain", "job", "j1", "-o", "json").json["explanation"]
    assert told["waited_s"] == {}


def test_a_wide_list_has_the_reason_in_a_column_of_its_own() -> None:
    """Empty where nothing failed, or nothing is known of it."""
    [column] = [column for column in columns.jobs(100.0) if column.heading == "FAILURE"]
    assert column.is_wide
    assert column.value(ROW) == "GPU out of memory"


@each_row(
    ("row", "said"),
    [
        (ROW, "GPU out of memory (exit code 1)"),
        (replace(ROW, failure=None), "exit code 1"),
        (
            replace(ROW, error="ran into its time_limit_s of 2 s"),
            "ran into its time_limit_s of 2 s",
        ),
        (replace(ROW, state=JobState.SUCCEEDED, exit_code=0), ""),
        (replace(ROW, state=JobState.RUNNING, exit_code=None), ""),
    ],
    ids=["classed", "no class", "told", "succeeded", "tried again"],
)
def test_a_list_says_of_a_failed_job_what_kind_of_failure_it_was(row: JobRow, said: str) -> None:
    """In the narrow table too, and of nobody who goes on or ended well after an earlier failure."""
    assert plain_text.why(row) == said
    cell = FakeCell({ListJobs: Jobs(rows=(row,))})
    [line] = aryl(cell, "job", "list", "--all", "--no-headers").out.splitlines()
    assert line.rstrip().endswith(said or plain_text.MISSING)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (JobState.SUCCEEDED, []),
        (JobState.CANCELLED, []),
        (JobState.RUNNING, ["- nothing more is known"]),
    ],
)
def test_of_a_job_that_has_ended_nothing_is_called_unknown(
    state: JobState, said: list[str]
) -> None:
    """Why it is where it is needs no guess then; of a job that goes on the gap is named."""
    found = Description(kind="job", name="j1", job=replace(ROW, state=state))
    assert list(_why(found)) == said
