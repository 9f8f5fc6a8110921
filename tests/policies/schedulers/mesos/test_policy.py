"""Mesos: pessimistic offers, hoards that end, and what one framework refuses comes to the
others."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.mesos.policy import Memory
from tests.harness.builders import NOW_S, make_job_view, make_node_view, make_snapshot
from tests.policies.machines import cell, decide, job, machine, started, with_weights
from tests.policies.tenant_books import names
from tests.policies.tenant_passes import Asked, Cell
from tests.policies.tenants.test_infeasible_reasons import WHY, gang, small
from tests.policies.tenants.test_infeasible_reasons import cell as infeasible_cell

# --- Mesos --------------------------------------------------------------------------------------


def test_offers_are_pessimistic() -> None:
    """A is offered all of the only node and hoards it for its gang: B's small job sees nothing."""
    running = job("r", "z", gpus=4, nodes=("n0",))
    jobs = (running, job("gang", "a", workers=(8, 8)), job("small", "b"))
    snapshot = cell(machine("n0", jobs=jobs), jobs=jobs)
    first = decide("mesos", snapshot)
    assert first.decisions == ()
    later = replace(snapshot, now_s=NOW_S + 10.0)
    assert decide("mesos", later, first.memory).decisions == ()


def test_a_hoard_is_given_back_after_its_time() -> None:
    """Then its framework refuses it for a while, and the other is offered it."""
    running = job("r", "z", gpus=4, nodes=("n0",))
    jobs = (running, job("gang", "a", workers=(8, 8)), job("small", "b"))
    snapshot = cell(machine("n0", jobs=jobs), jobs=jobs)
    memory = decide("mesos", snapshot).memory
    given_back = decide("mesos", replace(snapshot, now_s=NOW_S + 120.0), memory)
    assert given_back.decisions == ()
    after = decide("mesos", replace(snapshot, now_s=NOW_S + 121.0), given_back.memory)
    assert started(after) == ["small"]


def test_the_framework_with_the_smallest_share_is_offered_first() -> None:
    """B has four GPUs and A none: the free ones are A's."""
    jobs = (job("r", "b", gpus=4, nodes=("n0",)), job("b1", "b", gpus=4), job("a1", "a", gpus=4))
    assert started(decide("mesos", cell(machine("n0", jobs=jobs), jobs=jobs))) == ["a1"]


def test_offers_come_on_ticks_only() -> None:
    """A pass within a second of the last one changes nothing and asks for one at the tick."""
    snapshot = cell(machine("n0"), jobs=(job("j"),))
    first = decide("mesos", snapshot)
    assert started(first) == ["j"]
    second = decide("mesos", replace(snapshot, now_s=NOW_S + 0.5), first.memory)
    assert (second.decisions, second.wake_at_s) == ((), NOW_S + 1.0)


def test_gangs_that_hoard_halves_do_not_wait_for_ever() -> None:
    """Two frameworks want all of two nodes and get one each: after a time one of them starts."""
    jobs = (job("ja", "a", gpus=8, workers=(2, 2)), job("jb", "b", gpus=8, workers=(2, 2)))
    snapshot = cell(machine("n0"), machine("n1"), jobs=jobs)
    allocation = decide("mesos", snapshot)
    assert started(allocation) == []
    for _ in range(20):
        assert allocation.wake_at_s is not None
        snapshot = replace(snapshot, now_s=allocation.wake_at_s)
        allocation = decide("mesos", snapshot, allocation.memory)
        if started(allocation):
            break
    assert len(started(allocation)) == 1


# --- Mesos' offers ------------------------------------------------------------------------------


def two_nodes(
    *jobs: JobView, names: tuple[str, ...] = ("n0", "n1"), gpus: int = 8
) -> ClusterSnapshot:
    """Nodes of eight GPUs with these jobs."""
    return cell(*(machine(name, gpus=gpus, jobs=jobs) for name in names), jobs=jobs)


