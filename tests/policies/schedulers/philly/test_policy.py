"""The Philly study's scheduler (ATC'19, section 2.3): quotas, holding, backing off, locality."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import pytest
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, Preemptibility
from coordinator.policies.contract.decisions import (
    FAIR_SHARE,
    FRAGMENTATION,
    Allocation,
    Preempt,
    Start,
)
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    NodeView,
    TenantView,
)
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.philly.gang_reservation import Attempted
from coordinator.policies.schedulers.philly.locality import (
    ANYWHERE,
    FEWEST_NODES,
    ONE_RACK,
    Gang,
    part,
    whole,
)
from coordinator.policies.schedulers.philly.policy import Knobs
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row

HOLD_S, BACK_OFF_S = Knobs().hold_s, Knobs().back_off_s
CYCLE_S = HOLD_S + BACK_OFF_S

# --- a cell of racks ----------------------------------------------------------------------------


def node(name: str, *, free: int, rack: str = "r0", gpus: int = 8) -> NodeView:
    """A node; what is not free on it is somebody's who never leaves."""
    return replace(make_node_view(name, gpus=gpus, free_gpus=free), rack=rack)


def waiting(
    name: str, workers: int, gpus: int = 1, *, tenant: str = "vc", at_s: float = 0.0
) -> JobView:
    """A gang that waits."""
    job = make_job_view(name, workers=(workers, workers), gpus_per_worker=gpus, submitted_at_s=at_s)
    return replace(job, tenant=tenant)


def running(
    name: str, on: Mapping[str, int], *, tenant: str, started_at_s: float = 0.0, **more: object
) -> JobView:
    """A gang of one-GPU workers on nodes."""
    placed = [
        make_worker_view(name, index, host)
        for index, host in enumerate(host for host, count in on.items() for _ in range(count))
    ]
    count = len(placed)
    job = make_job_view(
        name, state=JobState.RUNNING, workers=(count, count), placed=placed, gpu_type="H100"
    )
    return job_with(job, tenant=tenant, started_at_s=started_at_s, **more)


def snapshot(
    nodes: Iterable[NodeView],
    *jobs: JobView,
    now_s: float = 1000.0,
    quotas: Mapping[str, int] | None = None,
) -> ClusterSnapshot:
    """What the policy sees; running jobs stand on their nodes."""
    found = {each.name: each for each in nodes}
    for job in jobs:
        for worker in job.placed:
            host = found[worker.node]
            found[worker.node] = replace(host, workers=(*host.workers, worker))
    seen = make_snapshot(nodes=list(found.values()), jobs=jobs, now_s=now_s)
    tenants = tuple(
        TenantView(name=name, guarantee_gpus=gpus) for name, gpus in sorted((quotas or {}).items())
    )
    return replace(seen, tenants=tenants)


def play(
    seen: ClusterSnapshot, memory: Mapping[str, Attempted] | None = None, knobs: str = ""
) -> Allocation:
    """One pass."""
    blob = msgspec.msgpack.encode(dict(memory or {}))
    return policy(f"philly{knobs}").allocate(seen, blob)


def starts(allocation: Allocation) -> dict[str, dict[str, int]]:
    """Workers by node of each job that starts."""
    return {
        decision.job_id: {each.node: each.worker_count for each in decision.placements}
        for decision in allocation.decisions
        if isinstance(decision, Start)
    }


def remembered(allocation: Allocation) -> dict[JobId, Attempted]:
    """What the policy keeps."""
    return msgspec.msgpack.decode(allocation.memory, type=dict[JobId, Attempted])


# --- levels -------------------------------------------------------------------------------------

RACKS = [
    node("a0", free=5, rack="a"),
    node("a1", free=5, rack="a"),
    node("a2", free=4, rack="a"),
    node("b0", free=8, rack="b"),
    node("b1", free=2, rack="b"),
]


@each_row(
    ("level", "workers", "expected"),
    [
        (FEWEST_NODES, 8, {"b0": 8}),
        (FEWEST_NODES, 5, {"a0": 5}),
        (FEWEST_NODES, 10, {"a0": 5, "a1": 5}),
        (FEWEST_NODES, 11, {}),
        (ONE_RACK, 11, {"a0": 5, "a1": 5, "a2": 1}),
        (ONE_RACK, 15, {}),
        (ANYWHERE, 15, {"a0": 5, "a1": 5, "a2": 4, "b0": 1}),
        (ANYWHERE, 25, {}),
        (FEWEST_NODES, 1, {"b1": 1}),
    ],
)
def test_each_level_asks_for_its_locality(
    level: int, workers: int, expected: dict[str, int]
) -> None:
    """The emptiest rack and its emptiest nodes first; one GPU goes where the fewest are free."""
    placed = whole(FreeGpus(snapshot(RACKS)), Gang(workers, 1, "H100"), level)
    assert {each.node: each.worker_count for each in placed} == expected


