"""What ElasticFlow's plans make of stops that cost work: none is made that wins less than that."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.model import JobState, NodeRole, Preemptibility, WorkerRange
from coordinator.policies.contract.decisions import Decision, Preempt, Reject, Start
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.admission import Book, Plans
from coordinator.policies.schedulers.qos.marginal_return import Sharing
from coordinator.policies.schedulers.qos.minimum_shares import Claim, fill, greedily
from coordinator.policies.schedulers.qos.timeline import Piece, Timeline
from coordinator.sim.inputs.inputs import parse_cluster
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import TraceJob, Workload
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_cluster,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

EXACT = "qos-elasticflow:margin=1"


def running(
    held: Mapping[str, int], *, ran_s: float = 3600.0, left_s: float = 3600.0, **more: object
) -> list[JobView]:
    """Rigid jobs on one node of eight GPUs that never save, and have run for an hour."""
    _, jobs = make_cluster({"n1": dict(held)}, role=NodeRole.TRAINING)
    return [
        job_with(
            job,
            workers=WorkerRange(min=1, max=1),
            started_at_s=NOW_S - ran_s,
            first_started_at_s=NOW_S - ran_s,
            as_of_s=NOW_S,
            unsaved_gpu_s=ran_s * job.gpus_per_worker,
            attained_gpu_s=ran_s * job.gpus_per_worker,
            remaining_work_s=left_s,
            **more,
        )
        for job in jobs
    ]


def waiting(name: str, gpus: int, work_s: float, deadline_s: float | None = None) -> JobView:
    """A rigid job that has just come; `deadline_s` from now."""
    job = make_job_view(name, gpus_per_worker=gpus, remaining_work_s=work_s, submitted_at_s=NOW_S)
    return structs.replace(job, deadline_at_s=None if deadline_s is None else NOW_S + deadline_s)


def decided(jobs: list[JobView], text: str = EXACT) -> list[Decision]:
    """One pass."""
    held = {str(job.job_id): job.gpus_per_worker for job in jobs if job.placed}
    nodes, _ = make_cluster({"n1": held}, role=NodeRole.TRAINING)
    return list(policy(text).allocate(make_snapshot(nodes=nodes, jobs=jobs), b"").decisions)


def kinds(decisions: list[Decision]) -> dict[str, str]:
    """What happens to whom."""
    return {
        each.job_id: type(each).__name__
        for each in decisions
        if isinstance(each, Preempt | Reject | Start)
    }


# --- without a promise ----------------------------------------------------------------------------


def test_equals_do_not_stop_one_another() -> None:
    """Of two jobs that gain as much by the same GPUs the one that has them goes on."""
    saves = running({"b": 8}, saves_when_asked=True)
    assert kinds(decided([waiting("a", 8, 3600.0), *saves])) == {}


def test_whose_work_would_be_lost_goes_on_beside_those_without_a_promise() -> None:
    """A job that never saves keeps its base gang, whatever another one would gain by it."""
    flat = job_with(running({"b": 8})[0], remaining_work_s=1e6)
    assert kinds(decided([waiting("a", 8, 10.0), flat])) == {}


def test_a_promise_is_planned_around_whoever_would_lose_its_work() -> None:
    """A deadline that can be met after the running job ends stops nobody."""
    soft = running({"b": 8}, left_s=1000.0)
    found = decided([waiting("a", 8, 1000.0, 2100.0), *soft])
    assert kinds(found) == {}


def test_a_promise_that_cannot_wait_stops_a_job_without_one() -> None:
    """Promises come first: best effort loses its work where a deadline could not be met else."""
    soft = running({"b": 8}, left_s=1000.0)
    found = decided([waiting("a", 8, 1000.0, 1900.0), *soft])
    assert kinds(found) == {"a": "Start", "b": "Preempt"}


def test_whose_stop_costs_most_is_spared_first() -> None:
    """Where one of two must go, it is the one with less to lose."""
    old, young = running({"a": 4, "b": 4}, left_s=5000.0)
    young = job_with(young, unsaved_gpu_s=400.0, attained_gpu_s=400.0)
    found = decided([old, young, waiting("c", 4, 1000.0, 1100.0)])
    assert kinds(found) == {"b": "Preempt", "c": "Start"}


def test_an_explanation_says_why_a_job_goes_on() -> None:
    """Whoever asks reads what a stop would lose."""
    jobs = running({"b": 8})
    nodes, _ = make_cluster({"n1": {"b": 8}}, role=NodeRole.TRAINING)
    snapshot = make_snapshot(nodes=nodes, jobs=jobs)
    [told] = policy(EXACT).standing(snapshot, b"", jobs[0].job_id)
    assert "28800 GPU-s of work" in told
    assert policy(EXACT).standing(snapshot, b"", waiting("a", 1, 1.0).job_id) == ()


@pytest.mark.parametrize("saves", [Saves.NEVER, Saves.ON_REQUEST])
def test_without_deadlines_nobody_is_stopped(saves: Saves) -> None:
    """Ten elastic jobs that take time to restart: each ends, none is stopped for its equal."""
    jobs = tuple(
        TraceJob(
            job_id=f"j{(number * 7) % 10}",
            submit_s=number * 300,
            duration_s=1500.0 + 700.0 * (number % 4),
            gpus=least,
            gpus_per_worker=1,
            min_workers=least,
            max_workers=8,
        )
        for number, least in enumerate((4, 3, 5, 1, 6, 2, 7, 3, 4, 5))
    )
    workload = Workload(
        name="equals", jobs=jobs, loads=(), nodes=parse_cluster("2x4+0x8"), length_s=2700
    )
    options = RunOptions(policy="qos-elasticflow", has_delays=True, saves=saves, check=True)
    found = play(workload, options, clock=SystemClock())
    assert (found.result.jobs, found.result.preemptions) == (len(jobs), 0)
    assert sum(row.resizes for row in found.rows) <= len(jobs)


def test_without_a_promise_the_earlier_deadline_goes_first() -> None:
    """Of jobs that gain as much the one that is due first gets the GPUs, whatever their names."""
    jobs = [waiting("a", 8, 1000.0, 20.0), waiting("z", 8, 1000.0, 10.0)]
    assert kinds(decided(jobs, f"{EXACT}:rejects=false")) == {"z": "Start"}


def test_without_a_promise_the_earlier_deadline_is_placed_first() -> None:
    """Four GPUs are free, but only one gang of two finds them on one node."""
    held = [
        structs.replace(make_job_view(name), preemptibility=Preemptibility.NON)
        for name in ("x", "y")
    ]
    workers = {
        "x": make_worker_view("x", 0, "n1", gpus=5),
        "y": make_worker_view("y", 0, "n2", gpus=7),
    }
    nodes = [
        make_node_view("n1", workers=[workers["x"]]),
        make_node_view("n2", workers=[workers["y"]]),
    ]
    fixed = [
        structs.replace(
            job,
            state=JobState.RUNNING,
            placed=(workers[job.job_id],),
            gpus_per_worker=workers[job.job_id].gpus,
            gpu_type="H100",
        )
        for job in held
    ]
    jobs = [waiting("a", 2, 1000.0, 20.0), waiting("z", 2, 1000.0, 10.0), *fixed]
    snapshot = make_snapshot(nodes=nodes, jobs=jobs)
    found = policy(f"{EXACT}:rejects=false").allocate(snapshot, b"")
    assert kinds(list(found.decisions)) == {"z": "Start"}


# --- with a promise -------------------------------------------------------------------------------


def test_a_promised_job_is_not_paused_where_its_work_would_be_lost() -> None:
    """A newcomer that needs such a pause is refused; where the other one saves it is admitted."""
    never = running({"b": 8}, left_s=1000.0, deadline_at_s=NOW_S + 3000.0)
    newcomer = waiting("a", 8, 1000.0, 1100.0)
    assert kinds(decided([newcomer, *never])) == {"a": "Reject"}
    saves = [job_with(job, saves_when_asked=True) for job in never]
    assert kinds(decided([newcomer, *saves])) == {"a": "Start", "b": "Preempt"}


def test_a_promised_job_begins_anew_where_both_are_in_time_all_the_same() -> None:
    """A stop that breaks no promise is worth a promise more, its work done over counted."""
    late = running({"b": 8}, left_s=1000.0, ran_s=100.0, deadline_at_s=NOW_S + 2200.0)
    newcomer = waiting("a", 8, 1000.0, 1010.0)
    assert kinds(decided([newcomer, *late])) == {"a": "Start", "b": "Preempt"}
    tight = [structs.replace(job, deadline_at_s=NOW_S + 2100.0) for job in late]
    assert kinds(decided([newcomer, *tight])) == {"a": "Reject"}


def test_what_cannot_be_stopped_now_is_planned_where_it_is() -> None:
    """A gang that still starts keeps its GPUs: nobody is promised them before its end."""
    starting = running(
        {"b": 8}, ran_s=0.0, left_s=1000.0, deadline_at_s=NOW_S + 9000.0, state=JobState.STARTING
    )
    assert kinds(decided([waiting("a", 8, 1000.0, 1100.0), *starting])) == {"a": "Reject"}
    assert kinds(decided([waiting("a", 8, 1000.0, 2100.0), *starting])) == {}


def claim(**more: object) -> Claim:
    """A job of one or two workers that does not pause."""
    fields = {
        "job_id": "c",
        "sizes": (1, 2),
        "rates": (1.0, 2.0),
        "gpus_per_worker": 1,
        "work_s": 3.0,
        "deadline_s": 10.0,
        "pauses": False,
    }
    return Claim(**{**fields, **more})  # type: ignore[arg-type]  # values of its fields


def gap(*, first: int = 1, last: int = 2) -> Timeline:
    """Two GPUs: some until 2, none until 4, some after."""
    line = Timeline(0.0, 2)
    line.take((Piece(0.0, 2.0, 2 - first), Piece(2.0, 4.0, 2), Piece(4.0, 99.0, 2 - last)), 1)
    return line


def test_a_plan_of_who_does_not_pause_has_no_gap() -> None:
    """Its work fits into one stretch or not at all; with pauses it would be spread over both."""
    assert fill(gap(), claim(), 0.0) == (Piece(4.0, 7.0, 1),)
    assert fill(gap(), claim(pauses=True), 0.0) == (Piece(0.0, 2.0, 1), Piece(4.0, 5.0, 1))
    assert fill(gap(), claim(deadline_s=5.0), 0.0) is None


def test_who_runs_and_does_not_pause_is_planned_from_now() -> None:
    """Later there would be room, but its work is here."""
    assert fill(gap(), claim(runs=True), 0.0) is None
    assert fill(gap(first=2), claim(runs=True), 0.0) == (Piece(0.0, 1.5, 2),)


def test_nobody_begins_what_a_promise_to_another_would_cut_short() -> None:
    """Idle GPUs until then are no use to a job that would have to begin anew after it."""
    assert greedily(gap(), claim(), 0.0, 1.0, 0) is None
    assert greedily(gap(), claim(pauses=True), 0.0, 1.0, 0) == (
        *(Piece(0.0, 1.0, 1), Piece(1.0, 2.0, 1), Piece(4.0, 5.0, 1)),
    )


def test_a_late_job_gives_up_what_it_held_for_its_promise() -> None:
    """A promise that cannot be kept any more keeps no GPUs from those that can."""
    late = claim(job_id="late", runs=True, work_s=30.0)
    in_time = claim(job_id="in time", sizes=(2,), rates=(2.0,), work_s=18.0)
    book = Book(0.0, 2, {})
    book.promise([late, in_time])
    assert [each.job_id for each in book.late] == ["late"]
    assert set(book.plans) == {"in time"}


def test_nobody_who_was_promised_is_stopped_to_spare_one_who_was_not() -> None:
    """Both run and would lose their work: the one with the promise goes on."""
    promised = claim(job_id="p", sizes=(2,), rates=(2.0,), runs=True, work_s=4.0, redo_s=4.0)
    soft = claim(job_id="s", runs=True, keeps=True, work_s=1.0, deadline_s=inf, stop_gpu_s=9.0)
    book = Book(0.0, 2, {})
    book.promise([promised], [soft])
    assert book.plans == {"p": (Piece(0.0, 2.0, 2),)}
    assert book.spared == []


def rigid(name: str, work_s: float, deadline_s: float, **more: object) -> Claim:
    """A job of one worker that does not pause."""
    return claim(
        job_id=name, sizes=(1,), rates=(1.0,), work_s=work_s, deadline_s=deadline_s, **more
    )


def test_a_late_job_costs_no_other_one_its_gang() -> None:
    """Two newcomers fit one after the other where the late one was: nobody else begins anew."""
    late = rigid("late", 99.0, 50.0, runs=True)
    runs = rigid("runs", 20.0, 60.0, runs=True, redo_s=5.0)
    book = Book(0.0, 2, {})
    book.promise([late, runs, rigid("w1", 10.0, 10.01), rigid("w2", 10.0, 20.01)])
    assert [each.job_id for each in book.late] == ["late"]
    assert book.plans["runs"] == (Piece(0.0, 20.0, 1),)


def test_a_kept_plan_behind_a_stop_counts_the_work_done_over() -> None:
    """It ran on in the meantime: a plan that begins later is too short for what it would lose."""
    runs = rigid("runs", 10.0, 16.0, runs=True, redo_s=5.0)
    book = Book(0.0, 1, {"runs": (Piece(5.0, 15.0, 1),)})
    book.promise([runs, rigid("new", 5.0, 5.01)])
    assert [each.job_id for each in book.late] == ["new"]
    enough = Book(0.0, 1, {"runs": (Piece(5.0, 20.0, 1),)})
    enough.promise([structs.replace(runs, deadline_s=21.0), rigid("new", 5.0, 5.01)])
    assert enough.late == []


def around_others() -> tuple[Claim, Claim, Claim]:
    """On two GPUs: one of them until 2, both until 4, and who would fit before and after."""
    first = rigid("first", 2.0, 2.01)
    both = claim(job_id="both", sizes=(2,), rates=(1.0,), work_s=2.0, deadline_s=4.01)
    return first, both, rigid("rest", 3.0, 5.01)


def test_a_kept_plan_with_a_gap_is_none_for_who_does_not_pause() -> None:
    """It was planned as one that saves, and is no such job any more."""
    kept: Plans = {"rest": (Piece(0.0, 2.0, 1), Piece(4.0, 5.0, 1))}
    book = Book(0.0, 2, kept)
    book.promise(around_others())
    assert [each.job_id for each in book.late] == ["rest"]


def test_idle_gpus_are_not_begun_on_before_they_are_promised() -> None:
    """One GPU idles for two of the three seconds that it would need."""
    first, both, rest = around_others()
    book = Book(0.0, 2, {})
    book.promise([first, both, structs.replace(rest, deadline_s=9.0)])
    given = Sharing(book, (), now_s=0.0, gpus=2, slot_s=60.0).share()
    assert given == {"first": 1, "both": 0, "rest": 0}


def test_what_nobody_was_given_is_lent_once() -> None:
    """To whoever needs no more than that, and what one was lent no other is."""
    book = Book(0.0, 4, {})
    book.promise([rigid("only", 2.0, 2.01)])
    sharing = Sharing(book, (), now_s=0.0, gpus=4, slot_s=60.0)
    assert sharing.share() == {"only": 1}
    assert [sharing.lend(gpus) for gpus in (4, 2, 2, 1, 1)] == [False, True, False, True, False]


@pytest.mark.parametrize(("grown", "waits"), [("a", "z"), ("z", "a")])
def test_base_gangs_come_before_growth_that_saves_nothing(grown: str, waits: str) -> None:
    """Twice the workers for half the time save no GPU time, nor does what rounding makes of it."""
    now_s = 1_000_000.1
    for work in range(1, 60):
        fields = {"sizes": (3, 6), "rates": (3.0, 6.0), "deadline_s": inf, "work_s": work * 100.1}
        runs = claim(job_id=grown, runs=True, keeps=True, **fields)
        book = Book(now_s, 6, {})
        book.promise([], [runs])
        soft = [runs, claim(job_id=waits, **fields)]
        given = Sharing(book, soft, now_s=now_s, gpus=6, slot_s=60.0).share()
        assert given == {grown: 3, waits: 3}
