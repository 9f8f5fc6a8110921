"""At most one job over several nodes on each: where workers go, and who gives way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobState, NodeName, Preemptibility
from coordinator.policies.contract.decisions import Placement, Preempt, Resize
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.schedulers.pollux.placement import (
    ApartFloor,
    apart,
    keeping_away,
    parted,
)
from tests.draws import pick, whole, yes_or_no
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)


def job(
    name: str, *nodes: str, base: int | None = None, most: int | None = None, gpus: int = 1
) -> JobView:
    """It runs with a worker on each node named, the first ones its base gang, all where no base is
    told; with no nodes it waits."""
    least = base or max(1, len(nodes))
    placed = [
        make_worker_view(name, index, node, gpus=gpus, is_flexible=index >= least)
        for index, node in enumerate(nodes)
    ]
    return make_job_view(
        name,
        state=JobState.RUNNING if nodes else JobState.PENDING,
        workers=(least, most or max(least, len(nodes))),
        gpus_per_worker=gpus,
        placed=placed,
    )


def cell(*jobs: JobView, nodes: int = 3, gpus: int = 4) -> ClusterSnapshot:
    """Nodes n0, n1 and so on with these jobs."""
    names = [f"n{number}" for number in range(nodes)]
    workers = [worker for each in jobs for worker in each.placed]
    return make_snapshot(
        nodes=[
            make_node_view(
                name, gpus=gpus, workers=[worker for worker in workers if worker.node == name]
            )
            for name in names
        ],
        jobs=jobs,
    )


def placed(snapshot: ClusterSnapshot, name: str, count: int) -> dict[str, int]:
    """Where the rule puts so many workers more of a job, by node."""
    view = next(each for each in snapshot.jobs if each.job_id == name)
    found = apart(ApartFloor(snapshot), view, "H100", count)
    return {str(placement.node): placement.worker_count for placement in found}


def clashes(snapshot: ClusterSnapshot) -> list[str]:
    """Nodes with workers of two jobs over several nodes."""
    where: dict[str, set[str]] = {}
    for view in snapshot.jobs:
        for worker in view.placed:
            if not worker.is_leaving:
                where.setdefault(view.job_id, set()).add(worker.node)
    wide = [nodes for nodes in where.values() if len(nodes) > 1]
    return [node.name for node in snapshot.nodes if sum(node.name in nodes for nodes in wide) > 1]


# --- where workers go ---------------------------------------------------------------------------


def test_who_fits_a_node_stands_beside_a_job_over_several() -> None:
    """Three workers go to the fullest node that has room, whoever is there."""
    snapshot = cell(job("wide", "n0", "n1"), job("a", base=3))
    assert placed(snapshot, "a", 3) == {"n0": 3}


def test_who_needs_several_nodes_has_them_without_another_such_job() -> None:
    """Five workers get n2 and n3, though n0 and n1 have six GPUs."""
    snapshot = cell(job("wide", "n0", "n1"), job("a", base=5), nodes=4)
    assert placed(snapshot, "a", 5) == {"n2": 4, "n3": 1}


def test_who_finds_too_few_such_nodes_gets_the_most_that_there_is() -> None:
    """Of six workers four fit n2, the only one; two jobs never share n0."""
    snapshot = cell(job("wide", "n0", "n1"), job("a", base=6))
    assert placed(snapshot, "a", 6) == {"n2": 4}


def test_a_job_grows_on_its_own_node_before_it_spans_another() -> None:
    """Two more fit beside it; a third makes it a job over two nodes."""
    snapshot = cell(job("a", "n1", "n1", base=1, most=8))
    assert placed(snapshot, "a", 2) == {"n1": 2}
    assert placed(snapshot, "a", 3) == {"n1": 2, "n0": 1}


def test_a_job_beside_one_over_several_nodes_grows_on_its_node_alone() -> None:
    """It gets the two GPUs that are left there, and none of the free node."""
    snapshot = cell(job("wide", "n0", "n1"), job("a", "n0", base=1, most=8))
    assert placed(snapshot, "a", 6) == {"n0": 2}


def test_a_job_over_several_nodes_grows_where_no_other_is() -> None:
    """Its own nodes first, then n4; never n2 and n3."""
    snapshot = cell(job("wide", "n2", "n3"), job("a", "n0", "n1", base=2, most=20), nodes=5)
    assert placed(snapshot, "a", 8) == {"n0": 3, "n1": 3, "n4": 2}


def test_nodes_that_a_job_avoids_are_none_for_it() -> None:
    """As every placing rule has it."""
    snapshot = cell(job("a", base=5))
    floor = ApartFloor(snapshot)
    floor.avoided = (NodeName("n1"),)
    found = apart(floor, snapshot.jobs[0], "H100", 5)
    assert {each.node for each in found} == {"n0", "n2"}
    assert floor.avoided == ("n1",)


def test_workers_that_leave_a_node_make_room_for_another_job_there() -> None:
    """Once the wide job is on n0 alone, n1 takes part of a gang of seven."""
    wide = job("wide", "n0", "n1", base=1, most=2)
    snapshot = cell(wide, job("a", base=7))
    floor = ApartFloor(snapshot)
    assert placed(snapshot, "a", 7) == {"n2": 4}
    floor.vacate(wide.placed[1:])
    assert floor.crossing(NodeName("n0")) == []
    found = apart(floor, snapshot.jobs[1], "H100", 7)
    assert {each.node: each.worker_count for each in found} == {"n0": 3, "n1": 4}
    floor.stay(wide.placed[1:])
    assert floor.crossing(NodeName("n1")) == ["wide"]


def test_nobody_stays_where_one_came_that_it_would_clash_with() -> None:
    """The wide job's GPUs are untouched, but a gang over n0 and n2 stands beside it."""
    wide = job("wide", "n0", "n1")
    snapshot = cell(wide, job("a", base=7), job("b", base=3))
    floor = ApartFloor(snapshot)
    floor.vacate(wide.placed)
    floor.placing = snapshot.jobs[1].job_id
    beside = [
        Placement(node=NodeName("n0"), worker_count=3),
        Placement(node=NodeName("n2"), worker_count=4),
    ]
    floor.take(beside, 1)
    assert not floor.goes_on(wide.placed)
    floor.give(beside, 1)
    floor.take([Placement(node=NodeName("n0"), worker_count=3)], 1)
    assert floor.goes_on(wide.placed)
    assert (floor.free[NodeName("n0")], floor.crossing(NodeName("n0"))) == (0, ["wide"])