def test_a_gang_that_no_rack_could_ever_take_may_stand_anywhere() -> None:
    """Else it would wait for tries that cannot succeed."""
    placed = whole(FreeGpus(snapshot(RACKS)), Gang(4, 6, "H100"), FEWEST_NODES)
    assert placed == ()
    empty = [replace(each, free_gpus=8) for each in RACKS]
    placed = whole(FreeGpus(snapshot(empty)), Gang(4, 6, "H100"), FEWEST_NODES)
    assert sum(each.worker_count for each in placed) == 4


def test_what_is_held_stays_on_its_nodes() -> None:
    """A gang that waits for a node's last GPUs does not change over to another node."""
    floor = FreeGpus(snapshot(RACKS))
    gang = Gang(2, 8, "H100")
    assert part(floor, gang, FEWEST_NODES, {}) == {"a0": 5, "a1": 5}
    assert part(floor, gang, FEWEST_NODES, {NodeName("b1"): 2}) == {"b1": 2, "b0": 8}
    one = Gang(1, 8, "H100")
    assert part(floor, one, FEWEST_NODES, {NodeName("a1"): 5}) == {"a1": 5}


@pytest.mark.parametrize(
    ("gang", "expected"),
    [
        pytest.param(Gang(2, 4, "H100"), {"large": 3}, id="one large node, though less is free"),
        pytest.param(Gang(3, 4, "H100"), {"small": 4, "large": 3}, id="one of each"),
        pytest.param(Gang(4, 4, "H100"), {"large": 3, "full": 0}, id="both large ones"),
        pytest.param(Gang(1, 4, "H100"), {"small": 4}, id="the emptiest that would do alone"),
    ],
)
def test_nothing_is_held_on_a_node_that_is_too_small_for_its_part(
    gang: Gang, expected: dict[str, int]
) -> None:
    """On the fewest nodes a gang of eight GPUs never comes to stand on one of four."""
    sized = (node("small", free=4, gpus=4), node("large", free=3), node("full", free=0))
    mixed = FreeGpus(snapshot(sized))
    found = part(mixed, gang, FEWEST_NODES, {})
    assert found == {name: gpus for name, gpus in expected.items() if gpus}


def test_gpus_that_come_free_for_nobody_are_no_place() -> None:
    """A node with one of them never takes a worker of all eight, and nothing is held there."""
    barred = make_node_view("barred", barred_gpus=1)
    floor = FreeGpus(snapshot((barred, node("full", free=1))))
    assert part(floor, Gang(1, 8, "H100"), FEWEST_NODES, {}) == {"full": 1}


PARTLY = (node("a", free=6), node("b", free=4))
OTHER = running("other", {"a": 2, "b": 4}, tenant="elsewhere")
"""Half of the sixteen GPUs are the other tenant's, and no node is empty."""

# --- holding, timeouts, levels by tries ---------------------------------------------------------


def test_a_gang_within_quota_holds_what_it_finds_and_nobody_else_gets_it() -> None:
    """Later small jobs start on what is left, out of order."""
    seen = snapshot(
        [node("a", free=6), node("b", free=3)], waiting("big", 1, 8), waiting("small", 2, at_s=5.0),
        waiting("also", 2, at_s=6.0),
    )  # fmt: skip
    done = play(seen)
    assert remembered(done)[JobId("big")] == Attempted(1000.0, {NodeName("a"): 6})
    assert starts(done) == {"small": {"b": 2}}
    assert done.wake_at_s == 1000.0 + HOLD_S


def test_it_starts_as_soon_as_the_rest_is_free() -> None:
    """With what it held."""
    before = {"big": Attempted(1000.0, {NodeName("a"): 6})}
    first = waiting("first", 1, 8, at_s=-1.0)
    seen = snapshot([node("a", free=8)], first, waiting("big", 1, 8), now_s=1100.0)
    done = play(seen, before)
    assert starts(done) == {"big": {"a": 1}}
    assert remembered(done)[JobId("first")].held == {}


