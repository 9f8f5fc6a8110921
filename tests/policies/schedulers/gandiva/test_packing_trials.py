"""Gandiva's packing trials (OSDI'18, 3.3 and 4.2): who is left out of them, what is measured for
them, and how one ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, Preemptibility
from coordinator.policies.contract.decisions import Decision, Migrate, Suspend
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.schedulers.gandiva.board import Board
from coordinator.policies.schedulers.gandiva.packing import Mark, Pair
from coordinator.policies.schedulers.gandiva.packing import measured as marks_of
from coordinator.policies.schedulers.gandiva.policy import Knobs, Memory, allocate
from tests.harness.builders import NOW_S, job_with
from tests.policies.schedulers.gandiva.test_packing_costs import (
    HAS_BYTES,
    measured,
    memory_of,
    trials,
)
from tests.policies.schedulers.gandiva.test_policy_costs import cell, seated
from tests.tables import each_row

HERE, THERE = ("n0", 0), ("n1", 0)
"""Two GPUs, each the only one of its node."""


def full(jobs: Sequence[JobView], *, tenants: Sequence[str] = ()) -> ClusterSnapshot:
    """Nodes n0 and n1, or the first alone where all are on it; no GPU is free."""
    found = cell(jobs, len({worker.node for job in jobs for worker in job.placed}), tenants=tenants)
    return replace(found, nodes=tuple(replace(node, gpus=1, free_gpus=0) for node in found.nodes))


def tried(snapshot: ClusterSnapshot) -> dict[str, str]:
    """Who is put beside whom, where all were measured alone and nobody was tried before."""
    found = trials(snapshot, memory_of(snapshot), Knobs())
    return {name: made.reason.split()[3].rstrip(":") for name, made in found.items()}


def with_memory(snapshot: ClusterSnapshot, *has_bytes: int) -> ClusterSnapshot:
    """The same where the GPUs of n0, n1 and so on have so much memory."""
    nodes = zip(snapshot.nodes, has_bytes, strict=True)
    return replace(
        snapshot,
        nodes=tuple(replace(node, gpu_memory_bytes=each) for node, each in nodes),
    )


# --- who is left out ----------------------------------------------------------------------------


@each_row("word", list(Preemptibility))
@each_row("whose", ["host", "guest"])
def test_who_did_not_agree_to_be_stopped_takes_part_in_no_trial(
    whose: str, word: Preemptibility
) -> None:
    """A trial takes half of its GPU from the host, and may move the guest: of two hosts the less
    busy one is passed over where it did not agree to `full`, and a guest that did not stays."""
    jobs = {
        "host": measured(seated("host", [THERE]), busy=0.1),
        "next": measured(seated("next", [HERE]), busy=0.6),
        "guest": measured(seated("guest", [HERE], computes=False)),
    }
    jobs[whose] = replace(jobs[whose], preemptibility=word)
    agreed = word == Preemptibility.FULL
    found = tried(full(list(jobs.values())))
    if whose == "host":
        assert found == {"guest": "host" if agreed else "next"}
    else:
        assert found == ({"guest": "host"} if agreed else {})


@each_row(("has_bytes", "fits"), [((80, 60), True), ((80, 59), False), ((0, 59), False)])
@each_row("is_turned", [False, True])
def test_both_must_fit_on_the_smallest_gpu_of_the_gang(
    has_bytes: tuple[int, int], fits: bool, is_turned: bool
) -> None:
    """Each worker needs 30 bytes: a gang on two nodes has no guest where the two do not fit on the
    GPU of one of them, be it the first or the second one; also if the other's is not known."""
    jobs = [
        measured(seated(name, [HERE, THERE], computes=name == "host"), needs_bytes=30)
        for name in ("host", "guest")
    ]
    there = with_memory(full(jobs), *(reversed(has_bytes) if is_turned else has_bytes))
    assert tried(there) == ({"guest": "host"} if fits else {})


@each_row("has_bytes", [HAS_BYTES, 0])
@each_row("untold", ["host", "guest"])
def test_who_does_not_tell_its_memory_is_tried_only_where_the_gpu_s_is_not_known(
    untold: str, has_bytes: int
) -> None:
    """That the other one needs next to nothing does not make up for it: it might need it all."""
    jobs = [
        measured(
            seated(name, [HERE], computes=name == "host"),
            needs_bytes=None if name == untold else 1,
        )
        for name in ("host", "guest")
    ]
    expected = {} if has_bytes else {"guest": "host"}
    assert tried(with_memory(full(jobs), has_bytes)) == expected


def test_on_a_node_that_takes_nobody_nobody_is_tried() -> None:
    """It was cordoned, say, while the least busy job computed there: the next host is taken."""
    jobs = [
        measured(seated("cordoned", [THERE]), busy=0.1),
        measured(seated("host", [HERE]), busy=0.6),
        measured(seated("guest", [HERE], computes=False)),
    ]
    snapshot = full(jobs)
    nodes = tuple(replace(node, is_schedulable=node.name == "n0") for node in snapshot.nodes)
    assert tried(replace(snapshot, nodes=nodes)) == {"guest": "host"}


