"""Writes the Grafana boards of docs/monitoring/ from short descriptions of their panels.

    .venv/bin/python docs/monitoring_boards.py            write the boards
    .venv/bin/python docs/monitoring_boards.py --check    write nothing; exit 1 if one is stale

A query names a metric without the cell; the board's variable `cell` is added to each one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

BOARDS_DIR = Path(__file__).parent / "monitoring"
WIDTH, HEIGHT, STAT_HEIGHT = 24, 8, 4
_METRIC = re.compile(r"\b(?P<name>aryl_\w+|up)\b(?P<brace>\{)?")


class Query(NamedTuple):
    """One line of a panel."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """One panel; `width` is of 24 columns."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 12
    kind: str = "timeseries"
    note: str = ""
    is_stacked: bool = False


class Board(NamedTuple):
    """One board. variables: further labels to choose from, each with the metric that has it."""

    file: str
    title: str
    note: str
    panels: tuple[Panel, ...]
    variables: tuple[tuple[str, str], ...] = ()


def stat(title: str, expr: str, unit: str = "short", *, width: int = 4, note: str = "") -> Panel:
    """One number."""
    return Panel(title, unit, (Query(expr),), width, "stat", note)


def lines(title: str, unit: str, *queries: tuple[str, str], note: str = "") -> Panel:
    """Lines over time."""
    return Panel(title, unit, tuple(Query(*one) for one in queries), note=note)


def stacked(title: str, unit: str, expr: str, legend: str, note: str = "") -> Panel:
    """Parts of a whole over time."""
    return Panel(title, unit, (Query(expr, legend),), note=note, is_stacked=True)


