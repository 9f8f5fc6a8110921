"""Rounds: shares are kept, nothing happens between two rounds, and new jobs wait for the next."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, WorkerRange
from coordinator.policies.contract.decisions import Allocation, Preempt, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.gavel.rounds import Rounds, Turn
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row

LAS = policy("las")


def a_job(name: str, *, gpus: int = 1, on: str | None = None, since_s: float = 0.0) -> JobView:
    """A gang of one worker, waiting or running."""
    job = make_job_view(name, gpus_per_worker=gpus, submitted_at_s=NOW_S - 600.0)
    if on is None:
        return job
    worker = make_worker_view(name, 0, on, gpus=gpus)
    return job_with(
        job, state=JobState.RUNNING, gpu_type="H100", placed=(worker,), started_at_s=since_s
    )


def pool(jobs: list[JobView], *, gpus: int = 2, now_s: float = NOW_S) -> ClusterSnapshot:
    """One node."""
    workers = [worker for job in jobs for worker in job.placed]
    return make_snapshot(
        nodes=[make_node_view("n1", gpus=gpus, workers=workers)], jobs=jobs, now_s=now_s
    )


def started(allocation: Allocation) -> set[str]:
    """Jobs that start."""
    return {decision.job_id for decision in allocation.decisions if isinstance(decision, Start)}


def rounds_of(allocation: Allocation) -> Rounds:
    """What it remembers."""
    return msgspec.msgpack.decode(allocation.memory, type=Rounds)


def test_an_idle_pool_begins_a_round_at_once() -> None:
    """Where nobody runs, those that come start now; the next round is a round's length away."""
    found = LAS.allocate(pool([a_job("a"), a_job("b"), a_job("c")]), b"")
    assert started(found) == {"a", "b"}
    assert found.wake_at_s == pytest.approx(NOW_S + 120.0)


def test_nothing_happens_between_two_rounds() -> None:
    """A pass within a round decides nothing, even beside free GPUs."""
    first = LAS.allocate(pool([a_job("a"), a_job("b"), a_job("c")]), b"")
    later = [a_job("a", on="n1", since_s=NOW_S), a_job("c")]
    found = LAS.allocate(pool(later, now_s=NOW_S + 50.0), first.memory)
    assert found.decisions == ()
    assert found.wake_at_s == pytest.approx(NOW_S + 120.0)
    (held,) = LAS.pending_reasons(pool(later, now_s=NOW_S + 50.0), found.memory)
    assert "the next round begins in 70 s" in held.blockers[0]


def test_whoever_received_less_of_its_share_runs_next() -> None:
    """The job that waited for a round takes the place of one that ran; another goes on."""
    first = LAS.allocate(pool([a_job("a"), a_job("b"), a_job("c")]), b"")
    ran = [a_job("a", on="n1", since_s=NOW_S), a_job("b", on="n1", since_s=NOW_S), a_job("c")]
    found = LAS.allocate(pool(ran, now_s=NOW_S + 120.0), first.memory)
    assert started(found) == {"c"}
    assert sum(isinstance(decision, Preempt) for decision in found.decisions) == 1


def test_a_newcomer_is_not_told_a_share_that_nobody_set() -> None:
    """Until the program is solved again it waits for one, and hears when; then it hears which."""
    memory = LAS.allocate(pool([a_job("a"), a_job("b")]), b"").memory
    jobs = [a_job("a", on="n1", since_s=NOW_S), a_job("b", on="n1", since_s=NOW_S), a_job("new")]
    early = LAS.allocate(pool(jobs, now_s=NOW_S + 130.0), memory)
    assert all("0% of the time" not in decision.reason for decision in early.decisions)
    (held,) = LAS.pending_reasons(pool(jobs, now_s=NOW_S + 130.0), early.memory)
    assert held.blockers == (
        "the next round begins in 110 s; it waits for its share of the time, which comes in 950 s",
    )
    late = NOW_S + 1080.0  # the ninth round: the first one 1,000 s after shares were set
    solved = LAS.allocate(pool(jobs, now_s=late), early.memory)
    ran = [job_with(jobs[0], started_at_s=late), jobs[1], jobs[2]]
    (held,) = LAS.pending_reasons(pool(ran, now_s=late + 10.0), solved.memory)
    assert held.blockers[0].startswith("the next round begins in 110 s; it should run 67% of the ")


