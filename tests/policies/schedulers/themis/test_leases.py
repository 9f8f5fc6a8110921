"""Themis' leases: whose turn it is of gangs that waited too long, which jobs none holds up, which
are spared, and what is remembered of a job that grows and of an app."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import msgspec
import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, Preemptibility
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.themis.arbiter import Arbiter
from coordinator.policies.schedulers.themis.finish_time_fairness import AppRecord, Attendance, Work
from coordinator.policies.schedulers.themis.knobs import ThemisKnobs
from coordinator.policies.schedulers.themis.leases import Memory
from tests.harness.builders import NOW_S, job_with, make_worker_view
from tests.policies.schedulers.themis.test_policy import cluster, running, started, waiting

PATIENT = policy("themis:patience=1")


NODES = {"n1": 2, "n2": 2}


def gang(name: str, *, count: int = 2, waited_s: float = 1300.0) -> JobView:
    """So many workers of two GPUs, for longer in the line than patience lasts."""
    job = waiting(name, gpus=2, workers=(count, count))
    return replace(job, submitted_at_s=NOW_S - waited_s)


def holders() -> list[JobView]:
    """Two jobs that fill a node each; the second one's lease ends in this pass."""
    return [
        running(waiting("late", gpus=2), ["n1"], started_s_ago=300.0),
        running(waiting("over", gpus=2), ["n2"], started_s_ago=1200.0),
    ]


def fixed(name: str, node: str) -> JobView:
    """A job that did not agree to be stopped."""
    job = running(waiting(name, gpus=2), [node], started_s_ago=300.0)
    return replace(job, preemptibility=Preemptibility.NON)


def meets_after_s(jobs: Iterable[JobView], nodes: dict[str, int] = NODES) -> float:
    """In how many seconds leases end together, after a pass; below 0 where none do."""
    found = PATIENT.allocate(cluster(nodes, jobs), b"")
    return msgspec.msgpack.decode(found.memory, type=Memory).meets_at_s - NOW_S


def test_a_gang_that_never_fits_holds_up_nobody() -> None:
    """It came first and asks for more than there is: leases end together for the next in line."""
    never = gang("never", count=50, waited_s=1400.0)
    jobs = [*holders(), gang("gang"), never]
    found = PATIENT.allocate(cluster(NODES, jobs), b"")
    at_the_meeting = cluster(NODES, jobs, now_s=NOW_S + 900.0)
    assert started(PATIENT.allocate(at_the_meeting, found.memory)) == {"gang": 2}


def test_nor_does_one_whose_room_others_keep() -> None:
    """Of jobs that may not be stopped no room comes, whenever their leases end."""
    wide = gang("wide", count=3, waited_s=1400.0)
    nodes = {**NODES, "n3": 2}
    jobs = [*holders(), fixed("fixed", "n3"), gang("gang"), wide]
    assert meets_after_s(jobs, nodes) == pytest.approx(900.0)


def test_nor_does_one_whose_app_gains_nothing() -> None:
    """A trial whose app is done as soon without it takes no bundle: the next in line has its own.

    Whatever chance says of the others, who came since.
    """
    crowd = [waiting(f"j{number:02d}", waited_s=60.0) for number in range(30)]
    first = running(waiting("first", work_s=10.0, app="search"), ["n0"], started_s_ago=60.0)
    trial = waiting("trial", work_s=1e6, app="search", waited_s=10 * 1200.0)
    wide = waiting("wide", workers=(4, 4), waited_s=8 * 1200.0)
    jobs = [first, trial, wide, *crowd]
    for seed in range(1, 9):
        eager = policy(f"themis:f=0:aim=first:seed={seed}")
        assert started(eager.allocate(cluster({"n0": 1, "n1": 5}, jobs), b""))["wide"] == 4


def test_a_new_trial_has_its_turn_beside_older_ones_that_end_soon() -> None:
    """Its app is done when it is, however little is left of the others: it gains by its start."""
    old = [
        running(waiting(f"old{at}", work_s=600.0, app="search"), ["n1"], started_s_ago=60.0)
        for at in range(4)
    ]
    new = waiting("new", work_s=72_000.0, app="search", waited_s=1300.0)
    crowd = [waiting(f"j{number:02d}", waited_s=60.0) for number in range(8)]
    for seed in range(1, 9):
        patient = policy(f"themis:patience=1:seed={seed}")
        found = patient.allocate(cluster({"n1": 4, "n2": 1}, [*old, new, *crowd]), b"")
        assert started(found) == {"new": 1}


