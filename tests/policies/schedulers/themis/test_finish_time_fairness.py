"""Finish-time fairness by hand: shares, trials, and how many apps there were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, NodeName, WorkerRange
from common.profile import JobProfile
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.schedulers.themis.finish_time_fairness import (
    Aim,
    Alone,
    AppRecord,
    Attendance,
    Held,
    Measure,
    Yardstick,
    held_rate,
    measures,
    pace,
)
from tests.draws import whole
from tests.harness.builders import job_with, make_job_view, make_node_view, make_snapshot

NODES = frozenset({NodeName("n1")})


def job(
    name: str,
    *,
    work_s: float,
    most: int = 4,
    at_s: float = 0.0,
    app: str = "",
    tenant: str = "lab",
) -> JobView:
    """A job of one-GPU workers."""
    made = make_job_view(name, workers=(1, most), remaining_work_s=work_s, submitted_at_s=at_s)
    return job_with(made, whole_work_s=work_s, app=app or None, tenant=tenant)


def measured(jobs: list[JobView], yard: Yardstick, attendance: Attendance) -> dict[str, Measure]:
    """Every app of a snapshot."""
    snapshot = make_snapshot(nodes=[make_node_view("n1")], jobs=jobs, now_s=yard.now_s)
    return measures(attendance, yard, attendance.note(snapshot))


def test_alone_is_a_share_by_the_apps_that_are_there() -> None:
    """Two apps on 8 GPUs have 4 each: 400 worker-seconds take 100 s alone, or 200 s of 2 GPUs."""
    found = measured(
        [job("a", work_s=400.0), job("b", work_s=400.0, most=2)],
        Yardstick(gpus=8, now_s=0.0),
        Attendance(),
    )
    assert found["job a"].alone_s == pytest.approx(100.0)
    assert found["job b"].alone_s == pytest.approx(200.0)
    two = {JobId("a"): Held(2, NODES)}
    assert found["job a"].rho(found["job a"].left_s(two)) == pytest.approx(2.0)


def test_the_laxer_variant_is_equal_only_where_the_cluster_can_be_used() -> None:
    """N times the whole cluster's time is its share's time if an app can use all, else more."""
    for most, share_s, cluster_s in ((8, 100.0, 100.0), (4, 100.0, 200.0)):
        jobs = [job("a", work_s=400.0, most=most), job("b", work_s=1.0)]
        for alone, expected_s in ((Alone.SHARE, share_s), (Alone.CLUSTER, cluster_s)):
            found = measured(jobs, Yardstick(gpus=8, now_s=0.0, alone=alone), Attendance())
            assert found["job a"].alone_s == pytest.approx(expected_s)


def test_the_number_of_apps_is_their_mean_over_time() -> None:
    """One app for 100 s, then three for 100 s: 2 on the average; at a submission those present."""
    attendance = Attendance()
    first = job("a", work_s=1000.0)
    yard = Yardstick(gpus=6, now_s=0.0)
    measured([first], yard, attendance)
    more = [first, job("b", work_s=10.0, at_s=100.0), job("c", work_s=10.0, at_s=100.0)]
    measured(more, replace(yard, now_s=100.0), attendance)
    assert attendance.mean_apps(attendance.apps["job b"]) == pytest.approx(3.0)
    found = measured(more, replace(yard, now_s=200.0), attendance)
    assert attendance.mean_apps(attendance.apps["job a"]) == pytest.approx(2.0)
    assert found["job a"].share_gpus == pytest.approx(3.0)


def test_apps_that_nobody_counted_do_not_count_as_none() -> None:
    """Who begins to count late, after a restart, has the mean of what it saw: two apps, not one.

    T_shared is counted from the submission all the same.
    """
    attendance = Attendance()
    jobs = [job("a", work_s=1000.0), job("b", work_s=1000.0, at_s=100.0)]
    for now_s in (900.0, 950.0, 1000.0):
        found = measured(jobs, Yardstick(gpus=4, now_s=now_s), attendance)
        for app in ("job a", "job b"):
            assert attendance.mean_apps(attendance.apps[app]) == pytest.approx(2.0)
            assert found[app].share_gpus == pytest.approx(2.0)
            assert found[app].alone_s == pytest.approx(500.0)
    assert found["job a"].rho(500.0) == pytest.approx(1500.0 / 500.0)


def test_a_record_without_the_instant_was_seen_at_its_submission() -> None:
    """A record without `seen_at_s` counts apps from its submission."""
    record = AppRecord(submitted_at_s=100.0, area_s=50.0)
    attendance = Attendance(at_s=300.0, area_s=650.0, apps={"job a": record})
    assert attendance.mean_apps(record) == pytest.approx(3.0)


def test_trials_add_up_or_race() -> None:
    """If all must end, work adds up on the app's share; if one is enough, the shortest counts."""
    jobs = [job("a", work_s=100.0, app="s"), job("b", work_s=300.0, app="s")]
    held = {JobId("a"): Held(2, NODES), JobId("b"): Held(2, NODES)}
    all_ = measured(jobs, Yardstick(gpus=4, now_s=0.0), Attendance())["app lab/s"]
    first = measured(jobs, Yardstick(gpus=4, now_s=0.0, aim=Aim.FIRST), Attendance())["app lab/s"]
    assert (all_.alone_s, first.alone_s) == pytest.approx((100.0, 25.0))
    assert all_.left_s(held) == pytest.approx(150.0)  # b's own two GPUs take that long
    assert first.left_s(held) == pytest.approx(50.0)


