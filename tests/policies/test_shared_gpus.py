"""After a switch from a policy whose jobs take turns: GPUs that several jobs share come free with
the last of them, under policies that share none."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import GpuUuid, JobState, NodeName
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.pooling import pools
from coordinator.policies.registry import policy as bundle
from tests.harness.builders import make_job_view, make_node_view, make_snapshot, make_worker_view
from tests.policies.sharing_cell import DELAYS, Cell
from tests.tables import each_row

N0 = NodeName("n0")


def seated() -> ClusterSnapshot:
    """Two jobs on the same four GPUs of a node of eight; the third has the others."""
    gpus = tuple(GpuUuid(f"GPU-{number}") for number in range(8))
    jobs: list[JobView] = []
    for name, mine in (("one", gpus[:4]), ("other", gpus[:4]), ("third", gpus[4:])):
        worker = replace(make_worker_view(name, 0, "n0", gpus=4), gpu_uuids=mine)
        state = JobState.SUSPENDED if name == "other" else JobState.RUNNING
        jobs.append(make_job_view(name, state=state, gpus_per_worker=4, placed=(worker,)))
    workers = [worker for job in jobs for worker in job.placed]
    return make_snapshot(nodes=[make_node_view("n0", free_gpus=0, workers=workers)], jobs=jobs)


def test_shared_gpus_come_free_with_the_last_who_has_them() -> None:
    """And are taken again by the first who stays; the next one beside it takes nothing more."""
    snapshot = seated()
    floor = FreeGpus(snapshot)
    one, other, third = (job.placed for job in snapshot.jobs)
    floor.vacate(one)
    assert floor.free[N0] == 0
    floor.vacate((*other, *third))
    assert floor.free[N0] == 8
    assert floor.needed(other) == {N0: 4}
    assert floor.goes_on(other)
    assert floor.free[N0] == 4
    assert floor.needed(one) == {N0: 0}
    assert floor.goes_on(one)
    floor.stay(third)
    assert floor.free[N0] == 0


def test_whoever_shared_gpus_does_not_go_on_where_they_were_given_away() -> None:
    """Neither of them does, as each would take all four again."""
    snapshot = seated()
    floor = FreeGpus(snapshot)
    one, other, _ = (job.placed for job in snapshot.jobs)
    floor.vacate((*one, *other))
    floor.free[N0] -= 1
    assert not floor.goes_on(one)
    assert not floor.goes_on(other)


def test_shared_gpus_count_once_in_what_can_be_shared_out() -> None:
    """Eight of a node of eight, though its jobs have twelve between them."""
    snapshot = seated()
    floor = FreeGpus(snapshot)
    [pool] = pools(snapshot, floor)
    assert (pool.gpus, len(pool.jobs)) == (8, 3)
    assert floor.free == {N0: 0}


@each_row("policy", ["srtf", "tiresias:limits=10", "themis:lease_s=60", "afs"])
def test_nobody_is_stopped_in_vain_after_a_live_switch(policy: str) -> None:
    """Three jobs have the same GPUs: all of them leave for a start that is not refused."""
    cell = Cell(delays=DELAYS)
    for number in range(3):
        cell.submit(f"g{number}", work_s=9000.0, at_s=1.0 + number)
    cell.until(400.0)
    engine = cell.sim.engine
    on_seat = {job_id for job_id, job in engine.state.jobs.items() if job.workers}
    assert len(on_seat) == 3
    engine.policy = bundle(policy)
    cell.submit("short", work_s=30.0, at_s=410.0)
    cell.until(411.0)
    later = [made for at_s, made in cell.said if at_s >= 400.0]
    stops = {made.job_id for made in later if isinstance(made, Preempt)}
    starts = {made.job_id for made in later if isinstance(made, Start)}
    assert stops == on_seat
    assert len(starts) == 1
    cell.until(900.0)
    assert engine.state.counters.decisions_refused == 0
    assert cell.state("short") == JobState.SUCCEEDED
