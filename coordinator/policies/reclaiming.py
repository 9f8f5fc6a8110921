"""Which lent nodes go back, at the least cost to jobs. Must not know why they are wanted.

Order (Lyra, EuroSys'23, sections 4 and 5.3): nodes that are not yet lent in full, idle nodes,
nodes with flexible workers only, then by the preemption cost of a node. The paper's tie rule,
"collateral damage", counts only GPUs vacated beyond what is still wanted: a node that the same
preemption empties and that goes home as well is no damage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import fsum

from msgspec import Struct

from common.model import JobId, JobState, NodeName, NodeRole
from coordinator.policies.decisions import Decision, Preempt, Reclaim, Resize
from coordinator.policies.snapshot import (
    ClusterSnapshot,
    JobView,
    NodeView,
    ServiceView,
    WorkerView,
)


class Choice(Struct, frozen=True, kw_only=True):
    """Nodes to take back, in order, and the jobs that must stop for it."""

    nodes: tuple[NodeName, ...]
    victims: tuple[JobId, ...]


class Occupancy:
    """Who sits where, leaving workers left out; shrinks as jobs and workers are taken away.

    Several services reclaim in one pass from the same occupancy, so that no job is a victim twice
    and what one preemption empties is idle for the next service.
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

    def flexible_workers(self, name: NodeName) -> tuple[WorkerView, ...]:
        """Workers that can be released from this node at no preemption."""
        return tuple(w for w in self._workers[name] if w.is_flexible)

    def hosts(self, job_id: JobId) -> dict[NodeName, int]:
        """GPUs that a job holds, per node."""
        return self._hosts.get(job_id, {})

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


def node_preemption_cost(
    occupancy: Occupancy,
    name: NodeName,
    gone: frozenset[JobId] = frozenset(),
    taken: frozenset[NodeName] = frozenset(),
) -> float:
    """Sum over base and inelastic jobs on the node of 1 / nodes that host the job.

    Lyra, EuroSys'23, section 4 and table 1 ("server fraction"). Jobs in `gone` count no more, and
    nodes in `taken` no longer host: the flexible workers on them are released in any case.
    """
    return sum(
        1.0 / sum(1 for host in occupancy.hosts(job_id) if host not in taken)
        for job_id in occupancy.base_jobs(name)
        if job_id not in gone
    )


def lent_nodes(snapshot: ClusterSnapshot, service: str) -> list[NodeView]:
    """Nodes of a service that can be told to come home: on loan or on the way there."""
    return [
        node
        for node in snapshot.nodes
        if node.service == service
        and (
            node.role == NodeRole.DRAINING
            or (node.role == NodeRole.ON_LOAN and not node.is_reclaimed)
        )
    ]


def choose_nodes(occupancy: Occupancy, candidates: Sequence[NodeView], wanted_count: int) -> Choice:
    """The cheapest `wanted_count` nodes, fewer if there are fewer; `occupancy` is not changed.

    No victim is in vain: without any one of them too few nodes would be free.
    """
    wanted_count = min(wanted_count, len(candidates))
    base = {node.name: occupancy.base_jobs(node.name) for node in candidates}
    victims = _greedy_victims(occupancy, candidates, base, wanted_count)
    victims = _without_needless(occupancy, base, victims, wanted_count)
    free = sorted(
        (node for node in candidates if victims.issuperset(base[node.name])),
        key=lambda node: _gentleness(occupancy, node),
    )
    return Choice(
        nodes=tuple(node.name for node in free[:wanted_count]),
        victims=tuple(sorted(victims)),
    )


def _gentleness(occupancy: Occupancy, node: NodeView) -> tuple[bool, bool, int, str]:
    """Not yet lent, then idle, then fewest flexible GPUs to release, then who has base workers."""
    flexible_gpus = sum(worker.gpus for worker in occupancy.flexible_workers(node.name))
    has_base = bool(occupancy.base_jobs(node.name))
    return (node.role != NodeRole.DRAINING, has_base, flexible_gpus, node.name)


def _greedy_victims(
    occupancy: Occupancy,
    candidates: Sequence[NodeView],
    base: dict[NodeName, tuple[JobId, ...]],
    wanted_count: int,
) -> set[JobId]:
    """Node by node the lowest cost, updated after each; ties by damage, lost work and name."""
    victims: set[JobId] = set()
    names = [node.name for node in candidates]
    while True:
        taken = frozenset(name for name in names if victims.issuperset(base[name]))
        left = wanted_count - len(taken)
        if left <= 0:
            return victims
        gone = frozenset(victims)
        rest = [name for name in names if name not in taken]
        costs = {name: node_preemption_cost(occupancy, name, gone, taken) for name in rest}
        lowest = min(costs.values())
        name = min(
            (name for name in rest if costs[name] <= lowest + 1e-9),
            key=lambda name: (
                _excess_gpus(occupancy, base, rest, name, gone, taken, left),
                sum(occupancy.lost_gpu_s(job_id) for job_id in base[name] if job_id not in gone),
                name,
            ),
        )
        victims.update(base[name])


