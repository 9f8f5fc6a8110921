"""Gandiva's moves (OSDI'18, 4.2): which jobs move to better places, which node is emptied, and
where its jobs go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import pytest
from msgspec import structs
from msgspec.structs import replace

from common.model import GpuRequest, GpuUuid, JobState, NodeName, Preemptibility, WorkerRange
from coordinator.policies.contract.decisions import Migrate
from coordinator.policies.contract.snapshot import JobView, NodeView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.gandiva.board import Board
from coordinator.policies.schedulers.gandiva.migration import Moves
from coordinator.policies.schedulers.gandiva.policy import Memory
from coordinator.policies.schedulers.gandiva.time_slices import tick
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.sharing_cell import Cell
from tests.tables import each_row

# --- moves ------------------------------------------------------------------------------------


def spread(*, free_on_b: int, free_on_c: int = 0, began_s: float = 0.0) -> Board:
    """A gang of two GPUs on nodes a and b, and so many GPUs free on b and c."""
    mine = [make_worker_view("spread", number, node) for number, node in enumerate("ab")]
    mine = [structs.replace(each, gpu_uuids=(GpuUuid(f"{each.node}-0"),)) for each in mine]
    other = make_worker_view("other", 0, "b", gpus=3 - free_on_b)
    job = make_job_view("spread", state=JobState.RUNNING, workers=(2, 2), placed=mine)
    return Board(
        make_snapshot(
            nodes=[
                make_node_view("a", gpus=4, workers=mine[:1], free_gpus=0),
                make_node_view("b", gpus=4, workers=[mine[1], other], free_gpus=free_on_b),
                make_node_view("c", gpus=4, free_gpus=free_on_c),
            ],
            jobs=[
                job_with(job, started_at_s=began_s),
                make_job_view(
                    "other", state=JobState.RUNNING, gpus_per_worker=3 - free_on_b, placed=[other]
                ),
            ],
            now_s=1000.0,
        )
    )


def test_a_spread_gang_moves_to_where_it_stands_together() -> None:
    """Only to fewer nodes, only where it fits whole, and only when it has rested."""
    for found, moves in (
        (spread(free_on_b=2), 1),
        (spread(free_on_b=1), 0),
        (spread(free_on_b=1, free_on_c=1), 0),
        (spread(free_on_b=2, began_s=500.0), 0),
    ):
        Moves(found, rest_s=600.0).closer()
        assert len(found.decisions) == moves
        for each in found.decisions:
            assert isinstance(each, Migrate)
            assert [placement.node for placement in each.placements] == ["b"]
            assert "2 nodes and fits on 1" in each.reason


@pytest.mark.parametrize(("lost_gpu_s", "moves"), [(100.0, 1), (101.0, 0)])
def test_nobody_is_moved_for_order_who_loses_work_by_it(lost_gpu_s: float, moves: int) -> None:
    """Of 10,000 GPU-seconds a hundredth may be lost, neither to stand closer nor to empty a node;
    whoever saves when it is asked loses none, whatever it has not saved yet."""
    for asked in (False, True):
        close = losing(spread(free_on_b=2), "spread", lost_gpu_s, asked=asked)
        tidied = two_nodes({"a": ("n0", 1), "full": ("n1", 6)})
        tidied = losing(tidied, "a", lost_gpu_s, asked=asked)
        Moves(close, rest_s=600.0).closer()
        Moves(tidied, rest_s=600.0).tidy(0.75)
        expected = 1 if asked else moves
        assert [len(found.decisions) for found in (close, tidied)] == [expected, expected]


def losing(board: Board, job_id: str, lost_gpu_s: float, *, asked: bool) -> Board:
    """The same, where a job has computed 10,000 GPU-seconds and would lose so many of them."""
    jobs = [
        job_with(
            job,
            attained_gpu_s=10_000.0,
            computing_gpus=0,
            unsaved_gpu_s=lost_gpu_s,
            unsaved_gpus=0,
            saves_when_asked=asked,
        )
        if job.job_id == job_id
        else job
        for job in board.snapshot.jobs
    ]
    return Board(structs.replace(board.snapshot, jobs=tuple(jobs)))


def test_a_job_that_never_saves_is_not_moved_to_empty_its_node() -> None:
    """It has run for half an hour when a wider one comes, and nobody waits: it goes on."""
    cell = Cell(nodes=2, knobs=":rest_s=100")
    cell.submit("small", gpus=1, work_s=3000.0, saves=False)
    cell.submit("wider", at_s=1800.0, gpus=3, work_s=3000.0)
    cell.until(3200.0)
    assert cell.state("small") == JobState.SUCCEEDED
    assert cell.job("small").counts.migrations == 0


def test_a_suspended_job_that_never_saves_takes_no_vacated_gpus() -> None:
    """Where it is it goes on from where it was, elsewhere it would start over."""
    cell = Cell(nodes=2, knobs=":rest_s=0")
    cell.submit("short", work_s=300.0)
    cell.submit("a", at_s=2.0, work_s=2000.0, saves=False)
    cell.submit("b", at_s=3.0, work_s=2000.0, saves=False)
    cell.until(600.0)
    assert cell.state("short") == JobState.SUCCEEDED
    assert cell.nodes("a") == cell.nodes("b")
    assert not cell.made(Migrate)


def test_in_a_cell_a_spread_gang_moves_when_a_node_comes_free() -> None:
    """As soon as it has rested, and it ends where it stands together."""
    cell = Cell(nodes=2, knobs=":rest_s=120")
    cell.submit("x", gpus=3, gpus_per_worker=1, work_s=300.0)
    cell.submit("y", gpus=3, gpus_per_worker=1, work_s=9000.0)
    cell.submit("spread", at_s=2.0, gpus=2, gpus_per_worker=1, work_s=3000.0)
    cell.until(200.0)
    assert cell.nodes("spread") == ["t0", "t1"]
    cell.until(400.0)
    assert len(cell.nodes("spread")) == 1
    assert cell.job("spread").counts.migrations == 1


def test_a_spread_gang_moves_though_nothing_happens_any_more() -> None:
    """A node came free before it had rested."""
    cell = Cell(nodes=2, knobs=":rest_s=120")
    cell.submit("x", gpus=3, gpus_per_worker=1, work_s=100.0)
    cell.submit("y", gpus=3, gpus_per_worker=1, work_s=9000.0)
    cell.submit("spread", at_s=2.0, gpus=2, gpus_per_worker=1, work_s=3000.0)
    cell.until(110.0)
    assert cell.nodes("spread") == ["t0", "t1"]
    cell.until(200.0)
    assert len(cell.nodes("spread")) == 1


@each_row(
    ("looked_s_ago", "began_s", "wake_at_s"),
    [(0.0, 0.0, 1020.0), (0.0, 900.0, 1020.0), (60.0, 900.0, 1500.0), (60.0, 0.0, None)],
)
def test_a_spread_gang_is_looked_at_once_it_has_rested_and_in_the_next_slice(
    looked_s_ago: float, began_s: float, wake_at_s: float | None
) -> None:
    """A slice is looked at once, so that what came free after that is seen in the next one; who
    finds no better place once it has rested waits for something to happen."""
    snapshot = spread(free_on_b=1, began_s=began_s).snapshot
    memory = Memory(looked_at=tick(snapshot.now_s - looked_s_ago, 60.0))
    found = policy("gandiva").allocate(snapshot, msgspec.msgpack.encode(memory))
    assert found.wake_at_s == wake_at_s


def test_a_suspended_job_takes_gpus_that_were_vacated() -> None:
    """It need not take turns any more, and both compute (section 4.1, on departure)."""
    cell = Cell(nodes=2, knobs=":rest_s=0")
    cell.submit("short", work_s=300.0)
    cell.submit("a", at_s=2.0, work_s=2000.0)
    cell.submit("b", at_s=3.0, work_s=2000.0)
    cell.until(600.0)
    assert cell.state("short") == JobState.SUCCEEDED
    assert cell.nodes("a") != cell.nodes("b")
    assert {cell.state("a"), cell.state("b")} == {JobState.RUNNING}
    [(_, move)] = cell.made(Migrate)
    assert "vacated" in move.reason
    assert cell.sim.engine.state.counters.preemptions == 0


def test_a_node_that_is_almost_empty_is_emptied() -> None:
    """Its one job goes where fewer GPUs are free, so that a whole node is free (section 4.2)."""
    cell = Cell(nodes=2, knobs=":rest_s=100")
    for number in range(4):
        cell.submit(f"j{number}", gpus=1, work_s=200.0 if number == 0 else 3000.0)
    cell.submit("pair", gpus=2, work_s=150.0)
    cell.submit("alone", at_s=5.0, gpus=1, work_s=3000.0)
    cell.until(900.0)
    assert cell.nodes("alone") == ["t0"]
    assert all(slot.holder is None for slot in cell.sim.engine.state.nodes[NodeName("t1")].gpus)


@pytest.mark.parametrize(("free", "moved"), [(1, []), (2, ["a", "b"])])
def test_a_node_is_emptied_only_if_all_its_jobs_fit_elsewhere(free: int, moved: list[str]) -> None:
    """One job moved away from the other would cost a stop and leave the node in use."""
    board = two_nodes({"a": ("n0", 1), "b": ("n0", 1), "full": ("n1", 8 - free)})
    Moves(board, rest_s=600.0).tidy(0.75)
    assert [each.job_id for each in board.decisions if isinstance(each, Migrate)] == moved
    assert len(board.decisions) == len(moved)
    assert board.floor.free[NodeName("n1")] == free - len(moved)


@pytest.mark.parametrize(("there", "moved"), [(1, ["its"]), (2, []), (3, ["mine"])])
def test_a_node_is_emptied_only_onto_nodes_with_fewer_free_gpus(
    there: int, moved: list[str]
) -> None:
    """Two of eight GPUs are used on n0: its job goes to n1 if three are used there, which leaves
    fewer free, and not if as many are; with one used there n1 is emptied onto n0 instead."""
    board = two_nodes({"mine": ("n0", 2), "its": ("n1", there)})
    Moves(board, rest_s=600.0).tidy(0.75)
    gone = [each.job_id for each in board.decisions if isinstance(each, Migrate)]
    assert gone == moved


def two_nodes(sizes: dict[str, tuple[str, int]]) -> Board:
    """Nodes n0 and n1 of eight GPUs with running jobs, each on so many of one of them."""
    jobs = [
        job_with(
            make_job_view(
                name,
                state=JobState.RUNNING,
                workers=(1, 1),
                gpus_per_worker=gpus,
                gpu_type="H100",
                placed=[make_worker_view(name, 0, node, gpus=gpus)],
            ),
            started_at_s=0.0,
        )
        for name, (node, gpus) in sizes.items()
    ]
    nodes = [
        make_node_view(
            name, gpus=8, workers=[w for job in jobs for w in job.placed if w.node == name]
        )
        for name in ("n0", "n1")
    ]
    return Board(make_snapshot(nodes=nodes, jobs=jobs))


REST_S = 600.0


def gang(
    name: str, *nodes: str, gpus: int = 1, computes: bool = True, seat: str | None = None
) -> JobView:
    """A job that has run for an hour, with a worker of so many GPUs on each of these nodes.

    seat: whose GPUs it has; its own, if nobody's.
    """
    placed = [
        replace(
            make_worker_view(name, at, node, gpus=gpus),
            gpu_uuids=tuple(GpuUuid(f"{seat or name}-{at}-{gpu}") for gpu in range(gpus)),
        )
        for at, node in enumerate(nodes)
    ]
    job = make_job_view(
        name,
        state=JobState.RUNNING if computes else JobState.SUSPENDED,
        workers=(len(nodes), len(nodes)),
        gpus_per_worker=gpus,
        placed=placed,
    )
    return job_with(
        job,
        started_at_s=NOW_S - 3600.0,
        suspended_at_s=None if computes else NOW_S - 300.0,
        saves_when_asked=True,
    )


def board(
    jobs: Sequence[JobView],
    sizes: Mapping[str, int],
    *,
    change: Callable[[NodeView], NodeView] | None = None,
) -> Board:
    """Nodes of so many GPUs with these jobs on them."""
    nodes: list[NodeView] = []
    for name, gpus in sizes.items():
        mine = [worker for job in jobs for worker in job.placed if worker.node == name]
        stay = {uuid for each in mine if not each.is_leaving for uuid in each.gpu_uuids}
        there = make_node_view(name, gpus=gpus, workers=mine, free_gpus=gpus - len(stay))
        nodes.append(change(there) if change else there)
    return Board(make_snapshot(nodes=nodes, jobs=jobs))


def moved(found: Board) -> dict[str, list[str]]:
    """Who is moved, and to which nodes."""
    return {
        made.job_id: [placement.node for placement in made.placements]
        for made in found.decisions
        if isinstance(made, Migrate)
    }


def spread_out(found: Board) -> dict[str, list[str]]:
    """Who takes vacated GPUs."""
    Moves(found, rest_s=REST_S).spread_out()
    return moved(found)


def closer(found: Board) -> dict[str, list[str]]:
    """Which gangs come to stand on fewer nodes."""
    Moves(found, rest_s=REST_S).closer()
    return moved(found)


def tidy(found: Board) -> dict[str, list[str]]:
    """Whom the node that is almost empty is emptied of."""
    Moves(found, rest_s=REST_S).tidy(0.75)
    return moved(found)


# --- who is not moved ---------------------------------------------------------------------------


def _same(job: JobView) -> JobView:
    return job


def _semi(job: JobView) -> JobView:
    return replace(job, preemptibility=Preemptibility.SEMI)


def _non(job: JobView) -> JobView:
    return replace(job, preemptibility=Preemptibility.NON)


def _rested(job: JobView) -> JobView:
    return job_with(job, started_at_s=NOW_S - REST_S)


def _began(job: JobView) -> JobView:
    return job_with(job, started_at_s=NOW_S - REST_S + 1.0)


def _grown(job: JobView) -> JobView:
    """One of its workers is a flexible one."""
    last = replace(job.placed[-1], is_flexible=True)
    return replace(job, placed=(*job.placed[:-1], last))


def _ends(job: JobView) -> JobView:
    """Its workers were told to stop, as it was cancelled, say."""
    return replace(job, placed=tuple(replace(each, is_leaving=True) for each in job.placed))


@each_row(
    ("change", "is_moved"),
    [(_same, True), (_semi, False), (_non, False), (_rested, True), (_began, False),
     (_grown, False), (_ends, False)],
    ids=["as it is", "semi", "non", "rested", "began lately", "has grown", "is ending"],
)  # fmt: skip
def test_who_is_moved_agreed_has_rested_stays_and_has_not_grown(
    change: Callable[[JobView], JobView], is_moved: bool
) -> None:
    """Whatever the move is for: to vacated GPUs, to fewer nodes, or to empty a node. A move is of
    the base gang, so that workers that it has grown by would be lost by it."""
    waits = change(gang("it", "n0", "n0", computes=False, seat="host"))
    vacated = [gang("host", "n0", "n0"), waits]
    assert spread_out(board(vacated, {"n0": 2, "n1": 2})) == ({"it": ["n1"]} if is_moved else {})
    spread = [change(gang("it", "n0", "n1")), gang("a", "n0", gpus=7), gang("b", "n1", gpus=7)]
    assert closer(board(spread, {"n0": 8, "n1": 8, "n2": 2})) == (
        {"it": ["n2"]} if is_moved else {}
    )
    almost_empty = [change(gang("it", "n0", "n0")), gang("full", "n1", gpus=6)]
    assert tidy(board(almost_empty, {"n0": 8, "n1": 8})) == ({"it": ["n1"]} if is_moved else {})


def of_types(*names: str) -> Callable[[NodeView], NodeView]:
    """Nodes of these names have another GPU type, all others A100."""
    return lambda node: replace(node, gpu_type="H100" if node.name in names else "A100")


@pytest.mark.parametrize("there", ["A100", "H100"])
def test_nobody_is_moved_to_another_gpu_type(there: str) -> None:
    """An attempt runs on one type: free GPUs of another one neither take a job that waits for its
    turn nor stand closer together nor make room for a node's jobs."""
    change = of_types("n2") if there == "H100" else of_types()
    vacated = [gang("host", "n0", "n0"), gang("it", "n0", "n0", computes=False, seat="host")]
    spread = [gang("it", "n0", "n1"), gang("a", "n0", gpus=7), gang("b", "n1", gpus=7)]
    almost_empty = [gang("it", "n0"), gang("full", "n2", gpus=6)]
    expected = {"it": ["n2"]} if there == "A100" else {}
    jobs = [vacated, spread, almost_empty]
    sizes = [{"n0": 2, "n2": 2}, {"n0": 8, "n1": 8, "n2": 2}, {"n0": 8, "n2": 8}]
    for rule, found, size in zip((spread_out, closer, tidy), jobs, sizes, strict=True):
        on_a100 = [replace(job, gpu_type="A100") for job in found]
        assert rule(board(on_a100, size, change=change)) == expected


