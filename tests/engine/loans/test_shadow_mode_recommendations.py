"""What people read as recommended is what an approval carries out at that very instant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.messages import GpuHealth
from common.model import JobId, Mode, NodeName, NodeRole
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.events import (
    JobCancelRequested,
    LeaderStarted,
    LoadMeasured,
    LoanPassDue,
    NodeSilent,
    OperatorAction,
    OperatorAsked,
)
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.policies.registry import policy
from coordinator.service.api import explain_job, explain_node, explain_service
from coordinator.sim.run.cluster import Delays
from tests.draws import words
from tests.harness.cluster.engine import CHAT, EngineHarness

NAMES = ("i0", "i1", "i2")
SERVICE = ServiceSettings(
    name=CHAT,
    capacity_per_node=10.0,
    mode=Mode.RECOMMEND,
    min_serving=1,
    headroom_ratio=0.0,
    hold_off_s=20.0,
    reclaim_deadline_s=120.0,
    max_grace_s=60.0,
    device_free_p99_s=5.0,
    warm_up_p99_s=5.0,
)
SETTINGS = EngineSettings(
    services=(SERVICE,), lease_ttl_s=30.0, loan_period_s=50.0, min_runtime_s=0.0
)
IMPATIENT = replace(SETTINGS, services=(replace(SERVICE, reclaim_deadline_s=20.0),))
"""No loan would come home in time."""


class Recommending(EngineHarness):
    """A service of three nodes that wants every loan to be approved, and a job that wants GPUs."""

    def __init__(self, delays: Delays | None = None) -> None:
        super().__init__(training=1, inference=3, settings=SETTINGS, delays=delays)
        self.engine.policy = policy("aryl")
        self.submit("wide", workers=(1, 9), work_s=1e9)
        self.wait(60.0)

    def load(self, load: float) -> None:
        """The load is measured, and nothing looks at it yet."""
        self.sim.handle(LoadMeasured(service=CHAT, load=load))

    def recommends(self) -> list[NodeName]:
        """A quiet hour: what a loan pass recommends."""
        self.load(1.0)
        self.sim.handle(LoanPassDue())
        self.settle()
        return list(self.engine.explain.recommended())

    def ask(self, action: OperatorAction, target: str = "", value: str = "") -> None:
        """An operator's order."""
        self.sim.handle(OperatorAsked(action=action, by="ops/ada", target=target, value=value))

    def take_over(self, settings: EngineSettings) -> None:
        """Another leader, with these settings, which has not heard any node."""
        epoch = self.engine.state.epoch + 1
        self.sim.handle(LeaderStarted(epoch=epoch, holder="new", settings=settings))
        self.engine.policy = policy("aryl")

    def told(self, name: str) -> list[str]:
        """What was told of a node."""
        return [line.what for line in self.engine.state.stories if line.subject == name]


def offers(harness: Recommending, name: str) -> set[bool]:
    """Whether each text that could tells people to approve the loan of a node."""
    engine, word = harness.engine, f"aryl loan approve {name}"
    of_node = explain_node.reasons(engine, harness.node(name))
    of_service = explain_service.why(engine, CHAT, now_s=engine.state.now_s)
    rows = explain_service.recommended(engine)
    return {
        any(word in said for said in of_node),
        any(word in said for said in of_service),
        any(row.node == name for row in rows),
    }


def lends(harness: Recommending, name: str, saved: bytes) -> bool:
    """Whether an approval at this instant is carried out; asked of a copy of what is saved."""
    engine = harness.engine
    again = Engine(engine.settings, decode_state(saved))
    again.policy = engine.policy
    approve = OperatorAsked(action=OperatorAction.APPROVE_LOAN, by="ops/ada", target=name)
    outcome = again.handle(approve, now_s=engine.state.now_s)
    is_lent = again.state.nodes[NodeName(name)].lease != harness.node(name).lease
    assert is_lent == bool(outcome.decisions)
    assert again.check() == []
    return is_lent


def waiting_job_is_told(harness: Recommending) -> set[str]:
    """The nodes that the explanation of a waiting job asks to approve."""
    job = harness.engine.state.jobs.get(JobId("waits"))
    said = () if job is None else explain_job.reasons(harness.engine, job)
    return {name for name in NAMES if any(f"aryl loan approve {name}" in line for line in said)}


def perform(harness: Recommending, what: str, number: int) -> None:
    """One thing that happens."""
    name = NAMES[number % 3]
    if what in STEPS:
        STEPS[what](harness, NodeName(name), number)
    else:
        harness.ask(OperatorAction(what), "" if what in CELL_WIDE else name)
    if number % 2:
        harness.settle()


def sick(harness: Recommending, name: NodeName, _: int) -> None:
    """One of its GPUs falls out; a node that is not heard does not say so."""
    if harness.node(name).role == NodeRole.LOST:
        return
    said = harness.report(name, harness.node(name).role)
    gpus = (replace(said.gpus[0], health=GpuHealth.LOST), *said.gpus[1:])
    harness.sim.handle(replace(said, gpus=gpus))


