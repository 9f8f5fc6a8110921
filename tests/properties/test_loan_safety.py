"""What no policy may ever do with nodes that are lent or come home, over generated clusters."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from msgspec.structs import replace

from common.model import NodeRole
from coordinator.policies.aryl.lending.balance import balance
from coordinator.policies.contract.decisions import (
    Advice,
    Loan,
    Preempt,
    Reclaim,
    Recommend,
    Resize,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import POLICIES, Policy
from tests.properties.safety import (
    among,
    careful_reclaim,
    every_reclaim,
    often,
)
from tests.strategies import snapshots

pytestmark = pytest.mark.slow


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
    assert not [d for d in decisions if isinstance(d, Recommend) and d.action == Advice.LEND]
