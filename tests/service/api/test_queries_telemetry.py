"""What a node measures, from its GPUs' driver to what an operator reads: the last report only."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from agent.gpu.fake.processes import Usage
from agent.gpu.nvml import THROTTLE_REASONS, GpuProbe
from common import subjects
from common.api import Describe, Description
from common.messages import HostReport, InferenceReport, NodeReport, encode
from common.model import NodeRole
from coordinator.cli.telemetry import THROTTLED_BY
from tests.cli.fake_cell import FakeCell, aryl
from tests.harness.cluster.coordinator import CELL, Cell
from tests.harness.node.nvml_machine import GIB, Machine

HOST = HostReport(
    cpu_count=64, cpu_busy_ratio=0.375, memory_total_bytes=512 * GIB, memory_used_bytes=120 * GIB
)
SERVER = InferenceReport(
    running_count=3.0, waiting_count=2.0, success_total=9.0, kv_cache_used_ratio=0.41
)


def measured(report: NodeReport) -> NodeReport:
    """A report with GPUs as the agent's own probes read them: one busy and sick, two idle."""
    cap = THROTTLE_REASONS["sw_power_cap"]
    machine = Machine(
        "kind = 'ecc'\ngpu = 0\nvalue = 5",
        "kind = 'throttle'\ngpu = 0",
        f"kind = 'throttle'\ngpu = 0\nvalue = {cap}",
    )
    machine.table.hold(4711, 0, usage=Usage(busy_ratio=0.5, memory_bytes=20 * GIB))
    gpus = tuple(GpuProbe(machine.api, index).read() for index in range(3))
    return replace(report, gpus=gpus, host=HOST, inference=SERVER, lease_remaining_s=24.0)


async def described(*, silent_s: float = 0.0) -> Description:
    """What a coordinator says of a node that reported so, and then nothing for a while."""
    async with Cell() as cell:
        await cell.lead()
        agent = cell.agents["t0"]
        agent.is_silent = True
        report = measured(agent.make_report())
        await agent.bus.publish(subjects.node_report(CELL, agent.name), encode(report))
        await cell.clock.settle()
        if silent_s:
            await cell.clock.advance(silent_s)
        found = await cell.ask(Describe(kind="node", name="t0"))
        assert isinstance(found, Description)
        return found


async def test_what_a_node_measures_reaches_whoever_looks_at_it() -> None:
    """All of its last report, with how old that is."""
    found = (await described()).telemetry
    assert found is not None
    sick, idle, small = found.gpus
    assert sick.power_w == pytest.approx(385.0)
    assert sick.power_limit_w == 700.0
    assert (sick.temperature_c, sick.ecc_uncorrected_count) == (50.0, 5)
    assert set(sick.throttle_reasons) == {"sw_power_cap", "hw_thermal_slowdown"}
    assert (idle.throttle_reasons, small.gpu_type) == ((), "L4")
    assert (found.host, found.inference, found.lease_remaining_s) == (HOST, SERVER, 24.0)
    assert found.reported_ago_s < 0.5
    assert not found.is_silent


async def test_of_a_node_that_is_silent_it_is_said_how_old_the_figures_are() -> None:
    """They are kept as they were, and nobody takes them for those of now."""
    said = await described(silent_s=90.0)
    found = said.telemetry
    assert found is not None
    assert (said.node is not None and said.node.role) == NodeRole.LOST
    assert found.is_silent
    assert found.reported_ago_s == pytest.approx(90.0, abs=1.0)
    assert [gpu.ecc_uncorrected_count for gpu in found.gpus] == [5, 0, 0]


async def test_a_node_that_was_never_heard_here_has_no_figures() -> None:
    """A coordinator that begins knows nodes of its journal, and measures nothing itself."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        for agent in cell.agents.values():
            agent.is_silent = True
        coordinator.folder.reports.clear()
        found = await cell.ask(Describe(kind="node", name="t0"))
        assert isinstance(found, Description)
        assert found.telemetry is None


@pytest.mark.parametrize("width", [80, 200])
def test_an_operator_reads_it_line_by_line(width: int) -> None:
    """A row for each GPU with its health in figures, and why its clocks are down in words."""
    answer = asyncio.run(described())
    out = aryl_describe(answer, environ={"COLUMNS": str(width)})
    lines = [line.split() for line in out.splitlines()]
    assert "reported" in [line[0] for line in lines if line]
    assert "38% of 64 CPUs busy, 120.0 of 512.0 GiB of memory used" in out
    assert "3 requests run, 2 wait; KV cache 41% used" in out
    assert "24s, as its agent counted in that report" in out
    [sick] = [line for line in out.splitlines() if line.split()[:1] == ["0"]]
    assert "50%" in sick
    assert "20.0 of 80.0 GiB" in sick
    if width == 200:
        assert "385 of 700 W" in sick
        assert "50 °C" in sick
        assert sick.rstrip().endswith("power limit, heat (hardware)")
        assert sick.split("°C")[1].split()[0] == "5"


def test_an_operator_is_told_at_once_that_the_figures_are_old() -> None:
    """Before the first of them."""
    out = aryl_describe(asyncio.run(described(silent_s=90.0)))
    [line] = [line for line in out.splitlines() if line.startswith("reported")]
    assert "1m" in line
    assert "silent" in line


def test_a_program_reads_every_figure_under_its_own_name() -> None:
    """With units in the names, and null for what nobody measured."""
    cell = FakeCell({Describe: asyncio.run(described())})
    found = aryl(cell, "node", "describe", "t0", "-o", "json").json["description"]["telemetry"]
    assert found["gpus"][0]["throttle_reasons"] == ["sw_power_cap", "hw_thermal_slowdown"]
    assert found["gpus"][0]["ecc_uncorrected_count"] == 5
    assert found["host"]["memory_used_bytes"] == 120 * GIB
    assert found["inference"]["kv_cache_used_ratio"] == 0.41
    assert (found["is_silent"], found["lease_remaining_s"]) == (False, 24.0)


def test_every_reason_that_an_agent_can_name_has_words() -> None:
    """One that is new in NVML is shown as it is, and gets its words with the agent's table."""
    assert THROTTLED_BY.keys() == THROTTLE_REASONS.keys()


def aryl_describe(answer: Description, environ: dict[str, str] | None = None) -> str:
    """What `aryl node describe` prints of it."""
    run = aryl(FakeCell({Describe: answer}), "node", "describe", "t0", environ=environ)
    assert run.code == 0
    return run.out
