"""The metrics pages of a live cell, as the real Prometheus scrapes them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser

from agent.metrics_page import FAMILIES as AGENT
from common.model import NodeRole
from common.monitoring.families import Family
from coordinator.service.metrics.table import FAMILIES as COORDINATOR
from tests.harness.live.cell import LiveHarness, running_cell
from tests.live.prometheus import PROMETHEUS, asked, prometheus

PROMTOOL = shutil.which("promtool")
OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}

pytestmark = [
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None or PROMTOOL is None, reason="no prometheus here"),
]


def each_second(config: Path, copy: Path) -> Path:
    """A copy of a configuration that scrapes each second."""
    copy.write_text(config.read_text().replace('"5s"', '"1s"'))
    return copy


async def page(address: str, headers: dict[str, str] | None = None) -> str:
    """A metrics page."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}/metrics", headers=headers) as answer,
    ):
        assert answer.status == 200
        return await answer.text()


def lint(text: str) -> str:
    """What promtool finds wrong in a page."""
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"],
        input=text, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    return done.stdout + done.stderr


def openmetrics(text: str) -> list[Metric]:
    """The metrics of a page in the format of OpenMetrics.

    Raises:
        ValueError: it is not in that format.
    """
    return list(parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]  # it has no annotation


def names(text: str) -> set[str]:
    """Aryl's metrics on a page."""
    return set(re.findall(r"^# TYPE (aryl_\w+)", text, re.MULTILINE))


def known(table: tuple[Family, ...]) -> set[str]:
    """The metrics of a table."""
    return {one.name for one in table}


async def test_prometheus_scrapes_a_cell_that_lends(tmp_path: Path) -> None:
    """Every target of the configuration that `aryl up` writes is up; a loan and its reclaim are
    seen with their stages; each page has the metrics of its table and no other, and promtool and
    the parser of OpenMetrics find nothing wrong in it."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=2) as harness:
        cell = harness.cell
        config = each_second(cell.prometheus_path, tmp_path / "prometheus.yml")
        async with prometheus(config, tmp_path) as url:
            await harness.submit(harness.training("long", work_s=600.0, workers=(1, 4), gpus=4))
            await harness.until_role(NodeRole.ON_LOAN)
            async with harness.load(req_per_s=20.0):
                await harness.until_role(NodeRole.SERVING, 2)
            coordinator, agents = cell.coordinator_metrics, cell.agent_metrics
            await _all_are_up(harness, url, 1 + len(agents))

            async def stages() -> set[str]:
                count = "aryl_reclaim_stage_seconds_count > 0"
                return {one["metric"]["stage"] for one in await asked(url, count)}

            assert {"device_free", "server_ready", "exit"} <= await harness.until("stages", stages)
            in_time = await asked(url, 'aryl_returns_total{kind="reclaim", outcome="in_time"} > 0')
            assert len(in_time) == 1
            await _pages_are_right(coordinator, agents)


async def _all_are_up(harness: LiveHarness, url: str, count: int) -> None:
    async def up() -> bool:
        return len(await asked(url, "up == 1")) == count

    await harness.until("all targets are up", up)
    assert len(await asked(url, "aryl_leader == 1")) == 1
    assert len(await asked(url, "aryl_gpu_busy_ratio")) == 3 * 4


async def _pages_are_right(coordinator: str, agents: tuple[str, ...]) -> None:
    pages = {coordinator: COORDINATOR} | dict.fromkeys(agents, AGENT)
    seen: dict[tuple[Family, ...], set[str]] = {COORDINATOR: set(), AGENT: set()}
    for address, table in pages.items():
        text = await page(address)
        assert lint(text) == ""
        assert names(text) <= known(table)
        seen[table] |= names(text)
        families = openmetrics(await page(address, OPENMETRICS))
        assert {one.name for one in families} >= {"aryl_build_info", "process_cpu_seconds"}
    assert known(COORDINATOR) - seen[COORDINATOR] == set()
    # No sample of what this node has not: a lease now, an XID, a KV cache.
    rare = {"aryl_gpu_xids_total", "aryl_node_lease_remaining_seconds"}
    assert known(AGENT) - seen[AGENT] <= rare | {"aryl_server_kv_cache_used_ratio"}
