"""What no policy may ever do, over generated clusters; each property by its name."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobState, NodeName, NodeRole, Preemptibility
from coordinator.policies.bundles import POLICIES, Policy
from coordinator.policies.decisions import (
    Decision,
    Loan,
    Migrate,
    Placement,
    Preempt,
    Reclaim,
    Recommend,
    Resize,
    Start,
)
from coordinator.policies.loans.loaning import balance
from coordinator.policies.snapshot import ClusterSnapshot, JobView, WorkerView
from tests.strategies import lent_clusters, snapshots

pytestmark = pytest.mark.slow

often = settings(max_examples=150, deadline=None)


def among(*names: str) -> st.SearchStrategy[Policy]:
    """One of the named policies, of all when none is named."""
    return st.sampled_from([POLICIES[name] for name in names or sorted(POLICIES)])


every_policy = given(policy=among(), snapshot=snapshots())
every_reclaim = given(policy=among(), snapshot=st.one_of(lent_clusters(), snapshots()))
scaling_policy = given(policy=among("aryl", "aryl-elastic"), snapshot=snapshots())

CARELESS = {"aryl-random", "aryl-scf", "opportunistic"}
"""The paper's baselines: they take nodes without looking whether a gentler one would do."""
careful_reclaim = given(
    policy=among(*sorted(POLICIES.keys() - CARELESS)),
    snapshot=st.one_of(lent_clusters(), snapshots()),
)


