"""Philly: what a gang finds in a pass, by the types and the locality that it accepts, and what it
lets others have."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import NodeName
from coordinator.policies.contract.decisions import Allocation, Preempt
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.philly.gang_reservation import Attempted
from coordinator.policies.schedulers.philly.policy import Knobs
from tests.harness.builders import NOW_S
from tests.policies.machines import cell, decide, job, machine, placed, started
from tests.policies.schedulers.philly.test_gang_reservation_quotas import (
    BACKS_OFF_S,
    CYCLE_S,
    RESERVES,
    held,
    memory,
    runs,
    seen,
    told,
)

N0, N1 = NodeName("n0"), NodeName("n1")


ANYWHERE_S = NOW_S - 2 * Knobs().tries * CYCLE_S - 10.0
"""Whoever first did not fit then asks for no locality now, and may hold."""


def quota(**gpus: int) -> list[TenantView]:
    """Tenants with these guarantees."""
    return [TenantView(name=name, guarantee_gpus=count) for name, count in gpus.items()]


def stopped(found: Allocation) -> list[str]:
    """Who is preempted."""
    return [each.job_id for each in found.decisions if isinstance(each, Preempt)]


# --- what it held -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("since_s", "starts"), [(NOW_S - 10.0, []), (BACKS_OFF_S, ["asks"])], ids=["holds", "let go"]
)
def test_what_a_gang_lets_go_of_is_free_before_its_turn(since_s: float, starts: list[str]) -> None:
    """A tenant that comes before its own finds the GPUs at once when the hold is over."""
    jobs = (*runs("a", "n0", 2), *runs("c", "n1", 8), job("gang", gpus=8), job("asks", "b", gpus=6))
    snapshot = seen(*jobs, quotas={"a": 8, "b": 0, "c": 8})
    found = decide("philly", snapshot, memory(gang=Attempted(since_s, {N0: 6})))
    assert started(found) == starts


@pytest.mark.parametrize(
    ("since_s", "starts"), [(NOW_S - 10.0, []), (BACKS_OFF_S, ["later"])], ids=["holds", "lets go"]
)
def test_later_jobs_start_on_what_a_gang_of_their_tenant_lets_go_of(
    since_s: float, starts: list[str]
) -> None:
    """Out of order, as in the study: while it backs off, and not while it holds."""
    jobs = (*runs("a", "n0", 2), *runs("c", "n1", 8), job("gang", gpus=8))
    later = job("later", gpus=6, submitted_at_s=50.0)
    found = decide("philly", seen(*jobs, later), memory(gang=Attempted(since_s, {N0: 6})))
    assert started(found) == starts


def test_the_next_gang_of_a_tenant_holds_while_the_first_backs_off() -> None:
    """Also one that asks for the same; when the first may hold again it waits for that one."""
    jobs = (*runs("c", "n0", 2), *runs("c", "n1", 8), job("gang", gpus=8))
    snapshot = seen(*jobs, job("next", gpus=8, submitted_at_s=50.0), quotas={"a": 8, "c": 8})
    before = memory(gang=Attempted(BACKS_OFF_S, {N0: 6}), next=Attempted(NOW_S - 40.0))
    found = decide("philly", snapshot, before)
    assert held(found) == {"next": {N0: 6}}
    again = replace(snapshot, now_s=NOW_S + CYCLE_S - Knobs().hold_s - 10.0)
    while_next_holds = memory(gang=Attempted(BACKS_OFF_S), next=Attempted(NOW_S, {N0: 6}))
    assert held(decide("philly", again, while_next_holds)) == {"next": {N0: 6}}


def test_a_gang_keeps_to_its_node_though_another_has_more_free_by_now() -> None:
    """It takes what fell free beside what it held, and does not begin anew elsewhere."""
    jobs = (*runs("b", "n0", 5), *runs("b", "n1", 2), job("gang", gpus=8))
    before = memory(gang=Attempted(NOW_S - 10.0, {N0: 2}))
    found = decide("philly", seen(*jobs, quotas={"a": 9, "b": 7}), before)
    assert held(found) == {"gang": {"n0": 3}}


def test_a_gang_that_holds_is_looked_at_after_one_alike_that_found_nothing() -> None:
    """One of higher priority came later and may not hold beside it: what it holds stays its own,
    and another tenant is not given it as well."""
    jobs = (
        *runs("a", "n0", 1), *runs("b", "n0", 1), *runs("c", "n1", 8), job("gang", gpus=8),
        replace(job("urgent", gpus=8, submitted_at_s=50.0), priority=1),
        job("asks", "b", gpus=6, submitted_at_s=60.0),
    )  # fmt: skip
    snapshot = seen(*jobs, quotas={"a": 18, "b": 1, "c": 8})
    before = memory(gang=Attempted(NOW_S - 10.0, {N0: 6}), urgent=Attempted(NOW_S - 5.0))
    found = decide("philly", snapshot, before)
    assert (started(found), held(found)) == ([], {"gang": {"n0": 6}})


# --- GPU types ----------------------------------------------------------------------------------


def typed(*jobs: JobView, n1_gpus: int = 8) -> ClusterSnapshot:
    """A node of each of two types, and nothing promised but to tenant a."""
    nodes = [
        replace(machine("n0", jobs=jobs), gpu_type="OLD"),
        replace(machine("n1", gpus=n1_gpus, jobs=jobs), gpu_type="NEW"),
    ]
    tenants = (TenantView(name="a", guarantee_gpus=16), TenantView(name="b", guarantee_gpus=16))
    return replace(cell(*nodes, jobs=jobs), tenants=tenants)


def on(job: JobView, *types: str) -> JobView:
    """The same job, which accepts these types in this order."""
    return replace(job, gpu=replace(job.gpu, types=types))


def test_a_type_that_is_known_to_be_full_leaves_the_next_one_to_try() -> None:
    """A job of one type found nothing there: its like that accepts another one starts on that."""
    jobs = (
        *runs("b", "n0", 4), on(job("one", gpus=8), "OLD"),
        on(job("both", gpus=8, submitted_at_s=50.0), "OLD", "NEW"),
    )  # fmt: skip
    assert placed(decide("philly", typed(*jobs))) == {"both": {"n1": 1}}


def test_a_gang_holds_on_the_first_type_that_has_anything_for_it() -> None:
    """One that it prefers and that is in use to the last GPU keeps it from no other."""
    jobs = (*runs("b", "n0", 8), *runs("b", "n1", 5), on(job("gang", gpus=8), "OLD", "NEW"))
    assert held(decide("philly", typed(*jobs))) == {"gang": {"n1": 3}}


def test_what_a_gang_reserves_is_of_one_type() -> None:
    """As it would hold of one: the other type is there for later jobs of its tenant, and what it
    keeps is counted once."""
    jobs = (
        *runs("b", "n0", 4), *runs("b", "n1", 5), on(job("gang", gpus=8), "OLD", "NEW"),
        job("later", gpus=3, submitted_at_s=50.0), on(job("waits", gpus=5), "OLD"),
    )  # fmt: skip
    snapshot, before = typed(*jobs), memory(gang=Attempted(BACKS_OFF_S))
    assert placed(policy(RESERVES).allocate(snapshot, before)) == {"later": {"n1": 1}}
    said = told(snapshot, before, RESERVES)["gang"]
    assert said.endswith("but keeps 4 on n0 from later jobs of its tenant")


def test_a_gang_does_not_let_go_of_one_type_for_a_gpu_of_another() -> None:
    """It holds six of eight: one of a type that it prefers would make it begin anew."""
    jobs = (*runs("b", "n0", 7), *runs("b", "n1", 2), on(job("gang", gpus=8), "OLD", "NEW"))
    before = memory(gang=Attempted(NOW_S - 10.0, {N1: 6}))
    assert held(decide("philly", typed(*jobs), before)) == {"gang": {"n1": 6}}


# --- several that hold --------------------------------------------------------------------------


@pytest.mark.parametrize(("holders", "second"), [(1, {}), (2, {"n1": 3})])
def test_as_many_gangs_of_a_tenant_hold_as_the_knob_says(
    holders: int, second: dict[str, int]
) -> None:
    """Also where the second asks for the same as the first: what that one left is its own. So it
    is with what they reserve while they back off, which is no room for a third one."""
    jobs = (
        *runs("b", "n0", 4), *runs("b", "n1", 5), job("gang", gpus=8),
        job("next", gpus=8, submitted_at_s=50.0), job("later", gpus=3, submitted_at_s=60.0),
    )  # fmt: skip
    snapshot, named = seen(*jobs, quotas={"a": 16, "b": 7}), policy(f"{RESERVES}:holders={holders}")
    found = named.allocate(snapshot, b"")
    assert held(found).get("gang") == {"n0": 4}
    assert held(found).get("next", {}) == second
    before = memory(gang=Attempted(BACKS_OFF_S), next=Attempted(BACKS_OFF_S))
    kept = named.allocate(snapshot, before)
    assert (held(kept), started(kept)) == ({}, started(found))
    assert started(found) == ([] if second else ["later"])


def test_what_one_may_hold_no_longer_whoever_comes_first_of_its_tenant_holds() -> None:
    """A gang that is larger than its tenant's quota by now lets go before anybody's turn, so that a
    job of eight is within a quota of eight, and of two alike the more urgent one holds."""
    jobs = (
        *runs("b", "n0", 2), *runs("b", "n1", 8), job("gang", gpus=2, workers=(5, 5)),
        replace(job("urgent", gpus=8, submitted_at_s=50.0), priority=1),
        job("next", gpus=8, submitted_at_s=60.0),
    )  # fmt: skip
    before = memory(gang=Attempted(NOW_S - 10.0, {N0: 6}))
    assert held(decide("philly", seen(*jobs), before)) == {"urgent": {"n0": 6}}


def test_who_may_not_hold_hides_nothing_from_one_alike_of_another_tenant() -> None:
    """Each has a line of its own: the other one's is the first of its tenant that does not fit."""
    jobs = (
        *runs("c", "n0", 4), *runs("c", "n1", 5), job("gang", gpus=7),
        job("next", gpus=8, submitted_at_s=50.0), job("theirs", "b", gpus=8, submitted_at_s=60.0),
    )  # fmt: skip
    found = decide("philly", seen(*jobs, quotas={"a": 16, "b": 8}))
    assert held(found) == {"gang": {"n0": 4}, "theirs": {"n1": 3}}


