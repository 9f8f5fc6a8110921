"""Which last resort a node has, and the command that it runs. Must not know leases."""

from __future__ import annotations

import sys
from pathlib import Path

from agent.keeper import KeeperLastResort, SystemdLastResort
from agent.lease import LastResort
from agent.settings import AgentSettings, Starter
from common.clock import Clock


def go_home_argv(config: Path, state_dir: Path, fake_nvml: Path | None) -> tuple[str, ...]:
    """The command that brings a node home by itself.

    It names the state directory too: by then the file may not say it any more.
    """
    fake = () if fake_nvml is None else ("--fake-nvml", str(fake_nvml.resolve()))
    return (
        sys.executable,
        "-m",
        "agent.daemon",
        "--go-home",
        "--config",
        str(config.absolute()),  # drop-ins are beside a link, not beside what it leads to
        "--state-dir",
        str(state_dir.absolute()),
        *fake,
    )


def last_resort(
    settings: AgentSettings, *, config: Path, fake_nvml: Path | None, clock: Clock
) -> LastResort:
    """The last resort of this node, as its settings say."""
    state_dir = Path(settings.state_dir)
    argv = go_home_argv(config, state_dir, fake_nvml)
    if settings.last_resort == Starter.SYSTEMD:
        log = state_dir / "last-resort.log"
        return SystemdLastResort(settings.node, argv, log=log, clock=clock)
    return KeeperLastResort(state_dir / "last-resort.json", argv, clock=clock)
