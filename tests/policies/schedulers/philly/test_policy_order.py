"""Philly's rules of order and of victims (ATC'19, section 2.3), one decision each."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from coordinator.policies.contract.decisions import Preempt
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from tests.harness.builders import job_with
from tests.policies.machines import cell, decide, job, machine, placed, started


def since(job: JobView, started_at_s: float) -> JobView:
    """The same job, begun then."""
    return job_with(job, started_at_s=started_at_s)


def with_quotas(snapshot: ClusterSnapshot, quotas: Mapping[str, int]) -> ClusterSnapshot:
    """Tenants with these guarantees."""
    tenants = [TenantView(name=name, guarantee_gpus=gpus) for name, gpus in sorted(quotas.items())]
    return replace(snapshot, tenants=tuple(tenants))


def stopped(snapshot: ClusterSnapshot, knobs: str = "") -> list[str]:
    """Who is preempted in a pass."""
    found = decide(f"philly{knobs}", snapshot)
    return [each.job_id for each in found.decisions if isinstance(each, Preempt)]


@pytest.mark.parametrize(("quotas", "first"), [((2, 8), "big"), ((8, 2), "small")])
def test_turns_go_by_the_part_of_a_quota_in_use(quotas: tuple[int, int], first: str) -> None:
    """One of two GPUs is half of a quota, two of eight are a quarter: not GPUs count but parts."""
    small, big = quotas
    jobs = (
        job("s", "small", nodes=("n0",)),
        job("b", "big", gpus=2, nodes=("n0",)),
        job("small-next", "small", gpus=1),
        job("big-next", "big", gpus=1),
    )
    snapshot = cell(machine("n0", gpus=4, jobs=jobs), jobs=jobs)
    found = started(decide("philly", with_quotas(snapshot, {"small": small, "big": big})))
    assert found == [f"{first}-next"]


@pytest.mark.parametrize(("in_use", "stops"), [(17, []), (18, ["b"])])
def test_preemption_begins_at_nine_tenths_of_all_gpus(in_use: int, stops: list[str]) -> None:
    """Of twenty GPUs eighteen, as in the study; the others are free, but not three on one server.

    Four tenants, so that each is due five.
    """
    jobs = (
        since(job("a", "rich", gpus=4, nodes=("n0",)), 1.0),
        since(job("b", "rich", gpus=4, nodes=("n0",)), 2.0),
        job("c", "rich", gpus=4, nodes=("n1",)),
        job("third", "third", gpus=1, nodes=("n1",)),
        job("fourth", "fourth", gpus=in_use - 15, nodes=("n2",)),
        job("poor", "poor", gpus=2, nodes=("n2",)),
        job("asks", "poor", gpus=3),
    )
    sizes = {"n0": 8, "n1": 6, "n2": 6}
    nodes = [machine(name, gpus=gpus, jobs=jobs) for name, gpus in sizes.items()]
    assert stopped(cell(*nodes, jobs=jobs)) == stops
    assert stopped(cell(*nodes, jobs=jobs), ":preempt_ratio=1") == []


def test_the_youngest_job_beyond_quota_goes_first() -> None:
    """Least work is lost with it; neither names nor sizes decide."""
    begun = {"a": 5.0, "b": 9.0, "c": 1.0, "d": 7.0}
    jobs = (
        *(since(job(name, "rich", nodes=("n0",)), at_s) for name, at_s in begun.items()),
        job("asks", "poor"),
    )
    snapshot = cell(machine("n0", gpus=4, jobs=jobs), jobs=jobs)
    assert stopped(with_quotas(snapshot, {"rich": 2, "poor": 2})) == ["b"]


def test_whoever_made_room_in_vain_goes_on() -> None:
    """The youngest is on a server where the gang does not fit: the next one alone is stopped."""
    jobs = (
        since(job("young", "rich", nodes=("n0",)), 9.0),
        since(job("old", "rich", gpus=2, nodes=("n1",)), 5.0),
        since(job("poor", "poor", gpus=1, nodes=("n0",)), 0.0),
        job("asks", "poor", gpus=2),
    )
    nodes = [machine(name, gpus=2, jobs=jobs) for name in ("n0", "n1")]
    snapshot = with_quotas(cell(*nodes, jobs=jobs), {"rich": 0, "poor": 4})
    assert stopped(snapshot) == ["old"]
    assert placed(decide("philly", snapshot)) == {"asks": {"n1": 1}}


def test_what_was_freed_in_vain_is_given_to_nobody_beyond_its_quota() -> None:
    """Whoever goes on after all keeps its GPUs from a job that comes later, and they count as used
    of its tenant's quota: 3 of 2 GPUs are more than the 5 of 4 of the tenant whose turn it is."""
    jobs = (
        since(job("young", "rich", nodes=("n0",)), 9.0),
        since(job("old", "rich", gpus=2, nodes=("n1",)), 5.0),
        since(job("stays", "rich", gpus=2, nodes=("n2",)), 1.0),
        since(job("third", "third", gpus=5, nodes=("n2",)), 1.0),
        since(job("fourth", "fourth", gpus=1, nodes=("n0",)), 1.0),
        job("asks", "poor", gpus=2),
        *(job(f"{name}-next", name, submitted_at_s=at) for at, name in ((1, "rich"), (2, "third"))),
    )
    sizes = {"n0": 2, "n1": 2, "n2": 8}
    nodes = [machine(name, gpus=gpus, jobs=jobs) for name, gpus in sizes.items()]
    quotas = {"rich": 2, "third": 4, "fourth": 4, "poor": 2}
    snapshot = with_quotas(cell(*nodes, jobs=jobs), quotas)
    assert stopped(snapshot, ":preempt_ratio=0") == ["old"]
    found = decide("philly:preempt_ratio=0", snapshot)
    assert placed(found) == {"asks": {"n1": 1}, "third-next": {"n2": 1}}


