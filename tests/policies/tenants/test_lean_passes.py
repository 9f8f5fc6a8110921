"""What a pass that stops nobody may add where a policy's own gave way, and what it may not take."""

from __future__ import annotations

from collections.abc import Callable

from common.model import JobId, NodeName
from coordinator.policies.contract.decisions import (
    FAIR_SHARE,
    OTHERS_GUARANTEE,
    Allocation,
    PendingReason,
    Placement,
    Resize,
    Start,
    Wait,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, TenantView
from coordinator.policies.tenants.attempts import GO_FIRST
from coordinator.policies.tenants.enforce import SHARES_AGAIN_S, allocated, held
from tests.policies.tenant_books import cell, names, runs, start, waits

LARGE = JobId("large")
TENANTS = (
    TenantView(name="a", guarantee_gpus=4),
    TenantView(name="b"),
    TenantView(name="c", borrow_limit_gpus=1),
)

Decide = Callable[[ClusterSnapshot, bytes], Allocation]


def _cell(*more: str) -> ClusterSnapshot:
    """Seven of eight GPUs are free: four are for `owed`, so that `large` gives way, and three for
    whoever else waits."""
    jobs = waits("owed", "a", 4), waits(LARGE, "b", 5), *(waits(name, "b", 1) for name in more)
    return cell(runs("there", "b", "n0", 1), *jobs, tenants=TENANTS, nodes=1)


def _policy(first: tuple[Start | Resize, ...], lean: tuple[Start | Resize, ...]) -> Decide:
    """Decides one with `large` before it, nothing without, and the other where it can stop nobody;
    of each only what is about jobs that it sees."""

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        seen = {job.job_id for job in snapshot.jobs}
        made = first if LARGE in seen else ()
        if any(job.is_resting for job in snapshot.jobs):
            made = lean
        return Allocation(decisions=tuple(d for d in made if d.job_id in seen), memory=memory)

    return decide


def _starts(*jobs: str) -> tuple[Start, ...]:
    return tuple(start(name, "n0") for name in jobs)


def test_who_starts_by_the_policy_s_own_pass_is_not_exchanged_for_more_of_others() -> None:
    """Two that the policy would not have started by itself are no reason for one to wait."""
    decide = _policy(_starts(LARGE, "x"), _starts("owed", "y", "z"))
    made = allocated(decide, _cell("x", "y", "z"), b"")
    assert names(made.decisions, Start) == {"owed", "x"}


def test_who_starts_besides_does_so() -> None:
    """The pass that stops nobody starts all whom the policy's own starts, and one more."""
    decide = _policy(_starts(LARGE, "x"), _starts("owed", "x", "y"))
    made = allocated(decide, _cell("x", "y"), b"")
    assert names(made.decisions, Start) == {"owed", "x", "y"}


def test_workers_that_a_job_was_given_are_not_taken_for_a_pass_that_starts_nobody_more() -> None:
    """Both start the same; the policy's own has the growth as well."""
    one = Placement(node=NodeName("n0"), worker_count=1, is_flexible=True)
    grow = Resize(job_id=JobId("there"), added=(one,), reason="test")
    decide = _policy((*_starts(LARGE, "x"), grow), _starts("owed", "x"))
    made = allocated(decide, _cell("x", "y"), b"")
    assert names(made.decisions, Start) == {"owed", "x"}
    assert names(made.decisions, Resize) == {"there"}


def test_a_pass_follows_where_the_one_that_stops_nobody_leaves_gpus_as_well() -> None:
    """`large` gives way in it too, and `z` fits on what that leaves."""
    snapshot = _cell("x", "z")
    made = allocated(_policy(_starts(LARGE), _starts(LARGE, "x")), snapshot, b"")
    assert names(made.decisions, Start) == {"owed", "x"}
    assert made.wake_at_s == snapshot.now_s + SHARES_AGAIN_S
    made = allocated(_policy(_starts(LARGE), _starts("owed", "x")), snapshot, b"")
    assert names(made.decisions, Start) == {"owed", "x"}
    assert made.wake_at_s is None


def test_whom_the_pass_that_stops_nobody_may_not_start_is_told_why() -> None:
    """It starts `owed` and `z` in the stead of `large`, and one of two that `c` has room for."""
    two = waits("c0", "c", 1), waits("c1", "c", 1)
    jobs = runs("there", "b", "n0", 1), waits("owed", "a", 4), waits(LARGE, "b", 5)
    snapshot = cell(*jobs, *two, waits("z", "b", 1), tenants=TENANTS, nodes=1)

    def decide(seen: ClusterSnapshot, memory: bytes) -> Allocation:
        """`large` keeps `owed` and `z` waiting."""
        has_large = any(job.job_id == LARGE for job in seen.jobs)
        lean = _starts(*((LARGE,) if has_large else ("owed", "z")), "c0", "c1")
        return _policy(_starts(LARGE), lean)(seen, memory)

    made = allocated(decide, snapshot, b"")
    assert names(made.decisions, Start) == {"owed", "z", "c0"}
    assert made.waits == (
        Wait(kind=FAIR_SHARE, jobs=(JobId("c1"),)),
        Wait(kind=OTHERS_GUARANTEE, jobs=(LARGE,)),
    )
    found = {hold.job_id: hold.blockers for hold in held(decide, _nothing, snapshot, b"")}
    assert found.keys() == {"c1", LARGE}
    assert found[LARGE] == (GO_FIRST,)
    assert found[JobId("c1")][0].startswith("tenant c: 1 GPU on top of the 1 that it uses exceeds")


def _nothing(snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    """It holds nobody."""
    return ()
