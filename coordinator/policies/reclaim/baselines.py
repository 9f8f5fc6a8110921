"""Reclaim rules that the paper compares with: at random, and fewest jobs first. Must not know why.

Both (Lyra, EuroSys'23, section 7.1) choose nodes one by one and look at no job twice, so that one
preemption empties two nodes only by luck: that is what the cost in `reclaiming` improves on. The
lowest priorities go first here as well, as operators mean them; the paper has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from common.model import NodeName
from coordinator.policies.reclaim.occupancy import Occupancy, Ranks
from coordinator.policies.reclaim.reclaiming import Choice, Chooser
from coordinator.policies.snapshot import NodeView


def choose_at_random(now_s: float) -> Chooser:
    """Nodes in an order that looks like chance and follows from the instant and their names."""

    def draw(name: NodeName) -> bytes:
        return sha256(f"{now_s!r} {name}".encode()).digest()

    def choose(occupancy: Occupancy, candidates: Sequence[NodeView], wanted: int) -> Choice:
        def key(name: NodeName) -> tuple[Ranks, bytes]:
            return _ranks(occupancy, name), draw(name)

        return _first(occupancy, sorted((node.name for node in candidates), key=key), wanted)

    return choose


def choose_fewest_jobs(
    occupancy: Occupancy, candidates: Sequence[NodeView], wanted_count: int
) -> Choice:
    """The nodes with the fewest jobs, wherever else these run ("SCF", smallest count first)."""
    names = sorted(
        (_ranks(occupancy, node.name), jobs_on(occupancy, node.name), node.name)
        for node in candidates
    )
    return _first(occupancy, [name for *_, name in names], wanted_count)


def _ranks(occupancy: Occupancy, name: NodeName) -> Ranks:
    return occupancy.ranks(occupancy.base_jobs(name))


def jobs_on(occupancy: Occupancy, name: NodeName) -> int:
    """Jobs with any worker on a node, base or flexible."""
    flexible = {worker.job_id for worker in occupancy.flexible_workers(name)}
    return len(flexible.union(occupancy.base_jobs(name)))


def _first(occupancy: Occupancy, names: Sequence[NodeName], wanted_count: int) -> Choice:
    taken = names[:wanted_count]
    victims = {job_id for name in taken for job_id in occupancy.base_jobs(name)}
    return Choice(nodes=tuple(taken), victims=tuple(sorted(victims)))
