"""No job has more workers than it can use, whatever a policy decides."""

from __future__ import annotations

from msgspec.structs import replace

from common.messages import OrderPhase
from common.model import NodeName, WorkerRange
from coordinator.engine.invariants import size_faults
from coordinator.policies.contract.decisions import Placement, Resize
from tests.engine.house import House


def more(count: int) -> tuple[Placement, ...]:
    """Flexible workers on a node of their own."""
    return (Placement(node=NodeName("t1"), worker_count=count, is_flexible=True),)


def test_a_growth_beyond_what_a_job_can_use_is_refused() -> None:
    """A decision of a stale picture changes nothing; up to the limit, counted with those that it
    releases, a job grows."""
    house = House()
    job = house.submit(workers=(1, 3), gpus_per_worker=2)
    house.start(job, "t0")
    house.wait(10.0)
    too_many = Resize(job_id=job.job_id, added=more(3), reason="room")
    assert house.refusals(too_many) == ["4 workers are more than it can use"]
    assert len(job.workers) == 1
    house.decide(Resize(job_id=job.job_id, added=more(2), reason="room"))
    house.wait(10.0)
    assert job.running_workers == 3
    [flexible, *_] = [index for index, worker in job.workers.items() if worker.is_flexible]
    swap = Resize(job_id=job.job_id, removed_workers=(flexible,), added=more(2), reason="room")
    assert house.refusals(swap) == ["4 workers are more than it can use"]
    assert house.engine.check() == []


def test_more_workers_than_a_job_can_use_are_a_fault() -> None:
    """The engine's own check tells of those that count, not of one that was told to stop."""
    house = House()
    job = house.submit(workers=(1, 2), gpus_per_worker=2)
    house.start(job, "t0", flexible=("t1",))
    house.wait(10.0)
    assert job.running_workers == 2
    job.spec = replace(job.spec, workers=WorkerRange(min=1, max=1))
    assert size_faults(house.engine.state) == ["job j has 2 workers, at most 1"]
    job.workers[1].order = OrderPhase.RESERVE
    assert size_faults(house.engine.state) == []
