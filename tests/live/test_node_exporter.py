"""The alerts about disks and units, on what the real node_exporter says of a real systemd.

systemd runs in namespaces of its own: with the machine's files, which it cannot write, and with a
`/run`, `/tmp` and `/var` that end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from common.clock import SystemClock
from coordinator.demo.ports import free_ports
from tests.live.prometheus import PROMETHEUS, asked, prometheus

ALERTS = Path(__file__).parents[2] / "docs" / "monitoring" / "alerts.yml"
SYSTEMD = Path("/lib/systemd/systemd")
EXPORTER = shutil.which("prometheus-node-exporter")
PATIENCE_S = 60.0
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--cgroup", "--kill-child")
BOOT = """
set -e
mount --make-rprivate /
mkdir -p "$1"
mount --bind / "$1"
mount -o remount,ro,bind "$1"
cd "$1"
mount -t proc proc proc
mount -t sysfs sys sys
mount -t cgroup2 cgroup sys/fs/cgroup
mount --rbind /dev dev
for each in run tmp var; do mount -t tmpfs none $each; done
mkdir -p run/systemd/system var/log
cp "$2"/* run/systemd/system
exec chroot . "$3" --system --unit=cell.target --log-target=null
"""
AGENT = 'name="aryl-agent.service", state="active"'
UNITS = {
    "cell.target": "[Unit]\nDefaultDependencies=no\n"
    "Wants=exporter.service aryl-agent.service aryl-coordinator.service aryl-other.service\n",
    "aryl-agent.service": "/bin/sleep infinity",
    "aryl-coordinator.service": "/bin/false",
    "aryl-other.service": "/bin/false",
}


def may_boot() -> bool:
    """Whether this machine lets us have such namespaces."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or not SYSTEMD.exists():
        return False
    mounts = ("sh", "-c", "mount --make-rprivate / && mount -t cgroup2 c /sys/fs/cgroup")
    return subprocess.run([*NAMESPACES, *mounts], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        PROMETHEUS is None or EXPORTER is None, reason="no prometheus or node_exporter here"
    ),
    pytest.mark.skipif(not may_boot(), reason="systemd needs namespaces of root"),
]


def rule(name: str) -> str:
    """The expression of a packaged alert."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    [found] = [one for each in groups for one in each["rules"] if one.get("alert") == name]
    return str(found["expr"])


def unit(command: str) -> str:
    """A service that runs a command."""
    return f"[Unit]\nDefaultDependencies=no\n[Service]\nExecStart={command}\n"


@contextlib.asynccontextmanager
async def running(*argv: str) -> AsyncIterator[None]:
    """A process for the block."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def machine(directory: Path, port: int) -> AsyncIterator[None]:
    """A systemd with an agent that runs, a coordinator that failed, and node_exporter."""
    units, root = directory / "units", directory / "root"
    units.mkdir()
    exporter = f"{EXPORTER} --web.listen-address=127.0.0.1:{port} --collector.systemd"
    texts = {**UNITS, "exporter.service": f"{exporter} --collector.systemd.private"}
    for name, text in texts.items():
        (units / name).write_text(text if text.startswith("[") else unit(text))
    async with running(*NAMESPACES, "sh", "-c", BOOT, "sh", str(root), str(units), str(SYSTEMD)):
        yield


def scraping(directory: Path, port: int) -> Path:
    """A configuration of Prometheus that scrapes one port each second."""
    config = directory / "prometheus.yml"
    targets = [{"targets": [f"127.0.0.1:{port}"]}]
    jobs = [{"job_name": "node", "scrape_interval": "1s", "static_configs": targets}]
    config.write_text(yaml.safe_dump({"scrape_configs": jobs}))
    return config


async def until_found(url: str, query: str) -> list[dict[str, Any]]:
    """The result of a query, as soon as there is any."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError, aiohttp.ContentTypeError):
                if found := await asked(url, query):
                    return found
            await SystemClock().sleep(0.2)


async def test_the_alerts_find_a_failed_unit_and_the_free_part_of_a_disk(tmp_path: Path) -> None:
    """The failed coordinator is found by name, and no other unit; each real disk has a share."""
    (port,) = free_ports(1)
    async with machine(tmp_path, port), prometheus(scraping(tmp_path, port), tmp_path) as url:
        await until_found(url, f"node_systemd_unit_state{{{AGENT}}} == 1")
        failed = await until_found(url, rule("ArylUnitNotActive"))
        assert [one["metric"]["name"] for one in failed] == ["aryl-coordinator.service"]
        assert failed[0]["metric"]["instance"] == f"127.0.0.1:{port}"

        share, limit = rule("ArylDiskNearlyFull").rsplit("<", 1)
        assert 0.0 < float(limit) < 1.0
        disks = {one["metric"]["mountpoint"]: one for one in await until_found(url, share)}
        assert disks.keys().isdisjoint({"/run", "/tmp", "/var"}), "these are in memory"
        here = os.statvfs("/")
        free_ratio = here.f_bavail / here.f_blocks
        assert float(disks["/"]["value"][1]) == pytest.approx(free_ratio, abs=0.05)
