"""The reference of metrics, from the tables that the pages are made of."""

from __future__ import annotations

from collections.abc import Sequence

from agent.metrics_page import FAMILIES as AGENT
from common.monitoring.families import Family
from coordinator.service.metrics.table import CELL, KEPT, PROCESS


def agent_metrics() -> str:
    """Every metric of an agent's page."""
    return _list(AGENT)


def coordinator_metrics() -> str:
    """Every metric that each coordinator shows, leading or not."""
    return _list(PROCESS)


def cell_metrics() -> str:
    """Every metric that the leader shows besides."""
    return _list((*CELL, *KEPT))


def _list(families: Sequence[Family]) -> str:
    lines: list[str] = []
    for one in families:
        labels = f" by {', '.join(f'`{label}`' for label in one.labels)}" if one.labels else ""
        lines.append(f"- `{one.name}` ({one.kind}{labels}): {one.meaning}")
    return "\n".join(lines)
