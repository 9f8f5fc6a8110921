"""Which last resort a node has, and the command that it runs. Must not know leases."""

from __future__ import annotations

import sys
from pathlib import Path

from agent.keeper import KeeperLastResort, SystemdLastResort
from agent.lease import LastResort
from agent.settings import AgentSettings, Starter
from common.clock import Clock


def go_home_argv(config: Path, fake_nvml: Path | None) -> tuple[str, ...]:
    """The command that brings a node home by itself."""
    fake = () if fake_nvml is None else ("--fake-nvml", str(fake_nvml.resolve()))
    return (
        sys.executable,
        "-m",
        "agent.daemon",
        "--go-home",
        "--config",
        str(config.resolve()),
        *fake,
    )


def last_resort(
    settings: AgentSettings, *, config: Path, fake_nvml: Path | None, clock: Clock
) -> LastResort:
    """The last resort of this node, as its settings say."""
    argv = go_home_argv(config, fake_nvml)
    state_dir = Path(settings.state_dir)
    if settings.last_resort == Starter.SYSTEMD:
        log = state_dir / "last-resort.log"
        return SystemdLastResort(settings.node, argv, log=log, clock=clock)
    return KeeperLastResort(state_dir / "last-resort.json", argv, clock=clock)
