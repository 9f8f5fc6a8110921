"""A real coordinator that is stopped for longer than its lease and goes on."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import msgspec
import pytest

from common.model import JobState, NodeRole
from coordinator.demo.cell import COORDINATOR
from coordinator.engine.state.events import NodeSilent
from coordinator.service.daemon import EXIT_FENCED
from tests.harness.live.cell import PERIODS, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

PAUSE_S = 6.0
"""Longer than `leader_ttl_s` and `lost_after_s` below."""
LONG_LOANS = msgspec.structs.replace(
    PERIODS, lost_after_s=4.0, lease_ttl_s=30.0, reclaim_deadline_s=60.0
)
"""Loans outlive the pause and the takeover, so that none may end of it."""


async def test_a_coordinator_that_was_stopped_past_its_ttl_steps_down_and_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Exit code 75 before it commands anything: no node is lost, no job stopped, no loan ended."""
    async with running_cell(
        tmp_path, training_nodes=1, inference_nodes=2, periods=LONG_LOANS
    ) as harness:
        jobs = [
            await harness.submit(harness.training(name, work_s=600, gpus=4))
            for name in ("filler", "lodger")
        ]
        [lent] = await harness.until_role(NodeRole.ON_LOAN)
        for job_id in jobs:
            await harness.until_state(job_id, JobState.RUNNING)
        before = {row.lease_id: row for row in await harness.loans()}
        epoch = (await harness.status()).epoch
        starts = harness.cell.units.starts(COORDINATOR)
        caplog.set_level(logging.WARNING)
        harness.cell.units.signal(COORDINATOR, signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)  # it is the pause and waits for nothing
        harness.cell.units.signal(COORDINATOR, signal.SIGCONT)

        async def has_another_epoch() -> bool:
            return (await harness.status()).epoch > epoch

        await harness.until("another one leads", has_another_epoch)
        assert harness.cell.units.starts(COORDINATOR) == starts + 1
        assert f"{COORDINATOR} ended with {EXIT_FENCED}" in caplog.messages
        await harness.until_logged(COORDINATOR, "stepping down: the leader lease ran out")
        await harness.until_role(NodeRole.ON_LOAN)
        for job_id in jobs:
            row = await harness.until_state(job_id, JobState.RUNNING)
            assert (row.attempt, row.preemption_count) == (1, 0)
        [loan] = await harness.loans()
        assert (loan.lease_id, loan.node) == (next(iter(before)), lent)
        figures = await harness.figures()
        assert (figures["preemptions"], figures["leases_lapsed"]) == (0, 0)
        events = [entry.event for _, record in await harness.journal() for entry in record.entries]
        assert [event for event in events if isinstance(event, NodeSilent)] == []
