"""The modes of a service: observe follows what would be, recommend waits, act acts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import Mode, NodeName, NodeRole
from coordinator.engine.engine import decode_state
from coordinator.engine.state.events import (
    LoadMeasured,
    LoanPassDue,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
)
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.engine.state.tables import ServiceEntry
from coordinator.policies.contract.decisions import Advice, Recommend
from coordinator.policies.registry import policy
from tests.harness.cluster.engine import CHAT, EngineHarness


class Watched(EngineHarness):
    """Three serving nodes of 10 requests/s, and a job that would fill whatever is lent."""

    def __init__(self, mode: Mode) -> None:
        service = ServiceSettings(
            name=CHAT,
            capacity_per_node=10.0,
            mode=mode,
            min_serving=1,
            headroom_ratio=0.0,
            hold_off_s=0.0,
            reclaim_deadline_s=120.0,
            max_grace_s=60.0,
            device_free_p99_s=5.0,
            warm_up_p99_s=5.0,
        )
        super().__init__(
            training=1,
            inference=3,
            settings=EngineSettings(
                services=(service,), lease_ttl_s=30.0, loan_period_s=50.0, min_runtime_s=0.0
            ),
        )
        self.engine.policy = policy("aryl")
        self.submit("wide", workers=(1, 9), work_s=1e9)
        self._began = self.orders()

    def load(self, load: float, *, after_s: float = 60.0) -> None:
        """The load is measured, and a loan pass looks at it."""
        self.wait(after_s)
        self.sim.handle(LoadMeasured(service=CHAT, load=load))
        self.sim.handle(LoanPassDue())
        self.settle()
        assert self.engine.check() == []

    def orders(self) -> list[int]:
        """How often each inference node was ordered something."""
        return [self.node(f"i{n}").desired.generation for n in range(3)]

    def is_untouched(self) -> bool:
        """Whether no inference node was ordered anything since the beginning."""
        return self.orders() == self._began and not self.engine.state.loans

    @property
    def service(self) -> ServiceEntry:
        """The service as the engine has it."""
        return self.engine.state.services[CHAT]

    def counts(self) -> tuple[int, int, int]:
        """Shadow loans, shadow reclaims, and those of them that would have been late."""
        entry = self.service
        return entry.shadow_loan_count, entry.shadow_reclaim_count, entry.shadow_late_count

    def told(self, word: str) -> list[str]:
        """The subjects of the lines that say this."""
        return [line.subject for line in self.engine.state.stories if word in line.what]


def test_observe_follows_what_would_be_lent_and_taken_back_and_changes_nothing() -> None:
    """Each shadow loan is told once, comes home by the load, and no node hears of any of it."""
    harness = Watched(Mode.OBSERVE)
    harness.load(1.0)
    assert harness.told("would lend") == ["i0", "i1"]
    harness.load(1.0)
    assert harness.counts() == (2, 0, 0)
    harness.load(25.0)
    assert harness.counts() == (2, 2, 2)
    assert harness.is_untouched()
    assert {harness.node(f"i{n}").role for n in range(3)} == {NodeRole.SERVING}


@pytest.mark.parametrize("is_coming", [False, True])
def test_a_node_that_would_be_away_is_not_lent_again_in_place_of_another(
    *, is_coming: bool
) -> None:
    """A later loan is of another node, whether the first is lent or on its way home."""
    harness = Watched(Mode.OBSERVE)
    harness.load(11.0)
    assert harness.told("would lend") == ["i0"]
    if is_coming:
        harness.load(25.0)
        assert harness.told("would reclaim") == ["i0"]
    harness.load(1.0, after_s=90.0)
    assert harness.told("would lend") == ["i0", "i1"]
    assert harness.engine.state.counters.decisions_refused == 0


def test_a_shadow_reclaim_is_late_when_the_load_comes_before_its_node() -> None:
    """A slow rise leaves time for the longest way home; a jump within that time does not."""
    in_time, late = Watched(Mode.OBSERVE), Watched(Mode.OBSERVE)
    for harness in (in_time, late):
        harness.load(1.0)
        harness.load(9.0)  # one node would carry it, and the trend wants more of them
        assert harness.counts()[1] > 0
        assert harness.counts()[2] == 0
    in_time.load(9.0, after_s=101.0)
    assert in_time.told("would be home again")
    assert in_time.counts()[2] == 0
    late.load(29.0, after_s=90.0)
    late.load(29.0, after_s=5.0)
    assert late.counts()[2] == 2
    assert late.told("reclaim would have been late") == ["i0", "i1"]


def test_a_shadow_loan_ends_after_the_longest_way_home() -> None:
    """Its node is then reckoned with again, and may be lent in the shadow again."""
    harness = Watched(Mode.OBSERVE)
    harness.load(1.0)
    harness.load(25.0)
    harness.load(25.0, after_s=101.0)
    assert sorted(harness.told("would be home again")) == ["i0", "i1"]
    assert harness.engine.state.shadow_loans == {}


@pytest.mark.parametrize("how", ["mode", "recall", "silence"])
def test_a_shadow_ends_with_what_it_stood_for(how: str) -> None:
    """Another mode, a recall or a node that no longer serves leave no shadow behind."""
    harness = Watched(Mode.OBSERVE)
    harness.load(1.0)
    assert set(harness.engine.state.shadow_loans) == {"i0", "i1"}
    if how == "mode":
        ask(harness, OperatorAction.SET_MODE, CHAT, value="recommend")
    elif how == "recall":
        ask(harness, OperatorAction.RECALL, CHAT)
    else:
        for name in ("i0", "i1"):
            harness.sim.handle(NodeSilent(node=NodeName(name), silent_s=20.0))
    harness.load(1.0)
    assert harness.engine.state.shadow_loans == {}


def ask(harness: EngineHarness, action: OperatorAction, target: str, *, value: str = "") -> int:
    """A human orders; how many loans came of it."""
    event = OperatorAsked(action=action, by="ops/ada", target=target, value=value, reason="night")
    before = harness.engine.state.counters.loans
    harness.sim.handle(event)
    harness.settle()
    return harness.engine.state.counters.loans - before


def test_recommend_waits_for_a_person_and_is_told_once() -> None:
    """What is recommended stands until it is approved or no longer true."""
    harness = Watched(Mode.RECOMMEND)
    harness.load(1.0)
    harness.load(1.0)
    assert harness.told("recommend lend") == ["i0", "i1"]
    assert set(harness.engine.state.recommendations) == {"i0", "i1"}
    assert harness.is_untouched()
    assert harness.counts() == (0, 0, 0)
    harness.load(25.0)
    assert harness.engine.state.recommendations == {}
    assert harness.told("recommendation withdrawn") == ["i0", "i1"]


def test_an_approved_recommendation_is_a_loan_that_comes_home_by_itself() -> None:
    """The promise to the service holds for it as for any other loan."""
    harness = Watched(Mode.RECOMMEND)
    harness.load(1.0)
    assert ask(harness, OperatorAction.APPROVE_LOAN, "i0") == 1
    [loan] = harness.engine.state.loans.values()
    assert (loan.node, "approved by ops/ada: night" in loan.reason) == ("i0", True)
    assert set(harness.engine.state.recommendations) == {"i1"}
    assert ask(harness, OperatorAction.APPROVE_LOAN, "i0") == 0
    harness.load(25.0)
    assert loan.reclaim_ordered_at_s is not None


def test_what_was_approved_too_late_is_told_and_not_done() -> None:
    """A node that no longer serves is not lent, whoever says so."""
    harness = Watched(Mode.RECOMMEND)
    harness.load(1.0)
    harness.sim.handle(
        OperatorAsked(action=OperatorAction.CORDON, by="ops/ada", target="i0")
    )  # no loan pass has seen it yet
    assert ask(harness, OperatorAction.APPROVE_LOAN, "i0") == 0
    assert harness.told("not lent") == ["i0"]
    assert harness.engine.state.loans == {}


def test_watching_is_in_the_state() -> None:
    """A restart of the coordinator forgets neither shadows nor recommendations."""
    for mode in (Mode.OBSERVE, Mode.RECOMMEND):
        harness = Watched(mode)
        harness.load(1.0)
        again = decode_state(harness.engine.encode_state())
        assert again.shadow_loans == harness.engine.state.shadow_loans
        assert again.recommendations == harness.engine.state.recommendations
        assert again.shadow_loans or again.recommendations


def test_a_stale_shadow_decision_is_refused() -> None:
    """What is there already, or not, is not counted twice."""
    harness = Watched(Mode.OBSERVE)
    harness.load(1.0)
    recommend = Recommend(action=Advice.LEND, node=NodeName("i0"), service=CHAT, reason="r")
    real = harness.engine.policy
    harness.engine.policy = replace(
        real,
        lend=lambda _: (recommend, replace(recommend, action=Advice.RECLAIM, node=NodeName("i2"))),
    )
    outcome = harness.engine.handle(LoanPassDue(), now_s=harness.sim.loop.now_s)
    assert len(outcome.refused) == 2
    assert harness.counts() == (2, 0, 0)


def test_act_needs_nobody() -> None:
    """The same reckoning, carried out."""
    harness = Watched(Mode.ACT)
    harness.load(1.0)
    assert [loan.node for loan in harness.engine.state.loans.values()] == ["i0", "i1"]
