"""Sizes of jobs that report how they speed up: by their profiles, in every decision on size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuRequest, JobId, NodeRole
from coordinator.policies.aryl.elastic_jobs import shares_of
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.aryl.scaling import give_back
from coordinator.policies.contract.decisions import Loan, Resize, Start
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
)
from tests.policies.profiled_jobs import (
    DIP,
    SPEEDUP,
    decided,
    node,
    phase_2,
    running,
    size_of,
    told,
)
from tests.tables import each_row


@pytest.mark.parametrize("name", ["aryl", "foresight", "aryl-elastic"])
def test_a_job_starts_no_larger_than_its_best_size(name: str) -> None:
    """On an idle cluster it gets the four GPUs with which it is fastest; linear ones get all."""
    job = make_job_view("j", workers=(4, 16), remaining_work_s=40_000.0)
    nodes = [make_node_view("n1"), make_node_view("n2")]
    (start,) = decided(make_snapshot(nodes=nodes, jobs=[told(job, SPEEDUP)]), name)
    assert size_of(start) == 4
    (start,) = decided(make_snapshot(nodes=nodes, jobs=[job]), name)
    assert size_of(start) == 16


@pytest.mark.parametrize("name", ["aryl", "foresight"])
def test_a_running_job_grows_no_larger_than_its_best_size(name: str) -> None:
    """From four to twelve where twelve are the best of sixteen; at its best it stays."""
    speedup = ((4, 1.0), (12, 2.5), (16, 2.4))
    job = running("j", workers=(4, 16), on=["n1"] * 4, speedup=speedup)
    nodes = [node("n1", [job]), make_node_view("n2")]
    (growth,) = decided(make_snapshot(nodes=nodes, jobs=[job]), name)
    assert isinstance(growth, Resize)
    assert sum(placement.worker_count for placement in growth.added) == 8
    best = running("j", workers=(4, 16), on=["n1"] * 4, speedup=SPEEDUP)
    nodes = [node("n1", [best]), make_node_view("n2")]
    assert decided(make_snapshot(nodes=nodes, jobs=[best]), name) == ()


def test_workers_go_where_they_speed_a_job_up() -> None:
    """Of two jobs the longer one hardly gains by a second worker, so the other one gets it."""
    long = running("long", workers=(1, 2), on=["n1"], left_s=9000.0, speedup=((1, 1.0), (2, 1.02)))
    short = running("short", workers=(1, 2), on=["n1"], left_s=2000.0)
    shares = phase_2([node("n1", [long, short], gpus=3)], [long, short])
    assert {name: share.count for name, share in shares.items()} == {"long": 0, "short": 1}


def test_who_loses_least_by_its_profile_shrinks_for_a_gang() -> None:
    """The flexible worker that brings next to nothing makes room, though its job is the longer."""
    flat = running(
        "flat", workers=(1, 2), on=["n1"] * 2, left_s=9000.0, speedup=((1, 1.0), (2, 1.05))
    )
    steep = running("steep", workers=(1, 2), on=["n1"] * 2, left_s=2000.0)
    jobs = [flat, steep, make_job_view("gang")]
    shrink, start = decided(make_snapshot(nodes=[node("n1", jobs, gpus=4)], jobs=jobs))
    assert isinstance(shrink, Resize)
    assert isinstance(start, Start)
    assert (shrink.job_id, start.job_id) == ("flat", "gang")


def test_a_resize_is_priced_by_the_profile() -> None:
    """A worker that saves less than its rendezvous by the profile is not added: 4 s of 10,000."""
    nearly = running("j", workers=(1, 2), on=["n1"], speedup=((1, 1.0), (2, 1.0004)))
    clearly = running("j", workers=(1, 2), on=["n1"], speedup=((1, 1.0), (2, 1.0006)))
    for job, grows in ((nearly, False), (clearly, True)):
        snapshot = make_snapshot(nodes=[node("n1", [job])], jobs=[job])
        assert bool(decided(snapshot)) == grows
        if not grows:
            (told_why,) = policy("aryl").standing(snapshot, b"", JobId("j"))
            assert "one worker more would save 4.0 s" in told_why


def test_a_job_past_its_best_size_gives_workers_up() -> None:
    """Sixteen workers where four are the fastest: twelve go, though nobody else wants them."""
    job = running("j", workers=(4, 16), on=["n1"] * 8 + ["n2"] * 8, speedup=SPEEDUP)
    snapshot = make_snapshot(nodes=[node("n1", [job]), node("n2", [job])], jobs=[job])
    (shrink,) = decided(snapshot)
    assert isinstance(shrink, Resize)
    assert len(shrink.removed_workers) == 12
    assert shrink.reason.startswith("shrinks from 16 to 4 workers, 16250 s left become 10000 s: ")
    assert shrink.reason.endswith("by its profile it is faster with fewer workers")
    assert policy("aryl").standing(snapshot, b"", JobId("j")) == (
        "the next pass takes 12 of its flexible workers: it is faster without them",
    )
    dear = "aryl:resize_cost_s=600"
    assert decided(snapshot, dear) == ()
    (why,) = policy(dear).standing(snapshot, b"", JobId("j"))
    assert "it is fastest with 4 workers" in why
    assert "save 6250.0 s, and a resize costs 7200 s" in why


@each_row(("free", "count"), [(0, 0), (1, 0), (2, 2), (3, 2)])
def test_a_dip_is_crossed_at_once_or_not_at_all(free: int, count: int) -> None:
    """One worker more would slow it down, so it waits until there is room for two."""
    job = running("j", workers=(1, 4), on=["n1"], speedup=DIP)
    shares = phase_2([node("n1", [job], gpus=1 + free)], [job])
    assert shares[JobId("j")].count == count


def test_a_dip_is_not_entered_where_the_rest_has_no_place() -> None:
    """Two free GPUs on two nodes hold one worker of two each only if they are enough: here the
    knapsack counts four free GPUs, and only one such worker fits."""
    job = running("j", workers=(1, 4), on=["n1"], speedup=DIP, gpus=2)
    other = running("x", workers=(1, 1), on=["n2"])
    nodes = [node("n1", [job], gpus=5), node("n2", [other], gpus=2)]
    shares = phase_2(nodes, [job])
    assert shares[JobId("j")].count == 0
    nodes = [node("n1", [job], gpus=6), node("n2", [other], gpus=2)]
    assert phase_2(nodes, [job])[JobId("j")].count == 2


def test_workers_that_base_demand_left_over_come_back_only_if_they_help() -> None:
    """Of three removed workers whose GPUs are free again, the one past the best size stays gone."""
    job = running("j", workers=(1, 4), on=["n1"] * 4, speedup=DIP)
    snapshot = make_snapshot(nodes=[node("n1", [job])], jobs=[job])
    room, shares = PlacementState(snapshot), shares_of(snapshot.jobs, now_s=0.0)
    share = shares[JobId("j")]
    for worker in share.workers:
        share.removed.append(worker)
        room.release(worker)
    give_back(room, shares.values())
    assert share.count == 2
    assert [worker.worker_index for worker in share.removed] == [3]


def test_the_multiplier_of_a_gpu_type_stretches_the_profile() -> None:
    """Where a type needs twice the workers, twice the best size is the best: eight, not four."""
    job = told(
        make_job_view(
            "j", workers=(2, 8), types=("H100",), multiplier={"H100": 2}, remaining_work_s=4e4
        ),
        ((2, 1.0), (4, 1.8), (8, 1.2)),
    )
    nodes = [make_node_view("n1"), make_node_view("n2")]
    (start,) = decided(make_snapshot(nodes=nodes, jobs=[job]))
    assert size_of(start) == 8
    assert isinstance(start, Start)
    assert start.estimated_runtime_s == pytest.approx(4e4 / (2 * 1.8))


def test_a_start_says_how_long_it_takes_by_its_profile_and_that_it_is_at_its_best() -> None:
    """40,000 worker-seconds on four of its base gang's workers are 10,000 s, at least and now."""
    job = told(make_job_view("j", workers=(4, 16), remaining_work_s=40_000.0), SPEEDUP)
    (start,) = decided(make_snapshot(nodes=[make_node_view("n1")], jobs=[job]))
    assert isinstance(start, Start)
    assert start.estimated_runtime_s == pytest.approx(10_000.0)
    assert start.reason == (
        "its turn (at least 10000 s by declared, priority 0): 4 GPUs of type H100 on 1 node; it "
        "is at its best size by its profile, 4 workers: more would make it slower"
    )


