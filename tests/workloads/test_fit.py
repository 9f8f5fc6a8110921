"""The fit's strict FIFO is right on cases done by hand, and frozen traces hold the FIFO row."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from coordinator.workloads.named import DRAW_SEEDS
from coordinator.workloads.paper import Drawn, PaperParameters, draw
from tools.fit_paper import (
    FITTED,
    PAPER,
    Nodes,
    error,
    fifo_row,
    fifo_starts,
    found_seeds,
    loss,
    main,
    search,
    table,
)

PERIOD_S = 10
PARAMETERS = structs.replace(PaperParameters(), pass_period_s=PERIOD_S, rare_nodes=1)


def make_drawn(*rows: tuple[float, float, int], rare: tuple[int, ...] = ()) -> Drawn:
    """Rows of (submit_s, duration_s, gpus); the numbered ones accept only the rare type."""
    gpus = np.array([row[2] for row in rows], dtype=np.int64)
    return Drawn(
        submit_s=np.array([row[0] for row in rows]),
        duration_s=np.array([row[1] for row in rows]),
        gpus=gpus,
        size=np.minimum(gpus, 8),
        is_elastic=np.zeros(len(rows), dtype=np.bool_),
        is_rare=np.array([number in rare for number in range(len(rows))]),
    )


def test_jobs_start_at_the_next_pass() -> None:
    """On an idle cluster a job waits for a multiple of the period and no longer."""
    drawn = make_drawn((0, 5, 1), (1, 5, 8), (10, 5, 1), (11, 5, 1))
    assert fifo_starts(drawn, PARAMETERS).tolist() == [0, 10, 10, 20]


def test_the_head_of_the_line_holds_up_all_behind_it() -> None:
    """442 nodes: a gang of all of them waits for the first job, and one GPU waits for the gang."""
    drawn = make_drawn((0, 95, 1), (0, 30, 442 * 8), (0, 5, 1))
    assert fifo_starts(drawn, PARAMETERS).tolist() == [0, 100, 130]


def test_the_rare_type_has_a_line_of_its_own() -> None:
    """One rare node serves its jobs one by one; the others pass by."""
    drawn = make_drawn((0, 100, 8), (0, 100, 8), (0, 5, 8), rare=(0, 1))
    assert fifo_starts(drawn, PARAMETERS).tolist() == [0, 100, 0]


def test_workers_go_where_they_fit_best() -> None:
    """A whole node stays free as long as a used one has room; what does not fit changes nothing."""
    nodes = Nodes(2)
    assert nodes.take(4, 1) == nodes.take(4, 1)
    assert nodes.take(8, 2) is None
    [whole] = nodes.take(8, 1) or []
    assert nodes.take(1, 1) is None
    nodes.give(whole, 8)
    assert nodes.take(2, 4) == [whole] * 4


def test_use_counts_the_fifteen_days_only() -> None:
    """A job that runs on after the last submission adds nothing to it."""
    day_s = 86_400.0
    whole = make_drawn((0, 15 * day_s, 8 * 442), (0, 15 * day_s, 8), rare=(1,))
    assert fifo_row(whole, PARAMETERS).use == pytest.approx(1.0)
    late = make_drawn((14 * day_s, 9 * day_s, 8 * 442))
    assert fifo_row(late, PARAMETERS).use == pytest.approx(442 / 443 / 15)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_frozen_trace_has_the_paper_s_fifo_row(number: int) -> None:
    """Mean, median and p95 of queueing and JCT, and use, each within 15 % of Table 5, Baseline."""
    drawn = draw(PaperParameters(), DRAW_SEEDS[number])
    row = fifo_row(drawn, PaperParameters())
    assert error(row) <= 0.15, structs.asdict(row)


@pytest.mark.slow
def test_the_rare_line_is_the_tail() -> None:
    """One job in a hundred waits for days, and makes up nearly half of the mean."""
    parameters = PaperParameters()
    drawn = draw(parameters, DRAW_SEEDS[1])
    queue_s = fifo_starts(drawn, parameters) - drawn.submit_s
    part = queue_s[drawn.is_rare].sum() / queue_s.sum()
    assert 0.4 < part < 0.6
    assert np.median(queue_s[drawn.is_rare]) > 86_400


def test_the_error_is_the_worst_figure() -> None:
    """Figures that are not fitted do not count."""
    assert error(PAPER) == 0.0
    assert error(structs.replace(PAPER, use=0.9)) == pytest.approx(0.25)
    assert error(structs.replace(PAPER, jct_p99=1.0)) == 0.0
    assert "(jct_p99)" in table([("x", PAPER)])
    assert all(f" {name} " in table([]) for name in FITTED)


@pytest.mark.slow
def test_a_search_keeps_only_what_is_nearer() -> None:
    """From a seed's good place far moves end no farther; one search seed always goes one way."""
    said: list[str] = []
    start = PaperParameters()
    found = search(3, 5, [55], start, say=said.append)
    assert found == search(3, 5, [55], start, say=said.append)
    assert loss(found, [55])[0] <= loss(start, [55])[0]
    assert (found != start) == bool(said)


@pytest.mark.slow
def test_seeds_are_those_that_come_near(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints what the function finds: of 55 and 56 only the first is near enough."""
    assert found_seeds(55, 56, PaperParameters(), 0.15) == [55]
    assert main(["seeds", "--first", "55", "--last", "56"]) == 0
    assert capsys.readouterr().out == "55\n"
