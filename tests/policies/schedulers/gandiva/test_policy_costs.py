"""What a pass of Gandiva costs when many wait for turns, in calls, and that nothing else comes of
it: jobs of one shape are looked at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuUuid, JobState, NodeName
from coordinator.policies.contract.decisions import Decision, PendingReason, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.schedulers.gandiva.policy import Knobs, allocate, hold
from tests.draws import together, whole, yes_or_no
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.counted_calls import calls
from tests.tables import each_row

GPUS = 4
"""Of each node."""


LEAST_CALLS = 5
"""Of a look for free GPUs: for types, for nodes of the gang's size, and for any."""


Gpu = tuple[str, int]
"""A node, and the number of one of its GPUs."""


def seated(
    name: str,
    gpus: Sequence[Gpu],
    *,
    computes: bool = True,
    began_s_ago: float = 300.0,
    rested: bool = True,
    grown: Sequence[Gpu] = (),
    priority: int = 0,
    tenant: str = "",
) -> JobView:
    """A gang of workers of one GPU each; `grown` are those of its flexible workers."""
    placed = [
        replace(
            make_worker_view(name, at, node, is_flexible=at >= len(gpus)),
            gpu_uuids=(GpuUuid(f"{node}-{number}"),),
        )
        for at, (node, number) in enumerate((*gpus, *grown))
    ]
    job = make_job_view(
        name,
        state=JobState.RUNNING if computes else JobState.SUSPENDED,
        workers=(len(gpus), len(gpus) + len(grown)),
        placed=placed,
        priority=priority,
    )
    return job_with(
        job,
        started_at_s=NOW_S - (900.0 if rested and not computes else began_s_ago),
        suspended_at_s=None if computes else NOW_S - began_s_ago,
        saves_when_asked=True,
        tenant=tenant,
    )


def waiting(
    name: str,
    workers: int,
    *,
    at_s: float = 0.0,
    priority: int = 0,
    tenant: str = "",
    gpus: int = 1,
) -> JobView:
    """A job that has no place yet."""
    job = make_job_view(
        name,
        workers=(workers, workers),
        gpus_per_worker=gpus,
        submitted_at_s=at_s,
        priority=priority,
    )
    return replace(job, tenant=tenant)


def cell(jobs: Sequence[JobView], count: int, *, tenants: Sequence[str] = ()) -> ClusterSnapshot:
    """Nodes n0, n1 and so on, of which these jobs have GPUs together."""
    nodes = [
        make_node_view(
            name,
            gpus=GPUS,
            workers=(mine := [each for job in jobs for each in job.placed if each.node == name]),
            free_gpus=GPUS - len({uuid for each in mine for uuid in each.gpu_uuids}),
        )
        for name in (f"n{number}" for number in range(count))
    ]
    views = tuple(TenantView(name=name) for name in tenants)
    return replace(make_snapshot(nodes=nodes, jobs=jobs), tenants=views)


def crowded(count: int, more: int) -> ClusterSnapshot:
    """So many nodes on which four gangs take turns on all GPUs, and so many jobs that wait."""
    jobs = [
        seated(f"r{node}-{depth}", [(f"n{node}", at) for at in range(GPUS)], computes=not depth)
        for node in range(count)
        for depth in range(4)
    ]
    return cell([*jobs, *(waiting(f"w{at:03}", GPUS, at_s=at) for at in range(more))], count)


def cost(snapshot: ClusterSnapshot, knobs: Knobs | None = None) -> int:
    """Calls of a first pass, once whatever is only made once was made."""
    allocate(Knobs(), snapshot, b"")
    return calls(lambda: allocate(knobs or Knobs(), snapshot, b""))


