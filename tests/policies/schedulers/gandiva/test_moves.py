"""Packs that must pay, and moves to better places."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from common.model import (
    GpuUuid,
    JobState,
    NodeName,
)
from coordinator.policies.contract.decisions import Decision, Migrate, Resume, Suspend
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.gandiva.board import Board
from coordinator.policies.schedulers.gandiva.migration import Moves
from coordinator.policies.schedulers.gandiva.policy import Memory
from coordinator.policies.schedulers.gandiva.time_slices import tick
from tests.builders import make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.policies.sharing_cell import Cell
from tests.tables import each_row

# --- packing ----------------------------------------------------------------------------------


def packed(cell: Cell) -> list[Decision]:
    """Trials and packs that were resumed."""
    return [each for _, each in cell.made(Resume) if isinstance(each, Resume) and each.is_packed]


def test_a_pack_that_pays_is_kept() -> None:
    """Two that keep a GPU hardly busy run side by side at full speed once both were measured."""
    cell = Cell(gpus=1)
    cell.submit("a", gpus=1, work_s=1200.0, busy=0.1)
    cell.submit("b", gpus=1, work_s=1200.0, busy=0.1)
    cell.until(5000.0)
    assert max(cell.end_s("a"), cell.end_s("b")) < 1700.0  # in turns: 2400
    assert packed(cell)


def test_a_pack_that_does_not_pay_is_undone_and_not_tried_again() -> None:
    """What they make together was measured to be less than in turns (section 4.2)."""
    cell = Cell(gpus=1)
    cell.submit("a", gpus=1, work_s=1200.0, busy=0.94)
    cell.submit("b", gpus=1, work_s=1200.0, busy=0.94)
    cell.until(9000.0)
    assert len(packed(cell)) == 1
    parted = [each for _, each in cell.made(Suspend) if "0.87 of what" in each.reason]
    assert len(parted) == 1
    assert cell.state("a") == cell.state("b") == JobState.SUCCEEDED


@pytest.mark.parametrize(
    ("busy", "memory_bytes", "of_gpu"),
    [(None, 10, 80), (0.1, 50, 80), (0.1, None, 80)],
    ids=["not told how busy", "too large together", "not told how large"],
)
def test_what_is_not_known_to_fit_is_not_tried(
    busy: float | None, memory_bytes: int | None, of_gpu: int
) -> None:
    """No trial without the use of both, nor beyond the memory of the GPU."""
    cell = Cell(gpus=1, gpu_memory_bytes=of_gpu)
    for name in ("a", "b"):
        cell.submit(name, gpus=1, work_s=600.0, busy=busy, memory_bytes=memory_bytes)
    cell.until(3000.0)
    assert not packed(cell)
    assert cell.state("a") == cell.state("b") == JobState.SUCCEEDED


@pytest.mark.parametrize("saves", [True, False])
def test_no_work_is_thrown_away_for_a_trial(saves: bool) -> None:
    """Who would have to start over elsewhere is not moved beside a host: the trial may not pay."""
    cell = Cell(nodes=2, gpu_memory_bytes=10)
    cell.submit("host", gpus=4, work_s=20_000.0, busy=0.1, memory_bytes=1)
    cell.submit("hot", at_s=2.0, gpus=4, work_s=20_000.0, busy=0.95, memory_bytes=8)
    cell.submit("filler", at_s=3.0, gpus=4, work_s=1_500.0)
    cell.submit("guest", at_s=4.0, gpus=4, work_s=4_000.0, busy=0.15, memory_bytes=5, saves=saves)
    cell.until(40_000.0)
    moves = [move for _, move in cell.made(Migrate) if isinstance(move, Migrate)]
    moved = [move for move in moves if move.job_id == "guest"]
    assert [move.reason.partition(":")[0] for move in moved] == ["on trial beside host"] * saves


def test_nearly_three_days_of_unsaved_work_outlive_an_overload() -> None:
    """A job that never saves and takes turns for a while ends no later than without packing."""
    ends: list[float] = []
    for knobs in ("", ":packs=false"):
        cell = Cell(nodes=2, knobs=knobs, gpu_memory_bytes=10)
        cell.submit("host", gpus=4, work_s=400_000.0, busy=0.1, memory_bytes=3)
        cell.submit(
            "guest", at_s=2.0, gpus=4, work_s=260_000.0, busy=0.15, memory_bytes=5, saves=False
        )
        cell.submit("hot1", at_s=250_000.0, gpus=4, work_s=30_000.0, busy=0.95, memory_bytes=8)
        cell.submit("hot2", at_s=250_001.0, gpus=4, work_s=1_500.0, busy=0.95, memory_bytes=8)
        cell.until(600_000.0)
        ends.append(cell.end_s("guest"))
    assert ends[0] <= ends[1]


def test_without_overload_nobody_is_packed() -> None:
    """Free GPUs are better than half of one."""
    cell = Cell(gpus=2)
    cell.submit("a", gpus=1, work_s=600.0, busy=0.1)
    cell.submit("b", gpus=1, work_s=600.0, busy=0.1)
    cell.until(2000.0)
    assert not packed(cell)
    assert not cell.made(Suspend)


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
                structs.replace(job, started_at_s=began_s),
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
        structs.replace(
            job,
            attained_gpu_s=10_000.0,
            computing_gpus=0,
            lost_if_preempted_gpu_s=lost_gpu_s,
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
        structs.replace(
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
