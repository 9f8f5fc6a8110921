"""ElasticFlow's promises: who is admitted is in time, and who is not is told the earliest date."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from common.clock import SystemClock
from common.model import JobState, Pool
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Allocation, Reject, Start
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.admission import Book
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from coordinator.policies.schedulers.qos.timeline import Piece
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import Run, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import NodeGroup, ScalingCurve, TraceJob, Workload
from coordinator.workloads.shaping import RuntimeModel
from tests.harness.builders import NOW_S, job_with, make_job_view, make_node_view, make_snapshot

EXACT = "qos-elasticflow:margin=1"
CURVES = {
    ("even", 1): (1.0, 2.0, 4.0, 8.0),
    ("flat", 1): (1.0, 1.6, 2.2, 2.5),
    ("worse", 1): (1.0, 0.8, 1.1, 0.6),
    ("super", 1): (1.0, 2.3, 4.1, 5.0),
}
MEASURED = {
    key: ScalingCurve(
        model=key[0],
        batch_size=1,
        gpu_type="V100",
        points=tuple(zip((1, 2, 4, 8), rates, strict=True)),
    )
    for key, rates in CURVES.items()
}


def trace_job(number: int, at_s: float, work_s: float, deadline_s: float, model: str) -> TraceJob:
    """A job that may have any number of workers of one GPU, and takes `work_s` on one."""
    return TraceJob(
        job_id=f"j{number}",
        submit_s=at_s,
        duration_s=work_s,
        gpus=1,
        gpus_per_worker=1,
        min_workers=1,
        max_workers=8,
        model=model,
        batch_size=1,
        iterations=work_s,
        deadline_s=deadline_s or None,
    )


def run(jobs: list[TraceJob], text: str = EXACT) -> Run:
    """Two nodes of four GPUs, nothing takes time, curves are exact."""
    workload = Workload(
        name="small",
        jobs=tuple(jobs),
        loads=(),
        nodes=(NodeGroup(count=2, gpus=4, gpu_type="V100", home_pool=Pool.TRAINING),),
        length_s=jobs[-1].submit_s,
    )
    options = RunOptions(
        policy=text,
        has_delays=False,
        saves=Saves.ON_REQUEST,
        tells_progress=False,
        speedup=RuntimeModel.TABLE,
        curves=MEASURED,
        check=True,
    )
    return play(workload, options, clock=SystemClock())


def met(found: Run) -> int:
    """Jobs that met their deadline."""
    return round((found.result.deadlines_met_ratio or 0.0) * found.result.jobs)


JOBS = st.lists(
    st.tuples(
        st.integers(0, 200),
        st.integers(1, 400),
        st.integers(1, 400),
        st.sampled_from(sorted(model for model, _ in CURVES)),
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(JOBS)
@example([(0, 400, 400, "even"), (0, 399, 200, "super"), (1, 300, 100, "flat")])
def test_who_is_admitted_is_in_time(rows: list[tuple[int, int, int, str]]) -> None:
    """Every job that was not rejected meets its deadline, whoever comes after it."""
    jobs = [
        trace_job(number, float(at_s), float(work_s), float(deadline_s), model)
        for number, (at_s, work_s, deadline_s, model) in enumerate(sorted(rows))
    ]
    found = run(jobs)
    assert met(found) == len(jobs) - found.result.jobs_rejected
    assert len(found.rows) == len(jobs) - found.result.jobs_rejected


@settings(max_examples=40, deadline=None)
@given(JOBS)
@example([(77, 390, 185, "flat"), (85, 370, 160, "flat")])
@example([(45, 398, 232, "flat"), (96, 308, 131, "flat"), (150, 270, 336, "flat")])
@example([(62, 156, 66, "even"), (74, 307, 48, "even"), (2, 248, 154, "flat")])
def test_who_is_let_in_without_a_promise_breaks_none(
    rows: list[tuple[int, int, int, str]],
) -> None:
    """`rejects=false`: all run to their end, and nobody is stopped for one that was refused."""
    jobs = [
        trace_job(number, float(at_s), float(work_s), float(deadline_s), model)
        for number, (at_s, work_s, deadline_s, model) in enumerate(sorted(rows))
    ]
    found = run(jobs, f"{EXACT}:rejects=false")
    assert len(found.rows) == len(jobs)
    assert not found.result.promises_missed  # None where nothing was promised


@settings(max_examples=30, deadline=None)
@given(JOBS, st.integers(1, 300))
def test_best_effort_jobs_break_no_promise(
    rows: list[tuple[int, int, int, str]], work_s: int
) -> None:
    """Jobs without a deadline run to their end, and change nothing of who is in time."""
    jobs = [
        trace_job(number, float(at_s), float(work_s), float(deadline_s), model)
        for number, (at_s, work_s, deadline_s, model) in enumerate(sorted(rows))
    ]
    soft = [trace_job(100 + number, 0.0, float(work_s), 0.0, "even") for number in range(3)]
    found = run(sorted([*jobs, *soft], key=lambda job: job.submit_s))
    late = [
        row.job_id
        for row in found.rows
        for job in jobs
        if job.job_id == row.job_id and row.jct_s > (job.deadline_s or 0.0)
    ]
    assert late == []
    assert {job.job_id for job in soft} <= {row.job_id for row in found.rows}


def test_where_capacity_suffices_all_are_in_time() -> None:
    """Eight jobs that one GPU each does in time are all admitted and all in time."""
    found = run([trace_job(n, 0.0, 100.0, 100.1, "even") for n in range(8)])
    assert (found.result.deadlines_met_ratio, found.result.jobs_rejected) == (1.0, 0)


def test_one_too_many_is_rejected_and_the_others_are_in_time() -> None:
    """Eight GPUs for 100 s hold eight such jobs; the ninth would break a promise."""
    found = run([trace_job(n, 0.0, 100.0, 100.1, "even") for n in range(9)])
    assert (met(found), found.result.jobs_rejected) == (8, 1)
    assert (found.result.promised, found.result.promises_missed) == (8, 0)


def test_spare_gpus_end_jobs_before_their_deadline() -> None:
    """What the minimum shares leave is given out: alone a job gets all eight GPUs."""
    found = run([trace_job(0, 0.0, 80.0, 100.0, "even")])
    assert found.rows[0].jct_s == 10.0


def test_the_spare_gpus_go_where_they_cost_least() -> None:
    """By the paper's sign: the job that scales gets what the flat one would waste."""
    found = run([trace_job(0, 0.0, 70.0, 200.0, "flat"), trace_job(1, 0.0, 70.0, 200.0, "even")])
    flat, even = sorted(found.rows, key=lambda row: row.job_id)
    assert even.jct_s < 70.0 / 4.0 + 1.0
    assert flat.jct_s > even.jct_s