def test_an_app_is_done_no_sooner_than_its_longest_trial() -> None:
    """Of one GPU the long trial needs 800 s alone, though all work of both would fit into 180 s.

    A quarter of it is left, 200 s, whatever the other one leaves over: rho on its share is 1.
    """
    jobs = [job("long", work_s=800.0, most=1, app="x"), job("short", work_s=100.0, app="x")]
    attendance = Attendance()
    found = measured(jobs, Yardstick(gpus=8, now_s=0.0), attendance)["app lab/x"]
    assert found.alone_s == pytest.approx(800.0)
    assert found.share_left_s == pytest.approx(800.0)
    later = [job_with(jobs[0], remaining_work_s=200.0), jobs[1]]
    again = measured(later, Yardstick(gpus=8, now_s=600.0), attendance)["app lab/x"]
    assert again.share_left_s == pytest.approx(200.0)
    assert again.rho(again.share_left_s) == pytest.approx(1.0)


def test_a_long_trial_that_waits_ends_later_than_if_it_ran() -> None:
    """Of one GPU: it begins when the first of the others has ended, and then takes all of its time.

    Though the work of all would fit into 67 s on the three GPUs that the app has.
    """
    names = ("a", "b", "c")
    jobs = [job(name, work_s=20.0 + 10.0 * at, most=1, app="x") for at, name in enumerate(names)]
    jobs.append(job("long", work_s=110.0, most=1, app="x"))
    found = measured(jobs, Yardstick(gpus=4, now_s=0.0), Attendance())["app lab/x"]
    held = {JobId(name): Held(1, NODES) for name in names}
    assert found.left_s(held) == pytest.approx(20.0 + 110.0)
    assert found.left_s(held | {JobId("long"): Held(1, NODES)}) == pytest.approx(110.0)


