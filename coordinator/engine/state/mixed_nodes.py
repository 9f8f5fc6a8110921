"""Nodes with GPUs of several types, as policies see them: one part for each type. Pure.

A policy knows nodes of one type. A training node of several types is therefore several nodes to it,
each with the GPUs of one type and its share of CPUs and memory. The part of the most frequent type
has the node's own name. Every other part has a name that no node can have: `NODE/TYPE`. Of a
serving node only the first part is ever lent: its server runs on all of them.
"""

from __future__ import annotations

from collections.abc import Collection

from common.model import GpuUuid, NodeName, Pool
from coordinator.engine.state.tables import ClusterState, NodeEntry

SEPARATOR = "/"


def kinds(node: NodeEntry) -> tuple[str, ...]:
    """The GPU types of a node that workers may have, that of its own name first."""
    found = node.gpu_types
    return found if node.home_pool == Pool.TRAINING else found[:1]


def name_of(node: NodeEntry, kind: str) -> NodeName:
    """Name of the part of a node with the GPUs of one type."""
    return node.name if kind == node.gpu_type else NodeName(f"{node.name}{SEPARATOR}{kind}")


def names(node: NodeEntry) -> tuple[NodeName, ...]:
    """Names of all its parts."""
    return tuple(name_of(node, kind) for kind in kinds(node))


def found(state: ClusterState, name: NodeName) -> tuple[NodeEntry, str] | None:
    """The node and the GPU type that a policy means by a name; None: there is no such part."""
    own, _, kind = name.partition(SEPARATOR)
    node = state.nodes.get(NodeName(own))
    if node is None or (kind and kind not in kinds(node)):
        return None
    return node, kind or node.gpu_type


def there(state: ClusterState, name: NodeName) -> tuple[NodeEntry, str]:
    """The same, where the caller has looked that there is one."""
    part = found(state, name)
    assert part is not None, f"no part of a node is called {name}"
    return part


def kind_of(node: NodeEntry, uuids: Collection[GpuUuid]) -> str:
    """The GPU type of a worker with these GPUs of a node."""
    types = node.gpu_types
    if len(types) == 1:
        return types[0]
    return next((slot.gpu_type for slot in node.gpus if slot.uuid in uuids), types[0])
