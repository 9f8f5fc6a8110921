"""Policies to try on generated clusters, and what their decisions do to nodes. Tests nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.model import NodeName, NodeRole, Preemptibility
from coordinator.policies.contract.decisions import (
    Decision,
    Migrate,
    Placement,
    Preempt,
    Resize,
    Start,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.registry import POLICIES, Policy, policy
from tests.strategies import lent_clusters, snapshots

often = settings(max_examples=150, deadline=None)


def among(*names: str) -> st.SearchStrategy[Policy]:
    """One of the named policies, of all when none is named."""
    return st.sampled_from([policy(name) for name in names or sorted(POLICIES)])


every_policy = given(policy=among(), snapshot=snapshots())
every_reclaim = given(policy=among(), snapshot=st.one_of(lent_clusters(), snapshots()))
scaling_policy = given(
    policy=among("aryl", "aryl:reservation_after_s=null", "aryl-elastic"), snapshot=snapshots()
)

CARELESS = {"aryl-random", "aryl-scf", "opportunistic"}
"""The paper's baselines: they take nodes without looking whether a gentler one would do."""
careful_reclaim = given(
    policy=among(*sorted(POLICIES.keys() - CARELESS)),
    snapshot=st.one_of(lent_clusters(), snapshots()),
)


class Ledger:
    """Carries decisions out one by one on a plain count of GPUs, independent of the policies.

    What comes free for nobody, whoever leaves, is not among what is free.
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.nodes = {node.name: node for node in snapshot.nodes}
        self.jobs = {job.job_id: job for job in snapshot.jobs}
        self.services = {service.name: service for service in snapshot.services}
        self.free = {node.name: node.free_gpus for node in snapshot.nodes}
        self.flexible = dict.fromkeys(self.free, 0)
        for job in snapshot.jobs:
            for worker in job.placed if job.is_resizable else ():
                if worker.is_flexible and not worker.is_leaving:
                    self.flexible[worker.node] += worker.freed_gpus
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
                    self.free[worker.node] += worker.freed_gpus
                    self.flexible[worker.node] -= worker.freed_gpus
                    self.removed.append(worker)
                self._take(job, decision.added, are_flexible=True)
            case Preempt():
                for worker in self.jobs[decision.job_id].placed:
                    if not worker.is_leaving:
                        self.free[worker.node] += worker.freed_gpus
            case Migrate():
                job = self.jobs[decision.job_id]
                self._take(job, decision.placements)  # it leaves only then
                for worker in job.placed:
                    if not worker.is_leaving:
                        self.free[worker.node] += worker.freed_gpus
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
        if not node.is_schedulable or name in job.nodes.avoided:
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
