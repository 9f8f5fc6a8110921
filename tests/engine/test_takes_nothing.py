"""A node that cannot write down what it begins: nothing new comes there until it can."""

from __future__ import annotations

from common.model import JobState, NodeName, NodeRole
from coordinator.engine.state.commands import Outcome
from coordinator.engine.state.events import GpuFact, LoanPassDue, NodeReported
from coordinator.policies.contract.decisions import Loan
from tests.engine.house import CHAT, House, start, state

FULL = "ledger /state/ledger: No space left on device"


def report(house: House, name: str, ledger_error: str) -> Outcome:
    """What a node says that stays as it was ordered, and whose disk is so."""
    node = house.node(name)
    event = NodeReported(
        node=node.name,
        boot_id=node.boot_id,
        home_pool=node.home_pool,
        role=node.role,
        epoch=house.engine.state.epoch,
        generation=node.desired.generation,
        gpus=tuple(GpuFact(slot.uuid, slot.gpu_type) for slot in node.gpus),
        service=node.service,
        detail=ledger_error,
        ledger_error=ledger_error,
    )
    return house.engine.handle(event, now_s=house.engine.state.now_s)


def told(house: House) -> list[tuple[str, str]]:
    """What is told of disks, and why."""
    lines = [(line.what, line.reason) for line in house.engine.state.stories]
    return [(what, why) for what, why in lines if what.startswith("takes ")]


def test_it_is_told_once_when_a_disk_fills_up_and_once_when_it_has_room() -> None:
    """However often the node says it; both times somebody may want to act on it."""
    house = House()
    first, again = report(house, "t0", FULL), report(house, "t0", FULL)
    assert (first.needs_pass, first.needs_loan_pass) == (True, True)
    assert (again.needs_pass, again.needs_loan_pass) == (False, False)
    assert report(house, "t0", "").needs_pass
    assert told(house) == [("takes nothing new", FULL), ("takes new work again", "")]


def test_no_worker_is_placed_on_it() -> None:
    """Policies see that it takes none, and what one decides all the same is refused."""
    house = House()
    job = house.submit()
    report(house, "t0", FULL)
    [seen] = [node for node in house.engine.snapshot().nodes if node.name == "t0"]
    assert not seen.is_schedulable
    (why,) = house.refusals(start(job, "t0"))
    assert "t0" in why
    assert state(job) == JobState.PENDING
    report(house, "t0", "")
    house.start(job, "t0")
    house.wait(1.0)
    assert state(job) == JobState.RUNNING


def test_it_is_not_lent_and_serves_on() -> None:
    """Its service counts on it as before; what a policy decides all the same is refused."""
    house = House()
    since_s = house.node("i0").serving_since_s
    report(house, "i0", FULL)
    loan = Loan(node=NodeName("i0"), service=CHAT, reason="idle")
    house.decide(loan, lend=True)
    assert house.node("i0").lease is None
    assert house.engine.state.loans == {}
    assert house.node("i0").role == NodeRole.SERVING
    assert house.node("i0").serving_since_s == since_s
    report(house, "i0", "")
    house.decide(loan, lend=True)
    house.wait(1.0)
    assert house.node("i0").role == NodeRole.ON_LOAN


def test_what_runs_there_and_what_is_lent_stays() -> None:
    """A full disk ends neither a worker nor a loan."""
    house = House()
    house.decide(Loan(node=NodeName("i0"), service=CHAT, reason="idle"), lend=True)
    house.wait(1.0)
    job = house.submit(work_s=1000.0)
    house.start(job, "t0")
    house.wait(1.0)
    for name in ("i0", "t0"):
        house.node(name).ledger.error = FULL
    house.engine.handle(LoanPassDue(), now_s=house.engine.state.now_s)
    house.wait(10.0)
    assert state(job) == JobState.RUNNING
    assert house.node("i0").role == NodeRole.ON_LOAN