@each_row(
    ("after_s", "holds", "wakes_at_s"),
    [
        (HOLD_S - 1.0, True, HOLD_S),
        (HOLD_S, False, CYCLE_S),
        (CYCLE_S - 1.0, False, CYCLE_S),
        (CYCLE_S, True, CYCLE_S + HOLD_S),
    ],
)
def test_it_lets_go_after_the_timeout_and_tries_again_after_backing_off(
    after_s: float, holds: bool, wakes_at_s: float
) -> None:
    """150 s of holding, 120 s of none, and a wake at each change."""
    before = {"big": Attempted(1000.0, {NodeName("a"): 6})}
    seen = snapshot(PARTLY, OTHER, waiting("big", 1, 8), now_s=1000.0 + after_s)
    done = play(seen, before)
    assert bool(remembered(done)[JobId("big")].held) == holds
    assert done.wake_at_s == 1000.0 + wakes_at_s


@pytest.mark.parametrize(
    ("timeouts", "starts_at"), [(2, {}), (3, {"a": 5, "b": 5}), (5, {"a": 5, "b": 5})]
)
def test_every_three_timeouts_the_next_level_is_asked_for(
    timeouts: int, starts_at: dict[str, int]
) -> None:
    """Ten workers fit two nodes of eight at once only where three nodes of the rack will do."""
    nodes = [node("a", free=5), node("b", free=4), node("c", free=1)]
    before = {"g": Attempted(0.0)}
    seen = snapshot(nodes, waiting("g", 10), now_s=CYCLE_S * (timeouts - 1) + HOLD_S)
    found = starts(play(seen, before)).get("g", {})
    assert sum(found.values()) == (10 if starts_at else 0)


def test_the_last_level_crosses_racks() -> None:
    """After six timeouts, and there are no more wakes for a level that cannot be relaxed."""
    nodes = [
        node("a", free=5, rack="a"),
        node("b", free=5, rack="b"),
        node("c", free=0, rack="a"),
    ]
    job = waiting("g", 10)
    for timeouts, fits in ((5, False), (6, True)):
        seen = snapshot(nodes, job, now_s=CYCLE_S * (timeouts - 1) + HOLD_S)
        assert bool(starts(play(seen, {"g": Attempted(0.0)}))) == fits


@each_row(
    ("free", "quota", "into_s", "wakes_in_s"),
    [
        (0, 8, HOLD_S + 50.0, BACK_OFF_S - 50.0),
        (0, 8, HOLD_S - 50.0, None),
        (2, 8, HOLD_S - 50.0, 50.0),
        (0, 3, HOLD_S + 50.0, None),
    ],
    ids=["backs off", "finds nothing", "holds", "larger than its quota"],
)
def test_at_the_last_level_a_change_of_what_it_holds_is_waited_for(
    free: int, quota: int, into_s: float, wakes_in_s: float | None
) -> None:
    """The end of a hold, and of a back-off after which it may hold; while a gang finds nothing, or
    its tenant's quota leaves nothing, time alone changes nothing."""
    now_s = 6 * CYCLE_S + into_s
    seen = snapshot([node("a", free=free)], waiting("g", 4), now_s=now_s, quotas={"vc": quota})
    done = play(seen, {"g": Attempted(0.0)})
    assert done.wake_at_s == (None if wakes_in_s is None else now_s + wakes_in_s)


def test_a_gang_that_may_hold_nothing_comes_to_the_next_level_all_the_same() -> None:
    """It is larger than its tenant's quota: until looser locality will do its pass is woken."""
    seen = snapshot([node("a", free=0)], waiting("g", 4), quotas={"vc": 3})
    assert play(seen).wake_at_s == 1000.0 + HOLD_S


# --- quotas -------------------------------------------------------------------------------------


def test_the_tenant_with_the_least_of_its_quota_comes_first() -> None:
    """Whoever submitted first."""
    busy = running("r", {"a": 4}, tenant="much")
    seen = snapshot(
        [node("a", free=2)], busy, waiting("m", 2, tenant="much"),
        waiting("l", 2, tenant="little", at_s=50.0), quotas={"much": 8, "little": 8},
    )  # fmt: skip
    assert starts(play(seen)) == {"l": {"a": 2}}


def test_idle_shares_are_lent_but_nothing_is_held_beyond_quota() -> None:
    """Work-conserving: a tenant beyond its quota starts where it fits, and holds nothing."""
    busy = running("r", {"a": 4}, tenant="vc")
    quotas = {"vc": 4, "other": 4}
    fits = snapshot([node("a", free=4)], busy, waiting("j", 4), quotas=quotas)
    assert starts(play(fits)) == {"j": {"a": 4}}
    done = play(snapshot([node("a", free=3)], busy, waiting("j", 4), quotas=quotas))
    assert [(wait.kind, wait.jobs) for wait in done.waits] == [(FAIR_SHARE, ("j",))]
    assert remembered(done)[JobId("j")].held == {}


