"""Passes that are taken again: what is dropped, what starts after all, where none counts, and what
a pass that stops no job may add to the policy's own."""

from __future__ import annotations

from collections.abc import Callable

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import (
    FAIR_SHARE,
    OTHERS_GUARANTEE,
    Allocation,
    Decision,
    PendingReason,
    Placement,
    Preempt,
    Resize,
    Start,
    Wait,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.tenants.attempts import GO_FIRST, MOST_TRIES, without
from coordinator.policies.tenants.enforce import SHARES_AGAIN_S, allocated, held
from tests.harness.builders import job_with, make_job_view, make_worker_view
from tests.policies.tenant_books import cell, names, runs, start, stop, waits

C = TenantView(name="c")


D2 = TenantView(name="d", guarantee_gpus=2)


def mid() -> JobView:
    """A job of `d` that has 4 GPUs and needs the 2 that are promised: it may be stopped, and is due
    them again at once, there alone."""
    there = [make_worker_view("mid", n, "n0", gpus=2, is_flexible=n > 0) for n in range(2)]
    made = make_job_view(
        "mid", state=JobState.RUNNING, workers=(1, 2), gpus_per_worker=2, placed=there
    )
    return job_with(made, tenant="d", nodes_avoided=(NodeName("n1"),))


def sees(snapshot: ClusterSnapshot, name: str) -> bool:
    """Whether a job is among those that a policy has before it."""
    return any(job.job_id == name for job in snapshot.jobs)


def for_first(*large: str) -> Callable[[ClusterSnapshot, bytes], Allocation]:
    """A policy that stops `mid` for the first of some jobs that it sees."""

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        name = next((each for each in large if sees(snapshot, each)), None)
        made = () if name is None else (stop("mid"), start(name, "n0"))
        return Allocation(decisions=made, memory=memory)

    return decide


def nobody_held(snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    """The policy by itself holds nobody."""
    return ()


def test_what_would_be_called_back_is_dropped_from_a_policy_that_has_all_jobs_before_it() -> None:
    """And so is the stop that was for it, though `mid` has more than is promised to it."""
    snapshot = cell(mid(), waits("large", "c", 8), tenants=(D2, C), nodes=1)
    made = allocated(for_first("large"), snapshot, b"", keeps_quotas=True)
    assert made.decisions == ()


def test_a_policy_that_finds_ever_more_to_stop_somebody_for_stops_nobody_in_the_end() -> None:
    """It is asked so often and no more; what it then still decides is dropped."""
    large = [f"large{n}" for n in range(MOST_TRIES + 2)]
    waiting = [waits(name, "c", 8) for name in large]
    snapshot = cell(mid(), *waiting, tenants=(D2, C), nodes=1)
    assert allocated(for_first(*large), snapshot, b"").decisions == ()


def there_or_elsewhere(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """Stops `mid` for `large` where it may; else starts that on the free node."""
    made: tuple[Decision, ...] = ()
    if sees(snapshot, "large"):
        may_stop = not any(job.is_resting for job in snapshot.jobs)
        made = (stop("mid"), start("large", "n0")) if may_stop else (start("large", "n1"),)
    return Allocation(decisions=made, memory=memory)


def test_who_fits_on_free_gpus_starts_there_where_the_policy_would_stop_somebody_for_it() -> None:
    """The policy decides once more as if nobody could be stopped; and it holds nobody for that."""
    snapshot = cell(mid(), waits("large", "c", 8), tenants=(D2, C))
    assert allocated(there_or_elsewhere, snapshot, b"").decisions == (start("large", "n1"),)
    found = held(there_or_elsewhere, nobody_held, snapshot, b"")
    assert [hold for hold in found if hold.job_id == "large"] == []


def test_that_pass_does_not_count_where_it_stops_somebody_all_the_same() -> None:
    """A policy may look at other things than whether a job rests."""
    snapshot = cell(mid(), waits("large", "c", 8), tenants=(D2, C))
    assert allocated(for_first("large"), snapshot, b"").decisions == ()


def without_short(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """Starts `short`; where it does not see that, three others, one of them by a stop."""
    made: tuple[Decision, ...] = (start("short", "n0"),)
    if not sees(snapshot, "short"):
        made = (start("long", "n0"), start("longer", "n0"), stop("runs"), start("other", "n1"))
    return Allocation(decisions=made, memory=memory)


def test_a_pass_without_those_that_gave_way_does_not_count_where_it_stops_somebody_more() -> None:
    """Another pass follows instead."""
    snapshot = cell(
        runs("runs", "c", "n1", 8),
        waits("short", "c", 8),
        waits("long", "b", 4),
        waits("longer", "b", 4),
        waits("other", "c", 8),
        tenants=(TenantView(name="b", guarantee_gpus=4), C),
    )
    made = allocated(without_short, snapshot, b"", by_weight=False)
    assert (names(made.decisions, Start), names(made.decisions, Preempt)) == ({"long"}, set())
    assert made.wake_at_s == snapshot.now_s + SHARES_AGAIN_S


def beside_head(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """Starts `other` as long as it sees `head`, and never anybody else."""
    made = (start("other", "n0"),) if sees(snapshot, "head") else ()
    return Allocation(decisions=made, memory=memory)


def test_borrowers_are_hidden_only_where_one_more_that_is_owed_starts_then() -> None:
    """`owed` fits as it is, and waits for the policy's own reasons."""
    jobs = waits("owed", "a", 4), waits("head", "c", 8), waits("other", "c", 8)
    snapshot = cell(*jobs, tenants=(TenantView(name="a", guarantee_gpus=4), C))
    assert names(allocated(beside_head, snapshot, b"").decisions, Start) == {"other"}


def test_a_policy_is_told_who_is_live_and_hidden() -> None:
    """Whoever has no room by quota is told with whoever gave way in a first try, and nobody else;
    where nobody is hidden nobody is told."""
    seen: list[tuple[set[str], set[str]]] = []

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        seen.append(({job.job_id for job in snapshot.jobs}, {*snapshot.unseen}))
        name = next((each for each in ("large", "small") if sees(snapshot, each)), None)
        made = () if name is None else (start(name, "n0"),)
        return Allocation(decisions=made, memory=memory)

    none = TenantView(name="e", borrow_limit_gpus=0)
    two = TenantView(name="f", borrow_limit_gpus=2)
    jobs = (waits("kept", "e", 1), waits("large", "f", 2), waits("small", "f", 1))
    allocated(decide, cell(*jobs, tenants=(none, two, C), nodes=1), b"")
    everybody = {"kept", "large", "small"}
    assert seen
    for jobs_seen, unseen in seen:
        assert "kept" in unseen
        assert jobs_seen | unseen == everybody
        assert not jobs_seen & unseen
    seen.clear()
    allocated(decide, cell(*jobs[1:], tenants=(two, C), nodes=1), b"")
    assert seen[0] == ({"large", "small"}, set())


def test_whoever_is_hidden_in_two_steps_is_told_after_both() -> None:
    """Hiding some more keeps those told who were hidden before; a name of nobody is not told."""
    snapshot = cell(waits("one", "c", 1), waits("two", "c", 1), tenants=(C,), nodes=1)
    first = without(snapshot, {JobId("one"), JobId("nobody")})
    assert first.unseen == {"one"}
    assert without(first, {JobId("two")}).unseen == {"one", "two"}


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
