"""Placement levels of one job of a bid: its own nodes, one node, one rack, anywhere. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nsmallest

from common.model import NodeName
from coordinator.policies.contract.snapshot import JobView, NodeView

MOST_PLACES = 3
"""Sets of nodes on which a table offers one step."""


def orders(
    rooms: Mapping[NodeName, int],
    count: int,
    nodes: Mapping[NodeName, NodeView],
    near: frozenset[NodeName],
    *,
    is_far_as_fast: bool = False,
) -> Iterator[list[NodeName]]:
    """Orders of nodes to fill with a number of workers, the best one first.

    rooms: workers that each node has room for. near: nodes where the job is already.
    is_far_as_fast: it loses nothing over several racks.
    """
    if near:
        racks = {nodes[name].rack for name in near if name in nodes}
        yield sorted(rooms, key=lambda n: (n not in near, nodes[n].rack not in racks, -rooms[n], n))
    whole = nsmallest(MOST_PLACES - 1, ((rooms[n], n) for n in rooms if rooms[n] >= count))
    # The next worse level stands beside the best, so that others can have the whole node.
    yield from ([name] for _, name in whole)
    yield from _spread(
        {n: rooms[n] for n in rooms if rooms[n] < count}, count, nodes, is_far_as_fast
    )


def _spread(
    rooms: Mapping[NodeName, int],
    count: int,
    nodes: Mapping[NodeName, NodeView],
    is_far_as_fast: bool,
) -> Iterator[list[NodeName]]:
    """Over several nodes: those of one rack where it has room, the fewest of it.

    Who loses nothing over several racks stands there beside the best, too: the racks with too
    little room for it first, so that others can have a whole one.
    """
    by_rack: dict[str, list[NodeName]] = {}
    for name in sorted(rooms, key=lambda name: (-rooms[name], name)):
        by_rack.setdefault(nodes[name].rack, []).append(name)
    room = {rack: sum(rooms[name] for name in names) for rack, names in by_rack.items()}
    racks = sorted(by_rack, key=lambda rack: (room[rack], rack))
    fitting = [rack for rack in racks if room[rack] >= count]
    small = [name for rack in reversed(racks) if rack not in fitting for name in by_rack[rack]]
    yield from (by_rack[rack] for rack in fitting[:1])
    if not fitting or (is_far_as_fast and small):
        yield small + [name for rack in fitting for name in by_rack[rack]]
    yield from (by_rack[rack] for rack in fitting[1:])


def has_room(
    job: JobView, free: Mapping[NodeName, int], nodes: Mapping[NodeName, NodeView]
) -> bool:
    """Whether a whole base gang could start on this many GPUs by node, of one type it accepts."""
    workers: dict[str, int] = {}
    for name, gpus in free.items():
        if name not in job.nodes.avoided:
            gpu_type = nodes[name].gpu_type
            workers[gpu_type] = workers.get(gpu_type, 0) + gpus // job.gpus_per_worker
    return any(
        job.accepts(gpu_type) and count >= job.workers_on(gpu_type).min
        for gpu_type, count in workers.items()
    )
