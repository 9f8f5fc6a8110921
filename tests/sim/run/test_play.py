"""One run: what its figures mean, that nothing but the arguments decides them, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.errors import ConfigError
from common.model import Pool
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import Run, RunResult, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import (
    LoadSeries,
    LoadUnit,
    NodeGroup,
    ScalingCurve,
    TraceJob,
    Workload,
)
from coordinator.workloads.shaping import RuntimeModel
from tests.sim.small import small
from tests.tables import each_row

FIELDS = [
    *("policy", "seed", "jobs", "queueing_s", "jct_s"),
    *("training_gpu_ratio", "overall_gpu_ratio", "on_loan_gpu_ratio"),
    *("preemptions", "preempted_jobs_ratio", "lost_gpu_s", "reclaims", "reclaims_late"),
    *("jct_bound_s", "events", "wall_s", "peak_rss_bytes"),
    *("reclaim", "on_loan_jobs", "makespan_s", "deadlines_met_ratio"),
    *("promised", "promises_missed", "finish_time_fairness"),
    *("jobs_rejected", "jobs_failed", "failures", "waits"),
    *("suspensions", "suspended_s", "migrations", "apps"),
    *("skipped_zero_gpus", "skipped_not_run", "gap_closed_ratio"),
    *("scenario", "swept"),
]


def job(job_id: str, submit_s: float, duration_s: float, gpus: int, **more: object) -> TraceJob:
    """One row of a trace."""
    plain = TraceJob(job_id=job_id, submit_s=submit_s, duration_s=duration_s, gpus=gpus)
    return structs.replace(plain, **more)


def workload(
    *jobs: TraceJob,
    nodes: tuple[NodeGroup, ...] = (NodeGroup(count=1, gpus=8, gpu_type="V100"),),
    loads: tuple[LoadSeries, ...] = (),
    length_s: float = 100.0,
) -> Workload:
    """Jobs on one node of 8 GPUs."""
    return Workload(name="w", jobs=jobs, loads=loads, nodes=nodes, length_s=length_s)


def played(
    of: Workload, policy: str = "fifo", *, saves: Saves | None = None, has_delays: bool = False
) -> Run:
    """A checked run without delays."""
    options = RunOptions(policy=policy, has_delays=has_delays, saves=saves, check=True)
    return play(of, options, clock=SystemClock())


# --- what the figures mean ----------------------------------------------------------------------


def test_the_fields_are_those_that_scripts_rely_on() -> None:
    """Names and their order are a contract."""
    assert list(RunResult.__struct_fields__) == FIELDS


def test_queueing_and_completion_are_measured_from_submission() -> None:
    """Two jobs of the whole node, one after the other."""
    result = played(workload(job("a", 0.0, 100.0, 8), job("b", 20.0, 50.0, 8))).result
    assert result.queueing_s.mean == (0.0 + 80.0) / 2
    assert result.jct_s.mean == (100.0 + 130.0) / 2
    assert result.jct_bound_s == (100.0 + 50.0) / 2


def test_makespan_deadlines_and_fairness_are_of_the_whole_run() -> None:
    """Two jobs of the whole node, one after the other: the second misses its deadline by 10 s."""
    jobs = (job("a", 0.0, 100.0, 8, deadline_s=100.0), job("b", 20.0, 50.0, 8, deadline_s=120.0))
    result = played(workload(*jobs)).result
    assert result.makespan_s == 150.0
    assert result.deadlines_met_ratio == 0.5
    # a: 80 of its 100 s with b, 1.8 apps in the mean; b: 80 of its 130 s with a.
    shares = (8 / 1.8, 8 / (210 / 130))
    rhos = (100.0 / (800.0 / shares[0]), 130.0 / (400.0 / shares[1]))
    assert result.finish_time_fairness.max == pytest.approx(max(rhos))
    assert result.finish_time_fairness.mean == pytest.approx(sum(rhos) / 2)
    assert result.finish_time_fairness.share_above_1 == sum(rho > 1 for rho in rhos) / 2


@each_row(("submit_s", "pass_period_s"), [(3.3, None), (3.3, 60.0), (0.0, None), (0.0, 60.0)])
@each_row("has_delays", [False, True])
@each_row("policy", ["fifo", "aryl", "themis", "gandiva"])
def test_who_has_the_cluster_to_itself_is_as_fast_as_alone(
    policy: str, has_delays: bool, submit_s: float, pass_period_s: float | None
) -> None:
    """Alone one starts as well, and waits for the pass: rho is 1 with delays as without."""
    alone = workload(job("a", submit_s, 100.0, 8, app="search"))
    alone = structs.replace(alone, pass_period_s=pass_period_s)
    run = played(alone, policy, has_delays=has_delays)
    assert (run.rows[0].jct_s > 100.0) == has_delays or pass_period_s
    assert run.rows[0].app == "trace/search"
    assert run.rows[0].rho == pytest.approx(1.0, abs=1e-9)
    assert run.result.finish_time_fairness.share_above_1 == 0.0


def test_apps_of_several_jobs_are_told_one_by_one() -> None:
    """Two trials one after the other, and a job by itself, which is no app of several."""
    trials = (job("a", 0.0, 100.0, 8, app="x"), job("b", 0.0, 100.0, 8, app="x"))
    run = played(workload(*trials, job("c", 0.0, 50.0, 8)))
    [app] = run.result.apps
    assert (app.app, app.jobs) == ("trace/x", 2)
    rows = {row.job_id: row for row in run.rows}
    assert rows["a"].rho == rows["b"].rho == app.rho
    assert (rows["c"].app, rows["c"].rho) == ("c", run.result.finish_time_fairness.max)
    assert run.result.finish_time_fairness.apps == 2


def test_an_app_is_told_under_its_tenant_and_joins_no_stranger_s() -> None:
    """Two tenants with one word for theirs, and a job that has it for its own name: three apps."""
    trials = (
        job("x", 0.0, 100.0, 8),
        job("a", 0.0, 100.0, 8, app="x", tenant="lab"),
        job("b", 0.0, 100.0, 8, app="x", tenant="shop"),
        job("c", 0.0, 100.0, 8, app="x", tenant="shop"),
    )
    run = played(workload(*trials))
    assert {row.job_id: row.app for row in run.rows} == {
        "x": "x", "a": "lab/x", "b": "shop/x", "c": "shop/x"
    }  # fmt: skip
    assert [(app.app, app.jobs) for app in run.result.apps] == [("shop/x", 2)]
    assert run.result.finish_time_fairness.apps == 3
    rhos = {row.job_id: row.rho for row in run.rows}
    assert rhos["b"] == rhos["c"] != rhos["a"]


def test_turns_are_counted_and_their_time_is_neither_queueing_nor_computing() -> None:
    """Two jobs in turns on one node: what a job took is its wait, its turns off and its work."""
    jobs = (job("a", 0.0, 600.0, 8), job("b", 0.0, 600.0, 8))
    run = played(workload(*jobs), "gandiva:packs=false:migrates=false", saves=Saves.ON_REQUEST)
    result = run.result
    assert result.suspensions == sum(row.suspensions for row in run.rows) > 2
    assert result.suspended_s.mean == pytest.approx(sum(row.suspended_s for row in run.rows) / 2)
    assert (result.migrations, result.preemptions) == (0, 0)
    assert [row.migrations for row in run.rows] == [0, 0]
    for row in run.rows:
        assert row.suspended_s > 0
        assert row.jct_s == pytest.approx(row.queueing_s + row.suspended_s + 600.0)


def test_without_deadlines_there_is_no_ratio_of_them() -> None:
    """Nobody asked for one: not 0, not 1."""
    assert played(workload(job("a", 0.0, 100.0, 8))).result.deadlines_met_ratio is None


def test_use_is_of_the_span_of_submissions() -> None:
    """Half of the GPUs over half of the span is a quarter, whatever runs after it."""
    jobs = (job("a", 0.0, 50.0, 4), job("b", 100.0, 1000.0, 8))
    assert played(workload(*jobs)).result.training_gpu_ratio == pytest.approx(0.25)


def test_use_of_jobs_that_come_at_once_is_of_the_whole_run() -> None:
    """A batch has no span of submissions: eight GPUs, then four, each for half of the run."""
    jobs = (job("a", 0.0, 50.0, 8), job("b", 0.0, 50.0, 4))
    result = played(workload(*jobs, length_s=0.0)).result
    assert result.training_gpu_ratio == pytest.approx(0.75)
    assert result.overall_gpu_ratio == pytest.approx(0.75)


def test_overall_use_counts_gpus_that_serve() -> None:
    """Training 8 of 8, serving 25 % of 24, of 32 GPUs in all."""
    nodes = (
        NodeGroup(count=1, gpus=8, gpu_type="V100"),
        NodeGroup(count=3, gpus=8, gpu_type="T4", home_pool=Pool.INFERENCE),
    )
    load = LoadSeries(name="chat", step_s=10.0, values=(0.25,), unit=LoadUnit.BUSY)
    result = played(workload(job("a", 0.0, 100.0, 8), nodes=nodes, loads=(load,))).result
    assert result.overall_gpu_ratio == pytest.approx((8 + 0.25 * 24) / 32)


def test_preempted_jobs_are_counted_once_and_preemptions_each() -> None:
    """A long job that two short ones interrupt is one of three jobs, with two preemptions."""
    jobs = (job("a", 0.0, 500.0, 8), job("b", 100.0, 10.0, 8), job("c", 200.0, 10.0, 8))
    result = played(workload(*jobs, length_s=200.0), "srtf", saves=Saves.ON_REQUEST).result
    assert result.preemptions == 2
    assert result.preempted_jobs_ratio == pytest.approx(1 / 3)
    assert result.lost_gpu_s == 0.0


def test_lost_work_is_what_really_was_computed_in_vain() -> None:
    """Without checkpoints the 100 s on 8 GPUs before the interruption are lost."""
    jobs = (job("a", 0.0, 500.0, 8), job("b", 100.0, 10.0, 8))
    result = played(workload(*jobs), "srtf", saves=Saves.NEVER).result
    assert result.lost_gpu_s == pytest.approx(800.0)


def test_an_elastic_jobs_bound_is_its_time_with_all_workers() -> None:
    """200 s on one worker of a possible two cannot be done in less than 100 s."""
    elastic = job("a", 0.0, 200.0, 4, gpus_per_worker=4, min_workers=1, max_workers=2)
    result = played(workload(elastic), "aryl-elastic").result
    assert result.jct_bound_s == 100.0
    assert result.jct_s.mean == pytest.approx(100.0)


def test_jobs_come_back_under_their_own_names() -> None:
    """Ids inside the run sort by submission; ids outside are the trace's."""
    run = played(workload(job("z", 0.0, 10.0, 8), job("a", 0.0, 10.0, 8)))
    assert [(row.job_id, row.finished_at_s) for row in run.rows] == [("z", 10.0), ("a", 20.0)]


