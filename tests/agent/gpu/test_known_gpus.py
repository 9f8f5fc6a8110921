"""An agent that starts while NVML cannot be read: it knows its GPUs from its ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.core.state import Memory, first_memory
from agent.gpu.known_gpus import GpuIdentity
from agent.storage.ledger import Ledger
from common.messages import GpuHealth, OrderPhase, WorkerPhase
from common.model import GpuUuid, NodeRole
from tests.harness.node.agent import AgentHarness, NodeHarness
from tests.harness.node.life import key, lease, order, settings

R, P = NodeRole, WorkerPhase
UNRESPONSIVE = GpuHealth.UNRESPONSIVE
DEVICE_FREE_P99_S = 10.0
"""What the coordinator counts on, by default."""


def known(*uuids: str) -> list[GpuIdentity]:
    """GPUs as a ledger has them, in the order of their indices."""
    return [
        GpuIdentity(uuid=GpuUuid(uuid), index=index, gpu_type="H100", memory_total_bytes=1000)
        for index, uuid in enumerate(uuids)
    ]


def health(harness: AgentHarness) -> dict[str, GpuHealth]:
    """The health of each GPU of the last report."""
    return {gpu.uuid: gpu.health for gpu in harness.report.gpus}


async def blind_after(harness: AgentHarness) -> AgentHarness:
    """An agent on the disk and machine of one that died, while NVML does not answer."""
    await harness.die()
    harness.machine.is_blind = True
    return AgentHarness(inference=harness.settings.service is not None, before=harness)


async def test_an_agent_that_starts_blind_reports_keeps_its_job_and_tells_its_end() -> None:
    """The GPUs of the ledger are told as unresponsive, with the reason, until NVML answers."""
    async with AgentHarness() as before:
        await before.want(R.TRAINING, order())
        await before.until_phase(key(), P.RUNNING)
        async with await blind_after(before) as harness:
            await harness.until(lambda: bool(harness.reports))
            assert health(harness) == {"GPU-0": UNRESPONSIVE, "GPU-1": UNRESPONSIVE}
            assert [gpu.memory_total_bytes for gpu in harness.report.gpus] == [1000, 1000]
            assert "GPUs cannot be read" in harness.report.detail
            assert harness.phase(key()) == P.RUNNING
            harness.runner.end(key(), exit_code=3)
            await harness.until_phase(key(), P.EXITED)
            harness.machine.is_blind = False
            await harness.until(lambda: set(health(harness).values()) == {GpuHealth.OK})
            assert harness.report.detail == ""


async def test_an_agent_that_starts_blind_renews_its_loan_and_brings_its_node_home() -> None:
    """A revoked loan is over within the time that the coordinator counts on for free GPUs."""
    async with AgentHarness(inference=True) as before:
        await before.lend()
        async with await blind_after(before) as harness:
            await harness.clock.advance(60.0)
            assert harness.report.role == R.ON_LOAN
            assert harness.renewals
            revoked_at_s = harness.clock.now_s()
            await harness.want(R.SERVING)
            await harness.until_role(R.SERVING)
            assert harness.clock.now_s() - revoked_at_s <= DEVICE_FREE_P99_S
            assert harness.machine.commands[-2:] == ["start", "route"]
            assert harness.machine.variables["ARYL_GPU_UUIDS"] == "GPU-0,GPU-1"


async def test_a_node_without_gpus_in_its_ledger_says_why_and_takes_nothing() -> None:
    """Neither a worker nor a loan begins before NVML has said which GPUs there are."""
    blind = AgentHarness()
    blind.machine.is_blind = True
    async with blind as harness:
        await harness.until(lambda: bool(harness.reports))
        assert harness.report.gpus == ()
        assert "none are known" in harness.report.ledger_error
        await harness.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
        await harness.clock.advance(10.0)
        assert harness.phase(key()) == P.RESERVING
        assert harness.runner.calls == []
        harness.machine.is_blind = False
        await harness.until_phase(key(), P.READY)
        assert harness.report.ledger_error == ""


async def test_a_server_whose_gpus_were_never_read_is_not_stopped_for_a_loan() -> None:
    """An agent of a new version may start blind on a ledger that has no GPUs yet."""
    async with AgentHarness(inference=True) as before:
        await before.until_role(R.SERVING)
        await before.die()
        old = before.ledger.load()
        assert old is not None
        old.gpus.clear()
        await before.ledger.save(old)
        commands = len(before.machine.commands)
        async with await blind_after(before) as harness:
            await harness.until_role(R.SERVING)
            await harness.want(R.ON_LOAN, lease=lease())
            await harness.until(lambda: harness.report.turned_back is not None)
            assert harness.report.role == R.SERVING
            assert harness.machine.commands[commands:].count("stop") == 0


async def test_a_reading_replaces_the_gpus_of_the_ledger_and_a_difference_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A GPU that was replaced while no agent ran is not reported any more."""
    harness = NodeHarness()
    harness.life.memory.gpus = known("GPU-0", "GPU-old")
    harness.machine.is_blind = True
    await harness.turn()
    assert [gpu.uuid for gpu in harness.node.last_sample.gpus or ()] == ["GPU-0", "GPU-old"]
    harness.machine.is_blind = False
    await harness.turn()
    assert [gpu.uuid for gpu in harness.node.last_sample.gpus or ()] == ["GPU-0", "GPU-1"]
    assert [gpu.uuid for gpu in harness.life.memory.gpus] == ["GPU-0", "GPU-1"]
    assert "gone: GPU-old; new: GPU-1" in caplog.text