def test_nobody_is_stopped_for_a_tenant_beyond_its_quota() -> None:
    """A full cell and a victim beyond quota are not enough: who asks must be within its own."""
    jobs = (
        since(job("rich", "rich", gpus=4, nodes=("n0",)), 1.0),
        job("asks", "poor", gpus=4),
    )
    snapshot = cell(machine("n0", gpus=4, jobs=jobs), jobs=jobs)
    assert stopped(with_quotas(snapshot, {"rich": 0, "poor": 4})) == ["rich"]
    assert stopped(with_quotas(snapshot, {"rich": 0, "poor": 3})) == []


@pytest.mark.parametrize(("weight", "stops"), [(3.0, ["small"]), (1.0, [])])
def test_without_guarantees_a_quota_is_the_part_of_a_weight(
    weight: float, stops: list[str]
) -> None:
    """Three times the weight is three times the quota: 6 of 8 GPUs, and the other is due 2.

    With 5 in use the heavy one is within its quota for one more, and the light one is beyond its
    own with 3; by equal weights neither is due more than 4.
    """
    jobs = (
        job("large", "heavy", gpus=5, nodes=("n0",)),
        since(job("small", "light", gpus=1, nodes=("n0",)), 9.0),
        since(job("rest", "light", gpus=2, nodes=("n0",)), 1.0),
        job("asks", "heavy", gpus=1),
    )
    tenants = (TenantView(name="heavy", weight=weight), TenantView(name="light"))
    snapshot = replace(cell(machine("n0", gpus=8, jobs=jobs), jobs=jobs), tenants=tenants)
    assert stopped(snapshot) == stops


# --- who is like whom -----------------------------------------------------------------------------


def on(job: JobView, gpu_type: str) -> JobView:
    """The same job, which wants GPUs of that type only."""
    return replace(job, gpu=replace(job.gpu, types=(gpu_type,)))