def test_a_growth_says_that_it_ends_at_the_best_size() -> None:
    """And how long the job takes there, by its profile."""
    job = running("j", workers=(1, 4), on=["n1"], speedup=((1, 1.0), (2, 1.6), (4, 1.6)))
    (growth,) = decided(make_snapshot(nodes=[node("n1", [job])], jobs=[job]))
    assert growth.reason == (
        "grows from 1 to 2 workers, 10000 s left become 6250 s: the most time saved for the GPUs "
        "that are free; it is at its best size by its profile, 2 workers: more would make it no "
        "faster"
    )


def test_who_is_at_its_best_size_is_told_so() -> None:
    """That is why it has no more workers, whatever else is free."""
    job = running("j", workers=(4, 16), on=["n1"] * 4, speedup=SPEEDUP)
    snapshot = make_snapshot(nodes=[node("n1", [job]), make_node_view("n2")], jobs=[job])
    assert policy("aryl").standing(snapshot, b"", JobId("j")) == (
        "it does not grow: it is at its best size by its profile, 4 workers: more would make it "
        "slower",
    )


def test_a_linear_job_with_a_measured_resize_lacks_room_for_one_worker() -> None:
    """It has no profile, and would take any worker that there is."""
    job = running("j", workers=(1, 6), on=["n1"])
    job = replace(job, resizes=replace(job.resizes, cost_s=0.1))
    snapshot = make_snapshot(nodes=[node("n1", [job], gpus=1)], jobs=[job])
    assert policy("aryl").standing(snapshot, b"", JobId("j")) == (
        "it does not grow: no node that its flexible workers may use has 1 free GPU of type H100, "
        "and no running job gains less by those that it has",
    )
    short = running("j", workers=(1, 6), on=["n1"], left_s=0.1)
    short = replace(short, resizes=replace(short.resizes, cost_s=10.0))
    snapshot = make_snapshot(nodes=[node("n1", [short])], jobs=[short])
    (why,) = policy("aryl").standing(snapshot, b"", JobId("j"))
    assert "5 workers more would save 0.1 s" in why and "was measured to cost 10 s" in why