@pytest.mark.parametrize("count", [1, 4])
def test_its_turn_is_its_own_and_not_that_of_a_smaller_trial_of_its_app(count: int) -> None:
    """Small trials of a search come and go for ever: a gang behind them would never start."""
    wide = replace(gang("wide"), app="search")
    small = [
        waiting(f"small{at}", gpus=1, work_s=600.0, waited_s=10.0, app="search")
        for at in range(count)
    ]
    assert started(PATIENT.allocate(cluster(NODES, [*small, wide]), b"")) == {"wide": 2}


def test_the_first_in_line_for_whom_room_can_be_made_is_the_one() -> None:
    """Leases end together as late as the gang needs that waited longer, not as the other would."""
    narrow, wide = gang("narrow", count=1), gang("wide", count=2, waited_s=1400.0)
    others = [
        running(waiting("a", gpus=2), ["n1"], started_s_ago=700.0),
        running(waiting("b", gpus=2), ["n2"], started_s_ago=300.0),
    ]
    assert meets_after_s([*others, narrow]) == pytest.approx(500.0)
    assert meets_after_s([*others, narrow, wide]) == pytest.approx(900.0)


def test_whom_leases_end_together_for_nobody_overtakes_in_its_line() -> None:
    """While its room is on the way a smaller gang behind it has waited long enough as well, but it
    wins what is free in the auction or not at all: the line alone would feed such gangs for ever.

    The worse off wins there, of two that are as large, though it has just come.
    """
    nodes = {"n0": 2, **NODES}
    wide = gang("wide", count=3, waited_s=1400.0)
    narrow = job_with(gang("narrow", count=1), remaining_work_s=1e6)
    newer = waiting("newer", gpus=2, work_s=1.0, waited_s=600.0)
    found = PATIENT.allocate(cluster(nodes, [*holders(), wide, narrow, newer]), b"")
    assert started(found) == {"newer": 1}


def test_a_meeting_that_is_still_to_come_stands() -> None:
    """A job that runs out of patience meanwhile moves it neither forth nor back."""
    others = [
        running(waiting("a", gpus=2), ["n1"], started_s_ago=700.0),
        running(waiting("b", gpus=2), ["n2"], started_s_ago=300.0),
    ]
    wide = gang("wide", count=2)
    found = PATIENT.allocate(cluster(NODES, [*others, wide]), b"")
    older = gang("older", count=1, waited_s=1500.0)
    later = cluster(NODES, [*others, wide, older], now_s=NOW_S + 10.0)
    again = PATIENT.allocate(later, found.memory)
    assert msgspec.msgpack.decode(again.memory, type=Memory).meets_at_s == NOW_S + 900.0


def test_whoever_is_spared_has_its_gpus_for_another_lease() -> None:
    """A trial whose app gains nothing by it wins nothing back; nobody takes its GPU, so it stays.

    Its lease would else be over in every pass from now on, and go to whoever comes next.
    """
    first = running(waiting("first", work_s=10.0, app="search"), ["n0"], started_s_ago=60.0)
    trial = running(waiting("trial", work_s=1e6, app="search"), ["n1"], started_s_ago=1200.0)
    wide = waiting("wide", workers=(4, 4))
    snapshot = cluster({"n0": 1, "n1": 1}, [first, trial, wide])
    found = policy("themis:aim=first").allocate(snapshot, b"")
    assert found.decisions == ()
    leases = msgspec.msgpack.decode(found.memory, type=Memory).leases
    assert leases == {JobId("first"): NOW_S + 1140.0, JobId("trial"): NOW_S + 1200.0}


