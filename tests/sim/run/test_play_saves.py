"""Jobs that never save, under every policy: all of them end, and what stops cost is bounded."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from common.clock import SystemClock
from coordinator.policies.registry import COMPARED
from coordinator.sim.inputs.inputs import parse_cluster
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.play import Run, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import TraceJob, Workload
from tests.draws import pick, whole, yes_or_no

IN_TURNS = (
    *("themis", "themis-simple", "themis-lp", "las", "afs-p"),
    *("gandiva-sets", "tiresias:promote=1"),
)
"""Policies that end leases, turns or rounds, or promote whoever waits: nobody else's arrival is
needed for a stop."""

BY_VALUE = ("qos-elasticflow", "qos-edf")
"""Policies that settle anew in each pass what everybody's GPUs are worth."""

EVERY = (*COMPARED, *(name for name in (*IN_TURNS, *BY_VALUE) if name not in COMPARED))

RESTART_S = 600.0
"""More than one stop and start take, with delays, a resize and the pass before it included."""


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Two to six jobs of up to a node and a half on two nodes, as long as many turns."""
    jobs: list[TraceJob] = []
    for number in range(draw(whole(2, 6))):
        job = TraceJob(
            job_id=f"j{number}",
            submit_s=draw(whole(0, 4000)),
            duration_s=draw(pick(60, 1500, 9000, 20_000)),
            gpus=draw(pick(1, 2, 4, 4, 6)),
        )
        if draw(yes_or_no()):
            job = structs.replace(job, gpus_per_worker=1, min_workers=job.gpus, max_workers=8)
        jobs.append(job)
    return on_two_nodes(*sorted(jobs, key=lambda job: job.submit_s))


def on_two_nodes(*jobs: TraceJob) -> Workload:
    """They compete for eight GPUs."""
    return Workload(
        name="generated",
        jobs=jobs,
        loads=(),
        nodes=parse_cluster("2x4+0x8"),
        length_s=jobs[-1].submit_s,
    )


ALTERNATING = on_two_nodes(
    TraceJob(job_id="a", submit_s=0, duration_s=20_000, gpus=8),
    TraceJob(job_id="b", submit_s=10, duration_s=20_000, gpus=8),
    TraceJob(job_id="c", submit_s=20, duration_s=20_000, gpus=4),
)
"""Whoever ends the turn of one for another would never end."""


def played(policy: str, workload: Workload, saves: Saves, *, has_delays: bool) -> Run:
    """A checked run."""
    options = RunOptions(policy=policy, has_delays=has_delays, saves=saves, check=True)
    return play(workload, options, clock=SystemClock())


def most_s(workload: Workload) -> float:
    """When the last job ends if they run one by one, each as often as others come, in vain."""
    work_s = sum(job.duration_s + RESTART_S for job in workload.jobs)
    return workload.length_s + len(workload.jobs) * work_s


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@example(workload=ALTERNATING, has_delays=False)
@example(workload=ALTERNATING, has_delays=True)
@given(workload=workloads(), has_delays=st.booleans())
@pytest.mark.parametrize("policy", EVERY)
def test_jobs_that_never_save_end_under_every_policy(
    policy: str, workload: Workload, has_delays: bool
) -> None:
    """EveryJobEnds: in bounded simulated time, whoever is stopped for whom."""
    result = played(policy, workload, Saves.NEVER, has_delays=has_delays).result
    assert result.jobs == len(workload.jobs)
    assert result.makespan_s <= most_s(workload)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@example(workload=ALTERNATING, saves=Saves.NEVER)
@example(workload=ALTERNATING, saves=Saves.PERIODIC)
@given(workload=workloads(), saves=st.sampled_from((Saves.NEVER, Saves.PERIODIC)))
@pytest.mark.parametrize("policy", (*IN_TURNS, *BY_VALUE))
def test_turns_cost_no_more_work_than_they_leave(
    policy: str, workload: Workload, saves: Saves
) -> None:
    """BoundedLoss: what the ends of turns threw away is less than all the work there was."""
    result = played(policy, workload, saves, has_delays=False).result
    assert result.lost_gpu_s <= sum(job.duration_s * job.gpus for job in workload.jobs)


@pytest.mark.slow
@pytest.mark.parametrize("policy", IN_TURNS)
def test_jobs_that_save_take_turns_as_before(policy: str) -> None:
    """Where nothing is lost by it, three jobs that do not fit together all get their turns."""
    result = played(policy, ALTERNATING, Saves.ON_REQUEST, has_delays=False).result
    assert result.preemptions > 2
    assert result.lost_gpu_s == 0.0


@pytest.mark.parametrize(
    ("saves", "paths"),
    [(Saves.ON_REQUEST, {True}), (Saves.NEVER, {False}), (Saves.PERIODIC, {False})],
)
def test_jobs_say_of_themselves_what_a_run_makes_them_do(saves: Saves, paths: set[bool]) -> None:
    """Who is told to save when asked has a place to save to; the trace decides where a run does
    not."""
    jobs = tuple(
        structs.replace(job, has_checkpoints=number == 0)
        for number, job in enumerate(ALTERNATING.jobs)
    )
    mixed = on_two_nodes(*jobs)
    made = Stage(mixed, RunOptions(policy="fifo", saves=saves)).jobs
    assert {job.spec.checkpoint.path is not None for job in made} == paths
    as_told = Stage(mixed, RunOptions(policy="fifo")).jobs
    assert [job.spec.checkpoint.path is not None for job in as_told] == [True, False, False]


def test_a_save_on_request_takes_its_time() -> None:
    """A preemption costs the 63 s that Lyra measured: to save, stop, start and load again."""
    jobs = (
        TraceJob(job_id="long", submit_s=0, duration_s=2000, gpus=8),
        TraceJob(job_id="short", submit_s=500, duration_s=100, gpus=8),
    )
    run = played("srtf", on_two_nodes(*jobs), Saves.ON_REQUEST, has_delays=True)
    alone = played("srtf", on_two_nodes(jobs[0]), Saves.ON_REQUEST, has_delays=True)
    [long] = [row for row in run.rows if row.job_id == "long"]
    [bare] = alone.rows
    assert long.preemptions == 1
    # Beside its own stop and start there are those of the short one, and what reports take.
    lost_s = (long.finished_at_s - bare.finished_at_s) - 100.0
    assert lost_s == pytest.approx(63.0 + 10.0, abs=8.0)
