"""Contact to the coordinator: what puts a job's `stop_after_s` off, and what does not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agent.core.state import CheckReserve
from agent.shim import files as shim_files
from common import subjects
from common.bus import BusMessage
from common.messages import OrderPhase, WorkerPhase
from common.model import NodeRole
from tests.harness.node.agent import AgentHarness
from tests.harness.node.life import LifeHarness, key, order
from tests.harness.node.workers import WorkerHarness, make_order, make_workers

P, R = WorkerPhase, NodeRole


harness = pytest.fixture(make_workers)


# --- the shim ---------------------------------------------------------------------------------


@pytest.mark.slow
async def test_an_agent_without_contact_keeps_no_worker_from_its_limit(
    harness: WorkerHarness,
) -> None:
    """Behind a cut cable an agent lives on, looks and gives orders; its job runs elsewhere soon."""
    given = make_order("sleep", "600", stop_after_s=0.5)
    await harness.start(given)
    await harness.runner.resize(given.key, 2)
    status = await harness.until_exited(given.key)  # which looks all the time
    assert "stop_after_s" in status.detail


@pytest.mark.slow
async def test_a_contact_of_the_future_is_one_of_now(harness: WorkerHarness) -> None:
    """A clock that was read wrong keeps no worker for ever."""
    given = make_order("sleep", "600", stop_after_s=0.5)
    harness.runner.contacted(shim_files.boot_time_s() + 1e6)
    await harness.start(given)
    assert "stop_after_s" in (await harness.until_exited(given.key)).detail


@pytest.mark.slow
async def test_a_worker_that_is_told_of_contact_runs_on(harness: WorkerHarness) -> None:
    """Each answer puts its end off; when they cease, it comes."""
    given = make_order("sleep", "600", stop_after_s=2.0)
    began_s = shim_files.boot_time_s()
    harness.runner.contacted(began_s)
    await harness.start(given)
    told_s = began_s
    while told_s < began_s + 4.0:  # twice its limit
        assert (await harness.status(given.key)).phase == P.RUNNING
        await harness.clock.sleep(0.05)
        told_s = shim_files.boot_time_s()
        harness.runner.contacted(told_s)
    await harness.until_exited(given.key)
    assert shim_files.boot_time_s() >= told_s + 2.0 - 0.1


@pytest.mark.slow
async def test_a_shim_that_comes_to_life_late_counts_from_the_last_contact(
    harness: WorkerHarness,
) -> None:
    """Its start was ordered before the cable was cut; nobody knows that it begins only now."""
    given = make_order("sleep", "600", stop_after_s=600.0)
    harness.runner.contacted(shim_files.boot_time_s() - 601.0)
    await harness.start(given)
    status = await harness.until_exited(given.key)
    assert "stop_after_s" in status.detail


# --- the node ---------------------------------------------------------------------------------


def test_a_job_that_could_be_stopped_at_once_is_not_started() -> None:
    """Without contact, or with one that is too old, its node is not ready; others are."""
    life_harness = LifeHarness(inference=False)
    limited = order(phase=OrderPhase.RESERVE, stop_after_s=30.0)
    life_harness.want(R.TRAINING, limited)
    assert life_harness.steps(2) == []
    life_harness.contact_at_s = life_harness.now_s - 30.0
    assert life_harness.steps(2) == []
    life_harness.contact_at_s = life_harness.now_s
    assert life_harness.step() == [CheckReserve(limited)]


# --- the agent --------------------------------------------------------------------------------


async def test_an_agent_asks_for_answers_only_while_a_job_needs_them() -> None:
    """Each report is said as ever; for such a job one in a third of its limit is a request."""
    async with AgentHarness() as harness:
        await harness.want(R.TRAINING, order())
        await harness.until_phase(key(), P.RUNNING)
        await harness.clock.advance(30.0)
        assert harness.runner.contacts_s == []
        answered: list[float] = []

        async def answer(message: BusMessage) -> None:
            answered.append(harness.clock.now_s())
            await message.respond(b"")

        await harness.peer.subscribe(subjects.node_report(harness.settings.cell), answer)
        limited = replace(
            order(key(1), gpus=(1,), stop_after_s=30.0), key=replace(key(1), job_id="j2")
        )
        await harness.want(R.TRAINING, order(), limited)
        await harness.until_phase(limited.key, P.RUNNING)
        first = len(harness.runner.contacts_s)
        await harness.clock.advance(60.0)
        assert 5 <= len(harness.runner.contacts_s) - first <= 7
        assert set(harness.runner.contacts_s) <= set(answered)


async def test_contact_is_when_the_report_was_sent_and_only_if_it_was_answered() -> None:
    """The answer may take long; a coordinator that hears and says nothing is no contact."""
    async with AgentHarness() as harness:
        heard: list[tuple[float, BusMessage]] = []

        async def hear(message: BusMessage) -> None:
            heard.append((harness.clock.now_s(), message))

        await harness.peer.subscribe(subjects.node_report(harness.settings.cell), hear)
        await harness.want(R.TRAINING, order(phase=OrderPhase.RESERVE, stop_after_s=30.0))
        await harness.clock.advance(60.0)
        assert harness.runner.contacts_s == []
        assert harness.phase(key()) == P.RESERVING
        heard.clear()
        await harness.clock.advance(20.0)
        late_s = harness.clock.now_s()
        for _, message in heard:
            await message.respond(b"")
        await harness.until_phase(key(), P.READY)
        [contact_s] = harness.runner.contacts_s
        assert contact_s in [at_s for at_s, _ in heard]
        assert contact_s < late_s
