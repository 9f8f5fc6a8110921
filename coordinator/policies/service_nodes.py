"""The nodes of each service, sorted for its balance while they change one by one. Knows no load.

Whoever makes snapshots often keeps a sorter up to date; `nodes_of` makes one for a snapshot that
has no index. Both answer the same.
"""

from __future__ import annotations

from operator import attrgetter

from msgspec import Struct, field

from common.model import NodeName, NodeRole, ServiceName
from coordinator.policies.snapshot import ClusterSnapshot, NodeView, ServiceNodes

_NONE = ServiceNodes()


class _Kept(Struct):
    """One service; `made` is None where its nodes have changed since."""

    count: int = 0
    ready: dict[NodeName, NodeView] = field(default_factory=dict[NodeName, NodeView])
    coming: dict[NodeName, NodeView] = field(default_factory=dict[NodeName, NodeView])
    draining: dict[NodeName, NodeView] = field(default_factory=dict[NodeName, NodeView])
    made: ServiceNodes | None = None


class ServiceSorter:
    """Keeps the nodes of services apart by what they do."""

    def __init__(self) -> None:
        self._seen: dict[NodeName, NodeView] = {}
        self._services: dict[ServiceName, _Kept] = {}

    def put(self, view: NodeView) -> None:
        """Add or replace a node; one without a service counts for none."""
        old = self._seen.pop(view.name, None)
        if old is not None and old.service is not None:
            self._services[old.service].count -= 1
            self._change(self._services[old.service], old, is_there=False)
        if view.service is not None:
            self._seen[view.name] = view
            kept = self._services.setdefault(view.service, _Kept())
            kept.count += 1
            self._change(kept, view, is_there=True)
        if old is not None and old.service is not None and not self._services[old.service].count:
            del self._services[old.service]  # as if it had never had a node

    def remove(self, name: NodeName) -> None:
        """Forget a node."""
        old = self._seen.pop(name, None)
        if old is None or old.service is None:
            return
        kept = self._services[old.service]
        kept.count -= 1
        self._change(kept, old, is_there=False)
        if not kept.count:
            del self._services[old.service]

    def _change(self, kept: _Kept, view: NodeView, *, is_there: bool) -> None:
        if view.is_drained_by_operator:
            into = None
        elif view.role == NodeRole.SERVING:
            # Where the server is down the role alone serves nobody: another node is wanted for it.
            into = kept.ready if view.serving_since_s is not None else None
        elif view.role == NodeRole.DRAINING:
            into = kept.draining
        else:
            into = kept.coming if _is_coming(view) else None
        if into is not None:
            if is_there:
                into[view.name] = view
            else:
                del into[view.name]
            kept.made = None

    def parts(self) -> dict[ServiceName, ServiceNodes]:
        """The nodes of each service as they are now."""
        found: dict[ServiceName, ServiceNodes] = {}
        for name, kept in self._services.items():
            if kept.made is None or kept.made.count != kept.count:
                kept.made = _sorted(kept)
            found[name] = kept.made
        return found


def _is_coming(node: NodeView) -> bool:
    return node.role in (NodeRole.VACATING, NodeRole.WARMING) or (
        node.role == NodeRole.ON_LOAN and node.is_reclaimed
    )


def _sorted(kept: _Kept) -> ServiceNodes:
    ready = tuple([kept.ready[name] for name in sorted(kept.ready)])
    since = [
        (node.serving_since_s, number)
        for number, node in enumerate(ready)
        if node.serving_since_s is not None
        and not (
            node.takes_nothing or node.sick_gpus or node.trespassed_gpus or node.is_load_unknown
        )
    ]
    since.sort()
    return ServiceNodes(
        count=kept.count,
        ready=ready,
        coming=tuple([kept.coming[name] for name in sorted(kept.coming)]),
        draining=tuple([kept.draining[name] for name in sorted(kept.draining)]),
        longest_serving=tuple([ready[number] for _, number in since]),
        gpu_types=frozenset([node.gpu_type for node in ready]),
    )


def nodes_of(snapshot: ClusterSnapshot, service: ServiceName) -> ServiceNodes:
    """The nodes of one service; none where it has none."""
    if snapshot.index is not None:
        return snapshot.index.services.get(service, _NONE)
    sorter = ServiceSorter()
    for node in snapshot.nodes:
        if node.service == service:
            sorter.put(node)
    return sorter.parts().get(service, _NONE)


def draining(snapshot: ClusterSnapshot) -> list[NodeView]:
    """Nodes of any service that leave it for training now, in order of name."""
    if snapshot.index is None:
        services = {node.service: None for node in snapshot.nodes if node.service is not None}
        found = [nodes_of(snapshot, service) for service in services]
    else:
        found = list(snapshot.index.services.values())
    return sorted((node for each in found for node in each.draining), key=attrgetter("name"))
