"""What gangs hold of a floor in a pass: what is still there of it, and only if they could fit."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, NodeName
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.schedulers.philly.gang_reservation import Attempted, Holding
from coordinator.policies.schedulers.philly.gang_tries import Patience
from coordinator.policies.schedulers.philly.locality import Gang
from coordinator.policies.schedulers.philly.quotas import QuotasInUse
from coordinator.policies.tenants.tenancy import Tenancy
from tests.harness.builders import NOW_S, make_job_view, make_node_view, make_snapshot
from tests.policies.machines import cell, decide, job, machine, started
from tests.tables import each_row

OLD, NEW = NodeName("old"), NodeName("new")
PATIENCE = Patience()


GANG = replace(make_job_view("gang", gpus_per_worker=8), tenant="line")


def snapshot(**free: int) -> ClusterSnapshot:
    """Nodes of eight GPUs of which so many are free, and a gang that waits."""
    nodes = [make_node_view(name, free_gpus=gpus) for name, gpus in free.items()]
    return make_snapshot(nodes=nodes, jobs=(GANG,))


def floor(**free: int) -> FreeGpus:
    """The same, as a pass gives it away."""
    return FreeGpus(snapshot(**free))


def holding(found: FreeGpus, *, reserves: bool = False) -> Holding:
    """Of one gang in a line at a time, of a tenant whose quota leaves enough for all of them."""
    tenant = TenantView(name="line", guarantee_gpus=100)
    seen = replace(snapshot(**found.free), tenants=(tenant,))
    return Holding(found, QuotasInUse(seen, Tenancy(seen)), PATIENCE, NOW_S, 1, reserves=reserves)


def remembered(memory: bytes) -> Mapping[JobId, Attempted]:
    """What a pass of Philly leaves for the next one."""
    return msgspec.msgpack.decode(memory, type=dict[JobId, Attempted])


# --- what is still there ------------------------------------------------------------------------


@each_row(("free", "kept"), [(8, 6), (6, 6), (4, 4), (0, 0)])
def test_a_gang_goes_on_holding_no_more_than_is_free(free: int, kept: int) -> None:
    """What others have taken of it meanwhile is theirs, and no node has less than nothing free."""
    found = floor(old=free)
    tried = holding(found).resume(GANG, Attempted(NOW_S, {OLD: 6}))
    assert tried == Attempted(NOW_S, {OLD: 6} if kept == 6 else {OLD: 4} if kept else {})
    assert found.free[OLD] == free - kept


def test_what_a_gang_held_on_a_node_that_left_is_gone() -> None:
    """It holds what it has elsewhere."""
    found = floor(new=3)
    tried = holding(found).resume(GANG, Attempted(NOW_S, {OLD: 6, NEW: 2}))
    assert (tried.held, found.free) == ({NEW: 2}, {NEW: 1})


def test_two_gangs_do_not_hold_the_same_gpus() -> None:
    """Where less is free than both held, the second has what the first leaves."""
    found = floor(old=8)
    both = holding(found)
    held = [both.resume(GANG, Attempted(NOW_S, {OLD: 6})).held for _ in range(2)]
    assert held == [{OLD: 6}, {OLD: 2}]
    assert found.free == {OLD: 0}


@settings(max_examples=100, deadline=None)
@given(
    free=st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 8)),
    held=st.lists(
        st.dictionaries(st.sampled_from("abc").map(NodeName), st.integers(1, 8)), max_size=4
    ),
    age_s=st.sampled_from((0.0, PATIENCE.hold_s, PATIENCE.hold_s + PATIENCE.back_off_s)),
)
def test_holding_and_letting_go_loses_no_gpu(
    free: dict[str, int], held: list[dict[NodeName, int]], age_s: float
) -> None:
    """Whatever was held before: nothing is below zero, and all that is let go of is free again."""
    found = floor(**free)
    before, made = dict(found.free), holding(found)
    gangs = [made.resume(GANG, Attempted(NOW_S - age_s, each)) for each in held]
    assert all(gpus >= 0 for gpus in found.free.values())
    for gang in gangs:
        made.let_go(GANG, gang)
    assert found.free == before


def test_a_gang_that_held_more_than_is_left_starts_nowhere_it_does_not_fit() -> None:
    """Of eight GPUs that it held six are free, and another node has left: it waits for the others,
    and no worker of anybody stands on what is not there."""
    jobs = (
        job("gang", gpus=8),
        job("small", submitted_at_s=5.0),
        job("on-old", "other", gpus=2, nodes=("old",)),
        job("on-new", "other", gpus=8, nodes=("new",)),
    )
    snapshot = cell(machine("old", jobs=jobs), machine("new", jobs=jobs), jobs=jobs)
    memory = msgspec.msgpack.encode(
        {"gang": Attempted(NOW_S - 10.0, {OLD: 8, NodeName("gone"): 8})}
    )
    found = decide("philly", snapshot, memory)
    assert started(found) == []
    assert remembered(found.memory)[JobId("gang")].held == {OLD: 6}


# --- what is let go of --------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [0, 2, 6])
def test_what_a_gang_keeps_is_there_for_other_lines_alone(taken: int) -> None:
    """As much of it as they were not given is no room for its own, and none of it is lost."""
    found = floor(old=6, new=2)
    made, line = holding(found, reserves=True), GANG.tenant
    tried = Attempted(NOW_S - PATIENCE.hold_s)
    assert made.acquire(GANG, [Gang(1, 8, "H100")], tried) == {}
    assert (found.free[OLD], made.keeps(line), made.keeps("other")) == (6, True, False)
    found.free[OLD] -= taken
    with made.kept_from("other"):
        assert found.free[OLD] == 6 - taken
    with made.kept_from(line):
        assert found.free[OLD] == 0
    assert found.free[OLD] == 6 - taken


@pytest.mark.parametrize(("reserves", "holds"), [(False, {OLD: 6}), (True, {})])
def test_one_gang_of_a_line_keeps_or_holds_at_a_time(
    holds: dict[NodeName, int], *, reserves: bool
) -> None:
    """What the first one keeps counts, and the next holds nothing beside it; where it keeps nothing
    the next holds the same."""
    made, gang = holding(floor(old=6, new=5), reserves=reserves), Gang(1, 8, "H100")
    made.acquire(GANG, [gang], Attempted(NOW_S - PATIENCE.hold_s))
    with made.kept_from(GANG.tenant):
        assert made.acquire(replace(GANG, job_id=JobId("next")), [gang], Attempted(NOW_S)) == holds


# --- gangs that nobody could ever hold GPUs for -------------------------------------------------


def rare_cell(*jobs: JobView) -> ClusterSnapshot:
    """Eight GPUs of a rare type, of which another tenant has two, and twenty-four of another."""
    everybody = (*jobs, job("runs", "other", gpus=2, nodes=("rare",)))
    rare = replace(machine("rare", jobs=everybody), gpu_type="RARE")
    return cell(rare, machine("many", gpus=24), jobs=everybody)


def wants_rare(name: str, gpus: int, at_s: float) -> JobView:
    """A gang of workers of one GPU of the rare type."""
    made = job(name, workers=(gpus, gpus), submitted_at_s=at_s)
    return replace(made, gpu=replace(made.gpu, types=("RARE",)))


def test_a_gang_that_no_nodes_could_take_keeps_nothing_from_others() -> None:
    """Ten GPUs of a type that has eight are within quota, and would be held in vain for ever:
    whoever comes after it starts, or holds what it finds."""
    never, fits = wants_rare("never", 10, 1.0), wants_rare("fits", 6, 2.0)
    found = decide("philly", rare_cell(never, fits))
    assert started(found) == ["fits"]
    waits = wants_rare("waits", 8, 2.0)
    found = decide("philly", rare_cell(never, waits))
    assert {name: tried.held for name, tried in remembered(found.memory).items()} == {
        "never": {},
        "waits": {NodeName("rare"): 6},
    }


def test_what_it_held_before_the_cell_became_smaller_is_let_go_of_at_once() -> None:
    """Another gang of its tenant holds in the same pass."""
    never, waits = wants_rare("never", 10, 1.0), wants_rare("waits", 8, 0.5)
    before = {"never": Attempted(NOW_S, {NodeName("rare"): 6})}
    snapshot = rare_cell(never, waits)
    found = decide("philly", snapshot, msgspec.msgpack.encode(before))
    held = {name: tried.held for name, tried in remembered(found.memory).items()}
    assert held == {"never": {}, "waits": {NodeName("rare"): 6}}


def test_a_gang_that_could_fit_holds_as_before() -> None:
    """Eight of eight GPUs will do once the other two are free."""
    found = decide("philly", rare_cell(wants_rare("gang", 8, 1.0)))
    assert remembered(found.memory)[JobId("gang")].held == {"rare": 6}
