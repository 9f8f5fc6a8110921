"""A journal under other settings: the same settings give nearly what happened, others what they
would have decided. The journals are of simulated cells, so that the truth is known.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.errors import ConfigError
from common.model import ArraySpec, JobChange, JobId, Mode, NodeName, ServiceName
from coordinator.engine.engine import Engine
from coordinator.engine.record import Entry, Record
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import (
    ArrayThrottled,
    Event,
    JobCancelRequested,
    JobChanged,
    JobsHeld,
    JobsReleased,
    JobsRequeued,
    JobSubmitted,
    LeaderStarted,
    OperatorAction,
    OperatorAsked,
    PassDue,
)
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.plan.replay import replay
from coordinator.plan.story import read, with_changes
from coordinator.policies.registry import policy
from coordinator.sim.run.cluster import Delays
from coordinator.sim.run.outages import Crash
from coordinator.workloads.shaping import linear
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import CHAT, EngineHarness

Records = list[tuple[int, Record]]
SERVICE = ServiceSettings(
    name=CHAT,
    capacity_per_node=10.0,
    mode=Mode.ACT,
    reclaim_deadline_s=300.0,
    min_serving=0,
    headroom_ratio=0.0,
    hold_off_s=0.0,
    device_free_p99_s=3.0,
    warm_up_p99_s=10.0,
)


class Recorded:
    """A simulated cell whose engine writes a journal; it begins with a leader and its settings."""

    def __init__(self, name: str = "sjf", *, training: int = 1, services: bool = False) -> None:
        settings = EngineSettings(policy=name, services=(SERVICE,) if services else ())
        settings = replace(settings, min_runtime_s=0.0)
        self.records: Records = []
        self.cell = EngineHarness(
            training=training,
            inference=2 if services else 0,
            settings=settings,
            delays=Delays(report_s=1.0, drain_s=2.0, device_free_s=3.0, warm_up_s=10.0),
        )
        self.settings = settings
        self.cell.engine.policy = policy(name)
        # The journal of a cell begins with nothing: its nodes report again to a new leader.
        engine = Engine(EngineSettings())
        self.cell.sim.engine = self.cell.engine = engine
        self._handle = engine.handle
        engine.handle = self._record  # type: ignore[method-assign]  # a tap, not a mock
        self.cell.sim.handle(LeaderStarted(epoch=2, holder="c1", settings=settings))
        for node in self.cell.sim.nodes.values():
            node.report_soon()
        self.cell.wait(2.0)

    def _record(self, event: Event, *, now_s: float) -> Outcome:
        outcome = self._handle(event, now_s=now_s)
        number = len(self.records) + 1
        record = Record(
            number=number,
            after=number - 1,
            epoch=2,
            writer="c1",
            entries=(Entry(now_s, event),),
            decisions=outcome.decisions,
        )
        self.records.append((number, record))
        return outcome


def busy(recorded: Recorded) -> Recorded:
    """A long job first, then short ones, on one node; a cancel, and the last one ends."""
    cell = recorded.cell
    for number, work_s in enumerate((400.0, 300.0, 50.0, 40.0, 30.0)):
        cell.submit(f"j{number}", work_s=work_s)
        cell.wait(5.0)
    cell.sim.handle(JobCancelRequested(job_id=JobId("j1"), by="u"))
    cell.wait(800.0)
    cell.sim.handle(PassDue())  # a journal goes on where nothing happens
    return recorded


def test_the_same_settings_give_what_happened() -> None:
    """Every figure, where nodes are as quick as those of the journal and jobs have their work."""
    story = read(busy(Recorded("fifo")).records)
    assert story.differences == 0
    happened, simulated = replay(story, policy="", changes={})
    assert happened.jobs_finished == 4
    assert simulated.jobs_finished == simulated.jobs_compared == 4
    assert happened.jct_s.mean is not None
    assert simulated.jct_s.mean == pytest.approx(happened.jct_s.mean, rel=0.02)
    assert simulated.queueing_s.mean == pytest.approx(happened.queueing_s.mean, rel=0.02)
    assert simulated.preemptions == happened.preemptions == 0


def test_another_policy_decides_what_it_would_have() -> None:
    """Shortest first ends the short jobs sooner, and the long one no later than all work."""
    story = read(busy(Recorded("fifo")).records)
    _, simulated, changed = replay(story, policy="sjf", changes={})
    assert changed.jobs_finished == simulated.jobs_finished
    assert simulated.jct_s.p50 is not None
    assert changed.jct_s.p50 is not None
    srtf = replay(story, policy="srtf", changes={})[2]
    assert srtf.preemptions > 0
    assert srtf.jct_s.p50 is not None
    assert srtf.jct_s.p50 < 0.5 * simulated.jct_s.p50


def test_loans_orders_and_crashes_are_played() -> None:
    """A loan and its recall come again, and a node that lost power ends its job there again."""
    recorded = Recorded("aryl", services=True)
    cell = recorded.cell
    cell.sim.load(ServiceName(CHAT), ((cell.sim.loop.now_s + 30.0 * n, 0.1) for n in range(40)))
    for number in range(3):
        cell.submit(f"j{number}", work_s=400.0)
    cell.wait(400.0)
    recall = OperatorAsked(action=OperatorAction.RECALL, by="ops/ada", target="")
    cell.sim.handle(recall)
    cell.wait(200.0)
    cell.sim.crash([Crash(node=NodeName("t0"), at_s=cell.sim.loop.now_s, down_s=30.0)])
    cell.wait(900.0)
    cell.sim.handle(PassDue())
    story = read(recorded.records)
    happened, simulated = replay(story, policy="", changes={})
    assert happened.loans > 0
    assert happened.reclaims > 0
    assert simulated.loans == happened.loans
    assert simulated.reclaims == happened.reclaims
    assert simulated.preemptions == happened.preemptions
    assert simulated.lent_gpu_h == pytest.approx(happened.lent_gpu_h, rel=0.1)
    assert simulated.jobs_finished == happened.jobs_finished
    assert happened.jct_s.p95 is not None
    assert simulated.jct_s.p95 == pytest.approx(happened.jct_s.p95, rel=0.02)
    _, _, without = replay(story, policy="", changes={"is_loaning": "false"})
    assert (without.loans, without.lent_gpu_h) == (0, 0.0)


def test_arrays_and_orders_of_people_are_played() -> None:
    """Tasks that enter later have their real work, and orders come again at their instants.

    Those that do not fit any more under another policy are counted.
    """
    recorded = Recorded("fifo")
    cell = recorded.cell
    spec = make_spec(
        "a",
        gpus_per_worker=8,
        expected_runtime_s=500.0,
        array=ArraySpec(indices="0-9", throttle=1),
    )
    for index in range(10):
        cell.sim.runtime.add(
            JobId(f"a_{index}"), work_s=40.0, speedup=linear(spec.workers), gpus_per_worker=8
        )
    a, b, by = JobId("a"), JobId("b"), "trace/u"
    cell.sim.handle(JobSubmitted(job_id=a, spec=spec, tenant="trace", user="u"))
    cell.submit("b", work_s=100.0)
    orders: list[Event] = [
        JobsHeld(job_ids=(b,), by=by),
        JobsRequeued(job_ids=(JobId("a_0"),), by=by),
        JobCancelRequested(job_id=a, by=by, indices="5,7-8"),
        ArrayThrottled(job_id=a, by=by, throttle=3),
        JobsHeld(job_ids=(a,), by=by),
        JobChanged(job_id=b, by=by, change=JobChange(priority=1)),
        JobsReleased(job_ids=(a, b), by=by),
    ]
    for order in orders:
        cell.wait(9.0)
        cell.sim.handle(order)
    cell.wait(900.0)
    cell.sim.handle(PassDue())
    story = read(recorded.records)
    assert len(story.ends) == 8  # also where one task ends as the next one enters
    happened, simulated = replay(story, policy="", changes={})
    assert happened.jobs_finished == simulated.jobs_finished == simulated.jobs_compared == 8
    assert simulated.orders_unfit == happened.orders_unfit == 0
    assert happened.jct_s.mean is not None
    assert simulated.jct_s.mean == pytest.approx(happened.jct_s.mean, rel=0.05)
    _, _, changed = replay(story, policy="srtf", changes={})
    assert changed.jobs_finished == 8
    assert changed.orders_unfit > 0  # the shorter b runs and cannot be held


def test_a_span_begins_where_the_cell_was() -> None:
    """With --since the first column counts from there, and jobs that ran then go on."""
    recorded = busy(Recorded("fifo"))
    whole = read(recorded.records)
    late = read(recorded.records, since_s=whole.began_s + 450.0)
    happened, simulated = replay(late, policy="", changes={})
    assert 0 < happened.jobs_finished < replay(whole, policy="", changes={})[0].jobs_finished
    assert simulated.jobs_finished == happened.jobs_finished


def test_what_cannot_be_replayed_says_why() -> None:
    """A journal without its start, a span without records, values that no setting has."""
    records = Recorded().records
    with pytest.raises(ConfigError, match="begins with record 2"):
        read(records[1:])
    with pytest.raises(ConfigError, match="no record in this span"):
        read(records, since_s=1e9)
    settings = EngineSettings()
    with pytest.raises(ConfigError, match=r"--set: .*lease_ttl_s"):
        with_changes(settings, policy="", changes={"lease_ttl_s": "-1"})
    with pytest.raises(ConfigError, match="nosuch"):
        with_changes(settings, policy="", changes={"nosuch": "1"})
    found = with_changes(
        settings, policy="fifo", changes={"lease_ttl_s": "60", "is_scaling": "true"}
    )
    assert (found.policy, found.lease_ttl_s) == ("fifo:is_scaling=true", 60.0)
