"""The nodes of a service: kept up change by change they are what a look through all nodes finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import NodeName, NodeRole, ServiceName
from coordinator.policies.contract.index import ServiceSorter, draining, index_of, nodes_of
from coordinator.policies.contract.snapshot import ClusterSnapshot, NodeView, ServiceNodes
from tests.builders import make_node_view, make_snapshot
from tests.strategies import snapshots

SERVICES = (ServiceName("chat"), ServiceName("search"))
NAMES = tuple(NodeName(f"n{number}") for number in range(4))


def view(
    name: NodeName,
    service: ServiceName | None,
    role: NodeRole,
    flags: tuple[bool, bool, bool, bool],
    sick_and_used: tuple[int, int],
    since_s: float | None,
    gpu_type: str,
) -> NodeView:
    """A node; flags: cordoned, about to close, told to come home, closed to all that is new."""
    is_cordoned, is_closing, is_reclaimed, takes_nothing = flags
    return replace(
        make_node_view(name, role=role),
        service=service,
        is_drained_by_operator=is_cordoned,
        is_closing=is_closing,
        is_reclaimed=is_reclaimed,
        takes_nothing=takes_nothing,
        sick_gpus=sick_and_used[0],
        trespassed_gpus=sick_and_used[1],
        serving_since_s=since_s,
        gpu_type=gpu_type,
    )


VIEWS = st.builds(
    view,
    st.sampled_from(NAMES),
    st.sampled_from((None, *SERVICES)),
    st.sampled_from(NodeRole),
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(((0, 0), (0, 0), (1, 0), (0, 1))),
    st.sampled_from((None, 1.0, 2.0)),
    st.sampled_from(("T4", "A10")),
)


def looked_up(nodes: list[NodeView], service: ServiceName) -> ServiceNodes:
    """What a service has, straight from the meaning of each word."""
    own = [node for node in nodes if node.service == service]
    usable = [node for node in own if not (node.is_drained_by_operator or node.is_closing)]
    serve = [node for node in usable if node.role == NodeRole.SERVING]
    ready = [node for node in serve if node.serving_since_s is not None]
    homing = (NodeRole.VACATING, NodeRole.WARMING)
    told = [
        node for node in ready if not (node.takes_nothing or node.sick_gpus or node.trespassed_gpus)
    ]
    return ServiceNodes(
        count=len(own),
        ready=tuple(ready),
        coming=tuple(
            node
            for node in usable
            if node.role in homing or (node.role == NodeRole.ON_LOAN and node.is_reclaimed)
        ),
        draining=tuple(node for node in usable if node.role == NodeRole.DRAINING),
        longest_serving=tuple(sorted(told, key=lambda node: (node.serving_since_s, node.name))),
        gpu_types=frozenset(node.gpu_type for node in ready),
    )


@given(st.lists(VIEWS, max_size=12), st.data())
def test_nodes_that_change_one_by_one_are_those_of_now(
    views: list[NodeView], data: st.DataObject
) -> None:
    """Roles, cordons, services and GPU types change in any order, and looks come at any time."""
    sorter, now = ServiceSorter(), dict[NodeName, NodeView]()
    for view in views:
        sorter.put(view)
        now[view.name] = view
        if data.draw(st.booleans()):
            sorter.parts()  # what is kept from here on must not outlive the next change
    nodes = [now[name] for name in sorted(now)]
    parts = sorter.parts()
    for service in SERVICES:
        assert parts.get(service, ServiceNodes()) == looked_up(nodes, service)


@given(snapshots())
def test_a_snapshot_without_an_index_has_the_same_nodes(snapshot: ClusterSnapshot) -> None:
    """Whoever asks gets one answer, whether or not somebody kept the nodes sorted."""
    indexed = replace(snapshot, index=index_of(snapshot.nodes, snapshot.jobs))
    for service in snapshot.services:
        assert nodes_of(snapshot, service.name) == nodes_of(indexed, service.name)
    assert draining(snapshot) == draining(indexed)


def test_draining_nodes_of_all_services_come_in_order_of_name() -> None:
    """Two services lend at once: the plan sees the nodes as the snapshot has them."""
    nodes = [
        replace(make_node_view(name, role=NodeRole.DRAINING), service=service)
        for name, service in zip(NAMES, (*SERVICES, *SERVICES), strict=True)
    ]
    snapshot = make_snapshot(nodes=nodes)
    indexed = replace(snapshot, index=index_of(snapshot.nodes, snapshot.jobs))
    assert [node.name for node in draining(indexed)] == list(NAMES)


def test_a_service_that_lost_its_last_node_is_as_if_it_never_had_one() -> None:
    """What is kept up change by change is what a look through all nodes finds, names included."""
    sorter = ServiceSorter()
    view = replace(make_node_view("n0", role=NodeRole.SERVING), service=SERVICES[0])
    for now in (view, replace(view, service=None)):
        sorter.put(now)
        assert sorter.parts() == index_of([now], []).services
    assert sorter.parts() == {}
