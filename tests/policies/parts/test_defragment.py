"""Room where free GPUs are in pieces: who moves, where to, and who stays."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from common.model import JobId, JobState, NodeName, Preemptibility
from coordinator.policies.contract.decisions import Migrate, Placement, Resize
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, WorkerView
from coordinator.policies.parts.defragment import MOST_REFUSED, Clearing
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.properties.safety import Ledger
from tests.tables import each_row

START_S, RESTART_S, RESIZE_S, GRACE_S = 10.0, 30.0, 20.0, 5.0
WHOLE_S = START_S + RESTART_S + GRACE_S

Held = Mapping[str, list[tuple[str, int, bool]]]
"""By node, its workers: (job, GPUs, whether it is flexible)."""


def running(name: str, placed: list[WorkerView], **changed: object) -> JobView:
    """A job that runs for long, saves when it is asked to, and may be stopped."""
    base = sum(not worker.is_flexible for worker in placed)
    plain = make_job_view(
        name,
        state=JobState.RUNNING,
        workers=(base, 8),
        gpus_per_worker=placed[0].gpus,
        grace_s=GRACE_S,
        placed=placed,
    )
    return job_with(plain, **{"saves_when_asked": True, "started_at_s": 0.0, **changed})


def cell(
    held: Held, changed: Mapping[str, object] | None = None, *, gpus: int = 4
) -> ClusterSnapshot:
    """Nodes with what runs there; `changed` is of all jobs."""
    placed: dict[str, list[WorkerView]] = {}
    nodes: dict[str, list[WorkerView]] = {}
    for node, workers in held.items():
        nodes[node] = []
        for job, size, is_flexible in workers:
            index = len(placed.setdefault(job, []))
            worker = make_worker_view(job, index, node, gpus=size, is_flexible=is_flexible)
            placed[job].append(worker)
            nodes[node].append(worker)
    snapshot = make_snapshot(
        nodes=[make_node_view(name, gpus=gpus, workers=here) for name, here in nodes.items()],
        jobs=[running(name, workers, **(changed or {})) for name, workers in placed.items()],
        now_s=100_000.0,
    )
    return structs.replace(snapshot, start_s=START_S, restart_s=RESTART_S, resize_s=RESIZE_S)


def wants(size: int, **changed: object) -> JobView:
    """A job that waits for room."""
    return job_with(make_job_view("new", gpus_per_worker=size), **changed)


class Tried:
    """What comes of room that is asked for. fixed: who must not move."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        job: JobView,
        *,
        count: int = 1,
        least: int = 1,
        fixed: tuple[str, ...] = (),
        busy: tuple[str, ...] = (),
    ) -> None:
        self.asked: list[tuple[str, float]] = []
        self.floor = FreeGpus(snapshot)
        self.before = dict(self.floor.free)

        def may_move(victim: JobView, pause_s: float) -> bool:
            self.asked.append((victim.job_id, pause_s))
            return victim.job_id not in fixed

        self.clearing = Clearing(snapshot, may_move)
        names = {JobId(name) for name in busy}
        self.has_room = self.clearing.make(
            self.floor, job, "H100", least=least, count=count, busy=names
        )
        self.decisions = self.clearing.decisions

    def refuses(self) -> bool:
        """Nothing moves, and nothing has changed."""
        return not self.has_room and not self.decisions and self.floor.free == self.before


PIECES: Held = {"n1": [("a", 2, False)], "n2": [("b", 2, False)]}
"""Two nodes of four GPUs, half of each free."""


def test_a_job_that_stands_in_the_way_goes_as_a_whole_to_a_piece_elsewhere() -> None:
    """Four GPUs are free in two pieces: one of two equal jobs moves, and a worker of four fits."""
    tried = Tried(cell(PIECES), wants(4))
    [decision] = tried.decisions
    assert isinstance(decision, Migrate)
    assert decision.placements == (Placement(node=NodeName("n2"), worker_count=1),)
    assert (decision.job_id, decision.predicted_cost_gpu_s) == ("a", 2 * WHOLE_S)
    assert tried.has_room
    assert tried.floor.free == {"n1": 4, "n2": 0}
    assert tried.asked == [("a", WHOLE_S)]


def test_a_flexible_worker_is_replaced_by_one_elsewhere() -> None:
    """The gang stands still for as long as growth takes, its base gang stays where it is."""
    held: Held = {
        "n1": [("a", 1, True), ("b", 2, False)],
        "n2": [("c", 3, False)],
        "n3": [("a", 1, False), ("d", 3, False)],
    }
    tried = Tried(cell(held), wants(2))
    [decision] = tried.decisions
    assert isinstance(decision, Resize)
    assert decision.added == (Placement(node=NodeName("n2"), worker_count=1, is_flexible=True),)
    assert decision.removed_workers == (0,)
    assert tried.asked == [("a", START_S + RESIZE_S)]
    assert tried.floor.free == {"n1": 2, "n2": 0, "n3": 0}


