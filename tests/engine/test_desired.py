"""Orders name nodes; what a node is to be is made when the order leaves, and says all by then."""

from __future__ import annotations

from common.messages import DesiredState, OrderPhase
from common.model import JobId, NodeName, WorkerKey
from coordinator.engine.commands import PushDesired
from coordinator.engine.events import JobCancelRequested
from coordinator.sim.cluster import Delays
from tests.engine.house import House

T0 = NodeName("t0")


def test_a_node_hears_of_several_changes_of_an_instant_once() -> None:
    """Two gangs are ready at once: the node obeys the last order of the instant, which is whole."""
    house = House(training=3, delays=Delays(ready_s=60.0))
    for name, other in (("a", "t1"), ("b", "t2")):
        house.start(house.submit(name, workers=(2, 2), gpus_per_worker=2), "t0", other)
    heard: list[DesiredState] = []
    obey = house.sim.nodes[T0].obey

    def listen(desired: DesiredState) -> None:
        heard.append(desired)
        obey(desired)

    house.sim.nodes[T0].obey = listen  # type: ignore[method-assign]  # somebody listens in
    before = house.node("t0").generation
    house.wait(60.0)
    assert [order.phase for order in heard[-1].workers] == [OrderPhase.RUN, OrderPhase.RUN]
    assert heard[-1].generation == before + 2
    assert len(heard) == 1


def test_an_order_says_what_is_wanted_when_it_leaves() -> None:
    """A job starts, then ends: whoever asks after both sends the stop along with the start."""
    house = House()
    job = house.submit("a", gpus_per_worker=2)
    house.toggle_deaf(T0)
    house.start(job, "t0")
    outcome = house.engine.handle(
        JobCancelRequested(job_id=job.job_id, by="u"), now_s=house.sim.loop.now_s
    )
    assert PushDesired(T0) in outcome.commands
    desired = house.engine.desired(T0)
    assert desired.generation == house.node("t0").generation
    assert [order.key for order in desired.workers] == [stop.key for stop in desired.stops]


def test_a_holder_that_was_not_marked_is_a_stale_tally() -> None:
    """Whoever gives GPUs away without marking the node is told by the engine's own check."""
    house = House()
    assert house.engine.check() == []
    house.node("t0").gpus[0].holder = WorkerKey(JobId("x"), 1, 0)
    assert any("stale tally" in fault for fault in house.engine.check())
