"""Tiresias' queues: who stands where, and when a job changes its queue by itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from common.model import GpuRequest, JobId, JobState
from coordinator.policies.contract.decisions import Preempt
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.tiresias.policy import TiresiasKnobs
from coordinator.policies.schedulers.tiresias.queues import (
    Line,
    QueueKnobs,
    QueueMemory,
    Queues,
)
from tests.draws import pick
from tests.harness.builders import NOW_S, job_with
from tests.harness.served import cell, changed
from tests.harness.served import served_job as job
from tests.strategies import snapshots

often = settings(max_examples=100, deadline=None)

# --- queues -------------------------------------------------------------------------------------


def test_less_service_takes_the_gpus_of_more() -> None:
    """A job of a former queue stops one of a later queue, never one of its own."""
    old = job("old", 8, node="n0", served=3600.0, first_s=0.0)
    assert changed(cell([old, job("new", 8)], n0=8), "tiresias") == (["old"], ["new"])
    young = job("young", 8, node="n0", served=3500.0, first_s=0.0)
    assert changed(cell([young, job("new", 8)], n0=8), "tiresias") == ([], [])


@pytest.mark.parametrize(("short_s", "is_over"), [(0.0009, True), (0.0011, False)])
def test_a_wake_at_the_limit_finds_the_job_beyond_it(short_s: float, *, is_over: bool) -> None:
    """Sums of seconds are off by rounding: who lacks less than a millisecond of its GPUs' time is
    over the limit, and who lacks more is not."""
    old = job("old", 8, node="n0", served=3600.0 - 8 * short_s, first_s=0.0)
    expected = (["old"], ["new"]) if is_over else ([], [])
    assert changed(cell([old, job("new", 8)], n0=8), "tiresias") == expected


def test_service_is_gpus_times_time() -> None:
    """Eight GPUs reach the limit in an eighth of the time: the wake is then, to the second."""
    waits = job("waits", 8)
    for gpus, after_s in ((8, 450.0), (4, 900.0)):
        snapshot = cell([job("runs", gpus, node="n0", first_s=0.0), waits], n0=8)
        allocation = policy("tiresias").allocate(snapshot, b"")
        assert allocation.wake_at_s == NOW_S + after_s


def test_while_nobody_waits_no_wake_is_asked_for() -> None:
    """Who stands where does not matter then, and whatever comes makes a pass."""
    snapshot = cell([job("runs", 4, node="n0", first_s=0.0)], n0=8)
    assert policy("tiresias").allocate(snapshot, b"").wake_at_s is None
    # The order of entry depends on when each job came into its queue.
    assert policy("tiresias:line=entry").allocate(snapshot, b"").wake_at_s == NOW_S + 900.0


def test_a_job_that_still_starts_is_woken_for_as_if_it_ran() -> None:
    """Its limit comes no sooner than it would computing from now on."""
    snapshot = cell([job("starts", 8), job("waits", 8, submitted_at_s=1.0)], n0=8)
    assert policy("tiresias").allocate(snapshot, b"").wake_at_s == NOW_S + 450.0


def test_a_worker_that_counts_twice_reaches_the_limit_twice_as_soon() -> None:
    """On slower GPUs a gang has more of them: what computes counts, not the gang that was asked
    for; of one that still starts, the most that it could have on any type."""
    slower = GpuRequest(worker_multiplier={"T4": 2})
    waits = job("waits", 8, submitted_at_s=1.0)
    runs = job_with(job("runs", 4, node="n0", first_s=0.0), gpu=slower, computing_gpus=8)
    starts = job_with(job("starts", 4), gpu=slower, computing_gpus=0)
    for each in (runs, starts):
        queues = Queues(QueueKnobs(), cell([each, waits], n0=8), QueueMemory())
        assert queues.wake_at_s([each], [waits]) == NOW_S + 450.0


def test_within_a_queue_the_first_start_counts() -> None:
    """Who started first goes on; who never started stands behind, by submission."""
    jobs = [
        job("late", 4, served=10.0, first_s=500.0),
        job("early", 4, served=3000.0, first_s=400.0, submitted_at_s=9.0),
        job("new2", 4, submitted_at_s=2.0),
        job("new1", 4, submitted_at_s=1.0),
    ]
    assert changed(cell(jobs, n0=4), "tiresias") == ([], ["early"])
    assert changed(cell(jobs, n0=16), "tiresias")[1] == ["early", "late", "new1", "new2"]
    assert changed(cell(jobs[2:], n0=4), "tiresias") == ([], ["new1"])


LITERAL = "tiresias:line=first-start"
"""The paper's order of a queue, in which a job may stop one of its own queue."""


