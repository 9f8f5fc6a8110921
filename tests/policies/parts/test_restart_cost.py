"""What a stop throws away, whom it would set back, and what policies in turns make of that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import Checkpoint, JobId, JobState, NodeRole, WorkerRange
from coordinator.engine.state.events import ProgressReported
from coordinator.policies.contract.decisions import Allocation, Preempt, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.restart_cost import (
    MOST_LOST_RATIO,
    is_set_back,
    loss_gpu_s,
    loss_s,
    told,
    told_of,
)
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_cluster,
    make_job_view,
    make_snapshot,
    make_worker_view,
)
from tests.harness.cluster.engine import EngineHarness
from tests.tables import each_row

IN_TURNS = (
    *("themis", "themis-simple", "las", "themis-lp", "afs-p:lease_s=1200"),
    *("gandiva-sets", "tiresias:promote=1"),
)
RAN_S = 3600.0


def ran(job: JobView, *, unsaved_gpu_s: float, spent_gpu_s: float) -> JobView:
    """A job that computed so much in all, of which so much is not saved."""
    return job_with(
        job,
        started_at_s=NOW_S - RAN_S,
        first_started_at_s=NOW_S - RAN_S,
        unsaved_gpu_s=unsaved_gpu_s,
        attained_gpu_s=spent_gpu_s,
        as_of_s=NOW_S,
        whole_work_s=1e6,
        remaining_work_s=1e5,
    )


def a_job(**more: float | bool) -> JobView:
    """A running job of two workers of four GPUs."""
    placed = [make_worker_view("a", index, "n1", gpus=4) for index in range(2)]
    made = make_job_view(
        "a", state=JobState.RUNNING, workers=(2, 2), gpus_per_worker=4, placed=placed
    )
    return job_with(made, **more)


# --- what is lost -------------------------------------------------------------------------------


def test_a_job_that_saves_when_asked_loses_nothing() -> None:
    """Whatever it has not saved by now, it saves in its grace; one that never saves loses it."""
    never = ran(a_job(), unsaved_gpu_s=800.0, spent_gpu_s=800.0)
    asked = job_with(never, saves_when_asked=True)
    assert (loss_gpu_s(never, NOW_S), loss_s(never, NOW_S)) == (800.0, 100.0)
    assert (loss_gpu_s(asked, NOW_S), loss_s(asked, NOW_S)) == (0.0, 0.0)


def test_who_says_that_it_saves_and_does_not_is_not_believed_again() -> None:
    """Once stops have cost it more than they left, it counts as one that does not save."""
    said = job_with(
        ran(a_job(), unsaved_gpu_s=100.0, spent_gpu_s=900.0),
        saves_when_asked=True,
        wasted_gpu_s=450.0,
    )
    assert loss_gpu_s(said, NOW_S) == 0.0
    lied = job_with(said, wasted_gpu_s=451.0)
    assert loss_gpu_s(lied, NOW_S) == 100.0
    assert is_set_back(lied, NOW_S)


def test_a_job_that_never_saves_is_set_back_as_soon_as_it_computes() -> None:
    """Before that a stop costs nothing."""
    assert not is_set_back(ran(a_job(), unsaved_gpu_s=0.0, spent_gpu_s=0.0), NOW_S)
    assert is_set_back(ran(a_job(), unsaved_gpu_s=1.0, spent_gpu_s=1.0), NOW_S)


def test_a_job_that_saves_now_and_then_is_stopped_soon_after_a_save() -> None:
    """It is when most of what it computed in all its attempts is kept."""
    saved = ran(a_job(), unsaved_gpu_s=400.0, spent_gpu_s=1000.0)
    assert not is_set_back(saved, NOW_S)
    assert is_set_back(job_with(saved, wasted_gpu_s=200.0), NOW_S)


@given(
    st.lists(
        st.tuples(st.floats(1.0, 1e5), st.floats(0.0, 1.0)),
        min_size=1,
        max_size=20,
    )
)
def test_stops_never_cost_more_than_they_leave(attempts: list[tuple[float, float]]) -> None:
    """BoundedLoss: of attempts that save some part, those stopped by the rule lose half at most."""
    spent = wasted = 0.0
    for computed, unsaved_part in attempts:
        spent += computed
        job = job_with(
            ran(a_job(), unsaved_gpu_s=computed * unsaved_part, spent_gpu_s=spent),
            wasted_gpu_s=wasted,
        )
        if not is_set_back(job, NOW_S):
            wasted += loss_gpu_s(job, NOW_S)
        assert wasted <= MOST_LOST_RATIO * spent


# --- what policies make of it ---------------------------------------------------------------------


def contested(*, unsaved_gpu_s: float, flexible: int = 0) -> ClusterSnapshot:
    """A node held for an hour by a job with so much to lose, and one that has waited as long."""
    nodes, jobs = make_cluster(
        {"n1": {"long": 8 - flexible}},
        role=NodeRole.TRAINING,
        flexible={"n1": {"long": flexible}} if flexible else None,
    )
    holder = ran(jobs[0], unsaved_gpu_s=unsaved_gpu_s, spent_gpu_s=28_800.0)
    waits = make_job_view("waits", gpus_per_worker=8, submitted_at_s=NOW_S - 9000.0)
    waits = job_with(waits, whole_work_s=3600.0, waiting_since_s=NOW_S - 9000.0)
    return make_snapshot(nodes=nodes, jobs=[holder, waits])


def turn_is_over(name: str, snapshot: ClusterSnapshot) -> Allocation:
    """What is decided when the lease, turn or round of the holder has ended."""
    made = policy(name)
    began = replace(snapshot, now_s=NOW_S - RAN_S)
    return made.allocate(snapshot, made.allocate(began, b"").memory)


@each_row("name", IN_TURNS)
def test_a_turn_ends_for_whoever_keeps_its_work(name: str) -> None:
    """With nothing to lose the holder makes room for the one that waits."""
    found = turn_is_over(name, contested(unsaved_gpu_s=0.0))
    assert [type(decision) for decision in found.decisions] == [Preempt, Start]


@each_row("name", IN_TURNS)
def test_whoever_would_lose_its_work_keeps_its_gang(name: str) -> None:
    """No stop, no start on its GPUs, and the one that waits is told why and looked at again."""
    snapshot = contested(unsaved_gpu_s=28_800.0)
    found = turn_is_over(name, snapshot)
    assert found.decisions == ()
    assert found.wake_at_s is not None
    assert found.wake_at_s > NOW_S
    [hold] = policy(name).pending_reasons(snapshot, found.memory)
    assert hold.job_id == "waits"


@pytest.mark.parametrize("name", ["themis", "themis-simple", "afs-p:lease_s=1200"])
def test_flexible_workers_lose_nothing_and_go(name: str) -> None:
    """Only the base gang is kept: a job of one GPU starts on what the holder grew by."""
    snapshot = contested(unsaved_gpu_s=28_800.0, flexible=4)
    holder, waits = snapshot.jobs
    small = replace(waits, gpus_per_worker=4)
    holder = replace(holder, workers=WorkerRange(min=1, max=2))
    found = turn_is_over(name, replace(snapshot, jobs=(holder, small)))
    assert [type(decision) for decision in found.decisions] == [Resize, Start]


def test_a_lease_that_goes_on_for_its_work_s_sake_is_a_new_one() -> None:
    """Themis looks at it again when that one ends; its app's rho counts what it holds."""
    found = turn_is_over("themis", contested(unsaved_gpu_s=28_800.0))
    assert found.wake_at_s == NOW_S + 1200.0


