"""Gandiva: where jobs go, turns that starve nobody, packs that must pay, moves to better places."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from common.model import (
    CheckpointSpec,
    GpuUuid,
    JobId,
    JobSpec,
    JobState,
    NodeName,
    Pool,
    WorkerRange,
)
from common.profile import JobProfile
from coordinator.engine.settings import EngineSettings
from coordinator.engine.state import JobEntry
from coordinator.policies.decisions import Decision, Migrate, Resize, Resume, Start, Suspend
from coordinator.policies.systems.gandiva.board import COMPUTING_STATES, Board
from coordinator.policies.systems.gandiva.moves import Moves
from coordinator.sim.cluster import Delays, NodeSpec
from coordinator.sim.runtime import RunRules
from coordinator.sim.simulation import Simulation, Submission
from tests.builders import make_job_view, make_node_view, make_snapshot, make_worker_view

SLICE_S = 60.0
DELAYS = Delays(report_s=0.5, ready_s=1.0, start_s=5.0, suspend_s=0.5, resume_s=0.5, stop_s=5.0)


class Cell:
    """Nodes of one type under Gandiva, checked after every event."""

    def __init__(
        self,
        *,
        nodes: int = 1,
        gpus: int = 4,
        knobs: str = "",
        delays: Delays | None = None,
        gpu_memory_bytes: int = 0,
    ) -> None:
        specs = [
            NodeSpec(
                name=NodeName(f"t{number}"),
                home_pool=Pool.TRAINING,
                gpu_type="H100",
                gpus=gpus,
                gpu_memory_bytes=gpu_memory_bytes,
            )
            for number in range(nodes)
        ]
        options = EngineSettings(policy=f"gandiva{knobs}", resize_cooldown_s=0.0)
        self.sim = Simulation(
            options, specs, delays=delays, rules=RunRules(progress_after_s=1.0), check=True
        )
        self.said: list[tuple[float, Decision]] = []
        self.sim.hear = lambda made: self.said.extend((self.sim.loop.now_s, each) for each in made)
        self.sim.begin()

    def submit(
        self,
        name: str,
        *,
        at_s: float = 1.0,
        gpus: int = 4,
        work_s: float = 600.0,
        gpus_per_worker: int | None = None,
        most: int | None = None,
        priority: int = 0,
        busy: float | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """A job that saves on request; its work is in seconds with its base gang."""
        each = gpus_per_worker or gpus
        least = gpus // each
        spec = JobSpec(
            name=name,
            command=("train",),
            workers=WorkerRange(min=least, max=most or least),
            gpus_per_worker=each,
            priority=priority,
            expected_runtime_s=work_s,
            checkpoint=CheckpointSpec(path="/saves", grace_s=30.0),
            profile=JobProfile(gpu_busy_ratio=busy, gpu_memory_bytes=memory_bytes),
        )
        self.sim.submit(
            [Submission(at_s=at_s, job_id=JobId(name), spec=spec, work_s=work_s * least)]
        )

    def until(self, at_s: float) -> None:
        """Let time pass."""
        self.sim.loop.run(until_s=at_s)

    def job(self, name: str) -> JobEntry:
        """A job as the engine sees it."""
        return self.sim.engine.state.jobs[JobId(name)]

    def state(self, name: str) -> JobState:
        """Where a job is in its life."""
        return self.job(name).state

    def nodes(self, name: str) -> list[str]:
        """Where a job's workers are."""
        return sorted({str(worker.node) for worker in self.job(name).workers.values()})

    def end_s(self, name: str) -> float:
        """When a job ended well."""
        job = self.job(name)
        assert job.state == JobState.SUCCEEDED, f"{name} is {job.state}"
        return job.finished_at_s or 0.0

    def made(self, kind: type[Decision]) -> list[tuple[float, Decision]]:
        """Decisions of one kind, with their instants."""
        return [(at_s, each) for at_s, each in self.said if isinstance(each, kind)]


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


