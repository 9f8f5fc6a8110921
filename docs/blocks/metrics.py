"""The reference of metrics, from the tables that the pages are made of."""

from __future__ import annotations

from collections.abc import Sequence

from agent.metrics_page import FAMILIES as AGENT
from common.monitoring.families import Family
from coordinator.service.metrics.table import CELL, KEPT, PROCESS


def agent_metrics() -> str:
    """Every metric of an agent's page."""
    return _table(AGENT)


def coordinator_metrics() -> str:
    """Every metric that each coordinator shows, leading or not."""
    return _table(PROCESS)


def cell_metrics() -> str:
    """Every metric that the leader shows besides."""
    return _table((*CELL, *KEPT))


def _table(families: Sequence[Family]) -> str:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} "
        f"| {one.meaning} |"
        for one in families
    ]
    return "\n".join(lines)