def _same(job: JobView) -> JobView:
    return job


def _barred(job: JobView) -> JobView:
    [worker] = job.placed
    return replace(job, placed=(replace(worker, freed_gpus=0, barred_uuids=worker.gpu_uuids),))


def _of_other(job: JobView) -> JobView:
    return replace(job, tenant="b")


@each_row("rested", [False, True], ids=["stays", "may move"])
@each_row(
    ("change", "expected"),
    [(_same, {"guest": "host"}), (_barred, {}), (_of_other, {})],
    ids=["as it is", "the GPU is given to nobody", "another tenant's"],
)
def test_on_its_own_gpus_a_job_is_tried_by_the_rules_of_any_others(
    change: Callable[[JobView], JobView], expected: dict[str, str], rested: bool
) -> None:
    """That both have them already, from before a GPU fell sick or tenants had rules, is no leave to
    compute side by side; whether it may be moved elsewhere does not matter there."""
    host = change(measured(seated("host", [HERE], tenant="a")))
    guest = measured(seated("guest", [HERE], computes=False, rested=rested, tenant="a"))
    assert tried(full([host, guest], tenants=("a", "b"))) == expected


def test_beside_two_that_compute_no_third_one_is_tried() -> None:
    """Packing is of two jobs: neither the host of a pair nor its guest is host of another one."""
    pair = [measured(seated("host", [HERE])), measured(seated("guest", [HERE]))]
    third = measured(seated("third", [HERE], computes=False))
    for at, each in enumerate(pair):
        both = [*pair[:at], job_with(each, is_packed=True), *pair[at + 1 :]]
        assert tried(full([*both, third])) == {}


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_guest_whose_host_has_ended_is_nobody_s_host_before_its_next_turn(
    is_packed: bool,
) -> None:
    """It still counts as packed: beside it another guest would be one of two, and of a pair that
    does not pay it is the one guest that is parted."""
    left = job_with(measured(seated("left", [HERE])), is_packed=is_packed)
    third = measured(seated("third", [HERE], computes=False))
    assert tried(full([left, third])) == ({} if is_packed else {"third": "left"})


def test_a_trial_elsewhere_is_told_with_what_it_throws_away() -> None:
    """Who saves when it is asked may be moved whatever it has not saved yet; a move that finds no
    time to save loses that."""
    jobs = [
        measured(seated("host", [THERE]), busy=0.1),
        measured(seated("other", [HERE]), busy=0.9),
        job_with(measured(seated("guest", [HERE], computes=False)), unsaved_gpu_s=7.0),
    ]
    snapshot = full(jobs)
    made = trials(snapshot, memory_of(snapshot), Knobs())[JobId("guest")]
    assert isinstance(made, Migrate)
    assert made.predicted_cost_gpu_s == 7.0


# --- what is measured ---------------------------------------------------------------------------

ALONE = Mark(attempt=3, step=100, gpu_s=100.0, is_packed=False, alone_rate=1.0, packed_rate=0.25)
"""A job that has said that it is at step 100, after as many GPU-seconds."""


def told(
    mark: Mark, *, step: int, gpu_s: float, attempt: int = 3, computes: bool = True, beside: int = 0
) -> Mark:
    """What is held of it after its next word.

    beside: others that compute on its GPU.
    """
    job = measured(seated("job", [HERE], computes=computes))
    job = job_with(job, attempt_number=attempt, progress_step=step, progress_step_gpu_s=gpu_s)
    others = [job_with(seated(f"o{at}", [HERE]), is_packed=at > 0) for at in range(beside)]
    return marks_of(Board(full([job, *others])), {job.job_id: mark})[job.job_id]


def test_a_rate_is_taken_from_where_its_measurement_began() -> None:
    """200 steps in 400 GPU-seconds since then; who is packed keeps what it was alone."""
    assert told(ALONE, step=300, gpu_s=500.0) == replace(ALONE, alone_rate=0.5)
    packed = replace(ALONE, is_packed=True)
    found = told(packed, step=300, gpu_s=500.0, beside=1)
    assert found == replace(packed, packed_rate=0.5)


@pytest.mark.parametrize(("step", "gpu_s"), [(101, 100.5), (100, 900.0), (40, 900.0)])
def test_no_rate_is_taken_of_less_than_a_gpu_second_nor_without_a_step(
    step: int, gpu_s: float
) -> None:
    """Two words at about one instant tell no pace, and who has made no step since then, or has
    gone back to a save, did not become infinitely slow: what was measured before stays."""
    assert told(ALONE, step=step, gpu_s=gpu_s) == ALONE