def test_a_step_over_a_dip_that_has_no_room_is_told_whole() -> None:
    """How many workers the next size takes, as one alone would be no help."""
    job = running("j", workers=(1, 4), on=["n1"], speedup=DIP)
    snapshot = make_snapshot(nodes=[node("n1", [job], gpus=2)], jobs=[job])
    (why,) = policy("aryl").standing(snapshot, b"", JobId("j"))
    assert "faster next with 3 workers, and there is no room for 2 more" in why
    short = running("j", workers=(1, 4), on=["n1"], left_s=12.0, speedup=DIP)
    snapshot = make_snapshot(nodes=[node("n1", [short])], jobs=[short])
    (why,) = policy("aryl").standing(snapshot, b"", JobId("j"))
    assert "2 workers more would save 6.0 s" in why
    assert "a resize costs 10 s" in why


@pytest.mark.parametrize("name", ["sjf", "aryl", "foresight"])
def test_a_profile_changes_nobodys_turn(name: str) -> None:
    """Base demand starts, in the order of the paper; who scales well is no shorter with it."""
    jobs = [
        make_job_view("scales", workers=(4, 16), remaining_work_s=48_000.0, submitted_at_s=NOW_S),
        make_job_view("short", workers=(4, 16), remaining_work_s=40_000.0, submitted_at_s=NOW_S),
    ]
    steep = ((4, 1.0), (16, 3.9))
    for curves in (((), ()), (steep, SPEEDUP)):
        line = [told(job, curve) for job, curve in zip(jobs, curves, strict=True)]
        (start,) = decided(make_snapshot(nodes=[node("n1", gpus=4)], jobs=line), name)
        assert isinstance(start, Start)
        assert start.job_id == "short"


def test_profiles_that_are_not_trusted_change_nothing() -> None:
    """The paper's scheduler takes scaling for linear: it decides as if nothing had been told."""
    job = make_job_view("j", workers=(4, 16), remaining_work_s=40_000.0)
    grown = running("g", workers=(1, 4), on=["n3"], speedup=DIP)
    nodes = [make_node_view("n1"), make_node_view("n2"), node("n3", [grown])]
    blind = decided(
        make_snapshot(nodes=nodes, jobs=[told(job, SPEEDUP), grown]), "aryl:trusts_profiles=false"
    )
    assert blind == decided(make_snapshot(nodes=nodes, jobs=[job, told(grown, ())]))
    assert blind != decided(make_snapshot(nodes=nodes, jobs=[told(job, SPEEDUP), grown]))


