"""Philly: a gang holds what its tenant's quota leaves, and what it holds is used of that quota."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import (
    FAIR_SHARE,
    FRAGMENTATION,
    Allocation,
    Preempt,
    Start,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.philly.gang_reservation import Attempted
from coordinator.policies.schedulers.philly.policy import Knobs
from tests.harness.builders import NOW_S
from tests.policies.machines import cell, decide, job, machine, placed, started
from tests.tables import each_row

CYCLE_S = Knobs().hold_s + Knobs().back_off_s


BACKS_OFF_S = NOW_S - Knobs().hold_s - 10.0
"""Whoever first did not fit then backs off now."""


RESERVES = "philly:reserves=true"


def runs(tenant: str, node: str, count: int) -> tuple[JobView, ...]:
    """So many jobs of one GPU there."""
    return tuple(job(f"{tenant}-{node}-{n}", tenant, nodes=(node,)) for n in range(count))


def seen(
    *jobs: JobView, quotas: Mapping[str, int] | None = None, sizes: Mapping[str, int] | None = None
) -> ClusterSnapshot:
    """Of two nodes of eight GPUs, where nothing else is said."""
    nodes = [
        machine(name, gpus=gpus, jobs=jobs) for name, gpus in (sizes or {"n0": 8, "n1": 8}).items()
    ]
    tenants = [TenantView(name=each, guarantee_gpus=gpus) for each, gpus in (quotas or {}).items()]
    return replace(cell(*nodes, jobs=jobs), tenants=tuple(tenants))


def memory(**tried: Attempted) -> bytes:
    """What a pass left."""
    return msgspec.msgpack.encode(tried)


def held(found: Allocation) -> dict[str, dict[NodeName, int]]:
    """By job that holds anything after a pass."""
    after = msgspec.msgpack.decode(found.memory, type=dict[JobId, Attempted])
    return {job_id: each.held for job_id, each in after.items() if each.held}


def kinds(found: Allocation) -> dict[str, str]:
    """What each waiting job waits for."""
    return {job_id: wait.kind for wait in found.waits for job_id in wait.jobs}


def told(snapshot: ClusterSnapshot, before: bytes = b"", name: str = "philly") -> dict[str, str]:
    """What each waiting job is told."""
    return {
        hold.job_id: hold.blockers[0] for hold in policy(name).pending_reasons(snapshot, before)
    }


# --- up to what the quota leaves ----------------------------------------------------------------


def test_a_gang_holds_what_the_quota_leaves_though_that_is_less_than_its_size() -> None:
    """Fourteen of sixteen GPUs are its tenant's: both others are held, and a later job of one GPU
    finds neither; each waits for its share, and is told who has it."""
    jobs = (*runs("a", "n0", 6), *runs("a", "n1", 8), job("gang", gpus=8))
    later = job("later", submitted_at_s=50.0)
    snapshot = seen(*jobs, later)
    found = decide("philly", snapshot)
    assert (started(found), held(found)) == ([], {"gang": {"n0": 2}})
    assert kinds(found) == {"gang": FAIR_SHARE, "later": FAIR_SHARE}
    assert told(snapshot) == {
        "gang": "fair share: tenant a uses 14 GPUs of its quota of 16, the job needs 8, and no "
        "idle GPUs of others fit it (fewest nodes of one rack); holds 2 on n0, for 150 s more",
        "later": "fair share: tenant a uses 14 GPUs of its quota of 16, other gangs of it that "
        "wait keep 2, the job needs 1, and no idle GPUs of others fit it (fewest nodes of one "
        "rack)",
    }


@each_row(("quota", "holds"), [(7, 0), (8, 3), (10, 5), (11, 6), (12, 6)])
def test_no_more_is_held_than_the_quota_leaves(quota: int, holds: int) -> None:
    """Five GPUs are in use, and six are free on the node where the gang of eight could stand; one
    that is larger than the quota holds nothing, and what is not held of the six others use."""
    jobs = (
        *runs("a", "n1", 5), *runs("b", "n1", 3), *runs("b", "n0", 2), job("gang", gpus=8),
        *(job(f"small{n}", "b", submitted_at_s=60.0) for n in range(6)),
    )  # fmt: skip
    found = decide("philly", seen(*jobs, quotas={"a": quota}))
    assert held(found) == ({"gang": {"n0": holds}} if holds else {})
    assert len(started(found)) == 6 - holds


def test_a_gang_that_no_quota_allows_starts_on_idle_gpus_of_others_all_the_same() -> None:
    """Eight GPUs of a quota of four: borrowed."""
    snapshot = seen(job("gang", gpus=8), quotas={"a": 4, "b": 12})
    assert placed(decide("philly", snapshot)) == {"gang": {"n0": 1}}


def test_a_hold_becomes_smaller_with_what_the_quota_leaves() -> None:
    """Its tenant came to use two GPUs more of ten, elsewhere: of the six four are left to hold."""
    jobs = (*runs("a", "n1", 6), *runs("b", "n1", 2), *runs("b", "n0", 2), job("gang", gpus=8))
    before = memory(gang=Attempted(NOW_S - 10.0, {NodeName("n0"): 6}))
    found = decide("philly", seen(*jobs, quotas={"a": 10, "b": 6}), before)
    assert held(found) == {"gang": {"n0": 4}}


def test_what_the_quota_no_longer_leaves_is_there_for_whoever_comes_first() -> None:
    """A gang held all that was free; a second tenant comes, with which half of the cell is the
    first one's quota. Its job starts in that pass, though it has its turn before the gang's."""
    jobs = (*runs("a", "n0", 2), job("gang", workers=(14, 14)))
    before = memory(gang=Attempted(NOW_S - 10.0, {NodeName("n0"): 6, NodeName("n1"): 8}))
    alone = decide("philly", seen(*jobs), before)
    assert started(alone) == ["gang"]
    found = decide("philly", seen(*jobs, job("new", "b", gpus=3)), before)
    assert (started(found)[0], held(found)) == ("new", {})


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    in_use=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(("n0", "n1"))), max_size=16),
    wait=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 8), st.sampled_from((0.0, 200.0, 280.0))),
        min_size=1,
        max_size=6,
    ),
    were=st.lists(st.tuples(st.sampled_from(("n0", "n1")), st.integers(1, 8)), max_size=6),
    holders=st.integers(1, 2),
)
def test_nobody_comes_to_have_more_than_its_quota_by_holding(
    in_use: list[tuple[str, str]],
    wait: list[tuple[str, int, float]],
    were: list[tuple[str, int]],
    holders: int,
) -> None:
    """Whatever was held before: what runs and what is held of a tenant are its quota at most, or
    nothing is held; and no GPU is held that is not free."""
    running = tuple(
        job(f"r{at}", tenant, nodes=(node,))
        for at, (tenant, node) in enumerate(in_use)
        if sum(each == node for _, each in in_use[:at]) < 8
    )
    waiting = tuple(
        job(f"w{at}", tenant, gpus=gpus, submitted_at_s=float(at))
        for at, (tenant, gpus, _) in enumerate(wait)
    )
    tried = {f"w{at}": Attempted(NOW_S - age_s) for at, (_, _, age_s) in enumerate(wait)}
    for (name, each), (node, gpus) in zip(tried.items(), were, strict=False):
        tried[name] = Attempted(each.since_s, {NodeName(node): gpus})
    snapshot = seen(*running, *waiting)
    found = policy(f"philly:holders={holders}").allocate(snapshot, memory(**tried))
    after = held(found)
    tenants: dict[str, str] = {each.job_id: each.tenant for each in (*running, *waiting)}
    names = set(tenants.values())
    for tenant in names:
        used = sum(each.tenant == tenant for each in running)
        holds = sum([sum(on.values()) for name, on in after.items() if tenants[name] == tenant])
        assert holds <= max(0.0, 16 / len(names) - used)
    gone = {each.job_id for each in found.decisions if isinstance(each, Preempt)}
    for node in ("n0", "n1"):
        there = sum(each.placed[0].node == node for each in running if each.job_id not in gone)
        assert there + sum(on.get(NodeName(node), 0) for on in after.values()) <= 8


# --- it is used of the quota --------------------------------------------------------------------


@pytest.mark.parametrize(("size", "kind"), [(3, FRAGMENTATION), (4, FAIR_SHARE)])
def test_what_a_gang_holds_its_tenant_uses(size: int, kind: str) -> None:
    """Of a quota of ten two are in use and five held: another job is within quota with three."""
    jobs = (
        *runs("a", "n1", 2), *runs("b", "n1", 6), *runs("b", "n0", 3),
        job("gang", gpus=8), job("next", gpus=size, submitted_at_s=50.0),
    )  # fmt: skip
    found = decide("philly", seen(*jobs, quotas={"a": 10, "b": 6}))
    assert held(found) == {"gang": {"n0": 5}}
    assert kinds(found)["next"] == kind


def test_what_a_gang_holds_counts_in_the_order_of_tenants() -> None:
    """Each has a third of the cell: two GPUs and a hold of three are more of that than three are,
    and two alone are less."""
    jobs = (
        *runs("a", "n1", 2), *runs("b", "n1", 3), *runs("c", "n0", 4), job("gang", gpus=5),
        replace(job("a-next", gpus=2, submitted_at_s=50.0), priority=1),
        job("b-next", "b", gpus=2, submitted_at_s=50.0),
    )  # fmt: skip
    before = memory(gang=Attempted(NOW_S - 10.0, {NodeName("n0"): 3}))
    assert started(decide("philly", seen(*jobs), before)) == ["b-next"]
    assert started(decide("philly", seen(*jobs)))[0] == "a-next"


def test_a_hold_makes_nobody_a_tenant_beyond_its_quota() -> None:
    """What runs within a team's own part is not stopped for another team, whatever its gang holds
    beside it of what the others leave: only jobs of the team that runs more are."""
    parts = {"x": 5, "y": 2, "z": 4, "idle": 5}
    tenants = (
        TenantView(name="org", guarantee_gpus=16),
        *(TenantView(name=n, parent="org", guarantee_gpus=gpus) for n, gpus in parts.items()),
    )
    jobs = (
        *runs("x", "n0", 5), *runs("z", "n1", 8), job("gang", "x", gpus=5),
        job("asks", "y", gpus=2, submitted_at_s=50.0),
    )  # fmt: skip
    before = memory(gang=Attempted(NOW_S - 10.0, {NodeName("n0"): 3}))
    snapshot = replace(seen(*jobs), tenants=tenants)
    found = policy("philly:preempt_ratio=0").allocate(snapshot, before)
    stopped = [each.job_id for each in found.decisions if isinstance(each, Preempt)]
    assert (stopped, held(found)) == (["z-n1-0", "z-n1-1"], {"gang": {"n0": 3}})


def test_holds_are_counted_up_the_tree() -> None:
    """Two teams have ten GPUs together: what the gang of one holds, that of the other may not."""
    tenants = (
        TenantView(name="org", guarantee_gpus=10),
        TenantView(name="x", parent="org"),
        TenantView(name="y", parent="org"),
        TenantView(name="b", guarantee_gpus=6),
    )
    jobs = (
        *runs("b", "n0", 2), *runs("b", "n1", 2),
        job("first", "x", gpus=8), job("second", "y", gpus=8, submitted_at_s=50.0),
    )  # fmt: skip
    found = decide("philly", replace(seen(*jobs), tenants=tenants))
    assert held(found) == {"first": {"n0": 6}, "second": {"n1": 4}}


# --- while it backs off -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "priority", "starts"), [("b", 0, True), ("a", 0, False), ("a", 1, True)]
)
def test_what_a_gang_reserves_is_no_room_for_later_jobs_of_its_tenant(
    who: str, priority: int, *, starts: bool
) -> None:
    """Other tenants are given it, and so is who comes before it in its own line."""
    jobs = (
        *runs("a", "n0", 2), *runs("c", "n1", 8), job("gang", gpus=8),
        replace(job("asks", who, gpus=6, submitted_at_s=50.0), priority=priority),
    )  # fmt: skip
    snapshot = seen(*jobs, quotas={"a": 8, "b": 0, "c": 8})
    found = policy(RESERVES).allocate(snapshot, memory(gang=Attempted(BACKS_OFF_S)))
    assert (started(found), held(found)) == (["asks"] if starts else [], {})
    if not starts:
        assert told(snapshot, memory(gang=Attempted(BACKS_OFF_S)), RESERVES)["gang"].endswith(
            "holds nothing for 110 s, but keeps 6 on n0 from later jobs of its tenant"
        )


def test_who_finds_no_room_beside_what_is_kept_hides_none_from_other_tenants() -> None:
    """A later job of the tenant does not fit; one of another tenant that asks for the same does."""
    jobs = (
        *runs("a", "n0", 2), *runs("c", "n0", 3), *runs("b", "n1", 3), *runs("c", "n1", 5),
        job("gang", gpus=5), job("own", gpus=2, submitted_at_s=50.0),
        job("theirs", "b", gpus=2, submitted_at_s=60.0),
    )  # fmt: skip
    before = memory(gang=Attempted(BACKS_OFF_S))
    assert started(policy(RESERVES).allocate(seen(*jobs), before)) == ["theirs"]


def test_with_no_holders_nothing_is_kept_either() -> None:
    """The knob that lets nobody hold leaves the whole floor to whoever fits."""
    jobs = (*runs("a", "n0", 2), *runs("c", "n1", 8), job("gang", gpus=8))
    later = job("later", gpus=6, submitted_at_s=50.0)
    snapshot = seen(*jobs, later, quotas={"a": 8, "c": 8})
    before = memory(gang=Attempted(BACKS_OFF_S))
    assert started(policy(f"{RESERVES}:holders=0").allocate(snapshot, before)) == ["later"]


def test_a_gang_that_may_hold_later_wakes_its_pass_though_it_is_not_within_quota() -> None:
    """Two of its tenant's sixteen GPUs are left to hold when it has backed off."""
    jobs = (*runs("a", "n0", 6), *runs("a", "n1", 8), job("gang", gpus=8))
    since_s = NOW_S - 6 * CYCLE_S - Knobs().hold_s - 20.0  # at the loosest level
    found = decide("philly", seen(*jobs), memory(gang=Attempted(since_s)))
    assert found.wake_at_s == since_s + 7 * CYCLE_S