def test_who_keeps_a_job_away_is_named_and_nobody_where_it_is_room_that_lacks() -> None:
    """Six workers would fit beside the wide job; eleven fit nowhere."""
    snapshot = cell(job("wide", "n0", "n1"), job("a", base=6), job("b", base=11))
    floor, (_, six, eleven) = (
        ApartFloor(snapshot),
        sorted(snapshot.jobs, key=lambda each: (each.job_id != "wide", each.job_id)),
    )
    assert keeping_away(floor, six, "H100", 6) == ("wide",)
    assert keeping_away(floor, six, "H100", 4) == ()
    assert keeping_away(floor, eleven, "H100", 11) == ()


# --- who gives way ------------------------------------------------------------------------------


def test_nothing_changes_where_nobody_clashes() -> None:
    """The same snapshot goes on, not a copy."""
    snapshot = cell(job("wide", "n0", "n1"), job("a", "n0"), job("b", "n2"))
    found = parted(snapshot)
    assert (found.decisions, found.gone) == ((), ())
    assert found.left is snapshot


def test_flexible_workers_give_way_before_a_job_is_stopped() -> None:
    """On n1 stands the one flexible worker of b: it goes, and a loses nothing."""
    a, b = job("a", "n0", "n1"), job("b", "n2", "n1", base=1, most=4)
    found = parted(cell(a, b))
    [shrink] = found.decisions
    assert isinstance(shrink, Resize)
    assert (shrink.job_id, shrink.removed_workers, shrink.added) == ("b", (1,), ())
    assert "a has workers on n1 and on other nodes" in shrink.reason
    [_, left] = found.left.jobs
    assert [worker.is_leaving for worker in left.placed] == [False, True]
    assert (left.is_resizable, left.is_resting) == (False, True)


