"""Failures drawn from the Philly study's table, and what they cost in a run."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from math import exp, log
from pathlib import Path
from statistics import median

import pytest

from common.clock import SystemClock
from common.failure_rules import read_rules
from common.failures import RetryClass
from common.model import Pool
from coordinator.sim.inputs.failure_sources import FailureSource
from coordinator.sim.inputs.failure_table import (
    MINUTE_S,
    TABLE,
    Z90,
    Z95,
    PhillyFailures,
    troubled_ratio,
)
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import RunResult, play
from coordinator.workloads.records import NodeGroup, TraceJob, Workload
from tests.tables import each_row

NEVER = frozenset(
    name for name, rule in read_rules().reasons.items() if rule.retry == RetryClass.NEVER
)
TABLE_7 = Path(__file__).parents[2] / "data" / "sim" / "philly_failures.csv"
"""The study's table as it was published."""
GPU_TIME = "gpu_time_percent"
"""Its column of the GPU time that failed so, which no source of failures draws from."""
BY_REASON = {cause.reason: cause for cause in TABLE}

# --- the table ----------------------------------------------------------------------------------


def test_the_table_is_the_study_s() -> None:
    """Its 22 rows, every one a reason of the rules, and the sums that the study's text gives."""
    assert set(BY_REASON) == set(read_rules().reasons)
    assert sum(cause.trials for cause in TABLE) == 39_776
    assert sum(cause.trials for cause in TABLE if cause.reason in NEVER) / 39_776 == pytest.approx(
        0.677, abs=5e-4
    )
    for cause in TABLE:
        assert cause.trials_1 + cause.trials_2_4 + cause.trials_above_4 == cause.trials


def test_every_cell_of_the_table_is_the_study_s() -> None:
    """Reasons in the table's order, with all of its numbers, and who has to look at them."""
    rules = read_rules().reasons
    with TABLE_7.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [rules[cause.reason].title for cause in TABLE] == [row["title"] for row in rows]
    for cause, row in zip(TABLE, rows, strict=True):
        assert "+".join(rules[cause.reason].origins) == row["origins"]
        numbers = {name: float(value) for name, value in list(row.items())[2:] if name != GPU_TIME}
        assert {name: float(getattr(cause, name)) for name in numbers} == numbers
        assert numbers.keys() == set(cause.__struct_fields__) - {"reason"}


def test_hopeless_reasons_are_as_much_of_the_study_s_failures_as_its_readers_counted() -> None:
    """15,598 of the 22,195 trials that repeat a job's first one, and 51.7 % of the GPU time."""
    repeats = {cause.reason: cause.trials - cause.jobs for cause in TABLE}
    assert sum(repeats.values()) == 22_195
    assert sum(repeats[reason] for reason in NEVER) == 15_598
    titles = {read_rules().reasons[reason].title for reason in NEVER}
    with TABLE_7.open() as lines:
        shares = {row["title"]: float(row[GPU_TIME]) for row in csv.DictReader(lines)}
    assert sum(shares.values()) == pytest.approx(100.0, abs=0.1)
    assert sum(shares[title] for title in titles) == pytest.approx(51.7, abs=0.05)


@each_row(("gpus", "rate"), [(1, 0.13), (2, 0.37), (4, 0.37), (5, 0.42), (8, 0.42)])
def test_a_size_fails_as_often_as_the_study_s(gpus: int, rate: float) -> None:
    """Against gangs of more than 8 GPUs, 0.47 of which had no success (figure 9)."""
    assert troubled_ratio(gpus) / troubled_ratio(9) == pytest.approx(rate / 0.47)
    # The rows have 17,581 jobs, the study 16,568 without success: some had two reasons.
    assert troubled_ratio(gpus) == pytest.approx(rate * 17_581 / 16_568)


@each_row(("gpus", "trials"), [(0, 2912 - 976), (1, 1936), (2, 496), (4, 496), (5, 480), (64, 480)])
def test_trials_are_of_the_column_of_the_gang(gpus: int, trials: int) -> None:
    """One GPU, two to four, and more."""
    assert BY_REASON["core_dump"].trials_of(gpus) == trials