class Ledger:
    """Carries decisions out one by one on a plain count of GPUs, independent of the policies."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.nodes = {node.name: node for node in snapshot.nodes}
        self.jobs = {job.job_id: job for job in snapshot.jobs}
        self.services = {service.name: service for service in snapshot.services}
        self.free = {node.name: node.free_gpus for node in snapshot.nodes}
        self.flexible = dict.fromkeys(self.free, 0)
        for job in snapshot.jobs:
            for worker in job.placed if job.is_resizable else ():
                if worker.is_flexible and not worker.is_leaving:
                    self.flexible[worker.node] += worker.gpus
        self.removed: list[WorkerView] = []

    def carry_out(self, decision: Decision) -> None:
        """Apply one decision; the GPUs it asks for must be there."""
        match decision:
            case Start():
                self._take(self.jobs[decision.job_id], decision.placements)
            case Resize():
                job = self.jobs[decision.job_id]
                by_index = {worker.worker_index: worker for worker in job.placed}
                for index in decision.removed_workers:
                    worker = by_index[index]
                    assert worker.is_flexible
                    assert not worker.is_leaving
                    self.free[worker.node] += worker.gpus
                    self.flexible[worker.node] -= worker.gpus
                    self.removed.append(worker)
                self._take(job, decision.added, are_flexible=True)
            case Preempt():
                for worker in self.jobs[decision.job_id].placed:
                    if not worker.is_leaving:
                        self.free[worker.node] += worker.gpus
            case Migrate():
                self._take(self.jobs[decision.job_id], decision.placements)
            case _:
                pass

    def _take(
        self, job: JobView, placements: tuple[Placement, ...], *, are_flexible: bool = False
    ) -> None:
        for placement in placements:
            gpus = placement.worker_count * job.gpus_per_worker
            assert placement.worker_count > 0
            assert self.nodes[placement.node].is_schedulable
            assert self.free[placement.node] >= gpus, f"{placement.node} has not {gpus} GPUs"
            self.free[placement.node] -= gpus
            if are_flexible or placement.is_flexible:
                self.flexible[placement.node] += gpus

    def may_host(self, job: JobView, name: NodeName, *, is_flexible: bool) -> bool:
        """The rules of place, written out again."""
        node = self.nodes[name]
        if not node.is_schedulable or name in job.avoid_nodes:
            return False
        if node.role == NodeRole.TRAINING:
            return True
        service = self.services[node.service] if node.service else None
        if service is None or service.is_recalled or job.grace_s > service.max_grace_s:
            return False
        return job.preemptibility == Preemptibility.FULL or (
            is_flexible and job.preemptibility == Preemptibility.SEMI
        )

    def fits(self, job: JobView, *, with_flexible: bool) -> bool:
        """Whether a base gang would find room now."""
        for gpu_type in {node.gpu_type for node in self.nodes.values()}:
            if not job.accepts(gpu_type):
                continue
            slots = 0
            for name, node in self.nodes.items():
                if node.gpu_type == gpu_type and self.may_host(job, name, is_flexible=False):
                    gpus = self.free[name] + (self.flexible[name] if with_flexible else 0)
                    slots += gpus // job.gpus_per_worker
            if slots >= job.workers_on(gpu_type).min:
                return True
        return False


def settle(snapshot: ClusterSnapshot, policy: Policy) -> tuple[Ledger, tuple[Decision, ...]]:
    """A pass, carried out."""
    ledger = Ledger(snapshot)
    decisions = policy.allocate(snapshot, b"").decisions
    for decision in decisions:
        ledger.carry_out(decision)
    return ledger, decisions


@often
@every_policy
def test_no_gpu_holds_two_exclusive_workers(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """Decisions, carried out in their order, never ask a node for more GPUs than are free by then:
    each GPU has one worker."""
    ledger, _ = settle(snapshot, policy)
    assert min(ledger.free.values()) >= 0


@often
@every_policy
def test_gangs_are_whole_or_absent(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """A start has exactly the base gang, at most the largest, on nodes of one accepted type."""
    ledger, decisions = settle(snapshot, policy)
    for start in (decision for decision in decisions if isinstance(decision, Start)):
        job = ledger.jobs[start.job_id]
        span = job.workers_on(start.gpu_type)
        assert job.accepts(start.gpu_type)
        assert {ledger.nodes[p.node].gpu_type for p in start.placements} == {start.gpu_type}
        assert sum(p.worker_count for p in start.placements if not p.is_flexible) == span.min
        assert sum(p.worker_count for p in start.placements) <= span.max


@often
@every_policy
def test_every_waiting_job_is_answered_once(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """Each waiting job starts or is told all its blockers; a reason is never empty."""
    _, decisions = settle(snapshot, policy)
    holds = policy.hold(snapshot, b"")
    started = [decision.job_id for decision in decisions if isinstance(decision, Start)]
    assert sorted([*started, *(hold.job_id for hold in holds)]) == [
        job.job_id for job in snapshot.jobs if job.state == JobState.PENDING
    ]
    assert all(decision.reason for decision in decisions)
    assert all(hold.blockers for hold in holds)


@often
@every_policy
def test_nobody_starts_on_a_node_that_its_job_avoids(
    policy: Policy, snapshot: ClusterSnapshot
) -> None:
    """A job that failed on a node for the node's sake is tried again elsewhere."""
    ledger, decisions = settle(snapshot, policy)
    for start in (decision for decision in decisions if isinstance(decision, Start)):
        avoided = ledger.jobs[start.job_id].avoid_nodes
        assert not {placement.node for placement in start.placements} & set(avoided)