def test_of_two_gangs_that_clash_the_one_that_loses_least_is_stopped() -> None:
    """a would lose 20 GPU-seconds and b 10; both have hours behind them."""
    a, b = (
        job_with(
            job(name, *nodes),
            attained_gpu_s=7200.0,
            unsaved_gpu_s=lost_gpu_s,
            as_of_s=NOW_S,
        )
        for name, nodes, lost_gpu_s in (("a", ("n0", "n1"), 20.0), ("b", ("n1", "n2"), 10.0))
    )
    found = parted(cell(a, b))
    [stop] = found.decisions
    assert isinstance(stop, Preempt)
    assert (stop.job_id, stop.beneficiary, stop.predicted_cost_gpu_s) == ("b", "a", 10.0)
    assert [each.job_id for each in found.left.jobs] == ["a"]
    assert found.gone == b.placed


def test_who_may_not_be_stopped_or_would_lose_most_of_its_work_stays() -> None:
    """Then the other one goes, or nobody."""
    a, b = job("a", "n0", "n1"), job("b", "n1", "n2")
    rigid = replace(b, preemptibility=Preemptibility.SEMI)
    [stop] = parted(cell(a, rigid)).decisions
    assert isinstance(stop, Preempt)
    assert stop.job_id == "a"
    lossy = job_with(a, attained_gpu_s=7200.0, unsaved_gpu_s=7200.0, as_of_s=NOW_S)
    assert parted(cell(lossy, rigid)).decisions == ()
    resting = replace(a, is_resting=True)
    assert parted(cell(resting, rigid)).decisions == ()


def test_who_was_stopped_within_the_hour_is_not_stopped_for_a_clash() -> None:
    """The other one is, though it loses more; and an hour later the first one again."""
    a, b = job("a", "n0", "n1"), job("b", "n1", "n2")
    lately = job_with(a, preemptions_latest_at_s=NOW_S - 3599.0)
    both = (job_with(b, attained_gpu_s=7200.0, unsaved_gpu_s=10.0, as_of_s=NOW_S), b)
    for other in both:
        [stop] = parted(cell(lately, other)).decisions
        assert isinstance(stop, Preempt)
        assert stop.job_id == "b"
    [stop] = parted(cell(job_with(a, preemptions_latest_at_s=NOW_S - 3600.0), both[0])).decisions
    assert isinstance(stop, Preempt)
    assert stop.job_id == "a"
    assert parted(cell(lately, job_with(b, preemptions_latest_at_s=NOW_S))).decisions == ()


@st.composite
def cells(draw: st.DrawFn) -> ClusterSnapshot:
    """Jobs over any nodes, some of whose workers may go; none would lose anything."""
    nodes = draw(whole(2, 5))
    jobs: list[JobView] = []
    for number in range(draw(whole(1, 5))):
        names = [f"n{draw(whole(0, nodes - 1))}" for _ in range(draw(whole(1, 4)))]
        base = len(names) if draw(yes_or_no()) else 1
        jobs.append(job(f"j{number}", *names, base=base, most=6 if base == 1 else base))
    return cell(*jobs, nodes=nodes, gpus=draw(pick(20, 24)))


@given(cells())
def test_where_nobody_loses_anything_no_clash_is_left(snapshot: ClusterSnapshot) -> None:
    """Whoever gives way does so whole: what goes is what the decisions say, and no job goes twice;
    one that shrank and clashes on another node still does so in the next round."""
    while True:
        found = parted(snapshot)
        gone = [(worker.job_id, worker.worker_index) for worker in found.gone]
        assert len(gone) == len(set(gone))
        names = [each.job_id for each in found.decisions if isinstance(each, Preempt | Resize)]
        assert len(names) == len(set(names)) == len(found.decisions)
        if not found.decisions:
            break
        rested = [
            replace(
                each,
                placed=tuple(worker for worker in each.placed if not worker.is_leaving),
                is_resting=False,
                is_resizable=each.is_elastic,
            )
            for each in found.left.jobs
        ]
        snapshot = cell(*rested, nodes=len(snapshot.nodes), gpus=24)
    assert clashes(snapshot) == []