# --- small jobs that keep coming ----------------------------------------------------------------

LONGEST_S = 2000.0


SMALL_WAITING = 3


@dataclass
class Days:
    """A cell in which a tenant's small jobs are never all served and its gangs reserve, played
    pass by pass.

    nodes: of eight GPUs, for the tenant; another tenant has `others` more, all of them in use.
    gangs: sizes, with the time after which each is submitted. began_s: when each began to run.
    """

    nodes: int
    others: int
    gangs: tuple[tuple[float, int], ...]
    rng: Random
    now_s: float = 0.0
    memory: bytes = b""
    made: int = 0
    ends_s: dict[str, float] = field(default_factory=dict[str, float])
    jobs: dict[str, JobView] = field(default_factory=dict[str, JobView])
    began_s: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        for at in range(self.others):
            theirs = job(f"other{at}", "other", gpus=8, nodes=(f"n{self.nodes + at}",))
            self.jobs[theirs.job_id] = theirs

    def play(self, until_s: float) -> None:
        """Passes, whenever a job ends or comes or the policy wants one, up to a time."""
        coming = list(self.gangs)
        while self.now_s < until_s:
            while coming and coming[0][0] <= self.now_s:
                self._submit(f"gang{len(self.gangs) - len(coming)}", coming.pop(0)[1])
            while sum(j.state == JobState.PENDING for j in self.jobs.values()) < SMALL_WAITING:
                self.made += 1
                self._submit(f"small{self.made}", 1)
            found = self._pass()
            at_s = [*self.ends_s.values(), *(at_s for at_s, _ in coming)]
            self.now_s = min(filter(None, [*at_s, found.wake_at_s]))
            for name in [name for name, end_s in self.ends_s.items() if end_s <= self.now_s]:
                del self.ends_s[name], self.jobs[name]

    def _submit(self, name: str, gpus: int) -> None:
        self.jobs[name] = job(name, gpus=gpus, submitted_at_s=self.now_s)

    def _pass(self) -> Allocation:
        jobs = tuple(self.jobs.values())
        nodes = [machine(f"n{at}", jobs=jobs) for at in range(self.nodes + self.others)]
        quotas = {"a": 8 * self.nodes, "other": 8 * self.others}
        tenants = tuple(TenantView(name=each, guarantee_gpus=n) for each, n in quotas.items())
        snapshot = replace(cell(*nodes, jobs=jobs, now_s=self.now_s), tenants=tenants)
        found = policy(RESERVES).allocate(snapshot, self.memory)
        used = sum(worker.gpus for j in jobs if j.tenant == "a" for worker in j.placed)
        assert sum(sum(each.values()) for each in held(found).values()) <= quotas["a"] - used
        self.memory = found.memory
        for each in found.decisions:
            assert isinstance(each, Start)
            ran = self.jobs[each.job_id]
            on = (each.placements[0].node,)
            self.jobs[each.job_id] = job(ran.job_id, gpus=ran.gpus_per_worker, nodes=on)
            self.ends_s[each.job_id] = self.now_s + self.rng.uniform(200.0, LONGEST_S)
            self.began_s[each.job_id] = self.now_s
        return found


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    nodes=st.integers(1, 3),
    others=st.integers(0, 1),
    sizes=st.lists(st.integers(2, 8), min_size=1, max_size=2),
    seed=st.integers(0, 10_000),
)
def test_a_gang_that_reserves_starts_in_bounded_time_while_small_jobs_of_its_tenant_keep_coming(
    nodes: int, others: int, sizes: list[int], seed: int
) -> None:
    """Each GPU of the quota that falls free is the gang's, whatever its tenant's later jobs ask
    for: it has them when those that ran have ended. Never are more held than the quota leaves."""
    gangs = tuple((3000.0 + 100.0 * at, size) for at, size in enumerate(sizes))
    days = Days(nodes=nodes, others=others, gangs=gangs, rng=Random(seed))
    longest_s = len(sizes) * 2 * LONGEST_S
    days.play(3100.0 + longest_s + LONGEST_S)
    for at, (came_s, _) in enumerate(gangs):
        assert days.began_s.get(f"gang{at}", float("inf")) - came_s <= longest_s
    assert days.made > 8 * nodes  # and they did keep coming
