"""Storage that does not answer: it may be one job's own, so it closes no node and lends none."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.faults import STORAGE_SILENT, Fault
from common.messages import WorkerPhase
from common.model import CheckpointSpec, JobState, NodeName
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.nodes.start_failures import MOST
from coordinator.engine.state.events import JobCancelRequested, PassDue, WorkerFact
from coordinator.engine.state.tables import JobEntry
from tests.harness.cluster.engine import state
from tests.harness.cluster.scripted_nodes import BROKEN, REST_S, BlackHole, Refusal
from tests.tables import each_row

SILENT = f"{STORAGE_SILENT} in 10 s"
LOOKED = Refusal(f"workdir or checkpoint.path: {SILENT}", Fault.STORAGE)
HUNG = Refusal(f"cannot start the worker: j-1-0: its shim: workdir: {SILENT}", Fault.STORAGE)


def cell_of(nodes: int) -> BlackHole:
    """Nodes that start what begins on storage that answers."""
    cell = BlackHole(nodes=nodes)
    cell.bad = set()
    return cell


def submit(
    cell: BlackHole,
    name: str,
    *,
    workdir: str = "/",
    program: str = "x",
    saves_at: str | None = None,
    path: str = "",
) -> JobEntry:
    """A job whose worker begins there, by a PATH of its own if one is given."""
    job = cell.submit(name)
    job.spec = replace(
        job.spec,
        workdir=workdir,
        command=(program,),
        env={"PATH": path} if path else {},
        checkpoint=CheckpointSpec(path=saves_at),
    )
    return job


def hangs(cell: BlackHole, job: JobEntry, why: Refusal = HUNG) -> NodeName:
    """A pass places a job, its gang is ready, and its node cannot start it; on which that was."""
    cell.handle(PassDue())
    cell.say(WorkerPhase.READY)
    [worker] = job.workers.values()
    cell.report(worker.node, why.of(worker))
    cell.report(worker.node)
    return worker.node


@each_row(
    ("where", "why"),
    [
        ({"workdir": "/data/a"}, HUNG),
        ({"saves_at": "/data/a/checkpoint"}, LOOKED),
        ({"path": "/usr/bin:/data/a/bin"}, HUNG),
        ({"saves_at": "/data/a/checkpoint", "path": "/data/a/bin"}, HUNG),
    ],
)
def test_one_job_whose_directory_hangs_closes_no_node(where: dict[str, str], why: Refusal) -> None:
    """However often it comes, and wherever it goes: it takes its fault along."""
    cell = cell_of(2)
    job = submit(cell, "hangs", **where)
    hung_on: list[NodeName] = []
    while len(hung_on) < 4 * MOST:
        hung_on.append(hangs(cell, job, why))
        cell.now_s = max(cell.now_s, job.retry.at_s or 0.0)
        cell.handle(PassDue())
    assert max(hung_on.count(NodeName(name)) for name in cell.boots) >= 2 * MOST
    assert not [name for name in cell.boots if "takes nothing new" in cell.told(name)]


def test_many_jobs_of_one_directory_close_no_node() -> None:
    """They are of one user, whose storage it is."""
    cell = cell_of(1)
    for number in range(2 * MOST):
        hangs(cell, submit(cell, f"j{number}", workdir="/data/a"))
    assert not cell.node("t0").failed_starts.closed_reason


@each_row(
    ("first", "second"),
    [
        ({"workdir": "/data/a"}, {"workdir": "/data/b"}),
        ({"program": "/data/a/train"}, {"program": "/data/b/train"}),
        ({"workdir": "/data/a"}, {"program": "/data/b/train"}),
        ({"workdir": "/data/a"}, {"saves_at": "/data/b/checkpoint"}),
        ({"path": "/data/a/bin"}, {"path": "/data/b/bin"}),
    ],
)
def test_two_directories_that_hang_on_one_node_close_it(
    first: dict[str, str], second: dict[str, str]
) -> None:
    """It is not one job's matter any more: others are kept away."""
    cell = cell_of(1)
    for number in range(MOST):
        where = second if number == MOST - 1 else first
        assert not cell.node("t0").failed_starts.closed_reason
        hangs(cell, submit(cell, f"j{number}", **where))
    assert cell.node("t0").failed_starts.closed_reason.startswith(
        f"it refused {MOST} starts in a row"
    )


def test_two_directories_that_hang_long_after_each_other_prove_nothing() -> None:
    """Both storages have had a bad moment."""
    cell = cell_of(1)
    for number in range(MOST - 1):
        job = submit(cell, f"a{number}", workdir="/data/a")
        hangs(cell, job)
        cell.handle(JobCancelRequested(job_id=job.job_id, by="t/u"))
    cell.now_s += REST_S
    hangs(cell, submit(cell, "b", workdir="/data/b"))
    assert not cell.node("t0").failed_starts.closed_reason


def test_what_hangs_adds_nothing_to_what_the_node_refused_by_itself() -> None:
    """One job's storage does not make up the number; nor does it undo it."""
    cell = cell_of(1)
    for number in range(MOST - 1):
        hangs(cell, submit(cell, f"j{number}"), BROKEN)
    hangs(cell, submit(cell, "a", workdir="/data/a"))
    hangs(cell, submit(cell, "again", workdir="/data/a"))
    assert not cell.node("t0").failed_starts.closed_reason
    hangs(cell, submit(cell, "last"), BROKEN)
    assert cell.node("t0").failed_starts.closed_reason


@pytest.mark.parametrize("path", ["", "/usr/local/bin:/usr/bin:/bin"])
def test_a_start_that_hangs_with_nothing_of_the_job_s_own_is_the_node_s(path: str) -> None:
    """A program of the node's, begun in its root directory, hangs for nobody's mount."""
    cell = cell_of(1)
    for number in range(MOST):
        hangs(cell, submit(cell, f"j{number}", path=path))
    assert cell.node("t0").failed_starts.closed_reason


def test_a_start_that_goes_well_makes_an_end_of_it() -> None:
    """Directories that hung before it say nothing of the node any more."""
    cell = cell_of(1)
    for number in range(MOST - 1):
        hangs(cell, submit(cell, f"a{number}", workdir="/data/a"))
    well = submit(cell, "well")
    cell.handle(PassDue())
    cell.say(WorkerPhase.READY)
    cell.say(WorkerPhase.RUNNING)
    assert state(well) == JobState.RUNNING
    ended = [
        WorkerFact(key=worker.key, phase=WorkerPhase.EXITED, exit_code=0)
        for worker in well.workers.values()
    ]
    cell.report("t0", *ended)
    cell.report("t0")
    assert cell.node("t0").failed_starts.hung == []
    hangs(cell, submit(cell, "b", workdir="/data/b"))
    assert not cell.node("t0").failed_starts.closed_reason


def test_what_hung_outlives_the_leader() -> None:
    """The next one closes the node by what the one before it was told."""
    cell = cell_of(1)
    for number in range(MOST - 1):
        hangs(cell, submit(cell, f"a{number}", workdir="/data/a"))
    settings = cell.engine.settings
    cell.engine = Engine(settings, decode_state(cell.engine.encode_state()))
    hangs(cell, submit(cell, "b", workdir="/data/b"))
    assert cell.node("t0").failed_starts.closed_reason