def test_an_oracle_is_not_misled_by_what_jobs_are_called() -> None:
    """Two jobs of one name, long and short: the short one is known to be short, and goes first."""
    before = (job("a", 0.0, 100.0, 8, name="x"), job("b", 101.0, 99.0, 8, name="y"))
    later = (job("long", 150.0, 1000.0, 8, name="x"), job("short", 160.0, 500.0, 8, name="x"))
    rows = played(workload(*before, *later), "sjf").rows
    assert [row.job_id for row in sorted(rows, key=lambda r: r.started_at_s)][2] == "short"


def test_samples_show_the_queue_and_the_use() -> None:
    """While one job waits the queue is one, and the node is full until the last end."""
    run = played(workload(job("a", 0.0, 100.0, 8), job("b", 0.0, 100.0, 8)))
    inside = [sample for sample in run.samples if 0 < sample.at_s <= 100.0]
    assert {(s.queue_jobs, s.queue_gpus, s.training_gpu_ratio) for s in inside} == {(1, 8, 1.0)}
    assert run.samples[-1].queue_jobs == 0


def test_delays_make_it_later() -> None:
    """A start takes its time when delays are on; that is the default."""
    assert RunOptions(policy="fifo").has_delays
    slow = played(workload(job("a", 0.0, 100.0, 8)), has_delays=True).result
    assert 110.0 < slow.jct_s.mean < 130.0