def test_shares_stay_until_the_program_is_solved_again() -> None:
    """A newcomer has no share before `solve_s`, and one by the program after it."""
    memory = LAS.allocate(pool([a_job("a"), a_job("b")]), b"").memory
    jobs = [a_job("a", on="n1", since_s=NOW_S), a_job("b", on="n1", since_s=NOW_S), a_job("new")]
    early = rounds_of(LAS.allocate(pool(jobs, now_s=NOW_S + 120.0), memory))
    assert early.turns[jobs[2].job_id].share == 0.0
    late = rounds_of(LAS.allocate(pool(jobs, now_s=NOW_S + 1080.0), memory))
    assert late.turns[jobs[2].job_id].share == pytest.approx(2.0 / 3.0)


def test_shares_are_set_at_the_round_that_a_newcomer_is_told_of() -> None:
    """Also where the rounds until then sum up to a bit less than `solve_s`, by rounding."""
    las = policy("las:round_s=60.1:solve_s=180.3")
    begun_at_s = 3925.1
    third_s = begun_at_s + 60.1 + 60.1 + 60.1
    assert third_s - begun_at_s < 180.3
    memory = las.allocate(pool([a_job("a"), a_job("b")], now_s=begun_at_s), b"").memory
    jobs = [a_job("a", on="n1"), a_job("b", on="n1"), a_job("new")]
    early = las.allocate(pool(jobs, now_s=begun_at_s + 120.2), memory)
    (held,) = las.pending_reasons(pool(jobs, now_s=begun_at_s + 130.2), early.memory)
    assert held.blockers[0].startswith("the next round begins in 50 s")
    assert held.blockers[0].endswith("which comes in 50 s")
    late = rounds_of(las.allocate(pool(jobs, now_s=third_s), early.memory))
    assert late.turns[jobs[2].job_id].share == pytest.approx(2.0 / 3.0)


def test_the_worst_finish_is_raised_first() -> None:
    """With equal work left the job that has waited longest is given the greater share."""
    jobs = [replace(a_job("old"), submitted_at_s=NOW_S - 9000.0), a_job("young")]
    found = rounds_of(policy("themis-lp").allocate(pool(jobs, gpus=1), b""))
    shares = {job_id: turn.share for job_id, turn in found.turns.items()}
    assert shares[jobs[0].job_id] > shares[jobs[1].job_id] > 0.0


@each_row(
    ("later", "first"),
    [
        (
            Turn(share=0.5, received_s=60.0, owed_s=1.0),
            Turn(share=0.5, received_s=60.0, owed_s=2.0),
        ),
        (Turn(share=0.5, received_s=60.0), Turn(share=1.0, received_s=120.0)),
        (Turn(share=0.5, received_s=60.0, owed_s=9.0), Turn(share=0.5, received_s=59.0)),
        (Turn(share=0.5, received_s=60.0), Turn(share=0.5, received_s=60.0)),
    ],
    ids=["owed more", "greater share", "received less of it", "equal: by id"],
)
def test_among_equals_whoever_is_owed_more_runs(later: Turn, first: Turn) -> None:
    """By share over time received, then by what earlier accounts owe, then by share, then by id."""
    jobs = [a_job("a"), a_job("b")]
    # By its id the other one would come first, but where all else is equal.
    turns = {jobs[0].job_id: later, jobs[1].job_id: first}
    expected = "b" if later != first else "a"
    begun_at_s = NOW_S - 120.0
    memory = Rounds(
        begun_at_s=begun_at_s, noted_at_s=NOW_S, solved_at_s=NOW_S, is_stale=False, turns=turns
    )
    snapshot = pool(jobs, gpus=1)
    assert started(LAS.allocate(snapshot, msgspec.msgpack.encode(memory))) == {expected}