def test_a_size_that_is_slower_is_never_used() -> None:
    """A curve that falls from one GPU to two is used at one: nothing is gained by more."""
    found = run([trace_job(0, 0.0, 70.0, 200.0, "worse")])
    assert (found.rows[0].jct_s, found.rows[0].resizes) == (70.0, 0)


# --- single passes --------------------------------------------------------------------------------


def view(
    name: str, work_s: float, deadline_s: float | None, *, workers: tuple[int, int] = (1, 4)
) -> JobView:
    """A waiting job; `deadline_s` from now."""
    at_s = None if deadline_s is None else NOW_S + deadline_s
    job = make_job_view(name, workers=workers, remaining_work_s=work_s, submitted_at_s=NOW_S)
    profile = JobProfile(speedup=((1, 1.0), (2, 1.5), (4, 2.0)))
    return job_with(job, deadline_at_s=at_s, profile=profile, estimated_left_s=work_s)


def one_pass(*jobs: JobView, gpus: int = 4, text: str = EXACT) -> Allocation:
    """What is decided on one node."""
    snapshot = make_snapshot(nodes=[make_node_view("n", gpus=gpus)], jobs=jobs)
    return policy(text).allocate(snapshot, b"")


def rejects(found: Allocation) -> dict[str, float | None]:
    """Who is rejected, and the earliest deadline that is named."""
    return {d.job_id: d.earliest_s for d in found.decisions if isinstance(d, Reject)}


