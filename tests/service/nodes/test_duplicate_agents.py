"""Two agents of one name: one is heard, the other one is told, and no job pays for it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import subjects
from common.api import Describe, Description, GetLogs, Logs
from common.errors import Unavailable
from common.messages import NodeReport, encode
from common.model import JobState, NodeName
from coordinator.service.nodes.duplicate_agents import (
    MISSED,
    PERIOD_S,
    REPLACED_KEPT,
    Rivals,
)
from coordinator.service.nodes.report_folding import Folder
from tests.harness.cluster.agents import Agent
from tests.harness.cluster.coordinator import CELL, Cell, job, running, submit
from tests.service.nodes.test_report_folding import LOST_AFTER_S, make_folder, make_report
from tests.tables import each_row

NODE = NodeName("i0")
DAY_S = 86_400.0


class Harness:
    """A folder and a clock; who reports is said by (boot, instance)."""

    def __init__(self) -> None:
        self.folder: Folder = make_folder()
        self.now_s = DAY_S
        self.boots_s: dict[str, float] = {}
        """When each machine was booted."""

    def hear(self, boot_id: str, instance: str = "one", **changes: object) -> NodeReport:
        """One report; a machine that was not heard before has just been booted."""
        up_s = self.now_s - self.boots_s.setdefault(boot_id, self.now_s)
        report = make_report(
            int(up_s * 1000), boot_id=boot_id, instance=instance, service=None, **changes
        )
        self.folder.fold(report, now_s=self.now_s)
        return report

    def is_heard(self, boot_id: str, instance: str = "one", **changes: object) -> bool:
        """Whether one more report of an agent counts; a second passes."""
        self.now_s += 1.0
        report = self.hear(boot_id, instance, **changes)
        return self.folder.reports[NODE] is report

    def both(self, first: tuple[str, str], second: tuple[str, str], *, for_s: float) -> list[str]:
        """Two agents report each second; who was heard, each time that this changed."""
        heard: list[str] = []
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            for boot_id, instance in (first, second):
                if self.is_heard(boot_id, instance) and heard[-1:] != [instance]:
                    heard.append(instance)
        return heard

    def told(self) -> str:
        """What the engine is told of rivals."""
        return self.folder.say_again(self.folder.reports[NODE], now_s=self.now_s).rival


def test_an_agent_that_is_restarted_is_heard_at_once() -> None:
    """However often, as it holds what the one before it held; nobody is told of rivals, nor of a
    report that was on its way meanwhile."""
    harness = Harness()
    for instance, before in (("a", None), ("b", "a"), ("c", "b")):
        assert harness.is_heard("boot", instance, follows=before)
    assert not harness.is_heard("boot", "b")
    assert harness.is_heard("boot", "c")
    assert harness.told() == ""
    assert harness.folder.rivals.dropped_count == 1


@each_row("period_s", [0.25, 0.5, 1.0, LOST_AFTER_S])
def test_a_restart_that_nothing_proves_is_heard_after_a_few_reports_that_did_not_come(
    period_s: float,
) -> None:
    """A container that lost its state directory, or one whose disk is new."""
    harness = Harness()
    harness.hear("boot", "a", period_s=period_s)
    gone_at_s = harness.now_s
    while not harness.is_heard("boot", "b", follows="earlier", period_s=period_s):
        assert harness.now_s - gone_at_s < LOST_AFTER_S
    assert harness.now_s - gone_at_s >= min(LOST_AFTER_S, MISSED * period_s)
    assert harness.now_s - gone_at_s <= min(LOST_AFTER_S, MISSED * period_s) + 1.0
    assert harness.told() == ""


@pytest.mark.slow
@settings(max_examples=40)
@given(
    starts=st.lists(st.integers(1, 20), max_size=12),
    periods=st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0]), min_size=1, max_size=10),
)
def test_a_second_agent_on_the_boot_never_speaks_while_the_first_one_does(
    starts: list[int], periods: list[float]
) -> None:
    """However often it is started anew, each time as somebody else, and though one report of the
    first one is lost now and then."""
    harness = Harness()
    harness.hear("boot", "a", period_s=1.0)
    number = reports = 0
    for apart_s in periods:
        for _ in range(2):
            harness.now_s += apart_s / 2
            reports += 1
            number += reports in starts
            second = harness.hear("boot", f"b{number}", follows=f"b{number - 1}")
            assert harness.folder.reports[NODE] is not second
        first = harness.hear("boot", "a", period_s=1.0)
        assert harness.folder.reports[NODE] is first


@pytest.mark.parametrize("follows", [None, "b"])
def test_an_agent_that_was_replaced_is_not_heard_again_though_reports_are_missed(
    follows: str | None,
) -> None:
    """It has ended: what comes of it was on its way, or somebody made a copy of its state. Only
    where nobody else speaks for the node any more is it heard."""
    harness = Harness()
    assert harness.is_heard("boot", "a")
    assert harness.is_heard("boot", "b", follows="a")
    gone_at_s = harness.now_s
    assert MISSED * PERIOD_S + 1.0 < LOST_AFTER_S
    while harness.now_s - gone_at_s < LOST_AFTER_S - 1.0:
        assert not harness.is_heard("boot", "a", follows=follows)
    assert harness.is_heard("boot", "b")
    harness.now_s += LOST_AFTER_S
    assert harness.is_heard("boot", "a", follows=follows)


def test_a_machine_that_is_rebooted_is_heard_at_once() -> None:
    """What its last boot had on its way comes late, and is dropped without a word."""
    harness = Harness()
    assert harness.is_heard("first", "a")
    assert harness.is_heard("second", "b")
    assert not harness.is_heard("first", "a")
    assert harness.is_heard("second", "b")
    assert harness.told() == ""


@pytest.mark.parametrize(
    ("second", "heard"), [(("two", "b"), "b"), (("one", "b"), "a")], ids=["machines", "state_dirs"]
)
def test_of_two_agents_one_is_heard_all_the_time(second: tuple[str, str], heard: str) -> None:
    """The one that was there, or the one that came last if it was on a machine that had booted
    meanwhile; the other one never again."""
    harness = Harness()
    assert harness.is_heard("one", "a")
    assert harness.both(second, ("one", "a"), for_s=10 * LOST_AFTER_S) == [heard]
    assert f"two agents report as {NODE}" in harness.told()


def test_a_machine_that_was_up_all_the_time_is_no_reboot_of_another() -> None:
    """It is not heard for a second, so that no job of the first one is called lost."""
    harness = Harness()
    harness.boots_s = {"one": DAY_S - 500.0, "two": DAY_S - 100.0}
    assert harness.is_heard("one", "a")
    assert harness.both(("one", "a"), ("two", "b"), for_s=60.0) == ["a"]
    assert "boot two is not" in harness.told()


def test_a_rival_is_told_when_it_stays_and_no_longer_than_that() -> None:
    """What comes in one heap after a pause of the coordinator is no rival."""
    harness = Harness()
    harness.is_heard("one", "a")
    harness.is_heard("two", "b")
    harness.both(("one", "a"), ("two", "b"), for_s=LOST_AFTER_S - 3.0)
    assert harness.told() == ""
    harness.both(("one", "a"), ("two", "b"), for_s=6.0)
    assert harness.told() != ""
    for _ in range(int(LOST_AFTER_S) + 1):
        assert harness.is_heard("two", "b")
    assert harness.told() == ""


def test_a_rival_is_no_sign_of_life_and_is_heard_when_the_other_is_gone() -> None:
    """Switching off the wrong machine leaves the right one, though it was not heard before."""
    harness = Harness()
    harness.is_heard("one", "a")
    harness.is_heard("two", "b")
    heard_at_s = harness.now_s
    for _ in range(int(LOST_AFTER_S)):
        assert not harness.is_heard("one", "a")
        assert harness.folder.heard_at_s[NODE] == heard_at_s
    assert harness.is_heard("one", "a")
    assert not harness.is_heard("two", "b")
    assert harness.is_heard("one", "a")


def test_of_many_rivals_the_same_one_is_told() -> None:
    """The words of a fact that does not change do not change, or each would be news."""
    harness = Harness()
    harness.is_heard("one", "a")
    harness.boots_s |= {"two": 0.0, "three": 0.0}
    said: set[str] = set()
    for _ in range(20):
        harness.is_heard("one", "a")
        harness.is_heard("two", "b")
        harness.is_heard("three", "c")
        said.add(harness.told())
    assert len(said - {""}) == 1


def test_a_new_leader_hears_the_machine_that_the_last_one_heard() -> None:
    """Whichever of them happened to report first to it."""
    harness = Harness()
    harness.boots_s = {"one": 0.0, "two": 0.0}
    harness.is_heard("two", "b")
    assert not harness.is_heard("one", "a")
    harness.folder.prefer(NODE, "elsewhere")
    assert harness.is_heard("two", "b")
    harness.folder.prefer(NODE, "one")
    assert NODE not in harness.folder.reports
    assert harness.is_heard("one", "a")
    assert not harness.is_heard("two", "b")


def test_an_agent_that_is_restarted_for_ever_fills_no_memory() -> None:
    """Only the latest that were replaced are remembered."""
    rivals = Rivals(patience_s=1.0)
    for number in range(10 * REPLACED_KEPT):
        report = make_report(
            1, boot_id=f"boot-{number // 20}", instance=f"i{number}", follows=f"i{number - 1}"
        )
        assert rivals.admit(report, now_s=float(number), silent_s=0.0)
    [speaker] = rivals._speakers.values()
    assert len(speaker.instances) <= REPLACED_KEPT
    assert len(speaker.boots) <= REPLACED_KEPT


# --- a whole coordinator ----------------------------------------------------------------------


@asynccontextmanager
async def twin(cell: Cell, *, up_s: float) -> AsyncGenerator[Agent]:
    """A second machine that reports as `t0`, from now on."""
    agent = Agent(
        cell.network, cell.clock, cell.agents["t0"].spec, boot_id="clone", instance="b", up_s=up_s
    )
    await agent.start()
    try:
        yield agent
    finally:
        await agent.stop()


def make_cell(*, up_s: float = 0.0) -> Cell:
    """One node, whose agent says which start of it this is. up_s: since when its machine runs."""
    cell = Cell(training=1)
    spec = cell.agents["t0"].spec
    cell.agents["t0"] = Agent(
        cell.network, cell.clock, spec, boot_id="original", instance="a", up_s=up_s
    )
    return cell


async def test_a_cloned_machine_costs_no_job_anything(caplog: pytest.LogCaptureFixture) -> None:
    """It is ordered nothing and stops nothing; while it is there, nothing new starts on its node,
    and `explain`, `events` and the log say why."""
    async with make_cell() as cell:
        leader = await cell.lead()
        ids = [await running(cell, leader, name, gpus_per_worker=4) for name in ("first", "other")]
        with caplog.at_level(logging.WARNING):
            async with twin(cell, up_s=DAY_S) as clone:
                await cell.clock.advance(60.0)
                why = await cell.ask(Describe(kind="node", name="t0"))
                entry = job(leader, ids[0])
                assert (entry.state, entry.attempt.number, entry.counts.node_faults) == (
                    "running",
                    1,
                    0,
                )
                assert (clone.desired, clone.refused, clone.started) == ([], [], [])
                node = leader.engine.state.nodes[NodeName("t0")]
                cell.agents["t0"].node.exited(leader.engine.state.jobs[ids[1]].workers[0].key, 0)
                await cell.until(lambda: job(leader, ids[1]).state == JobState.SUCCEEDED)
                waiting = await submit(cell, "waiting", gpus_per_worker=4)
                await cell.clock.advance(30.0)
                assert job(leader, waiting).state == JobState.PENDING
        assert isinstance(why, Description)
        assert any("two agents report as t0" in line for line in why.why)
        told = [line.what for line in leader.engine.state.stories if line.subject == "t0"]
        assert told.count("takes nothing new") == 1
        assert not any(what.startswith("rebooted") for what in told)
        assert 1 <= sum("two agents report" in record.message for record in caplog.records) <= 3
        assert leader.bad_messages >= 60
        await cell.until(lambda: job(leader, waiting).state == JobState.RUNNING)
        assert node.ledger.error == ""
        assert leader.engine.check() == []


async def test_the_log_of_a_worker_is_asked_of_the_agent_that_is_heard() -> None:
    """The other one would answer that it knows of none, and be heard first."""
    async with make_cell() as cell:
        leader = await cell.lead()
        job_id = await running(cell, leader)
        async with twin(cell, up_s=DAY_S) as clone:
            clone.log_text = "no log here\n"
            await cell.clock.advance(5.0)
            for _ in range(3):
                found = await cell.ask(GetLogs(job_id=job_id))
                assert isinstance(found, Logs)
                assert found.text == cell.agents["t0"].log_text


async def test_a_clone_that_looks_like_a_reboot_is_one_fault_and_no_more() -> None:
    """The first machine is not heard any more, however long it goes on."""
    async with make_cell() as cell:
        leader = await cell.lead()
        ids = [await running(cell, leader)]
        original = cell.agents["t0"]
        orders = len(original.desired)
        async with twin(cell, up_s=0.0) as clone:
            await cell.clock.advance(90.0)
            entry = job(leader, ids[0])
            assert (entry.counts.node_faults, entry.counts.own_faults) == (1, 0)
            assert len(original.desired) == orders
            assert len(clone.started) <= 1
            assert leader.engine.state.nodes[NodeName("t0")].boot_id == "clone"
            assert leader.engine.check() == []


async def test_a_new_leader_goes_on_with_the_machine_of_the_journal() -> None:
    """Two leaders, and no reboot between them, whoever speaks first to the second one."""
    async with make_cell() as cell:
        leader = await cell.lead()
        ids = [await running(cell, leader)]
        async with twin(cell, up_s=DAY_S):
            await cell.clock.advance(20.0)
            await cell.leaders[0].crash()
            cell.key.entry = None
            cell.agents["t0"].is_silent = True
            second = cell.launch("two").coordinator
            await cell.clock.advance(1.5)
            cell.agents["t0"].is_silent = False
            await cell.until(lambda: second.is_leading)
            await cell.clock.advance(30.0)
            entry = job(second, ids[0])
            assert (entry.state, entry.attempt.number, entry.counts.node_faults) == (
                "running",
                1,
                0,
            )
            assert second.engine.state.nodes[NodeName("t0")].boot_id == "original"


async def test_a_standby_that_heard_the_wrong_machine_first_leads_with_the_right_one() -> None:
    """What it heard while it stood by says nothing of which machine the jobs are on."""
    async with make_cell(up_s=DAY_S) as cell:
        leader = await cell.lead()
        ids = [await running(cell, leader)]
        async with twin(cell, up_s=DAY_S):
            cell.agents["t0"].is_silent = True
            second = cell.launch("two").coordinator
            await cell.until(lambda: NodeName("t0") in second.folder.reports)
            cell.agents["t0"].is_silent = False
            await cell.clock.advance(3.0)
            assert second.folder.reports[NodeName("t0")].boot_id == "clone"
            assert not second.is_leading
            await cell.leaders[0].crash()
            cell.key.entry = None
            await cell.until(lambda: second.is_leading)
            await cell.clock.advance(30.0)
            entry = job(second, ids[0])
            assert (entry.state, entry.attempt.number, entry.counts.node_faults) == (
                "running",
                1,
                0,
            )
            assert second.engine.state.nodes[NodeName("t0")].boot_id == "original"
            assert second.folder.reports[NodeName("t0")].boot_id == "original"


async def test_a_rival_is_neither_answered_nor_ordered_anything() -> None:
    """An answer would let a job with `stop_after_s` run on there; whoever is heard gets one."""
    async with make_cell() as cell:
        leader = await cell.lead()
        async with twin(cell, up_s=DAY_S) as clone:
            await cell.clock.advance(5.0)
            pushes = leader.dispatcher.pushes
            answers: list[bytes] = []
            for agent in (clone, cell.agents["t0"]):
                asking = cell.caller.request(
                    subjects.node_report(CELL, "t0"), encode(agent.make_report()), timeout_s=2.0
                )
                with suppress(Unavailable):
                    answers.append(await cell.meanwhile(asking))
                    assert agent is not clone
            assert answers == [b""]
            await cell.clock.advance(30.0)
            assert leader.dispatcher.pushes == pushes
