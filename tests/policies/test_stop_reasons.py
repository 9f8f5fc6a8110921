"""What people read of a stop: what it may cost, and who takes the GPUs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import JobId
from coordinator.policies.contract.decisions import Decision, Preempt
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import listed, unsaved
from coordinator.policies.parts.grants import Grant, carry_out
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.reasons import stopped_for
from coordinator.policies.tenants.reclaim import given_back
from tests.harness.builders import NOW_S, job_with, make_cluster, make_service_view, make_snapshot
from tests.policies import tenant_books as books
from tests.policies.machines import cell, job, machine
from tests.tables import each_row


@each_row(
    ("gpu_s", "said"),
    [
        (0.0, "all of its work is saved"),
        (0.4, "all of its work is saved"),
        (1.0, "1 GPU-s of its work is not saved yet"),
        (9.4, "9 GPU-s of its work are not saved yet"),
    ],
)
def test_work_that_is_not_saved_is_not_called_lost(gpu_s: float, said: str) -> None:
    """Whether it is lost shows when the job has had its grace to save it."""
    assert unsaved(gpu_s) == said


@each_row(
    ("names", "said"),
    [
        ((), "no job takes"),
        (("a",), "a takes"),
        (("a", "b"), "a and b take"),
        (("a", "b", "c"), "a, b and c take"),
        (("a", "b", "c", "d"), "a, b, c and 1 other take"),
        (("a", "b", "c", "d", "e"), "a, b, c and 2 others take"),
    ],
)
def test_several_take_and_one_takes(names: tuple[str, ...], said: str) -> None:
    """A verb follows how many there are, and of many only some are named."""
    assert listed(names, "takes", "take") == said


def at_work(made: JobView, unsaved_gpu_s: float) -> JobView:
    """The same, with so much work that is not saved."""
    return job_with(made, unsaved_gpu_s=unsaved_gpu_s)


def why(decisions: tuple[Decision, ...]) -> str:
    """Of the only job that is stopped."""
    [stop] = [each for each in decisions if isinstance(each, Preempt)]
    return stop.reason


def told(snapshot: ClusterSnapshot, *names: str) -> str:
    """Why the one that is stopped is, where these are granted what they ask for."""
    jobs = {each.job_id: each for each in snapshot.jobs}
    grants = [Grant(job=jobs[n], workers=jobs[n].workers.min, reason="") for n in sorted(jobs)]
    plan = carry_out(snapshot, [grant for grant in grants if grant.job.job_id in names])
    return why(plan.decisions)


def test_whoever_is_stopped_for_a_turn_is_told_what_is_not_saved_and_who_comes() -> None:
    """With checkpoints on request nothing of it is lost, and two jobs may come for one.

    They need not take the very GPUs that it leaves: others leave some on its node as well.
    """
    jobs = (
        at_work(job("old", gpus=2, nodes=("n0",)), 9.0),
        job("new1"),
        job("new2"),
    )
    snapshot = cell(machine("n0", gpus=2, jobs=jobs), jobs=jobs)
    both, one = told(snapshot, "new1", "new2"), told(snapshot, "new1")
    assert both.startswith("its turn is over: new1 and new2 take GPUs where it runs; ")
    assert one.startswith("its turn is over: new1 takes GPUs where it runs; ")
    assert {both.split("; ")[1], one.split("; ")[1]} == {"9 GPU-s of its work are not saved yet"}


def test_a_turn_that_ends_for_nobody_says_so() -> None:
    """Under a policy whose turns end even where nobody comes."""
    jobs = (job("old", nodes=("n0",)),)
    plan = carry_out(cell(machine("n0", jobs=jobs), jobs=jobs), [], stops_in_vain=True)
    assert [each.reason for each in plan.decisions] == [
        "its turn is over: no job takes GPUs where it runs yet; all of its work is saved"
    ]


@pytest.mark.parametrize("name", ["qos", "qos-edf", "qos-elasticflow"])
def test_who_is_stopped_for_a_deadline_is_told_which(name: str) -> None:
    """Where nobody has turns a stop is for the deadline of the job that takes the GPUs."""
    jobs = (
        job("idle", gpus=2, nodes=("n0",)),
        replace(job("due", gpus=2, work_s=600.0), deadline_at_s=NOW_S + 900.0),
    )
    snapshot = cell(machine("n0", gpus=2, jobs=jobs), jobs=jobs)
    assert why(policy(name).allocate(snapshot, b"").decisions).startswith(
        "for the deadline of due in 900 s: due takes GPUs where it runs; "
    )


@each_row(
    ("takers", "said"),
    [
        (("soon",), "for the deadline of soon in 60 s"),
        (("later", "soon", "none"), "for the deadline of soon in 60 s"),
        (("later", "none"), "for the deadline of later in 900 s"),
        (("late", "soon"), "for the deadline of late 30 s ago"),
        (("none",), "jobs with deadlines leave it no room"),
        (("gone",), "jobs with deadlines leave it no room"),
    ],
)
def test_of_several_takers_the_first_deadline_is_told(takers: tuple[str, ...], said: str) -> None:
    """One that has passed is told so; where none has a deadline that is told instead."""
    due = {"soon": 60.0, "later": 900.0, "late": -30.0}
    jobs = [replace(job(each), deadline_at_s=NOW_S + left_s) for each, left_s in due.items()]
    snapshot = cell(machine("n0"), jobs=(*jobs, job("none")))
    assert stopped_for(snapshot)([JobId(each) for each in takers]) == said


def test_a_borrower_that_is_stopped_is_told_the_same() -> None:
    """Its GPUs are due to others: who, and what of its work is not saved."""
    snapshot = books.cell(
        books.runs("kept", "a", "n0", 8, lost_gpu_s=20.0),
        books.runs("lent", "a", "n1", 8, lost_gpu_s=9.0),
        books.waits("owed1", "b", 4),
        books.waits("owed2", "b", 4),
        tenants=(books.A8, books.B8),
    )
    assert why(given_back(snapshot, ()).decisions) == (
        "tenant a borrows these GPUs, and owed1 is due them; 9 GPU-s of its work are not saved yet"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aryl", "; 9 GPU-s of its work are not saved yet"),
        ("aryl:reclaim=near-optimum:reclaim_cost=lost-gpu-s", "; expected to cost 513 GPU-s"),
    ],
)
def test_a_job_on_a_node_that_is_taken_back_is_told_the_same(name: str, said: str) -> None:
    """Priced by work its restart counts too: eight GPUs for 63 s."""
    nodes, jobs = make_cluster({"n0": {"a": 8}})
    jobs = [job_with(at_work(each, 9.0), has_saved=True) for each in jobs]
    service = make_service_view(load=1e6, min_serving=1, reclaim_deadline_s=60.0)
    snapshot = make_snapshot(nodes=nodes, jobs=jobs, services=[service])
    assert why(policy(name).lend(snapshot)).endswith(said)
