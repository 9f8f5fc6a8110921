"""Who starts: the order of the line, skipping and blocking, and room made by flexible workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from msgspec import Struct

from common.model import JobId, JobState, NodeRole, Preemptibility
from coordinator.policies.aryl.blockers import holds
from coordinator.policies.aryl.elastic_jobs import Share, shares_of
from coordinator.policies.aryl.gang_admission import Gang, admit
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.aryl.shortest_first import OrderKey, shortest_key, submission_key, waiting
from coordinator.policies.contract.estimates import fastest_s
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.tenants.infeasible import hosts_of
from tests.harness.builders import (
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)


class Done(Struct):
    """Who starts, and who still waits, both in order."""

    gangs: tuple[Gang, ...]
    held: list[JobView]


def admitted(
    nodes: Iterable[NodeView],
    jobs: Iterable[JobView],
    *,
    key: OrderKey = shortest_key,
    is_strict: bool = False,
) -> Done:
    """Phase 1 on a snapshot, without phase 2."""
    return phase_1(make_snapshot(nodes=nodes, jobs=jobs), key=key, is_strict=is_strict)[0]


def phase_1(
    snapshot: ClusterSnapshot, *, key: OrderKey = shortest_key, is_strict: bool = False
) -> tuple[Done, PlacementState, dict[str, Share]]:
    """Phase 1, with what it leaves behind."""
    room, shares = PlacementState(snapshot), shares_of(snapshot.jobs, now_s=0.0)
    gangs = admit(room, key, shares, strict=hosts_of(snapshot) if is_strict else None)
    started = {gang.job.job_id for gang in gangs}
    held = [job for job in waiting(snapshot, key) if job.job_id not in started]
    done = Done(gangs=tuple(gangs), held=held)
    return done, room, {str(job_id): share for job_id, share in shares.items()}


def names(jobs: Iterable[JobView]) -> list[str]:
    """Job ids in order."""
    return [str(job.job_id) for job in jobs]


def started(done: Done) -> list[str]:
    """Jobs that start, in order."""
    return names(gang.job for gang in done.gangs)


def where(done: Done, job_id: str) -> dict[str, int]:
    """Workers of a gang per node."""
    gang = next(gang for gang in done.gangs if gang.job.job_id == job_id)
    return {str(placement.node): placement.worker_count for placement in gang.placements}


def grown(
    *,
    nodes: Sequence[str],
    base: int = 1,
    work_s: float = 3600.0,
    name: str = "wide",
    gpus: int = 4,
) -> JobView:
    """A running elastic job with its base gang on the first nodes and flexible workers behind."""
    placed = [
        make_worker_view(name, index, node, gpus=gpus, is_flexible=index >= base)
        for index, node in enumerate(nodes)
    ]
    return make_job_view(
        name,
        state=JobState.RUNNING,
        workers=(base, len(nodes)),
        gpus_per_worker=gpus,
        remaining_work_s=work_s,
        placed=placed,
    )


def holding(name: str, *jobs: JobView, gpus: int = 8) -> NodeView:
    """A node with all workers that the jobs have on it."""
    workers = [worker for job in jobs for worker in job.placed if worker.node == name]
    return make_node_view(name, gpus=gpus, workers=workers)


def test_the_shortest_goes_first_by_its_minimum_running_time() -> None:
    """The key of shortest-first is T_min, at the most workers; priority comes before it, and
    instant of submission and job id behind it."""
    jobs = [
        make_job_view("long", remaining_work_s=900.0),
        make_job_view("wide", workers=(1, 10), remaining_work_s=2000.0),  # 200 s at 10 workers
        make_job_view("short", remaining_work_s=300.0, submitted_at_s=2.0),
        make_job_view("early", remaining_work_s=300.0, submitted_at_s=1.0),
        make_job_view("alike", remaining_work_s=300.0, submitted_at_s=1.0),
        make_job_view("urgent", remaining_work_s=9000.0, priority=1),
        make_job_view("runs", state=JobState.RUNNING, remaining_work_s=1.0),
    ]
    line = waiting(make_snapshot(jobs=jobs), shortest_key)
    assert names(line) == ["urgent", "wide", "alike", "early", "short", "long"]
    assert fastest_s(jobs[1]) == pytest.approx(200.0)


def test_first_come_first_served_within_a_priority() -> None:
    """The submission key knows priority and instant, never the running time."""
    jobs = [
        make_job_view("b", submitted_at_s=2.0, remaining_work_s=1.0),
        make_job_view("a", submitted_at_s=1.0, remaining_work_s=9000.0),
        make_job_view("c", submitted_at_s=3.0, priority=5),
    ]
    assert names(waiting(make_snapshot(jobs=jobs), submission_key)) == ["c", "a", "b"]


def test_what_does_not_fit_is_skipped() -> None:
    """A job that does not fit is left out of this pass, and the next ones in line still start."""
    jobs = [
        make_job_view("first", gpus_per_worker=4, remaining_work_s=10.0),
        make_job_view("huge", workers=(2, 2), gpus_per_worker=8, remaining_work_s=20.0),
        make_job_view("last", gpus_per_worker=4, remaining_work_s=30.0),
    ]
    done = admitted([make_node_view("n1")], jobs)
    assert started(done) == ["first", "last"]
    assert names(done.held) == ["huge"]


def test_a_strict_order_blocks_behind_the_first_that_does_not_fit() -> None:
    """Head of the line: nobody behind it starts, even with room."""
    jobs = [
        make_job_view("first", gpus_per_worker=4, submitted_at_s=1.0),
        make_job_view("huge", workers=(2, 2), gpus_per_worker=8, submitted_at_s=2.0),
        make_job_view("last", gpus_per_worker=1, submitted_at_s=3.0),
    ]
    nodes = [make_node_view("n1"), make_node_view("n2")]
    done = admitted(nodes, jobs, key=submission_key, is_strict=True)
    assert started(done) == ["first"]
    assert names(done.held) == ["huge", "last"]


def test_what_could_never_run_blocks_nobody_in_a_strict_order() -> None:
    """A gang larger than all nodes, or a worker larger than each, would hold the line for ever; on
    a type that could hold it, it is the head of the line all the same."""
    nodes = [make_node_view("h1"), make_node_view("a1", gpu_type="A100", free_gpus=4)]
    jobs = [
        make_job_view("gang", workers=(9, 9), gpus_per_worker=2, submitted_at_s=1.0),
        make_job_view("worker", gpus_per_worker=16, submitted_at_s=2.0),
        make_job_view("twice", gpus_per_worker=8, multiplier={"H100": 2}, submitted_at_s=3.0),
        make_job_view("last", gpus_per_worker=4, submitted_at_s=4.0),
        make_job_view("small", types=("A100",), submitted_at_s=5.0),
    ]
    snapshot = make_snapshot(nodes=nodes, jobs=jobs)
    done, room, _ = phase_1(snapshot, key=submission_key, is_strict=True)
    assert started(done) == ["last"]
    assert where(done, "last") == {"h1": 1}
    told = {
        each.job_id: each.blockers
        for each in holds(snapshot, room, done.held, strict=hosts_of(snapshot))
    }
    assert told.pop(JobId("small")) == ("behind twice, which does not fit (the order is strict)",)
    assert set(told) == {"gang", "worker", "twice"}
    assert not [why for whys in told.values() for why in whys if "behind" in why]


def test_a_strict_order_is_one_line_per_gpu_type() -> None:
    """Who waits for one type holds up nobody who can go without it, and everybody who cannot."""
    nodes = [make_node_view("h1", free_gpus=4), make_node_view("a1", gpu_type="A100")]
    jobs = [
        make_job_view("huge", types=("H100",), gpus_per_worker=8, submitted_at_s=1.0),
        make_job_view("like", types=("H100",), submitted_at_s=2.0),
        make_job_view("other", types=("A100",), submitted_at_s=3.0),
        make_job_view("any", submitted_at_s=4.0),
    ]
    snapshot = make_snapshot(nodes=nodes, jobs=jobs)
    done, room, _ = phase_1(snapshot, key=submission_key, is_strict=True)
    assert started(done) == ["other", "any"]
    assert where(done, "any") == {"a1": 1}
    head, behind = holds(snapshot, room, done.held, strict=hosts_of(snapshot))
    assert (head.job_id, behind.job_id) == ("huge", "like")
    assert behind.blockers == ("behind huge, which does not fit (the order is strict)",)


def test_priority_takes_the_room() -> None:
    """With room for one, the higher priority starts, however long it is."""
    jobs = [
        make_job_view("quick", gpus_per_worker=8, remaining_work_s=1.0),
        make_job_view("urgent", gpus_per_worker=8, remaining_work_s=9000.0, priority=1),
    ]
    assert started(admitted([make_node_view("n1")], jobs)) == ["urgent"]


def test_a_gang_starts_whole_or_not_at_all() -> None:
    """Three workers of four find room: none starts, and what they left is the next job's."""
    jobs = [
        make_job_view("gang", workers=(4, 4), gpus_per_worker=4, remaining_work_s=1.0),
        make_job_view("small", gpus_per_worker=4, remaining_work_s=9.0),
    ]
    nodes = [make_node_view("n1"), make_node_view("n2", gpus=4)]
    done = admitted(nodes, jobs)
    assert started(done) == ["small"]
    assert names(done.held) == ["gang"]


