"""Boards and alerts, held to the metrics that there are and to the pages that they link to."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.metrics_page import FAMILIES as AGENT
from common.monitoring.families import Family
from coordinator.service.metrics.table import FAMILIES as COORDINATOR

DOCS = Path(__file__).parents[2] / "docs"
MONITORING = DOCS / "monitoring"
BOARDS = sorted(MONITORING.glob("*.json"))
ALERTS = MONITORING / "alerts.yml"
NOT_ON_A_BOARD = {
    "aryl_build_info",
    "aryl_bus_errors_total",
    "aryl_agent_bus_errors_total",
    "aryl_agent_bus_dropped_messages_total",
    "aryl_agent_connected",
    "aryl_agent_sample_age_seconds",
    "aryl_gpu_info",
    "aryl_host_cpus",
    "aryl_node_lease_remaining_seconds",
    "aryl_node_role",
    "aryl_node_takes_work",
    "aryl_recalled",
    "aryl_frozen",
}
"""For the details of one node or process, which no board shows."""


def named(text: str) -> set[str]:
    """Aryl's metrics in a query."""
    return set(re.findall(r"\baryl_\w+", text))


def queries() -> dict[str, str]:
    """Every query of the boards and the alerts, by where it stands."""
    found: dict[str, str] = {}
    for path in BOARDS:
        board: dict[str, Any] = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                found[f"{path.name}: {panel['title']} {target['refId']}"] = target["expr"]
        for variable in board["templating"]["list"][1:]:
            found[f"{path.name}: {variable['name']}"] = variable["query"]["query"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        found |= {rule["alert"]: rule["expr"] for rule in group["rules"]}
    return found


def test_boards_and_alerts_ask_for_metrics_that_exist() -> None:
    """Each name in a query is a sample of a metric, and each metric is asked for somewhere."""
    known = {name for family in (*AGENT, *COORDINATOR) for name in family.sample_names()}
    asked = {where: named(query) for where, query in queries().items()}
    assert {where: names - known for where, names in asked.items() if names - known} == {}
    every = set().union(*asked.values())
    unasked = {one.name for one in (*AGENT, *COORDINATOR) if not every & {*one.sample_names()}}
    assert unasked == NOT_ON_A_BOARD


def test_queries_use_labels_that_their_metrics_have() -> None:
    """A misspelt label would match nothing, or everything."""
    labels: dict[str, set[str]] = {}
    for one in (*AGENT, *COORDINATOR):
        for name in one.sample_names():
            labels[name] = {*one.labels, "cell", "instance", "job", "le"}
    for where, query in queries().items():
        for name, selector in re.findall(r"\b(aryl_\w+)\{([^}]*)\}", query):
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert used <= labels[name], where


def test_each_alert_leads_to_a_heading_of_a_page() -> None:
    """Its link opens where the runbook says what to do."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
            text = (DOCS / page.replace(".html", ".md")).read_text()
            headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}
            assert anchor in slugs, rule["alert"]


def test_each_row_of_set_alarms_has_its_alert() -> None:
    """The table of docs/operate.md names the alerts, and all of them exist."""
    section = (DOCS / "operate.md").read_text().split("\n## Set alarms\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    alerts = set(re.findall(r"alert: (\w+)", ALERTS.read_text()))
    for row in rows:
        named_alerts = set(re.findall(r"`(Aryl\w+)`", row))
        assert named_alerts, row
        assert named_alerts <= alerts, row


def test_boards_are_as_their_descriptions_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a board was edited by hand or left behind."""
    monkeypatch.syspath_prepend(str(DOCS))
    boards: Any = importlib.import_module("monitoring_boards")
    assert boards.main(["--check"]) == 0
    assert {board.file for board in boards.BOARDS} == {path.name for path in BOARDS}


@pytest.mark.parametrize("table", [AGENT, COORDINATOR], ids=["agent", "coordinator"])
def test_names_follow_the_rules_of_prometheus(table: tuple[Family, ...]) -> None:
    """Prefix, base units, `_total` for counters alone, and no label with a value for each job."""
    assert len({one.name for one in table}) == len(table)
    for one in table:
        assert re.fullmatch(r"aryl_[a-z0-9_]+", one.name)
        assert one.name.endswith("_total") == (one.kind == "counter"), one.name
        assert not re.search(r"_(ms|mb|gb|percent|minutes|hours|watt|celsius_)$", one.name)
        assert bool(one.buckets) == (one.kind == "histogram"), one.name
        assert one.meaning[-1] != "."
        assert not {"job", "job_id", "lease_id", "user", "pid"} & {*one.labels}
