"""When jobs start, as Slurm's commands tell it: `sbatch --test-only`, `squeue --start`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from common.api import ApiErrorCode, Submit
from common.model import JobState
from common.plans import Plan, PlanEffect, PlanEnd, PlanKind, Planned, PlanStart, PlanTurn
from common.slurm import times
from tests.cli.fake_cell import NOW_S, FakeCell, refusal
from tests.cli.slurm.fake_slurm import asked, cell, row, slurm
from tests.tables import each_row

SCRIPT = "#!/bin/sh\ntrue\n"
START = PlanStart(
    in_s=600.0,
    gpus=16,
    nodes=("t0", "t1"),
    after=(PlanEnd(job_id="j1", name="train", tenant="lab", in_s=590.0, source="its time limit"),),
)
FACTS: dict[str, Any] = {
    "assumptions": ("2 of 2 jobs end by their estimates",),
    "played_s": 86_400.0,
    "number": 18,
}


def planning(*rows: Any, **fields: Any) -> FakeCell:
    """A cell that answers every plan with these fields."""
    of = cell(*rows)
    of.answers[Plan] = Planned(kind=PlanKind.JOB, **{**FACTS, **fields})
    return of


STOPPED = PlanEffect(job_id="j2", name="x", tenant="lab", what="preempted", in_s=0.0)
LATER = PlanEffect(job_id="j3", name="x", tenant="lab", what="starts later", in_s=0.0)
UNKNOWN = PlanStart(unknown="it is held until a person releases it", waits_for=("held by ada",))
ANSWERS: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "starts": (
        {"start": START, "effects": (STOPPED, LATER)},
        0,
        [
            f"Job 18 to start at {times.instant(NOW_S + 600.0)} using 8 processors on nodes "
            "t[0-1] in partition all",
            "  Preempts: j2",
            f"  After j1 (train) ends at {times.instant(NOW_S + 590.0)}, by its time limit",
            "  Estimated: 2 of 2 jobs end by their estimates",
        ],
    ),
    "unknown": (
        {"start": UNKNOWN},
        0,
        [
            "Job 18 is valid; when it starts is not known: it is held until a person releases it",
            "  Waits for: held by ada",
        ],
    ),
    "beyond": (
        {"start": PlanStart()},
        0,
        [
            "Job 18 is valid; when it starts is not known: it is not within the 1-00:00:00 that "
            "were played ahead"
        ],
    ),
    "never": (
        {"start": PlanStart(), "warnings": ("no node has 16 GPUs",)},
        1,
        ["error: allocation failure: no node has 16 GPUs"],
    ),
}


@each_row("name", ANSWERS)
def test_sbatch_test_only_tells_when_the_job_would_start(name: str) -> None:
    """On stderr, with the source of the estimate; 1 says never, and nothing is submitted."""
    fields, code, said = ANSWERS[name]
    of = planning(**fields)
    options = ("--test-only", "--nodes=2", "--gpus-per-node=8", "--cpus-per-task=4", "-Q")
    found = slurm(of, "sbatch", *options, types=SCRIPT)
    assert (found.code, found.out) == (code, "")
    assert found.err.splitlines() == [f"sbatch: {line}" for line in said]
    [request] = [each for each in of.asked if isinstance(each, Plan)]
    assert request.spec is not None
    assert request.spec.workers.min == 2
    assert not [each for each in of.asked if isinstance(each, Submit)]


WAITS = row(18, state=JobState.PENDING, nodes=(), worker_count=0, started_at_s=None)
LATER_ONE = replace(WAITS, job_id="j19", number=19)
NEVER_ONE = replace(WAITS, job_id="j20", number=20, request=asked(title="held"))
TURNS = (
    PlanTurn(job_id="j19", name="x", tenant="lab", in_s=5.0, nodes=("t0", "t1")),
    PlanTurn(job_id="j18", name="x", tenant="lab", in_s=60.0, nodes=("t1",)),
)


def test_squeue_start_shows_the_waiting_jobs_in_the_order_of_their_starts() -> None:
    """With the planned nodes; a start that the plan does not have comes last."""
    of = planning(row(17), NEVER_ONE, WAITS, LATER_ONE, turns=TURNS)
    found = slurm(of, "squeue", "--start", "-h", "-o", "%i|%S|%Y|%t")
    assert found.out.splitlines() == [
        f"19|{times.instant(NOW_S + 5.0)}|t[0-1]|PD",
        f"18|{times.instant(NOW_S + 60.0)}|t1|PD",
        "20|N/A|(null)|PD",
    ]
    assert found.err == ""
    json = slurm(of, "squeue", "--start", "--json").json["jobs"]
    assert [job["start_time"] for job in json] == [NOW_S + 5.0, NOW_S + 60.0, None]


def test_squeue_plans_only_where_a_start_is_asked_for_and_a_job_waits() -> None:
    """A plan costs the coordinator a process."""
    for options, plans in (((), 0), (("--start",), 1), (("--start", "-j", "17"), 0)):
        of = planning(row(17), WAITS, turns=())
        assert slurm(of, "squeue", *options).code == 0
        assert len([each for each in of.asked if isinstance(each, Plan)]) == plans, options


def test_squeue_start_without_a_plan_says_why_and_shows_no_start() -> None:
    """An older coordinator plans no queue, a busy one may be late."""
    of = planning(WAITS)
    of.answers[Plan] = refusal(ApiErrorCode.UNAVAILABLE, "8 plans wait here; ask again", "")
    found = slurm(of, "squeue", "--start", "-h", "-o", "%i %S")
    assert (found.code, found.out) == (0, "18 N/A\n")
    assert "8 plans wait here" in found.err
