"""A node whose agent died while it was lent, and what may become of its settings file then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from agent.core.state import first_memory
from agent.daemon import bring_home
from agent.settings import AgentSettings
from agent.storage import accepted_settings
from agent.storage.ledger import Ledger, peek
from common.clock import Clock, SystemClock
from common.model import Lease, LeaseId, NodeRole, ServiceName
from common.settings import load
from tests.harness.node.daemon import DaemonHarness
from tests.harness.node.workers import PATIENCE_S

R = NodeRole


async def make_quiet_harness(tmp_path: Path) -> AsyncGenerator[DaemonHarness]:
    """The body of a fixture: a node without NATS, which no way home needs; its server answers."""
    harness = DaemonHarness(tmp_path, nats_url="nats://127.0.0.1:4222")
    server = await asyncio.start_server(harness.serve, "127.0.0.1", 0)
    harness.port = server.sockets[0].getsockname()[1]
    try:
        yield harness
    finally:
        await asyncio.shield(harness.close())
        server.close()
        await server.wait_closed()


Spoil = Callable[[Path], None]


def without_server(config: Path) -> None:
    """The server's table, which is the last, is gone."""
    config.write_text(config.read_text().partition("[server]")[0])


def with_line(line: str) -> Spoil:
    """One more line among the first ones."""

    def spoil(config: Path) -> None:
        config.write_text(f"{line}\n{config.read_text()}")

    return spoil


def with_server_line(line: str) -> Spoil:
    """One more line in the server's table, which is the last."""
    return lambda config: append(config, line)


def append(config: Path, line: str) -> None:
    """One more line at the end."""
    config.write_text(f"{config.read_text()}{line}\n")


def with_other(key: str, value: str) -> Spoil:
    """Another value of a key that is there."""

    def spoil(config: Path) -> None:
        lines = config.read_text().splitlines()
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{key} = "))
        lines[at] = f"{key} = {json.dumps(value)}"
        config.write_text("\n".join(lines) + "\n")

    return spoil


def with_rules(text: str | None) -> Spoil:
    """The site's own rules are these; None: their file is gone."""

    def spoil(config: Path) -> None:
        rules = config.with_name("rules.toml")
        if text is not None:
            rules.write_text(text)
        with_line(f"failure_rules = {json.dumps(str(rules))}")(config)

    return spoil


async def make_lent(
    harness: DaemonHarness,
    *,
    role: NodeRole = R.ON_LOAN,
    left_s: float = -0.1,
    boot_id: str = "",
    clock: Clock | None = None,
    node: str = "n1",
    epoch: int = 0,
    generation: int = 0,
    ended: tuple[str, ...] = (),
) -> Path:
    """A node whose agent accepted its settings and died, and its lease's time left; their file.

    ended: the leases that it had and are over.
    """
    config = harness.config(inference=True, node=node)
    settings = load(config, AgentSettings)
    harness.state_dir.mkdir(exist_ok=True)
    clock = clock or SystemClock()
    accepted_settings.keep(harness.state_dir, settings)
    memory = first_memory(settings, boot_id or clock.boot_id())
    memory.role = memory.desired_role = role
    memory.epoch, memory.generation = epoch, generation
    memory.ended_leases = [LeaseId(lease) for lease in ended]
    if role == R.ON_LOAN:
        memory.is_server_stopped = True
        memory.lease = Lease(lease_id=LeaseId("l1-1"), service=ServiceName("chat"), ttl_s=3.0)
        memory.lease_until_s = clock.now_s() + left_s
    ledger = Ledger(harness.state_dir)
    await ledger.save(memory)
    ledger.close()
    return config


def role(harness: DaemonHarness) -> NodeRole:
    """What the node's ledger says."""
    memory = peek(harness.state_dir)
    assert memory is not None
    return memory.role


async def home(settings: AgentSettings, harness: DaemonHarness) -> None:
    """A way home; one that would go on for ever is an error."""
    async with harness.clock.timeout(PATIENCE_S):
        await bring_home(settings, fake_nvml=harness.fleet)
