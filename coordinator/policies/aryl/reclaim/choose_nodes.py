"""Choose the lent nodes to reclaim, at the least preemption cost.

Order (Lyra, EuroSys'23, sections 4 and 5.3): nodes whose loan is not complete yet, idle nodes,
nodes with flexible workers only, nodes whose jobs end by themselves in time, and then those whose
jobs must stop. The jobs to stop come from the paper's greedy, or from a search near the optimum
that starts there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from common.model import JobId, NodeName, NodeRole
from coordinator.policies.aryl.reclaim.greedy import greedy_victims
from coordinator.policies.aryl.reclaim.occupancy import Occupancy
from coordinator.policies.aryl.reclaim.preemption_cost import CostModel, Costs, prices
from coordinator.policies.aryl.reclaim.problem import by_priority, lexical_weights, merge
from coordinator.policies.aryl.reclaim.search import solve
from coordinator.policies.contract.snapshot import NodeView


class Choice(Struct, frozen=True, kw_only=True):
    """Nodes to take back, in order, and the jobs that must stop for it.

    awaited: jobs on these nodes that end by themselves in time, and how long that may take.
    note: how good the choice is, as far as it is proven.
    """

    nodes: tuple[NodeName, ...]
    victims: tuple[JobId, ...]
    awaited: tuple[tuple[JobId, float], ...] = ()
    note: str = ""


Chooser = Callable[[Occupancy, Sequence[NodeView], int], Choice]
"""Occupancy, the lent nodes, the wanted number; the occupancy is not changed."""


class Reclaiming(Struct, frozen=True, kw_only=True):
    """How victims are chosen.

    is_searching: look for cheaper victims than the paper's greedy finds.
    slack_s: how long a node may wait for its jobs to end by themselves; 0 waits for none.
    """

    costs: Costs
    model: CostModel = CostModel.JOBS
    is_searching: bool = False
    slack_s: float = 0.0


def choose_nodes(
    occupancy: Occupancy,
    candidates: Sequence[NodeView],
    wanted_count: int,
    how: Reclaiming | None = None,
) -> Choice:
    """The cheapest `wanted_count` nodes, fewer if there are fewer; `occupancy` is not changed.

    Priority comes before any price. The cheapest choice stops the fewest jobs of the highest
    priority, then of the next one; among equals the lowest price counts. Every victim is needed:
    without any one of them too few nodes would be free. The order of `candidates` does not matter.

    how: None is the paper's way.
    """
    wanted_count = min(wanted_count, len(candidates))
    awaited = {} if how is None else _ending(occupancy, candidates, how)
    base = {
        node.name: tuple(job for job in occupancy.base_jobs(node.name) if job not in awaited)
        for node in sorted(candidates, key=lambda node: node.name)
    }
    price = None
    if how is not None and how.model != CostModel.JOBS:
        price = prices(how.costs, how.model, {job for jobs in base.values() for job in jobs})
    victims = greedy_victims(occupancy, base, wanted_count, price)
    victims = _without_needless(occupancy, base, victims, wanted_count, price)
    note = ""
    if how is not None and how.is_searching and victims:
        victims, note = _search(occupancy, base, victims, wanted_count, how)
    free = sorted(
        (node for node in candidates if victims.issuperset(base[node.name])),
        key=lambda node: _gentleness(occupancy, node, awaited),
    )
    taken = tuple(node.name for node in free[:wanted_count])
    here = {job for name in taken for job in occupancy.base_jobs(name)}
    return Choice(
        nodes=taken,
        victims=tuple(sorted(victims)),
        awaited=tuple((job, awaited[job]) for job in sorted(here & awaited.keys())),
        note=note,
    )


def _ending(
    occupancy: Occupancy, candidates: Sequence[NodeView], how: Reclaiming
) -> dict[JobId, float]:
    """Jobs on the candidates that end by themselves within the slack, and when at the latest."""
    if how.slack_s <= 0:
        return {}
    jobs = {job for node in candidates for job in occupancy.base_jobs(node.name)}
    latest_s = {job: how.costs.ends_within_s(job) for job in sorted(jobs)}
    return {job: at_s for job, at_s in latest_s.items() if at_s is not None and at_s <= how.slack_s}


def _gentleness(
    occupancy: Occupancy, node: NodeView, awaited: Mapping[JobId, float]
) -> tuple[bool, bool, float, int, str]:
    """Not yet lent, then without base workers, shortest wait, fewest flexible GPUs to release."""
    flexible_gpus = sum(worker.gpus for worker in occupancy.flexible_workers(node.name))
    base = occupancy.base_jobs(node.name)
    wait_s = max((awaited.get(job, 0.0) for job in base), default=0.0)
    return (node.role != NodeRole.DRAINING, bool(base), wait_s, flexible_gpus, node.name)


def _without_needless(
    occupancy: Occupancy,
    base: Mapping[NodeName, tuple[JobId, ...]],
    victims: set[JobId],
    wanted_count: int,
    price: Mapping[JobId, float] | None,
) -> set[JobId]:
    """Spare victims that were not needed, of the highest priority the one that would lose most
    first.
    """
    lacking = {name: sum(job not in victims for job in jobs) for name, jobs in base.items()}
    hosts: dict[JobId, list[NodeName]] = {}
    for name, jobs in base.items():
        for job in jobs:
            hosts.setdefault(job, []).append(name)
    surplus = sum(not count for count in lacking.values()) - wanted_count
    needed = set(victims)

    def dearness(job: JobId) -> tuple[int, float, JobId]:
        lost = occupancy.lost_gpu_s(job) if price is None else price[job]
        return (-occupancy.priority(job), -lost, job)

    for job in sorted(victims, key=dearness):
        loss = sum(not lacking[name] for name in hosts[job])
        if loss <= surplus:
            surplus -= loss
            needed.remove(job)
            for name in hosts[job]:
                lacking[name] += 1
    return needed


def _search(
    occupancy: Occupancy,
    base: Mapping[NodeName, tuple[JobId, ...]],
    victims: set[JobId],
    wanted_count: int,
    how: Reclaiming,
) -> tuple[set[JobId], str]:
    """Cheaper victims if there are any, with the proven bound."""
    jobs = sorted({job for held in base.values() for job in held})
    number = {job: index for index, job in enumerate(jobs)}
    price = prices(how.costs, how.model, jobs)
    lost_gpu_s = [how.costs.expected_lost_gpu_s(job) for job in jobs]
    second = lost_gpu_s if how.model == CostModel.JOBS else [1.0] * len(jobs)
    whole = [round(price[job]) for job in jobs]
    first = by_priority(whole, [occupancy.priority(job) for job in jobs])
    is_ranked = first != whole
    weights, unit = (
        lexical_weights(first, second, largest=max(first))
        if is_ranked
        else lexical_weights(first, second)
    )
    nodes = [tuple(number[job] for job in held) for held in base.values() if held]
    merged = merge(nodes, weights, wanted_count - (len(base) - len(nodes)))
    start = merged.gather(number[job] for job in victims)
    solution = solve(merged.problem, start, unit=unit)
    least = -(-(solution.bound - (unit >> 6)) // unit)
    found = solution.weight // unit
    counted = "jobs" if how.model == CostModel.JOBS else "GPU-s"
    chosen = {jobs[index] for index in merged.spread(solution.victims)}
    if is_ranked:
        if occupancy.ranks(victims) < occupancy.ranks(chosen):
            chosen = victims  # they differ in priorities that counted as one
        proof = "none can be cheaper" if found <= least else "others may be cheaper"
        cost = sum(round(price[job]) for job in chosen)
        said = f"{len(victims)} jobs by the paper's greedy, {cost} {counted} chosen"
        return chosen, f"{said}, the lowest priorities first: {proof}"
    proof = "none can be cheaper" if found <= least else f"no choice has fewer than {least}"
    note = f"{len(victims)} jobs by the paper's greedy, {found} {counted} chosen: {proof}"
    return chosen, note
