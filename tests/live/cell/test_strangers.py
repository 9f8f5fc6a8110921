"""A process of nobody's on a GPU of a node of a service: the node is not lent beside it, and comes
home beside it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from agent.gpu.fake.fleet import fake_uuid
from common.api import Describe, Description
from common.model import GpuUuid, NodeRole
from tests.live.cell.house import House, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

INFER = ("infer-1", "infer-2")


@contextlib.contextmanager
def stranger(house: House, node: str) -> Generator[tuple[int, GpuUuid]]:
    """A process of this test's on the first GPU of a node: its pid, and the GPU."""
    uuid = fake_uuid(node, 0, fleet=str(house.cell.run_dir))
    process = subprocess.Popen(
        ("sleep", "600"), env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid}, start_new_session=True
    )
    try:
        yield process.pid, uuid
    finally:
        process.kill()
        process.wait()


async def explained(house: House, kind: str, name: str) -> str:
    """What `explain` says, in one text."""
    said = await house.client.ask(Describe(kind=kind, name=name), Description)
    return "\n".join(said.why)


async def until_told(house: House, node: str, pid: int, uuid: GpuUuid) -> None:
    """Wait until `explain node` names a process and its GPU."""

    async def is_told() -> bool:
        return f"GPU {uuid} is used by process {pid}" in await explained(house, "node", node)

    await house.until(f"{node} tells of process {pid}", is_told)


async def test_a_node_that_serves_beside_a_stranger_is_not_lent(tmp_path: Path) -> None:
    """Another one is, and `explain node` says whose process is in the way, and of which GPU."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=3) as house:
        with contextlib.ExitStack() as stack:
            found = {name: stack.enter_context(stranger(house, name)) for name in INFER}
            for name, (pid, uuid) in found.items():
                await until_told(house, name, pid, uuid)
            await house.submit(house.training("filler", work_s=600, gpus=4))
            await house.submit(house.training("lodger", work_s=600, gpus=4))
            assert await house.until_role(NodeRole.ON_LOAN) == ["infer-3"]
            assert "1 of its GPUs is used by a process that is not its server's" in (
                await explained(house, "node", "infer-1")
            )
            assert [loan.node for loan in await house.loans()] == ["infer-3"]
            assert (await house.node("infer-1")).role == NodeRole.SERVING


async def test_a_stranger_that_comes_during_a_loan_does_not_keep_the_node_away(
    tmp_path: Path,
) -> None:
    """Its server is started beside it, within the deadline; the node is not lent again before the
    stranger has gone."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=2) as house:
        await house.submit(house.training("filler", work_s=600, gpus=4))
        await house.submit(house.training("lodger", work_s=600, gpus=2))
        [lent] = await house.until_role(NodeRole.ON_LOAN)
        with stranger(house, lent) as (pid, uuid):
            await until_told(house, lent, pid, uuid)
            async with house.load(req_per_s=5.0):
                await house.until_role(NodeRole.SERVING, 2)
                assert await house.serving() == set(INFER)
            figures = await house.figures()
            assert (figures["reclaims"], figures["reclaims_late"]) == (1, 0)
            assert (figures["leases_lapsed"], figures["turn_backs"]) == (0, 0)
            await until_told(house, lent, pid, uuid)