def test_the_earliest_deadline_named_is_the_earliest_admitted() -> None:
    """A job that asks again for the date that it was told is admitted; for one second less, not."""
    taken = view("a", 100.0, 50.1)
    told = rejects(one_pass(taken, view("b", 60.0, 55.0)))["b"]
    assert told is not None
    assert rejects(one_pass(taken, view("b", 60.0, told))) == {}
    assert rejects(one_pass(taken, view("b", 60.0, told - 1.0))) == {"b": told}


def test_the_reason_names_both_dates() -> None:
    """Whoever is rejected reads what was asked for and what could be promised."""
    found = one_pass(view("a", 100.0, 10.0))
    reason = next(d.reason for d in found.decisions if isinstance(d, Reject))
    assert re.search(r"deadline 10 s .* earliest .* 51 s after submission", reason)


def test_a_gang_that_never_fits_is_told_so() -> None:
    """No date is named where none can be."""
    found = one_pass(view("a", 10.0, 1000.0, workers=(8, 8)))
    assert rejects(found) == {"a": None}


def test_a_job_without_a_deadline_is_never_rejected() -> None:
    """Best effort stays best effort: it starts on what is left."""
    found = one_pass(view("a", 1e6, None))
    assert [type(d) for d in found.decisions] == [Start]


def test_without_rejections_a_hopeless_job_runs_late() -> None:
    """`rejects=false`: deadlines are soft, and the job starts without a promise."""
    found = one_pass(view("a", 1e6, 10.0), text=f"{EXACT}:rejects=false")
    assert [type(d) for d in found.decisions] == [Start]


def test_who_was_promised_a_deadline_is_not_rejected_when_it_is_late() -> None:
    """A promise that cannot be kept any more is broken, not taken back as if it had never been."""
    urgent, later = view("a", 200.0, 100.1), view("b", 100.0, 200.0)
    first = one_pass(urgent, later)
    assert [d.job_id for d in first.decisions if isinstance(d, Start)] == ["a"]
    memory, longer = first.memory, job_with(later, estimated_left_s=1e4)
    for at_s in (10.0, 20.0):
        snapshot = make_snapshot(nodes=[make_node_view("n", gpus=4)], jobs=[urgent, longer])
        found = policy(EXACT).allocate(structs.replace(snapshot, now_s=NOW_S + at_s), memory)
        assert rejects(found) == {}
        memory = found.memory
    alone = structs.replace(snapshot, jobs=(longer,), now_s=NOW_S + 30.0)
    started = [d for d in policy(EXACT).allocate(alone, memory).decisions if isinstance(d, Start)]
    assert [(d.job_id, d.is_promised) for d in started] == [("b", True)]


@pytest.mark.parametrize(
    ("deadline_s", "is_promised"), [(100.1, True), (10.0, False), (None, False)]
)
def test_a_start_says_whether_its_deadline_was_promised(
    deadline_s: float | None, is_promised: bool
) -> None:
    """Only who was admitted has a promise; a soft deadline, or none, is no promise."""
    found = one_pass(view("a", 200.0, deadline_s), text=f"{EXACT}:rejects=false")
    assert [d.is_promised for d in found.decisions if isinstance(d, Start)] == [is_promised]


def test_a_job_that_has_run_is_not_rejected() -> None:
    """Whatever let it in, a job that was preempted waits; it has lost its deadline at most."""
    job = job_with(view("a", 1e6, 10.0), first_started_at_s=0.0)
    assert rejects(one_pass(job)) == {}


def test_together_means_all_or_none() -> None:
    """`admits_together`: one that does not fit takes the others of its round with it."""
    jobs = (view("a", 10.0, 50.0), view("b", 1e6, 50.0))
    assert set(rejects(one_pass(*jobs))) == {"b"}
    assert set(rejects(one_pass(*jobs, text=f"{EXACT}:admits_together=true"))) == {"a", "b"}


