"""The command line on services that Aryl may not act for alone, and on agents' own accounts."""

from __future__ import annotations

import json

from common.api import Describe, Description, Done, Operate
from common.messages import AgentReport, CollectorReport, CostReport
from tests.cli.fake_cell import FakeCell, aryl, node_row


def test_a_recommended_loan_is_approved_by_its_node() -> None:
    """One order, with the reason that a person gave."""
    asked: list[Operate] = []

    def answer(request: Operate) -> Done:
        asked.append(request)
        return Done(detail="approve_loan i0")

    run = aryl(FakeCell({Operate: answer}), "loan", "approve", "i0", "--reason", "night")
    assert run.code == 0
    assert [(one.action, one.target, one.reason) for one in asked] == [
        ("approve_loan", "i0", "night")
    ]


NODE = Description(
    kind="node",
    name="t0",
    node=node_row(),
    agent=AgentReport(bad_messages=7, lease_failures=5),
    cost=CostReport(cpu_s=90.0, rss_bytes=50 * 2**20),
    collectors=(
        CollectorReport(name="host", is_success=True, duration_s=0.0),
        CollectorReport(name="gpu", is_success=False, duration_s=2.0, error="no answer"),
    ),
)


def test_what_an_agent_says_of_itself_is_in_json_and_wide_only() -> None:
    """Most people look at a node for other reasons."""
    cell = FakeCell({Describe: NODE})
    assert "bad messages" not in aryl(cell, "node", "describe", "t0").out
    wide = aryl(cell, "node", "describe", "t0", "-o", "wide").out
    lines = [" ".join(line.split()) for line in wide.splitlines()]
    assert "agent bad messages 7" in lines
    assert "agent lease failures 5" in lines
    assert "collectors gpu: no answer" in lines
    assert any(line.startswith("agent cost") and "50 MiB" in line for line in lines)
    found = json.loads(aryl(cell, "node", "describe", "t0", "-o", "json").out)
    assert found["description"]["agent"]["bad_messages"] == 7
