"""What no policy may ever do, over generated clusters; each property by its name."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobState, NodeName, NodeRole
from coordinator.policies.contract.decisions import (
    Decision,
    Loan,
    Preempt,
    Reclaim,
    Recommend,
    Resize,
    Start,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import Policy
from tests.policies.tenant_books import shared_cells
from tests.properties.safety import (
    Ledger,
    among,
    every_policy,
    every_reclaim,
    often,
    scaling_policy,
    settle,
)
from tests.strategies import snapshots

pytestmark = pytest.mark.slow


class Settled(NamedTuple):
    """A pass of a policy that was carried out."""

    policy: Policy
    snapshot: ClusterSnapshot
    ledger: Ledger
    decisions: tuple[Decision, ...]


# --- rules of every policy ----------------------------------------------------------------------


def no_gpu_holds_two_exclusive_workers(found: Settled) -> None:
    """Decisions, carried out in their order, never ask a node for more GPUs than are free by then:
    each GPU has one worker."""
    ledger = found.ledger
    assert min(ledger.free.values()) >= 0


def every_waiting_job_is_answered_once(found: Settled) -> None:
    """Each waiting job starts or is told all its blockers; a reason is never empty."""
    policy, snapshot, decisions = found.policy, found.snapshot, found.decisions
    holds = policy.pending_reasons(snapshot, b"")
    started = [decision.job_id for decision in decisions if isinstance(decision, Start)]
    assert sorted([*started, *(hold.job_id for hold in holds)]) == [
        job.job_id for job in snapshot.jobs if job.state == JobState.PENDING
    ]
    assert all(decision.reason for decision in decisions)
    assert all(hold.blockers for hold in holds)


def nobody_starts_on_a_node_that_its_job_avoids(found: Settled) -> None:
    """A job that failed on a node for the node's sake is tried again elsewhere."""
    ledger, decisions = found.ledger, found.decisions
    for start in (decision for decision in decisions if isinstance(decision, Start)):
        avoided = ledger.jobs[start.job_id].nodes.avoided
        assert not {placement.node for placement in start.placements} & set(avoided)


def nobody_is_placed_where_rules_forbid(found: Settled) -> None:
    """On lent nodes: never `non`, only flexible workers of `semi`, no grace above its limit."""
    ledger, decisions = found.ledger, found.decisions
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


def a_frozen_cell_is_left_alone(found: Settled) -> None:
    """Frozen: memory is kept and nothing is decided but what comes home, as in any other cell."""
    policy, snapshot = found.policy, found.snapshot
    frozen = replace(snapshot, is_frozen=True)
    allocation = policy.allocate(frozen, b"kept")
    assert (allocation.decisions, allocation.memory) == ((), b"kept")
    decisions = policy.lend(frozen)
    assert not [d for d in decisions if isinstance(d, Loan | Recommend)]
    unfrozen = policy.lend(snapshot)
    assert decisions == tuple(d for d in unfrozen if not isinstance(d, Loan | Recommend))
    recalled = {service.name for service in snapshot.services if service.is_recalled}
    home = {
        node.name
        for node in snapshot.nodes
        if node.service in recalled
        and (
            node.role == NodeRole.DRAINING
            or (node.role == NodeRole.ON_LOAN and not node.is_reclaimed)
        )
    }
    assert {d.node for d in decisions if isinstance(d, Reclaim)} >= home


RULES = (
    no_gpu_holds_two_exclusive_workers,
    every_waiting_job_is_answered_once,
    nobody_starts_on_a_node_that_its_job_avoids,
    nobody_is_placed_where_rules_forbid,
    a_frozen_cell_is_left_alone,
)


