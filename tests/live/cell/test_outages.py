"""A loan while the coordinator or nats-server is away: short ones it outlives, of long ones it ends
by itself, and nothing that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from common.model import JobState, NodeRole
from coordinator.demo.cell import COORDINATOR
from coordinator.demo.plan import Periods
from tests.harness.live.cell import PERIODS, is_alive, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

WAIT_FOR_GO = "echo $$ >> $OUT/pids; until [ -e $OUT/go ]; do sleep 0.1; done"


async def test_a_loan_that_outlives_nats_comes_home_and_everything_reconciles(
    tmp_path: Path,
) -> None:
    """kill -9 of nats-server: the lent node serves again within its service's deadline by itself,
    work on training nodes never notices, and a nats-server with the same store brings back every
    job that was acknowledged."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=2) as harness:
        steady = await harness.submit(harness.shell("steady", WAIT_FOR_GO, gpus=4))
        guest = await harness.submit(harness.training("guest", work_s=15, gpus=4, save_every_s=600))
        await harness.until_job(guest, "computes", lambda row: (row.step or 0) > 0)
        await harness.until_role(NodeRole.ON_LOAN)
        queued = await harness.submit(harness.shell("queued", "echo ran >> $OUT/queued", gpus=4))
        [loan] = await harness.loans()
        pid = await harness.until_worker_runs()
        saved = harness.cell.checkpoint_root / "guest" / "checkpoint.json"
        await harness.cell.kill_nats()
        late = asyncio.create_task(harness.submit(harness.shell("late", "echo ran >> $OUT/late")))

        async def is_home() -> bool:
            return await harness.serving() == {"infer-1", "infer-2"}

        await harness.until("both serve", is_home, within_s=PERIODS.reclaim_deadline_s)
        assert is_alive(pid)
        step = json.loads(saved.read_text())["step"]
        assert step > 0

        await harness.cell.start_nats()

        async def has_lapsed() -> bool:
            rows = {row.lease_id: row for row in await harness.loans()}
            return rows[loan.lease_id].state == "lapsed"

        await harness.until("the loan is known to have lapsed", has_lapsed)
        row = await harness.until_job(guest, "goes on", lambda row: row.attempt == 2)
        assert await harness.until_worker_runs() == pid
        (harness.directory / "go").touch()
        for job_id, attempt in ((steady, 1), (queued, 1), (await late, 1), (guest, 2)):
            row = await harness.until_state(job_id, JobState.SUCCEEDED)
            assert row.attempt == attempt
        assert (harness.said("pids"), harness.said("queued"), harness.said("late")) == (
            [str(pid)],
            ["ran"],
            ["ran"],
        )
        assert len(await harness.jobs()) == 4


async def test_a_coordinator_that_is_killed_and_started_again_costs_no_loan(tmp_path: Path) -> None:
    """With the periods of `aryl up`: the lease outlives the takeover, and so does its guest."""
    periods = Periods()
    async with running_cell(
        tmp_path, training_nodes=1, inference_nodes=2, periods=periods
    ) as harness:
        await harness.submit(harness.shell("steady", WAIT_FOR_GO, gpus=4))
        guest = await harness.submit(harness.training("guest", work_s=600, gpus=4))
        await harness.until_job(guest, "computes", lambda row: (row.step or 0) > 0)
        [lent] = await harness.until_role(NodeRole.ON_LOAN)
        [before] = await harness.loans()
        epoch = (await harness.status()).epoch
        await harness.kill_coordinator()

        async def has_led_for_a_ttl() -> bool:
            status = await harness.status()
            return status.epoch > epoch and status.up_s > periods.lease_ttl_s

        await harness.until("another leads for longer than a lease lasts", has_led_for_a_ttl)
        assert await harness.until_role(NodeRole.ON_LOAN) == [lent]
        [after] = await harness.loans()
        assert (after.lease_id, after.state) == (before.lease_id, "on loan")
        row = await harness.job(guest)
        assert (row.state, row.attempt, row.nodes) == (JobState.RUNNING, 1, (lent,))


