"""`aryl-agent --go-home`: bring a lent node home while agent, coordinator and NATS are all dead.

It runs the agent's own node driver and rules, with a lease that counts as expired. It must not run
beside an agent: its caller holds the node's lock. An agent whose start fails also brings its node
home this way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from agent.core.state import AWAY_ROLES, is_away, lease_left_s
from agent.driver import Node
from agent.lease.last_resort import last_resort
from agent.lease.renewal import LAST_RESORT_MARGIN_S
from agent.settings import WORKERS_DIR, AgentSettings
from agent.settings_file import expected_homes
from agent.shim.files import is_locked
from agent.storage.file_ownership import give_all
from agent.storage.ledger import peek
from agent.storage.node_lock import lock_path
from agent.workers import boot_check
from agent.workers.starters import UNIT_EXISTS
from common.clock import Clock, SystemClock
from common.errors import Unavailable
from common.model import NodeRole


def call_all(named: Sequence[tuple[Path, Path | None]], *, fake_nvml: Path | None) -> None:
    """Arm the return of every node of these that is away; their agents start all or none.

    Where a file and the command line name the state directories of two nodes, each node is
    returned. If both are one node's, as where one is a copy, only the directory that is current
    counts.

    named: each settings file, and the state directory of its node if that was given.
    """
    for path, state_dir in named:
        for settings in expected_homes(path, state_dir=state_dir):
            _call(settings, config=path, fake_nvml=fake_nvml)


def _call(settings: AgentSettings, *, config: Path, fake_nvml: Path | None) -> None:
    """Log an error here beside the reason for the call, without hiding that reason."""
    clock = SystemClock()
    resort = last_resort(settings, config=config, fake_nvml=fake_nvml, clock=clock)
    try:
        after_s = fires_in_s(settings, clock=clock)
        if after_s is None:
            return
        asyncio.run(resort.arm(after_s))
    except (Unavailable, OSError) as error:  # what an earlier agent armed may still be there
        # The end of the text is today's error; its beginning may come from an earlier one.
        if str(error).rstrip(".").endswith(UNIT_EXISTS):
            log.warning("node %s is away; its last resort already runs", settings.node)
        else:
            log.error("node %s: cannot arm the last resort: %s", settings.node, error)
    else:
        log.warning("node %s is away; its last resort fires in %.1f s", settings.node, after_s)
    give_all(Path(settings.state_dir))


def fires_in_s(settings: AgentSettings, *, clock: Clock) -> float | None:
    """Seconds until a node whose agent cannot start is to return.

    None if the node is at home, or another process holds it. After a boot nothing that an earlier
    agent armed is left.

    settings: those on which it returns.

    Raises:
        OSError: its workers' directories cannot be read.
    """
    state_dir, seen = Path(settings.state_dir), clock.boot_id()
    memory = peek(state_dir)
    if memory is None or not is_away(memory):
        return None
    if is_locked(str(lock_path(state_dir))):
        return None  # its holder brings the node home, and has armed a last resort
    boot_id = boot_check.this_boot(state_dir / WORKERS_DIR, known=memory.boot_id, seen=seen)
    left_s = lease_left_s(memory, clock.now_s()) if memory.boot_id == boot_id else 0.0
    # At once when it is over: an agent that PID 1 restarts repeatedly would postpone it for ever.
    return left_s + LAST_RESORT_MARGIN_S if left_s > 0 else 0.0


log = logging.getLogger(__name__)

_STUCK = (NodeRole.QUARANTINED,)


async def go_home(node: Node, *, clock: Clock) -> str:
    """Vacate, wait for the GPUs, restart the server, route to it.

    Returns:
        What was done, as text; empty when the node is not away.

    Raises:
        Unavailable: the lease is valid, so it is too early. The caller must try again, or no
            process would be left to bring the node home.
    """
    life = node.life
    memory = life.memory
    if memory.role not in AWAY_ROLES:
        return ""
    left_s = lease_left_s(memory, clock.now_s())
    if memory.lease is not None and left_s > 0:
        raise Unavailable(f"lease {memory.lease.lease_id} is valid for another {left_s:.1f} s")
    if memory.lease is not None:
        life.refused(memory.lease.lease_id, "the last resort fired")
    memory.desired_role = NodeRole.SERVING
    began_at_s = clock.now_s()
    while memory.role in AWAY_ROLES:
        await node.sample()
        await node.step()
        if memory.role in _STUCK:
            return f"quarantined: {life.detail}"
        await clock.sleep(node.settings.step_period_s)
    return f"serving again after {clock.now_s() - began_at_s:.1f} s"
