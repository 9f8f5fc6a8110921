"""The table of `aryl up`: both pools' utilization, names of the glossary, no old figure as new."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from coordinator.cli.run_report import run_table
from coordinator.demo.workload import Run
from coordinator.engine.state.accounting import Durations, Figures, ReclaimTimes
from tests.cli.fake_cell import loan_row
from tests.tables import each_row

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"


def run(**changes: Any) -> Run:
    """A run of a minute."""
    values: dict[str, Any] = {
        "policy": "aryl", "speed": 120.0, "duration_s": 60.0, "jobs_submitted": 9,
        "jobs_finished": 3, "jobs_failed": 0, "jobs_pending": 3, "jobs_starting": 1,
        "jobs_running": 2, "deadlines_due": 0, "deadlines_met": 0,
        "queueing_s": Durations(mean=1.0, p50=1.0, p95=2.0),
        "jct_s": Durations(mean=9.0, p50=8.0, p95=20.0), "training_gpu_ratio": 0.91,
        "on_loan_gpu_ratio": 0.82, "training_gpu_busy_ratio": 0.73,
        "on_loan_gpu_busy_ratio": 0.64, "inference_gpu_busy_ratio": 0.25, "loans": 2,
        "loans_cancelled": 0, "leases_lapsed": 0, "lapse_s": ReclaimTimes(), "lapses_late": 0,
        "reclaims": 1,
        "reclaim_s": ReclaimTimes(p50=3.0, max=3.0),
        "reclaim_deadline_s": 45.0, "reclaims_late": 0, "preemptions": 5, "lost_gpu_s": 7.0,
        "resizes": 4, "gang_timeouts": 0, "flexible_workers_released": 2,
        "jobs_finished_on_loan": 1, "requests_served": 80, "requests_refused": 1,
        "requests_refused_total": 4, "figures_age_s": 0.0, "why_none_lent": (),
    }  # fmt: skip
    return Run(**{**values, **changes})


def table(found: Run, *loans: Any) -> str:
    """What a person reads, rows as `name│value`."""
    paper = Console(width=140, file=io.StringIO(), record=True)
    paper.print(run_table(found, loans))
    return re.sub(r" *[│┃] *", "|", paper.export_text())


def test_utilization_of_both_pools_stands_beside_the_gpus_held() -> None:
    """Held is what the scheduler gave away, busy is what NVML saw; where nothing was lent there is
    no figure, and not a zero."""
    shown = table(run())
    assert "|training GPUs|91% held, 73% busy|" in shown
    assert "|lent GPUs|82% held, 64% busy|" in shown
    assert "|inference GPUs|25% busy, lent ones included|" in shown
    assert "|lent GPUs|82% held, - busy|" in table(run(on_loan_gpu_busy_ratio=None))


def test_every_job_that_was_submitted_is_told_of() -> None:
    """A table that only knows ends would leave a visitor asking where the others are."""
    shown = table(run())
    assert "|jobs finished|3 of 9 submitted, 0 failed, 1 on lent nodes|" in shown
    assert "|jobs at the end|3 waiting, 1 starting, 2 running|" in shown


def test_suspended_jobs_stand_beside_those_that_run() -> None:
    """They keep their GPUs and compute nothing; where none is there is no word of any."""
    shown = table(run(jobs_suspended=3))
    assert "|jobs at the end|3 waiting, 1 starting, 2 running, 3 suspended|" in shown
    assert "suspended" not in table(run())


def test_turns_and_moves_have_a_row_each_where_there_were_any() -> None:
    """They are neither preemptions nor resizes, so that without a row nobody would know of them."""
    turns = "|suspensions|104, each to let another job compute on its GPUs|"
    moves = "|migrations|6, 30 GPU-seconds lost|"
    both = table(run(suspensions=104, migrations=6, migration_lost_gpu_s=30.0))
    assert turns in both
    assert moves in both
    assert "migrations" not in table(run(suspensions=104))
    assert "suspensions" not in table(run(migrations=6))


def test_jobs_that_were_rejected_are_told_of_where_any_was() -> None:
    """They are in no other count, so that without the word a visitor would ask where they are."""
    shown = table(run(jobs_rejected=2))
    assert "|jobs finished|3 of 9 submitted, 0 failed, 2 rejected, 1 on lent nodes|" in shown
    assert "rejected" not in table(run())


def test_deadlines_have_a_line_where_any_was_due() -> None:
    """No line where no job had one: none of none would read as a miss."""
    assert "|deadlines|3 met of 5 due|" in table(run(deadlines_due=5, deadlines_met=3))
    assert "deadlines" not in table(run())


def test_a_loan_that_came_home_without_an_order_is_counted() -> None:
    """Nobody ordered it, so it is no reclaim; unsaid, its preemption would have no cause."""
    assert "1 that ended by their TTL without an order|" in table(run(leases_lapsed=1))


def test_the_way_home_after_a_lapse_is_a_figure_of_its_own() -> None:
    """Its time stands beside the count, and each such loan in a table apart from the reclaims, with
    what it was promised and whether that held."""
    timed = run(leases_lapsed=2, lapse_s=ReclaimTimes(p50=4.0, max=9.5), lapses_late=1)
    loan = loan_row(
        state="lapsed", reclaim_deadline_s=None, lapse_s=9.5, lapse_deadline_s=9.0, is_late=True,
        realised_preemptions=3,
    )  # fmt: skip
    shown = table(timed, loan)
    assert "2 that ended by their TTL without an order|" in shown
    assert "|lapses|2, 1 late; home again in median 4.0 s, longest 9.5 s|" in shown
    assert "|9.5 s late|9 s|3|" in shown
    in_time = loan_row(state="lapsed", lapse_s=9.5, realised_preemptions=3)
    assert "|9.5 s|-|3|" in table(timed, in_time), "of an unknown promise nothing is said"
    assert "lapses" not in table(run()), "of a run without any there is no line of dashes"
    assert "|reclaims|1, 0 late; median 3.0 s, longest 3.0 s of 45 s|" in shown


def test_a_turn_back_is_no_lapse_and_says_why() -> None:
    """It has a line and a table of its own, only where there was one."""
    why = "GPU GPU-1 is used by process 7"
    loan = loan_row(
        state="turned back", reclaim_deadline_s=None, turn_back_s=9.5, turn_back_deadline_s=9.0,
        is_late=True, turned_back=why,
    )  # fmt: skip
    timed = run(turn_backs=2, turn_back_s=ReclaimTimes(p50=4.0, max=9.5), turn_backs_late=1)
    shown = table(timed, loan)
    assert "0 that ended by their TTL without an order|" in shown
    assert "|turned back|2, 1 late; home again in median 4.0 s, longest 9.5 s|" in shown
    assert f"|9.5 s late|9 s|{why}|" in shown
    assert "turned back" not in table(run())


def test_a_way_home_that_was_not_over_has_its_row() -> None:
    """The figures count it from its beginning, so that a table without it would contradict them."""
    rows = [
        loan_row("l1", state="returned", reclaim_ordered_at_s=1.0, reclaim_s=3.0),
        loan_row("l2", state="coming home", reclaim_ordered_at_s=1.0),
        loan_row("l3", state="coming home", reclaim_ordered_at_s=1.0, is_late=True),
        loan_row("l4", state="coming home", reclaim_deadline_s=None, lapse_deadline_s=9.0),
        loan_row("l5", state="coming home", turned_back="GPU-1 is used", turn_back_deadline_s=8.0),
        loan_row("l6", state="on loan"),
        loan_row("l7", state="ended", reclaim_ordered_at_s=1.0),
    ]
    shown = table(run(reclaims=4, reclaims_late=1, leases_lapsed=1, turn_backs=1), *rows)
    assert "|reclaims|4, 1 late, 2 under way at the end; median 3.0 s, longest 3.0 s of" in shown
    assert "|lapses|1, 0 late, 1 under way at the end; home again in median -" in shown
    assert "|turned back|1, 0 late, 1 under way at the end; home again in median -" in shown
    found = dict(re.findall(r"\|i0\|(l\d)\|(.*)\|", shown))
    assert found == {
        "l1": "3.0 s|120 s|0",
        "l2": "under way|120 s|0",
        "l3": "under way late|120 s|0",
        "l4": "under way|9 s|0",
        "l5": "under way|8 s|GPU-1 is used",
    }
    assert "under way" not in table(run(), *rows[:1])


def test_what_nobody_measured_is_no_zero() -> None:
    """Of a run in which nothing has ended and nobody came home there are no times."""
    shown = table(run(jct_s=Durations(), reclaims=0, reclaim_s=ReclaimTimes()))
    assert "|JCT, finished jobs|mean -, median -, p95 -|" in shown
    assert "|reclaims|0, 0 late; median -, longest - of 45 s|" in shown
    assert "|queueing time, all jobs|mean 1.0 s, median 1.0 s, p95 2.0 s|" in shown


def test_what_was_refused_during_loans_stands_beside_all_that_was_refused() -> None:
    """Only the first of the two may be blamed on lending."""
    assert "|requests|80 served, 1 refused during loans, 4 in all|" in table(run())


def test_old_figures_are_called_old() -> None:
    """A table without a coordinator behind it says since when, and one of now says nothing."""
    assert "47 s old: no coordinator answers" in table(run(figures_age_s=47.0))
    assert "old" not in table(run())


def test_a_run_that_lent_nothing_says_what_was_in_the_way() -> None:
    """All reasons, and not a word of it where something was lent."""
    kept = ("chat: 0 spare", "infer-1, the first to be lent: min_serving is 2")
    shown = table(run(loans=0, why_none_lent=kept))
    assert "|none lent|chat: 0 spare; infer-1, the first to be lent: min_serving is 2|" in shown
    assert "none lent" not in table(run())


def test_long_reasons_do_not_stretch_the_table() -> None:
    """Into a file, where no terminal limits the width, it is as narrow as on a screen."""
    paper = Console(width=10_000, file=io.StringIO(), record=True)
    paper.print(run_table(run(loans=0, why_none_lent=("because " * 100,)), ()))
    assert max(map(len, paper.export_text().splitlines())) <= 120


def test_each_reclaim_names_its_realised_preemptions() -> None:
    """What a lent node's return did cost, not what was predicted."""
    loan = loan_row(
        reclaim_s=2.5, reclaim_deadline_s=45.0, predicted_preemptions=1, realised_preemptions=8
    )
    assert "|2.5 s|45 s|8|" in table(run(), loan)


def test_a_loan_that_was_called_back_before_its_node_had_left_is_no_reclaim() -> None:
    """The count of reclaims leaves it out, and so does the table below."""
    loan = loan_row(reclaim_s=None, returned_at_s=9.0, reclaim_deadline_s=45.0, begun_at_s=None)
    assert "|45 s|" not in table(run(reclaims=0), loan)


def test_a_late_reclaim_of_a_loan_that_was_not_heard_to_begin_is_shown() -> None:
    """What the count of reclaims holds, the table below shows as well."""
    loan = loan_row(reclaim_s=101.0, reclaim_deadline_s=45.0, begun_at_s=None, is_late=True)
    assert "|101.0 s late|45 s|" in table(run(reclaims_late=1), loan)


@each_row("name", sorted({*Run.__struct_fields__, *Figures.__struct_fields__}))
def test_every_figure_is_in_the_glossary(name: str) -> None:
    """A name in JSON that nobody explains is a name that everybody reads differently."""
    assert f"`{name}`" in GLOSSARY.read_text()