def test_free_gpus_of_another_type_keep_nobody_from_those_of_its_own() -> None:
    """Of H100 jobs that would run on any type, though A100 are free as well and come first by
    name; the search that found nothing for the A100 job before them says nothing of theirs."""
    others = [
        replace(job, gpu_type="A100")
        for job in (gang("a", "n3", gpus=2), gang("b", "n3", gpus=2, computes=False, seat="a"))
    ]
    vacated = [gang("host", "n0", "n0"), gang("it", "n0", "n0", computes=False, seat="host")]
    spread = [gang("it", "n0", "n1"), gang("c", "n0", gpus=7), gang("d", "n1", gpus=7)]
    change = of_types("n0", "n1", "n2")
    size = {"n0": 2, "n2": 2, "n3": 2, "n4": 1}
    assert spread_out(board([*others, *vacated], size, change=change)) == {"it": ["n2"]}
    size = {"n0": 8, "n1": 8, "n2": 2, "n4": 2}
    assert closer(board(spread, size, change=change)) == {"it": ["n2"]}


@each_row("change", [_semi, _began, _grown, _ends])
def test_a_node_is_not_emptied_of_some_where_one_stays(
    change: Callable[[JobView], JobView],
) -> None:
    """One of two on it is not moved: that the other one fits elsewhere would not empty it."""
    for name in ("a", "b"):
        both = [gang("a", "n0"), gang("b", "n0")]
        jobs = [change(job) if job.job_id == name else job for job in both]
        found = board([*jobs, gang("full", "n1", gpus=6)], {"n0": 8, "n1": 8})
        assert tidy(found) == {}


