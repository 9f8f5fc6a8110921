"""Locality levels of a gang: few nodes in one rack, one rack, anywhere.

The levels of the Philly study (ATC'19, section 2.3): as few nodes as possible within one rack (RDMA
domain), any nodes within one rack, any nodes. Racks with the most free GPUs come first, and in a
rack the nodes with the most; a job of one GPU goes where the fewest are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from common.model import NodeName
from coordinator.policies.contract.decisions import Placement
from coordinator.policies.contract.free_gpus import FreeGpus, fill, nodes_needed

FEWEST_NODES, ONE_RACK, ANYWHERE = 0, 1, 2
"""Levels, from the strictest to the loosest."""

LEVELS = ("fewest nodes of one rack", "one rack", "anywhere")
"""The same in words."""


class Gang(Struct, frozen=True):
    """The gang to place: workers with a number of GPUs each, on nodes of a type."""

    workers: int
    gpus_per_worker: int
    gpu_type: str


def whole(floor: FreeGpus, gang: Gang, level: int) -> tuple[Placement, ...]:
    """Free places for a whole gang at a level; none where it does not fit."""
    rooms = floor.rooms(gang.gpu_type, gang.gpus_per_worker)
    if gang.workers * gang.gpus_per_worker == 1:
        return fill(rooms, sorted(rooms, key=lambda name: (floor.free[name], name)), 1)
    for nodes in _candidates(floor, gang, level, {}):
        order = [name for name in nodes if name in rooms]
        if level == FEWEST_NODES:
            order = order[: _fewest(floor, gang, nodes)]
        if sum(rooms[name] for name in order) >= gang.workers:
            return fill(rooms, order, gang.workers)
    return ()


def part(
    floor: FreeGpus, gang: Gang, level: int, held: Mapping[NodeName, int]
) -> dict[NodeName, int]:
    """Free GPUs to hold for a gang that does not fit, where it may run later.

    held: its present GPUs, which count as free: it stays with those nodes.
    """
    for nodes in _candidates(floor, gang, level, held):
        left = gang.workers
        taken: dict[NodeName, int] = {}
        for name in _together(floor, gang, nodes) if level == FEWEST_NODES else nodes:
            here = min(left, _places(floor, gang, (name,)))
            gpus = min(floor.free[name], here * gang.gpus_per_worker)
            if gpus > 0:
                taken[name] = gpus
            left -= here
        if taken:
            return taken
    return {}


def _candidates(
    floor: FreeGpus, gang: Gang, level: int, held: Mapping[NodeName, int]
) -> list[list[NodeName]]:
    """Groups of nodes of which one is to take the gang, best first, and so within each."""
    racks: dict[str, list[NodeName]] = {}
    for name, node in floor.nodes.items():
        if node.gpu_type == gang.gpu_type and name not in floor.avoided:
            racks.setdefault(node.rack, []).append(name)
    for names in racks.values():
        names.sort(key=lambda name: (-held.get(name, 0), -floor.free[name], name))

    def first(rack: str) -> tuple[int, int, str]:
        names = racks[rack]
        mine = sum(held.get(name, 0) for name in names)
        return -mine, -sum(floor.free[name] for name in names), rack

    groups = [racks[rack] for rack in sorted(racks, key=first)]
    if level != ANYWHERE:
        large_enough = [names for names in groups if _places(floor, gang, names) >= gang.workers]
        if large_enough:
            return large_enough
    return [[name for names in groups for name in names]]  # no rack could ever take it


def _places(floor: FreeGpus, gang: Gang, names: Sequence[NodeName]) -> int:
    nodes = (floor.nodes[name] for name in names)
    return sum((node.gpus - node.barred_gpus) // gang.gpus_per_worker for node in nodes)


def _together(floor: FreeGpus, gang: Gang, names: Sequence[NodeName]) -> list[NodeName]:
    """The first of these nodes that would hold the gang if empty, on as few as possible.

    Where nodes differ not every one will do: GPUs held on a node that is too small for its part are
    kept from others without use.
    """
    most, left = _fewest(floor, gang, names), gang.workers
    places = {name: _places(floor, gang, (name,)) for name in names}
    largest = sorted(places.values(), reverse=True)
    found: list[NodeName] = []
    for name in names:
        if len(found) == most:
            break
        rest = most - len(found) - 1
        if places[name] >= left - sum(largest[:rest]):
            found.append(name)
            left -= places[name]
            largest.remove(places[name])
    return found


def _fewest(floor: FreeGpus, gang: Gang, names: Sequence[NodeName]) -> int:
    """How many of these nodes the gang would need if they were empty."""
    return nodes_needed((_places(floor, gang, (name,)) for name in names), gang.workers)
