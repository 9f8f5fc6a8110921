"""The coordinator's page: a standby shows itself, the leader the cell as well."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.monitoring.families import Scrape
from common.version import version
from coordinator.service.coordinator import Coordinator
from coordinator.service.metrics.cell_state import put_cell, without_room
from coordinator.service.metrics.table import CELL, PROCESS

WITHOUT_ROOM_S = 60.0
"""Between two counts of the jobs without room, which cost more than all else on the page."""


class CellMetrics(Collector):
    """Reads a coordinator at each scrape."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._without_room = (float("-inf"), 0)

    def collect(self) -> Iterator[Metric]:
        """All metrics that have a value now."""
        c = self._coordinator
        scrape = Scrape((*PROCESS, *CELL))
        scrape.put("aryl_build_info", 1.0, version() or "source")
        scrape.put("aryl_leader", float(c.is_leading))
        scrape.put("aryl_reports_total", c.reports_heard)
        scrape.put("aryl_reports_shed_total", c.inflow.shed_count)
        for kind, count in c.bad_messages_by_kind.items():
            scrape.put("aryl_bad_messages_total", count, kind)
        scrape.put("aryl_bus_errors_total", sum(one.error_count for one in c.bus_counters))
        scrape.put("aryl_bus_reconnects_total", sum(one.reconnect_count for one in c.bus_counters))
        if c.index is not None:
            scrape.put("aryl_history_index_lag_lines", c.index.lag_lines)
        if c.is_leading:
            self._put_lead(scrape)
        return scrape.found()

    def _put_lead(self, scrape: Scrape) -> None:
        """What only a leader knows; a standby's engine is empty."""
        c = self._coordinator
        time = c.decider.time
        put_cell(scrape, c.engine, time.now_s())
        now_s = c.clock.now_s()
        age_s = now_s - c.decider.passed_at_s
        scrape.put("aryl_last_pass_age_seconds", min(age_s, now_s - c.leads_since_s))
        scrape.put("aryl_history_pending_lines", c.history_pending_lines)
        scrape.put("aryl_clock_warning", float(bool(time.warning())))
        counted_at_s, count = self._without_room
        if now_s - counted_at_s >= WITHOUT_ROOM_S:
            count = without_room(c.engine)
            self._without_room = now_s, count
        scrape.put("aryl_jobs_without_room", count)


def make_registry(coordinator: Coordinator) -> CollectorRegistry:
    """The registry of the page: what the coordinator measures, this process, and its state."""
    registry = coordinator.registry
    ProcessCollector(registry=registry)
    registry.register(CellMetrics(coordinator))
    return registry
