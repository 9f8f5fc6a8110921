"""Occupancy: which jobs hold the nodes that may go home."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from common.model import JobId, NodeName, NodeRole
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    NodeView,
    WorkerView,
)

Ranks = tuple[int, ...]
"""Priorities above the least; see `Occupancy.ranks`."""


class Occupancy:
    """The jobs on each node, without leaving workers; shrinks as jobs and workers are taken away.

    Several services reclaim in one pass from the same occupancy. So no job is a victim twice, and a
    node that one preemption empties is idle for the next service.
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._snapshot = snapshot
        self._now_s = snapshot.now_s

    # Worked out when first asked for: most loan passes take nothing back.

    @cached_property
    def nodes(self) -> dict[NodeName, NodeView]:
        """Every node by name."""
        return {node.name: node for node in self._snapshot.nodes}

    @cached_property
    def jobs(self) -> dict[JobId, JobView]:
        """Every live job by id."""
        return {job.job_id: job for job in self._snapshot.jobs}

    @cached_property
    def _tables(self) -> tuple[dict[NodeName, list[WorkerView]], dict[JobId, dict[NodeName, int]]]:
        """Workers per node, and GPUs per job and node; both change together."""
        workers: dict[NodeName, list[WorkerView]] = {}
        hosts: dict[JobId, dict[NodeName, int]] = {}
        for node in self._snapshot.nodes:
            workers[node.name] = [worker for worker in node.workers if not worker.is_leaving]
            for worker in workers[node.name]:
                gpus = hosts.setdefault(worker.job_id, {})
                gpus[node.name] = gpus.get(node.name, 0) + worker.gpus
        return workers, hosts

    @property
    def _workers(self) -> dict[NodeName, list[WorkerView]]:
        return self._tables[0]

    @property
    def _hosts(self) -> dict[JobId, dict[NodeName, int]]:
        return self._tables[1]

    def base_jobs(self, name: NodeName) -> tuple[JobId, ...]:
        """Jobs that cannot lose this node without stopping, sorted."""
        return tuple(sorted({w.job_id for w in self._workers[name] if not w.is_flexible}))

    def jobs_on(self, name: NodeName) -> list[JobId]:
        """Jobs with any worker on this node, sorted."""
        return sorted({worker.job_id for worker in self._workers[name]})

    def flexible_workers(self, name: NodeName) -> tuple[WorkerView, ...]:
        """Workers that can be released from this node at no preemption."""
        return tuple(w for w in self._workers[name] if w.is_flexible)

    def hosts(self, job_id: JobId) -> dict[NodeName, int]:
        """GPUs that a job holds, per node."""
        return self._hosts.get(job_id, {})

    @cached_property
    def _least(self) -> int:
        """The lowest priority that a job with workers has."""
        here = (self.jobs[job_id].priority for job_id in self._hosts if job_id in self.jobs)
        return min(here, default=0)

    def ranks(self, job_ids: Iterable[JobId]) -> Ranks:
        """Priorities of jobs above the least of all that have workers, the highest first.

        Of two of these rows the lesser one stops fewer jobs of the highest priority in which they
        differ. With equal priorities they are empty.
        """
        here = (self.priority(job_id) for job_id in job_ids)
        return tuple(sorted((each for each in here if each > self._least), reverse=True))

    def priority(self, job_id: JobId) -> int:
        """Priority of a job; the least one for an unknown job."""
        job = self.jobs.get(job_id)
        return self._least if job is None else job.priority

    def remove_job(self, job_id: JobId) -> None:
        """A job stops: it leaves all its nodes."""
        for name in self._hosts.pop(job_id, {}):
            self._workers[name] = [w for w in self._workers[name] if w.job_id != job_id]

    def remove_worker(self, worker: WorkerView) -> None:
        """One flexible worker is released."""
        self._workers[worker.node].remove(worker)
        gpus = self._hosts[worker.job_id]
        gpus[worker.node] -= worker.gpus
        if not gpus[worker.node]:
            del gpus[worker.node]

    def lost_gpu_s(self, job_id: JobId) -> float:
        """Work that a preemption of the job would throw away."""
        job = self.jobs.get(job_id)
        return 0.0 if job is None else job.lost_gpu_s(self._now_s)


def lent_nodes(snapshot: ClusterSnapshot, service: str) -> list[NodeView]:
    """Nodes of a service that can be recalled: on loan or on the way there."""
    return [
        node
        for node in snapshot.nodes
        if node.service == service
        and (
            node.role == NodeRole.DRAINING
            or (node.role == NodeRole.ON_LOAN and not node.is_reclaimed)
        )
    ]
