"""A placement rule: a gang goes on one node where it fits, else over the emptiest nodes."""

from __future__ import annotations

from common.model import NodeName
from coordinator.policies.contract.decisions import Placement
from coordinator.policies.contract.free_gpus import FreeGpus, fill
from coordinator.policies.contract.snapshot import JobView


def one_node_or_spread(
    floor: FreeGpus, job: JobView, gpu_type: str, count: int
) -> tuple[Placement, ...]:
    """The fullest node where the gang fits whole; else the emptiest nodes first."""
    rooms = floor.rooms(gpu_type, job.gpus_per_worker)
    if any(room >= count for room in rooms.values()):
        whole = {name: room for name, room in rooms.items() if room >= count}
        return fill(whole, sorted(whole, key=lambda name: (floor.free[name], name)), count)
    order: list[NodeName] = sorted(rooms, key=lambda name: (-floor.free[name], name))
    return fill(rooms, order, count)