@often
@every_policy
def test_nobody_is_placed_where_rules_forbid(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """On lent nodes: never `non`, only flexible workers of `semi`, no grace above its limit."""
    ledger, decisions = settle(snapshot, policy)
    for decision in decisions:
        match decision:
            case Start():
                placed = [(p.node, p.is_flexible) for p in decision.placements]
            case Resize():
                placed = [(p.node, True) for p in decision.added]
            case _:
                continue
        job = ledger.jobs[decision.job_id]
        assert all(ledger.may_host(job, name, is_flexible=kind) for name, kind in placed)


@often
@given(policy=among("sjf", "fifo-skip", "aryl-loan"), snapshot=snapshots())
def test_nobody_waits_beside_free_gpus(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """With skipping, a job that waits does not fit into what is free after the pass."""
    ledger, _ = settle(snapshot, policy)
    for hold in policy.hold(snapshot, b""):
        assert not ledger.fits(ledger.jobs[hold.job_id], with_flexible=False)


@often
@scaling_policy
def test_base_demand_before_flexible(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """A job that waits would not fit even in place of all flexible workers kept or added."""
    ledger, _ = settle(snapshot, policy)
    for hold in policy.hold(snapshot, b""):
        assert not ledger.fits(ledger.jobs[hold.job_id], with_flexible=True)


@often
@scaling_policy
def test_no_flexible_worker_goes_in_vain(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """Of the removed workers none could have stayed: its GPUs are in use after the pass."""
    ledger, _ = settle(snapshot, policy)
    assert all(ledger.free[worker.node] < worker.gpus for worker in ledger.removed)


@often
@scaling_policy
def test_resizes_are_sound(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """One resize per job, never both ways, only of jobs that can, never beyond the range; a job
    in its cooldown does not grow."""
    ledger, decisions = settle(snapshot, policy)
    resizes = [decision for decision in decisions if isinstance(decision, Resize)]
    assert len({resize.job_id for resize in resizes}) == len(resizes)
    for resize in resizes:
        job = ledger.jobs[resize.job_id]
        assert job.is_resizable
        assert job.gpu_type is not None
        assert bool(resize.added) != bool(resize.removed_workers)
        grown = len(job.placed) + sum(p.worker_count for p in resize.added)
        assert grown <= job.workers_on(job.gpu_type).max or not resize.added
        assert all(ledger.nodes[p.node].gpu_type == job.gpu_type for p in resize.added)
        is_resting = (job.last_resized_at_s or 0.0) + snapshot.resize_cooldown_s > snapshot.now_s
        assert not (resize.added and is_resting)


@often
@given(policy=among("fifo", "fifo-skip", "sjf", "aryl-loan"), snapshot=snapshots())
def test_no_scaling_means_none(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """Policies without scaling resize nobody and start base gangs only."""
    _, decisions = settle(snapshot, policy)
    assert not [decision for decision in decisions if isinstance(decision, Resize)]
    starts = [decision for decision in decisions if isinstance(decision, Start)]
    assert not [p for start in starts for p in start.placements if p.is_flexible]


@often
@every_policy
def test_a_frozen_cell_is_left_alone(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """Frozen: no decisions, and memory is kept; only recalled services get their nodes back."""
    frozen = replace(snapshot, is_frozen=True)
    allocation = policy.allocate(frozen, b"kept")
    assert (allocation.decisions, allocation.memory) == ((), b"kept")
    recalled = {service.name for service in snapshot.services if service.is_recalled}
    decisions = policy.lend(frozen)
    services = {d.service for d in decisions if isinstance(d, Reclaim | Loan | Recommend)}
    assert services <= recalled
    home = {
        node.name
        for node in snapshot.nodes
        if node.service in recalled
        and (
            node.role == NodeRole.DRAINING
            or (node.role == NodeRole.ON_LOAN and not node.is_reclaimed)
        )
    }
    assert {d.node for d in decisions if isinstance(d, Reclaim)} == home
    assert not [d for d in decisions if isinstance(d, Loan)]


@often
@every_reclaim
def test_same_snapshot_same_bytes(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """The same snapshot, also one read back from bytes, gives byte-identical decisions."""
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=ClusterSnapshot)
    encode = msgspec.msgpack.encode
    assert encode(policy.allocate(snapshot, b"")) == encode(policy.allocate(again, b""))
    assert encode(policy.lend(snapshot)) == encode(policy.lend(again))


@often
@every_reclaim
def test_no_victim_without_a_beneficiary(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """A preempted job has base workers on a node that its beneficiary takes back; once only."""
    decisions = policy.lend(snapshot)
    taken = {d.node: d.service for d in decisions if isinstance(d, Reclaim)}
    victims = [d for d in decisions if isinstance(d, Preempt)]
    assert len({victim.job_id for victim in victims}) == len(victims)
    for victim in victims:
        job = next(job for job in snapshot.jobs if job.job_id == victim.job_id)
        assert victim.node in {w.node for w in job.placed if not w.is_flexible}
        assert victim.node is not None
        assert taken.get(victim.node) == victim.beneficiary
    named = Counter(victim.node for victim in victims)
    for reclaim in (d for d in decisions if isinstance(d, Reclaim)):
        assert reclaim.predicted_preemptions == named[reclaim.node]


@often
@every_reclaim
def test_nobody_stays_on_a_reclaimed_node(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """Every worker of a reclaimed node is released or its job preempted, never both."""
    decisions = policy.lend(snapshot)
    taken = {d.node for d in decisions if isinstance(d, Reclaim)}
    victims = {d.job_id for d in decisions if isinstance(d, Preempt)}
    resizes = [d for d in decisions if isinstance(d, Resize)]
    released = {(d.job_id, index) for d in resizes for index in d.removed_workers}
    for job in snapshot.jobs:
        for worker in job.placed:
            if worker.node not in taken or worker.is_leaving:
                continue
            is_released = (job.job_id, worker.worker_index) in released
            assert is_released == worker.is_flexible or job.job_id in victims
            if is_released and job.job_id in victims:
                # another service's reclaim, earlier in the pass, had released it
                assert len({node.service for node in snapshot.nodes if node.name in taken}) > 1


@often
@careful_reclaim
def test_no_more_comes_home_than_is_missing(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """A service takes back its shortfall, or all that is lent, in every mode; nothing is preempted
    while gentler nodes are enough."""
    decisions = policy.lend(snapshot)
    base = {
        node.name: {w.job_id for w in node.workers if not w.is_flexible and not w.is_leaving}
        for node in snapshot.nodes
    }
    for service in snapshot.services:
        lent = [
            node.name
            for node in snapshot.nodes
            if node.service == service.name
            and not node.is_reclaimed
            and node.role in (NodeRole.ON_LOAN, NodeRole.DRAINING)
        ]
        taken = [d.node for d in decisions if isinstance(d, Reclaim) and d.service == service.name]
        wanted = len(lent) if service.is_recalled else balance(snapshot, service).shortfall
        assert len(taken) == min(wanted, len(lent))
        if sum(1 for name in lent if not base[name]) >= wanted:
            victims = [d for d in decisions if isinstance(d, Preempt)]
            assert service.name not in {victim.beneficiary for victim in victims}


@often
@careful_reclaim
def test_a_reclaimed_set_is_irreducible(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """Without any one of its victims a service would get fewer nodes: none stops in vain."""
    decisions = policy.lend(snapshot)
    gone: set[str] = set()  # victims of services before it in the pass
    for service in snapshot.services:
        mine = {
            d.job_id for d in decisions if isinstance(d, Preempt) and d.beneficiary == service.name
        }
        base = [
            {w.job_id for w in node.workers if not w.is_flexible and not w.is_leaving} - gone
            for node in snapshot.nodes
            if node.service == service.name
            and not node.is_reclaimed
            and node.role in (NodeRole.ON_LOAN, NodeRole.DRAINING)
        ]
        taken = sum(1 for d in decisions if isinstance(d, Reclaim) and d.service == service.name)
        for victim in mine:
            assert sum(1 for jobs in base if jobs <= mine - {victim}) < taken
        gone |= mine


@often
@given(snapshot=snapshots())
def test_a_loan_is_not_taken_back_at_once(snapshot: ClusterSnapshot) -> None:
    """With the lent nodes gone and the load as it was, nothing that was lent comes home."""
    policy = POLICIES["aryl"]
    lent = {d.node for d in policy.lend(snapshot) if isinstance(d, Loan)}
    nodes = tuple(
        replace(node, role=NodeRole.DRAINING, serving_since_s=None) if node.name in lent else node
        for node in snapshot.nodes
    )
    after = policy.lend(replace(snapshot, nodes=nodes))
    assert not lent & {d.node for d in after if isinstance(d, Reclaim)}


@often
@given(policy=among("fifo", "fifo-skip", "sjf", "aryl-elastic"), snapshot=snapshots())
def test_no_loans_means_none(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """Policies without loans never lend, though they take back what somebody has lent."""
    decisions = policy.lend(snapshot)
    assert not [decision for decision in decisions if isinstance(decision, Loan)]
    assert not [d for d in decisions if isinstance(d, Recommend) and d.action == "lend"]