async def test_a_gpu_that_an_incomplete_reading_lacks_stays_known() -> None:
    """One GPU that hangs from the start is told as unresponsive beside those that answer."""
    harness = NodeHarness()
    harness.life.memory.gpus = known("GPU-0", "GPU-1", "GPU-2")
    harness.machine.reading_error = "GPU 2 does not answer"
    await harness.turn()
    gpus = harness.node.last_sample.gpus or ()
    assert [(gpu.uuid, gpu.health) for gpu in gpus] == [
        ("GPU-0", GpuHealth.OK), ("GPU-1", GpuHealth.OK), ("GPU-2", UNRESPONSIVE),
    ]  # fmt: skip
    assert len(harness.life.memory.gpus) == 3


@pytest.mark.parametrize("is_blind", [False, True])
async def test_a_lost_gpu_that_a_fresh_reader_cannot_name_is_lost(is_blind: bool) -> None:
    """Its index names it by the ledger, also where no GPU of the node can be read."""
    harness = NodeHarness()
    harness.life.memory.gpus = known("GPU-0", "GPU-1", "GPU-2", "GPU-3")
    harness.machine.reading_error = "GPU 2 was never seen: GPU is lost; GPU 3 does not answer"
    harness.machine.is_blind, harness.machine.lost_indices = is_blind, (2,)
    await harness.turn()
    other = UNRESPONSIVE if is_blind else GpuHealth.OK
    gpus = harness.node.last_sample.gpus or ()
    assert [gpu.health for gpu in gpus] == [other, other, GpuHealth.LOST, UNRESPONSIVE]
    assert len(harness.life.memory.gpus) == 4


async def test_an_nvml_that_sees_no_gpu_is_named_and_the_known_ones_are_lost() -> None:
    """It answers, so its GPUs are not merely slow; the ledger keeps them."""
    async with AgentHarness() as before:
        await before.until(lambda: bool(before.reports))
        await before.die()
        before.machine.has_no_gpus = True
        async with AgentHarness(before=before) as harness:
            await harness.until(lambda: bool(harness.reports))
            assert health(harness) == {"GPU-0": GpuHealth.LOST, "GPU-1": GpuHealth.LOST}
            assert "NVML reports 0 GPUs on this node" in harness.report.detail
            harness.machine.has_no_gpus = False
            await harness.until(lambda: set(health(harness).values()) == {GpuHealth.OK})


async def test_a_ledger_without_gpus_is_read(tmp_path: Path) -> None:
    """Its agent ended before it had read any."""
    ledger = Ledger(tmp_path)
    await ledger.save(first_memory(settings(), "boot-1"))
    ledger.close()
    memory = Ledger(tmp_path).load()
    assert isinstance(memory, Memory)
    assert memory.gpus == []