# --- locality -----------------------------------------------------------------------------------


def racks(*jobs: JobView) -> ClusterSnapshot:
    """Two nodes of eight GPUs in racks of their own, and two tenants with little of them."""
    nodes = [replace(machine(name, jobs=jobs), rack=name) for name in ("n0", "n1")]
    tenants = tuple(TenantView(name=name, guarantee_gpus=4) for name in ("a", "b"))
    return replace(cell(*nodes, jobs=jobs), tenants=tenants)


def gang_of_six(name: str, *, priority: int = 0) -> JobView:
    """No rack here has as many free."""
    return replace(job(name, workers=(6, 6)), priority=priority)


def test_who_asks_for_locality_hides_no_room_from_one_that_no_longer_does() -> None:
    """One alike of higher priority that has only come finds no rack: its elder starts anywhere."""
    jobs = (*runs("b", "n0", 4), *runs("b", "n1", 4), gang_of_six("elder"))
    before = memory(elder=Attempted(ANYWHERE_S))
    for others in ((), (gang_of_six("urgent", priority=1),)):
        found = decide("philly", racks(*jobs, *others), before)
        assert placed(found) == {"elder": {"n0": 4, "n1": 2}}


def test_who_asks_for_locality_hides_no_victims_from_one_that_no_longer_does() -> None:
    """To stop jobs makes no room for six in one rack, and for its elder it does in both."""
    jobs = (
        *(job(f"stays{n}", "b", gpus=4, nodes=(f"n{n}",)) for n in range(2)),
        *(job(f"goes{n}", "c", gpus=4, nodes=(f"n{n}",)) for n in range(2)),
        gang_of_six("elder"), gang_of_six("urgent", priority=1),
    )  # fmt: skip
    snapshot = replace(racks(*jobs), tenants=tuple(quota(a=8, b=8, c=0)))
    found = decide("philly", snapshot, memory(elder=Attempted(ANYWHERE_S)))
    assert sorted(stopped(found)) == ["goes0", "goes1"]
    assert started(found) == ["elder"]


def test_a_gang_that_may_never_hold_is_not_told_when_it_may() -> None:
    """It is larger than its tenant's quota: nothing changes for it with the end of a back-off."""
    snapshot = seen(*runs("b", "n0", 4), job("gang", gpus=8), quotas={"a": 4}, sizes={"n0": 8})
    assert told(snapshot, memory(gang=Attempted(BACKS_OFF_S)))["gang"].endswith(
        "and no idle GPUs of others fit it (fewest nodes of one rack)"
    )
