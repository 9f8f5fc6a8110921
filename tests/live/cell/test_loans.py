"""Loans on a real cell: out when the load is low, back in time when it rises, beside processes of
nobody's, and with servers and a router that are killed."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from agent.gpu.fake.fleet import fake_uuid
from common.api import Describe, Description
from common.model import GpuUuid, JobState, NodeRole
from coordinator.demo.cell import ROUTER
from coordinator.demo.server_ctl import Files, running_pid
from tests.harness.live.cell import LiveHarness, running_cell
from tests.harness.node.workers import kill

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

INFER = {"infer-1", "infer-2", "infer-3"}
ENOUGH_REQ_PER_S = 12.0
"""What needs all three nodes: two to answer, and one as headroom."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveHarness]:
    """A cell of one training node and three that serve."""
    directory = tmp_path_factory.mktemp("cell")
    async with running_cell(directory, training_nodes=1, inference_nodes=3) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def harness(shared: LiveHarness, tmp_path: Path) -> AsyncIterator[LiveHarness]:
    """The cell for one test, which leaves it idle."""
    harness = await shared.turn(tmp_path)
    yield harness
    await harness.tidy()


@contextlib.contextmanager
def stranger(harness: LiveHarness, node: str) -> Generator[tuple[int, GpuUuid]]:
    """A process of this test's on the first GPU of a node: its pid, and the GPU."""
    uuid = fake_uuid(node, 0, fleet=str(harness.cell.run_dir))
    process = subprocess.Popen(
        ("sleep", "600"), env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid}, start_new_session=True
    )
    try:
        yield process.pid, uuid
    finally:
        process.kill()
        process.wait()


async def explained(harness: LiveHarness, kind: str, name: str) -> str:
    """What `explain` says, in one text."""
    said = await harness.client.ask(Describe(kind=kind, name=name), Description)
    return "\n".join(said.why)


async def until_told(harness: LiveHarness, node: str, pid: int, uuid: GpuUuid) -> None:
    """Wait until `explain node` names a process and its GPU."""

    async def is_told() -> bool:
        return f"GPU {uuid} is used by process {pid}" in await explained(harness, "node", node)

    await harness.until(f"{node} tells of process {pid}", is_told)


async def test_an_elastic_job_grows_into_a_lent_node_and_shrinks_back(harness: LiveHarness) -> None:
    """Its base stays where it is, so that the load's return costs no preemption."""
    spec = harness.training("elastic", work_s=600, workers=(4, 8), save_every_s=600)
    job_id = await harness.submit(msgspec.structs.replace(spec, expected_runtime_s=600.0))
    row = await harness.until_job(job_id, "has grown", lambda row: row.worker_count == 8)
    [lent] = await harness.until_role(NodeRole.ON_LOAN)
    assert set(row.nodes) == {"train-1", lent}
    async with harness.load(req_per_s=ENOUGH_REQ_PER_S):
        await harness.until_role(NodeRole.SERVING, 3)
        row = await harness.until_state(job_id, JobState.RUNNING)
    assert (row.worker_count, row.attempt, row.nodes) == (4, 1, ("train-1",))
    counts = await harness.counted()
    assert counts["preemptions"] == 0
    assert counts["flexible_workers_released"] == 4
    assert counts["resizes"] == 2
    assert (counts["reclaims"], counts["reclaims_late"]) == (1, 0)
    assert (await harness.cell.router_stats())["refused_total"] == 0


async def test_a_node_that_serves_beside_a_stranger_is_not_lent(harness: LiveHarness) -> None:
    """Another one is, and `explain node` says whose process is in the way, and of which GPU."""
    before = {loan.lease_id for loan in await harness.loans()}
    with contextlib.ExitStack() as stack:
        found = {
            name: stack.enter_context(stranger(harness, name)) for name in ("infer-1", "infer-2")
        }
        for name, (pid, uuid) in found.items():
            await until_told(harness, name, pid, uuid)
        await harness.submit(harness.training("filler", work_s=600, gpus=4))
        await harness.submit(harness.training("lodger", work_s=600, gpus=4))
        assert await harness.until_role(NodeRole.ON_LOAN) == ["infer-3"]
        assert "1 of its GPUs is used by a process that is not its server's" in (
            await explained(harness, "node", "infer-1")
        )
        new = [loan.node for loan in await harness.loans() if loan.lease_id not in before]
        assert new == ["infer-3"]
        assert (await harness.node("infer-1")).role == NodeRole.SERVING


async def test_a_stranger_that_comes_during_a_loan_does_not_keep_the_node_away(
    harness: LiveHarness,
) -> None:
    """Its server is started beside it, within the deadline; the node is not lent again before the
    stranger has gone."""
    await harness.submit(harness.training("filler", work_s=600, gpus=4))
    await harness.submit(harness.training("lodger", work_s=600, gpus=2))
    [lent] = await harness.until_role(NodeRole.ON_LOAN)
    with stranger(harness, lent) as (pid, uuid):
        await until_told(harness, lent, pid, uuid)
        async with harness.load(req_per_s=ENOUGH_REQ_PER_S):
            await harness.until_role(NodeRole.SERVING, 3)
            assert await harness.serving() == INFER
        counts = await harness.counted()
        assert (counts["reclaims"], counts["reclaims_late"]) == (1, 0)
        assert (counts["leases_lapsed"], counts["turn_backs"]) == (0, 0)
        await until_told(harness, lent, pid, uuid)


async def test_the_port_of_a_lent_nodes_server_is_kept_for_it(harness: LiveHarness) -> None:
    """While it is away nobody else gets the port and whoever connects is refused; when it is back
    it serves there, and no request of the service was refused."""
    await harness.submit(harness.training("filler", work_s=600, gpus=4))
    await harness.submit(harness.training("lodger", work_s=600, gpus=4))
    [lent] = await harness.until_role(NodeRole.ON_LOAN)
    address = server_address(harness, lent)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use") as refused:
            stranger.bind(address)
        assert refused.value.errno == errno.EADDRINUSE
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    async with harness.load(req_per_s=ENOUGH_REQ_PER_S):
        await harness.until_role(NodeRole.SERVING, 3)
        assert await harness.serving() == INFER
    assert (await harness.cell.router_stats())["refused_total"] == 0


async def test_a_killed_server_and_a_killed_router_are_started_again(harness: LiveHarness) -> None:
    """As systemd would: the node serves again with nobody ordering it, and while another node
    serves no request is refused; the router is back on its own port with its routes."""

    async def is_whole() -> bool:
        return await harness.serving() == INFER

    await harness.until("all serve", is_whole)
    node = harness.cell.nodes[-1]
    files = Files(str(node.server_directory), node.name)
    first = running_pid(files)
    assert first is not None
    async with harness.load(req_per_s=ENOUGH_REQ_PER_S):
        kill(first)
        await harness.until("there is another one", lambda: is_another(files, first))
        await harness.until("all serve", is_whole)
    assert (await harness.cell.router_stats())["refused_total"] == 0
    starts = harness.cell.units.starts(ROUTER)
    harness.cell.units.signal(ROUTER, signal.SIGKILL)

    async def is_started() -> bool:
        return harness.cell.units.starts(ROUTER) > starts

    await harness.until("the router is started again", is_started)
    await harness.until("all serve", is_whole)


async def is_another(files: Files, first: int) -> bool:
    """Whether a server runs that is not the first one."""
    return running_pid(files) not in (None, first)


def server_address(harness: LiveHarness, name: str) -> tuple[str, int]:
    """Where a node's server listens when it is there."""
    [port] = [node.server_port for node in harness.cell.nodes if node.name == name]
    return "127.0.0.1", port