def hourly(metric: str, *labels: str, where: str = "") -> str:
    """The increase of a counter per hour."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (increase({metric}{where}[1h]))"


def quantile(share: float, metric: str, *labels: str, over: str = "1h", where: str = "") -> str:
    """A quantile of a histogram."""
    by = ", ".join(("le", *labels))
    return f"histogram_quantile({share}, sum by ({by}) (rate({metric}_bucket{where}[{over}])))"


SERVICE = '{service=~"$service"}'
PROMISE = Board(
    "promise.json",
    "Aryl: the promise",
    "What is lent, what is called back, and whether each node is home by its deadline.",
    (
        stat("GPUs on loan", f"sum(aryl_lent_gpus{SERVICE})"),
        stat("Coming home", 'sum(aryl_loans_open{service=~"$service", state="coming_home"})'),
        stat(
            "Broken promises, 24 h",
            'sum(increase(aryl_returns_total{service=~"$service", outcome="late"}[24h]))',
            note="Nodes that came home after their deadline. 0 is the aim.",
        ),
        stat("Overdue now", f"sum(aryl_loans_overdue{SERVICE})"),
        stat("GPU-hours lent, 24 h", "sum(increase(aryl_lent_gpu_seconds_total[24h])) / 3600"),
        stat(
            "GPU-hours lost to reclaims, 24 h",
            'sum(increase(aryl_lost_gpu_seconds_total{cause="reclaim"}[24h])) / 3600',
        ),
        stacked("Loans", "short", f"sum by (state) (aryl_loans_open{SERVICE})", "{{state}}"),
        lines(
            "Ways home, per hour",
            "short",
            (
                hourly("aryl_returns_total", "kind", "outcome", where=SERVICE),
                "{{kind}} {{outcome}}",
            ),
        ),
        lines(
            "Reclaims against the deadline",
            "s",
            (
                quantile(0.5, "aryl_reclaim_duration_seconds", "service", where=SERVICE),
                "{{service}} median",
            ),
            (
                quantile(0.95, "aryl_reclaim_duration_seconds", "service", where=SERVICE),
                "{{service}} 95 %",
            ),
            (f"aryl_reclaim_deadline_seconds{SERVICE}", "{{service}} deadline"),
            (
                f"sum by (service) (aryl_reclaim_predicted_seconds{SERVICE})",
                "{{service}} longest expected",
            ),
            note="The longest expected time is what the settings allow each stage, together.",
        ),
        lines(
            "Stages of reclaims, 95 %, and what is expected",
            "s",
            (quantile(0.95, "aryl_reclaim_stage_seconds", "stage", where=SERVICE), "{{stage}}"),
            (f"max by (stage) (aryl_reclaim_predicted_seconds{SERVICE})", "{{stage}} expected"),
            note="checkpoint expected covers exit as well.",
        ),
        lines(
            "Part of the deadline used",
            "percentunit",
            (
                quantile(0.5, "aryl_reclaim_deadline_used_ratio", "service", where=SERVICE),
                "{{service}} median",
            ),
            (
                quantile(0.95, "aryl_reclaim_deadline_used_ratio", "service", where=SERVICE),
                "{{service}} 95 %",
            ),
        ),
        lines(
            "Load and capacity",
            "reqps",
            (f"aryl_service_load_requests_per_second{SERVICE}", "{{service}} load"),
            (f"aryl_service_capacity_requests_per_second{SERVICE}", "{{service}} capacity"),
            note="A gap in the load: it is unknown.",
        ),
        lines(
            "Serving nodes",
            "short",
            ('aryl_service_nodes{service=~"$service", role="serving"}', "{{service}} serving"),
            (f"aryl_service_min_serving_nodes{SERVICE}", "{{service}} least"),
            (f"aryl_service_unknown_load_nodes{SERVICE}", "{{service}} load unknown"),
        ),
        lines(
            "Lent GPUs in use",
            "percentunit",
            (
                "sum(rate(aryl_lent_held_gpu_seconds_total[15m]))"
                " / sum(rate(aryl_lent_gpu_seconds_total[15m]))",
                "held by workers",
            ),
        ),
        lines(
            "Work lost by reclaims, predicted and realised",
            "s",
            (
                hourly("aryl_reclaim_predicted_lost_gpu_seconds_total", "service", where=SERVICE),
                "{{service}} predicted",
            ),
            (
                hourly("aryl_reclaim_realised_lost_gpu_seconds_total", "service", where=SERVICE),
                "{{service}} realised",
            ),
            note="GPU-seconds per hour.",
        ),
        lines(
            "Loans, per hour",
            "short",
            ("sum(increase(aryl_loans_total[1h]))", "made"),
            ("sum(increase(aryl_loans_cancelled_total[1h]))", "cancelled before they began"),
        ),
    ),
    (("service", "aryl_service_mode"),),
)

TENANT = '{tenant=~"$tenant"}'
QUEUE = Board(
    "queue.json",
    "Aryl: queue and tenants",
    "Who waits, who holds what, what is decided and what it costs.",
    (
        stat("Waiting", 'sum(aryl_jobs{tenant=~"$tenant", state="pending"})'),
        stat("Running", 'sum(aryl_jobs{tenant=~"$tenant", state=~"running|resizing"})'),
        stat("Stalled", "sum(aryl_jobs_stalled)"),
        stat("Never fit", "sum(aryl_jobs_without_room)"),
        stat("Oldest wait", f"max(aryl_job_oldest_wait_seconds{TENANT})", "s"),
        stat("Age of the last pass", "max(aryl_last_pass_age_seconds)", "s"),
        stacked("Jobs", "short", f"sum by (state) (aryl_jobs{TENANT})", "{{state}}"),
        stacked(
            "Waiting jobs",
            "short",
            'sum by (tenant) (aryl_jobs{tenant=~"$tenant", state="pending"})',
            "{{tenant}}",
        ),
        lines(
            "Queueing time",
            "s",
            (
                quantile(0.5, "aryl_job_queueing_seconds", "tenant", where=TENANT),
                "{{tenant}} median",
            ),
            (
                quantile(0.95, "aryl_job_queueing_seconds", "tenant", where=TENANT),
                "{{tenant}} 95 %",
            ),
        ),
        lines(
            "GPUs of tenants",
            "short",
            (f"sum by (tenant) (aryl_tenant_gpus{TENANT})", "{{tenant}} held"),
            (f"sum by (tenant) (aryl_tenant_guarantee_gpus{TENANT}) > 0", "{{tenant}} guarantee"),
            (f"sum by (tenant) (aryl_tenant_waiting_gpus{TENANT})", "{{tenant}} waiting for"),
        ),
        stacked("GPUs by holder", "short", "sum by (holder) (aryl_gpus)", "{{holder}}"),
        lines(
            "GPUs held, share",
            "percentunit",
            (
                "sum(rate(aryl_training_held_gpu_seconds_total[15m]))"
                " / sum(rate(aryl_training_gpu_seconds_total[15m]))",
                "training pool",
            ),
            (
                'sum by (type) (aryl_gpus{holder="free"}) / sum by (type) (aryl_gpus)',
                "free {{type}}",
            ),
        ),
        lines(
            "Jobs, per hour",
            "short",
            ("sum(increase(aryl_jobs_submitted_total[1h]))", "submitted"),
            ("sum by (outcome) (increase(aryl_jobs_ended_total[1h]))", "{{outcome}}"),
            ("sum(increase(aryl_stalls_total[1h]))", "stalled"),
            ("sum(increase(aryl_gang_timeouts_total[1h]))", "gangs not ready in time"),
        ),
        lines(
            "Preemptions, per hour",
            "short",
            ("sum by (cause) (increase(aryl_preemptions_total[1h]))", "{{cause}}"),
        ),
        lines(
            "Work lost, GPU-seconds per hour",
            "s",
            ("sum by (cause) (increase(aryl_lost_gpu_seconds_total[1h]))", "{{cause}}"),
        ),
        lines(
            "Decisions, per minute",
            "short",
            ("sum by (kind) (rate(aryl_decisions_total[5m])) * 60", "{{kind}}"),
            ("sum by (kind) (rate(aryl_decisions_refused_total[5m])) * 60", "{{kind}} refused"),
            ("sum(rate(aryl_resizes_total[5m])) * 60", "resizes carried out"),
        ),
        lines(
            "Passes and journal, 99 %",
            "s",
            (quantile(0.99, "aryl_pass_duration_seconds", "kind", over="10m"), "{{kind}} pass"),
            (quantile(0.99, "aryl_journal_append_duration_seconds", over="10m"), "append"),
        ),
        lines(
            "Journal",
            "Bps",
            ("sum(rate(aryl_journal_bytes_total[5m]))", "bytes"),
        ),
        lines(
            "Messages",
            "ops",
            ("sum(rate(aryl_reports_total[5m]))", "reports"),
            ("sum(rate(aryl_reports_shed_total[5m]))", "reports shed"),
            ("sum by (kind) (rate(aryl_bad_messages_total[5m])) > 0", "bad {{kind}}"),
        ),
        lines(
            "Records and snapshots, per minute",
            "short",
            ("sum(rate(aryl_journal_records_total[5m])) * 60", "records"),
            ("sum(rate(aryl_snapshots_total[15m])) * 60", "snapshots"),
        ),
        lines(
            "History, lines behind",
            "short",
            ("max(aryl_history_pending_lines)", "the stream"),
            ("aryl_history_index_lag_lines", "the index of {{instance}}"),
        ),
        lines(
            "Coordinators",
            "short",
            ("aryl_leader", "{{instance}} leads"),
            ("max(aryl_leader_epoch)", "epoch"),
            ("sum(rate(aryl_bus_reconnects_total[15m])) * 900", "NATS lost, per 15 min"),
        ),
    ),
    (("tenant", "aryl_tenant_gpus"),),
)

NODE = '{node=~"$node"}'
NODES = Board(
    "nodes.json",
    "Aryl: nodes",
    "GPUs, servers and agents of the nodes, each by its own agent.",
    (
        stat("Agents that do not answer", 'sum(up{job="aryl-agent"} == bool 0)'),
        stat("Nodes heard", "sum(aryl_nodes_heard)"),
        stat("Quarantined", 'sum(aryl_nodes{role="quarantined"})'),
        stat("Take nothing new", "sum(aryl_nodes_closed)"),
        stat("GPUs out or lost", 'sum(aryl_gpus{holder=~"out|lost"})'),
        stat("Loads unknown", "sum(aryl_service_unknown_load_nodes)"),
        stacked("Nodes by role", "short", "sum by (role) (aryl_nodes)", "{{role}}"),
        lines(
            "GPU busy share",
            "percentunit",
            (f"avg by (node) (aryl_gpu_busy_ratio{NODE})", "{{node}}"),
        ),
        lines(
            "GPU memory in use",
            "percentunit",
            (
                f"sum by (node) (aryl_gpu_memory_used_bytes{NODE})"
                f" / sum by (node) (aryl_gpu_memory_size_bytes{NODE})",
                "{{node}}",
            ),
        ),
        lines(
            "GPU temperature",
            "celsius",
            (f"max by (node) (aryl_gpu_temperature_celsius{NODE})", "{{node}}"),
        ),
        lines(
            "GPU power",
            "watt",
            (f"sum by (node) (aryl_gpu_power_watts{NODE})", "{{node}}"),
            (f"sum by (node) (aryl_gpu_power_limit_watts{NODE})", "{{node}} limit"),
        ),
        lines(
            "XIDs and ECC errors, per hour",
            "short",
            (
                hourly("aryl_gpu_xids_total", "node", "gpu", "code", where=NODE) + " > 0",
                "{{node}} GPU {{gpu}} XID {{code}}",
            ),
            (
                hourly("aryl_gpu_ecc_uncorrected_errors_total", "node", "gpu", where=NODE) + " > 0",
                "{{node}} GPU {{gpu}} ECC",
            ),
        ),
        lines(
            "GPUs that are not well",
            "short",
            (
                'sum by (node, health) (aryl_gpu_health{node=~"$node", health!="ok"}) > 0',
                "{{node}} {{health}}",
            ),
        ),
        lines(
            "Workers",
            "short",
            (f"sum by (phase) (aryl_node_workers{NODE})", "{{phase}}"),
            (f"sum(aryl_node_trespassers{NODE})", "trespassers"),
        ),
        lines(
            "Requests of the servers",
            "short",
            (f"sum by (service) (aryl_server_running_requests{NODE})", "{{service}} running"),
            (f"sum by (service) (aryl_server_waiting_requests{NODE})", "{{service}} waiting"),
            (f"sum by (service) (aryl_server_load_known{NODE} == bool 0)", "{{service}} unknown"),
        ),
        lines(
            "KV cache in use",
            "percentunit",
            (f"max by (node) (aryl_server_kv_cache_used_ratio{NODE})", "{{node}}"),
        ),
        lines(
            "Requests answered",
            "reqps",
            (f"sum by (service) (rate(aryl_server_requests_total{NODE}[5m]))", "{{service}}"),
        ),
        lines(
            "Servers that are down",
            "short",
            (f"sum by (service) (aryl_server_healthy{NODE} == bool 0)", "{{service}}"),
        ),
        lines(
            "Collectors, 99 %",
            "s",
            (
                quantile(
                    0.99, "aryl_collector_duration_seconds", "collector", over="10m", where=NODE
                ),
                "{{collector}}",
            ),
        ),
        lines(
            "Failures of collectors, per hour",
            "short",
            (
                hourly("aryl_collector_failures_total", "node", "collector", where=NODE) + " > 0",
                "{{node}} {{collector}}",
            ),
            (
                f"count by (collector) (aryl_collector_success{NODE} == 0)",
                "{{collector}} fails now",
            ),
        ),
        lines(
            "Host CPUs and memory in use",
            "percentunit",
            (f"avg by (node) (aryl_host_cpu_busy_ratio{NODE})", "{{node}} CPUs"),
            (
                f"sum by (node) (aryl_host_memory_used_bytes{NODE})"
                f" / sum by (node) (aryl_host_memory_size_bytes{NODE})",
                "{{node}} memory",
            ),
        ),
        lines(
            "Cost of the agents",
            "percentunit",
            (f"max(rate(aryl_agent_cpu_seconds_total{NODE}[5m]))", "cores, the busiest agent"),
            (f"max(aryl_agent_memory_bytes{NODE}) / 80e6", "memory of 80 MB, the largest agent"),
        ),
        lines(
            "Trouble with NATS, per hour",
            "short",
            (
                hourly("aryl_agent_bus_reconnects_total", "node", where=NODE) + " > 0",
                "{{node}} lost",
            ),
            (
                hourly("aryl_agent_lease_failures_total", "node", where=NODE) + " > 0",
                "{{node}} renewals failed",
            ),
            (
                hourly("aryl_agent_bad_messages_total", "node", where=NODE) + " > 0",
                "{{node}} bad messages",
            ),
        ),
    ),
    (("node", "aryl_node_info"),),
)

BOARDS = (PROMISE, QUEUE, NODES)


def with_cell(expr: str) -> str:
    """A query of one cell, or of those chosen."""

    def add(found: re.Match[str]) -> str:
        return f'{found["name"]}{{cell=~"$cell"' + (", " if found["brace"] else "}")

    return _METRIC.sub(add, expr)


def as_json(board: Board) -> str:
    """A board as Grafana imports it, schema 39."""
    made: dict[str, Any] = {
        "uid": f"aryl-{board.file.partition('.')[0]}",
        "title": board.title,
        "description": board.note,
        "tags": ["aryl"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables(board)},
        "links": [{"type": "dashboards", "tags": ["aryl"], "title": "Aryl", "keepTime": True}],
        "panels": _placed(board.panels),
    }
    return json.dumps(made, indent=1) + "\n"


def _variables(board: Board) -> list[dict[str, Any]]:
    source = {"type": "datasource", "name": "source", "query": "prometheus", "label": "Source"}
    asked = [("cell", "aryl_leader"), *board.variables]
    return [source] + [
        {
            "type": "query",
            "name": label,
            "label": label.capitalize(),
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "query": {"query": f"label_values({metric}, {label})", "refId": label},
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "refresh": 2,
            "sort": 1,
            "current": {"text": "All", "value": "$__all"},
        }
        for label, metric in asked
    ]


def _placed(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """Panels in rows, from left to right."""
    made: list[dict[str, Any]] = []
    x = y = row = 0
    for number, panel in enumerate(panels, start=1):
        height = STAT_HEIGHT if panel.kind == "stat" else HEIGHT
        if x + panel.width > WIDTH or (x and height != row):
            x, y = 0, y + row
        row = height
        place = {"x": x, "y": y, "w": panel.width, "h": height}
        x += panel.width
        made.append(_panel(number, panel, place))
    return made


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.is_stacked else {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.note,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "expr": with_cell(query.expr),
                "legendFormat": query.legend,
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
            }
            for at, query in enumerate(panel.queries)
        ],
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the boards, or with --check say which are stale."""
    parser = argparse.ArgumentParser(description="Write the Grafana boards.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    is_check: bool = parser.parse_args(arguments).check
    status = 0
    for board in BOARDS:
        path = BOARDS_DIR / board.file
        text = as_json(board)
        if path.exists() and path.read_text() == text:
            continue
        status = 1 if is_check else 0
        if not is_check:
            path.write_text(text)
        sys.stdout.write(f"{'stale' if is_check else 'wrote'}: {path.name}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