def test_the_node_is_cleared_that_costs_least() -> None:
    """Two GPUs of one job go rather than two jobs, or one that has to do its work over."""
    held: Held = {
        "n1": [("a", 2, False)],
        "n2": [("b", 1, False), ("c", 1, False)],
        "n3": [("d", 1, False), ("e", 2, False)],
    }
    moved = {each.job_id for each in Tried(cell(held), wants(4)).decisions}  # type: ignore[union-attr]  # moves name a job
    assert moved == {"a"}


def test_work_that_would_be_done_over_is_part_of_the_cost() -> None:
    """Of two equal jobs the one goes that has less to lose."""
    snapshot = cell(PIECES)
    lossy = job_with(snapshot.jobs[0], saves_when_asked=False, unsaved_gpu_s=500.0)
    tried = Tried(structs.replace(snapshot, jobs=(lossy, snapshot.jobs[1])), wants(4))
    assert [name for name, _ in tried.asked] == ["b"]


def test_who_must_not_move_is_passed_over() -> None:
    """It is asked once; then the next one is, and where nobody may nothing has changed."""
    tried = Tried(cell(PIECES), wants(4), fixed=("a",))
    assert [name for name, _ in tried.asked] == ["a", "b"]
    assert tried.floor.free == {"n1": 0, "n2": 4}
    assert Tried(cell(PIECES), wants(4), fixed=("a", "b")).refuses()


def test_not_everybody_is_asked() -> None:
    """Where one after the other must not move, no more than so many are asked in a pass."""
    held: Held = {f"n{number:02}": [(f"j{number:02}", 2, False)] for number in range(50)}
    tried = Tried(cell(held), wants(4), fixed=tuple(f"j{number:02}" for number in range(50)))
    assert tried.refuses()
    assert len(tried.asked) == MOST_REFUSED


@each_row(
    "changed",
    [
        {"preemptibility": Preemptibility.SEMI},
        {"is_resting": True},
        {"state": JobState.RESIZING},
        {"nodes_avoided": (NodeName("n1"), NodeName("n2"))},
        {"started_at_s": 100_000.0 - 10 * WHOLE_S + 1.0},
    ],
    ids=["not to be stopped", "stopped lately", "under way", "failed there", "moved lately"],
)
def test_whom_nobody_may_stop_now_stays(changed: dict[str, object]) -> None:
    """Nor does who moved lately: no job loses more than a part of its time by moves."""
    assert Tried(cell(PIECES, changed), wants(4)).refuses()


def test_who_moved_long_enough_ago_moves_again() -> None:
    """It has rested for ten times what a move takes."""
    snapshot = cell(PIECES, {"started_at_s": 100_000.0 - 10 * WHOLE_S})
    assert Tried(snapshot, wants(4)).has_room


def test_who_changes_anyway_stays() -> None:
    """Whoever the pass resizes or stops is not moved by it as well."""
    assert Tried(cell(PIECES), wants(4), busy=("a", "b")).refuses()


def test_several_go_together_where_none_is_enough() -> None:
    """Two jobs of one GPU leave a node of four, and both find their piece."""
    held: Held = {"n1": [("a", 1, False), ("b", 1, False)], "n2": [("c", 2, False)]}
    tried = Tried(cell(held), wants(4), busy=("c",))
    assert tried.clearing.decisions[0].reason.endswith("1 worker on n1")
    assert [name for name, _ in tried.asked] == ["a", "b"]
    assert tried.floor.free == {"n1": 4, "n2": 0}


def test_a_job_and_its_flexible_worker_are_not_counted_twice() -> None:
    """Either the worker goes or all of the job does: that is one GPU here, and two are missing."""
    held: Held = {
        "n1": [("a", 1, True), ("x", 1, False)],
        "n2": [("y", 1, False)],
        "n3": [("a", 1, False), ("z", 3, False)],
    }
    assert Tried(cell(held), wants(4), busy=("x", "y", "z")).refuses()


def test_who_has_moved_does_not_make_room_again() -> None:
    """Its worker is not on the node any more: the second room that it would make is none."""
    held: Held = {
        "n1": [("a", 1, True), ("c", 1, False), ("x", 1, False)],
        "n2": [("x", 3, False)],
        "n3": [("a", 1, False), ("y", 2, False)],
        "n4": [("z", 3, False)],
    }
    busy = tuple(map(JobId, ("x", "y", "z")))
    tried = Tried(cell(held), wants(2), count=2, busy=busy)
    assert len(tried.decisions) == 1
    assert tried.floor.free == {"n1": 2, "n2": 0, "n3": 1, "n4": 1}
    tried.floor.take([Placement(node=NodeName("n1"), worker_count=1)], 2)
    other = structs.replace(wants(2), job_id=JobId("other"))
    assert not tried.clearing.make(tried.floor, other, "H100", least=1, count=1, busy=busy)
    assert len(tried.clearing.decisions) == 1