def apart(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """The same, where each job avoids a node of its own that is not there: no two are alike."""
    jobs = tuple(
        job_with(job, nodes_avoided=(NodeName(f"not-there-{at}"),))
        for at, job in enumerate(snapshot.jobs)
    )
    return replace(snapshot, jobs=jobs)


def test_one_more_of_many_that_wait_alike_costs_no_look_at_nodes_and_jobs() -> None:
    """Forty more of one shape cost as much beside 128 jobs on 32 nodes as beside 8 on two: whether
    GPUs are free, or a turn is over somewhere, was found out for the first of them."""

    def added(count: int) -> int:
        return cost(crowded(count, 50)) - cost(crowded(count, 10))

    assert added(32) == added(2) > 0


def test_suspended_jobs_of_one_shape_look_for_vacated_gpus_once() -> None:
    """Twelve of one shape are spared eleven looks each slice, against twelve of their own."""
    alike, knobs = crowded(4, 0), Knobs(packs=False)
    assert cost(alike, knobs) + 11 * LEAST_CALLS <= cost(apart(alike), knobs)


# --- nothing else comes of it -------------------------------------------------------------------


GANGS = together(
    (300.0, 100.0, 5.0), (True, False), (0, 0, 1), ("a", "b"), (1, 1, 2, 4), range(10),
    (0, 0, 0, 1, 2),
)  # fmt: skip
GUESTS = together((1, 2, 4), range(1000))
NEWCOMERS = together(((1, 1), (1, 1), (2, 1), (4, 1), (1, 2)), ("a", "b"), (0, 0, 1))


@st.composite
def crowds(draw: st.DrawFn) -> ClusterSnapshot:
    """Nodes that are almost full, gangs some of which share GPUs with others in part, of two
    tenants and priorities, some elastic, and jobs of few shapes that wait."""
    count = draw(whole(1, 3))
    gpus = [(f"n{node}", at) for node in range(count) for at in range(GPUS)]
    jobs: list[JobView] = []

    def gang(
        drawn: tuple[Any, ...], seat: Sequence[Gpu], *, computes: bool, grown: Sequence[Gpu] = ()
    ) -> JobView:
        return seated(
            f"r{len(jobs)}",
            seat,
            computes=computes,
            began_s_ago=drawn[0],
            rested=drawn[1],
            grown=grown,
            priority=drawn[2],
            tenant=drawn[3],
        )

    left = list(gpus)
    while left:
        drawn = draw(GANGS)
        size, free, more = drawn[4:]
        seat, left = left[:size], left[size:]
        if free == 9:
            continue
        grown = [gpu for gpu in left[:more] if gpu[0] == seat[0][0] == seat[-1][0]]
        left = left[len(grown) :]
        jobs.append(gang(drawn, seat, computes=True, grown=grown))
    has = {uuid for job in jobs for each in job.placed for uuid in each.gpu_uuids}
    alone = {
        uuid for job in jobs for each in job.placed if each.is_flexible for uuid in each.gpu_uuids
    }
    base = [gpu for gpu in gpus if GpuUuid(f"{gpu[0]}-{gpu[1]}") in has - alone]
    for _ in range(draw(whole(0, 3))):
        size, first = draw(GUESTS)
        first %= len(gpus)
        if seat := base[first : first + size]:
            jobs.append(gang(draw(GANGS), seat, computes=False))
    for number in range(draw(whole(2, 8))):
        (size, each), tenant, priority = draw(NEWCOMERS)
        jobs.append(
            waiting(f"w{number}", size, at_s=number, gpus=each, tenant=tenant, priority=priority)
        )
    return cell(jobs, count, tenants=("a", "b") if draw(yes_or_no()) else ())


def decided(snapshot: ClusterSnapshot) -> tuple[tuple[Decision, ...], tuple[PendingReason, ...]]:
    """What a pass does, and why others wait."""
    return allocate(Knobs(), snapshot, b"").decisions, hold(Knobs(), snapshot, b"")


@settings(max_examples=300, deadline=None)
@given(crowds())
def test_jobs_that_wait_alike_get_what_they_would_get_one_by_one(snapshot: ClusterSnapshot) -> None:
    """That one of a shape waits in vain is remembered for the next, as long as it is true: the
    decisions are those of a pass that looks for each job anew."""
    assert decided(snapshot) == decided(apart(snapshot))


UNLIKE: dict[str, dict[str, Any]] = {
    "wider": {"workers": (2, 2)},
    "of more GPUs": {"gpus_per_worker": 2},
    "for another type": {"types": ("A100",)},
    "slower there": {"multiplier": {"H100": 2}},
}


@each_row("free", [0, 1])
@each_row("name", [*UNLIKE, "with a node to avoid"])
def test_one_that_finds_no_place_keeps_only_its_like_from_looking(name: str, free: int) -> None:
    """The next one that waits has the free GPU of the only node, or turns with the gang there."""
    first = make_job_view("w0", **UNLIKE.get(name, {}))
    if name not in UNLIKE:
        first = job_with(first, nodes_avoided=(NodeName("n0"),))
    jobs = [seated(f"r{at}", [("n0", at)], began_s_ago=300.0) for at in range(GPUS - free)]
    snapshot = cell([*jobs, first, waiting("w1", 1, at_s=1.0)], 1)
    decisions, holds = decided(snapshot)
    assert [made.job_id for made in decisions if isinstance(made, Start)] == ["w1"]
    assert [each.job_id for each in holds] == ["w0"]


def test_a_job_without_a_seat_to_share_keeps_those_of_other_tenants_from_none() -> None:
    """Where tenants have rules each takes turns with its own only, so that the next one looks."""
    jobs = [seated(f"r{at}", [("n0", at)], tenant="b") for at in range(GPUS)]
    lines = [waiting(f"w{at}", 1, at_s=at, tenant=name) for at, name in enumerate("aab")]
    decisions, holds = decided(cell([*jobs, *lines], 1, tenants=("a", "b")))
    assert [made.job_id for made in decisions if isinstance(made, Start)] == ["w2"]
    assert [each.job_id for each in holds] == ["w0", "w1"]