def test_gangs_of_a_pass_are_placed_largest_workers_first() -> None:
    """Best-fit decreasing: the order says who starts, worker size says who chooses its node; the
    one GPU job leaves the whole room of the other node to a third one."""
    nodes = [make_node_view("n1", free_gpus=4), make_node_view("n2")]
    jobs = [
        make_job_view("tiny", remaining_work_s=1.0),
        make_job_view("half", gpus_per_worker=4, remaining_work_s=2.0),
        make_job_view("most", gpus_per_worker=7, remaining_work_s=3.0),
    ]
    done = admitted(nodes, jobs)
    assert started(done) == ["tiny", "half", "most"]
    assert [where(done, name) for name in ("half", "most", "tiny")] == [
        {"n1": 1},
        {"n2": 1},
        {"n2": 1},
    ]


def test_packing_anew_takes_no_gpu_type_from_the_first_in_line() -> None:
    """The job that was first keeps the type it prefers, though a larger one would choose first."""
    nodes = [make_node_view("a1", gpu_type="A100"), make_node_view("h1", gpus=4)]
    types = ("H100", "A100")
    jobs = [
        make_job_view(
            "first", types=types, workers=(2, 2), gpus_per_worker=2, remaining_work_s=1.0
        ),
        make_job_view("larger", types=types, gpus_per_worker=4, remaining_work_s=2.0),
    ]
    done = admitted(nodes, jobs)
    assert {gang.job.job_id: gang.gpu_type for gang in done.gangs} == {
        "first": "H100",
        "larger": "A100",
    }