def test_a_worker_that_leaves_holds_its_job() -> None:
    """Something of it is under way: it does not move until that is over."""
    held: Held = {
        "n1": [("a", 2, False)],
        "n2": [("b", 2, False)],
        "n3": [("a", 2, True), ("b", 2, False)],
        "n4": [("b", 2, False)],
    }
    snapshot = cell(held)
    a, b = snapshot.jobs
    assert Tried(snapshot, wants(4), busy=("b",)).has_room
    leaving = (a.placed[0], structs.replace(a.placed[1], is_leaving=True))
    jobs = (structs.replace(a, placed=leaving), b)
    assert Tried(structs.replace(snapshot, jobs=jobs), wants(4), busy=("b",)).refuses()


def test_nobody_moves_in_vain() -> None:
    """Room for one worker of two is none where both are needed."""
    assert Tried(cell(PIECES), wants(4), count=2, least=2).refuses()
    assert Tried(cell(PIECES), wants(4), count=2, least=1).has_room


def test_no_room_is_lost_for_room() -> None:
    """An empty node takes nobody: its GPUs are room already, and no piece."""
    held: Held = {"n1": [("a", 2, False)], "n2": [("b", 2, False), ("c", 2, False)], "n3": []}
    assert Tried(cell(held), wants(4), count=2, least=2).refuses()


def test_nodes_that_the_job_avoids_are_not_cleared_for_it() -> None:
    """It would not start there."""
    tried = Tried(cell(PIECES), wants(4, nodes_avoided=(NodeName("n1"),)))
    assert tried.floor.free == {"n1": 0, "n2": 4}


def test_the_word_names_who_needs_room_and_why() -> None:
    """Whoever asks why a job moved is told for whom, how much of it, and from where."""
    [decision] = Tried(cell(PIECES), wants(4)).decisions
    assert decision.reason == (
        "new needs GPUs of one node and they are free in pieces: this one makes room with 1 worker "
        "on n1"
    )


def test_where_moves_take_no_time_they_cost_nothing_and_nobody_rests() -> None:
    """As in a cell that says of no change what it takes."""
    free = structs.replace(
        cell(PIECES, {"started_at_s": 100_000.0}), start_s=0.0, restart_s=0.0, resize_s=0.0
    )
    assert Tried(free, wants(4)).asked == [("a", 0.0)]


@st.composite
def cells(draw: st.DrawFn) -> ClusterSnapshot:
    """Up to five nodes of eight GPUs with workers of powers of two, some of them flexible."""
    sizes: dict[str, int] = {}
    held: dict[str, list[tuple[str, int, bool]]] = {}
    for node in range(draw(st.integers(2, 5))):
        left, here = 8, list[tuple[str, int, bool]]()
        for _ in range(draw(st.integers(0, 5))):
            name = f"j{draw(st.integers(0, 7))}"
            size = sizes.get(name, draw(st.sampled_from([1, 2, 4])))
            if size <= left:
                here.append((name, size, name in sizes and draw(st.booleans())))
                sizes[name] = size
                left -= size
        held[f"n{node}"] = here
    return cell(held, gpus=8)


@settings(max_examples=200, deadline=None)
@given(
    snapshot=cells(),
    size=st.sampled_from([2, 4, 8]),
    count=st.integers(1, 3),
    least=st.integers(1, 3),
    fixed=st.sets(st.sampled_from(["j0", "j1", "j2", "j3"])),
)
def test_moves_can_be_carried_out_and_make_the_room_that_they_say(
    snapshot: ClusterSnapshot, size: int, count: int, least: int, fixed: set[str]
) -> None:
    """On any cluster: GPUs that are there, every worker of a mover again, and more room."""
    job = wants(size)
    had = sum(FreeGpus(snapshot).rooms("H100", size).values())
    tried = Tried(snapshot, job, count=count, least=least, fixed=tuple(fixed))
    if not tried.has_room:
        assert tried.refuses()
        return
    ledger = Ledger(snapshot)
    movers: set[str] = set()
    for decision in tried.decisions:
        ledger.carry_out(decision)
        assert isinstance(decision, Migrate | Resize)
        assert decision.job_id not in movers | fixed
        movers.add(decision.job_id)
        placed = ledger.jobs[decision.job_id].placed
        new = decision.placements if isinstance(decision, Migrate) else decision.added
        gone = placed if isinstance(decision, Migrate) else decision.removed_workers
        assert sum(each.worker_count for each in new) == len(gone)
        if isinstance(decision, Migrate):
            flexible = sum(each.worker_count for each in new if each.is_flexible)
            assert flexible == sum(worker.is_flexible for worker in placed)
    assert ledger.free == tried.floor.free
    room = sum(gpus // size for gpus in ledger.free.values())
    assert had < room
    assert least <= room
    assert room <= max(count, had + 1)