# --- the same arguments, the same bytes ---------------------------------------------------------

PLAY = """
import msgspec
from common.clock import SystemClock
from coordinator.sim.run.play import play
from coordinator.sim.run.build import RunOptions
from tests.sim.small import small
for policy in ("aryl", "srsf"):
    options = RunOptions(policy=policy, seed=2, loss_ratio=0.02)
    run = play(small(60), options, clock=SystemClock())
    result = msgspec.structs.replace(run.result, wall_s=0.0, peak_rss_bytes=0)
    print(msgspec.json.encode((result, run.rows, run.samples)).decode())
"""


@pytest.mark.slow
def test_the_hash_seed_changes_no_byte() -> None:
    """Three processes with other hash seeds print the same runs, losses and loans included."""
    said: set[str] = set()
    for hash_seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", PLAY],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        said.add(done.stdout)
    [only] = said
    assert json.loads(only.splitlines()[0])[0]["preemptions"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["aryl", "srtf"])
def test_the_engine_keeps_its_invariants_under_delays_losses_and_a_crash(policy: str) -> None:
    """Every event of a hard run is followed by a look at the whole state."""
    options = RunOptions(policy=policy, loss_ratio=0.1, saves=Saves.ON_REQUEST, check=True, seed=3)
    run = play(small(40), options, clock=SystemClock())
    assert run.result.jobs == 40


