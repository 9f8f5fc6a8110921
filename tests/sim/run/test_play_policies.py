"""Single policies in whole runs: each job ends, invariants hold, and measured figures stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.model import NodeName
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import FAIR_SHARE, FRAGMENTATION
from coordinator.sim.inputs.failure_sources import FailureSource
from coordinator.sim.inputs.inputs import parse_crash, read_workload
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.play import Run, RunResult, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import Workload
from tests.sim.small import SLICE, small

FAMILY = ("themis", "themis-simple", "themis-lp", "las")


def jobs(count: int, *, apps: int = 0) -> Workload:
    """The first jobs of the slice that fit one node, on 4 nodes of 8 in two racks.

    apps: so many jobs in turn are trials of one app; 0: each is its own.
    """
    workload = read_workload(str(SLICE), cluster="4x8/2")
    chosen = [job for job in workload.jobs if job.gpus <= 16][:count]
    if apps:
        chosen = [
            structs.replace(job, app=f"search-{number // apps}")
            for number, job in enumerate(chosen)
        ]
    return structs.replace(workload, jobs=tuple(chosen), length_s=chosen[-1].submit_s)


def played(workload: Workload, options: RunOptions) -> RunResult:
    """The figures of a run whose invariants held after every event."""
    checked = structs.replace(options, check=True)
    return play(workload, checked, clock=SystemClock()).result


@pytest.mark.slow
@pytest.mark.parametrize("policy", FAMILY)
def test_every_job_ends_through_crashes_and_lost_messages(policy: str) -> None:
    """With delays, a node that dies and every twentieth message lost, all jobs still end."""
    options = RunOptions(
        policy=policy,
        saves=Saves.ON_REQUEST,
        loss_ratio=0.05,
        crashes=(Crash(node=NodeName("t00001"), at_s=20_000.0, down_s=3_600.0),),
    )
    found = played(jobs(40), options)
    assert found.jobs == 40


@pytest.mark.slow
def test_trials_of_one_app_share_its_gpus() -> None:
    """Apps of several trials, placement that matters, both aims: all end, by auction."""
    for aim in ("all", "first"):
        options = RunOptions(
            policy=f"themis:aim={aim}",
            has_delays=False,
            has_locality=True,
            saves=Saves.ON_REQUEST,
        )
        assert played(jobs(60, apps=4), options).jobs == 60


@pytest.mark.slow
def test_the_worst_finish_is_better_than_under_fifo_and_attained_service() -> None:
    """On the slice max rho is a small part of that of strict order and of Tiresias."""
    workload = read_workload(str(SLICE), cluster="8x8")
    worst = {
        policy: play(
            workload,
            RunOptions(policy=policy, has_delays=False, saves=Saves.ON_REQUEST),
            clock=SystemClock(),
        ).result.finish_time_fairness.max
        for policy in ("fifo", "tiresias", "themis", "themis-lp")
    }
    assert worst["themis"] < worst["tiresias"] / 2.0
    assert worst["themis"] < worst["fifo"] / 2.0
    assert worst["themis-lp"] < worst["tiresias"] / 2.0


# --- philly -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_rough", [False, True], ids=["ideal", "faults, delays and failures"])
def test_under_philly_every_job_ends_and_its_waiting_is_accounted_for(is_rough: bool) -> None:
    """No invariant breaks; what jobs waited for is never more than what they waited."""
    workload = read_workload(str(SLICE), cluster="4x8/2+0x8")
    workload = structs.replace(workload, jobs=workload.jobs[:50])
    crashes = (Crash(node=NodeName("t00001"), at_s=5000.0, down_s=600.0),) if is_rough else ()
    options = RunOptions(
        policy="philly",
        check=True,
        has_delays=is_rough,
        crashes=crashes,
        loss_ratio=0.05 if is_rough else 0.0,
        failures=FailureSource.PHILLY if is_rough else FailureSource.NONE,
    )
    result = play(workload, options, clock=SystemClock()).result
    assert (result.jobs_failed > 0) == is_rough
    kinds = {kind for size in result.waits.values() for kind in size}
    assert kinds <= {FAIR_SHARE, FRAGMENTATION}
    waited_s = sum(each.waited_s for size in result.waits.values() for each in size.values())
    assert waited_s > 0
    if not is_rough:
        assert waited_s <= result.queueing_s.mean * result.jobs + 1.0


# --- turns, packing and moves -------------------------------------------------------------------


def on_small_nodes(policy: str, *, jobs: int, **options: object) -> Run:
    """The first jobs of the slice on 16 nodes of 4 GPUs; all save on request."""
    workload = read_workload(str(SLICE), cluster="16x4+0x8")
    workload = structs.replace(workload, jobs=workload.jobs[:jobs])
    base = RunOptions(policy=policy, has_delays=False, saves=Saves.ON_REQUEST)
    return play(workload, structs.replace(base, **options), clock=SystemClock())


TURNS = {
    "fifo": (37893.4, 19107.7, 550427),
    "srtf": (22674.4, 3888.6, 590533),
    "gandiva": (26794.1, 2722.0, 562643),
}
"""Policy: mean JCT, mean queueing, makespan, in seconds, as docs/policies/gandiva.md has them."""


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(TURNS))
def test_the_figures_of_the_page_are_those_of_the_code(policy: str) -> None:
    """Whoever changes a rule sees what it does to real jobs, and mends the page."""
    found = on_small_nodes(policy, jobs=120).result
    jct_s, queueing_s, makespan_s = TURNS[policy]
    assert found.jct_s.mean == pytest.approx(jct_s, abs=0.1)
    assert found.queueing_s.mean == pytest.approx(queueing_s, abs=0.1)
    assert found.makespan_s == pytest.approx(makespan_s, abs=1.0)


@pytest.mark.slow
def test_invariants_hold_through_turns_crashes_and_lost_messages() -> None:
    """After every single event, and all jobs end."""
    crashes = (parse_crash("t00000@5000+600"), parse_crash("t00003@20000+900"))
    found = on_small_nodes(
        "gandiva:slice_s=300",
        jobs=40,
        has_delays=True,
        loss_ratio=0.05,
        crashes=crashes,
        check=True,
    )
    assert found.result.jobs == 40


# --- drf ----------------------------------------------------------------------------------------


TENANTS = (
    TenantSettings(name="a", weight=0.5),
    TenantSettings(name="a0", parent="a"),
    TenantSettings(name="b", guarantee_gpus=13),
    TenantSettings(name="b0", parent="b", weight=2.0, guarantee_gpus=3, borrow_limit_gpus=2),
    TenantSettings(name="b1", parent="b", weight=3.0, guarantee_gpus=1),
    TenantSettings(name="c", weight=3.0, guarantee_gpus=3),
    TenantSettings(name="c0", parent="c", guarantee_gpus=1, lend_limit_gpus=4),
    TenantSettings(name="c1", parent="c", weight=2.0, guarantee_gpus=1),
)

TENANTS_JOBS = """\
submit_s,duration_s,gpus,tenant,gpus_per_worker,min_workers,max_workers,priority,has_checkpoints,deadline_s
138,1200,4,c0,2,,,0,false,3600
214,300,8,c0,4,,,1,false,
218,60,8,c0,4,,,0,false,
233,3600,1,c0,1,,,0,true,10800
291,60,4,a0,4,,,0,true,
633,3600,8,b1,4,,,0,false,
698,3600,1,b0,1,,,1,true,
754,60,4,a0,4,,,0,true,
783,1200,1,a0,1,,,0,false,
823,60,2,c0,2,,,0,false,180
961,1200,1,b1,1,,,1,true,
1021,3600,1,c1,1,,,0,false,10800
1062,10,1,b0,1,,,0,true,
1510,60,8,c1,8,,,0,true,180
1644,60,4,b1,2,2,2,0,false,
1738,60,1,c1,1,1,2,0,true,
1840,1200,2,b1,2,,,1,true,
1916,1200,1,b1,1,,,0,true,
1995,300,1,b0,1,1,1,1,false,900
2040,60,1,b0,1,,,0,false,180
2221,1200,4,b0,2,,,0,true,
2404,3600,8,b1,2,4,12,0,true,10800
2947,1200,4,b0,1,,,0,false,
"""


def test_workers_that_alternate_between_nodes_do_not_come_and_go_for_ever(tmp_path: Path) -> None:
    """An elastic job stands on both nodes, and a gang wants room on one: were it given back on any,
    guarantees would leave one worker less, which the next pass would add again, without end."""
    trace = tmp_path / "jobs.csv"
    trace.write_text(TENANTS_JOBS)
    options = RunOptions(
        policy="drf", has_delays=False, idle_events=300, engine={"tenants": TENANTS}, check=True
    )
    done = play(read_workload(str(trace), cluster="2x8"), options, clock=SystemClock())
    assert done.result.jobs == len(TENANTS_JOBS.splitlines()) - 1


# --- running times that nobody declared ---------------------------------------------------------


@pytest.mark.parametrize("policy", ["srtf", "srsf"])
def test_what_jobs_told_of_their_pace_ends_the_stopping(policy: str) -> None:
    """Jobs that lose all their work with each stop, and whose length nobody declared: each is tried
    about once until its progress tells, and is then as long as it said."""
    workload = read_workload(str(SLICE), cluster="4x8")
    jobs = tuple(job for job in workload.jobs if job.gpus <= 16)[:40]
    options = RunOptions(policy=policy, is_oracle=False, has_delays=False, saves=Saves.NEVER)
    found = play(structs.replace(workload, jobs=jobs), options, clock=SystemClock())
    assert found.result.jobs == len(jobs)
    assert 0 < found.result.preemptions < len(jobs)


# --- foresight ----------------------------------------------------------------------------------


FORESIGHT_PLAY = """
import msgspec
from common.clock import SystemClock
from coordinator.sim.run.play import play
from coordinator.sim.run.build import RunOptions
from tests.sim.small import small
run = play(small(80), RunOptions(policy="foresight", seed=3, loss_ratio=0.02), clock=SystemClock())
result = msgspec.structs.replace(run.result, wall_s=0.0, peak_rss_bytes=0)
print(msgspec.json.encode((result, run.rows)).decode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("loss_ratio", [0.0, 0.02])
def test_every_job_ends_and_the_engine_stays_whole(loss_ratio: float) -> None:
    """Claims, lifetimes and lending by quantile leave no job behind, with messages lost or not."""
    options = RunOptions(policy="foresight", seed=1, loss_ratio=loss_ratio, check=True)
    run = play(small(80), options, clock=SystemClock())
    assert len(run.rows) == run.result.jobs
    assert run.result.reclaims_late == 0


@pytest.mark.slow
def test_the_hash_seed_changes_nothing() -> None:
    """Two processes with other hash seeds print the same bytes."""
    said = {
        subprocess.run(
            [sys.executable, "-c", FORESIGHT_PLAY],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("0", "4242")
    }
    assert len(said) == 1