def down(harness: Recommending, name: NodeName, number: int) -> None:
    """Its server is down, or up again."""
    if harness.node(name).role == NodeRole.SERVING:
        said = harness.report(name, NodeRole.SERVING)
        harness.sim.handle(replace(said, is_server_down=bool(number % 2)))


STEPS: dict[str, Callable[[Recommending, NodeName, int], None]] = {
    "load": lambda harness, _name, n: harness.load((1.0, 1.0, 9.0, 15.0, 29.0)[n % 5]),
    "loan pass": lambda harness, _name, _n: harness.sim.handle(LoanPassDue()),
    "wait": lambda harness, _name, n: harness.wait((0.5, 5.0, 30.0, 60.0)[n % 4]),
    "silent": lambda harness, name, _n: harness.sim.handle(NodeSilent(node=name, silent_s=20.0)),
    "heard": lambda harness, name, _n: harness.sim.nodes[name].report_soon(),
    "sick": sick,
    "down": down,
    "mode": lambda harness, _name, n: harness.ask(OperatorAction.SET_MODE, CHAT, list(Mode)[n % 3]),
    "take over": lambda harness, _name, n: harness.take_over(
        (SETTINGS, SETTINGS, IMPATIENT)[n % 3]
    ),
    "cancel": lambda harness, _name, _n: harness.sim.handle(
        JobCancelRequested(job_id=JobId("wide"), by="u")
    ),
}
CELL_WIDE = ("freeze", "thaw", "recall", "end_recall")
KINDS = (
    *("load", "loan pass", "wait", "approve_loan") * 3,
    *STEPS,
    *("cordon", "uncordon", "drain", *CELL_WIDE),
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    words(4, 16).map(lambda found: [(KINDS[n % len(KINDS)], n // len(KINDS) % 12) for n in found]),
    st.sampled_from([Delays(), Delays(report_s=1.0, drain_s=3.0)]),
)
def test_what_is_told_to_be_recommended_can_be_approved_now_and_nothing_else(
    ops: list[tuple[str, int]], delays: Delays
) -> None:
    """After each step, of every node, in each text; an API caller is refused for the rest."""
    harness = Recommending(delays)
    harness.submit("waits", workers=(9, 9), work_s=1e9)
    harness.recommends()
    for what, number in ops:
        perform(harness, what, number)
        saved = harness.engine.encode_state()
        for name in NAMES:
            is_lent = lends(harness, name, saved)
            assert offers(harness, name) == {is_lent}, (what, name)
            if NodeName(name) in harness.engine.state.recommendations:
                assert (harness.engine.explain.why_not_approved(NodeName(name)) == "") == is_lent
            assert is_lent or name not in waiting_job_is_told(harness)


def test_an_approved_loan_is_not_told_as_withdrawn() -> None:
    """Its node serves until it hears of the loan, and a loan pass before that changes nothing."""
    harness = Recommending(Delays(report_s=5.0))
    first, second = harness.recommends()
    harness.toggle_deaf(first)
    harness.ask(OperatorAction.APPROVE_LOAN, first)
    assert harness.node(first).lease is not None
    for _ in range(2):
        harness.sim.handle(LoanPassDue())
    harness.toggle_deaf(first)
    harness.wait(20.0)
    harness.load(1.0)
    harness.sim.handle(LoanPassDue())
    assert harness.node(first).role == NodeRole.ON_LOAN
    assert harness.told(first).count("recommend lend") == 1
    assert "recommendation withdrawn" not in harness.told(first)
    assert list(harness.engine.explain.recommended()) == [second]


def test_a_loan_by_another_mode_is_not_told_as_withdrawn_either() -> None:
    """The service acts by itself from now on, and makes the loan that was recommended."""
    harness = Recommending()
    names = harness.recommends()
    harness.ask(OperatorAction.SET_MODE, CHAT, value=Mode.ACT)
    harness.load(1.0)
    harness.sim.handle(LoanPassDue())
    assert [harness.node(name).lease is not None for name in names] == [True, True]
    assert all("recommendation withdrawn" not in harness.told(name) for name in names)


def test_a_refused_approval_says_why_and_changes_nothing() -> None:
    """The load has risen since the loan pass: the service needs the node, and comes first."""
    harness = Recommending()
    names = harness.recommends()
    harness.load(29.0)
    assert "no node of chat is spare" in harness.engine.explain.why_not_approved(names[0])
    harness.ask(OperatorAction.APPROVE_LOAN, names[0])
    assert (harness.node(names[0]).lease, harness.told(names[0])[-1]) == (None, "not lent")
    harness.sim.handle(LoanPassDue())
    assert harness.told(names[0])[-1] == "recommendation withdrawn"
