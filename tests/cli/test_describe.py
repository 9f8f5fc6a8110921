"""What a description tells: why a job failed, an agent's own account, a loan given up."""

from __future__ import annotations

import json
import re

import pytest
from msgspec.structs import replace

from common.api import (
    Describe,
    Description,
    JobRow,
    Jobs,
    ListJobs,
    ListLoans,
    Loans,
)
from common.failure_rules import read_rules
from common.messages import AgentReport, CollectorReport, CostReport
from common.model import JobState
from coordinator import plain_text
from coordinator.cli import columns
from coordinator.cli.describe import _facts, _why
from tests.cli.fake_cell import FakeCell, aryl, loan_row, node_row
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


NODE = Description(
    kind="node",
    name="t0",
    node=node_row(),
    agent=AgentReport(bad_messages=7, lease_failures=5),
    cost=CostReport(cpu_s=90.0, rss_bytes=50 * 2**20),
    collectors=(
        CollectorReport(name="host", is_success=True, duration_s=0.0),
        CollectorReport(name="gpu", is_success=False, duration_s=2.0, error="no answer"),
    ),
)


def test_what_an_agent_says_of_itself_is_in_json_and_wide_only() -> None:
    """Most people look at a node for other reasons."""
    cell = FakeCell({Describe: NODE})
    assert "bad messages" not in aryl(cell, "node", "describe", "t0").out
    wide = aryl(cell, "node", "describe", "t0", "-o", "wide").out
    lines = [" ".join(line.split()) for line in wide.splitlines()]
    assert "agent bad messages 7" in lines
    assert "agent lease failures 5" in lines
    assert "collectors gpu: no answer" in lines
    assert any(line.startswith("agent cost") and "50 MiB" in line for line in lines)
    found = json.loads(aryl(cell, "node", "describe", "t0", "-o", "json").out)
    assert found["description"]["agent"]["bad_messages"] == 7


WHY = "GPU GPU-1 is used by process 7"


def test_how_long_the_way_back_took_stands_where_a_reclaims_time_does() -> None:
    """With what was promised of it, where anything was; and in the list, with the reason."""
    row = loan_row(
        state="turned back", reclaim_deadline_s=None, turned_back=WHY, reclaim_reason=WHY,
        turn_back_s=14.0, turn_back_deadline_s=60.0,
    )  # fmt: skip
    answer = Description(kind="loan", name="l7", loan=row)
    told = aryl(FakeCell({Describe: answer}), "loan", "describe", "l7").out
    assert re.findall(r"^took +(.+)$", told, re.MULTILINE) == [
        "14s of 1m since its node turned back"
    ]
    listed = aryl(FakeCell({ListLoans: Loans(rows=(row,))}), "loan", "list", "--all").out
    [line] = [line for line in listed.splitlines() if "l7" in line]
    assert "turned back" in line
    assert "14s" in line
    assert WHY in line
