"""A job that comes back as a gang after its pre-run, and one that leaves a node alone: what is
remembered by its name, and where it may go, under every policy.
"""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import POLICIES, policy
from coordinator.policies.schedulers.gandiva import sets
from coordinator.policies.schedulers.gandiva.node_sets import Class, NodeSet
from coordinator.policies.schedulers.gavel.rounds import Rounds
from coordinator.policies.schedulers.mesos.policy import Memory as Offered
from coordinator.policies.schedulers.themis.finish_time_fairness import (
    Attendance,
    Yardstick,
    measures,
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

LATER_S = NOW_S + 100_000.0


J = JobId("j")


def waiting(*, workers: int = 1, gpus: int = 1, work_s: float = 300.0, attempt: int = 0) -> JobView:
    """The job as it waits: for its pre-run as it is, or as a gang."""
    made = make_job_view(
        "j", workers=(workers, workers), gpus_per_worker=gpus, remaining_work_s=work_s
    )
    return job_with(made, whole_work_s=work_s, attempt_number=attempt)


PRERUN = waiting()


GANG = waiting(workers=2, gpus=8, work_s=6000.0, attempt=1)


def cell(*jobs: JobView, now_s: float = NOW_S, **gpus: int) -> ClusterSnapshot:
    """Nodes of so many GPUs, two of eight where none is named, with these jobs."""
    nodes = [
        make_node_view(
            name,
            gpus=count,
            workers=[each for job in jobs for each in job.placed if each.node == name],
        )
        for name, count in (gpus or {"n0": 8, "n1": 8}).items()
    ]
    return make_snapshot(nodes=nodes, jobs=jobs, now_s=now_s)


def starts(name: str, snapshot: ClusterSnapshot, memory: bytes = b"") -> dict[str, set[str]]:
    """Who starts in a pass, and on which nodes."""
    made = policy(name).allocate(snapshot, memory).decisions
    return {
        each.job_id: {placement.node for placement in each.placements}
        for each in made
        if isinstance(each, Start)
    }


# --- what is remembered by name -----------------------------------------------------------------


def test_a_gang_leaves_the_set_of_its_pre_run() -> None:
    """`gandiva-sets` looks for nodes for the gang, also between two looks of `quiet_s`."""
    one = NodeSet(Class(1, "H100", 1), (NodeName("n0"),), [J])
    memory = msgspec.msgpack.encode(sets.Memory(sets=(one,), looked_at_s=NOW_S - 600.0))
    assert starts("gandiva-sets", cell(GANG), memory) == {"j": {"n0", "n1"}}
    lately = msgspec.msgpack.encode(
        sets.Memory(sets=(one,), looked_at_s=NOW_S - 1.0, came_at_s=NOW_S - 1.0)
    )
    assert starts("gandiva-sets:quiet_s=60", cell(GANG), lately) == {}


def test_fairness_measures_a_gang_by_itself() -> None:
    """What it would take alone is that of the gang; of the pre-run nothing is left over."""
    yard = Yardstick(gpus=16, now_s=NOW_S)
    found: list[float] = []
    for before in ((), (PRERUN,)):
        attendance = Attendance()
        for job in before:
            attendance.note(cell(job))
        jobs = attendance.note(cell(GANG))
        found.append(measures(attendance, yard, jobs)["job j"].alone_s)
    assert found == [pytest.approx(3000.0)] * 2


@pytest.mark.parametrize("others", [False, True])
def test_what_was_given_for_a_pre_run_was_not_given_to_the_gang(others: bool) -> None:
    """An app of this one job has had no GPUs yet; one that has other jobs had what it had."""
    attendance = Attendance()
    other = replace(GANG, job_id=JobId("other"))
    jobs = [replace(job, app="search") for job in ((PRERUN, other) if others else (PRERUN,))]
    attendance.note(cell(*jobs))
    [record] = attendance.apps.values()
    record.granted_at_s, record.rho = NOW_S, 1.5
    attendance.note(cell(replace(GANG, app="search"), *jobs[1:]))
    assert record.granted_at_s == (NOW_S if others else None)


def test_shares_of_time_are_set_anew_for_a_gang() -> None:
    """`las` does not keep that of its pre-run, though nobody came or went."""
    las = policy("las")
    rival = replace(waiting(workers=2, gpus=8), job_id=JobId("rival"))
    first = las.allocate(cell(PRERUN, rival, n0=8, n1=8, n2=8), b"")
    before = msgspec.msgpack.decode(first.memory, type=Rounds).turns[J]
    assert before.share == pytest.approx(1.0)
    again = cell(GANG, rival, n0=8, n1=8, n2=8, now_s=LATER_S)
    after = msgspec.msgpack.decode(las.allocate(again, first.memory).memory, type=Rounds).turns
    assert after[J].share == pytest.approx(0.75)


def test_a_gang_is_another_one_to_frameworks_that_saw_its_pre_run() -> None:
    """`mesos` stops offering what nobody takes; what waits again is offered all anew."""
    mesos = policy("mesos")
    blocked = [
        replace(
            make_job_view("runs", gpus_per_worker=8),
            state=JobState.RUNNING,
            gpu_type="H100",
            placed=(make_worker_view("runs", 0, "n0", gpus=8),),
        )
    ]
    first = mesos.allocate(cell(GANG, *blocked), b"")
    for attempt, since_s in ((1, NOW_S), (2, LATER_S)):
        found = cell(job_with(GANG, attempt_number=attempt), *blocked, now_s=LATER_S)
        memory = mesos.allocate(found, first.memory).memory
        assert msgspec.msgpack.decode(memory, type=Offered).still.since_s == since_s


# --- nodes that a job leaves alone --------------------------------------------------------------


@each_row("name", sorted(POLICIES))
def test_who_leaves_a_node_alone_starts_on_another_one(name: str) -> None:
    """At once, although the node that it leaves alone is the first that would take it."""
    job = job_with(PRERUN, nodes_avoided=(NodeName("n0"),))
    assert starts(name, cell(job)) == {"j": {"n1"}}


@pytest.mark.parametrize("name", ["tiresias", "yarn"])
def test_the_fewest_nodes_are_the_fewest_of_those_that_it_may_have(name: str) -> None:
    """It leaves the only node alone that would take all of it, and asks for two others."""
    gang = job_with(waiting(workers=8), nodes_avoided=(NodeName("n0"),))
    skewed = replace(gang, profile=JobProfile(skew_ratio=1.0))  # `tiresias` keeps it together
    assert starts(name, cell(skewed, n0=8, n1=4, n2=4)) == {"j": {"n1", "n2"}}


def test_a_framework_hoards_no_node_that_its_gang_leaves_alone() -> None:
    """`mesos` gives it to the others, while the gang waits for more of those that it may have."""
    gang = job_with(waiting(workers=2, gpus=8), nodes_avoided=(NodeName("n0"),))
    other = make_worker_view("runs", 0, "n1", gpus=8)
    runs = make_job_view("runs", state=JobState.RUNNING, gpus_per_worker=8, placed=[other])
    found = policy("mesos").allocate(cell(gang, runs, n0=8, n1=8, n2=8), b"")
    hoards = msgspec.msgpack.decode(found.memory, type=Offered).hoards
    assert list(hoards.values()) == [{"n2": 8}]


def test_alike_gangs_are_not_taken_for_each_other_where_they_leave_nodes_alone() -> None:
    """`tetris` places each where it may go, though both have one shape."""
    jobs = [
        job_with(PRERUN, job_id=JobId(f"j{number}"), nodes_avoided=(NodeName(f"n{number}"),))
        for number in range(2)
    ]
    assert starts("tetris", cell(*jobs)) == {"j0": {"n1"}, "j1": {"n0"}}
