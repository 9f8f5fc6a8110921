"""Themis: where an elastic job that runs has its GPUs again, and where it grows beyond them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model import NodeName
from coordinator.policies.contract.decisions import Placement, Preempt, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.themis.commit import given_where
from tests.draws import pick, whole, yes_or_no
from tests.harness.builders import job_with
from tests.policies.schedulers.themis.test_policy import cluster, running, waiting
from tests.tables import each_row


@each_row("seed", range(8))
def test_who_wins_gpus_starts_though_a_flexible_worker_stood_on_them(seed: int) -> None:
    """The job that had them has its gang again and grows no more than it leaves."""
    old = running(
        waiting("old", workers=(1, 2), work_s=1e6, waited_s=9e3), ["n1", "n0"], started_s_ago=9000
    )
    jobs = [
        job_with(old, saves_when_asked=True),
        waiting("winner", gpus=2, workers=(2, 2), work_s=5000, waited_s=10),
        waiting("other", workers=(2, 2), work_s=1e4, waited_s=5000),
    ]
    found = policy(f"themis:seed={seed}").allocate(cluster({"n0": 4, "n1": 4}, jobs), b"")
    started = {each.job_id for each in found.decisions if isinstance(each, Start)}
    assert started == {"winner", "other"}


def test_a_job_that_nobody_wants_gpus_of_stays_as_it_is() -> None:
    """It grows back into its own GPUs, not to others that are as good."""
    job = running(
        waiting("a", workers=(1, 3), work_s=1e6, waited_s=9e3),
        ["n1", "n0", "n2"],
        started_s_ago=9000,
    )
    done = waiting("late", gpus=8, work_s=1e6)  # it wants some, and fits nowhere
    snapshot = cluster({"n0": 4, "n1": 4, "n2": 4}, [job_with(job, saves_when_asked=True), done])
    assert policy("themis").allocate(snapshot, b"").decisions == ()


def test_what_is_given_on_one_node_in_two_steps_has_room_there_once() -> None:
    """Three free GPUs are one worker of two, however it came to be given two of them."""
    steps = (Placement(node=NodeName("n2"), worker_count=1),) * 2
    floor = cast("Any", SimpleNamespace(free={"n2": 3}))
    job = cast("Any", SimpleNamespace(gpus_per_worker=2))
    assert sum(each.worker_count for each in given_where(floor, job, [], steps, 2)) == 1


@st.composite
def cells(draw: st.DrawFn) -> ClusterSnapshot:
    """Elastic jobs on nodes of 4 GPUs, with leases that are over or not, and such as wait."""
    nodes = {f"n{at}": 4 for at in range(draw(whole(1, 3)))}
    free, jobs = dict(nodes), list[JobView]()
    for at in range(draw(whole(1, 6))):
        gpus, least = draw(pick(1, 1, 2)), draw(pick(1, 1, 2))
        job = waiting(
            f"j{at}",
            gpus=gpus,
            workers=(least, least + draw(pick(0, 1, 4))),
            work_s=draw(pick(500.0, 1e4, 1e6)),
            waited_s=draw(pick(0.0, 10.0, 5000.0)),
        )
        if draw(yes_or_no()):
            put = list[str]()
            for _ in range(draw(whole(least, job.workers.max))):
                name = draw(pick(*nodes))
                if free[name] >= gpus:
                    free[name] -= gpus
                    put.append(name)
            if len(put) >= least:
                ran_s = draw(pick(100, 1300, 9000))
                job = job_with(running(job, put, started_s_ago=ran_s), saves_when_asked=True)
            else:
                for name in put:
                    free[name] += gpus
        jobs.append(job)
    return cluster(nodes, jobs)


@settings(max_examples=200)
@given(
    snapshot=cells(), text=pick("", ":f=0", ":payment=whole:f=0", ":payment=none", ":horizon=good")
)
def test_no_gpu_is_given_twice_by_decisions_either(snapshot: ClusterSnapshot, text: str) -> None:
    """Starts and growth fit on what is free and what the same pass makes free."""
    jobs = {job.job_id: job for job in snapshot.jobs}
    free = Counter({node.name: node.free_gpus for node in snapshot.nodes})
    for made in policy(f"themis{text}").allocate(snapshot, b"").decisions:
        job = jobs[made.job_id] if isinstance(made, Start | Preempt | Resize) else None
        assert job is not None
        gone = set(made.removed_workers) if isinstance(made, Resize) else set[int]()
        for worker in job.placed:
            if isinstance(made, Preempt) or worker.worker_index in gone:
                free[worker.node] += worker.gpus
        came = made.placements if isinstance(made, Start) else ()
        came = made.added if isinstance(made, Resize) else came
        for placement in came:
            free[placement.node] -= placement.worker_count * job.gpus_per_worker
    assert min(free.values()) >= 0


@pytest.mark.parametrize("f", [0.0, 0.8])
def test_a_trial_that_ends_first_grows_before_others_take_what_does_not_help(f: float) -> None:
    """An app that is done with its first trial gains nothing by those that would end far later."""
    first = waiting("first", workers=(1, 8), work_s=50_000.0, app="search")
    first = running(first, ["n1", "n1"], started_s_ago=100.0)
    late = [waiting(f"late{at}", work_s=9e6, app="search") for at in range(2)]
    jobs = [first, *late]
    found = policy(f"themis:aim=first:f={f}").allocate(cluster({"n1": 4}, jobs), b"")
    grown = [each for each in found.decisions if isinstance(each, Resize)]
    assert [each.job_id for each in grown] == ["first"]
    assert sum(placement.worker_count for each in grown for placement in each.added) == 2