def test_the_spread_of_times_to_failure_is_fitted_to_both_upper_quantiles() -> None:
    """A little more or less of it is further from p90 and p95 together, in squares of logs."""
    for cause in TABLE:
        said = ((Z90, log(cause.p90 / cause.p50)), (Z95, log(cause.p95 / cause.p50)))
        fitted = log(cause.runtime_s(1.0) / cause.runtime_s(0.0))

        def error(sigma: float, said: Iterable[tuple[float, float]] = said) -> float:
            return sum((sigma * at - log_ratio) ** 2 for at, log_ratio in said)

        assert error(fitted) < min(error(fitted - 0.001), error(fitted + 0.001))


def test_times_to_failure_go_through_the_median_and_near_the_upper_quantiles() -> None:
    """The fit is exact at p50, and lies between the errors that p90 and p95 alone would have."""
    for cause in TABLE:
        assert cause.runtime_s(0.0) == pytest.approx(cause.p50 * MINUTE_S)
        low, high = sorted((log(cause.p90 / cause.p50) / Z90, log(cause.p95 / cause.p50) / Z95))
        at_90 = log(cause.runtime_s(Z90) / cause.runtime_s(0.0)) / Z90
        assert low - 1e-9 <= at_90 <= high + 1e-9


def test_the_drawn_failures_follow_the_table() -> None:
    """How many jobs fail, why by size of the gang, and when."""
    drawn = PhillyFailures(7, frozenset())
    for gpus, trials in ((1, "trials_1"), (8, "trials_above_4")):
        troubles = [drawn.trouble(f"j{n}", f"u{n}", gpus) for n in range(20_000)]
        found = [trouble for trouble in troubles if trouble is not None]
        assert len(found) / len(troubles) == pytest.approx(troubled_ratio(gpus), abs=0.01)
        jobs = {c.reason: getattr(c, trials) * c.jobs / c.trials for c in TABLE}
        for reason in ("incorrect_inputs", "semantic_error", "core_dump"):
            share = sum(trouble.reason == reason for trouble in found) / len(found)
            assert share == pytest.approx(jobs[reason] / sum(jobs.values()), abs=0.05)
        times = [t.times_s[0] for t in found if t.reason == "incorrect_inputs"]
        assert log(median(times)) == pytest.approx(log(1.87 * MINUTE_S), abs=log(1.5))
        tries = [t.trials for t in found if t.reason == "core_dump"]
        mean = BY_REASON["core_dump"].trials / BY_REASON["core_dump"].jobs
        assert sum(n or 0 for n in tries) / len(tries) == pytest.approx(mean, abs=0.2)


def test_the_same_seed_and_name_fail_alike() -> None:
    """Whatever was drawn before: settings are compared on the same failures."""
    one, two = PhillyFailures(3, NEVER), PhillyFailures(3, NEVER)
    names = [f"j{n}" for n in range(200)]
    before = {name: one.trouble(name, "u", 4) for name in names}
    assert before == {name: two.trouble(name, "u", 4) for name in reversed(names)}
    assert before != {name: PhillyFailures(4, NEVER).trouble(name, "u", 4) for name in names}


def test_a_user_repeats_the_mistakes_that_it_makes() -> None:
    """The jobs of one user have few reasons, those of many users have many."""
    drawn = PhillyFailures(5, NEVER)

    def reasons(users: int) -> int:
        names = [(f"j{n}", f"u{n % users}") for n in range(3000)]
        return len({t.reason for name, user in names if (t := drawn.trouble(name, user, 1))})

    assert reasons(1) < reasons(3000)


def test_hopeless_reasons_fail_every_attempt_at_the_same_time() -> None:
    """No retry helps, and it costs the same again."""
    drawn = PhillyFailures(1, NEVER)
    found = [t for n in range(500) if (t := drawn.trouble(f"j{n}", f"u{n}", 1)) is not None]
    for trouble in found:
        assert (trouble.trials is None) == (trouble.reason in NEVER)
        assert trouble.after_s(0) is not None
        if trouble.trials is None:
            assert trouble.after_s(99) == trouble.after_s(0)
        else:
            assert trouble.after_s(trouble.trials) is None


