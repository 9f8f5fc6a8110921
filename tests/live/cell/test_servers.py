"""The inference servers of a real cell: their ports while they are away, and a death unasked."""

from __future__ import annotations

import errno
import signal
import socket
from pathlib import Path

import pytest

from common.model import NodeRole
from coordinator.demo.cell import ROUTER
from coordinator.demo.server_ctl import Files, running_pid
from tests.agent.worker_house import kill
from tests.live.cell.house import House, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

BOTH = {"infer-1", "infer-2"}


async def test_the_port_of_a_lent_nodes_server_is_kept_for_it(tmp_path: Path) -> None:
    """While it is away nobody else gets the port and whoever connects is refused; when it is back
    it serves there, and no request of the service was refused."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=2) as house:
        await house.submit(house.training("filler", work_s=600, gpus=4))
        await house.submit(house.training("lodger", work_s=600, gpus=4))
        [lent] = await house.until_role(NodeRole.ON_LOAN)
        address = server_address(house, lent)
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use") as refused:
                stranger.bind(address)
            assert refused.value.errno == errno.EADDRINUSE
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        async with house.load(req_per_s=5.0):
            await house.until_role(NodeRole.SERVING, 2)
            assert await house.serving() == BOTH
        assert (await house.cell.router_stats())["refused_total"] == 0


async def test_a_killed_server_and_a_killed_router_are_started_again(tmp_path: Path) -> None:
    """As systemd would: the node serves again with nobody ordering it, and while another node
    serves no request is refused; the router is back on its own port with its routes."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=2) as house:

        async def is_whole() -> bool:
            return await house.serving() == BOTH

        await house.until("both serve", is_whole)
        node = house.cell.nodes[-1]
        files = Files(str(node.server_directory), node.name)
        first = running_pid(files)
        assert first is not None
        async with house.load(req_per_s=5.0):
            kill(first)
            await house.until("there is another one", lambda: is_another(files, first))
            await house.until("both serve", is_whole)
        assert (await house.cell.router_stats())["refused_total"] == 0
        starts = house.cell.units.starts(ROUTER)
        house.cell.units.signal(ROUTER, signal.SIGKILL)

        async def is_started() -> bool:
            return house.cell.units.starts(ROUTER) > starts

        await house.until("the router is started again", is_started)
        await house.until("both serve", is_whole)


async def is_another(files: Files, first: int) -> bool:
    """Whether a server runs that is not the first one."""
    return running_pid(files) not in (None, first)


def server_address(house: House, name: str) -> tuple[str, int]:
    """Where a node's server listens when it is there."""
    [port] = [node.server_port for node in house.cell.nodes if node.name == name]
    return "127.0.0.1", port