@given(st.lists(st.tuples(st.floats(1.0, 1e6), whole(1, 4)), min_size=2, max_size=6), whole(1, 5))
def test_an_app_is_done_no_later_with_one_trial_more_that_runs(
    trials: list[tuple[float, int]], running: int
) -> None:
    """Whatever is left of each, and however wide its gang: who could run has a reason to bid."""
    jobs = [
        replace(
            job(f"t{at}", work_s=left_s * least, app="x"), workers=WorkerRange(min=least, max=least)
        )
        for at, (left_s, least) in enumerate(trials)
    ]
    found = measured(jobs, Yardstick(gpus=9, now_s=0.0), Attendance())["app lab/x"]
    held = {each.job_id: Held(each.workers.min, NODES) for each in jobs}
    for count in range(min(running, len(jobs) - 1), len(jobs)):
        some = dict(list(held.items())[:count])
        more = dict(list(held.items())[: count + 1])
        assert found.left_s(more) <= found.left_s(some) * (1.0 + 1e-9)


def test_an_app_is_its_tenant_s_own() -> None:
    """Two tenants that use one word have two apps: nobody's work joins a stranger's."""
    jobs = [
        job("a", work_s=100.0, app="s", tenant="lab"),
        job("b", work_s=300.0, app="s", tenant="shop"),
        job("c", work_s=300.0, app="s", tenant="shop"),
    ]
    found = measured(jobs, Yardstick(gpus=8, now_s=0.0), Attendance())
    assert {app: each.alone_s for app, each in found.items()} == {
        "app lab/s": pytest.approx(100.0 / 4),
        "app shop/s": pytest.approx(600.0 / 4),
    }


def test_work_of_ended_trials_still_counts_alone() -> None:
    """What an app would have taken alone does not shrink as its trials end."""
    attendance, yard = Attendance(), Yardstick(gpus=4, now_s=0.0)
    jobs = [job("a", work_s=100.0, app="s"), job("b", work_s=300.0, app="s")]
    whole = measured(jobs, yard, attendance)["app lab/s"].alone_s
    left = measured(jobs[1:], replace(yard, now_s=50.0), attendance)["app lab/s"].alone_s
    assert left == pytest.approx(whole)


def test_spreading_slows_down_by_the_profile() -> None:
    """A gang on two nodes or racks makes the part of its speed that its profile says."""
    slow = replace(
        job("a", work_s=100.0), profile=JobProfile(rack_speed_ratio=0.7, far_speed_ratio=0.5)
    )
    two = frozenset({NodeName("n1"), NodeName("n2")})
    assert held_rate(slow, Held(2, NODES)) == pytest.approx(2.0)
    assert held_rate(slow, Held(2, two)) == pytest.approx(1.4)
    assert held_rate(slow, Held(2, two, racks=2)) == pytest.approx(1.0)


def test_measured_speed_ups_count_from_the_base_gang() -> None:
    """Pace is in worker-seconds of the base gang, between its points on a line, and capped."""
    made = make_job_view("a", workers=(2, 8))
    bent = replace(made, profile=JobProfile(speedup=((2, 10.0), (4, 15.0), (8, 20.0))))
    assert [pace(bent, count) for count in (1, 2, 3, 4, 8, 16)] == pytest.approx(
        [1.0, 2.0, 2.5, 3.0, 4.0, 4.0]
    )
    assert [pace(bent, count) for count in (2.5, 3.75, 4.4, 7.5)] == pytest.approx(
        [2.25, 2.875, 3.1, 3.875]
    )


def test_alone_on_a_broken_share_a_job_is_as_fast_as_between_two_sizes() -> None:
    """Two apps on five GPUs have 2.5 each: half of the way from two workers to three."""
    bent = JobProfile(speedup=((1, 1.0), (2, 1.8), (3, 2.2)))
    jobs = [replace(job("a", work_s=400.0), profile=bent), job("b", work_s=1.0)]
    found = measured(jobs, Yardstick(gpus=5, now_s=0.0), Attendance())
    assert found["job a"].share_gpus == pytest.approx(2.5)
    assert found["job a"].alone_s == pytest.approx(400.0 / 2.0)


def test_less_than_a_gang_makes_nothing() -> None:
    """A job with fewer workers than its gang does not run."""
    assert held_rate(make_job_view("a", workers=(4, 8)), Held(3, NODES)) == 0.0