# --- runs ---------------------------------------------------------------------------------------


def workload(duration_s: float) -> Workload:
    """Two hundred jobs of 1 to 16 GPUs, so long each, on 8 nodes of 8 GPUs."""
    jobs = tuple(
        TraceJob(
            job_id=f"j{n}",
            submit_s=300.0 * n,
            duration_s=duration_s,
            gpus=(1, 1, 4, 8, 16)[n % 5],
            user=f"u{n % 40}",
        )
        for n in range(200)
    )
    nodes = (NodeGroup(count=8, gpus=8, gpu_type="V100", home_pool=Pool.TRAINING),)
    return Workload(name="w", jobs=jobs, nodes=nodes, loads=(), length_s=60_000.0)


def run(jobs: Workload | None = None, **options: object) -> RunResult:
    """These jobs, or ones of an hour."""
    played = RunOptions(policy="fifo-skip", seed=2, has_delays=False, **options)  # type: ignore[arg-type]
    return play(jobs or workload(3600.0), played, clock=SystemClock()).result


def without_classes(**options: object) -> RunResult:
    """The same where the job's own budget decides alone."""
    return run(None, engine={"retry_by_failure_class": False}, **options)


def test_without_a_source_nothing_fails() -> None:
    """A plain run is what it was."""
    result = run()
    assert (result.jobs_failed, result.failures.trials) == (0, 0)


def test_hopeless_failures_cost_as_often_as_they_are_tried() -> None:
    """Three attempts each without classes, one with them, and none is saved by trying."""
    blind, classed = (play(failures=FailureSource.PHILLY) for play in (without_classes, run))
    assert blind.failures.jobs == classed.failures.jobs > 20
    for reason in NEVER & set(classed.failures.by_reason):
        few, many = classed.failures.by_reason[reason], blind.failures.by_reason[reason]
        assert many.trials == 3 * few.trials
        assert many.gpu_s == pytest.approx(3 * few.gpu_s, rel=1e-6)
    assert classed.failures.gpu_s < blind.failures.gpu_s


def test_as_many_attempts_fail_as_restarts_allow() -> None:
    """No restarts: each job that fails once has failed."""
    result = run(failures=FailureSource.PHILLY, restarts=0)
    free = result.failures.by_reason.get("job_preempted")
    assert result.failures.trials == result.failures.jobs + (0 if free is None else free.trials - 1)
    assert result.jobs_failed == result.failures.jobs


def test_drawn_failures_come_to_an_end() -> None:
    """Each job fails as often as was drawn for it and no more: with restarts enough all succeed."""
    result = without_classes(failures=FailureSource.PHILLY_DRAWN, restarts=200)
    assert result.failures.trials > result.failures.jobs > 20
    assert result.jobs_failed == 0


def test_a_pre_run_spares_gangs_the_failures_of_their_first_minutes() -> None:
    """The same jobs fail for the same reasons; those within the pre-run on one GPU."""
    plain = run(failures=FailureSource.PHILLY)
    tried = run(failures=FailureSource.PHILLY, prerun_s=600.0, check=True)
    assert tried.failures.jobs == plain.failures.jobs
    assert tried.failures.gpu_s < plain.failures.gpu_s


def test_a_pre_run_makes_nobody_fail_that_would_not() -> None:
    """A gang that ends before its failure would come does not fail in a longer pre-run either."""
    short = workload(60.0)
    plain = run(short, failures=FailureSource.PHILLY)
    tried = run(short, failures=FailureSource.PHILLY, prerun_s=600.0)
    assert 0 < tried.failures.jobs == plain.failures.jobs


def test_half_of_a_lognormal_lies_below_its_median() -> None:
    """The deviate is a standard normal one: the scale is in logarithms."""
    cause = BY_REASON["cuda_failure"]
    assert cause.runtime_s(1.0) / cause.runtime_s(0.0) == pytest.approx(
        cause.runtime_s(0.0) / cause.runtime_s(-1.0)
    )
    assert cause.runtime_s(0.0) == pytest.approx(exp(log(cause.p50)) * MINUTE_S)