def test_a_job_that_does_not_fit_is_skipped() -> None:
    """Others run beside it (pseudocode 2), until those behind it have enough for it."""
    wide = job("wide", 8, served=5000.0, first_s=1.0)
    small = job("small", 2, node="n0", served=9000.0, first_s=2.0)
    first = job("first", 4, node="n0", served=10.0, first_s=3.0)
    assert changed(cell([wide, small, first], n0=8), LITERAL) == ([], [])
    assert changed(cell([wide, small], n0=8), LITERAL) == (["small"], ["wide"])


LINES = {"first-start": (["runs"], ["early"]), "running": ([], []), "entry": ([], [])}


@pytest.mark.parametrize("line", sorted(LINES))
def test_the_order_of_a_queue_is_a_knob(line: str) -> None:
    """By first start a job of the same queue is stopped; where who runs is first it is not."""
    jobs = [
        job("early", 8, served=5000.0, first_s=1.0),
        job("runs", 8, node="n0", served=9000.0, first_s=2.0),
    ]
    assert changed(cell(jobs, n0=8), f"tiresias:line={line}") == LINES[line]


def test_the_order_of_entry_is_remembered() -> None:
    """Who came into the queue first stays before who came later, whoever started first."""
    made = policy("tiresias:line=entry")
    first = job("z-first", 8, served=5000.0, first_s=9.0)
    memory = made.allocate(cell([first], n0=4), b"").memory
    second = job("a-second", 8, served=9000.0, first_s=1.0)
    snapshot = cell([first, second], n0=8, now_s=NOW_S + 1.0)
    assert changed(snapshot, "tiresias:line=entry", memory) == ([], ["z-first"])
    assert changed(snapshot, "tiresias", memory) == ([], ["a-second"])


def test_in_the_order_of_entry_who_runs_goes_to_the_front() -> None:
    """From then on it stands before those that came first and wait, also when it waits again."""
    knobs = QueueKnobs(line=Line.ENTRY)
    waits = [job(name, 8, submitted_at_s=at_s) for name, at_s in (("z", 1.0), ("y", 2.0))]
    memory = QueueMemory()
    for step, node in enumerate((None, "n0", None)):
        jobs = [*waits, job("x", 8, node=node, submitted_at_s=3.0)]
        queues = Queues(knobs, cell(jobs, n0=8, now_s=NOW_S + step), memory)
        memory = queues.memory
        line = sorted(jobs, key=queues.rank)
        assert [each.job_id for each in line] == (["x", "z", "y"] if step else ["z", "y", "x"])


def test_units_are_mixed_only_where_asked() -> None:
    """The public simulator looks again at (3250 - 0) / 4 whole seconds, when 3248 GPU-s are had."""
    runs, waits = job("runs", 4, node="n0", first_s=0.0), job("waits", 8)
    knobs = "tiresias:limits=3250:line=entry"
    exact = policy(knobs).allocate(cell([runs, waits], n0=8), b"")
    assert exact.wake_at_s == NOW_S + 812.5
    mixed = policy(f"{knobs}:mixes_units=true")
    assert mixed.allocate(cell([runs, waits], n0=8), b"").wake_at_s == NOW_S + 812.0
    later = job("runs", 4, node="n0", served=3248.0, first_s=0.0)
    # (3250 GPU-s - 812 s) / 4 GPUs: ten minutes late.
    assert mixed.allocate(cell([later, waits], n0=8), b"").wake_at_s == NOW_S + 609.0


# --- back to the first queue --------------------------------------------------------------------


