"""Stages of a reclaim: from the load that called for it to the last word, none forgotten."""

from __future__ import annotations

from common.model import NodeName, NodeRole
from coordinator.engine.state.events import (
    GpuFact,
    LoadMeasured,
    NodeReported,
    OperatorAction,
    OperatorAsked,
)
from coordinator.engine.state.tables import LoanEntry
from coordinator.policies.contract.decisions import Loan, Reclaim
from coordinator.service.api import rows
from coordinator.sim.run.cluster import Delays
from tests.harness.cluster.engine import CHAT, EngineHarness

I0 = NodeName("i0")
OWN_S = {"checkpoint": 4.0, "exit": 1.0, "device_free": 2.0, "server_ready": 20.0}


def lent() -> EngineHarness:
    """A cell whose node i0 is on loan, and hears nothing more."""
    harness = EngineHarness(delays=Delays(drain_s=1.0, stop_s=3.0))
    harness.decide(Loan(node=I0, service=CHAT, reason="idle"), lend=True)
    harness.wait(5.0)
    harness.toggle_deaf(I0)
    return harness


def reclaim(harness: EngineHarness, *, wait_s: float = 0.0) -> None:
    """A policy calls the node back."""
    order = Reclaim(node=I0, service=CHAT, deadline_s=60.0, reason="load rose", wait_s=wait_s)
    harness.decide(order, lend=True)


def is_home(
    harness: EngineHarness, after_s: float, *, home_ago_s: float | None, boot: str = ""
) -> LoanEntry:
    """The node says so that long after it was called, and how long ago it was over; its loan."""
    node = harness.node(I0)
    now_s = harness.engine.state.now_s + after_s
    said = NodeReported(
        node=node.name,
        boot_id=boot or node.boot_id,
        home_pool=node.home_pool,
        role=NodeRole.SERVING,
        epoch=harness.engine.state.epoch,
        generation=node.desired.generation,
        gpus=tuple(GpuFact(slot.uuid, slot.gpu_type) for slot in node.gpus),
        service=node.service,
        stage_durations_s=OWN_S,
        home_ago_s=home_ago_s,
    )
    harness.engine.handle(said, now_s=now_s)
    [loan] = harness.engine.state.loans.values()
    return loan


def test_the_stages_are_all_of_the_time_from_the_load_to_the_last_word() -> None:
    """What the node did not work on is the time until it heard, and until it was heard."""
    harness = lent()
    harness.engine.handle(LoadMeasured(service=CHAT, load=5.0), now_s=harness.engine.state.now_s)
    measured_at_s = harness.engine.state.now_s
    harness.wait(3.0)
    reclaim(harness)
    loan = is_home(harness, 30.0, home_ago_s=0.5)
    stages_s = loan.stage_durations_s
    assert list(stages_s) == ["decide", "notify", *OWN_S, "heard"]
    assert (stages_s["notify"], stages_s["heard"]) == (2.5, 0.5)
    assert loan.reclaim_ordered_at_s is not None
    assert stages_s["decide"] == loan.reclaim_ordered_at_s - measured_at_s > 0.0
    row = rows.loan_row(loan, now_s=0.0)
    assert row.reclaim_s == sum(stages_s.values()) - stages_s["decide"] == 30.0
    assert row.stage_durations_s == stages_s


def test_an_operators_order_is_decided_at_once() -> None:
    """However old the load is by then."""
    harness = lent()
    harness.engine.handle(LoadMeasured(service=CHAT, load=5.0), now_s=harness.engine.state.now_s)
    [lease_id] = harness.engine.state.loans
    order = OperatorAsked(action=OperatorAction.REVOKE_LOAN, by="ops/ada", target=lease_id)
    harness.engine.handle(order, now_s=harness.engine.state.now_s + 7.0)
    assert is_home(harness, 30.0, home_ago_s=0.5).stage_durations_s["decide"] == 0.0


def test_after_a_reboot_on_the_way_the_rest_is_unattended() -> None:
    """Nobody knows how much of it the node had done before."""
    harness = lent()
    reclaim(harness)
    stages_s = is_home(harness, 30.0, home_ago_s=0.5, boot="another").stage_durations_s
    assert "notify" not in stages_s
    assert stages_s["unattended"] == 2.5


def test_of_a_node_that_does_not_say_when_its_own_stages_are_told() -> None:
    """How long ago it was home is not known."""
    harness = lent()
    reclaim(harness)
    assert is_home(harness, 30.0, home_ago_s=None).stage_durations_s == OWN_S


def test_a_node_that_came_home_before_it_was_called_was_not_notified() -> None:
    """Its lease had ended, unheard: no stage is less than nothing."""
    harness = lent()
    reclaim(harness)
    assert is_home(harness, 10.0, home_ago_s=0.5).stage_durations_s["notify"] == 0.0


def test_a_last_word_that_was_on_its_way_longer_than_the_way_home_is_none_of_it() -> None:
    """A node that had come home before it was called says how long ago: all stages stay within the
    time from the call."""
    harness = lent()
    reclaim(harness)
    loan = is_home(harness, 10.0, home_ago_s=25.0)
    assert loan.stage_durations_s["heard"] == 10.0
    assert loan.stage_durations_s["notify"] == 0.0


def test_to_wait_for_jobs_is_a_stage() -> None:
    """The order is given before the node is told of it."""
    harness = lent()
    job = harness.submit("stays", work_s=1000.0)
    harness.toggle_deaf(I0)
    harness.start(job, "i0")
    harness.wait(1.0)
    harness.toggle_deaf(I0)
    harness.engine.handle(LoadMeasured(service=CHAT, load=5.0), now_s=harness.engine.state.now_s)
    measured_at_s = harness.engine.state.now_s
    harness.wait(3.0)
    reclaim(harness, wait_s=10.0)
    ordered_at_s = harness.engine.state.now_s
    harness.wait(12.0)
    loan = is_home(harness, 30.0, home_ago_s=0.5)
    stages_s = loan.stage_durations_s
    assert list(stages_s)[:3] == ["decide", "wait", "notify"]
    assert stages_s["wait"] == 10.0
    assert sum(stages_s.values()) - stages_s["decide"] == rows.loan_row(loan, now_s=0.0).reclaim_s
    assert loan.reclaim_ordered_at_s == ordered_at_s
    assert stages_s["decide"] == ordered_at_s - measured_at_s > 0.0
