"""An agent that starts while NVML cannot be read: it knows its GPUs from its ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.core.state import Memory, first_memory
from agent.gpu.known_gpus import GpuIdentity
from agent.storage.ledger import Ledger
from common.messages import GpuHealth, OrderPhase, WorkerPhase
from common.model import GpuUuid, NodeRole
from tests.agent.agent_house import AgentHouse, NodeHouse
from tests.agent.bench import key, lease, order, settings

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


def health(house: AgentHouse) -> dict[str, GpuHealth]:
    """The health of each GPU of the last report."""
    return {gpu.uuid: gpu.health for gpu in house.report.gpus}


async def blind_after(house: AgentHouse) -> AgentHouse:
    """An agent on the disk and machine of one that died, while NVML does not answer."""
    await house.die()
    house.machine.is_blind = True
    return AgentHouse(inference=house.settings.service is not None, before=house)


async def test_an_agent_that_starts_blind_reports_keeps_its_job_and_tells_its_end() -> None:
    """The GPUs of the ledger are told as unresponsive, with the reason, until NVML answers."""
    async with AgentHouse() as before:
        await before.want(R.TRAINING, order())
        await before.until_phase(key(), P.RUNNING)
        async with await blind_after(before) as house:
            await house.until(lambda: bool(house.reports))
            assert health(house) == {"GPU-0": UNRESPONSIVE, "GPU-1": UNRESPONSIVE}
            assert [gpu.memory_total_bytes for gpu in house.report.gpus] == [1000, 1000]
            assert "GPUs cannot be read" in house.report.detail
            assert house.phase(key()) == P.RUNNING
            house.runner.end(key(), exit_code=3)
            await house.until_phase(key(), P.EXITED)
            house.machine.is_blind = False
            await house.until(lambda: set(health(house).values()) == {GpuHealth.OK})
            assert house.report.detail == ""


async def test_an_agent_that_starts_blind_renews_its_loan_and_brings_its_node_home() -> None:
    """A revoked loan is over within the time that the coordinator counts on for free GPUs."""
    async with AgentHouse(inference=True) as before:
        await before.lend()
        async with await blind_after(before) as house:
            await house.clock.advance(60.0)
            assert house.report.role == R.ON_LOAN
            assert house.renewals
            revoked_at_s = house.clock.now_s()
            await house.want(R.SERVING)
            await house.until_role(R.SERVING)
            assert house.clock.now_s() - revoked_at_s <= DEVICE_FREE_P99_S
            assert house.machine.commands[-2:] == ["start", "route"]
            assert house.machine.variables["ARYL_GPU_UUIDS"] == "GPU-0,GPU-1"


async def test_a_node_without_gpus_in_its_ledger_says_why_and_takes_nothing() -> None:
    """Neither a worker nor a loan begins before NVML has said which GPUs there are."""
    blind = AgentHouse()
    blind.machine.is_blind = True
    async with blind as house:
        await house.until(lambda: bool(house.reports))
        assert house.report.gpus == ()
        assert "none are known" in house.report.ledger_error
        await house.want(R.TRAINING, order(phase=OrderPhase.RESERVE))
        await house.clock.advance(10.0)
        assert house.phase(key()) == P.RESERVING
        assert house.runner.calls == []
        house.machine.is_blind = False
        await house.until_phase(key(), P.READY)
        assert house.report.ledger_error == ""


async def test_a_server_whose_gpus_were_never_read_is_not_stopped_for_a_loan() -> None:
    """An agent of a new version may start blind on a ledger that has no GPUs yet."""
    async with AgentHouse(inference=True) as before:
        await before.until_role(R.SERVING)
        await before.die()
        old = before.ledger.load()
        assert old is not None
        old.gpus.clear()
        await before.ledger.save(old)
        commands = len(before.machine.commands)
        async with await blind_after(before) as house:
            await house.until_role(R.SERVING)
            await house.want(R.ON_LOAN, lease=lease())
            await house.until(lambda: house.report.turned_back is not None)
            assert house.report.role == R.SERVING
            assert house.machine.commands[commands:].count("stop") == 0


async def test_a_reading_replaces_the_gpus_of_the_ledger_and_a_difference_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A GPU that was replaced while no agent ran is not reported any more."""
    house = NodeHouse()
    house.life.memory.gpus = known("GPU-0", "GPU-old")
    house.machine.is_blind = True
    await house.turn()
    assert [gpu.uuid for gpu in house.node.last_sample.gpus or ()] == ["GPU-0", "GPU-old"]
    house.machine.is_blind = False
    await house.turn()
    assert [gpu.uuid for gpu in house.node.last_sample.gpus or ()] == ["GPU-0", "GPU-1"]
    assert [gpu.uuid for gpu in house.life.memory.gpus] == ["GPU-0", "GPU-1"]
    assert "gone: GPU-old; new: GPU-1" in caplog.text


async def test_a_gpu_that_an_incomplete_reading_lacks_stays_known() -> None:
    """One GPU that hangs from the start is told as unresponsive beside those that answer."""
    house = NodeHouse()
    house.life.memory.gpus = known("GPU-0", "GPU-1", "GPU-2")
    house.machine.reading_error = "GPU 2 does not answer"
    await house.turn()
    gpus = house.node.last_sample.gpus or ()
    assert [(gpu.uuid, gpu.health) for gpu in gpus] == [
        ("GPU-0", GpuHealth.OK), ("GPU-1", GpuHealth.OK), ("GPU-2", UNRESPONSIVE),
    ]  # fmt: skip
    assert len(house.life.memory.gpus) == 3


@pytest.mark.parametrize("is_blind", [False, True])
async def test_a_lost_gpu_that_a_fresh_reader_cannot_name_is_lost(is_blind: bool) -> None:
    """Its index names it by the ledger, also where no GPU of the node can be read."""
    house = NodeHouse()
    house.life.memory.gpus = known("GPU-0", "GPU-1", "GPU-2", "GPU-3")
    house.machine.reading_error = "GPU 2 was never seen: GPU is lost; GPU 3 does not answer"
    house.machine.is_blind, house.machine.lost_indices = is_blind, (2,)
    await house.turn()
    other = UNRESPONSIVE if is_blind else GpuHealth.OK
    gpus = house.node.last_sample.gpus or ()
    assert [gpu.health for gpu in gpus] == [other, other, GpuHealth.LOST, UNRESPONSIVE]
    assert len(house.life.memory.gpus) == 4


async def test_an_nvml_that_sees_no_gpu_is_named_and_the_known_ones_are_lost() -> None:
    """It answers, so its GPUs are not merely slow; the ledger keeps them."""
    async with AgentHouse() as before:
        await before.until(lambda: bool(before.reports))
        await before.die()
        before.machine.has_no_gpus = True
        async with AgentHouse(before=before) as house:
            await house.until(lambda: bool(house.reports))
            assert health(house) == {"GPU-0": GpuHealth.LOST, "GPU-1": GpuHealth.LOST}
            assert "NVML reports 0 GPUs on this node" in house.report.detail
            house.machine.has_no_gpus = False
            await house.until(lambda: set(health(house).values()) == {GpuHealth.OK})


async def test_a_ledger_without_gpus_is_read(tmp_path: Path) -> None:
    """Its agent ended before it had read any."""
    ledger = Ledger(tmp_path)
    await ledger.save(first_memory(settings(), "boot-1"))
    ledger.close()
    memory = Ledger(tmp_path).load()
    assert isinstance(memory, Memory)
    assert memory.gpus == []
