"""What plots over time show of a run: the use of both pools, point by point."""

from __future__ import annotations

import pytest

from common.clock import SystemClock
from common.model import NodeName, NodeRole, Pool, ServiceName
from coordinator.sim.report.samples import Serving
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.play import play
from coordinator.workloads.records import LoadSeries, LoadUnit, NodeGroup, TraceJob, Workload

STEPS = LoadSeries(name="chat", step_s=100.0, values=(0.5, 0.25), unit=LoadUnit.BUSY)


def nodes(count: int, gpus: int) -> list[NodeSpec]:
    """Inference nodes."""
    return [
        NodeSpec(name=NodeName(f"i{number}"), home_pool=Pool.INFERENCE, gpu_type="T4", gpus=gpus)
        for number in range(count)
    ]


def test_what_serves_is_the_integral_of_the_load_again_and_again() -> None:
    """Two nodes of four GPUs: 4 GPUs for 100 s, 2 for 100 s, and from the start."""
    serving = Serving(STEPS, nodes(2, 4))
    found = [serving.gpu_s(at_s) for at_s in (0.0, 50.0, 100.0, 150.0, 200.0, 250.0, 1000.0)]
    assert found == pytest.approx([0.0, 200.0, 400.0, 500.0, 600.0, 800.0, 3000.0])
    assert Serving(STEPS, []).gpu_s(1000.0) == 0.0


def test_a_load_beyond_all_nodes_keeps_no_more_than_them_busy() -> None:
    """Whoever waits for an answer occupies no GPU."""
    beyond = LoadSeries(name="chat", step_s=10.0, values=(2.0,), unit=LoadUnit.BUSY)
    assert Serving(beyond, nodes(2, 4)).gpu_s(10.0) == pytest.approx(80.0)


def beside(*loads: LoadSeries, serving: int, jobs: int) -> Workload:
    """One training node and so many that serve; each job needs all GPUs of one, of either kind."""
    return Workload(
        name="w",
        jobs=tuple(
            TraceJob(
                job_id=f"j{number}",
                submit_s=float(number),
                duration_s=4000.0,
                gpus=8,
                gpu_types=("V100", "T4"),
            )
            for number in range(jobs)
        ),
        loads=loads,
        nodes=(
            NodeGroup(count=1, gpus=8, gpu_type="V100"),
            NodeGroup(count=serving, gpus=8, gpu_type="T4", home_pool=Pool.INFERENCE),
        ),
        length_s=4000.0,
    )


def test_the_inference_pool_is_in_use_by_its_load_and_by_what_is_held_on_loan() -> None:
    """A quarter serves; under a policy without loans that is all, under one with them more."""
    quiet = LoadSeries(name="chat", step_s=300.0, values=(0.25,), unit=LoadUnit.BUSY)
    of = beside(quiet, serving=4, jobs=4)
    at_home, on_loan = (
        play(of, RunOptions(policy=policy, has_delays=False), clock=SystemClock())
        for policy in ("fifo", "aryl-loan")
    )
    assert all(
        sample.serving_gpu_ratio == pytest.approx(0.25)
        for run in (at_home, on_loan)
        for sample in run.samples
    )
    assert at_home.samples[-1].training_gpu_ratio == pytest.approx(1.0)  # no drop at the end
    assert all(
        sample.inference_gpu_ratio == pytest.approx(sample.serving_gpu_ratio)
        for sample in at_home.samples
    )
    assert on_loan.result.on_loan_jobs.jobs > 0
    assert max(sample.inference_gpu_ratio for sample in on_loan.samples) > 0.4
    assert all(sample.inference_gpu_ratio <= 1.0 + 1e-9 for sample in on_loan.samples)


def test_what_could_be_lent_leaves_the_headroom_and_the_least_that_serves() -> None:
    """Of a hundred nodes 2 stay above those that are busy; of a quiet service's two, one stays."""

    def lendable(count: int, busy: float) -> set[int]:
        quiet = LoadSeries(name="chat", step_s=300.0, values=(busy,), unit=LoadUnit.BUSY)
        of = beside(quiet, serving=count, jobs=1)
        run = play(of, RunOptions(policy="fifo", has_delays=False), clock=SystemClock())
        return {sample.lendable_nodes for sample in run.samples}

    assert lendable(100, 0.4) == {58}
    assert lendable(2, 0.0) == {1}