def test_a_framework_hoards_only_nodes_that_its_gang_can_use() -> None:
    """Two GPUs are too few for a worker of four: they are declined, and offered to another."""
    jobs = (
        job("r0", "B", gpus=4, nodes=("n0",)),
        job("r1", "B", gpus=6, nodes=("n1",)),
        job("a", "A", gpus=4, workers=(2, 2)),
        job("b", "B", gpus=2),
    )
    snapshot = two_nodes(*jobs)
    first = decide("mesos", snapshot)
    assert started(first) == []
    second = decide("mesos", replace(snapshot, now_s=NOW_S + 1.0), first.memory)
    assert started(second) == ["b"]


def hoarding(**since_s: float) -> bytes:
    """A memory in which A hoards n0 and B n1, since so long ago."""
    return msgspec.msgpack.encode(
        Memory(
            hoards={"A": {NodeName("n0"): 8}, "B": {NodeName("n1"): 8}},
            since_s={name: NOW_S - ago_s for name, ago_s in since_s.items()},
        )
    )


def test_of_two_that_hoarded_too_long_the_first_gives_back() -> None:
    """If both did they would swap what they have; the one that began first lets the other start."""
    for first, other in (("A", "B"), ("B", "A")):
        jobs = (job("A", "A", gpus=8, workers=(2, 2)), job("B", "B", gpus=8, workers=(2, 2)))
        snapshot = two_nodes(*jobs)
        memory = hoarding(**{first: 130.0, other: 125.0})
        gives = decide("mesos", snapshot, memory)
        assert started(gives) == []
        assert msgspec.msgpack.decode(gives.memory, type=Memory).hoards.keys() == {other}
        later = decide("mesos", replace(snapshot, now_s=NOW_S + 1.0), gives.memory)
        assert started(later) == [other]


def test_what_is_hoarded_counts_by_weight() -> None:
    """A and B hoard one node each: of weight 4 B has the smaller share, and is offered the next."""
    jobs = (job("A", "A", gpus=8, workers=(2, 2)), job("B", "B", gpus=8, workers=(2, 2)))
    nodes = ("n0", "n1", "n2")
    for weight, first in ((4.0, "B"), (1.0, "A")):
        snapshot = with_weights(two_nodes(*jobs, names=nodes), {"A": 1.0, "B": weight})
        assert started(decide("mesos", snapshot, hoarding(A=10.0, B=10.0))) == [first]


def states(played: Cell) -> dict[str, JobState]:
    """Of all jobs, by name."""
    return {job_id: job.state for job_id, job in played.engine.state.jobs.items()}


def test_what_is_refused_comes_to_the_others_before_it_is_offered_again() -> None:
    """A gang waits for a node that is busy for long; smaller jobs run beside it meanwhile."""
    played = Cell("mesos", (), nodes=2)
    gang_of_two = Asked(tenant="a", at_s=1.0, workers=(2, 2), gpus=8)
    ones = [Asked(tenant="d", at_s=at_s, work_s=600.0) for at_s in (10.0, 20.0)]
    played.ask([Asked(tenant="b", gpus=8, work_s=100000.0), gang_of_two, *ones])
    played.run(until_s=5000.0)
    assert states(played) == {
        "b0": JobState.RUNNING,
        "a1": JobState.PENDING,
        "d2": JobState.SUCCEEDED,
        "d3": JobState.SUCCEEDED,
    }


@pytest.mark.parametrize("tenant", ["a", "d"])
def test_a_gang_that_can_never_run_hoards_nothing(tenant: str) -> None:
    """Neither other frameworks nor the jobs behind it wait for it."""
    played = Cell("mesos", (), nodes=1)
    never = Asked(tenant="a", workers=(2, 2), gpus=8)
    played.ask([never, Asked(tenant=tenant, at_s=10.0, work_s=600.0)])
    played.run(until_s=1000.0)
    assert states(played) == {"a0": JobState.PENDING, f"{tenant}1": JobState.SUCCEEDED}


def test_it_is_told_that_it_can_never_run() -> None:
    """The job behind it in its framework starts, and nobody is told to wait for its gang."""
    made, snapshot = policy("mesos"), infeasible_cell(gang(), small("late", tenant="a"))
    assert names(made.allocate(snapshot, b"").decisions, Start) == {"late"}
    told = {hold.job_id: hold.blockers for hold in made.pending_reasons(snapshot, b"")}
    assert told[JobId("big")] == (WHY,)
    assert not any("behind big" in why for why in told.get(JobId("late"), ()))


