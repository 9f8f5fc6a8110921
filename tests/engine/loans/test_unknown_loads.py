"""A load that is unknown is not zero: nothing is lent on it, and what is lent comes home for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from common.model import Mode, NodeName, NodeRole
from coordinator.engine.engine import decode_state
from coordinator.engine.state.events import (
    LeaderStarted,
    LoadMeasured,
    LoadUnknown,
    LoanPassDue,
    OperatorAction,
    OperatorAsked,
)
from coordinator.engine.state.tables import LoanEntry
from tests.draws import pick, words
from tests.harness.cluster.engine import CHAT
from tests.harness.cluster.scripted_nodes import Lending, service
from tests.harness.cluster.scripted_nodes import settings as engine_settings

LATE = "status 401 Unauthorized"
UNKNOWN_LOAD_S = 120.0
PERIOD_S = 10.0


class Unread(Lending):
    """Nodes that carry 10 requests a second each, and whose pages become unreadable."""

    def __init__(self, nodes: int = 3, *, mode: Mode = Mode.ACT, wanting: int = 6) -> None:
        super().__init__(nodes)
        self.settings = engine_settings(service(mode=mode))
        self.handle(LeaderStarted(epoch=1, holder="t", settings=self.settings))
        for name in self.names:
            self.report(name, NodeRole.SERVING)
        for number in range(wanting):
            self.submit(f"w{number}")
        self.load = 0.0

    def unread(self, *names: NodeName, last_load: float | None = 0.0) -> None:
        """The pages of these nodes cannot be read from now on."""
        for name in names:
            self.handle(LoadUnknown(node=name, why=LATE, unknown_s=0.0, last_load=last_load))

    def sample(self) -> None:
        """A load period is over; of the load nothing is measured where no page is read."""
        self.now_s += PERIOD_S
        unknown, nodes = self.engine.state.unknown_loads, self.engine.state.nodes.values()
        serving = [node.name for node in nodes if node.role == NodeRole.SERVING]
        is_known = not serving or any(name not in unknown for name in serving)
        self.handle(LoadMeasured(service=CHAT, load=self.load, is_known=is_known))

    def steady(self, load: float) -> None:
        """This load for so long that it is not taken for the beginning of a rise."""
        self.load = load
        for _ in range(25):
            self.sample()

    def pass_over(self) -> list[NodeName]:
        """A loan pass; the nodes that it lends, each of which begins its loan."""
        before = {name for name in self.names if self.node(name).lease is not None}
        self.handle(LoanPassDue())
        fresh = [n for n in self.names if self.node(n).lease is not None and n not in before]
        for name in fresh:
            for role in (NodeRole.DRAINING, NodeRole.ON_LOAN):
                self.report(name, role)
        return fresh

    @property
    def lent(self) -> list[NodeName]:
        """Nodes with a lease."""
        return [name for name in self.names if self.node(name).lease is not None]

    def told(self, subject: str) -> list[tuple[str, str]]:
        """What the cell's story says of loads of a node or a service."""
        stories = self.engine.state.stories
        return [(s.what, s.reason) for s in stories if s.subject == subject and "load" in s.what]

    def loan(self, name: NodeName) -> LoanEntry:
        """Its only loan."""
        [found] = [loan for loan in self.engine.state.loans.values() if loan.node == name]
        return found


def test_nothing_is_lent_of_a_service_of_which_no_page_is_read() -> None:
    """Though its last known load is zero; and it says so in its reasons and its story."""
    cell = Unread()
    cell.sample()
    cell.unread(*cell.names)
    cell.sample()
    assert cell.pass_over() == []
    why = " ".join(cell.engine.explain.why_kept(cell.names[0]))
    assert f"the load of 3 of 3 serving nodes is unknown (i0: {LATE})" in why
    assert "nodes of an unknown load count as full" in why
    [(what, reason)] = cell.told(CHAT)
    assert what == "load unknown"
    assert LATE in reason
    assert cell.told("i0") == [
        ("load unknown", f"no metrics page was read for 0 s: {LATE}; last known 0 per second")
    ]


def test_lent_nodes_come_home_when_the_load_is_unknown_for_too_long() -> None:
    """Not before; asked for once by the load's own period; and none is lent until it is known."""
    cell = Unread()
    cell.sample()
    lent = cell.pass_over()
    assert len(lent) == 3
    cell.report(lent[0], NodeRole.VACATING)
    cell.report(lent[0], NodeRole.SERVING)
    away = lent[1:]
    cell.unread(lent[0])
    began_s = cell.now_s
    while cell.now_s + PERIOD_S < began_s + UNKNOWN_LOAD_S:
        cell.sample()
        assert cell.pass_over() == []
        assert cell.lent == away
    cell.now_s += PERIOD_S
    outcome = cell.handle(LoadMeasured(service=CHAT, load=0.0, is_known=False))
    assert outcome.needs_loan_pass
    cell.handle(LoanPassDue())
    assert cell.lent == []
    for name in away:
        assert f"unknown for more than {UNKNOWN_LOAD_S:g} s" in cell.loan(name).reclaim_reason
        assert LATE in cell.loan(name).reclaim_reason
        cell.report(name, NodeRole.VACATING)
        cell.report(name, NodeRole.SERVING)
    cell.unread(*away)
    cell.sample()
    assert cell.pass_over() == []
    for name in cell.names:
        cell.handle(LoadUnknown(node=name, is_read=True))
    cell.sample()
    assert [what for what, _ in cell.told(CHAT)][-1] == "load known again"
    assert len(cell.pass_over()) == 3