@pytest.mark.parametrize(("path", "wasted_gpu_s"), [(None, 80.0), ("/saves", 0.0)])
def test_a_policy_sees_what_a_job_says_and_what_stops_cost_it(
    path: str | None, wasted_gpu_s: float
) -> None:
    """A path to save to is its word; what its stop after ten seconds threw away is the truth."""
    harness = EngineHarness(training=1, inference=0)
    job = harness.submit("a", path=path)
    harness.start(job, "t0")
    harness.wait(10.0)
    harness.decide(Preempt(job_id=job.job_id, predicted_cost_gpu_s=80.0, reason="the test says so"))
    harness.wait(10.0)
    [view] = harness.engine.snapshot().jobs
    assert view.saves.saves_when_asked is (path is not None)
    assert view.preemptions.wasted_gpu_s == pytest.approx(wasted_gpu_s)


def test_what_would_be_lost_is_counted_by_the_gpus_that_a_job_had() -> None:
    """Ten seconds on two workers of four GPUs, then ten on one: 120 GPU-seconds, not 80."""
    harness = EngineHarness(training=1, inference=0)
    job = harness.submit("a", workers=(1, 2), gpus_per_worker=4, work_s=1000.0)
    harness.start(job, "t0", flexible=("t0",))
    harness.wait(10.0)
    harness.decide(Resize(job_id=job.job_id, removed_workers=(1,), reason="the test says so"))
    harness.wait(10.0)
    harness.decide()
    [view] = harness.engine.snapshot().jobs
    assert len(view.placed) == 1
    assert view.lost_gpu_s(harness.engine.state.now_s) == pytest.approx(120.0)
    assert loss_gpu_s(view, harness.engine.state.now_s) == pytest.approx(120.0)


def test_a_policy_sees_whether_the_present_attempt_has_saved() -> None:
    """A verified save counts until the attempt is over; what is lost is what came after it."""
    harness = EngineHarness(training=1, inference=0)
    job = harness.submit("a")
    harness.start(job, "t0")
    harness.wait(10.0)
    saved = Checkpoint(step=5, path="/saves", is_verified=True)
    seen: list[tuple[bool, float]] = []
    acts: tuple[Callable[[], None], ...] = (
        lambda: None,
        lambda: harness.sim.handle(
            ProgressReported(job_id=job.job_id, attempt=job.attempt.number, checkpoint=saved)
        ),
        lambda: harness.decide(Preempt(job_id=job.job_id, reason="the test says so")),
        lambda: harness.start(job, "t0"),
    )
    for act in acts:
        act()
        harness.wait(10.0)
        harness.decide()
        [view] = harness.engine.snapshot().jobs
        seen.append((view.saves.has_saved, view.lost_gpu_s(harness.engine.state.now_s)))
    assert [has_saved for has_saved, _ in seen] == [False, True, False, False]
    assert [lost_gpu_s for _, lost_gpu_s in seen] == pytest.approx([160.0, 80.0, 0.0, 80.0])


def test_of_a_job_it_is_told_why_it_goes_on() -> None:
    """Only of the one that is asked after, in the words of whoever tells; nothing of no job."""
    (job,) = make_cluster({"n0": {"j": 8}}, role=NodeRole.TRAINING)[1]
    busy = ran(job, unsaved_gpu_s=8 * RAN_S, spent_gpu_s=8 * RAN_S)
    snapshot = make_snapshot(jobs=[busy])
    assert told_of(snapshot, job.job_id) == told(busy, NOW_S) != ()
    assert told_of(snapshot, job.job_id, "for now") == told(busy, NOW_S, "for now")
    assert told_of(snapshot, JobId("other")) == ()