# --- which node, and where to -------------------------------------------------------------------


def _whole(node: NodeView) -> NodeView:
    return node


def _closed(node: NodeView) -> NodeView:
    """Three GPUs of n0, which nobody has, are given to nobody any more."""
    if node.name != "n0":
        return node
    return replace(node, free_gpus=node.gpus - 3, barred_gpus=3, trespassed_gpus=3)


@pytest.mark.parametrize("change", [_whole, _closed])
def test_a_node_on_which_nobody_is_needs_no_emptying(
    change: Callable[[NodeView], NodeView],
) -> None:
    """It has the most free GPUs of all, also where some are given to nobody: of the others the one
    that is almost empty is emptied."""
    jobs = [gang("it", "n1", gpus=4), gang("full", "n2", gpus=12)]
    found = board(jobs, {"n0": 16, "n1": 16, "n2": 16}, change=change)
    assert tidy(found) == {"it": ["n2"]}


def test_a_gang_on_several_nodes_is_not_moved_to_empty_one_of_them() -> None:
    """The others would not come free by it: its moves are those to fewer nodes."""
    jobs = [gang("it", "n0", "n1"), gang("full", "n1", gpus=6), gang("fuller", "n2", gpus=6)]
    assert tidy(board(jobs, {"n0": 8, "n1": 8, "n2": 8})) == {}