def test_a_long_wait_takes_a_job_back() -> None:
    """Having waited `promote` times as long as it ran it is in the first queue, and not before."""
    runs = job("runs", 8, node="n0", served=100.0, first_s=5.0)
    for waited_s, expected in ((1799.0, ([], [])), (1800.0, (["runs"], ["waits"]))):
        waits = job("waits", 8, served=7200.0, first_s=1.0, waits_since_s=NOW_S - waited_s)
        assert changed(cell([runs, waits], n0=8), f"{LITERAL}:promote=2") == expected
        assert changed(cell([runs, waits], n0=8), "tiresias") == ([], [])


def test_back_in_the_first_queue_its_service_counts_from_zero() -> None:
    """It keeps the GPUs for a whole limit, however much it had attained."""
    made = policy("tiresias:promote=2")
    waits = job("waits", 8, served=7200.0, first_s=1.0, waits_since_s=NOW_S - 1800.0)
    memory = made.allocate(cell([waits], n0=8), b"").memory
    for served, stops in ((7200.0 + 3599.0, []), (7200.0 + 3600.0, ["waits"])):
        runs = job("waits", 8, node="n0", served=served, first_s=1.0)
        new = job("new", 8)
        assert changed(cell([runs, new], n0=8), "tiresias:promote=2", memory)[0] == stops


@pytest.mark.parametrize(("waited_s", "number"), [(199.0, 1), (200.0, 0)])
def test_a_second_return_counts_the_service_since_the_first(waited_s: float, number: int) -> None:
    """A return sets both waiting and running time of a job to nothing: with `promote` 2 a job of
    one GPU and 300 GPU-s, 200 of them before its first return, has run for 100 s and waits 200."""
    waits = job("waits", 1, served=300.0, first_s=1.0, waits_since_s=NOW_S - waited_s)
    knobs = QueueKnobs(limits=(100.0,), promote=2.0)
    memory = QueueMemory(promoted={JobId("waits"): 200.0})
    queues = Queues(knobs, cell([waits], n0=8), memory)
    assert queues.number(waits) == number
    # After the second return, too, its service begins at 0.
    is_back = number == 0
    assert queues.service_gpu_s(waits) == (0.0 if is_back else 100.0)
    assert queues.memory.promoted == {JobId("waits"): 300.0 if is_back else 200.0}


numbers = st.floats(0.0, 20_000.0)


@st.composite
def queue_knobs(draw: st.DrawFn) -> QueueKnobs:
    """Up to three limits, with or without promotions."""
    limits = draw(st.sets(st.integers(1, 150).map(lambda n: 100.0 * n), max_size=3))
    promote = draw(pick(0.5, 1.0, 8.0, None))
    line = draw(pick(Line.FIRST_START, Line.RUNNING, Line.ENTRY))
    return QueueKnobs(limits=tuple(sorted(limits)), promote=promote, line=line)


@often
@given(knobs=queue_knobs(), served=numbers, gpus=st.sampled_from((1, 3, 8)))
def test_a_queue_is_left_at_its_limit_exactly(knobs: QueueKnobs, served: float, gpus: int) -> None:
    """At the wake the job is in the next queue, a second of its time before it is not."""
    runs, waits = job("runs", gpus, node="n0", served=served), job("waits", 8)
    queues = Queues(knobs, cell([runs, waits], n0=8), QueueMemory())
    number, wake_at_s = queues.number(runs), queues.wake_at_s([runs], [waits])
    if number == len(knobs.limits):
        assert wake_at_s is None
        return
    assert wake_at_s is not None
    assert knobs.limits[number] == pytest.approx(served + gpus * (wake_at_s - NOW_S))
    for at_s, expected in ((wake_at_s, number + 1), (max(NOW_S, wake_at_s - 1.0), number)):
        then = Queues(knobs, cell([runs, waits], n0=8, now_s=at_s), QueueMemory())
        assert then.number(runs) == expected


