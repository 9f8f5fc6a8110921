"""The paper's greedy: take the node of the lowest preemption cost, one node at a time.

Lyra, EuroSys'23, sections 4 and 5.3. Its tie rule, "collateral damage", counts only GPUs vacated
beyond the demand: a node that the same preemption empties and that also goes home is no damage.

Priority comes before cost; the paper has no priorities. A node on which fewer jobs of the highest
priority stop goes first, whatever else it costs. With equal priorities the result is the paper's.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from common.model import JobId, NodeName
from coordinator.policies.aryl.reclaim.occupancy import Occupancy, Ranks

_Cost = tuple[Ranks, float]
"""Priorities of those that a node would stop, and the paper's cost."""

Base = Mapping[NodeName, tuple[JobId, ...]]
"""Per node that may go home: the jobs that cannot lose it without stopping, sorted."""


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


def greedy_victims(
    occupancy: Occupancy, base: Base, wanted_count: int, price: Mapping[JobId, float] | None = None
) -> set[JobId]:
    """Node by node the lowest priorities, then the lowest cost, updated after each; ties by damage,
    lost work and name.

    price: what each job costs; None counts every job as 1, as the paper does.
    """
    greedy = _Greedy(occupancy, base, price)
    while len(greedy.taken) < wanted_count:
        greedy.take(greedy.cheapest(wanted_count - len(greedy.taken)))
    return greedy.gone


class _Greedy:
    """Costs of all nodes, kept up to date as jobs stop; only affected nodes are computed again.

    The damage of a node is computed when its cost has changed, and again before it is taken, in
    case it rose. It falls elsewhere only when a neighbour's last other job has stopped. That
    neighbour is then computed again, costs no more, and takes the same victims.

    taken: nodes without base jobs that go on. gone: victims so far.
    """

    def __init__(
        self, occupancy: Occupancy, base: Base, price: Mapping[JobId, float] | None
    ) -> None:
        self._occupancy = occupancy
        self._base = base
        self._base_hosts: dict[JobId, list[NodeName]] = {}
        for name, jobs in base.items():
            for job_id in jobs:
                self._base_hosts.setdefault(job_id, []).append(name)
        self._price = dict.fromkeys(self._base_hosts, 1.0) if price is None else price
        self._lost_gpu_s = {job_id: occupancy.lost_gpu_s(job_id) for job_id in self._base_hosts}
        self._spread = {job_id: len(occupancy.hosts(job_id)) for job_id in self._base_hosts}
        self.gone: set[JobId] = set()
        self.taken: set[NodeName] = set()
        self._tiers: dict[_Cost, set[NodeName]] = {}
        self._tier_of: dict[NodeName, _Cost] = {}
        self._costs: list[_Cost] = []
        self._ties: dict[_Cost, list[tuple[int, float, NodeName]]] = {}
        self._damage: dict[NodeName, tuple[int, float]] = {}
        self._unsure = set(base)
        self._empty(sorted(name for name, jobs in base.items() if not jobs))
        for name in base:
            if name not in self.taken:
                self._sort_in(name)

    # --- which node is next ---------------------------------------------------------------------

    def cheapest(self, left: int) -> NodeName:
        """Lowest priorities, lowest cost, then least damage, least lost work, name.

        left: nodes still wanted.
        """
        while not self._tiers.get(self._costs[0]):
            heapq.heappop(self._costs)
        cost = self._costs[0]
        tier, ties = self._tiers[cost], self._ties.setdefault(cost, [])
        for name in tier & self._unsure if len(tier) > 1 else tier:
            self._unsure.discard(name)
            self._weigh(name, left, ties)
        while True:
            damage, lost_gpu_s, name = heapq.heappop(ties)
            if name not in tier or self._damage[name] != (damage, lost_gpu_s):
                continue  # it was computed again since
            if self._excess_gpus(name, left) == damage:
                return name
            self._weigh(name, left, ties)

    def _weigh(self, name: NodeName, left: int, ties: list[tuple[int, float, NodeName]]) -> None:
        lost_gpu_s = sum(self._lost_gpu_s[job] for job in self._base[name] if job not in self.gone)
        self._damage[name] = (self._excess_gpus(name, left), lost_gpu_s)
        heapq.heappush(ties, (*self._damage[name], name))

    def _excess_gpus(self, name: NodeName, left: int) -> int:
        """Collateral damage of taking a node: GPUs vacated elsewhere beyond the nodes wanted.

        left: nodes still wanted, this one included.
        """
        freed: dict[NodeName, int] = {}
        victims = {job_id for job_id in self._base[name] if job_id not in self.gone}
        for job_id in victims:
            for host, gpus in self._occupancy.hosts(job_id).items():
                if host != name and host not in self.taken:
                    freed[host] = freed.get(host, 0) + gpus
        useful = sorted(
            (
                gpus
                for host, gpus in freed.items()
                if host in self._base
                and all(job in victims or job in self.gone for job in self._base[host])
            ),
            reverse=True,
        )
        return sum(freed.values()) - sum(useful[: max(0, left - 1)])

    def _sort_in(self, name: NodeName) -> None:
        """Put a node where its present cost belongs; costs within 1e-9 are one tier."""
        stop = [job for job in self._base[name] if job not in self.gone]
        price = round(sum(self._price[job] / self._spread[job] for job in stop), 9)
        cost = (self._occupancy.ranks(stop), price)
        old = self._tier_of.get(name)
        if old == cost:
            return
        if old is not None:
            self._tiers[old].discard(name)
        if not self._tiers.get(cost):
            heapq.heappush(self._costs, cost)
        self._tiers.setdefault(cost, set()).add(name)
        self._tier_of[name] = cost
        self._unsure.add(name)

    # --- what taking it changes -----------------------------------------------------------------

    def take(self, name: NodeName) -> None:
        """The jobs on a node stop, everywhere."""
        victims = [job_id for job_id in self._base[name] if job_id not in self.gone]
        self.gone.update(victims)
        touched = {host for job_id in victims for host in self._occupancy.hosts(job_id)}
        own = sorted(host for host in touched if host in self._base and host not in self.taken)
        emptied = [host for host in own if self.gone.issuperset(self._base[host])]
        self._empty(emptied)
        for host in own:
            if host not in self.taken:
                self._sort_in(host)

    def _empty(self, names: Sequence[NodeName]) -> None:
        """Nodes go home: their flexible workers are released, so those jobs are spread less."""
        self.taken.update(names)
        narrower: set[JobId] = set()
        for name in names:
            tier = self._tier_of.pop(name, None)
            if tier is not None:
                self._tiers[tier].discard(name)
            for job_id in self._occupancy.jobs_on(name):
                if job_id in self._base_hosts and job_id not in self.gone:
                    self._spread[job_id] -= 1
                    narrower.add(job_id)
        for job_id in sorted(narrower):
            for name in self._base_hosts[job_id]:
                if name in self._tier_of:
                    self._sort_in(name)