@pytest.mark.parametrize(("taken", "to"), [(6, {"it": ["n1"]}), (7, {})])
def test_a_gang_is_moved_whole(taken: int, to: dict[str, list[str]]) -> None:
    """Where one GPU is left for its two workers it does not go."""
    jobs = [gang("it", "n0", "n0"), gang("full", "n1", gpus=taken)]
    assert tidy(board(jobs, {"n0": 8, "n1": 8})) == to


def test_a_gang_is_moved_with_as_many_workers_as_its_gpu_type_asks_for() -> None:
    """Two small GPUs stand for one: a node with a single one free is no place for it."""
    it = gang("it", "n0", "n0")
    it = replace(it, workers=WorkerRange(min=1, max=1))
    it = replace(it, gpu=GpuRequest(worker_multiplier={"H100": 2}))
    for taken, to in ((6, {"it": ["n1"]}), (7, {})):
        found = board([it, gang("full", "n1", gpus=taken)], {"n0": 8, "n1": 8})
        assert tidy(found) == to
        moves = [made for made in found.decisions if isinstance(made, Migrate)]
        assert all(placement.worker_count == 2 for made in moves for placement in made.placements)


@pytest.mark.parametrize(("avoids", "to"), [((), "n2"), (("n2",), "n3"), (("n2", "n3"), "n1")])
def test_jobs_go_to_the_fullest_node_that_takes_them(avoids: tuple[str, ...], to: str) -> None:
    """One, two and three GPUs are free on n2, n3 and n1; where it has failed it does not go."""
    it = job_with(gang("it", "n0"), nodes_avoided=tuple(NodeName(name) for name in avoids))
    others = [gang("a", "n1", gpus=5), gang("b", "n2", gpus=7), gang("c", "n3", gpus=6)]
    found = board([it, *others], {f"n{at}": 8 for at in range(4)})
    assert tidy(found) == {"it": [to]}


def test_a_move_is_told_with_what_it_throws_away() -> None:
    """Whoever reads why a job was moved reads what that costs where it finds no time to save."""
    it = job_with(gang("it", "n0"), unsaved_gpu_s=7.0)
    found = board([it, gang("full", "n1", gpus=6)], {"n0": 8, "n1": 8})
    tidy(found)
    [made] = found.decisions
    assert isinstance(made, Migrate)
    assert made.predicted_cost_gpu_s == 7.0
    assert made.reason.startswith("n0 is almost empty and can be emptied; ")
