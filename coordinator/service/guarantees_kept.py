"""What a cell promises its tenants, against the nodes that it knows. Pure; knows no policy."""

from __future__ import annotations

from common.model import Pool
from coordinator.engine.state.settings import TenantSettings, overpromised
from coordinator.engine.state.tables import ClusterState


def unkept(state: ClusterState, tenants: tuple[TenantSettings, ...]) -> str:
    """That not all guarantees can be kept, in one line; empty where they can, and in a new cell,
    where no node has been heard yet."""
    nodes = state.nodes.values()
    gpus = sum(len(node.gpus) for node in nodes if node.home_pool == Pool.TRAINING)
    return overpromised(tenants, gpus) if gpus else ""