# --- what it refuses ----------------------------------------------------------------------------


def test_a_job_that_fits_nowhere_is_named_before_the_run() -> None:
    """The error says what it asked for and what there is."""
    with pytest.raises(ConfigError) as caught:
        played(workload(job("big", 0.0, 10.0, 32)))
    assert "job big: 4 workers of 8 GPUs" in str(caught.value)
    assert "1 node of 8 V100" in str(caught.value)


def test_a_job_that_never_ran_is_an_error_and_no_figure() -> None:
    """A job for inference GPUs that nobody lends waits for ever: its mean would be a lie."""
    nodes = (
        NodeGroup(count=1, gpus=8, gpu_type="V100"),
        NodeGroup(count=2, gpus=8, gpu_type="T4", home_pool=Pool.INFERENCE),
    )
    with pytest.raises(ConfigError, match=r"1 of 1 jobs never ended .*the first is a"):
        played(workload(job("a", 0.0, 10.0, 8, gpu_types=("T4",)), nodes=nodes))


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    """The error lists what there is."""
    with pytest.raises(ConfigError, match=r"'magic' is not one of .*fifo"):
        played(workload(job("a", 0.0, 10.0, 8)), "magic")


def test_curves_that_no_job_has_are_a_mistake_and_not_linear() -> None:
    """Curves of other models change nothing: the run would be another one than was asked for."""
    curve = ScalingCurve(model="m", gpu_type="A100", batch_size=8, points=((1, 1.0), (2, 1.5)))
    options = RunOptions(
        policy="aryl-elastic",
        has_delays=False,
        speedup=RuntimeModel.TABLE,
        curves={("m", 8): curve},
    )
    elastic = job("a", 0.0, 90.0, 1, gpus_per_worker=1, min_workers=1, max_workers=2, model="m")
    with pytest.raises(ConfigError, match=r"none of the 1 elastic jobs .* the first is m, batch"):
        play(workload(elastic), options, clock=SystemClock())
    measured = structs.replace(elastic, batch_size=8)
    found = play(workload(measured), options, clock=SystemClock())
    assert found.result.jct_s.mean == pytest.approx(60.0)