@settings(often, max_examples=300)
@every_policy
def test_every_rule_holds_under_every_policy(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """Each of `RULES`, on the same clusters: to make one costs more than to look at it."""
    found = Settled(policy, snapshot, *settle(snapshot, policy))
    for rule in RULES:
        rule(found)


# --- rules of scaling ---------------------------------------------------------------------------


def _first_in_line(policy: Policy, snapshot: ClusterSnapshot, ledger: Ledger) -> list[JobView]:
    """The waiting jobs of the highest priority: for the sake of these, others may wait."""
    waiting = [ledger.jobs[hold.job_id] for hold in policy.pending_reasons(snapshot, b"")]
    highest = max((job.priority for job in waiting), default=0)
    return [job for job in waiting if job.priority == highest]


def base_demand_before_flexible(found: Settled) -> None:
    """A job that waits would not fit even in place of all flexible workers kept or added; under a
    policy that reserves GPUs, or behind a higher priority, it may wait for another job's sake."""
    policy, snapshot, ledger = found.policy, found.snapshot, found.ledger
    if getattr(policy.knobs, "reservation_after_s", None) is not None:
        return
    for job in _first_in_line(policy, snapshot, ledger):
        assert not ledger.fits(job, with_flexible=True)


def no_flexible_worker_goes_in_vain(found: Settled) -> None:
    """Of the removed workers none could have stayed: its GPUs are in use after the pass."""
    ledger = found.ledger
    assert all(ledger.free[worker.node] < worker.freed_gpus for worker in ledger.removed)


def resizes_are_sound(found: Settled) -> None:
    """One resize per job, never both ways, only of jobs that can, never beyond the range; a job
    in its cooldown does not grow."""
    snapshot, ledger, decisions = found.snapshot, found.ledger, found.decisions
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
        is_resting = (job.resizes.latest_at_s or 0.0) + snapshot.resize_cooldown_s > snapshot.now_s
        assert not (resize.added and is_resting)


SCALING_RULES = (
    base_demand_before_flexible,
    no_flexible_worker_goes_in_vain,
    resizes_are_sound,
)


@settings(often, max_examples=200)
@scaling_policy
def test_every_rule_of_scaling_holds(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """Each of `SCALING_RULES`."""
    found = Settled(policy, snapshot, *settle(snapshot, policy))
    for rule in SCALING_RULES:
        rule(found)


# --- rules of some ------------------------------------------------------------------------------


@often
@given(policy=among("sjf", "fifo-skip", "aryl-loan"), snapshot=snapshots())
def test_nobody_waits_beside_free_gpus(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """With skipping, a job that waits does not fit into what is free after the pass; behind a
    higher priority it may wait for another job's sake."""
    ledger, _ = settle(snapshot, policy)
    for job in _first_in_line(policy, snapshot, ledger):
        assert not ledger.fits(job, with_flexible=False)


@often
@given(policy=among(), snapshot=st.one_of(snapshots(), shared_cells()))
def test_nobody_is_stopped_for_nobody(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """No victim without need: of the GPUs that each leaves others take some in the same pass."""
    ledger, decisions = settle(snapshot, policy)
    for stop in (decision for decision in decisions if isinstance(decision, Preempt)):
        freed: Counter[NodeName] = Counter()
        for worker in ledger.jobs[stop.job_id].placed:
            freed[worker.node] += 0 if worker.is_leaving else worker.freed_gpus
        assert any(ledger.free[node] < gpus for node, gpus in freed.items())


@often
@given(policy=among("fifo", "fifo-skip", "sjf", "aryl-loan"), snapshot=snapshots())
def test_no_scaling_means_none(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """Policies without scaling resize nobody and start base gangs only."""
    _, decisions = settle(snapshot, policy)
    assert not [decision for decision in decisions if isinstance(decision, Resize)]
    starts = [decision for decision in decisions if isinstance(decision, Start)]
    assert not [p for start in starts for p in start.placements if p.is_flexible]


@often
@every_reclaim
def test_same_snapshot_same_bytes(policy: Policy, snapshot: ClusterSnapshot) -> None:
    """The same snapshot, also one read back from bytes, gives byte-identical decisions."""
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=ClusterSnapshot)
    encode = msgspec.msgpack.encode
    assert encode(policy.allocate(snapshot, b"")) == encode(policy.allocate(again, b""))
    assert encode(policy.lend(snapshot)) == encode(policy.lend(again))
