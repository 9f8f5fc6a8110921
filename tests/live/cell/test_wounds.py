"""A journal that is damaged under a whole cell: what runs goes on, and no lease lapses for it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from common.api import Events, GetEvents
from common.model import CheckpointSpec, JobSpec, JobState
from coordinator.demo.cell import COORDINATOR
from tests.harness.live.cell import PERIODS, running_cell
from tests.service.wounds import flip_acknowledged

pytestmark = [pytest.mark.nats, pytest.mark.slow]

GPUS = 4
PATIENT = msgspec.structs.replace(
    PERIODS, leader_ttl_s=30.0, lease_ttl_s=10.0, reclaim_deadline_s=30.0
)
"""A slow machine starts nats-server again within these: whatever ends a lead, it is not that."""


async def test_a_wounded_journal_costs_no_job_and_no_loan(tmp_path: Path) -> None:
    """A bit of it flips while nats-server is frozen, which is then killed: the leader goes on, and
    after it the standby, with every job in its first attempt."""
    async with running_cell(
        tmp_path, training_nodes=1, inference_nodes=2, periods=PATIENT
    ) as harness:
        harness.cell.start_coordinator("standby")
        await harness.until_logged("standby", "standing by")
        running = [
            await harness.submit(
                _saving(harness.shell(f"busy-{number}", _ticks(number), gpus=GPUS))
            )
            for number in range(2)
        ]
        for job_id in running:
            await harness.until_state(job_id, JobState.RUNNING)
        [loan] = [loan for loan in await harness.loans() if loan.state == "on loan"]
        waiting = await harness.submit(harness.shell("large", "true", worker_count=8, gpus=GPUS))
        epoch = (await harness.status()).epoch

        killed = harness.cell.nats.pid
        assert killed is not None
        os.kill(killed, signal.SIGSTOP)
        flip_acknowledged(harness.cell.nats)
        await harness.kill_nats()
        later = await harness.submit(harness.shell("later", "true", worker_count=8, gpus=GPUS))
        await asyncio.sleep(1.5 * PATIENT.lease_ttl_s)  # a lease that is not renewed would be over
        assert (await harness.status()).epoch == epoch
        rows = (await harness.client.ask(GetEvents(subject="cell"), Events)).rows
        assert [row for row in rows if row.what.startswith("journal record")]
        states = {one.lease_id: one.state for one in await harness.loans()}
        assert states[loan.lease_id] == "on loan"

        await harness.cell.units.kill(COORDINATOR)

        async def has_another_epoch() -> bool:
            return (await harness.status()).epoch > epoch

        await harness.until("the standby leads", has_another_epoch)
        rows_of = {row.job_id: row for row in await harness.jobs()}
        assert set(rows_of) == {*running, waiting, later}
        assert [rows_of[job_id].attempt for job_id in running] == [1, 1]
        (harness.directory / "go").touch()
        for number, job_id in enumerate(running):
            row = await harness.until_state(job_id, JobState.SUCCEEDED)
            assert row.attempt == 1
            assert len(set(harness.said(f"pid-{number}"))) == 1


def _saving(spec: JobSpec) -> JobSpec:
    """One that may run on a lent node, as its grace fits in the reclaim deadline."""
    return msgspec.structs.replace(spec, checkpoint=CheckpointSpec(grace_s=PERIODS.grace_s))


def _ticks(number: int) -> str:
    """Notes its pid while it runs, until the test lets it go."""
    return f"while [ ! -e $OUT/go ]; do echo $$ >> $OUT/pid-{number}; sleep 0.2; done"
