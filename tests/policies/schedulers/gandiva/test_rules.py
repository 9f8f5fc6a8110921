"""Gandiva's own rules: whom it tries to pack first, and how far a job grows (OSDI'18, 3.4, 4.2)."""

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
from tests.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

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
    return replace(
        job,
        started_at_s=NOW_S - started_s_ago,
        suspended_at_s=NOW_S - since_s if state == JobState.SUSPENDED else None,
        progress_step=100,
        progress_gpu_s=100.0,
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
    guest = replace(seated("guest", "n1", busy=0.3), is_packed=True)
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
        replace(seated("a2", "n1", busy=0.5, since_s=300.0), is_packed=True),
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


# --- growing ------------------------------------------------------------------------------------


def elastic(*nodes: str, most: int = 8, resized_at_s: float | None = None) -> JobView:
    """A job that runs with its base gang of two, a worker of one GPU on each of these."""
    placed = [make_worker_view("e", number, node) for number, node in enumerate(nodes)]
    return make_job_view(
        "e",
        state=JobState.RUNNING,
        workers=(2, most),
        placed=placed,
        last_resized_at_s=resized_at_s,
    )


def grown(
    job: JobView,
    *,
    idle_s: float = 60.0,
    cooldown_s: float = 0.0,
    busy: int = 0,
    others: Sequence[JobView] = (),
) -> dict[str, int]:
    """Workers that it gets, by node, on two nodes of four GPUs that were idle for so long.

    others: jobs on the one GPU of a third node, n3.
    """
    nodes = [
        make_node_view(
            name,
            gpus=4,
            workers=(mine := [worker for worker in job.placed if worker.node == name]),
            free_gpus=4 - busy - len(mine),
        )
        for name in ("n1", "n2")
    ]
    theirs = [worker for other in others for worker in other.placed]
    nodes.append(make_node_view("n3", gpus=1, workers=theirs, free_gpus=0))
    memory = Memory(idle_since_s=NOW_S - idle_s)
    found = policy("gandiva").allocate(
        make_snapshot(nodes=nodes, jobs=[job, *others], resize_cooldown_s=cooldown_s),
        msgspec.msgpack.encode(memory),
    )
    return {
        placement.node: placement.worker_count
        for each in found.decisions
        if isinstance(each, Resize)
        for placement in each.added
    }


def test_a_job_grows_on_the_node_that_it_stands_on_only() -> None:
    """All of that server and none of another one, whatever is free there."""
    assert grown(elastic("n1", "n1")) == {"n1": 2}


def test_a_gang_on_two_nodes_does_not_grow() -> None:
    """Growth ends at one server: a gang that is spread already has none to grow on."""
    assert grown(elastic("n1", "n2")) == {}


def test_a_job_grows_to_what_it_can_use_of_what_is_free() -> None:
    """The least of both: its most workers, and the idle GPUs of its node."""
    assert grown(elastic("n1", "n1", most=3)) == {"n1": 1}
    assert grown(elastic("n1", "n1"), busy=1) == {"n1": 1}


def test_a_job_grows_after_an_idle_period_and_its_cooldown() -> None:
    """Not a second before GPUs were idle for `grow_after_s`, nor within a resize's cooldown."""
    assert grown(elastic("n1", "n1"), idle_s=59.0) == {}
    late = elastic("n1", "n1", resized_at_s=NOW_S - 99.0)
    assert grown(late, cooldown_s=100.0) == {}
    assert grown(late, cooldown_s=99.0) == {"n1": 2}


@pytest.mark.parametrize("since_s", [5.0, 90.0])
def test_nobody_grows_while_somebody_waits_for_a_turn(since_s: float) -> None:
    """A suspended job could compute on the idle GPUs as soon as it has rested, so that they are for
    it: whether its turn comes now or not, it has waited."""
    host = seated("host", "n3", busy=0.5, since_s=since_s)
    waits = suspended("waits", "n3", since_s=since_s, started_s_ago=100.0)
    assert grown(elastic("n1", "n1"), others=[host]) == {"n1": 2}
    assert grown(elastic("n1", "n1"), others=[host, waits]) == {}
