"""Jobs over two GPU types at once, from the trace to the last event: pace, GPUs and bounds."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.model import NodeName, Pool
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.play import Run, play
from coordinator.workloads.records import LoadSeries, LoadUnit, NodeGroup, TraceJob, Workload

HALF_LENT = LoadSeries(name="chat", step_s=300.0, values=(0.5,), unit=LoadUnit.BUSY)
PAPER = ":resize_cost_s=0:elastic_base_prefers_loan=true:lend_only_on_demand=false"


def spanning(name: str, *, gpus: int, ratio: float = 0.7, most: int | None = None) -> TraceJob:
    """A job of workers of one GPU, for an hour; it comes first."""
    return TraceJob(
        job_id=name,
        submit_s=0,
        duration_s=3600,
        gpus=gpus,
        gpus_per_worker=1,
        min_workers=gpus,
        max_workers=most or gpus,
        gpu_types=("V100", "T4"),
        heterogeneous_speed_ratio=ratio,
    )


def play_on(*jobs: TraceJob, training: int, inference: int, crashes: tuple[Crash, ...] = ()) -> Run:
    """One training node, and two inference nodes of which one is spare; checked at every event."""
    workload = Workload(
        name="two-types",
        jobs=jobs,
        loads=(HALF_LENT,),
        nodes=(
            NodeGroup(count=1, gpus=training, gpu_type="V100"),
            NodeGroup(count=2, gpus=inference, gpu_type="T4", home_pool=Pool.INFERENCE),
        ),
        length_s=3600.0,
    )
    # A day of nobody else, so that the load pass has come before the jobs do.
    later = tuple(structs.replace(job, submit_s=job.submit_s + 600) for job in jobs)
    options = RunOptions(policy=f"aryl{PAPER}", has_delays=False, check=True)
    service = {"headroom_ratio": 0.0, "min_serving": 0}
    options = structs.replace(options, service=service, crashes=crashes)
    return play(structs.replace(workload, jobs=later), options, clock=SystemClock())


def run_s(run: Run, name: str = "a") -> float:
    """How long a job ran, its waits left out."""
    [row] = [row for row in run.rows if row.job_id == name]
    return row.jct_s - row.queueing_s


def test_a_gang_that_fits_one_type_does_not_span() -> None:
    """Six V100s are there: full speed."""
    assert run_s(play_on(spanning("a", gpus=6), training=6, inference=8)) == 3600.0


def test_a_gang_over_two_types_goes_at_its_ratio() -> None:
    """Four V100s and two workers of two T4s each: the pace is 0.7 of full speed."""
    found = play_on(spanning("a", gpus=6), training=4, inference=4)
    assert run_s(found) == pytest.approx(3600.0 / 0.7)
    [row] = found.rows
    assert row.was_on_loan
    # 4 V100s over the span of submissions, which is the first hour.
    assert found.result.training_gpu_ratio == pytest.approx((3600 - 600) / 3600, abs=0.01)
    assert found.result.on_loan_gpu_ratio > 0.8


def test_what_a_spanning_gang_loses_is_the_time_of_all_its_gpus() -> None:
    """Four V100s and two workers of two T4s each compute for 1,000 s when a node dies: 8,000
    GPU-seconds, of which the T4s' are half."""
    crash = Crash(node=NodeName("t00000"), at_s=600.0 + 1000.0, down_s=60.0)
    found = play_on(spanning("a", gpus=6), training=4, inference=4, crashes=(crash,))
    assert found.result.lost_gpu_s == pytest.approx(1000.0 * (4 + 2 * 2))


def test_a_job_that_spans_at_full_speed_loses_nothing() -> None:
    """The paper's Ideal: a ratio of 1."""
    found = play_on(spanning("a", gpus=6, ratio=1.0), training=4, inference=4)
    assert run_s(found) == pytest.approx(3600.0)


def test_growth_onto_another_type_must_pay_for_the_slower_pace() -> None:
    """From 4 workers to 6 at 0.7 is 4.2: worth it; from 5 to 6 is 4.2 instead of 5: not."""
    grown = play_on(spanning("a", gpus=4, most=6), training=4, inference=4)
    assert run_s(grown) == pytest.approx(4 * 3600.0 / (0.7 * 6))
    stays = play_on(spanning("a", gpus=5, most=6), training=5, inference=4)
    assert run_s(stays) == pytest.approx(3600.0)


def test_a_base_gang_takes_the_place_of_growth_on_the_other_type() -> None:
    """A job for T4s alone comes later: the spanning job shrinks back to its own type and pace."""
    other = TraceJob(job_id="b", submit_s=600, duration_s=600, gpus=4, gpu_types=("T4",))
    found = play_on(spanning("a", gpus=4, most=6), other, training=4, inference=4)
    [late] = [row for row in found.rows if row.job_id == "b"]
    assert late.queueing_s == 0.0
    assert found.result.preemptions == 0
    grown_s = 600 * 0.7 * 6  # worker-seconds until then
    # `b` asks for four T4s, all that are lent, for 600 s; they are one for one. Then `a` grows.
    left_s = (4 * 3600 - grown_s - 600 * 4) / (0.7 * 6)
    assert run_s(found) == pytest.approx(600 + 600 + left_s, rel=0.01)


def test_a_job_that_may_not_span_waits() -> None:
    """The same gang without a ratio fits neither type."""
    plain = structs.replace(spanning("a", gpus=6), heterogeneous_speed_ratio=0.0)
    blocker = TraceJob(job_id="b", submit_s=0, duration_s=900, gpus=2, gpu_types=("V100",))
    found = play_on(blocker, plain, training=6, inference=4)
    [row] = [row for row in found.rows if row.job_id == "a"]
    assert row.queueing_s == pytest.approx(900.0)
