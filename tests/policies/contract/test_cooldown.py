"""Cooldowns: whose turn cannot be ended yet after a preemption, and how the measured cost of
resizes puts off the next one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeRole
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.policies.contract.cooldown import RESTS_PER_COST, resizable_at_s
from coordinator.policies.contract.decisions import Decision, Preempt, Resize, Start, placed_count
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_cluster,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.harness.cluster.engine import EngineHarness
from tests.policies.tenant_passes import Asked, Cell
from tests.tables import each_row

PREEMPTING = ("srtf", "afs", "tiresias", "themis-simple")


def contested(*, preempted_at_s: float, min_runtime_s: float = 60.0) -> ClusterSnapshot:
    """A full node of a long job that was preempted before, and a short one that waits."""
    nodes, jobs = make_cluster({"n1": {"long": 8}}, role=NodeRole.TRAINING)
    running = job_with(
        jobs[0],
        preemptions_latest_at_s=preempted_at_s,
        remaining_work_s=1e6,
        attained_gpu_s=1e6,
        whole_work_s=2e6,
    )
    short = make_job_view("short", gpus_per_worker=8, remaining_work_s=10.0)
    snapshot = make_snapshot(nodes=nodes, jobs=[running, short])
    return replace(snapshot, min_runtime_s=min_runtime_s)


@each_row("name", PREEMPTING)
def test_who_was_stopped_lately_is_not_stopped_and_nobody_starts_on_its_gpus(name: str) -> None:
    """What the engine would refuse is not decided, and the pass comes when it would not."""
    rested = policy(name).allocate(contested(preempted_at_s=NOW_S - 60.0), b"")
    kinds = [type(decision) for decision in rested.decisions]
    assert kinds == [Preempt, Start]
    resting = policy(name).allocate(contested(preempted_at_s=NOW_S - 59.0), b"")
    assert resting.decisions == ()
    assert resting.wake_at_s is not None
    assert resting.wake_at_s <= NOW_S + 1.0


def test_where_nobody_waits_nobody_is_woken_for_the_rest() -> None:
    """An end of a rest alone changes nothing."""
    snapshot = contested(preempted_at_s=NOW_S - 1.0)
    alone = replace(snapshot, jobs=snapshot.jobs[:1])
    assert policy("srtf").allocate(alone, b"").wake_at_s is None


def test_what_a_policy_decides_of_the_resting_is_never_refused() -> None:
    """A job that runs again after a stop is left alone until its rest ends, and no longer."""
    harness = EngineHarness(
        training=1, inference=0, settings=EngineSettings(policy="srtf", min_runtime_s=30.0)
    )
    harness.engine.policy = policy("srtf")
    long = harness.submit("long", work_s=1000.0, path="/saves")
    harness.wait(10.0)
    harness.submit("first", work_s=3.0)
    harness.wait(5.0)
    assert (long.state, long.counts.preemptions) == (JobState.RUNNING, 1)
    second = harness.submit("second", work_s=3.0)
    harness.wait(24.0)
    assert (long.counts.preemptions, second.state) == (1, JobState.PENDING)
    harness.wait(10.0)
    assert (long.counts.preemptions, second.state) == (2, JobState.SUCCEEDED)
    assert harness.engine.state.counters.decisions_refused == 0


@pytest.mark.parametrize("at_s", [100.0, 100.7, 110.7])
def test_a_rest_is_over_at_the_very_instant_that_the_pass_is_wanted_at(at_s: float) -> None:
    """It counts from when the job runs again. A sum less one part may be less than the other: else
    the stop is refused, and nobody is asked again; a job that its tenant's guarantee
    covers would wait on."""
    promised = TenantSettings(name="b", guarantee_gpus=8)
    played = Cell("fifo", [promised], nodes=1, check=True)
    whole = Asked(tenant="b", gpus=8, work_s=5.0, at_s=at_s)
    second = Asked(tenant="b", gpus=8, work_s=5.0, at_s=at_s + 20.0)
    played.ask([Asked(tenant="c", gpus=8, work_s=9000.0), whole, second])
    played.run(until_s=at_s + 20.0)
    jobs = played.engine.state.jobs
    ran_at_s = jobs[JobId("c0")].attempt.ran_at_s
    assert ran_at_s is not None
    assert ran_at_s > at_s
    played.run(until_s=ran_at_s + 60.0)
    assert jobs[JobId("c0")].counts.preemptions == 2
    assert jobs[JobId("b2")].state == JobState.RUNNING
    assert played.engine.state.counters.decisions_refused == 0


def test_a_long_wait_uses_no_rest_up() -> None:
    """A job that waited for longer than `min_runtime_s` runs for all of it before it is stopped
    again: an hour of it lets an hour's job end."""
    played = Cell(
        "fifo",
        [TenantSettings(name="a", guarantee_gpus=8)],
        nodes=1,
        check=True,
        min_runtime_s=300.0,
    )
    often = [Asked(tenant="a", gpus=8, work_s=400.0, at_s=50.0 + 450.0 * n) for n in range(6)]
    played.ask([Asked(tenant="b", gpus=8, work_s=300.0), *often])
    played.run(until_s=3000.0)
    borrower = played.engine.state.jobs[JobId("b0")]
    assert (borrower.state, borrower.counts.preemptions) == (JobState.SUCCEEDED, 1)