def test_every_waiting_job_has_its_kind_also_after_one_alike() -> None:
    """What is known of one is not looked for again, and counts for each of them all the same."""
    alike = [waiting(f"g{number}", 2, at_s=float(number)) for number in range(3)]
    found = play(snapshot([node("a", free=1), node("b", free=0)], *alike))
    (wait,) = found.waits
    assert sorted(wait.jobs) == ["g0", "g1", "g2"]
    beyond = [waiting(f"w{number}", 17, at_s=float(number)) for number in range(2)]
    assert not play(snapshot([node("a", free=1), node("b", free=0)], *beyond)).waits  # never


def test_within_quota_it_is_fragmentation() -> None:
    """The definition of the study's section 3.1: the quota would do, the places do not."""
    done = play(snapshot([node("a", free=3), node("b", free=3)], waiting("j", 1, 4)))
    assert [(wait.kind, wait.jobs) for wait in done.waits] == [(FRAGMENTATION, ("j",))]


@pytest.mark.parametrize(
    ("free", "preempted"), [(0, ["young"]), (1, [])], ids=["full", "below the threshold"]
)
def test_fair_share_is_restored_by_preemption_only_where_the_cell_is_full(
    free: int, preempted: list[str]
) -> None:
    """At 90 % of all GPUs, from the youngest job of a tenant beyond its quota."""
    seen = snapshot(
        [node("a", free=free, gpus=8)],
        running("old", {"a": 4}, tenant="rich", started_at_s=1.0),
        running("young", {"a": 2}, tenant="rich", started_at_s=9.0),
        running("own", {"a": 2 - free}, tenant="poor", started_at_s=99.0),
        waiting("j", 2, tenant="poor"),
    )
    done = play(seen, knobs=":preempt_ratio=0.95")
    assert [d.job_id for d in done.decisions if isinstance(d, Preempt)] == preempted
    assert ("j" in starts(done)) == bool(preempted)


@pytest.mark.parametrize(
    ("theirs", "kind"),
    [(5, Preemptibility.FULL), (6, Preemptibility.NON), (6, Preemptibility.FULL)],
    ids=["would fall below its quota", "did not agree", "gives"],
)
def test_nobody_is_pushed_below_its_quota_or_stopped_unasked(
    theirs: int, kind: Preemptibility
) -> None:
    """Of eight GPUs each of two tenants is due four; who has more gives back, down to that."""
    least = 2 if theirs == 5 else 1
    jobs = [
        running(f"r{index}", {"a": least}, tenant="rich", preemptibility=kind)
        for index in range(theirs // least)
    ]
    if theirs % least:
        jobs.append(running("r", {"a": 1}, tenant="rich", preemptibility=Preemptibility.NON))
    poor = running("p", {"a": 8 - theirs}, tenant="poor")
    wanted = 4 - (8 - theirs)
    seen = snapshot([node("a", free=0)], *jobs, poor, waiting("j", wanted, tenant="poor"))
    preempted = [d.job_id for d in play(seen).decisions if isinstance(d, Preempt)]
    gives = theirs == 6 and kind == Preemptibility.FULL
    assert len(preempted) == (wanted if gives else 0)


def test_without_guarantees_each_tenant_s_quota_is_an_equal_part() -> None:
    """Two tenants of an eight-GPU cell have four each."""
    rich = running("r", {"a": 4}, tenant="rich")
    jobs = (rich, waiting("more", 8, tenant="rich"), waiting("j", 8, tenant="poor"))
    kinds = {wait.kind: wait.jobs for wait in play(snapshot([node("a", free=4)], *jobs)).waits}
    assert {kind: sorted(jobs) for kind, jobs in kinds.items()} == {FAIR_SHARE: ["j", "more"]}
    small = waiting("j", 1, 4, tenant="poor")
    held = play(snapshot([node("a", free=2), node("b", free=2, gpus=4)], rich, small))
    assert {wait.kind for wait in held.waits} == {FRAGMENTATION}


def test_what_a_waiting_job_is_told() -> None:
    """Its kind of delay, its level, its timeouts, what it holds and until when."""
    seen = snapshot(PARTLY, OTHER, waiting("big", 1, 8), now_s=1100.0)
    memory = msgspec.msgpack.encode({"big": Attempted(1000.0, {NodeName("a"): 6})})
    [hold] = policy("philly").pending_reasons(seen, memory)
    [why] = hold.blockers
    assert why == (
        "fragmentation: within quota, but no place for 1 worker of 8 GPUs (fewest nodes of one "
        "rack; 0 tries timed out); holds 6 on a, for 50 s more"
    )