@pytest.mark.parametrize("name", ["las", "themis-lp"])
def test_what_a_job_did_not_receive_of_its_share_is_owed_and_told(name: str) -> None:
    """When shares are set anew: half of 1,200 s is due; one had all of it, the other had none, and
    what earlier accounts owed is still owed."""
    rounds = policy(f"{name}:round_s=120")
    jobs = [a_job("ran", on="n1", since_s=NOW_S - 1200.0), a_job("waited")]
    turns = {
        jobs[0].job_id: Turn(share=0.5, received_s=60.0, left_s=1e6, gpus=1),
        jobs[1].job_id: Turn(share=0.5, received_s=60.0, owed_s=30.0, left_s=1e6, gpus=1),
    }
    set_at_s = NOW_S - 1200.0
    memory = Rounds(
        begun_at_s=set_at_s, noted_at_s=set_at_s, solved_at_s=set_at_s, is_stale=True, turns=turns
    )
    found = rounds.allocate(pool(jobs, gpus=1), msgspec.msgpack.encode(memory))
    owed = {job_id: turn.owed_s for job_id, turn in rounds_of(found).turns.items()}
    assert owed == pytest.approx({"ran": -600.0, "waited": 630.0})
    assert started(found) == {"waited"}
    later = [a_job("ran"), a_job("waited", on="n1", since_s=NOW_S)]
    snapshot = pool(later, gpus=1, now_s=NOW_S + 10.0)
    (told, *_) = rounds.standing(snapshot, found.memory, jobs[1].job_id)
    assert told.endswith("% of the time and is owed 630 s")
    (held,) = rounds.pending_reasons(snapshot, found.memory)
    assert held.blockers[0].endswith("% of the time and is owed -600 s")


def test_equal_jobs_that_were_owed_different_times_take_turns_by_it() -> None:
    """The tie of equal shares and equal times is broken by the accounts that were closed."""
    jobs = [a_job("a", on="n1", since_s=NOW_S - 1200.0), a_job("b")]
    turns = {job.job_id: Turn(share=0.5, received_s=60.0, left_s=1e6, gpus=1) for job in jobs}
    set_at_s = NOW_S - 1200.0
    memory = Rounds(
        begun_at_s=set_at_s, noted_at_s=set_at_s, solved_at_s=set_at_s, is_stale=True, turns=turns
    )
    assert started(LAS.allocate(pool(jobs, gpus=1), msgspec.msgpack.encode(memory))) == {"b"}


def test_priority_comes_before_what_is_owed() -> None:
    """A job of higher priority has the round, however much it received."""
    jobs = [replace(a_job("a"), priority=1), a_job("b")]
    turns = {jobs[0].job_id: Turn(share=0.1, received_s=900.0), jobs[1].job_id: Turn(share=1.0)}
    turns[jobs[1].job_id].received_s = 60.0
    memory = Rounds(noted_at_s=NOW_S, solved_at_s=NOW_S, is_stale=False, turns=turns)
    found = LAS.allocate(pool(jobs, gpus=1), msgspec.msgpack.encode(memory))
    assert started(found) == {"a"}


def test_another_policys_memory_is_no_obstacle() -> None:
    """Whatever the policy before remembered, a pass decides as with none."""
    snapshot = pool([a_job("a"), a_job("b")])
    fresh = LAS.allocate(snapshot, b"")
    assert LAS.allocate(snapshot, b"\xc1text").decisions == fresh.decisions
    simple = policy("themis-simple")
    assert simple.allocate(snapshot, b"\xc1").decisions == simple.allocate(snapshot, b"").decisions


