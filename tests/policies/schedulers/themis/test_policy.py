"""Themis pass by pass: leases, who is auctioned to, what a job keeps, and what it is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeRole, Preemptibility
from common.profile import JobProfile
from coordinator.policies.contract.decisions import (
    Allocation,
    Placement,
    Preempt,
    Resize,
    Start,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.themis.leases import Memory
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.strategies import snapshots

THEMIS = policy("themis")


def waiting(
    name: str,
    *,
    gpus: int = 1,
    workers: tuple[int, int] = (1, 1),
    work_s: float = 3600.0,
    waited_s: float = 0.0,
    app: str | None = None,
    profile: JobProfile | None = None,
) -> JobView:
    """A job that waits since `waited_s`."""
    job = make_job_view(
        name,
        workers=workers,
        gpus_per_worker=gpus,
        remaining_work_s=work_s,
        submitted_at_s=NOW_S - waited_s,
    )
    return job_with(job, app=app, whole_work_s=work_s, profile=profile or JobProfile())


def running(job: JobView, nodes: Iterable[str], *, started_s_ago: float) -> JobView:
    """The same job, a worker on each of these nodes; those beyond its base are flexible."""
    workers = tuple(
        make_worker_view(
            job.job_id,
            index,
            node,
            gpus=job.gpus_per_worker,
            is_flexible=index >= job.workers.min,
        )
        for index, node in enumerate(nodes)
    )
    return job_with(
        job,
        state=JobState.RUNNING,
        gpu_type="H100",
        placed=workers,
        started_at_s=NOW_S - started_s_ago,
        is_resizable=job.is_elastic,
    )


def cluster(
    sizes: Mapping[str, int],
    jobs: Iterable[JobView],
    now_s: float = NOW_S,
    racks: Mapping[str, str] | None = None,
) -> ClusterSnapshot:
    """Nodes of so many GPUs with these jobs on them."""
    jobs = tuple(jobs)
    nodes: list[NodeView] = [
        replace(
            make_node_view(
                name,
                gpus=gpus,
                workers=[w for job in jobs for w in job.placed if w.node == name],
            ),
            rack=(racks or {}).get(name, ""),
        )
        for name, gpus in sizes.items()
    ]
    return make_snapshot(nodes=nodes, jobs=jobs, now_s=now_s)


def started(allocation: Allocation) -> dict[str, int]:
    """Workers of each job that starts."""
    return {
        decision.job_id: sum(placement.worker_count for placement in decision.placements)
        for decision in allocation.decisions
        if isinstance(decision, Start)
    }


def preempted(allocation: Allocation) -> set[str]:
    """Jobs that are stopped."""
    return {d.job_id for d in allocation.decisions if isinstance(d, Preempt)}


# --- leases -------------------------------------------------------------------------------------


def test_nobody_loses_gpus_before_its_lease_is_over() -> None:
    """However badly off a newcomer is, it waits until the lease ends, and is woken then."""
    holder = running(waiting("a", gpus=4), ["n1"], started_s_ago=1199.0)
    found = THEMIS.allocate(cluster({"n1": 4}, [holder, waiting("b", waited_s=9000)]), b"")
    assert found.decisions == ()
    assert found.wake_at_s == pytest.approx(NOW_S + 1.0)


def test_at_the_end_of_a_lease_the_worse_off_gets_the_gpus() -> None:
    """GPUs whose lease is over go to the app that has none, and the holder makes room."""
    holder = running(waiting("a", gpus=4), ["n1"], started_s_ago=1200.0)
    poor = waiting("b", gpus=4, waited_s=9000.0)
    found = THEMIS.allocate(cluster({"n1": 4}, [holder, poor]), b"")
    assert started(found) == {"b": 1}
    assert preempted(found) == {"a"}


def test_whoever_wins_again_is_not_stopped() -> None:
    """A job whose lease ended and that nobody outbids goes on, with another lease."""
    holder = running(waiting("a", gpus=2), ["n1"], started_s_ago=1200.0)
    too_large = waiting("b", gpus=4, waited_s=10.0)
    snapshot = cluster({"n1": 3, "n2": 1}, [holder, too_large])
    found = THEMIS.allocate(snapshot, b"")
    assert found.decisions == ()
    leases = msgspec.msgpack.decode(found.memory, type=Memory).leases
    assert leases == {JobId("a"): NOW_S + 1200.0}


def test_a_lease_that_nobody_contests_is_renewed() -> None:
    """Where no job wants more, the end of a lease changes nothing and wakes nobody."""
    holder = running(waiting("a", gpus=4), ["n1"], started_s_ago=5000.0)
    found = THEMIS.allocate(cluster({"n1": 4}, [holder]), b"")
    assert (found.decisions, found.wake_at_s) == ((), None)


def test_a_loser_gets_what_nobody_else_wants() -> None:
    """No GPU idles while a job that fits waits: payments and filters hold nothing back."""
    jobs = [waiting(f"j{number}", gpus=2, waited_s=100.0 * number) for number in range(4)]
    found = THEMIS.allocate(cluster({"n1": 4, "n2": 4}, jobs), b"")
    assert set(started(found)) == {"j0", "j1", "j2", "j3"}


def test_leases_end_together_for_a_gang_that_found_too_little() -> None:
    """For a gang that was patient, what is given meanwhile comes back with the last lease."""
    patient = policy("themis:patience=1")
    late = running(waiting("late", gpus=2), ["n1"], started_s_ago=300.0)
    over = running(waiting("over", gpus=2), ["n2"], started_s_ago=1200.0)
    gang = replace(waiting("gang", gpus=2, workers=(2, 2)), submitted_at_s=NOW_S - 1300.0)
    found = patient.allocate(cluster({"n1": 2, "n2": 2}, [late, over, gang]), b"")
    leases = msgspec.msgpack.decode(found.memory, type=Memory).leases
    assert leases == {JobId("late"): NOW_S + 900.0, JobId("over"): NOW_S + 900.0}
    at_the_meeting = cluster({"n1": 2, "n2": 2}, [late, over, gang], now_s=NOW_S + 900.0)
    assert started(patient.allocate(at_the_meeting, found.memory)) == {"gang": 2}


def test_leases_end_together_for_no_more_than_a_gang_needs() -> None:
    """Of four leases the next two to end make room; the others go on, so that leases stay apart."""
    patient = policy("themis:patience=1")
    holders = [
        running(waiting(f"h{number}", gpus=2), [f"n{number}"], started_s_ago=1100.0 - 100 * number)
        for number in range(4)
    ]
    gang = replace(waiting("gang", gpus=2, workers=(2, 2)), submitted_at_s=NOW_S - 1300.0)
    snapshot = cluster({f"n{number}": 2 for number in range(4)}, [*holders, gang])
    memory = msgspec.msgpack.decode(patient.allocate(snapshot, b"").memory, type=Memory)
    assert memory.meets_at_s == pytest.approx(NOW_S + 200.0)
    assert sorted(memory.leases.values()) == pytest.approx(
        [NOW_S + 100.0, NOW_S + 200.0, NOW_S + 300.0, NOW_S + 400.0]
    )
    first = cluster({f"n{n}": 2 for n in range(4)}, [*holders, gang], now_s=NOW_S + 100.0)
    again = patient.allocate(first, msgspec.msgpack.encode(memory))
    leases = msgspec.msgpack.decode(again.memory, type=Memory).leases
    assert leases[JobId("h0")] == pytest.approx(NOW_S + 200.0)


def test_leases_do_not_meet_where_that_would_make_no_room() -> None:
    """Room on two nodes is none for workers that need a whole one."""
    patient = policy("themis:patience=1")
    small = running(waiting("small", gpus=1), ["n1"], started_s_ago=300.0)
    fixed = replace(
        running(waiting("fixed", gpus=1), ["n2"], started_s_ago=300.0),
        preemptibility=Preemptibility.NON,
    )
    whole = replace(waiting("whole", gpus=2, workers=(2, 2)), submitted_at_s=NOW_S - 1300.0)
    found = patient.allocate(cluster({"n1": 2, "n2": 2}, [small, fixed, whole]), b"")
    assert msgspec.msgpack.decode(found.memory, type=Memory).meets_at_s == 0.0


def test_a_gang_that_waited_too_long_goes_first() -> None:
    """Where there is room for it nobody who came since has its GPUs, whatever chance says."""
    gang = waiting("gang", gpus=1, workers=(4, 4), waited_s=8 * 1200.0)
    crowd = [waiting(f"j{number:02d}", waited_s=60.0) for number in range(30)]
    for seed in range(1, 9):
        found = policy(f"themis:f=0:seed={seed}").allocate(cluster({"n1": 5}, [gang, *crowd]), b"")
        assert started(found)["gang"] == 4
    patient = policy("themis:f=0:patience=1000")
    assert "gang" not in started(patient.allocate(cluster({"n1": 5}, [gang, *crowd]), b""))


def test_leases_of_one_pass_differ_where_they_are_told_to() -> None:
    """Half a lease to one and a half with `spread=1`, each apart from those before it."""
    jobs = [waiting(f"j{number}") for number in range(8)]
    snapshot = cluster({"n1": 8}, jobs)
    made = policy("themis:spread=1")

    def ends(allocation: Allocation) -> list[float]:
        leases = msgspec.msgpack.decode(allocation.memory, type=Memory).leases
        return [end_s - NOW_S for end_s in leases.values()]

    found = ends(made.allocate(snapshot, b""))
    assert len(set(found)) == 8
    assert all(600.0 <= length_s <= 1800.0 for length_s in found)
    assert ends(made.allocate(snapshot, b"")) == found
    assert set(ends(THEMIS.allocate(snapshot, b""))) == {1200.0}


def test_what_everybody_paid_is_given_away_in_the_end() -> None:
    """Where all bid for one GPU and each would pay all of it, the worst off still gets it."""
    jobs = [waiting("a"), waiting("b")]
    found = policy("themis:f=0:payment=floor").allocate(cluster({"n1": 1}, jobs), b"")
    assert len(started(found)) == 1


def left_free(snapshot: ClusterSnapshot, allocation: Allocation) -> dict[str, dict[str, int]]:
    """Free GPUs of training nodes after a pass, by type and node."""
    free = {
        node.name: node.free_gpus
        for node in snapshot.nodes
        if node.is_schedulable and node.role == NodeRole.TRAINING
    }
    jobs = {job.job_id: job for job in snapshot.jobs}
    for decision in allocation.decisions:
        assert isinstance(decision, Start | Resize | Preempt)
        job = jobs[decision.job_id]
        gone = decision.removed_workers if isinstance(decision, Resize) else ()
        for worker in job.placed:
            is_stopped = isinstance(decision, Preempt) or worker.worker_index in gone
            if is_stopped and not worker.is_leaving and worker.node in free:
                free[worker.node] += worker.freed_gpus
        come = (
            ()
            if isinstance(decision, Preempt)
            else (decision.placements if isinstance(decision, Start) else decision.added)
        )
        for placement in come:
            free[placement.node] -= placement.worker_count * job.gpus_per_worker
    types = {node.name: node.gpu_type for node in snapshot.nodes}
    by_type: dict[str, dict[str, int]] = {}
    for name, gpus in free.items():
        by_type.setdefault(types[name], {})[name] = gpus
    return by_type


@settings(max_examples=150, deadline=None)
@given(
    snapshot=snapshots(),
    f=st.sampled_from((0.0, 0.8)),
    payment=st.sampled_from(("whole", "floor", "none")),
)
def test_no_gpu_idles_beside_a_job_that_fits(
    snapshot: ClusterSnapshot, f: float, payment: str
) -> None:
    """Whatever was paid and whoever was left out: who still waits finds no room for its gang, but
    where room is kept for a higher priority."""
    found = policy(f"themis:f={f}:payment={payment}").allocate(snapshot, b"")
    free = left_free(snapshot, found)
    assert all(gpus >= 0 for nodes in free.values() for gpus in nodes.values())
    begun = started(found)
    left = [
        job for job in snapshot.jobs if job.state == JobState.PENDING and job.job_id not in begun
    ]
    for job in left:
        if job.priority == max(other.priority for other in left):
            for gpu_type, nodes in free.items():
                slots = sum(
                    gpus // job.gpus_per_worker
                    for node, gpus in nodes.items()
                    if node not in job.nodes.avoided
                )
                assert not job.accepts(gpu_type) or slots < job.workers_on(gpu_type).min


# --- apps ---------------------------------------------------------------------------------------


def test_trials_of_one_app_are_one_bidder() -> None:
    """An app of many trials is no better off than one of a single job: each gets its half."""
    trials = [waiting(f"t{number}", gpus=2, app="search") for number in range(8)]
    alone = waiting("z", gpus=2)
    found = policy("themis:payment=none:f=0").allocate(cluster({"n1": 4}, [*trials, alone]), b"")
    assert "z" in started(found)
    assert len(started(found)) == 2


def test_a_stranger_s_app_of_the_same_name_is_another_bidder() -> None:
    """Else a tenant could join an app that is worse off, or hold it back with its own trials."""
    trials = [waiting(f"t{number}", gpus=2, app="search") for number in range(8)]
    stranger = replace(waiting("z", gpus=2, app="search"), tenant="other")
    found = policy("themis:payment=none:f=0").allocate(cluster({"n1": 4}, [*trials, stranger]), b"")
    assert "z" in started(found)
    assert len(started(found)) == 2


def test_elastic_jobs_take_what_is_left() -> None:
    """Flexible workers fill GPUs that no base gang wants, in the same pass."""
    found = THEMIS.allocate(cluster({"n1": 8}, [waiting("a", workers=(2, 6)), waiting("b")]), b"")
    assert started(found) == {"a": 6, "b": 1}


def test_a_running_job_grows_only_by_free_gpus() -> None:
    """Growth beyond the gang comes by bids too, while its lease goes on."""
    job = running(waiting("a", workers=(2, 4)), ["n1", "n1"], started_s_ago=10.0)
    found = THEMIS.allocate(cluster({"n1": 3}, [job]), b"")
    (resize,) = found.decisions
    assert isinstance(resize, Resize)
    assert sum(placement.worker_count for placement in resize.added) == 1


def test_a_spread_gang_is_worth_less_to_whom_it_slows_down() -> None:
    """Of two gangs the one that suffers from spreading gets the whole node, the other the rest."""
    skewed = JobProfile(rack_speed_ratio=0.5, far_speed_ratio=0.3)
    one = waiting("a", workers=(4, 4), profile=skewed)
    other = waiting("b", workers=(4, 4))
    racks = {"n1": "r1", "n2": "r1", "n3": "r2"}
    snapshot = cluster({"n1": 4, "n2": 2, "n3": 2}, [one, other], racks=racks)
    found = policy("themis:f=0:payment=none").allocate(snapshot, b"")
    places = {d.job_id: d.placements for d in found.decisions if isinstance(d, Start)}
    assert places[JobId("a")] == (Placement(node=snapshot.nodes[0].name, worker_count=4),)
    assert len(places[JobId("b")]) == 2


# --- memory and chance --------------------------------------------------------------------------


def test_another_policys_memory_is_no_obstacle() -> None:
    """Whatever the policy before remembered, a pass decides as with none."""
    snapshot = cluster({"n1": 4}, [waiting("a"), waiting("b", gpus=4)])
    fresh = THEMIS.allocate(snapshot, b"")
    for foreign in (b"\xff\x00", msgspec.msgpack.encode([1, 2]), b"text"):
        assert THEMIS.allocate(snapshot, foreign).decisions == fresh.decisions


def test_chance_follows_from_the_seed_in_the_name() -> None:
    """The same seed gives the same choice; among forty equals other seeds choose others."""
    jobs = [waiting(f"j{number:02d}", gpus=4) for number in range(40)]
    snapshot = cluster({"n1": 4}, jobs)
    chosen = {
        seed: tuple(started(policy(f"themis:seed={seed}").allocate(snapshot, b"")))
        for seed in range(1, 9)
    }
    again = started(policy("themis:seed=3").allocate(snapshot, b""))
    assert tuple(again) == chosen[3]
    assert len(set(chosen.values())) > 1


def test_chance_goes_on_from_pass_to_pass() -> None:
    """A pass draws after those before it: the same equals are not in the same order for ever."""
    snapshot = cluster({"n1": 4}, [waiting(f"j{number}", gpus=4) for number in range(3)])
    first = THEMIS.allocate(snapshot, b"")
    again = THEMIS.allocate(snapshot, first.memory)
    draws = [msgspec.msgpack.decode(found.memory, type=Memory).draws for found in (first, again)]
    assert 0 < draws[0] < draws[1]


def test_a_waiting_job_is_told_its_rho_and_the_next_lease() -> None:
    """`explain` names the app's finish-time fairness, its share, and when GPUs come back."""
    holder = running(waiting("a", gpus=4), ["n1"], started_s_ago=900.0)
    snapshot = cluster({"n1": 4}, [holder, waiting("b", gpus=4, waited_s=600.0)])
    (held,) = THEMIS.pending_reasons(snapshot, THEMIS.allocate(snapshot, b"").memory)
    assert held.job_id == "b"
    assert "share of 2.0 GPUs" in held.blockers[0] or "share of 4.0 GPUs" in held.blockers[0]
    assert "the next lease ends in 300 s" in held.blockers[1]


@settings(max_examples=60, deadline=None)
@given(
    snapshot=snapshots(),
    f=st.sampled_from((0.0, 0.8)),
    payment=st.sampled_from(("whole", "floor", "lottery", "none")),
)
def test_the_same_pass_twice_changes_nothing_more(
    snapshot: ClusterSnapshot, f: float, payment: str
) -> None:
    """Memory is plain data: a pass with it, and with its bytes read back, decides alike."""
    made = policy(f"themis:f={f}:payment={payment}")
    first = made.allocate(snapshot, b"")
    read = msgspec.msgpack.encode(msgspec.msgpack.decode(first.memory, type=Memory))
    later = replace(snapshot, now_s=snapshot.now_s + 1.0)
    assert made.allocate(later, first.memory) == made.allocate(later, read)
