"""Orders name nodes; what a node is to be is made when the order leaves, and says all by then."""

from __future__ import annotations

from msgspec.structs import replace

from common.messages import DesiredState, OrderPhase
from common.model import JobId, NodeName, NodeRole, Pool, WorkerKey
from coordinator.engine.state.commands import PushDesired
from coordinator.engine.state.events import JobCancelRequested
from coordinator.sim.run.cluster import Delays, NodeSpec, PretendNode
from coordinator.sim.run.loop import Loop
from tests.harness.cluster.engine import EngineHarness

T0 = NodeName("t0")


def test_a_node_hears_of_several_changes_of_an_instant_once() -> None:
    """Two gangs are ready at once: the node obeys the last order of the instant, which is whole."""
    harness = EngineHarness(training=3, delays=Delays(ready_s=60.0))
    for name, other in (("a", "t1"), ("b", "t2")):
        harness.start(harness.submit(name, workers=(2, 2), gpus_per_worker=2), "t0", other)
    heard: list[DesiredState] = []
    obey = harness.sim.nodes[T0].obey

    def listen(desired: DesiredState) -> None:
        heard.append(desired)
        obey(desired)

    harness.sim.nodes[T0].obey = listen  # type: ignore[method-assign]  # somebody listens in
    before = harness.node("t0").desired.generation
    harness.wait(60.0)
    assert [order.phase for order in heard[-1].workers] == [OrderPhase.RUN, OrderPhase.RUN]
    assert heard[-1].generation == before + 2
    assert len(heard) == 1


def test_an_order_says_what_is_wanted_when_it_leaves() -> None:
    """A job starts, then is cancelled: an order made after both has the stop and not the start."""
    harness = EngineHarness()
    job = harness.submit("a", gpus_per_worker=2)
    harness.toggle_deaf(T0)
    harness.start(job, "t0")
    outcome = harness.engine.handle(
        JobCancelRequested(job_id=job.job_id, by="u"), now_s=harness.sim.loop.now_s
    )
    assert PushDesired(T0) in outcome.commands
    desired = harness.engine.desired(T0)
    assert desired.generation == harness.node("t0").desired.generation
    assert desired.workers == ()
    assert [stop.key for stop in desired.stops] == [WorkerKey(job.job_id, 1, 0)]


def test_a_worker_is_told_the_same_order_until_its_job_changes() -> None:
    """A node that hears of another job has nothing to do for this one, and sees it at a glance."""
    harness = EngineHarness(training=2)
    first = harness.submit("a", gpus_per_worker=2)
    harness.start(first, "t0")
    before = harness.engine.desired(T0).workers
    harness.start(harness.submit("b", gpus_per_worker=2), "t0")
    after = harness.engine.desired(T0).workers
    assert len(after) == len(before) + 1
    assert after[0] is before[0]
    harness.engine.handle(
        JobCancelRequested(job_id=first.job_id, by="u"), now_s=harness.sim.loop.now_s
    )
    assert harness.engine.desired(T0).workers[0] is not before[0]


def test_a_job_that_was_not_marked_has_stale_orders() -> None:
    """Whoever changes what orders say without marking the job is told by the engine's check."""
    harness = EngineHarness()
    job = harness.submit("a", gpus_per_worker=2)
    harness.start(job, "t0")
    assert harness.engine.desired(T0).workers
    job.attempt.endpoint = "elsewhere:1"
    assert any("stale orders" in fault for fault in harness.engine.check())


def test_a_worker_that_may_run_before_it_is_ready_runs_once_it_is() -> None:
    """Its order is the same one by then, and still has to be carried out."""
    harness = EngineHarness(training=1)
    harness.start(harness.submit("a", gpus_per_worker=2), "t0")
    (order,) = harness.engine.desired(T0).workers
    loop, started = Loop(), list[WorkerKey]()
    spec = NodeSpec(name=T0, home_pool=Pool.TRAINING, gpu_type="H100", gpus=8)
    node = PretendNode(
        spec,
        loop,
        Delays(ready_s=5.0, start_s=3.0),
        tell=lambda report: None,
        started=lambda told: started.append(told.key),
        stopped=lambda key: None,
    )
    to_run = replace(order, phase=OrderPhase.RUN)
    for generation in (1, 2):
        node.obey(
            DesiredState(
                node=T0,
                epoch=1,
                generation=generation,
                role=NodeRole.TRAINING,
                workers=(to_run,),
            )
        )
    loop.run()
    assert (started, loop.now_s) == ([order.key], 8.0)


def test_a_holder_that_was_not_marked_is_a_stale_tally() -> None:
    """Whoever gives GPUs away without marking the node is told by the engine's own check."""
    harness = EngineHarness()
    assert harness.engine.check() == []
    harness.node("t0").gpus[0].holder = WorkerKey(JobId("x"), 1, 0)
    assert any("stale tally" in fault for fault in harness.engine.check())
