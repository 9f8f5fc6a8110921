"""Gandiva's packs: which jobs it tries to pack first, how a trial is judged, and that packs must
pay (OSDI'18, 4.2)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from common.model import GpuUuid, JobId, JobState
from common.profile import JobProfile
from coordinator.policies.contract.decisions import (
    Decision,
    Migrate,
    Resize,
    Resume,
    Start,
    Suspend,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.gandiva.packing import Mark, Pair
from coordinator.policies.schedulers.gandiva.policy import Memory
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.sharing_cell import Cell

# --- packing ------------------------------------------------------------------------------------


def seated(
    name: str,
    node: str,
    *,
    busy: float,
    state: JobState = JobState.RUNNING,
    memory_gb: int = 0,
    since_s: float = 5.0,
    started_s_ago: float | None = None,
) -> JobView:
    """A job of one GPU on the only GPU of a node, that has said how far it is.

    since_s: how long it has run, or waited for its turn.
    """
    if started_s_ago is None:
        started_s_ago = since_s if state == JobState.RUNNING else 5000.0
    worker = replace(make_worker_view(name, 0, node), gpu_uuids=(GpuUuid(f"{node}-gpu"),))
    job = make_job_view(name, state=state, placed=[worker])
    return job_with(
        job,
        started_at_s=NOW_S - started_s_ago,
        suspended_at_s=NOW_S - since_s if state == JobState.SUSPENDED else None,
        progress_step=100,
        progress_step_gpu_s=100.0,
        profile=JobProfile(gpu_busy_ratio=busy, gpu_memory_bytes=memory_gb * 10**9),
    )


def suspended(
    name: str,
    node: str,
    *,
    busy: float = 0.5,
    memory_gb: int = 0,
    since_s: float = 5.0,
    started_s_ago: float | None = None,
) -> JobView:
    """The same, but it waits for its turn there."""
    return seated(
        name,
        node,
        busy=busy,
        state=JobState.SUSPENDED,
        memory_gb=memory_gb,
        since_s=since_s,
        started_s_ago=started_s_ago,
    )


def one_gpu_nodes(
    jobs: Sequence[JobView], *, memory_gb: int = 0, idle: Sequence[str] = ()
) -> ClusterSnapshot:
    """Nodes of one GPU with these jobs on them, and some without."""
    names = sorted({*idle, *(worker.node for job in jobs for worker in job.placed)})
    nodes: list[NodeView] = [
        replace(
            make_node_view(
                name,
                gpus=1,
                workers=[worker for job in jobs for worker in job.placed if worker.node == name],
                free_gpus=int(name in idle),
            ),
            gpu_memory_bytes=memory_gb * 10**9,
        )
        for name in names
    ]
    return make_snapshot(nodes=nodes, jobs=jobs)


def measured_alone(jobs: Sequence[JobView], **pairs: float | None) -> bytes:
    """A memory in which all of these were measured, and pairs ("a_b") had such gains."""
    marks = {
        job.job_id: Mark(attempt=0, step=100, gpu_s=100.0, is_packed=False, alone_rate=1.0)
        for job in jobs
    }
    tried = {
        key.replace("_", "|"): Pair(since_s=NOW_S - 5000.0, gain=gain)
        for key, gain in pairs.items()
    }
    return msgspec.msgpack.encode(Memory(marks=marks, pairs=tried))


def trials(
    jobs: Sequence[JobView], *, name: str = "gandiva", memory_gb: int = 0, **pairs: float | None
) -> dict[str, str]:
    """Who is put beside whom in one pass."""
    snapshot = one_gpu_nodes(jobs, memory_gb=memory_gb)
    found = policy(name).allocate(snapshot, measured_alone(jobs, **pairs))
    return {
        each.job_id: each.reason.partition("beside ")[2].partition(":")[0]
        for each in found.decisions
        if isinstance(each, Resume | Migrate) and each.is_packed
    }


def test_the_least_busy_job_that_waits_is_tried_first() -> None:
    """Jobs are offered in order of their use of a GPU, not of their names."""
    jobs = [
        seated("host", "n1", busy=0.3),
        suspended("a", "n1", busy=0.5),
        suspended("b", "n1", busy=0.1),
        suspended("c", "n1", busy=0.3),
    ]
    assert trials(jobs) == {"b": "host"}


@pytest.mark.parametrize(("packs", "tried"), [("true", {"b": "a"}), ("false", {})])
def test_where_none_share_a_gpu_any_more_those_that_still_do_are_packed_or_not(
    packs: str, tried: dict[str, str]
) -> None:
    """`jobs_per_gpu` is for newcomers: two that had turns when it was set to 1 go on with them, so
    that `packs` decides of them beside it, and is no knob in vain."""
    jobs = [seated("a", "n1", busy=0.3), suspended("b", "n1", busy=0.1)]
    assert trials(jobs, name=f"gandiva:jobs_per_gpu=1:packs={packs}") == tried


def test_it_is_put_on_the_least_busy_gpu() -> None:
    """Not on that of the first name, nor on the one that it took its turns on."""
    jobs = [
        seated("a", "n1", busy=0.6),
        seated("b", "n2", busy=0.2),
        seated("c", "n3", busy=0.4),
        suspended("guest", "n1", busy=0.1),
    ]
    assert trials(jobs) == {"guest": "b"}


def test_where_that_gpu_has_no_room_the_next_one_is_tried() -> None:
    """The least busy GPU whose memory holds both: in use, not in order of its room."""
    jobs = [
        seated("a", "n1", busy=0.6, memory_gb=10),
        seated("b", "n2", busy=0.2, memory_gb=70),
        seated("c", "n3", busy=0.4, memory_gb=20),
        suspended("guest", "n1", busy=0.1, memory_gb=20),
    ]
    assert trials(jobs, memory_gb=80) == {"guest": "c"}


def test_a_pair_that_was_tried_is_not_tried_again() -> None:
    """A verdict stands: what did not go together is left, and the next GPU is tried."""
    jobs = [
        seated("a", "n1", busy=0.6),
        seated("b", "n2", busy=0.2),
        suspended("guest", "n1", busy=0.1),
    ]
    assert trials(jobs, b_guest=0.8) == {"guest": "a"}
    assert trials(jobs, b_guest=0.8, a_guest=0.7) == {}


def test_one_gpu_has_one_guest_at_a_time() -> None:
    """Two wait and two GPUs are hardly busy: each gets one, though one of them is the least."""
    jobs = [
        seated("a", "n1", busy=0.2),
        seated("b", "n2", busy=0.3),
        suspended("x", "n1", busy=0.1),
        suspended("y", "n1", busy=0.15),
    ]
    assert trials(jobs) == {"x": "a", "y": "b"}


def test_a_job_that_was_just_moved_is_not_moved_for_a_trial() -> None:
    """An attempt rests first, as a move costs a save and a start; beside whom it sits it may go."""
    for started_s_ago, host in ((599.0, "a"), (600.0, "b")):
        jobs = [
            seated("a", "n1", busy=0.6),
            seated("b", "n2", busy=0.2),
            suspended("guest", "n1", busy=0.1, started_s_ago=started_s_ago),
        ]
        assert trials(jobs) == {"guest": host}


def after_trial(
    ago_s: float, *, host_rate: float, guest_rate: float, was_packed: bool = True
) -> tuple[tuple[Decision, ...], Pair]:
    """What a pass decides of two that began their trial so long ago, and what it holds of it.

    host_rate, guest_rate: measured packed; each made 2 alone.
    """
    host = seated("host", "n1", busy=0.3)
    guest = job_with(seated("guest", "n1", busy=0.3), is_packed=True)
    marks = {
        JobId(name): Mark(
            attempt=0,
            step=100,
            gpu_s=100.0,
            is_packed=was_packed,
            alone_rate=2.0,
            packed_rate=rate,
        )
        for name, rate in (("host", host_rate), ("guest", guest_rate))
    }
    memory = Memory(marks=marks, pairs={"guest|host": Pair(since_s=NOW_S - ago_s)}, looked_at=10**9)
    found = policy("gandiva").allocate(one_gpu_nodes([host, guest]), msgspec.msgpack.encode(memory))
    return found.decisions, msgspec.msgpack.decode(found.memory, type=Memory).pairs["guest|host"]


def test_a_trial_is_judged_by_what_both_make_of_their_turns() -> None:
    """Kept above 1, the mean of packed over alone; at 1 or less the guest is put aside."""
    for host_rate, guest_rate, is_parted in ((1.6, 0.5, False), (1.4, 0.5, True), (1.0, 1.0, True)):
        decisions, pair = after_trial(60.0, host_rate=2.0 * host_rate, guest_rate=2.0 * guest_rate)
        stopped = [each.job_id for each in decisions if isinstance(each, Suspend)]
        assert stopped == (["guest"] if is_parted else [])
        assert len(decisions) == len(stopped)
        assert pair.gain == pytest.approx((host_rate + guest_rate) / 2)


def judged(ago_s: float, *, was_packed: bool = True) -> float | None:
    """The gain that is held of a trial that began so long ago; packed both make half."""
    _, pair = after_trial(ago_s, host_rate=1.0, guest_rate=1.0, was_packed=was_packed)
    return pair.gain


@pytest.mark.parametrize(("ago_s", "gain"), [(0.0, None), (59.0, None), (60.0, 0.5)])
def test_a_trial_lasts_a_slice_before_it_is_judged(ago_s: float, gain: float | None) -> None:
    """However soon both have told how fast they are side by side."""
    assert judged(ago_s) == gain


def test_a_trial_is_not_judged_by_what_an_earlier_one_measured() -> None:
    """What is measured of a pack begins anew with it: of the last one, with another job, nothing
    is left; after three slices without a word the trial is over."""
    assert judged(60.0, was_packed=False) is None
    assert judged(179.0, was_packed=False) is None
    assert judged(180.0, was_packed=False) == 0.0


# --- turns and moves ----------------------------------------------------------------------------

PLAIN = "gandiva:packs=false"


def test_the_next_turn_is_whose_that_has_waited_longest() -> None:
    """Round robin: not by name, nor by who was suspended last."""
    jobs = [
        seated("host", "n1", busy=0.5, since_s=300.0),
        suspended("a", "n1", since_s=60.0),
        suspended("b", "n1", since_s=180.0),
        suspended("c", "n1", since_s=120.0),
    ]
    found = policy(PLAIN).allocate(one_gpu_nodes(jobs), b"")
    assert [each.job_id for each in found.decisions if isinstance(each, Resume)] == ["b"]
    assert [each.job_id for each in found.decisions if isinstance(each, Suspend)] == ["host"]


def test_vacated_gpus_go_to_whom_has_waited_longest() -> None:
    """One GPU is free elsewhere: of those that wait for their turn the first takes it."""
    jobs = [
        seated("host", "n1", busy=0.5),
        suspended("a", "n1", since_s=10.0),
        suspended("b", "n1", since_s=50.0),
    ]
    found = policy(PLAIN).allocate(one_gpu_nodes(jobs, idle=["n2"]), b"")
    assert [each.job_id for each in found.decisions if isinstance(each, Migrate)] == ["b"]


def test_a_newcomer_takes_turns_on_the_least_loaded_gpu() -> None:
    """Step 4 of algorithm 1: where one job sits, not where two do, whatever their names."""
    jobs = [
        seated("a", "n1", busy=0.5, since_s=300.0),
        job_with(seated("a2", "n1", busy=0.5, since_s=300.0), is_packed=True),
        seated("b", "n2", busy=0.5, since_s=300.0),
        make_job_view("new"),
    ]
    found = policy(PLAIN).allocate(one_gpu_nodes(jobs), b"")
    [start] = [each for each in found.decisions if isinstance(each, Start)]
    assert [placement.node for placement in start.placements] == ["n2"]


def test_the_newest_workers_make_room_first() -> None:
    """They stand farthest from the base gang; and no more of them go than the newcomer needs."""
    placed = [make_worker_view("e", n, "n1", is_flexible=n > 0) for n in range(4)]
    job = make_job_view("e", state=JobState.RUNNING, workers=(1, 4), placed=placed)
    node = make_node_view("n1", gpus=4, workers=placed)
    snapshot = make_snapshot(nodes=[node], jobs=[job, make_job_view("new", gpus_per_worker=2)])
    found = policy("gandiva").allocate(snapshot, b"")
    [resize] = [each for each in found.decisions if isinstance(each, Resize)]
    assert resize.removed_workers == (2, 3)


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


def test_half_a_day_of_unsaved_work_outlives_an_overload() -> None:
    """A job that never saves and takes turns for a while ends no later than without packing."""
    ends: list[float] = []
    for knobs in ("", ":packs=false"):
        cell = Cell(nodes=2, knobs=knobs, gpu_memory_bytes=10)
        cell.submit("host", gpus=4, work_s=80_000.0, busy=0.1, memory_bytes=3)
        cell.submit(
            "guest", at_s=2.0, gpus=4, work_s=52_000.0, busy=0.15, memory_bytes=5, saves=False
        )
        cell.submit("hot1", at_s=50_000.0, gpus=4, work_s=6_000.0, busy=0.95, memory_bytes=8)
        cell.submit("hot2", at_s=50_001.0, gpus=4, work_s=1_500.0, busy=0.95, memory_bytes=8)
        cell.until(120_000.0)
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