def test_the_simple_form_divides_anew_each_lease() -> None:
    """Until the lease ends a holder keeps its GPU; then the app that is worse off takes it."""
    simple = policy("themis-simple:lease_s=600")
    holder = replace(a_job("a"), submitted_at_s=NOW_S)
    first = simple.allocate(pool([holder], gpus=1), b"")
    assert started(first) == {"a"}
    running = replace(a_job("a", on="n1", since_s=NOW_S), submitted_at_s=NOW_S)
    both = [running, a_job("b")]
    early = simple.allocate(pool(both, gpus=1, now_s=NOW_S + 599.0), first.memory)
    assert early.decisions == ()
    assert early.wake_at_s == pytest.approx(NOW_S + 600.0)
    late = simple.allocate(pool(both, gpus=1, now_s=NOW_S + 600.0), early.memory)
    assert started(late) == {"b"}


def test_the_simple_form_divides_anew_for_whoever_could_grow() -> None:
    """Half of the GPUs were of one that has ended; nobody waits, and nothing else happens."""
    simple = policy("themis-simple:lease_s=600")
    wide = WorkerRange(min=1, max=2)
    first = simple.allocate(pool([replace(a_job("a"), workers=wide), a_job("b")]), b"")
    half = replace(a_job("a", on="n1", since_s=NOW_S), workers=wide, is_resizable=True)
    alone = pool([half], now_s=NOW_S + 60.0)
    found = simple.allocate(alone, first.memory)
    assert found.decisions == ()
    assert found.wake_at_s == pytest.approx(NOW_S + 600.0)
    then = simple.allocate(replace(alone, now_s=NOW_S + 600.0), found.memory)
    grown = [each.added for each in then.decisions if isinstance(each, Resize)]
    assert [placement.worker_count for added in grown for placement in added] == [1]
    assert then.wake_at_s == pytest.approx(NOW_S + 1200.0)


def idle(jobs: Iterable[JobView], *, gpus: int = 8) -> ClusterSnapshot:
    """One idle node, and jobs that wait."""
    return make_snapshot(nodes=[make_node_view("n0", gpus=gpus)], jobs=jobs)


def started_under(name: str, snapshot: ClusterSnapshot) -> list[str]:
    """Who starts in a pass."""
    found = policy(name).allocate(snapshot, b"").decisions
    return [each.job_id for each in found if isinstance(each, Start)]


# --- Gavel's rounds -----------------------------------------------------------------------------


def share_of(name: str, jobs: Iterable[JobView], job: str) -> str:
    """The part of the time that a job should run, as it is told."""
    snapshot = idle(jobs)
    made = policy(name)
    (said, *_) = made.standing(snapshot, made.allocate(snapshot, b"").memory, JobId(job))
    return said.partition("should run ")[2].partition(" of the time")[0]


def test_alone_is_an_equal_part_of_the_gpus_over_the_gang() -> None:
    """Of eight GPUs each of two has four: half of the time for a gang of eight, all for four.

    rho is then (left / x) / (2 left) and (left / y) / left: equal, and the least, at 1/2 and 1.
    """
    jobs = [
        make_job_view("wide", gpus_per_worker=8, submitted_at_s=NOW_S),
        make_job_view("half", gpus_per_worker=4, submitted_at_s=NOW_S),
    ]
    assert share_of("themis-lp", jobs, "wide") == "50%"
    assert share_of("themis-lp", jobs, "half") == "100%"


@pytest.mark.parametrize("name", ["las", "themis-lp"])
def test_in_a_round_priority_comes_first(name: str) -> None:
    """Whoever an operator ranks higher runs, though the other was owed more and came first."""
    low = make_job_view("a", gpus_per_worker=8, submitted_at_s=NOW_S - 900.0)
    high = make_job_view("b", gpus_per_worker=8, submitted_at_s=NOW_S, priority=1)
    assert started_under(name, idle([low, high])) == ["b"]