def test_who_is_spared_gets_its_lease_in_an_order_that_each_process_finds() -> None:
    """By name, not by its hash: how long each of them is follows a sequence (`spread`).

    Names that hash otherwise and sort alike have the same leases.
    """

    def leases_of(letter: str) -> list[float]:
        first = running(waiting("first", work_s=10.0, app="search"), ["n0"], started_s_ago=60.0)
        trials = [
            running(
                waiting(f"{letter}{at:02}", work_s=1e6, app="search"), ["n1"], started_s_ago=1200.0
            )
            for at in range(12)
        ]
        snapshot = cluster({"n0": 1, "n1": 12}, [first, *trials, waiting("wide", workers=(14, 14))])
        found = policy("themis:aim=first:spread=1").allocate(snapshot, b"")
        assert found.decisions == ()
        leases = msgspec.msgpack.decode(found.memory, type=Memory).leases
        return [leases[trial.job_id] for trial in trials]

    assert leases_of("a") == leases_of("b") == leases_of("c")
    assert len(set(leases_of("a"))) == 12


SEARCH = "app team/search"


def test_workers_by_which_a_job_grows_have_the_lease_of_its_gang() -> None:
    """They begin none of their own, or who grows a little each time would never be asked to go."""
    job = running(waiting("a", workers=(1, 8)), ["n1"], started_s_ago=300.0)
    memory = Memory(leases={job.job_id: NOW_S + 900.0})
    arbiter = Arbiter(ThemisKnobs(lease_s=1200.0), cluster({"n1": 8}, [job]), memory)
    arbiter.run()
    arbiter.plan()
    (given,) = arbiter.sale.given.values()
    assert sum(placement.worker_count for placement in given.more) == 7
    assert arbiter.memory.leases == {job.job_id: NOW_S + 900.0}


@pytest.mark.parametrize("waited_s", [(100.0, 500.0), (500.0, 100.0)])
def test_an_app_was_submitted_with_its_first_trial(waited_s: tuple[float, float]) -> None:
    """Also where a pass meets several of them at once, in whatever order."""
    trials = [
        replace(waiting(f"t{at}", waited_s=ago, app="search"), tenant="team")
        for at, ago in enumerate(waited_s)
    ]
    attendance = Attendance()
    attendance.note(cluster({"n1": 8}, trials))
    assert attendance.apps[SEARCH].submitted_at_s == NOW_S - 500.0


@pytest.mark.parametrize(("trials", "is_new"), [(1, True), (2, False)])
def test_a_gang_after_its_prerun_has_had_nothing_yet(trials: int, is_new: bool) -> None:
    """What one worker was given in the pre-run was another gang's. Of an app of several trials it
    was the app's."""
    jobs = [
        replace(waiting(f"t{at}", workers=(4, 4), app="search"), tenant="team")
        for at in range(trials)
    ]
    before = {JobId(job.job_id): Work(60.0, 1) for job in jobs}
    record = AppRecord(NOW_S - 60.0, 0.0, before, granted_at_s=NOW_S - 50.0, rho=2.0)
    attendance = Attendance(at_s=NOW_S - 60.0, apps={SEARCH: record})
    attendance.note(cluster({"n1": 8}, jobs))
    found = attendance.apps[SEARCH]
    assert (found.granted_at_s, found.rho) == ((None, inf) if is_new else (NOW_S - 50.0, 2.0))
    assert {work.gpus for work in found.jobs.values()} == {4}


@pytest.mark.parametrize(
    ("first_s", "since_s", "placed", "granted_at_s"),
    [
        pytest.param(None, NOW_S - 300.0, False, None, id="who never ran"),
        pytest.param(NOW_S - 200.0, NOW_S - 40.0, False, NOW_S - 40.0, id="who ran and waits"),
        pytest.param(NOW_S - 200.0, None, True, NOW_S, id="who runs"),
    ],
)
def test_who_comes_from_another_policy_has_had_what_that_gave(
    first_s: float | None, since_s: float | None, placed: bool, granted_at_s: float | None
) -> None:
    """Until then it was served; only who never was is infinitely poor."""
    made = waiting("j", waited_s=300.0)
    job = job_with(made, first_started_at_s=first_s, waiting_since_s=since_s)
    if placed:
        job = replace(job, placed=(make_worker_view("j", 0, "n1"),), state=JobState.RUNNING)
    attendance = Attendance()
    attendance.note(cluster({"n1": 8}, [job]))
    [record] = attendance.apps.values()
    assert (record.granted_at_s, record.rho) == (granted_at_s, inf)