def _excess_gpus(
    occupancy: Occupancy,
    base: dict[NodeName, tuple[JobId, ...]],
    rest: Iterable[NodeName],
    name: NodeName,
    gone: frozenset[JobId],
    taken: frozenset[NodeName],
    left: int,
) -> int:
    """Collateral damage of taking a node: GPUs vacated elsewhere, beyond the nodes still wanted.

    left: nodes still wanted, this one included.
    """
    freed: dict[NodeName, int] = {}
    victims = [job_id for job_id in base[name] if job_id not in gone]
    for job_id in victims:
        for host, gpus in occupancy.hosts(job_id).items():
            if host != name and host not in taken:
                freed[host] = freed.get(host, 0) + gpus
    stopped = gone.union(victims)
    emptied = [other for other in rest if other in freed and stopped.issuperset(base[other])]
    useful = sorted((freed[other] for other in emptied), reverse=True)[: max(0, left - 1)]
    return sum(freed.values()) - sum(useful)


def _without_needless(
    occupancy: Occupancy,
    base: dict[NodeName, tuple[JobId, ...]],
    victims: set[JobId],
    wanted_count: int,
) -> set[JobId]:
    """Give back what was not needed, the job that would lose most first."""
    needed = set(victims)
    for job_id in sorted(victims, key=lambda job_id: (-occupancy.lost_gpu_s(job_id), job_id)):
        without = needed - {job_id}
        if sum(1 for jobs in base.values() if without.issuperset(jobs)) >= wanted_count:
            needed = without
    return needed


def carry_out(
    occupancy: Occupancy, service: ServiceView, choice: Choice, because: str
) -> tuple[Decision, ...]:
    """The decisions of a choice: release flexible workers, preempt victims, take the nodes back.

    `occupancy` is brought up to date. because: why the service wants nodes, with numbers.
    """
    released = _release(occupancy, choice)
    preempts: list[Decision] = []
    bill: dict[NodeName, list[JobId]] = {name: [] for name in choice.nodes}
    for job_id in choice.victims:
        lost_gpu_s = occupancy.lost_gpu_s(job_id)
        nodes = [name for name in choice.nodes if job_id in occupancy.base_jobs(name)]
        bill[nodes[0]].append(job_id)  # each victim is counted once, as its Preempt says
        preempts.append(
            Preempt(
                job_id=job_id,
                predicted_cost_gpu_s=lost_gpu_s,
                beneficiary=service.name,
                node=nodes[0],
                reason=f"its base gang is on {', '.join(nodes)}, which {service.name} takes back: "
                f"{because}; {lost_gpu_s:.0f} GPU-s of work lost",
            )
        )
    reclaims: list[Decision] = []
    for name in choice.nodes:
        lost_gpu_s = fsum(occupancy.lost_gpu_s(job_id) for job_id in bill[name])
        freed = sum(1 for workers in released.values() for w in workers if w.node == name)
        reclaims.append(
            Reclaim(
                node=name,
                service=service.name,
                deadline_s=service.reclaim_deadline_s,
                predicted_preemptions=len(bill[name]),
                predicted_cost_gpu_s=lost_gpu_s,
                released_workers=freed,
                reason=f"{because}; {_state_of(occupancy, name, freed, choice)}",
            )
        )
    resizes = _resizes(occupancy, service, released)
    for job_id in choice.victims:
        occupancy.remove_job(job_id)
    return (*resizes, *preempts, *reclaims)


def _release(occupancy: Occupancy, choice: Choice) -> dict[JobId, list[WorkerView]]:
    released: dict[JobId, list[WorkerView]] = {}
    for name in choice.nodes:
        for worker in occupancy.flexible_workers(name):
            if worker.job_id not in choice.victims:
                occupancy.remove_worker(worker)
                released.setdefault(worker.job_id, []).append(worker)
    return released


def _resizes(
    occupancy: Occupancy, service: ServiceView, released: dict[JobId, list[WorkerView]]
) -> list[Decision]:
    """One per job that runs; the engine itself releases those of a gang that is still starting."""
    decisions: list[Decision] = []
    for job_id in sorted(released):
        job = occupancy.jobs.get(job_id)
        if job is None or job.state not in (JobState.RUNNING, JobState.RESIZING):
            continue
        nodes = sorted({worker.node for worker in released[job_id]})
        count = len(released[job_id])
        decisions.append(
            Resize(
                job_id=job_id,
                removed_workers=tuple(sorted(w.worker_index for w in released[job_id])),
                reason=f"{count} flexible workers leave {', '.join(nodes)}, which "
                f"{service.name} takes back; nothing is preempted for it",
            )
        )
    return decisions


def _state_of(occupancy: Occupancy, name: NodeName, freed: int, choice: Choice) -> str:
    if occupancy.nodes[name].role == NodeRole.DRAINING:
        return "loan not begun"
    jobs = [job_id for job_id in occupancy.base_jobs(name) if job_id in choice.victims]
    if jobs:
        cost = node_preemption_cost(occupancy, name)
        return f"preempts {', '.join(jobs)} (preemption cost of the node {cost:.2f})"
    if freed:
        return f"only {freed} flexible workers there"
    return "idle"
