"""Arrays at the command line: flags, one line for an array, and orders."""

from __future__ import annotations

import pytest

from common.api import ArrayRow, Done, Jobs, ListJobs, Submit, Submitted, Throttle
from common.model import ArraySpec, JobState
from tests.cli.fake_cell import FakeCell, aryl, job_row

COUNTS = ArrayRow(
    indices="0-99", throttle=5, tasks=100, waiting=80, running=5, succeeded=15, failed=0,
    cancelled=0,
)  # fmt: skip
ROWS = (
    job_row("jarr", submitted_at_s=10.0, array=COUNTS, nodes=()),
    job_row("jold", submitted_at_s=5.0),
    job_row("jnew", submitted_at_s=20.0),
    job_row("jarr_16", submitted_at_s=9.9, array_id="jarr", array_index=16),
    job_row("jarr_7", submitted_at_s=9.8, array_id="jarr", array_index=7, state=JobState.PENDING),
)


def test_a_flag_makes_an_array() -> None:
    """The part behind the percent sign is its throttle; a flag that names neither is refused."""
    cell = FakeCell({Submit: Submitted(job_id="jarr")})
    run = aryl(cell, "job", "submit", "--array", "0-9:2%4", "--", "true")
    assert (run.code, run.out) == (0, "array jarr (true) is queued\n")
    [request] = cell.asked
    assert isinstance(request, Submit)
    assert request.spec.array == ArraySpec(indices="0-9:2", throttle=4)
    for text, said in (("0-9%x", "--array: '0-9%x', expected a count"),
                       ("9-0", "field array.indices: '9-0', expected FIRST-LAST")):  # fmt: skip
        run = aryl(cell, "job", "submit", "--array", text, "--", "true")
        assert (run.code, said in run.err, len(cell.asked)) == (2, True, 1)


def test_a_list_has_one_line_for_an_array_and_its_tasks_on_demand() -> None:
    """In order of submission, and tasks by their indices."""
    cell = FakeCell({ListJobs: Jobs(rows=ROWS)})
    lines = aryl(cell, "job", "list").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["jold", "jarr_[0-99%5]", "jnew"]
    assert "80 waiting, 5 running, 15 done" in lines[2]
    names = aryl(cell, "job", "list", "--tasks", "--quiet").out.split()
    assert names == ["jold", "jarr", "jarr_7", "jarr_16", "jnew"]


@pytest.mark.parametrize(("text", "most"), [("7", 7), ("none", None)])
def test_a_throttle_is_a_count_or_none(text: str, most: int | None) -> None:
    """Anything else is refused before it is sent."""
    cell = FakeCell({Throttle: Done(detail="done")})
    assert aryl(cell, "job", "throttle", "jarr", text).code == 0
    assert cell.asked == [Throttle(job_id="jarr", throttle=most)]
    for bad in ("0", "-", "10001", "1.5"):
        run = aryl(cell, "job", "throttle", "jarr", bad)
        assert (run.code, "expected a count from 1 to 10000, or none" in run.err) == (2, True)
    assert len(cell.asked) == 1
