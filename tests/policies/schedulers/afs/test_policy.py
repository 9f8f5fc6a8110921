"""AFS: base gangs of the shortest first, then pairs decide who takes the next worker."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Preempt, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.afs.policy import LEASE_S
from coordinator.policies.schedulers.afs.worker_shares import (
    Share,
    base_shares,
    beats_by_gain,
    beats_by_length,
    share_by_throughput,
    share_out,
)
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row

POINTS = st.lists(st.floats(0.05, 1.0), min_size=7, max_size=7)


def job(name: str, work_s: float, *gains: float, most: int = 8) -> JobView:
    """An elastic job whose n-th worker adds the n-th gain; linear without gains."""
    rates = [sum(gains[: number + 1]) for number in range(len(gains))]
    view = make_job_view(name, workers=(1, most), remaining_work_s=work_s)
    profile = JobProfile(speedup=tuple(enumerate(rates, start=1)))
    return replace(view, profile=profile, as_of_s=NOW_S)


def share(view: JobView, workers: int) -> Share:
    """What a job has so far."""
    return Share(job=view, left_s=view.estimate.remaining_work_s, workers=workers)


@given(
    works=st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)),
    first=POINTS,
    second=POINTS,
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_the_pairwise_rule_is_that_of_remaining_times(
    works: tuple[float, float], first: list[float], second: list[float], sizes: tuple[int, int]
) -> None:
    """The shorter wins iff r_l(n)/r_l(n+1) + r_h(n+1)/r_h(n) > 2, whichever side it stands on."""
    a = share(job("a", works[0], 1.0, *first), sizes[0])
    b = share(job("b", works[1], 1.0, *second), sizes[1])
    low, high = sorted((a, b), key=lambda each: (each.remaining_s, each.job.job_id))

    def after(each: Share) -> float:
        return each.left_s / (each.rate + each.gain)

    told = low.remaining_s / after(low) + after(high) / high.remaining_s
    if abs(told - 2.0) < 1e-9:
        return
    winner = low if told > 2.0 else high
    assert beats_by_length(high, low) == (winner is low)
    assert beats_by_length(low, high) == (winner is high)


def test_linear_jobs_share_equally_and_the_shorter_takes_what_is_over() -> None:
    """Seven workers for two linear jobs: the shorter one has four."""
    shares, left = base_shares([job("short", 10.0), job("long", 90.0)], 7, NOW_S)
    share_out(shares, left, beats_by_length)
    assert [each.workers for each in shares] == [4, 3]


def test_a_short_job_that_hardly_scales_leaves_workers_to_a_long_one() -> None:
    """Where a second worker adds 1 %, shortness does not outweigh efficiency."""
    shares, left = base_shares([job("short", 10.0, 1.0, 0.01), job("long", 1000.0)], 6, NOW_S)
    share_out(shares, left, beats_by_length)
    assert [each.workers for each in shares] == [1, 5]


def test_base_gangs_go_to_the_shortest_and_skip_what_does_not_fit() -> None:
    """Four GPUs, gangs of 2, 4 and 2 in order of length: the wide one waits."""
    views = [
        make_job_view(name, workers=(size, size)) for name, size in (("a", 2), ("b", 4), ("c", 2))
    ]
    shares, left = base_shares(views, 4, NOW_S)
    assert ([each.job.job_id for each in shares], left) == (["a", "c"], 0)


def test_lyras_rule_follows_throughput_alone() -> None:
    """The efficient job takes all, long or short."""
    shares, left = base_shares([job("short", 10.0, 1.0, 0.5, 0.4), job("long", 1e4)], 6, NOW_S)
    share_by_throughput(shares, left)
    assert [each.workers for each in shares] == [1, 5]


def test_what_a_worker_more_adds_counts_against_the_base_gang() -> None:
    """Half of one worker is more than nine tenths of two."""
    wide = make_job_view("wide", workers=(2, 3))
    wide = replace(wide, profile=JobProfile(speedup=((2, 1.0), (3, 1.45))))
    shares, left = base_shares([wide, job("slim", 10.0, 1.0, 0.5, most=2)], 4, NOW_S)
    share_by_throughput(shares, left)
    assert [each.workers for each in shares] == [2, 2]


def test_without_lengths_the_more_efficient_wins_and_equals_toss() -> None:
    """Surely better or surely worse needs no chance; between equals it decides."""
    good = share(job("good", 1.0, 1.0, 1.0, 1.0), 1)
    bad = share(job("bad", 1.0, 1.0, 0.1, 0.1), 1)
    for heads in (True, False):
        beats = beats_by_gain(partial(_heads, heads))
        assert beats(bad, good)
        assert not beats(good, bad)
        assert beats(good, share(good.job, 1)) == heads


def _heads(heads: bool, *_: Share) -> bool:
    return heads


@given(
    st.lists(st.tuples(st.floats(1, 1e4), POINTS), min_size=1, max_size=6),
    st.integers(1, 30),
    st.sampled_from(["length", "gain", "throughput"]),
)
def test_what_is_shared_out_is_there(
    drawn: list[tuple[float, list[float]]], gpus: int, rule: str
) -> None:
    """NothingTwice, WorkConserving: no more than there is, and all of it that somebody can use."""
    views = [job(str(n), work, 1.0, *gains) for n, (work, gains) in enumerate(drawn)]
    shares, left = base_shares(views, gpus, NOW_S)
    match rule:
        case "length":
            share_out(shares, left, beats_by_length)
        case "gain":
            share_out(
                shares, left, beats_by_gain(lambda first, second: first.left_s < second.left_s)
            )
        case _:
            share_by_throughput(shares, left)
    used = sum(each.workers for each in shares)
    assert used <= gpus
    if len(shares) == len(views):
        assert used == min(gpus, sum(8 for _ in views))


def running(name: str, count: int, *, work_s: float = 1000.0, node: str = "n0") -> JobView:
    """An elastic job of one base worker that runs with `count` workers."""
    placed = [make_worker_view(name, index, node, is_flexible=index > 0) for index in range(count)]
    return make_job_view(
        name, state=JobState.RUNNING, workers=(1, 8), placed=placed, remaining_work_s=work_s
    )


def one_node(*jobs: JobView, now_s: float = NOW_S) -> ClusterSnapshot:
    """Eight GPUs."""
    workers = [worker for view in jobs for worker in view.placed]
    return make_snapshot(nodes=[make_node_view("n0", workers=workers)], jobs=jobs, now_s=now_s)


def test_a_newcomer_gets_its_share_from_those_that_have_more() -> None:
    """Eight workers of one job become four and four in one pass."""
    snapshot = one_node(running("old", 8), make_job_view("new", workers=(1, 8)))
    shrink, start = policy("afs").allocate(snapshot, b"").decisions
    assert isinstance(shrink, Resize)
    assert len(shrink.removed_workers) == 4
    assert isinstance(start, Start)
    assert sum(placement.worker_count for placement in start.placements) == 4


def test_with_more_jobs_than_gpus_the_longest_waits_and_says_why() -> None:
    """Nine jobs, eight GPUs."""
    jobs = [make_job_view(f"j{number}", remaining_work_s=100.0 * number) for number in range(9)]
    snapshot = one_node(*jobs)
    decisions = policy("afs").allocate(snapshot, b"").decisions
    assert len(decisions) == 8
    [hold] = policy("afs").pending_reasons(snapshot, b"")
    assert hold.job_id == "j8"
    assert "too few GPUs" in hold.blockers[0]


@each_row(
    ("left_s", "saves", "stopped"),
    [(30.0, False, True), (50.0, False, False), (50.0, True, True), (110.0, True, False)],
)
def test_a_shorter_job_stops_one_only_for_more_than_that_has_to_make_up(
    left_s: float, saves: bool, stopped: bool
) -> None:
    """100 s left and 60 s to lose: whoever is to go first needs less than 40 s, so that the mean
    of both is better; with nothing to lose less than 100 s is enough."""
    placed = [make_worker_view("long", 0, "n0", gpus=8)]
    view = make_job_view(
        "long", state=JobState.RUNNING, gpus_per_worker=8, placed=placed, remaining_work_s=100.0
    )
    long = job_with(view, as_of_s=NOW_S, unsaved_gpu_s=480.0, saves_when_asked=saves)
    short = make_job_view("short", gpus_per_worker=8, remaining_work_s=left_s)
    found = policy("afs").allocate(one_node(long, short), b"").decisions
    assert [type(each) for each in found] == ([Preempt, Start] if stopped else [])


def test_who_had_its_turn_goes_behind_those_that_had_none() -> None:
    """A job without end holds the node; after its lease a newcomer takes its place."""
    made = policy("afs-p")
    rigid = replace(running("old", 8), workers=make_job_view("x", workers=(8, 8)).workers)
    placed = tuple(replace(worker, is_flexible=False) for worker in rigid.placed)
    old = job_with(rigid, placed=placed, first_started_at_s=NOW_S, is_resizable=False)
    new = make_job_view("new", workers=(8, 8), submitted_at_s=NOW_S)
    first = made.allocate(one_node(old, new), b"")
    assert first.decisions == ()
    assert first.wake_at_s == NOW_S + LEASE_S
    later = made.allocate(one_node(old, new, now_s=NOW_S + LEASE_S), first.memory)
    assert [type(decision) for decision in later.decisions] == [Preempt, Start]


def test_only_a_lease_that_ended_counts_as_a_turn() -> None:
    """AFS-P counts at the end of a lease: who was stopped 10 s into its first has had none, so that
    of two with no turn the one that started first goes before the one that never did."""
    made = policy("afs-p")
    placed = [make_worker_view("old", index, "n0") for index in range(8)]
    runs = make_job_view("old", state=JobState.RUNNING, workers=(8, 8), placed=placed)
    began = made.allocate(one_node(runs), b"")
    stopped = job_with(make_job_view("old", workers=(8, 8)), first_started_at_s=NOW_S)
    new = make_job_view("new", workers=(8, 8), submitted_at_s=0.0)
    later = made.allocate(one_node(stopped, new, now_s=NOW_S + 10.0), began.memory)
    [start] = later.decisions
    assert isinstance(start, Start)
    assert start.job_id == "old"


@pytest.mark.parametrize(("stopped_at_s", "first"), [(10.0, "old"), (LEASE_S, "new")])
def test_a_lease_does_not_end_while_its_job_waits(stopped_at_s: float, first: str) -> None:
    """Who is stopped 10 s into its first lease has had no turn when that would have ended either;
    whose lease was over by then goes behind the newcomer."""
    made = policy("afs-p")
    placed = [make_worker_view("old", index, "n0") for index in range(8)]
    runs = make_job_view("old", state=JobState.RUNNING, workers=(8, 8), placed=placed)
    memory = made.allocate(one_node(runs), b"").memory
    stopped = job_with(make_job_view("old", workers=(8, 8)), first_started_at_s=NOW_S)
    memory = made.allocate(one_node(stopped, now_s=NOW_S + stopped_at_s), memory).memory
    new = make_job_view("new", workers=(8, 8), submitted_at_s=0.0)
    [start] = made.allocate(one_node(stopped, new, now_s=NOW_S + 2 * LEASE_S), memory).decisions
    assert isinstance(start, Start)
    assert start.job_id == first


def test_of_as_many_turns_the_first_start_counts_then_the_submission() -> None:
    """Of four without a turn those that ran go first, in order of their first starts; then those
    that never did, as they came: not by name, nor the former by submission."""
    line = [
        job_with(make_job_view("d", workers=(8, 8), submitted_at_s=40.0), first_started_at_s=50.0),
        job_with(make_job_view("c", workers=(8, 8), submitted_at_s=30.0), first_started_at_s=60.0),
        make_job_view("b", workers=(8, 8), submitted_at_s=10.0),
        make_job_view("a", workers=(8, 8), submitted_at_s=20.0),
    ]
    for at, job in enumerate(line):
        [start] = policy("afs-p").allocate(one_node(*line[at:]), b"").decisions
        assert isinstance(start, Start)
        assert start.job_id == job.job_id


def tossed(name: str, count: int, *, after_s: float) -> list[str]:
    """Which of two equals gets the third of three GPUs, in so many passes one after the other."""
    workers = [make_worker_view(each, 0, "n0") for each in ("a", "b")]
    jobs = [
        make_job_view(worker.job_id, state=JobState.RUNNING, workers=(1, 2), placed=[worker])
        for worker in workers
    ]
    snapshot = make_snapshot(nodes=[make_node_view("n0", gpus=3, workers=workers)], jobs=jobs)
    memory, found = b"", list[str]()
    for at in range(count):
        made = policy(name).allocate(replace(snapshot, now_s=NOW_S + at * after_s), memory)
        memory = made.memory
        found += [each.job_id for each in made.decisions if isinstance(each, Resize)]
    return found


def test_what_is_open_between_two_is_drawn_anew_with_each_lease_and_by_each_seed() -> None:
    """Else one of two equals would have the worker that both could use as long as they are there;
    and with another seed other leases go to the first of them."""
    draws = [tossed(f"afs-p:seed={seed}", 16, after_s=LEASE_S) for seed in (0, 1)]
    assert [len(each) for each in draws] == [16, 16]
    assert [set(each) for each in draws] == [{"a", "b"}, {"a", "b"}]
    assert draws[0] != draws[1]


def test_while_leases_last_no_worker_goes_to_and_fro_between_equals() -> None:
    """However many passes there are."""
    assert len(set(tossed("afs-p", 16, after_s=60.0))) == 1


@pytest.mark.parametrize(("hidden_at_s", "first"), [(10.0, "old"), (LEASE_S, "new")])
def test_out_of_sight_only_a_lease_that_ended_counts_as_a_turn(
    hidden_at_s: float, first: str
) -> None:
    """Whom a quota hides 10 s into its first lease comes back as one that has had no turn, however
    late that is; whose lease was over by then goes behind the newcomer."""
    made = policy("afs-p")
    placed = [make_worker_view("old", index, "n0") for index in range(8)]
    runs = make_job_view("old", state=JobState.RUNNING, workers=(8, 8), placed=placed)
    memory = made.allocate(one_node(runs), b"").memory
    away = replace(one_node(now_s=NOW_S + hidden_at_s), unseen=frozenset({JobId("old")}))
    memory = made.allocate(away, memory).memory
    stopped = job_with(make_job_view("old", workers=(8, 8)), first_started_at_s=NOW_S)
    new = make_job_view("new", workers=(8, 8), submitted_at_s=0.0)
    back = one_node(stopped, new, now_s=NOW_S + 2 * LEASE_S)
    [start] = made.allocate(back, memory).decisions
    assert isinstance(start, Start)
    assert start.job_id == first


def test_whose_work_a_stop_would_throw_away_is_told_that_it_stays() -> None:
    """Beside its turns its owner reads that it keeps its gang, and what for; who saves does not."""
    made = policy("afs-p")
    loses = job_with(running("old", 1), as_of_s=NOW_S, unsaved_gpu_s=900.0, attained_gpu_s=900.0)
    saves = job_with(loses, saves_when_asked=True)
    said = [made.standing(one_node(each), b"", each.job_id) for each in (loses, saves)]
    assert [len(each) for each in said] == [2, 1]
    assert "keeps its base gang when its turn ends: a stop would lose 900 GPU-s" in said[0][1]


def test_the_same_memory_gives_the_same_decisions() -> None:
    """Chance is in the memory: a pass can be replayed."""
    jobs = [make_job_view(f"j{number}", workers=(1, 8)) for number in range(3)]
    made = policy("afs-p:seed=7")
    once, again = (made.allocate(one_node(*jobs), b"") for _ in range(2))
    assert once == again


def test_a_frozen_cell_decides_nothing() -> None:
    """Whatever would be better."""
    snapshot = replace(one_node(make_job_view("new")), is_frozen=True)
    assert policy("afs").allocate(snapshot, b"m").decisions == ()
    assert policy("afs").allocate(snapshot, b"m").memory == b"m"


def test_lyras_cut_stops_nobody() -> None:
    """A long rigid job that runs goes on, however short the one is that waits; AFS-L stops it."""
    placed = [make_worker_view("old", index, "n0") for index in range(8)]
    old = make_job_view(
        "old", state=JobState.RUNNING, workers=(8, 8), placed=placed, remaining_work_s=1e6
    )
    new = make_job_view("new", workers=(8, 8), remaining_work_s=8.0)
    assert policy("afs-lyra").allocate(one_node(old, new), b"").decisions == ()
    stop, start = policy("afs").allocate(one_node(old, new), b"").decisions
    assert isinstance(stop, Preempt)
    assert isinstance(start, Start)


@pytest.mark.parametrize("name", ["afs", "afs-p", "afs-lyra"])
def test_each_variant_starts_what_fits(name: str) -> None:
    """One job of a free node starts as wide as it can be."""
    [start] = policy(name).allocate(one_node(make_job_view("new", workers=(1, 8))), b"").decisions
    assert isinstance(start, Start)
    assert sum(placement.worker_count for placement in start.placements) == 8


@pytest.mark.parametrize("name", ["afs", "afs-lyra", "afs-p"])
def test_a_gang_whose_gpus_are_in_pieces_is_told_so(name: str) -> None:
    """It has its share of GPUs: nobody before it leaves too few."""
    nodes = [make_node_view(node, gpus=8, free_gpus=2) for node in ("n0", "n1")]
    wide = make_job_view("wide", gpus_per_worker=4)
    [hold] = policy(name).pending_reasons(make_snapshot(nodes=nodes, jobs=[wide]), b"")
    assert hold.blockers == ("it is its turn, but of 1 worker of 4 GPUs only 0 can be placed",)


def idle(jobs: Iterable[JobView], *, gpus: int = 8) -> ClusterSnapshot:
    """One idle node, and jobs that wait."""
    return make_snapshot(nodes=[make_node_view("n0", gpus=gpus)], jobs=jobs)


def started(name: str, snapshot: ClusterSnapshot) -> list[str]:
    """Who starts in a pass."""
    found = policy(name).allocate(snapshot, b"").decisions
    return [each.job_id for each in found if isinstance(each, Start)]


# --- AFS ----------------------------------------------------------------------------------------


def test_lyras_cut_of_afs_looks_at_throughput_per_gpu() -> None:
    """A worker of four GPUs that doubles its job is worth less than one GPU that does (7.4)."""
    wide, narrow = (
        Share(job=make_job_view(name, workers=(1, 8), gpus_per_worker=gpus), left_s=1.0, workers=1)
        for name, gpus in (("wide", 4), ("narrow", 1))
    )
    share_by_throughput([wide, narrow], 4)
    assert (wide.workers, narrow.workers) == (1, 5)


def test_lyras_cut_of_afs_measures_speed_in_base_gangs() -> None:
    """A worker more is all of a gang of one and a quarter of a gang of four."""
    large, small = (
        Share(job=make_job_view(name, workers=(least, 8)), left_s=1.0, workers=least)
        for name, least in (("large", 4), ("small", 1))
    )
    share_by_throughput([large, small], 1)
    assert (large.workers, small.workers) == (4, 2)


def test_afs_p_lets_who_started_first_go_on_before_who_never_did() -> None:
    """Of equal turns the first start counts, then the submission; whoever has none is behind."""
    jobs = [
        make_job_view("new", gpus_per_worker=8, submitted_at_s=0.0),
        job_with(make_job_view("late", gpus_per_worker=8), first_started_at_s=NOW_S - 10.0),
        job_with(
            make_job_view("early", gpus_per_worker=8, submitted_at_s=9.0),
            first_started_at_s=NOW_S - 90.0,
        ),
    ]
    assert started("afs-p", idle(jobs)) == ["early"]
    assert started("afs-p", idle(jobs[:2])) == ["late"]
