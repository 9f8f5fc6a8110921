"""Pre-runs under every policy: each job ends, and nobody waits beside GPUs that would take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.failure_rules import read_rules
from common.model import (
    JobId,
    JobState,
    NodeName,
    Pool,
    PrerunSpec,
    RetrySpec,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import POLICIES
from coordinator.sim.inputs.failure_table import Trouble
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.fault_injection import Failing
from coordinator.sim.run.simulation import Simulation, Submission
from tests.draws import pick
from tests.harness.builders import make_spec
from tests.policies.families import FAMILIES
from tests.tables import each_row

PRERUN_S = 300.0
FAILS_AFTER_S = 90.0
LOOK_S = 100.0
LONGEST_S = 30_000.0
ROUND_S = {"las": 120.0, "themis-lp": 360.0, "pollux": 120.0, "mesos": 120.0}
"""How long a policy lets whoever fits wait, as it decides in rounds; the others decide at once."""


class Gang(NamedTuple):
    """One job: when it comes, its workers, the GPUs of each, how long its gang runs, and whether
    its first pre-run fails by what may be its node's fault."""

    at_s: float
    workers: int
    gpus: int
    runs_s: float
    fails: bool = False


def played(policy: str, gangs: Mapping[str, Gang]) -> Simulation:
    """These jobs on two nodes, where nothing takes time; each gang has a pre-run of one GPU."""
    nodes = [
        NodeSpec(name=NodeName(f"n{number}"), home_pool=Pool.TRAINING, gpu_type="H100", gpus=8)
        for number in range(2)
    ]
    made = EngineSettings(
        policy=policy,
        min_runtime_s=0.0,
        resize_cooldown_s=0.0,
        start_p99_s=0.0,
        restart_p99_s=0.0,
        resize_p99_s=0.0,
    )
    sim = Simulation(made, nodes)
    for name, gang in gangs.items():
        spec = make_spec(
            name,
            workers=(gang.workers, gang.workers),
            gpus_per_worker=gang.gpus,
            expected_runtime_s=gang.runs_s,
            retry=RetrySpec(max_restarts=2),
            prerun=PrerunSpec(time_s=PRERUN_S),
        )
        work_s = gang.runs_s * gang.workers
        sim.submit([Submission(at_s=gang.at_s, job_id=JobId(name), spec=spec, work_s=work_s)])
    trouble = Trouble(reason="core_dump", trials=1, times_s=(FAILS_AFTER_S,))
    sim.failing = Failing(
        {JobId(name): trouble for name, gang in gangs.items() if gang.fails},
        read_rules().failure,
        sim.loop,
        sim.nodes,
        sim.runtime,
        {JobId(name): gang.runs_s for name, gang in gangs.items()},
    )
    return sim


def fits(job: JobView, snapshot: ClusterSnapshot) -> bool:
    """Whether a gang that waits would have room on GPUs that nobody has.

    It may leave nodes alone only as long as the others, empty, would take it.
    """
    size, others = (
        job.gpus_per_worker,
        [n for n in snapshot.nodes if n.name not in job.nodes.avoided],
    )
    can_choose = sum(node.gpus // size for node in others) >= job.workers.min
    room = sum(node.free_gpus // size for node in (others if can_choose else snapshot.nodes))
    return job.state == JobState.PENDING and room >= job.workers.min


def longest_s(sim: Simulation, gangs: Mapping[str, Gang], *, beside_others: bool) -> float:
    """Play to the end: the longest that a job waited beside room for it, on the looker's grid.

    beside_others: also while others run; else only where all GPUs are idle.
    """
    waits: dict[JobId, float] = {}
    found_s = now_s = 0.0
    ended: list[JobId] = []
    while len(ended) < len(gangs) and now_s < LONGEST_S:
        now_s += LOOK_S
        sim.run(until_s=now_s)
        snapshot = sim.engine.snapshot()
        looks = beside_others or all(node.free_gpus == node.gpus for node in snapshot.nodes)
        idle = [job.job_id for job in snapshot.jobs if looks and fits(job, snapshot)]
        waits = {job_id: waits.get(job_id, 0.0) + LOOK_S for job_id in idle}
        found_s = max(found_s, *waits.values()) if waits else found_s
        ended = [
            job.job_id for job in sim.engine.state.jobs.values() if job.state == JobState.SUCCEEDED
        ]
    assert sorted(ended) == sorted(gangs)
    return found_s


@each_row("policy", FAMILIES)
def test_gangs_start_after_their_pre_runs_under_every_policy(policy: str) -> None:
    """Also where the pre-run failed on a node that the gang needs, and small jobs beside a gang."""
    gangs = {
        "wide": Gang(0.0, 2, 8, 900.0, fails=True),
        "wider": Gang(10.0, 2, 8, 900.0),
        "long": Gang(4000.0, 1, 8, 5000.0),
        "b": Gang(5000.0, 1, 1, 900.0),
        "c": Gang(5010.0, 1, 1, 900.0),
    }
    waited_s = longest_s(played(policy, gangs), gangs, beside_others=True)
    assert waited_s <= ROUND_S.get(policy, 0.0)


@pytest.mark.slow
def test_a_pre_run_that_is_suspended_computes_its_time_all_the_same() -> None:
    """In turns with others it takes longer, and the turns of the cell go on."""
    gangs = {f"g{number}": Gang(float(number), 2, 2, 2000.0) for number in range(24)}
    sim = played("gandiva", gangs)
    computed_s: dict[JobId, float] = {}
    now_s = 0.0
    while now_s < LONGEST_S:
        now_s += LOOK_S / 10
        sim.run(until_s=now_s)
        for job in sim.engine.state.jobs.values():
            if job.spec.prerun.gang is not None and job.state == JobState.RUNNING:
                computed_s[job.job_id] = computed_s.get(job.job_id, 0.0) + LOOK_S / 10
    jobs = sim.engine.state.jobs
    assert {job.state for job in jobs.values()} == {JobState.SUCCEEDED}
    assert sim.engine.state.counters.suspensions
    assert sorted(computed_s) == sorted(jobs)
    assert min(computed_s.values()) >= PRERUN_S - LOOK_S
    assert max(computed_s.values()) <= PRERUN_S + LOOK_S


@st.composite
def gang(draw: st.DrawFn) -> Gang:
    """One of few shapes, so that they compete."""
    workers, gpus = draw(pick((1, 1), (1, 8), (2, 8), (2, 4), (4, 1), (2, 8)))
    at_s = float(draw(pick(0, 0, 10, 700, 1500)))
    return Gang(at_s, workers, gpus, float(draw(pick(200, 900, 3000))), draw(st.booleans()))


@pytest.mark.slow
@settings(max_examples=30)
@given(policy=st.sampled_from(sorted(POLICIES)), drawn=st.lists(gang(), min_size=2, max_size=5))
def test_every_gang_ends_and_no_cell_stands_idle(policy: str, drawn: list[Gang]) -> None:
    """Whatever gangs come, and whichever of their pre-runs fail."""
    gangs = {f"j{number}": each for number, each in enumerate(drawn)}
    waited_s = longest_s(played(policy, gangs), gangs, beside_others=False)
    assert waited_s <= ROUND_S.get(policy, 0.0)