def test_no_loan_rests_on_the_part_of_a_load_that_is_unknown() -> None:
    """A node that is not read is not lent and counts as full; of the others what is spare is lent,
    but as many as are unknown stay."""
    cell = Unread(4)
    cell.unread(cell.names[0], last_load=0.0)
    cell.sample()
    assert cell.pass_over() == cell.names[1:3]
    busy = Unread(4)
    busy.steady(16.0)
    busy.unread(busy.names[0], last_load=4.0)
    busy.sample()
    # Of 16 two nodes are enough; 12 that are known, and one that is full, need three.
    assert busy.pass_over() == busy.names[1:2]


def test_a_part_that_is_unknown_for_too_long_calls_no_more_home_than_it_may_need() -> None:
    """One of two that serve counts as full then: one node comes home for it, and one stays lent."""
    cell = Unread(4, wanting=2)
    cell.steady(16.0)
    assert cell.pass_over() == cell.names[:2]
    cell.unread(cell.names[2], last_load=4.0)
    for _ in range(round(2 * UNKNOWN_LOAD_S / PERIOD_S)):
        cell.sample()
        cell.pass_over()
    [lent] = cell.lent
    assert lent in cell.names[:2]


def test_a_recommendation_does_not_outlive_what_is_known_of_the_load() -> None:
    """It is withdrawn by a loan pass that is asked for at once, and cannot be approved before."""
    cell = Unread(mode=Mode.RECOMMEND)
    cell.sample()
    cell.handle(LoanPassDue())
    advised = sorted(cell.engine.state.recommendations)
    assert advised == cell.names
    outcome = cell.handle(LoadUnknown(node=advised[0], why=LATE, last_load=0.0))
    assert outcome.needs_loan_pass
    approve = OperatorAsked(action=OperatorAction.APPROVE_LOAN, by="ann", target=advised[0])
    cell.handle(approve)
    assert cell.lent == []
    assert any(s.what == "not lent" and LATE in s.reason for s in cell.engine.state.stories)
    cell.unread(*advised[1:])
    cell.handle(LoanPassDue())
    assert cell.engine.state.recommendations == {}


def test_a_service_that_is_only_watched_notes_no_loan_of_an_unknown_load() -> None:
    """And would take back what it would have lent."""
    cell = Unread(mode=Mode.OBSERVE)
    cell.sample()
    cell.handle(LoanPassDue())
    entry = cell.engine.state.services[CHAT]
    assert entry.shadow_loan_count == 3
    cell.unread(*cell.names)
    for _ in range(14):
        cell.sample()
        cell.handle(LoanPassDue())
    assert (entry.shadow_loan_count, entry.shadow_reclaim_count) == (3, 3)


def test_a_new_leader_goes_on_counting_from_when_the_load_became_unknown() -> None:
    """Its state is saved, and says of no load that it is known again before a node was heard."""
    cell = Unread()
    cell.sample()
    cell.unread(*cell.names)
    cell.sample()
    saved = decode_state(cell.engine.encode_state())
    assert saved.unknown_loads == cell.engine.state.unknown_loads
    cell.handle(LeaderStarted(epoch=2, holder="u", settings=cell.settings))
    cell.sample()
    for name in cell.names:
        cell.report(name, NodeRole.SERVING)
    cell.unread(*cell.names)
    assert [what for what, _ in cell.told(CHAT)] == ["load unknown"]
    assert [what for what, _ in cell.told("i0")] == ["load unknown"]


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_node_that_does_not_serve_has_no_unknown_load(is_removed: bool) -> None:
    """Its service is not kept from lending by it."""
    cell = Unread()
    cell.sample()
    name = cell.names[0]
    cell.unread(name)
    if is_removed:
        cell.handle(LoadUnknown(node=name))
        assert [what for what, _ in cell.told(name)][-1] == "load known again"
    cell.report(name, NodeRole.QUARANTINED)
    cell.sample()
    assert cell.pass_over() == cell.names[1:]


KINDS = ("unread", "read", "sample", "pass", "home")
STEPS = words(0, 40).map(
    lambda story: [(KINDS[word % len(KINDS)], word // len(KINDS) % 4) for word in story]
)


@pytest.mark.slow
@given(steps=STEPS, load=pick(0.0, 9.0, 25.0))
@settings(max_examples=30, deadline=None)
def test_whatever_becomes_known_and_unknown_no_loan_rests_on_what_is_not(
    steps: list[tuple[str, int]], load: float
) -> None:
    """No node of an unknown load is lent, none at all while no page is read, and none is lent any
    more when that has lasted for `unknown_load_s`."""
    cell = Unread(4, wanting=3)
    cell.steady(load)
    for what, number in [*steps, *[("sample", 0), ("pass", 0)]]:
        name, state = cell.names[number], cell.engine.state
        is_serving = cell.node(name).role == NodeRole.SERVING
        if what == "unread" and is_serving:
            cell.unread(name, last_load=load / 4)
        elif what == "read":
            cell.handle(LoadUnknown(node=name, is_read=True))
        elif what == "sample":
            cell.sample()
        elif what == "home" and not is_serving:
            for role in (NodeRole.VACATING, NodeRole.WARMING, NodeRole.SERVING):
                cell.report(name, role)
        elif what == "pass":
            serving = [n for n in cell.names if cell.node(n).role == NodeRole.SERVING]
            unknown = {n: state.unknown_loads[n] for n in serving if n in state.unknown_loads}
            fresh = cell.pass_over()
            assert not unknown.keys() & set(fresh)
            if serving and len(unknown) == len(serving):
                assert fresh == []
                if all(one.is_over for one in unknown.values()):
                    assert cell.lent == []
