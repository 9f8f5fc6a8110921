"""Gandiva: where jobs go, growing and shrinking, and a leader that goes on."""

from __future__ import annotations

from msgspec import structs

from common.model import (
    JobId,
    JobState,
    NodeName,
)
from coordinator.policies.contract.decisions import Resize, Start
from coordinator.policies.schedulers.gandiva.board import Board
from tests.harness.builders import make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.policies.sharing_cell import SLICE_S, Cell
from tests.tables import each_row

# --- reactive mode: algorithm 1 ---------------------------------------------------------------


def board(held: dict[str, tuple[int, ...]], *, gpus: int = 4) -> Board:
    """Nodes with jobs of so many GPUs each."""
    nodes, jobs = [], []
    for name, sizes in held.items():
        workers = []
        for number, size in enumerate(sizes):
            job = f"{name}-{number}"
            worker = make_worker_view(job, 0, name, gpus=size)
            workers.append(worker)
            jobs.append(
                make_job_view(job, state=JobState.RUNNING, gpus_per_worker=size, placed=[worker])
            )
        nodes.append(make_node_view(name, gpus=gpus, workers=workers))
    return Board(make_snapshot(nodes=nodes, jobs=jobs))


@each_row(
    ("held", "size", "expected"),
    [
        ({"a": (1,), "b": ()}, 1, "a"),  # step 1: its own affinity before an empty node
        ({"a": (1, 1), "b": (1,), "c": ()}, 1, "b"),  # of those the least loaded
        ({"a": (1,), "b": ()}, 2, "b"),  # step 2: an empty node rather than another affinity
        ({"a": (1,), "b": (4,)}, 2, "a"),  # step 3: any free GPUs, which may fragment
        ({"a": (1, 1, 1), "b": (1,)}, 2, "b"),
        ({"a": (4,), "b": (2, 2)}, 1, None),  # nothing is free: steps 4 and 5
    ],
)
def test_a_job_goes_where_algorithm_1_says(
    held: dict[str, tuple[int, ...]], size: int, expected: str | None
) -> None:
    """Gandiva, section 4.1, steps 1 to 3."""
    place = board(held).find(make_job_view("new", gpus_per_worker=size))
    assert (place[1][0].node if place else None) == expected


def test_height_is_what_is_asked_over_what_is_there() -> None:
    """A node is below 1 exactly when it has a free GPU, which rounding up would hide."""
    found = board({"a": (), "b": (1,), "c": (4,)})
    assert [found.height(NodeName(name)) for name in "abc"] == [0.0, 0.25, 1.0]
    assert [found.affinity(NodeName(name)) for name in "abc"] == [0, 1, 4]


def test_under_overload_a_newcomer_takes_turns_with_a_gang_of_its_size() -> None:
    """Step 4: the least loaded seat of its own size, and early feedback for it."""
    cell = Cell(nodes=2)
    cell.submit("big", work_s=3000.0)
    for number in range(4):
        cell.submit(f"small{number}", gpus=1, work_s=3000.0)
    cell.submit("late", at_s=200.0, work_s=3000.0)
    cell.until(230.0)
    assert cell.nodes("late") == cell.nodes("big")
    assert cell.state("late") == JobState.RUNNING
    assert cell.state("big") == JobState.SUSPENDED
    assert all(cell.state(f"small{number}") == JobState.RUNNING for number in range(4))


def test_newcomers_have_their_first_turns_while_others_take_theirs() -> None:
    """One more with each slice, up to `jobs_per_gpu`, though of two one has always just begun."""
    cell = Cell()
    for number in range(5):
        cell.submit(f"j{number}", work_s=3000.0)
    cell.until(250.0)
    waits = [number for number in range(5) if cell.state(f"j{number}") == JobState.PENDING]
    assert waits == [4]


def test_more_than_so_many_per_gpu_wait() -> None:
    """Step 5: the queue, with the reason."""
    cell = Cell(knobs=":jobs_per_gpu=2")
    for number in range(3):
        cell.submit(f"j{number}", work_s=3000.0)
    cell.until(1000.0)
    assert cell.state("j2") == JobState.PENDING
    assert "less than 2 jobs" in cell.sim.engine.explain.blockers(JobId("j2"))[0]


# --- grow and shrink --------------------------------------------------------------------------


def test_an_elastic_job_grows_on_its_node_and_shrinks_at_once() -> None:
    """After an idle minute, up to the node; back as soon as somebody needs the GPUs."""
    cell = Cell(nodes=2)
    cell.submit("elastic", gpus=1, gpus_per_worker=1, most=8, work_s=6000.0)
    cell.until(50.0)
    assert cell.job("elastic").running_workers == 1
    cell.until(70.0)
    assert cell.job("elastic").running_workers == 4
    assert len(cell.nodes("elastic")) == 1
    cell.submit("a", at_s=100.0, gpus=4, work_s=600.0)
    cell.submit("b", at_s=110.0, gpus=2, work_s=600.0)
    cell.until(120.0)
    assert cell.state("a") == cell.state("b") == JobState.RUNNING
    assert cell.job("elastic").running_workers == 2
    assert len(cell.made(Resize)) == 2


def test_a_job_that_rests_grows_as_soon_as_it_may() -> None:
    """GPUs that come free within the cooldown of a growth are taken after it, though nothing else
    happens then."""
    cell = Cell(gpus=8, cooldown_s=300.0)
    cell.submit("elastic", gpus=1, gpus_per_worker=1, most=8, work_s=9000.0)
    cell.submit("short", gpus=4, work_s=100.0)
    cell.until(200.0)
    assert cell.job("elastic").running_workers == 4
    cell.until(400.0)
    assert cell.job("elastic").running_workers == 8


def test_nobody_grows_while_another_waits_for_more_than_is_free() -> None:
    """Three GPUs, then seven, stay free beside a gang that waits for the whole node: what grew into
    them would only be in its way."""
    cell = Cell(gpus=8)
    cell.submit("elastic", gpus=1, gpus_per_worker=1, most=8, work_s=5000.0)
    cell.submit("rigid", gpus=4, work_s=2000.0)
    cell.submit("whole", at_s=10.0, gpus=8, work_s=1000.0)
    cell.until(20_000.0)
    assert cell.state("whole") == JobState.SUCCEEDED
    assert not cell.made(Resize)


def test_a_job_that_did_not_opt_in_never_grows() -> None:
    """Growing is for jobs that said that they can use more."""
    cell = Cell()
    cell.submit("rigid", gpus=1, work_s=600.0)
    cell.until(2000.0)
    assert not cell.made(Resize)


# --- as a whole -------------------------------------------------------------------------------


def test_another_leader_goes_on_with_what_is_remembered() -> None:
    """Memory is all that turns, measurements and verdicts are kept in: a copy decides the same."""
    cell = Cell(gpus=1)
    for name in ("a", "b", "c"):
        cell.submit(name, gpus=1, work_s=900.0, busy=0.94)
    cell.until(700.0)
    engine = cell.sim.engine
    snapshot, memory = engine.snapshot(), engine.state.policy_memory
    later = structs.replace(snapshot, now_s=snapshot.now_s + SLICE_S)
    assert memory
    assert engine.policy.allocate(later, memory) == engine.policy.allocate(later, bytes(memory))
    assert cell.made(Start)
