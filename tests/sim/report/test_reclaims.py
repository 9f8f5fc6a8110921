"""What a run says of its reclaims and of the jobs on lent nodes: each figure on a case by hand."""

from __future__ import annotations

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.model import JobId, NodeName, Pool, ServiceName
from coordinator.engine.state.accounting import Durations
from coordinator.policies.contract.decisions import Preempt, Reclaim
from coordinator.sim.report.reclaims import Toll, TollKeeper
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.play import OnLoanJobs, Run, play
from coordinator.workloads.records import LoadSeries, LoadUnit, NodeGroup, TraceJob, Workload

STEP_S = 300.0
LEND_ALL = {"headroom_ratio": 0.0, "min_serving": 0}
OPTIONS = RunOptions(policy="aryl-loan", has_delays=False, check=True, service=LEND_ALL)


def job(name: str, gpus: int, *, submit_s: float = 400.0, types: tuple[str, ...]) -> TraceJob:
    """An hour on that many GPUs."""
    return TraceJob(job_id=name, submit_s=submit_s, duration_s=3600.0, gpus=gpus, gpu_types=types)


def workload_of(*jobs: TraceJob, busy: tuple[float, ...]) -> Workload:
    """One training node, four inference nodes of 8 GPUs, load by the step, again and again."""
    return Workload(
        name="tolls",
        jobs=jobs,
        loads=(LoadSeries(name="chat", step_s=STEP_S, values=busy, unit=LoadUnit.BUSY),),
        nodes=(
            NodeGroup(count=1, gpus=8, gpu_type="V100"),
            NodeGroup(count=4, gpus=8, gpu_type="T4", home_pool=Pool.INFERENCE),
        ),
        length_s=3600.0,
    )


def played(*jobs: TraceJob, busy: tuple[float, ...], policy: str = "aryl-loan") -> Run:
    """A checked run without delays."""
    options = structs.replace(OPTIONS, policy=policy)
    return play(workload_of(*jobs, busy=busy), options, clock=SystemClock())


def reclaim(node: NodeName) -> Reclaim:
    """A node is taken back."""
    return Reclaim(node=node, service=ServiceName("chat"), deadline_s=300.0, reason="")


def preempt(job_id: JobId, node: NodeName | None) -> Preempt:
    """A job is stopped, for a node's sake or for another job's."""
    return Preempt(job_id=job_id, node=node, beneficiary="chat", reason="")


LOW = (0.0,) * 4
DAY = 400


def test_nodes_that_nobody_needs_go_home_gently() -> None:
    """All four idle nodes are lent, then taken back: no preemption, nothing elsewhere."""
    policy = "aryl-loan:lend_only_on_demand=false"
    busy = (*LOW, *(1.0,) * DAY)
    found = played(job("a", 1, submit_s=3000.0, types=("V100",)), busy=busy, policy=policy).result
    assert found.reclaims == 4
    assert found.reclaim.gentle_ratio == 1.0
    assert found.reclaim.collateral_ratio == 0.0
    assert found.on_loan_jobs == OnLoanJobs(jobs=0, queueing_s=Durations(), jct_s=Durations())
    assert found.on_loan_jobs.jct_s.mean is None


def test_what_a_victim_leaves_elsewhere_is_collateral() -> None:
    """A gang on two lent nodes, of which one is wanted: it left 8 GPUs elsewhere for 8."""
    jobs = (job("a", 16, types=("T4",)), job("b", 1, types=("V100",)))
    stage = Stage(workload_of(*jobs, busy=LOW), OPTIONS)
    stage.sim.begin()
    stage.sim.loop.run(1200.0)  # some loan passes later
    state = stage.sim.engine.state
    [gang] = [entry for entry in state.jobs.values() if stage.names[entry.job_id] == "a"]
    nodes = sorted({worker.node for worker in gang.workers.values()})
    assert len(nodes) == 2
    keeper = TollKeeper(stage.sim.engine)
    keeper.hear([reclaim(nodes[0]), preempt(gang.job_id, nodes[0])])
    assert keeper.toll() == Toll(gentle_ratio=0.0, collateral_ratio=8 / 8)
    idle = next(name for name in sorted(state.nodes) if name.startswith("i") and name not in nodes)
    keeper.hear([reclaim(idle)])
    assert keeper.toll() == Toll(gentle_ratio=1 / 2, collateral_ratio=8 / 16)
    keeper.hear([reclaim(nodes[0]), reclaim(nodes[1]), preempt(gang.job_id, nodes[0])])
    assert keeper.toll() == Toll(gentle_ratio=1 / 4, collateral_ratio=8 / 32)


def test_a_preemption_for_another_job_is_no_toll_of_a_reclaim() -> None:
    """Nor is anything of a pass that takes nothing back."""
    stage = Stage(workload_of(job("b", 1, types=("V100",)), busy=LOW), OPTIONS)
    keeper = TollKeeper(stage.sim.engine)
    stage.sim.begin()
    stage.sim.loop.run(1200.0)
    [entry] = stage.sim.engine.state.jobs.values()
    assert entry.workers
    keeper.hear([preempt(entry.job_id, None)])
    assert keeper.toll() == Toll()
    keeper.hear([reclaim(NodeName("i00000")), preempt(entry.job_id, None)])
    assert keeper.toll() == Toll(gentle_ratio=1.0, collateral_ratio=0.0)


WAITS = "aryl-loan:reclaim=near-optimum:reclaim_cost=lost-gpu-s:waits_for_finish=true"


@pytest.mark.parametrize(
    ("busy_ratio", "toll"),
    [
        (0.75, Toll(gentle_ratio=0.0, collateral_ratio=8 / 8)),
        (1.0, Toll(gentle_ratio=0.0, collateral_ratio=0.0)),
    ],
)
def test_a_wait_in_vain_is_counted_as_it_ends(busy_ratio: float, toll: Toll) -> None:
    """A gang on two lent nodes, thought to end soon, is stopped when the wait is over: what it held
    is told of that moment, though it runs on lent nodes again before the run ends."""
    gang = structs.replace(job("a", 16, types=("T4",)), estimate_s=700.0)
    options = structs.replace(OPTIONS, policy=WAITS, tells_progress=False)
    busy = (*LOW, busy_ratio, busy_ratio, *(0.0,) * DAY)
    found = play(workload_of(gang, busy=busy), options, clock=SystemClock()).result
    assert (found.preemptions, found.on_loan_jobs.jobs) == (1, 1)
    assert found.reclaim == toll


def test_guests_are_those_that_were_on_lent_nodes() -> None:
    """Of two jobs one ran there: its wait and its end, not the other's, are the guests'."""
    jobs = (job("guest", 4, types=("T4",)), job("home", 8, submit_s=0.0, types=("V100",)))
    run = played(*jobs, busy=(*LOW, *(0.0,) * DAY))
    [guest] = [row for row in run.rows if row.job_id == "guest"]
    assert guest.was_on_loan
    found = run.result.on_loan_jobs
    assert found.jobs == 1
    assert found.queueing_s.mean == guest.queueing_s
    assert found.jct_s.mean == guest.jct_s
