"""XIDs on their whole way: a fake driver and a fake kernel log, a real agent, its reports."""

from __future__ import annotations

from collections import Counter

import psutil
import pytest

from common.messages import CollectorReport
from tests.harness.node.daemon import DaemonHarness, end, make_daemon_harness
from tests.harness.node.workers import is_alive, kill

pytestmark = [pytest.mark.nats, pytest.mark.slow]
harness = pytest.fixture(make_daemon_harness)

FAULTS = """
[[fault]]
kind = "xid"
gpu = 0
value = 79
at_s = 0.5
told_by = "both"

[[fault]]
kind = "xid"
gpu = 1
value = 13
at_s = 0.5
told_by = "kernel_log"

[[fault]]
kind = "xid"
gpu = 0
value = 31
at_s = 0.7

[[fault]]
kind = "xid"
gpu = 1
value = 48
at_s = 1.5
told_by = "both"

[[fault]]
kind = "xid"
value = 63
at_s = 1.7
told_by = "both"
"""


def told(harness: DaemonHarness) -> Counter[tuple[int, int]]:
    """How often all reports together have told each XID, by the index of its GPU."""
    return Counter(
        (gpu.index, code) for report in harness.reports for gpu in report.gpus for code in gpu.xids
    )


def fared(harness: DaemonHarness) -> CollectorReport | None:
    """How the last report says that reading the kernel log went."""
    if not harness.reports:
        return None
    named = {report.name: report for report in harness.reports[-1].collectors}
    return named.get("kernel_log")


def log_children(pid: int) -> list[int]:
    """The children of an agent that write its kernel log."""
    return [
        child.pid
        for child in psutil.Process(pid).children()
        if "agent.gpu.fake.kernel_log" in child.cmdline()
    ]


async def test_each_xid_reaches_the_reports_once(harness: DaemonHarness) -> None:
    """Of NVML alone, of the log alone, of both: one each. A log whose reader is killed is said
    and read again while reports go on; no child outlives the agent."""
    harness.fleet.write_text(harness.fleet.read_text() + FAULTS)
    # More looks than reports: an XID must not be lost between two of them, nor told twice.
    agent = await harness.start(harness.config(report_period_s=0.3, step_period_s=0.05))
    last = {(0, 63), (1, 63)}
    await harness.until(lambda: last <= told(harness).keys(), "the last XIDs")
    count = len(harness.reports)
    await harness.until(lambda: len(harness.reports) > count + 3, "reports after them")
    expected = {(0, 79): 1, (1, 13): 1, (0, 31): 1, (1, 48): 1, (0, 63): 1, (1, 63): 1}
    assert told(harness) == expected

    [child] = log_children(agent.pid)
    kill(child)

    def is_down() -> bool:
        report = fared(harness)
        return report is not None and "ended with -9" in report.error

    def is_up() -> bool:
        report = fared(harness)
        return report is not None and report.is_success

    await harness.until(is_down, "the reason")
    await harness.until(is_up, "another reader")
    assert told(harness) == expected
    [second] = log_children(agent.pid)
    assert await end(agent) == 0
    assert not is_alive(second)


async def test_a_log_that_is_off_is_not_read(harness: DaemonHarness) -> None:
    """NVML's own events still come."""
    harness.fleet.write_text(harness.fleet.read_text() + FAULTS)
    agent = await harness.start(harness.config(kernel_log="off"))
    await harness.until(lambda: {(0, 63), (1, 63)} <= told(harness).keys(), "NVML's last XIDs")
    assert told(harness).keys() == {(0, 79), (0, 31), (1, 48), (0, 63), (1, 63)}
    assert fared(harness) is None
    assert log_children(agent.pid) == []


async def test_an_agent_that_is_killed_leaves_no_reader(harness: DaemonHarness) -> None:
    """kill -9 of the agent: the child sees that nobody reads it, and ends."""
    harness.fleet.write_text(harness.fleet.read_text() + FAULTS)
    agent = await harness.start(harness.config())
    await harness.until(lambda: log_children(agent.pid) != [], "a reader")
    [child] = log_children(agent.pid)
    kill(agent.pid)
    await harness.until(lambda: not is_alive(child), "the reader has gone")
