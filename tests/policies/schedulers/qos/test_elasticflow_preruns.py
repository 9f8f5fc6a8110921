"""Deadlines of gangs that have a pre-run: what is promised covers both, or it is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import (
    CheckpointSpec,
    JobId,
    JobSpec,
    JobState,
    NodeName,
    Pool,
    Preemptibility,
    PrerunSpec,
    WorkerRange,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.policies.contract.decisions import Allocation, Reject, Start
from coordinator.policies.contract.estimates import Source
from coordinator.policies.contract.job_groups import Behind
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.simulation import Simulation, Submission
from tests.draws import pick
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_spec,
    make_worker_view,
)

PRERUN_S = 300.0


ELASTICFLOW = policy("qos-elasticflow:margin=1")


def asks(
    name: str,
    *,
    deadline_s: float | None,
    runs_s: float,
    workers: int = 1,
    gpus: int = 8,
    has_prerun: bool = True,
    on: str | None = None,
    preemptibility: Preemptibility = Preemptibility.FULL,
) -> JobView:
    """A gang that waits; with a pre-run it is one worker of one GPU first, on a node or waiting."""
    gang = make_job_view(
        name,
        workers=(workers, workers),
        gpus_per_worker=gpus,
        remaining_work_s=runs_s * workers,
        submitted_at_s=NOW_S,
        preemptibility=preemptibility,
    )
    gang = job_with(
        gang,
        deadline_at_s=None if deadline_s is None else NOW_S + deadline_s,
        waiting_since_s=NOW_S,
        whole_work_s=runs_s * workers,
    )
    if not has_prerun:
        return gang
    there = on is not None
    return job_with(
        gang,
        workers=WorkerRange(min=1, max=1),
        gpus_per_worker=1,
        remaining_work_s=PRERUN_S,
        whole_work_s=PRERUN_S,
        estimate_source=Source.PRERUN,
        behind=Behind(
            workers=gang.workers,
            gpus_per_worker=gpus,
            work_s=runs_s * workers,
            estimate_source=Source.DECLARED,
        ),
        state=JobState.RUNNING if there else JobState.PENDING,
        gpu_type="H100" if there else None,
        placed=(make_worker_view(name, 0, on, gpus=1),) if on is not None else (),
        started_at_s=NOW_S if there else None,
        first_started_at_s=NOW_S if there else None,
        attempt_number=int(there),
        as_of_s=NOW_S,
        work_rate=1 if there else 0,
        computing_gpus=int(there),
        waiting_since_s=None if there else NOW_S,
    )


def cell(*jobs: JobView, count: int = 2, now_s: float = NOW_S) -> ClusterSnapshot:
    """So many nodes of eight GPUs, and these jobs."""
    nodes = [
        make_node_view(
            name, workers=[each for job in jobs for each in job.placed if each.node == name]
        )
        for name in (f"n{number}" for number in range(count))
    ]
    return make_snapshot(nodes=nodes, jobs=jobs, now_s=now_s)


def starts(found: Allocation) -> dict[str, tuple[int, bool]]:
    """Workers of those that start, and whether their deadline is promised."""
    return {
        each.job_id: (sum(p.worker_count for p in each.placements), each.is_promised)
        for each in found.decisions
        if isinstance(each, Start)
    }


def refused(found: Allocation) -> dict[str, float | None]:
    """The earliest dates of those that are refused."""
    return {each.job_id: each.earliest_s for each in found.decisions if isinstance(each, Reject)}


@pytest.mark.parametrize("deadline_s", [1000.0, 3299.0])
def test_what_its_gang_cannot_meet_is_refused_before_the_pre_run(deadline_s: float) -> None:
    """With the earliest date that both can be done by."""
    job = asks("j", deadline_s=deadline_s, runs_s=3000.0, workers=2)
    found = ELASTICFLOW.allocate(cell(job), b"")
    assert (starts(found), refused(found)) == ({}, {"j": 3301.0})


def test_the_starts_of_both_are_in_the_plan() -> None:
    """Where starts take 10 s, and 30 s more after a stop, the gang computes 50 s later."""
    job = asks("j", deadline_s=1000.0, runs_s=3000.0, workers=2)
    found = ELASTICFLOW.allocate(replace(cell(job), start_s=10.0, restart_s=30.0), b"")
    assert refused(found) == {"j": 3351.0}


def test_a_pre_run_is_promised_the_deadline_of_its_gang() -> None:
    """It starts with its one worker at once where both can be in time."""
    job = asks("j", deadline_s=3301.0, runs_s=3000.0, workers=2)
    found = ELASTICFLOW.allocate(cell(job), b"")
    assert (starts(found), refused(found)) == ({"j": (1, True)}, {})
    [start] = found.decisions
    assert start.reason == "its pre-run; 2 workers of its gang are planned, 1 s before its deadline"


@pytest.mark.parametrize("preemptibility", [Preemptibility.FULL, Preemptibility.NON])
def test_nobody_is_promised_what_the_gang_behind_a_pre_run_needs(
    preemptibility: Preemptibility,
) -> None:
    """Neither while it waits nor while it runs, though fifteen GPUs are idle then."""
    waits = asks("a", deadline_s=3400.0, runs_s=3000.0, workers=2, preemptibility=preemptibility)
    runs = asks(
        "a", deadline_s=3400.0, runs_s=3000.0, workers=2, on="n0", preemptibility=preemptibility
    )
    late = asks("b", deadline_s=2000.0, runs_s=1500.0, gpus=8, has_prerun=False)
    late = replace(late, submitted_at_s=NOW_S + 10.0)
    first = ELASTICFLOW.allocate(cell(waits, late), b"")
    assert starts(first) == {"a": (1, True)}
    assert set(refused(first)) == {"b"}
    second = ELASTICFLOW.allocate(cell(runs, late, now_s=NOW_S + 10.0), first.memory)
    assert set(refused(second)) == {"b"}
    after = asks("a", deadline_s=3400.0, runs_s=3000.0, workers=2, has_prerun=False)
    after = job_with(
        after, attempt_number=1, first_started_at_s=NOW_S, preemptibility=preemptibility
    )
    third = ELASTICFLOW.allocate(cell(after, now_s=NOW_S + PRERUN_S), second.memory)
    assert starts(third) == {"a": (2, True)}


@pytest.mark.parametrize(
    ("preemptibility", "expected"),
    [(Preemptibility.FULL, {"j": (1, True)}), (Preemptibility.NON, {})],
)
def test_a_pre_run_starts_before_its_plan_where_it_can_give_the_gpu_back(
    preemptibility: Preemptibility, expected: dict[str, tuple[int, bool]]
) -> None:
    """Its gang has to wait for that of another job, while one GPU is idle."""
    other = make_worker_view("other", 0, "n0", gpus=8)
    busy = job_with(
        asks("other", deadline_s=1001.0, runs_s=1000.0, has_prerun=False),
        state=JobState.RUNNING,
        gpu_type="H100",
        placed=(other,),
        started_at_s=NOW_S,
        first_started_at_s=NOW_S,
        attempt_number=1,
    )
    job = asks("j", deadline_s=9000.0, runs_s=1000.0, workers=2, preemptibility=preemptibility)
    found = ELASTICFLOW.allocate(cell(busy, job), b"")
    assert (starts(found), refused(found)) == (expected, {})


@pytest.mark.parametrize(("left_s", "is_late"), [(0.0, False), (150.0, True)])
def test_a_pre_run_that_is_being_stopped_is_over_or_begins_anew(
    left_s: float, *, is_late: bool
) -> None:
    """Over: its gang begins next, and is in time. Stopped before: another one comes first."""
    job = asks("j", deadline_s=3301.0, runs_s=3000.0, workers=2, on="n0")
    first = ELASTICFLOW.allocate(cell(job), b"")
    stops = job_with(job, state=JobState.PREEMPTING, remaining_work_s=left_s, work_rate=0)
    found = ELASTICFLOW.allocate(cell(stops, now_s=NOW_S + 100.0), first.memory)
    promises, late = (
        msgspec.msgpack.decode(found.memory)[0],
        msgspec.msgpack.decode(found.memory)[4],
    )
    assert (list(promises), late) == (([], ["j"]) if is_late else (["j"], []))


def test_a_pre_run_without_a_deadline_is_planned_as_it_is() -> None:
    """Nothing is kept for its gang, which is promised nothing."""
    soft = asks("soft", deadline_s=None, runs_s=3000.0, workers=2)
    job = asks("j", deadline_s=1001.0, runs_s=1000.0, workers=1, has_prerun=False)
    found = ELASTICFLOW.allocate(cell(soft, job), b"")
    assert starts(found) == {"j": (1, True), "soft": (1, False)}


@pytest.mark.parametrize(("deadline_s", "starts_first"), [(3600.0, "j"), (3200.0, "rival")])
def test_a_pre_run_is_due_when_its_gang_has_to_begin(deadline_s: float, starts_first: str) -> None:
    """`qos` lets one whose gang comes too late in any case stand back, however short it is."""
    job = asks("j", deadline_s=deadline_s, runs_s=3000.0, workers=2)
    rival = asks("rival", deadline_s=3900.0, runs_s=3000.0, gpus=8, has_prerun=False)
    snapshot = make_snapshot(nodes=[make_node_view("n0")], jobs=[job, rival], now_s=NOW_S)
    assert set(starts(policy("qos:margin=1").allocate(snapshot, b""))) == {starts_first}


# --- over time ----------------------------------------------------------------------------------


@st.composite
def spec(draw: st.DrawFn) -> tuple[float, JobSpec]:
    """When a gang comes, and what it asks for; most have a pre-run and a deadline.

    Workers have one GPU: none finds its GPUs in pieces, which plans know nothing of.
    """
    workers = draw(pick(1, 2, 4, 8, 16))
    runs_s = float(draw(pick(200, 900, 3000)))
    made = make_spec(
        "x",
        workers=(workers, workers * draw(pick(1, 1, 2))),
        expected_runtime_s=runs_s,
        deadline_s=draw(
            pick(None, runs_s * 1.06, runs_s * 1.1 + PRERUN_S, runs_s * 1.5 + 400.0, runs_s * 3.0)
        ),
        checkpoint=CheckpointSpec(path=draw(pick(None, "/c"))),
        prerun=PrerunSpec(time_s=draw(pick(PRERUN_S, PRERUN_S, None))),
    )
    return float(draw(pick(0, 0, 10, 700, 1500))), made


@pytest.mark.slow
@settings(max_examples=40)
@given(asked=st.lists(spec(), min_size=3, max_size=6))
def test_promises_of_gangs_with_pre_runs_are_kept(asked: list[tuple[float, JobSpec]]) -> None:
    """As long as nothing fails, whoever was promised its deadline is in time; everybody ends."""
    nodes = [
        NodeSpec(name=NodeName(f"n{number}"), home_pool=Pool.TRAINING, gpu_type="H100", gpus=8)
        for number in range(2)
    ]
    at_once = EngineSettings(
        policy="qos-elasticflow",
        min_runtime_s=0.0,
        resize_cooldown_s=0.0,
        start_p99_s=0.0,
        restart_p99_s=0.0,
        resize_p99_s=0.0,
    )
    sim = Simulation(at_once, nodes)
    for number, (at_s, made) in enumerate(asked):
        name, runs_s = f"j{number}", made.expected_runtime_s or 0.0
        job = replace(made, name=name, command=(name,))
        work_s = runs_s * made.workers.min
        sim.submit([Submission(at_s=at_s, job_id=JobId(name), spec=job, work_s=work_s)])
    sim.run(until_s=50_000.0)
    for entry in sim.engine.state.jobs.values():
        assert entry.finished_at_s is not None
        if entry.is_promised:
            assert entry.state == JobState.SUCCEEDED
            took_s = entry.finished_at_s - entry.submitted_at_s
            assert took_s <= (entry.spec.deadline_s or 0.0)