@pytest.mark.parametrize("decliners", ["a", "ac"])
def test_all_the_others_are_asked_before_one_is_asked_again(decliners: str) -> None:
    """However short refusals are: frameworks with no share and no use for half a node do not keep
    it from one that runs something already."""
    played = Cell("mesos:refuse_s=0.1", (), nodes=2)
    busy = [Asked(tenant="d", gpus=8, work_s=100000.0), Asked(tenant="d", gpus=4, work_s=100000.0)]
    wide = [Asked(tenant=tenant, at_s=1.0, gpus=8) for tenant in decliners]
    played.ask([*busy, *wide, Asked(tenant="d", at_s=10.0, work_s=10000.0)])
    played.run(until_s=60.0)
    assert states(played)[JobId(f"d{2 + len(wide)}")] == JobState.RUNNING


@pytest.mark.parametrize("oldest", ["a", "b"])
def test_the_oldest_of_the_hoards_that_lasted_too_long_is_given_back(oldest: str) -> None:
    """One gives back at a time, and it is not their names that tell which."""
    wide = [
        replace(make_job_view(name, workers=(2, 2), gpus_per_worker=2), tenant=name)
        for name in "ab"
    ]
    nodes = {"a": {NodeName("n0"): 2}, "b": {NodeName("n1"): 2}}
    since_s = {name: NOW_S - (1000.0 if name == oldest else 900.0) for name in "ab"}
    before = Memory(hoards=nodes, since_s=since_s, number=7)
    made = policy("mesos").allocate(infeasible_cell(*wide), msgspec.msgpack.encode(before))
    after = msgspec.msgpack.decode(made.memory, type=Memory)
    assert set(after.hoards) == set(after.since_s) == {"a", "b"} - {oldest}
    assert after.given_back == tuple(nodes[oldest])


def pair_of(tenant: str) -> JobView:
    """A job of two workers of four GPUs each."""
    return replace(make_job_view(tenant, workers=(2, 2), gpus_per_worker=4), tenant=tenant)


def test_a_gang_that_starts_leaves_the_next_one_of_its_framework_the_whole_time() -> None:
    """What is hoarded from then on is for another gang, which has waited for nothing yet."""
    first = pair_of("a")
    later = replace(first, job_id=JobId("later"), submitted_at_s=first.submitted_at_s + 1.0)
    nodes = make_node_view("n0", gpus=4), make_node_view("n1", gpus=8)
    before = Memory(hoards={"a": {NodeName("n0"): 4}}, since_s={"a": NOW_S - 100.0}, number=7)
    snapshot = make_snapshot(nodes=nodes, jobs=[first, later])
    made = policy("mesos").allocate(snapshot, msgspec.msgpack.encode(before))
    after = msgspec.msgpack.decode(made.memory, type=Memory)
    assert names(made.decisions, Start) == {"a"}
    assert after.since_s == {"a": NOW_S}


@pytest.mark.parametrize("oldest", ["a", "b"])
def test_what_one_gives_back_is_offered_first_to_whoever_hoards_for_longest(oldest: str) -> None:
    """Before one that has nothing yet, whose share is smaller: it would only begin to hoard, and
    no gang would ever have all of its nodes."""
    jobs = [pair_of(tenant) for tenant in ("a", "b", "none")]
    nodes = [make_node_view(f"n{number}", gpus=4) for number in range(3)]
    before = Memory(
        hoards={"a": {NodeName("n1"): 4}, "b": {NodeName("n2"): 4}},
        since_s={name: NOW_S - (90.0 if name == oldest else 50.0) for name in "ab"},
        given_back=(NodeName("n0"),),
        number=7,
    )
    snapshot = make_snapshot(nodes=nodes, jobs=jobs)
    made = policy("mesos").allocate(snapshot, msgspec.msgpack.encode(before))
    assert names(made.decisions, Start) == {oldest}