def test_no_node_is_lent_for_workers_that_would_slow_a_job_down() -> None:
    """A linear job gets one, one at its best size none; across a dip a node must hold them all."""
    service = make_service_view(load=0.0, min_serving=0)

    def lent(job: JobView, *, gpus: int = 8) -> list[str]:
        spare = [make_node_view("s1", role=NodeRole.SERVING, gpus=gpus)]
        full = node("n1", [job], gpus=len(job.placed) * job.gpus_per_worker)
        snapshot = make_snapshot(nodes=[full, *spare], jobs=[job], services=[service])
        return [d.node for d in policy("aryl").lend(snapshot) if isinstance(d, Loan)]

    assert lent(running("j", workers=(4, 16), on=["n1"] * 4)) == ["s1"]
    assert lent(running("j", workers=(4, 16), on=["n1"] * 4, speedup=SPEEDUP)) == []
    dips = running("j", workers=(1, 4), on=["n1"], speedup=DIP)
    assert lent(dips, gpus=1) == []
    assert lent(dips, gpus=2) == ["s1"]
    nearly_over = running("j", workers=(1, 4), on=["n1"], left_s=12.0, speedup=DIP)
    assert lent(nearly_over, gpus=2) == []  # two workers cost 10 s and save 6 s


@pytest.mark.parametrize("speedup", [SPEEDUP, ()])
def test_a_claim_is_ready_when_a_job_ends_at_the_speed_of_its_profile(
    speedup: tuple[tuple[int, float], ...],
) -> None:
    """Eight workers at half the pace of four take 21,667 s, too long for a gang that waited for
    6,000 s to keep nodes for; in proportion they would take 5,000 s."""
    places = ["n1"] * 4 + ["n2", "n2", "n3", "n3"]
    slow = running("slow", workers=(4, 8), on=places, speedup=speedup)
    gang = make_job_view("gang", gpus_per_worker=8, submitted_at_s=NOW_S - 6000.0)
    late = make_job_view("late", gpus_per_worker=4, remaining_work_s=7000.0, submitted_at_s=NOW_S)
    nodes = [node("n1", [slow]), node("n2", [slow], gpus=2), node("n3", [slow], gpus=2)]
    snapshot = make_snapshot(nodes=nodes, jobs=[slow, gang, late])
    decisions = decided(snapshot, "aryl:claim_ratio=1:claim_stretch=0")
    started = [decision.job_id for decision in decisions if isinstance(decision, Start)]
    assert started == (["late"] if speedup else [])


@pytest.mark.parametrize("speedup", [((2, 1.0), (8, 0.5)), ()])
def test_a_job_ages_by_its_time_at_the_best_size(speedup: tuple[tuple[int, float], ...]) -> None:
    """That is 10,000 s on two workers, for which it has not waited yet; on eight, in proportion,
    it would be 2,500 s."""
    busy = running("busy", workers=(1, 1), on=["n1"], left_s=5000.0, gpus=4)
    gang = make_job_view(
        "gang",
        workers=(2, 8),
        gpus_per_worker=8,
        remaining_work_s=20_000.0,
        submitted_at_s=NOW_S - 6000.0,
    )
    late = make_job_view("late", gpus_per_worker=8, remaining_work_s=7000.0, submitted_at_s=NOW_S)
    snapshot = make_snapshot(
        nodes=[node("n1", [busy]), node("n2")], jobs=[busy, told(gang, speedup), late]
    )
    decisions = decided(snapshot, "aryl:claim_ratio=1:claim_stretch=1")
    started = [decision.job_id for decision in decisions if isinstance(decision, Start)]
    assert started == (["late"] if speedup else [])