async def test_a_hung_agent_does_not_keep_its_node_when_everybody_else_is_dead(
    tmp_path: Path,
) -> None:
    """It is stopped and holds its node's lock, the coordinator and nats-server are killed: the
    service has its node within its deadline, and the agent is another one after that."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=2) as harness:
        await harness.submit(harness.shell("steady", WAIT_FOR_GO, gpus=4))
        guest = await harness.submit(
            harness.training("guest", work_s=600, gpus=4, save_every_s=600)
        )
        await harness.until_job(guest, "computes", lambda row: (row.step or 0) > 0)
        [lent] = await harness.until_role(NodeRole.ON_LOAN)
        unit = harness.cell.agent_unit(lent)
        hung = harness.cell.units.pid(unit)
        harness.cell.units.signal(unit, signal.SIGSTOP)
        await harness.cell.units.kill(COORDINATOR)
        await harness.cell.kill_nats()

        async def is_home() -> bool:
            return await harness.serving() == {"infer-1", "infer-2"}

        await harness.until("both serve", is_home, within_s=PERIODS.reclaim_deadline_s)
        assert hung is not None
        assert not is_alive(hung)


async def test_an_agent_that_is_stopped_for_less_than_its_lease_loses_nothing(
    tmp_path: Path,
) -> None:
    """It goes on with the same loan, the same guest and the same process."""
    periods = Periods()
    async with running_cell(
        tmp_path, training_nodes=1, inference_nodes=2, periods=periods
    ) as harness:
        await harness.submit(harness.shell("steady", WAIT_FOR_GO, gpus=4))
        guest = await harness.submit(harness.training("guest", work_s=600, gpus=4))
        await harness.until_job(guest, "computes", lambda row: (row.step or 0) > 0)
        [lent] = await harness.until_role(NodeRole.ON_LOAN)
        [before] = await harness.loans()
        unit = harness.cell.agent_unit(lent)
        stopped = harness.cell.units.pid(unit)
        harness.cell.units.signal(unit, signal.SIGSTOP)

        async def is_missed() -> bool:
            row = await harness.node(lent)
            return (row.heard_ago_s or 0.0) > periods.lease_ttl_s / 4

        await harness.until("nothing was heard of it for a while", is_missed)
        harness.cell.units.signal(unit, signal.SIGCONT)
        led_at_s = (await harness.status()).up_s

        async def has_outlived_a_ttl() -> bool:
            return (await harness.status()).up_s > led_at_s + periods.lease_ttl_s + 2.0

        await harness.until("longer than a lease lasts", has_outlived_a_ttl)
        assert (harness.cell.units.pid(unit), harness.cell.units.starts(unit)) == (stopped, 1)
        [after] = await harness.loans()
        assert (after.lease_id, after.state) == (before.lease_id, "on loan")
        row = await harness.job(guest)
        assert (row.state, row.attempt, row.nodes) == (JobState.RUNNING, 1, (lent,))


async def test_services_come_home_when_everybody_who_could_order_it_is_dead(
    tmp_path: Path,
) -> None:
    """Without coordinator, NATS and the lent node's agent every node serves within the deadline."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=2) as harness:
        await harness.submit(harness.training("filler", work_s=600, gpus=4))
        lodger = await harness.submit(harness.training("lodger", work_s=600, gpus=4))
        [lent] = await harness.until_role(NodeRole.ON_LOAN)
        await harness.until_job(lodger, "runs there", lambda row: row.nodes == (lent,))
        assert len(await harness.serving()) == 1
        await harness.end_for_good(lent)

        async def is_home() -> bool:
            return await harness.serving() == {"infer-1", "infer-2"}

        await harness.until("all serve", is_home, within_s=PERIODS.reclaim_deadline_s)
