"""The fit's strict FIFO is right on cases done by hand, and is the engine's, job by job."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec import structs

from common.clock import SystemClock
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.workloads.named import DRAW_SEEDS, to_jobs
from coordinator.workloads.paper import (
    RARE_GPU,
    TRAINING_GPU,
    Drawn,
    PaperParameters,
    draw,
)
from coordinator.workloads.records import NodeGroup, Workload
from docs.research.fit_fifo import Nodes, fifo_starts
from docs.research.fit_paper import (
    FITTED,
    PAPER,
    Row,
    error,
    fifo_row,
    figures,
    loss,
    main,
    search,
    table,
)
from docs.research.play_results import read_kept

PAGE = Path(__file__).parents[2] / "docs" / "workload-paper.md"
KEPT = read_kept()
PERIOD_S = 10
PARAMETERS = structs.replace(PaperParameters(), pass_period_s=PERIOD_S, rare_nodes=1)


@cache
def frozen(number: int) -> Drawn:
    """The jobs of a frozen trace; nothing changes them."""
    return draw(PaperParameters(), DRAW_SEEDS[number])


@cache
def frozen_row(number: int) -> Row:
    """What the fit says of them."""
    return fifo_row(frozen(number), PaperParameters())


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
        is_initial=np.zeros(len(rows), dtype=np.bool_),
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
    nodes.give([whole], 8)
    assert nodes.take(2, 4) == [whole] * 4


def test_of_nodes_alike_the_lowest_number_is_taken() -> None:
    """However they became free: the third node's worker goes first, the first node's is reused."""
    nodes = Nodes(3)
    assert nodes.take(8, 3) == [0, 1, 2]
    nodes.give([2], 8)
    nodes.give([0], 8)
    assert nodes.take(8, 1) == [0]


def test_gangs_that_start_together_are_packed_largest_first() -> None:
    """Nodes with 8, 4 and 5 free: 1, 4 and 4 leave room for 8 only when packed anew.

    In order of submission the 1 would take of the 4, and the second 4 of the 8.
    """
    before = ((0, 5, 8), (0, 5, 4), (0, 100, 4), (0, 100, 2), (0, 100, 1))
    together = ((1, 50, 1), (1, 50, 4), (1, 50, 4), (1, 50, 8))
    drawn = make_drawn(*before, *together)
    assert fifo_starts(drawn, PARAMETERS, nodes=4)[5:].tolist() == [10, 10, 10, 10]


def test_a_gang_that_never_fits_is_an_error() -> None:
    """It would block the line for ever; the error names it."""
    with pytest.raises(ValueError, match="job 1: 4 workers never fit"):
        fifo_starts(make_drawn((0, 5, 1), (0, 5, 32)), PARAMETERS, nodes=4)


def a_crowd(seed: int) -> Drawn:
    """400 jobs of all sizes, now and then a gang of up to ten nodes, for eleven nodes and a rare.

    They ask for about as much as there is, so that most of them wait.
    """
    chance = Random(seed)
    rows: list[tuple[float, float, int]] = []
    for number in range(400):
        sizes = (48, 64, 80) if number % 25 == 24 else (1, 1, 1, 2, 2, 4, 8, 16)
        rows.append((chance.randrange(12_000), chance.randrange(1, 500), chance.choice(sizes)))
    rows.sort()
    alone = [number for number, row in enumerate(rows) if row[2] == 8 and number % 3 == 0]
    drawn = make_drawn(*rows, rare=tuple(alone))
    is_elastic = (drawn.gpus == 4) & ~drawn.is_rare
    return structs.replace(drawn, is_elastic=is_elastic, size=np.where(is_elastic, 2, drawn.size))


def engine_starts(drawn: Drawn, parameters: PaperParameters, nodes: int) -> list[float]:
    """When each job starts under the shipped `fifo`, played as the paper's Baseline is."""
    rare = parameters.rare_nodes
    workload = Workload(
        name="crowd",
        jobs=to_jobs(drawn, parameters),
        loads=(),
        nodes=(
            NodeGroup(count=nodes - rare, gpus=8, gpu_type=TRAINING_GPU),
            NodeGroup(count=rare, gpus=8, gpu_type=RARE_GPU),
        ),
        length_s=float(drawn.submit_s[-1]),
        pass_period_s=parameters.pass_period_s,
    )
    run = play(workload, RunOptions(policy="fifo", has_delays=False), clock=SystemClock())
    started_s = {row.job_id: row.started_at_s for row in run.rows}
    return [started_s[job.job_id] for job in workload.jobs]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_engine_starts_every_job_when_the_fit_does(seed: int) -> None:
    """Two strict FIFOs that share no code: not one of 400 jobs starts in another pass."""
    drawn = a_crowd(seed)
    starts_s = fifo_starts(drawn, PARAMETERS, nodes=12)
    assert np.mean(starts_s - drawn.submit_s > 2 * PERIOD_S) > 0.3, "too few wait"
    assert engine_starts(drawn, PARAMETERS, 12) == starts_s.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(name for name in KEPT if name.startswith("baseline-")))
def test_a_kept_baseline_run_is_what_the_fit_says(name: str) -> None:
    """The Baseline row of docs/results.md and the fit's row for that trace are one."""
    kept = KEPT[name].result
    row = frozen_row(kept.seed)
    queueing, jct = kept.queueing_s, kept.jct_s
    found = (row.queue_mean, row.queue_p50, row.queue_p95, row.jct_mean, row.jct_p50, row.jct_p95)
    wanted = (queueing.mean, queueing.p50, queueing.p95, jct.mean, jct.p50, jct.p95)
    assert found == pytest.approx(wanted, rel=1e-9)
    assert row.use == pytest.approx(kept.training_gpu_ratio, rel=1e-3)


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
    """Queueing, JCT and use within 15 % of Table 5, Baseline; the page of the fit has the row."""
    row = frozen_row(number)
    found, wanted = figures(row), figures(PAPER)
    assert not {name for name in FITTED if abs(found[name] / wanted[name] - 1.0) > 0.15}
    assert table([(f"paper-{number}", row)]).splitlines()[-1] in PAGE.read_text("utf-8")


@pytest.mark.slow
def test_the_rare_line_is_the_tail() -> None:
    """One job in a hundred waits for days, and makes up nearly half of the mean."""
    parameters = PaperParameters()
    drawn = frozen(1)
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
    """From a seed's good place the first far move is dropped and the second one kept; one search
    seed always goes one way."""
    said: list[str] = []
    start = PaperParameters()
    found = search(2, 1, [55], start, say=said.append)
    assert found == search(2, 1, [55], start, say=said.append)
    assert loss(found, [55])[0] < loss(start, [55])[0]
    assert [line[:3] for line in said] == ["1: ", "1: "]


@pytest.mark.slow
def test_seeds_are_those_that_come_near(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 71 and 72 only the first is near enough."""
    assert main(["seeds", "--first", "71", "--last", "72"]) == 0
    assert capsys.readouterr().out == "71\n"