@pytest.mark.parametrize(
    "first",
    [
        on(job("first", "poor", workers=(2, 2)), "H100"),
        on(job("first", "poor", gpus=2), "A100"),
        on(job_with(job("first", "poor", workers=(2, 2)), nodes_avoided=("m0",)), "A100"),
    ],
    ids=["another type", "another gang", "another place"],
)
def test_a_job_without_victims_hides_none_from_one_that_asks_for_something_else(
    first: JobView,
) -> None:
    """Whom nobody can make room for says nothing of other GPU types, gangs or nodes.

    Each of three tenants is due two of six GPUs. Of four the rich one can lose two, the youngest:
    servers of one GPU each, that take two workers of one where nobody avoids any of them.
    """
    jobs = (
        since(job("old", "rich", gpus=2, nodes=("n0",)), 1.0),
        job("third", "third", gpus=2, nodes=("n0",)),
        *(
            replace(since(job(f"young{at}", "rich", nodes=(f"m{at}",)), 2.0), gpu_type="A100")
            for at in range(2)
        ),
        first,
        replace(on(job("asks", "poor", workers=(2, 2)), "A100"), submitted_at_s=1.0),
    )
    nodes = [machine("n0", gpus=4, jobs=jobs)]
    nodes += [replace(machine(n, gpus=1, jobs=jobs), gpu_type="A100") for n in ("m0", "m1")]
    for seen in (tuple(each for each in jobs if each != first), jobs):
        found = cell(*nodes, jobs=seen)
        assert sorted(stopped(found)) == ["young0", "young1"]
        assert started(decide("philly", found)) == ["asks"]


def test_a_job_that_leaves_a_node_alone_hides_no_room_there() -> None:
    """From one alike of its tenant that may stand on it."""
    jobs = (
        job_with(job("avoids", gpus=2), nodes_avoided=("n0",)),
        job("asks", gpus=2, submitted_at_s=1.0),
    )
    assert started(decide("philly", cell(machine("n0", gpus=2), jobs=jobs))) == ["asks"]


def test_what_victims_leave_is_for_one_alike_of_a_job_that_found_nothing() -> None:
    """Four GPUs were freed for one, as only that is within quota: who asks for two after it finds
    them, as did nobody before it."""
    jobs = (
        since(job("rich", "rich", gpus=4, nodes=("n0",)), 1.0),
        job("early", "poor", gpus=2),
        job("asks", "poor", gpus=1, submitted_at_s=1.0),
        job("late", "poor", gpus=2, submitted_at_s=2.0),
    )
    snapshot = cell(machine("n0", gpus=4, jobs=jobs), jobs=jobs)
    found = decide("philly", with_quotas(snapshot, {"rich": 0, "poor": 1}))
    assert started(found) == ["asks", "late"]


def test_a_victim_that_would_take_its_tenant_below_its_quota_hides_no_other() -> None:
    """The youngest of five GPUs has four, of a part of two: the older one with one is stopped."""
    jobs = (
        since(job("young", "rich", gpus=4, nodes=("n0",)), 9.0),
        since(job("old", "rich", nodes=("n0",)), 1.0),
        job("asks", "poor"),
    )
    tenants = (TenantView(name="rich", weight=2.0), TenantView(name="poor", weight=3.0))
    snapshot = replace(cell(machine("n0", gpus=5, jobs=jobs), jobs=jobs), tenants=tenants)
    assert stopped(snapshot) == ["old"]


def test_two_askers_stop_two_victims() -> None:
    """What the first was given is not given to the second as well; the youngest goes first."""
    jobs = (
        *(since(job(f"rich{n}", "rich", nodes=("n0",)), float(n)) for n in range(4)),
        *(job(f"asks{n}", "poor", submitted_at_s=float(n)) for n in range(2)),
    )
    snapshot = cell(machine("n0", gpus=4, jobs=jobs), jobs=jobs)
    assert stopped(snapshot) == ["rich3", "rich2"]
    assert started(decide("philly", snapshot)) == ["asks0", "asks1"]
