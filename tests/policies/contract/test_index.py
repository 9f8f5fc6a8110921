"""The index of a snapshot, and the nodes of a service in it: kept up change by change, they equal
what a look through all nodes finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import NodeName, NodeRole, ServiceName
from coordinator.policies.aryl.lending.covering import Unmet
from coordinator.policies.aryl.lending.demand import Demand
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.decisions import Placement
from coordinator.policies.contract.index import (
    JobSorter,
    NodeSorter,
    ServiceSorter,
    draining,
    index_of,
    nodes_of,
)
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    Index,
    JobView,
    NodeView,
    ServiceNodes,
)
from tests.harness.builders import make_cluster, make_node_view, make_snapshot
from tests.strategies import snapshots


class Kept:
    """Both sorters, as whoever makes snapshots keeps them."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.nodes = {node.name: node for node in snapshot.nodes}
        self.jobs = {job.job_id: job for job in snapshot.jobs}
        self._node_sorter, self._job_sorter = NodeSorter(), JobSorter()
        for node in snapshot.nodes:
            self.put_node(node)
        for job in snapshot.jobs:
            self.put_job(job)

    def put_node(self, node: NodeView) -> None:
        """A node changes."""
        self.nodes[node.name] = node
        self._node_sorter.put(node)

    def remove_node(self, name: NodeName) -> None:
        """A node is not there any more."""
        self.nodes.pop(name, None)
        self._node_sorter.remove(name)

    def put_job(self, job: JobView) -> None:
        """A job changes."""
        self.jobs[job.job_id] = job
        self._job_sorter.remove(job.job_id)
        self._job_sorter.put(job)

    def index(self) -> Index:
        """As it is kept."""
        return self._node_sorter.index(self._job_sorter)

    def fresh(self) -> Index:
        """The one from nothing."""
        nodes = [self.nodes[name] for name in sorted(self.nodes)]
        return index_of(nodes, [self.jobs[job_id] for job_id in sorted(self.jobs)])


def test_an_index_is_made_once_until_a_node_or_a_job_changes() -> None:
    """Who looks again in one instant gets the same one, and nobody one of before a change."""
    nodes, jobs = make_cluster({"n1": {"a": 4}, "n2": {"b": 8}, "n3": {}}, role=NodeRole.TRAINING)
    kept = Kept(make_snapshot(nodes=nodes, jobs=jobs))
    first = kept.index()
    assert kept.index() is first
    kept.put_node(replace(kept.nodes[NodeName("n2")], free_gpus=0, is_schedulable=False))
    assert kept.index() == kept.fresh() != first
    second = kept.index()
    kept.remove_node(NodeName("n3"))
    assert kept.index() == kept.fresh() != second
    third = kept.index()
    job = next(iter(kept.jobs.values()))
    kept.put_job(replace(job, is_resizable=not job.is_resizable))
    assert kept.index() == kept.fresh() != third


@given(snapshots(), st.data())
def test_an_index_that_is_kept_up_is_one_from_nothing(
    snapshot: ClusterSnapshot, data: st.DataObject
) -> None:
    """Jobs begin and cease to be resizable, nodes to take workers, and both come late."""
    kept = Kept(replace(snapshot, nodes=snapshot.nodes[1:]))
    assert kept.index() == kept.fresh()
    for _ in range(3):
        if snapshot.jobs:
            job = kept.jobs[data.draw(st.sampled_from(snapshot.jobs)).job_id]
            kept.put_job(replace(job, is_resizable=not job.is_resizable))
        node = data.draw(st.sampled_from(snapshot.nodes))
        node = kept.nodes.get(node.name, node)
        kept.put_node(replace(node, is_schedulable=not node.is_schedulable))
        if data.draw(st.booleans()):
            assert kept.index() == kept.fresh()
    assert kept.index() == kept.fresh()


@given(snapshots(), st.data())
def test_nodes_that_leave_are_as_if_they_had_never_been_there(
    snapshot: ClusterSnapshot, data: st.DataObject
) -> None:
    """The places of the others close up; a node that was never there is no matter."""
    kept = Kept(snapshot)
    kept.index()
    gone: list[NodeView] = []
    for node in data.draw(st.lists(st.sampled_from(snapshot.nodes), max_size=4)):
        kept.remove_node(node.name)
        gone.append(node)
        if data.draw(st.booleans()):
            assert kept.index() == kept.fresh()
    assert kept.index() == kept.fresh()
    for node in gone:
        kept.put_node(node)
    assert kept.index() == kept.fresh()


@given(snapshots(), st.booleans())
def test_who_could_use_a_loan_is_known_from_the_index_too(
    snapshot: ClusterSnapshot, is_scaling: bool
) -> None:
    """With an index only jobs that wait or can be resized are looked at; it is the same answer."""
    indexed = replace(snapshot, index=index_of(snapshot.nodes, snapshot.jobs))
    wanting = [
        Demand(seen, _nobody_asks, is_scaling=is_scaling).wanting for seen in (snapshot, indexed)
    ]
    assert wanting[0] == wanting[1]


def _nobody_asks() -> Unmet:
    raise AssertionError("no node is on offer")


def test_room_behind_flexible_workers_follows_who_holds_it() -> None:
    """A new worker in the place of one that was released makes no room for anybody after it."""
    nodes, jobs = make_cluster({"n1": {"a": 6}}, flexible={"n1": {"a": 2}}, role=NodeRole.TRAINING)
    jobs = [replace(job, gpu_type=nodes[0].gpu_type, is_resizable=True) for job in jobs]
    room = PlacementState(make_snapshot(nodes=nodes, jobs=jobs))
    name, wants = nodes[0].name, replace(jobs[0], gpus_per_worker=2)
    assert room.has_places(wants, nodes[0].gpu_type, 1)
    room.release(room.flexible[name][0])
    room.hold([Placement(node=name, worker_count=1, is_flexible=True)], 2)
    room.restore(room.save())  # the node has the counts again that it began with
    assert not room.has_places(wants, nodes[0].gpu_type, 1)


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