def test_in_a_round_nothing_is_settled_anew() -> None:
    """Until the round is over a newcomer waits, unless a plan says that something must change."""
    text = f"{EXACT}:round_s=60"
    first = one_pass(view("a", 100.0, None), text=text)
    node = make_node_view("n", gpus=4)
    later = make_snapshot(nodes=[node], jobs=[view("b", 10.0, None)], now_s=NOW_S + 59.0)
    assert policy(text).allocate(later, first.memory).decisions == ()
    after = structs.replace(later, now_s=NOW_S + 60.0)
    assert len(policy(text).allocate(after, first.memory).decisions) == 1


def test_a_waiting_job_is_told_what_it_was_promised() -> None:
    """Who is promised a later start reads when it is, and with how many workers."""
    urgent, later = view("a", 200.0, 100.1), view("b", 10.0, 400.0)
    snapshot = make_snapshot(nodes=[make_node_view("n", gpus=4)], jobs=[urgent, later])
    holds = {hold.job_id: hold.blockers for hold in policy(EXACT).pending_reasons(snapshot, b"")}
    assert "promised" in holds[later.job_id][0]
    assert urgent.job_id not in holds
    assert later.state == JobState.PENDING


# --- promises -------------------------------------------------------------------------------------

FLAT, STEEP = (1.0, 1.5, 2.0), (1.0, 2.0, 2.5)
TIGHT = (("0", 12.0, 8.01, FLAT), ("2", 4.0, 6.01, FLAT), ("3", 9.0, 7.01, STEEP))
"""Three jobs on four GPUs that fit, but not as the greedy order of deadlines plans them."""


def claims() -> list[Claim]:
    """As `TIGHT` has them."""
    return [
        Claim(
            job_id=name,
            sizes=(1, 2, 4),
            rates=rates,
            gpus_per_worker=1,
            work_s=work_s,
            deadline_s=deadline_s,
        )
        for name, work_s, deadline_s, rates in TIGHT
    ]


def test_a_newcomer_may_fit_around_the_plans_that_hold() -> None:
    """The greedy plan of all three fails; the third is admitted beside the first two's plans."""
    book = Book(0.0, 4, {})
    book.promise([])
    assert [book.admit([claim]) for claim in claims()] == [True, True, True]
    for claim in book.claims:
        assert claim.done_by(book.plans[claim.job_id], 0.0) == claim.work_s
    assert min(free for _, free in book.room().pool.steps()) >= 0


def test_a_promise_outlives_a_greedy_plan_that_would_break_it() -> None:
    """Planned anew one of the three would be late; the plans that were kept still hold them all."""
    before = Book(0.0, 4, {})
    before.promise([])
    for claim in claims():
        before.admit([claim])
    forgetful, faithful = Book(0.0, 4, {}), Book(0.0, 4, before.plans)
    forgetful.promise(claims())
    faithful.promise(claims())
    assert (len(forgetful.late), len(faithful.late)) == (1, 0)


def test_a_kept_plan_that_falls_short_is_no_plan() -> None:
    """A job that fell behind its plan is planned anew, or is late and holds nothing in vain."""
    [first, *_] = claims()
    slow = structs.replace(first, work_s=100.0)
    book = Book(0.0, 4, {"0": (Piece(0.0, 8.0, 2),)})
    book.promise([slow])
    assert [claim.job_id for claim in book.late] == ["0"]
    assert [free for _, free in book.room().pool.steps()] == [4]


def test_the_last_gpu_goes_to_the_job_that_wastes_less_of_it() -> None:
    """By the paper's sign: of two jobs the one that scales gets the third GPU."""
    even = structs.replace(view("b", 70.0, 400.0), profile=JobProfile())
    found = one_pass(view("a", 70.0, 400.0), even, gpus=3)
    workers = {
        d.job_id: sum(placement.worker_count for placement in d.placements)
        for d in found.decisions
        if isinstance(d, Start)
    }
    assert workers == {"a": 1, "b": 2}