@pytest.mark.parametrize(
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


def test_more_than_so_many_per_gpu_wait() -> None:
    """Step 5: the queue, with the reason."""
    cell = Cell(knobs=":jobs_per_gpu=2")
    for number in range(3):
        cell.submit(f"j{number}", work_s=3000.0)
    cell.until(1000.0)
    assert cell.state("j2") == JobState.PENDING
    assert "less than 2 jobs" in cell.sim.engine.blockers(JobId("j2"))[0]


# --- turns -----------------------------------------------------------------------------------


def test_two_gangs_on_one_node_take_turns_and_end_together() -> None:
    """Equal jobs share the time equally, and none of it is lost."""
    cell = Cell()
    cell.submit("a", work_s=600.0)
    cell.submit("b", work_s=600.0)
    cell.until(5000.0)
    ends = sorted((cell.end_s("a"), cell.end_s("b")))
    assert ends[1] == pytest.approx(1.0 + 1200.0)
    assert ends[1] - ends[0] <= SLICE_S + 1.0


def test_a_high_priority_is_never_suspended_for_a_low_one() -> None:
    """The low one waits until it has ended (section 3.1)."""
    cell = Cell()
    cell.submit("low", work_s=600.0)
    cell.submit("high", at_s=100.0, work_s=600.0, priority=1)
    cell.until(650.0)
    assert cell.state("low") == JobState.SUSPENDED
    assert "high" not in {each.job_id for _, each in cell.said if isinstance(each, Suspend)}
    cell.until(5000.0)
    assert cell.end_s("high") <= 100.0 + SLICE_S + 600.0


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from((1, 1, 2, 4, 8)), st.integers(1, 12), st.integers(0, 20)),
        min_size=2,
        max_size=9,
    ),
    has_delays=st.booleans(),
)
def test_nobody_starves_and_no_gpu_idles_beside_one_who_waits(
    sizes: list[tuple[int, int, int]], has_delays: bool
) -> None:
    """Whoever is suspended computes again within a turn of each of the others there, and while it
    is, somebody computes on its GPUs; all jobs end."""
    cell = Cell(nodes=2, delays=DELAYS if has_delays else None)
    for number, (gpus, slices, at) in enumerate(sizes):
        cell.submit(
            f"j{number}",
            at_s=1.0 + at * 30.0,
            gpus=gpus,
            gpus_per_worker=min(gpus, 4),
            work_s=slices * 40.0,
        )
    seen_s = [0.0]

    def watch(now_s: float) -> None:
        if now_s > seen_s[0] + 1e-6:
            _somebody_computes(cell)
        seen_s[0] = now_s

    if not has_delays:  # with delays a pass gathers facts a little after they happened
        cell.sim.watch = watch
    cell.until(100_000.0)
    assert all(cell.state(f"j{number}") == JobState.SUCCEEDED for number in range(len(sizes)))
    since_s: dict[str, float] = {}
    began_s: dict[str, float] = {}
    for at_s, each in cell.said:
        if isinstance(each, Start | Resume):
            began_s[each.job_id] = at_s
        if isinstance(each, Suspend):
            since_s[each.job_id] = at_s
            assert at_s - began_s[each.job_id] >= SLICE_S / 2  # nobody's turn is cut short
        elif isinstance(each, Resume):
            # Three others at most, each with a turn and a half, and a start that no turn cuts.
            assert at_s - since_s.pop(each.job_id) <= 3 * 1.5 * SLICE_S + 120.0


def _somebody_computes(cell: Cell) -> None:
    state = cell.sim.engine.state
    computing = {
        uuid
        for job in state.live()
        if job.state in COMPUTING_STATES
        for worker in job.workers.values()
        for uuid in worker.gpu_uuids
    }
    for job_id in state.suspended_jobs:
        mine = {uuid for worker in state.jobs[job_id].workers.values() for uuid in worker.gpu_uuids}
        assert mine & computing, f"{job_id} waits for nobody"


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
    assert cell.job("spread").migration_count == 1


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