def test_how_fast_a_job_is_alone_outlives_its_attempt() -> None:
    """It is moved for a trial, which is a new attempt: the measurement begins anew with it, as it
    may have gone back to a save, and what it was packed before is of another pair."""
    found = told(ALONE, attempt=4, step=90, gpu_s=300.0)
    assert found == replace(ALONE, attempt=4, step=90, gpu_s=300.0, packed_rate=0.0)


def test_a_job_that_begins_anew_is_tried_by_what_it_was_before() -> None:
    """Both are in an attempt that has made no step yet, and nobody waits for a measurement."""
    jobs = [
        job_with(measured(seated(name, [HERE], computes=name == "host")), attempt_number=1)
        for name in ("host", "guest")
    ]
    assert tried(full(jobs)) == {"guest": "host"}


def test_what_two_were_side_by_side_is_kept_when_one_leaves() -> None:
    """Their trial is judged by it though one was moved before its end."""
    packed = replace(ALONE, is_packed=True)
    found = told(packed, step=300, gpu_s=500.0)
    assert found == replace(packed, is_packed=False, step=300, gpu_s=500.0)


def test_who_waits_for_its_turn_beside_two_is_not_measured_as_packed() -> None:
    """The two on its GPU compute side by side, it does not: its measurement alone goes on."""
    assert told(ALONE, step=100, gpu_s=100.0, computes=False, beside=2) == ALONE


# --- how a trial ends ---------------------------------------------------------------------------


def decided(
    jobs: list[JobView], trial: str, *, since_s_ago: float = 60.0, gain: float | None = None
) -> tuple[tuple[Decision, ...], dict[str, Pair]]:
    """What a pass decides, and what it holds of pairs, where a trial ("a|b") began so long ago.

    gain: what was found of it, if it is over; by what was measured it is 0.4.
    """
    marks = {
        JobId(name): Mark(
            attempt=0, step=100, gpu_s=100.0, is_packed=True, alone_rate=1.0, packed_rate=0.4
        )
        for name in trial.split("|")
    }
    memory = Memory(marks=marks, pairs={trial: Pair(since_s=NOW_S - since_s_ago, gain=gain)})
    found = allocate(Knobs(), full(jobs), msgspec.msgpack.encode(memory))
    return found.decisions, msgspec.msgpack.decode(found.memory, type=Memory).pairs


@pytest.mark.parametrize(("guest", "host"), [("a", "b"), ("b", "a")])
def test_of_a_pair_that_does_not_pay_the_guest_is_put_aside(guest: str, host: str) -> None:
    """Who came to the other's GPU goes, and not who is first by name."""
    jobs = [
        measured(seated(host, [HERE])),
        job_with(measured(seated(guest, [HERE])), is_packed=True),
    ]
    decisions, _ = decided(jobs, "a|b")
    [made] = decisions
    assert isinstance(made, Suspend)
    assert made.job_id == guest
    assert made.reason.startswith(f"packed with {host} ")


def test_a_trial_is_not_over_before_both_have_begun() -> None:
    """Who still starts cannot be put aside: it goes on until it has said something."""
    starts = job_with(measured(seated("guest", [HERE])), is_packed=True, state=JobState.STARTING)
    decisions, pairs = decided(
        [measured(seated("host", [HERE])), job_with(starts, attempt_number=1)],
        "guest|host",
        since_s_ago=1000.0,
    )
    assert decisions == ()
    assert pairs["guest|host"].gain is None


def test_nobody_is_put_aside_for_a_pair_that_is_together_no_more() -> None:
    """One of them was moved meanwhile: the verdict is held, and both go on where they are."""
    jobs = [
        measured(seated("host", [HERE])),
        job_with(measured(seated("guest", [THERE])), is_packed=True),
    ]
    decisions, pairs = decided(jobs, "guest|host")
    assert decisions == ()
    assert pairs["guest|host"].gain == pytest.approx(0.4)


@pytest.mark.parametrize(("gain", "stopped"), [(None, set[str]()), (1.2, {"guest", "host"})])
def test_a_trial_outlasts_the_turns_of_those_who_are_tried(
    gain: float | None, stopped: set[str]
) -> None:
    """Somebody waits there, and the turns of both are over: while they are tried nobody is
    suspended, or nothing would be measured; as a pair that pays they give way like any other."""
    jobs = [
        measured(seated("host", [HERE])),
        job_with(measured(seated("guest", [HERE])), is_packed=True),
        seated("third", [HERE], computes=False),
    ]
    decisions, _ = decided(jobs, "guest|host", since_s_ago=59.0, gain=gain)
    assert {made.job_id for made in decisions if isinstance(made, Suspend)} == stopped
    assert bool(decisions) == bool(stopped)


def test_a_pair_of_which_one_has_ended_is_forgotten() -> None:
    """Its trial is judged no more, and what was found of those that are there stays."""
    decisions, pairs = decided([measured(seated("host", [HERE]))], "gone|host")
    assert decisions == ()
    assert pairs == {}
