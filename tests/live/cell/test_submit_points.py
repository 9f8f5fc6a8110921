"""kill -9 of a coordinator at the exact points of a submit, on a real nats-server and a real agent.

tests/service/test_decision_loop_submit_crash.py has the same points, and later ones, in memory.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from common.model import JobState
from coordinator.demo.cell import COORDINATOR, MARKER
from coordinator.demo.plan import coordinator_toml
from coordinator.demo.supervise import Unit
from coordinator.engine.state.events import JobSubmitted
from tests.harness.live.cell import LiveHarness, running_cell
from tests.live.cell import fatal_coordinator
from tests.live.cell.fatal_coordinator import Point

pytestmark = [pytest.mark.nats, pytest.mark.slow]


async def lead_with_one_that_dies_at(harness: LiveHarness, point: Point) -> None:
    """Nobody leads now; one does that will die when it submits the job of this name."""
    epoch = max(record.epoch for _, record in await harness.journal())
    config = harness.cell.run_dir / f"{point}.toml"
    config.write_text(
        coordinator_toml(harness.cell.plan, name=point, nats_url=harness.cell.nats.url)
    )
    script = (sys.executable, fatal_coordinator.__file__)
    options = ("--config", str(config), "--point", point, "--job", point)
    environment = {MARKER: str(harness.cell.run_dir)}
    harness.cell.units.start(
        Unit(name=point, argv=(*script, *options), env=environment, is_restarted=False)
    )

    async def leads() -> bool:
        return (await harness.status()).epoch > epoch

    await harness.until(f"{point} leads", leads)


async def submitted(harness: LiveHarness, name: str) -> int:
    """How often a job of this name stands in the journal."""
    events = [entry.event for _, record in await harness.journal() for entry in record.entries]
    return sum(isinstance(event, JobSubmitted) and event.spec.name == name for event in events)


async def test_acknowledged_survives_and_what_is_asked_again_happens_once(tmp_path: Path) -> None:
    """Whether it dies before it wrote the job, before it said so or after: an acknowledgement is a
    promise, and a submitter that heard none asks again under the same request id."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0) as harness:
        await harness.cell.units.kill(COORDINATOR)
        asking: list[asyncio.Task[str]] = []
        for point in Point:
            await lead_with_one_that_dies_at(harness, point)
            spec = harness.shell(point, f"echo ran >> $OUT/{point}")
            asking.append(asyncio.create_task(harness.submit(spec, request_id=point)))

            async def is_dead(unit: str = point) -> bool:
                return harness.cell.units.starts(unit) == 1 and harness.cell.units.pid(unit) is None

            await harness.until(f"the one that dies {point} is dead", is_dead)
            assert await submitted(harness, point) == (point != Point.BEFORE_APPEND)
            if point == Point.AFTER_REPLY:
                await asking[-1]  # nobody lives who could have said it but the dead one
            else:
                assert not asking[-1].done()
        harness.cell.start_coordinator(COORDINATOR)
        for point, job_id in zip(Point, await asyncio.gather(*asking), strict=True):
            row = await harness.until_state(job_id, JobState.SUCCEEDED)
            assert (row.name, row.attempt) == (point, 1)
            assert await submitted(harness, point) == 1
            assert harness.said(point.value) == ["ran"]
        assert len(await harness.jobs()) == len(Point)