def wide(cost_s: float | None, *, left_s: float) -> ClusterSnapshot:
    """A job of one to four workers that has one, on a node with three free GPUs.

    left_s: running time left with its one worker; with four it is a quarter.
    """
    job = make_job_view(
        "j",
        state=JobState.RUNNING,
        workers=(1, 4),
        remaining_work_s=left_s,
        placed=[make_worker_view("j", 0, "n1")],
    )
    job = job_with(job, resizes_cost_s=cost_s)
    return make_snapshot(nodes=[make_node_view("n1", gpus=4, workers=job.placed)], jobs=[job])


def grown(snapshot: ClusterSnapshot, name: str) -> tuple[int, float | None]:
    """Workers that the job gets, and what its resize is thought to cost in GPU-seconds."""
    decisions: tuple[Decision, ...] = policy(name).allocate(snapshot, b"").decisions
    resizes = [decision for decision in decisions if isinstance(decision, Resize)]
    if not resizes:
        return 0, None
    return placed_count(resizes[0].added), resizes[0].predicted_cost_gpu_s


@pytest.mark.parametrize("name", ["aryl-elastic", "aryl", "foresight"])
def test_a_job_grows_where_that_saves_more_than_its_measured_price(name: str) -> None:
    """100 s left become 25 s with three more: worth 60 s once, not 80 s; else it is 5 s each."""
    assert grown(wide(60.0, left_s=100.0), name) == (3, 60.0)
    assert grown(wide(80.0, left_s=100.0), name) == (0, None)
    assert grown(wide(None, left_s=100.0), name) == (3, 5.0)
    said = policy(name).standing(
        wide(80.0, left_s=100.0), b"", wide(80.0, left_s=100.0).jobs[0].job_id
    )
    assert any("a resize was measured to cost 80 s" in line for line in said)


@pytest.mark.parametrize(
    ("cost_s", "rest_s"), [(None, 60.0), (1.0, 60.0), (23.0, 23.0 * RESTS_PER_COST)]
)
def test_the_cooldown_grows_with_the_price(cost_s: float | None, rest_s: float) -> None:
    """Growing takes up no more than a tenth of a job's time; the setting is the least."""
    snapshot = replace(wide(cost_s, left_s=1e5), resize_cooldown_s=60.0)

    def resized(ago_s: float) -> JobView:
        return job_with(snapshot.jobs[0], resizes_latest_at_s=NOW_S - ago_s)

    assert resizable_at_s(snapshot, resized(rest_s)) is None
    assert resizable_at_s(snapshot, resized(rest_s - 1.0)) == pytest.approx(NOW_S + 1.0)