def test_growth_on_other_types_is_as_large_as_helps_there() -> None:
    """Two fit, and the second would slow it down on the way to the best size: one is taken."""
    job = running("j", workers=(1, 4), on=["n1"], speedup=((1, 1.0), (2, 1.5), (3, 1.2), (4, 2.0)))
    both = GpuRequest(types=("H100", "T4"), heterogeneous_speed_ratio=1.0)
    job = replace(job, gpu=both)
    nodes = [node("n1", [job], gpus=1), make_node_view("t1", gpu_type="T4", gpus=2)]
    (growth,) = decided(make_snapshot(nodes=nodes, jobs=[job]))
    assert isinstance(growth, Resize)
    assert [placement.worker_count for placement in growth.added] == [1]


def test_a_worker_that_cannot_move_counts_in_what_the_others_bring() -> None:
    """One flexible worker is on a node that takes no more: the next one is the third of all, which
    the profile says to be worth more than the other job's second."""
    stuck = running(
        "stuck", workers=(1, 3), on=["n1", "n2"], speedup=((1, 1.0), (2, 1.0), (3, 3.0))
    )
    other = running("other", workers=(1, 2), on=["n1"], left_s=2000.0)
    drained = make_node_view("n2", workers=[stuck.placed[1]], is_drained_by_operator=True)
    shares = phase_2([node("n1", [stuck, other], gpus=3), drained], [stuck, other])
    assert {name: share.count for name, share in shares.items()} == {"stuck": 2, "other": 0}


def test_a_worker_comes_back_rather_than_pay_for_a_little_speed() -> None:
    """Without it the job would save 3 s and pay a resize of 5 s: its GPU is free, so it stays."""
    job = running("j", workers=(1, 2), on=["n1"] * 2, speedup=((1, 1.0003), (2, 1.0)))
    snapshot = make_snapshot(nodes=[node("n1", [job])], jobs=[job])
    room, shares = PlacementState(snapshot), shares_of(snapshot.jobs, now_s=0.0)
    share = shares[JobId("j")]
    for cost_s, left in ((5.0, 0), (2.0, 1)):
        share.removed.append(share.workers[0])
        room.release(share.workers[0])
        give_back(room, shares.values(), resize_cost_s=cost_s)
        assert len(share.removed) == left


def test_growth_on_other_types_ends_at_the_best_size() -> None:
    """Where workers on another GPU type count as much, three are the best of four here too."""
    job = running("j", workers=(1, 4), on=["n1"], speedup=DIP)
    both = GpuRequest(types=("H100", "T4"), heterogeneous_speed_ratio=1.0)
    job = replace(job, gpu=both)
    for gpus, added in ((8, 2), (2, 2), (1, 0)):
        nodes = [node("n1", [job], gpus=1), make_node_view("t1", gpu_type="T4", gpus=gpus)]
        decisions = decided(make_snapshot(nodes=nodes, jobs=[job]))
        grown = [d.added for d in decisions if isinstance(d, Resize)]
        assert sum(p.worker_count for each in grown for p in each) == added


SIZES = st.lists(st.integers(1, 12), min_size=4, max_size=4)


@given(tables=st.lists(SIZES, min_size=1, max_size=3), free=st.integers(0, 6))
def test_no_job_ever_grows_to_be_slower(tables: list[list[int]], free: int) -> None:
    """Whatever was measured: who gets workers is faster for them, and nobody loses any that
    another does not gain more by."""
    jobs = [
        running(
            f"j{number}",
            workers=(1, 4),
            on=["n1"],
            speedup=[(count, float(speed)) for count, speed in enumerate(table, start=1)],
        )
        for number, table in enumerate(tables)
    ]
    shares = phase_2([node("n1", jobs, gpus=len(jobs) + free)], jobs)
    for share in shares.values():
        speeds = [share.rate(count) for count in range(share.count + 1)]
        assert speeds[-1] == max(speeds)
        assert speeds.count(speeds[-1]) == 1


@given(table=SIZES, held=st.integers(0, 3), free=st.integers(0, 3))
def test_a_job_alone_ends_up_no_slower_than_it_was(table: list[int], held: int, free: int) -> None:
    """From any size, with any room: its speed after the pass is at least that before."""
    job = running(
        "j",
        workers=(1, 4),
        on=["n1"] * (1 + held),
        speedup=[(count, float(speed)) for count, speed in enumerate(table, start=1)],
    )
    share = phase_2([node("n1", [job], gpus=1 + held + free)], [job])[JobId("j")]
    assert share.rate(share.count) >= share.rate(held)
