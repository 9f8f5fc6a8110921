"""What agents say of themselves and of foreign processes, up to the coordinator's own account."""

from __future__ import annotations

from msgspec.structs import replace

from common import subjects
from common.api import Describe, Description
from common.log import REPEAT_PERIOD_S
from common.messages import (
    MAX_MESSAGE_BYTES,
    AgentReport,
    CollectorReport,
    CostReport,
    NodeReport,
    Trespass,
    WorkerPhase,
    WorkerReport,
    encode,
)
from common.model import Checkpoint, GpuUuid, JobId, Pool, Progress, WorkerKey
from coordinator.service.nodes.report_folding import facts_of
from tests.harness.cluster.coordinator import CELL, Cell
from tests.harness.cluster.engine import EngineHarness

SEEN = Trespass(pid=77, gpu_uuid=GpuUuid("GPU-1"))


async def test_a_node_is_described_with_what_its_agent_says_of_itself() -> None:
    """Counts that only the agent knows reach whoever looks at the node."""
    async with Cell() as cell:
        await cell.lead()
        agent = cell.agents["t0"]
        own = AgentReport(bad_messages=2, lease_failures=3, bus_reconnects=1)
        report = replace(
            agent.make_report(),
            agent=own,
            cost=CostReport(cpu_s=1.5, rss_bytes=1 << 20),
            collectors=(CollectorReport(name="gpu", is_success=False, duration_s=0, error="x"),),
        )
        await agent.bus.publish(subjects.node_report(CELL, agent.name), encode(report))
        await cell.clock.settle()
        found = await cell.ask(Describe(kind="node", name="t0"))
        assert isinstance(found, Description)
        assert (found.agent, found.cost) == (own, CostReport(cpu_s=1.5, rss_bytes=1 << 20))
        assert [one.error for one in found.collectors] == ["x"]


async def test_a_node_whose_reports_are_refused_says_so_where_it_is_looked_for() -> None:
    """Its agent lives and speaks, and whoever looks at the node need not read a log for it; what is
    refused no longer is not told any longer."""
    async with Cell(training=2) as cell:
        await cell.lead()
        agent = cell.agents["t0"]
        long = replace(agent.make_report(), detail="x" * MAX_MESSAGE_BYTES)
        for _ in range(2):
            await agent.bus.publish(subjects.node_report(CELL, agent.name), encode(long))
            await cell.clock.settle()
        refused = f"NodeReport: {len(encode(long))} bytes, expected at most {MAX_MESSAGE_BYTES}"
        said = f"its latest report was refused: {refused}"
        for name, times in (("t0", 1), ("t1", 0)):
            found = await cell.ask(Describe(kind="node", name=name))
            assert isinstance(found, Description)
            assert found.why.count(said) == times
        await cell.clock.advance(REPEAT_PERIOD_S + 1.0)
        found = await cell.ask(Describe(kind="node", name="t0"))
        assert isinstance(found, Description)
        assert not any("refused" in line for line in found.why)


async def test_a_node_whose_next_report_is_taken_is_cured() -> None:
    """One bad message on a healthy node's subject is told until the node is heard again."""
    async with Cell(training=2) as cell:
        await cell.lead()
        agent = cell.agents["t0"]
        subject = subjects.node_report(CELL, agent.name)
        await agent.bus.publish(subject, b"garbage")
        await cell.clock.settle()
        found = await cell.ask(Describe(kind="node", name="t0"))
        assert isinstance(found, Description)
        assert any("latest report was refused" in line for line in found.why)
        await agent.bus.publish(subject, encode(agent.make_report()))
        await cell.clock.settle()
        found = await cell.ask(Describe(kind="node", name="t0"))
        assert isinstance(found, Description)
        assert not any("refused" in line for line in found.why)


def told(harness: EngineHarness) -> list[str]:
    """What was told of trespasses."""
    stories = harness.engine.state.stories
    return [line.what for line in stories if line.what.startswith("trespass")]


def says(harness: EngineHarness, *found: Trespass, boot: str = "") -> None:
    """t0 reports what it sees on its GPUs."""
    entry = harness.node("t0")
    report = NodeReport(
        node="t0",
        boot_id=boot or entry.boot_id,
        sequence=1,
        home_pool=Pool.TRAINING,
        role=entry.role,
        epoch=entry.contact.epoch,
        generation=entry.contact.generation,
        instance="one",
        period_s=1.0,
        trespasses=found,
    )
    harness.sim.handle(facts_of(report))


def test_a_trespass_is_told_once_each_and_anew_after_a_boot() -> None:
    """A process that comes and goes does not fill the story; process ids mean one boot."""
    harness = EngineHarness()
    other = Trespass(pid=78, gpu_uuid=GpuUuid("GPU-1"), owner="uid 7: train")
    for found in ((SEEN,), (), (SEEN,), (other, SEEN)):
        says(harness, *found)
    assert told(harness) == ["trespass: process 77 on GPU-1", "trespass: process 78 on GPU-1"]
    says(harness, SEEN, boot="another")
    assert told(harness)[2:] == ["trespass: process 77 on GPU-1"]


def test_the_last_word_of_a_worker_comes_with_its_end() -> None:
    """A job that succeeds shows its last step, however long ago it was asked before."""
    worker = WorkerReport(
        key=WorkerKey(JobId("j"), 1, 0),
        phase=WorkerPhase.RUNNING,
        gpu_uuids=(),
        exit_code=0,
        progress=Progress(step=100, total_steps=100),
        checkpoint=Checkpoint(step=90, path="/c", is_verified=True),
    )
    harness = EngineHarness()
    job = harness.submit("j")
    harness.start(job, "t0")
    harness.wait(1.0)
    entry = harness.node("t0")
    report = NodeReport(
        node="t0",
        boot_id=entry.boot_id,
        sequence=1,
        home_pool=Pool.TRAINING,
        role=entry.role,
        epoch=entry.contact.epoch,
        generation=entry.contact.generation,
        instance="one",
        period_s=1.0,
        workers=(worker,),
    )
    running = facts_of(report)
    assert running.workers[0].progress is None
    ended = facts_of(replace(report, workers=(replace(worker, phase=WorkerPhase.EXITED),)))
    harness.engine.handle(ended, now_s=harness.sim.loop.now_s)
    assert job.state == "succeeded"
    assert job.progress == Progress(step=100, total_steps=100)
    assert job.saves.checkpoint == Checkpoint(step=90, path="/c", is_verified=True)
