"""A node that is late because a command of its server hangs: which one, and for how long."""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from agent.core.inference_server import SLOW_S
from agent.core.state import HookKind
from common import subjects
from common.messages import CommandReport, NodeReport, decode, encode
from common.model import NodeRole
from tests.agent.bench import Bench, lease
from tests.service.cell import CELL
from tests.service.test_late_drains import I0, Stuck
from tests.service.wire import example

WORKERS = "workers that do not end within their grace are killed"


def test_an_agent_tells_of_a_command_that_does_not_end() -> None:
    """Not of one that is as quick as they are, nor of one that has ended."""
    bench = Bench(at_s=100.0)
    bench.serve()
    bench.answers_hooks = False
    bench.want(NodeRole.ON_LOAN, lease=lease())
    bench.step()
    assert bench.hooks[-1] == HookKind.UNROUTE
    life, began_at_s = bench.life, bench.now_s
    assert life.slow_command(began_at_s + SLOW_S) is UNSET
    told = CommandReport(name="unroute", running_s=40.0)
    assert life.slow_command(began_at_s + 40.0) == told
    life.hook_done(HookKind.UNROUTE, error="", now_s=began_at_s + 41.0)
    assert life.slow_command(began_at_s + 60.0) is UNSET


def test_a_report_without_one_has_the_bytes_that_it_always_had() -> None:
    """A coordinator of an older version refuses what it does not know."""
    report = msgspec.convert(example(NodeReport), NodeReport)
    assert report.slow_command is not UNSET
    quick = encode(replace(report, slow_command=UNSET))
    assert "slow_command" not in msgspec.msgpack.decode(quick)
    assert decode(quick, NodeReport).slow_command is UNSET


async def test_who_asks_why_a_node_is_late_is_told_of_the_command() -> None:
    """And not of workers, which have gone long ago."""
    stuck = Stuck()
    async with stuck.cell:
        await stuck.begin()
        await stuck.cell.clock.advance(75.0)
        said = await stuck.explained()
        assert "a late reclaim" in said
        assert WORKERS in said
        stuck.agent.is_silent = True
        slow = CommandReport(name="stop", running_s=95.0)
        report = replace(stuck.agent.make_report(), slow_command=slow)
        await stuck.agent.bus.publish(subjects.node_report(CELL, I0), encode(report))
        await stuck.cell.clock.settle()
        said = await stuck.explained()
        assert "a late reclaim; its stop command has run for 95 s and has not ended" in said
        assert WORKERS not in said
        await stuck.cell.clock.advance(5.0)
        assert "its stop command has run for 100 s and has not ended" in await stuck.explained()