@pytest.mark.slow
def test_several_services_lend_each_by_its_own_load() -> None:
    """One that is busy all day keeps its nodes, and one that is quiet lends; both are counted."""

    def load(name: str, busy: float) -> LoadSeries:
        return LoadSeries(name=name, step_s=300.0, values=(busy, busy), unit=LoadUnit.BUSY)

    of = beside(load("busy", 0.9), load("quiet", 0.1), serving=20, jobs=12)
    stage = Stage(of, RunOptions(policy="aryl-loan", has_delays=False, check=True))
    lent: set[str] = set()

    def look(_: float) -> None:
        roles = stage.sim.engine.state.nodes.items()
        lent.update(str(name) for name, node in roles if node.role == NodeRole.ON_LOAN)

    stage.sim.watch = look
    stage.sim.run_jobs()
    assert lent
    quiet = {str(spec.name) for spec in stage.nodes_of[ServiceName("quiet")]}
    assert lent <= quiet
    run = play(of, RunOptions(policy="aryl-loan", has_delays=False), clock=SystemClock())
    assert {sample.lendable_nodes for sample in run.samples} == {8}  # 10 less 1 and a spare one
    assert all(sample.serving_gpu_ratio == pytest.approx(0.5) for sample in run.samples)


def test_what_could_be_lent_is_of_the_load_of_that_instant() -> None:
    """Not of the step after or before it: the line of the page falls as the load rises."""
    rising = LoadSeries(name="chat", step_s=100.0, values=(0.4, 0.8, 0.1), unit=LoadUnit.BUSY)
    of = Workload(
        name="w",
        jobs=tuple(
            TraceJob(job_id=f"j{number}", submit_s=70.0 * number, duration_s=60.0, gpus=8)
            for number in range(10)
        ),
        loads=(rising,),
        nodes=(
            NodeGroup(count=1, gpus=8, gpu_type="V100"),
            NodeGroup(count=100, gpus=8, gpu_type="T4", home_pool=Pool.INFERENCE),
        ),
        length_s=700.0,
    )
    run = play(of, RunOptions(policy="fifo", has_delays=False), clock=SystemClock())
    lendable = {0: 58, 1: 18, 2: 88}  # of a hundred, 2 stay above those that are busy
    steps = {int(sample.at_s / 100.0) % 3 for sample in run.samples}
    assert steps == {0, 1, 2}
    assert [sample.lendable_nodes for sample in run.samples] == [
        lendable[int(sample.at_s / 100.0) % 3] for sample in run.samples
    ]


@pytest.mark.parametrize("busy", [(0.5, 0.1), (0.1, 0.5)])
def test_what_several_services_could_lend_adds_up(busy: tuple[float, float]) -> None:
    """Of ten nodes each, five and one are busy, and one more of each stays: four and eight."""
    loads = [
        LoadSeries(name=f"s{number}", step_s=300.0, values=(each,), unit=LoadUnit.BUSY)
        for number, each in enumerate(busy)
    ]
    of = beside(*loads, serving=20, jobs=1)
    run = play(of, RunOptions(policy="fifo", has_delays=False), clock=SystemClock())
    assert {sample.lendable_nodes for sample in run.samples} == {12}


def test_the_ratios_are_of_the_span_of_submissions_to_its_very_end() -> None:
    """It ends between two points of the grid, and a job ends before the second of them."""
    first = TraceJob(job_id="j0", submit_s=0.0, duration_s=10.7, gpus=8)
    last = TraceJob(job_id="j1", submit_s=10.0, duration_s=4.0, gpus=4)
    of = Workload(
        name="w",
        jobs=(first, last),
        loads=(),
        nodes=(NodeGroup(count=1, gpus=8, gpu_type="V100"),),
        length_s=10.5,
    )
    run = play(of, RunOptions(policy="fifo", has_delays=False), clock=SystemClock())
    assert run.result.training_gpu_ratio == pytest.approx(1.0)