@often
@given(knobs=queue_knobs(), served=st.lists(numbers, min_size=2).map(sorted))
def test_service_never_takes_a_job_up(knobs: QueueKnobs, served: list[float]) -> None:
    """Without a wait, queues only go down as service grows, one pass after the other."""
    memory, before = QueueMemory(), 0
    for step, each in enumerate(served):
        runs = job("runs", 8, node="n0", served=each)
        at_s = NOW_S + step
        runs = structs.replace(runs, as_of_s=at_s)
        queues = Queues(knobs, cell([runs], n0=8, now_s=at_s), memory)
        memory = queues.memory
        assert queues.number(runs) >= before
        before = queues.number(runs)


@often
@given(knobs=queue_knobs(), served=numbers, waited_s=st.floats(0.0, 1e6), gpus=st.integers(1, 8))
def test_a_wait_is_bounded_by_promotion(
    knobs: QueueKnobs, served: float, waited_s: float, gpus: int
) -> None:
    """Whoever waits in a later queue has waited less than `promote` times as long as it ran, and
    the instant at which that ends is asked for."""
    waits = job("waits", gpus, served=served, first_s=1.0, waits_since_s=NOW_S - waited_s)
    snapshot = cell([waits], n0=1)
    queues = Queues(knobs, snapshot, QueueMemory())
    if queues.number(waits) == 0:
        return
    wake_at_s = queues.wake_at_s([], [waits])
    if knobs.promote is None:
        assert wake_at_s is None
        return
    ran_s = served / waits.base_gpus
    assert waited_s < knobs.promote * ran_s
    assert wake_at_s == pytest.approx(NOW_S - waited_s + knobs.promote * ran_s)
    assert wake_at_s is not None
    then = Queues(knobs, cell([waits], n0=1, now_s=wake_at_s), queues.memory)
    assert then.number(waits) == 0
    assert then.service_gpu_s(waits) == 0.0


def test_who_never_ran_is_in_the_first_queue_by_submission() -> None:
    """However long it waits it is not promoted, as it is where it can be."""
    knobs = QueueKnobs(limits=(1.0, 2.0), promote=1.0)
    jobs = [job(name, submitted_at_s=at_s) for name, at_s in (("a", 3.0), ("b", 2.0))]
    queues = Queues(knobs, cell(jobs, n0=1), QueueMemory())
    assert [queues.number(each) for each in jobs] == [0, 0]
    assert queues.memory.promoted == {}
    assert changed(cell(jobs, n0=1), "tiresias") == ([], ["b"])


# --- over generated clusters --------------------------------------------------------------------


@st.composite
def served_snapshots(draw: st.DrawFn) -> ClusterSnapshot:
    """Clusters in which jobs have attained something."""
    snapshot = draw(snapshots())
    jobs = tuple(
        job_with(
            each,
            attained_gpu_s=served,
            as_of_s=snapshot.now_s,
            first_started_at_s=draw(st.floats(0.0, 1000.0)) if served else None,
            waiting_since_s=draw(st.floats(0.0, snapshot.now_s))
            if each.state == JobState.PENDING
            else None,
        )
        for each in snapshot.jobs
        for served in [draw(pick(0.0, 100.0, 3599.0, 3600.0, 50_000.0))]
    )
    return structs.replace(snapshot, jobs=jobs)


@often
@given(
    snapshot=served_snapshots(),
    name=st.sampled_from(("tiresias", "tiresias-gittins", "tiresias:line=running:promote=4")),
)
def test_no_victim_stands_before_its_beneficiary(snapshot: ClusterSnapshot, name: str) -> None:
    """Queues are not inverted: each victim makes room for a job of no later queue, and of a former
    one where whoever runs is first; what it leaves over may go to others."""
    knobs = policy(name).knobs
    assert isinstance(knobs, TiresiasKnobs)
    queues = Queues(knobs, snapshot, QueueMemory())
    jobs = {each.job_id: each for each in snapshot.jobs}

    def stand(name: str) -> tuple[int, int]:
        return -jobs[JobId(name)].priority, queues.number(jobs[JobId(name)])

    for decision in policy(name).allocate(snapshot, b"").decisions:
        if isinstance(decision, Preempt):
            first = min(stand(taker) for taker in decision.beneficiary.split(", "))
            assert first <= stand(decision.job_id)
            assert knobs.line != Line.RUNNING or first < stand(decision.job_id)
