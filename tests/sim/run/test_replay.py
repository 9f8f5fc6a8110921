"""A replay compares what was decided, not how much of it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from common.model import JobId, NodeName
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.record import Entry, Record
from coordinator.engine.record import replay as replay_record
from coordinator.engine.state.events import PassDue
from coordinator.policies.contract.decisions import Decision, Start
from coordinator.policies.registry import policy
from coordinator.sim.run.replay import Replay
from tests.harness.cluster.engine import EngineHarness
from tests.tables import each_row

Decisions = tuple[Decision, ...]


class Recorded:
    """A pass that starts two jobs on two nodes, as a journal keeps it."""

    def __init__(self) -> None:
        harness = EngineHarness()
        for name in ("one", "two"):
            harness.submit(name)
        self._settings = harness.engine.settings
        self._before = harness.engine.encode_state()
        self.now_s = harness.engine.state.now_s
        self.decisions = self.engine().handle(PassDue(), now_s=self.now_s).decisions

    def engine(self) -> Engine:
        """One that finds the cluster as the pass found it."""
        engine = Engine(self._settings, decode_state(self._before))
        engine.policy = policy("fifo")
        return engine

    def record(self, decisions: Decisions) -> Record:
        """The pass, with what is said to have come of it."""
        entries = (Entry(self.now_s, PassDue()),)
        return Record(
            number=1, after=0, epoch=1, writer="one", entries=entries, decisions=decisions
        )


def other_job(decisions: Decisions) -> Decisions:
    """The last one was of another job."""
    first, last = decisions
    assert isinstance(last, Start)
    return (first, replace(last, job_id=JobId("another")))


def other_node(decisions: Decisions) -> Decisions:
    """The last one was on another node."""
    first, last = decisions
    assert isinstance(last, Start)
    moved = tuple(replace(place, node=NodeName("elsewhere")) for place in last.placements)
    return (first, replace(last, placements=moved))


def other_order(decisions: Decisions) -> Decisions:
    """The same, the other way round."""
    return decisions[::-1]


def one_twice(decisions: Decisions) -> Decisions:
    """The first one again instead of the second."""
    return decisions[:1] * 2


def one_less(decisions: Decisions) -> Decisions:
    """Without the last."""
    return decisions[:1]


ODD = (other_job, other_node, other_order, one_twice, one_less)


@each_row("changed", ODD)
def test_other_decisions_are_a_difference_also_where_they_are_as_many(
    changed: Callable[[Decisions], Decisions],
) -> None:
    """Job, node and order count; the difference says what stood there, and what is decided now."""
    recorded = Recorded()
    told = changed(recorded.decisions)
    run = Replay(recorded.engine())
    run.take(7, recorded.record(told))
    [difference] = run.result().differences
    assert (difference.sequence, difference.at_s) == (7, recorded.now_s)
    assert (difference.recorded, difference.decided) == (told, recorded.decisions)


def test_the_same_decisions_are_no_difference() -> None:
    """Of both ways in which a record is run again."""
    recorded = Recorded()
    assert [type(decision) for decision in recorded.decisions] == [Start, Start]
    record = recorded.record(recorded.decisions)
    run = Replay(recorded.engine())
    run.take(7, record)
    assert run.result().differences == ()
    assert replay_record(recorded.engine(), record)


@each_row("changed", ODD)
def test_whoever_takes_over_sees_other_decisions_also_where_they_are_as_many(
    changed: Callable[[Decisions], Decisions],
) -> None:
    """A coordinator that rebuilds its state by a journal is told that it decides otherwise."""
    recorded = Recorded()
    assert not replay_record(recorded.engine(), recorded.record(changed(recorded.decisions)))