def test_a_flexible_worker_makes_room_for_a_base_gang() -> None:
    """Base demand goes before flexible: the worker goes, and only as many as are needed."""
    wide = grown(nodes=("n1", "n1", "n2"))
    nodes = [holding("n1", wide), holding("n2", wide)]
    waits = make_job_view("waits", gpus_per_worker=8)
    done, room, shares = phase_1(make_snapshot(nodes=nodes, jobs=[wide, waits]))
    assert where(done, "waits") == {"n2": 1}
    assert [worker.worker_index for worker in shares["wide"].removed] == [2]
    assert sum(room.free.values()) == 0


def test_free_gpus_are_used_before_flexible_workers_go() -> None:
    """Nobody shrinks for a gang that fits beside him, also where its preferred type is full."""
    wide = grown(nodes=("n1", "n1"))
    nodes = [holding("n1", wide), make_node_view("a1", gpu_type="A100")]
    waits = make_job_view("waits", gpus_per_worker=4, types=("H100", "A100"))
    done, _, shares = phase_1(make_snapshot(nodes=nodes, jobs=[wide, waits]))
    assert where(done, "waits") == {"a1": 1}
    assert shares["wide"].removed == []


def test_the_flexible_worker_goes_that_saves_the_least_time() -> None:
    """Of two jobs the one with less work left loses its worker."""
    short = grown(nodes=("n1", "n3"), work_s=100.0, name="short")
    long = grown(nodes=("n1", "n2"), work_s=9000.0, name="long")
    nodes = [holding("n1", short, long)]
    nodes += [holding(name, short, long, gpus=4) for name in ("n2", "n3")]
    waits = make_job_view("waits", gpus_per_worker=4)
    _, _, shares = phase_1(make_snapshot(nodes=nodes, jobs=[short, long, waits]))
    assert (len(shares["short"].removed), len(shares["long"].removed)) == (1, 0)


def test_workers_that_cannot_be_taken_now_make_no_room() -> None:
    """A job that is resizing keeps its flexible workers, and base workers are never taken."""
    busy = grown(nodes=("n1", "n1"))
    busy = make_job_view(
        "wide",
        state=JobState.RESIZING,
        workers=(1, 2),
        gpus_per_worker=4,
        placed=busy.placed,
        is_resizable=False,
    )
    waits = make_job_view("waits", gpus_per_worker=4)
    done = admitted([holding("n1", busy)], [busy, waits])
    assert names(done.held) == ["waits"]


def test_a_worker_whose_place_nobody_took_stays() -> None:
    """A later gang clears more than it needs: an earlier, smaller worker has room again."""
    small = grown(nodes=("n2", "n1"), name="small", gpus=2, work_s=10.0)
    wide = grown(nodes=("n3", "n1"), name="wide", gpus=4, work_s=9000.0)
    sizes = {"n1": 6, "n2": 2, "n3": 4}
    nodes = [holding(name, small, wide, gpus=gpus) for name, gpus in sizes.items()]
    jobs = [
        make_job_view("pair", gpus_per_worker=2, remaining_work_s=1.0),
        make_job_view("one", gpus_per_worker=1, remaining_work_s=2.0),
    ]
    done, room, shares = phase_1(make_snapshot(nodes=nodes, jobs=[small, wide, *jobs]))
    assert started(done) == ["pair", "one"]
    assert (len(shares["small"].removed), len(shares["wide"].removed)) == (0, 1)
    assert sum(room.free.values()) == 1


def test_a_gang_never_goes_to_a_lent_node_that_its_rules_forbid() -> None:
    """Semi-preemptible: no base worker on a lent node, though it is the only room; the next one
    in line, alike but for that, takes it."""
    lent = make_node_view("l1", role=NodeRole.ON_LOAN)
    from_service = make_service_view()
    semi = make_job_view("semi", preemptibility=Preemptibility.SEMI, remaining_work_s=1.0)
    full = make_job_view("full", preemptibility=Preemptibility.FULL)
    snapshot = make_snapshot(nodes=[lent], jobs=[semi, full], services=[from_service])
    done, _, _ = phase_1(snapshot)
    assert (started(done), names(done.held)) == (["full"], ["semi"])
