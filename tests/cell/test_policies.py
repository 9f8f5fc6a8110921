"""Policies on a real cell: jobs take turns and finish, nothing is refused, and policies change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from common.model import JobState
from coordinator.demo.cell import COORDINATOR
from coordinator.demo.plan import coordinator_toml
from tests.cell.house import House, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]


def decided(house: House, kind: str) -> int:
    """So often the cell's coordinators said this of a decision."""
    log = (house.cell.run_dir / "logs" / f"{COORDINATOR}.log").read_text()
    return log.count(f'msg="{kind} ')


def complaints(house: House) -> list[str]:
    """What the coordinators refused to themselves, or were troubled by."""
    log = (house.cell.run_dir / "logs" / f"{COORDINATOR}.log").read_text()
    marks = ('msg="refused ', "level=error", "Traceback", "decided otherwise")
    return [
        line
        for line in log.splitlines()
        if any(mark in line for mark in marks) and ", 0 decided otherwise" not in line
    ]


async def submit_three(house: House, *, work_s: float) -> list[str]:
    """Three jobs of half a node each, one of them with a deadline, two of them one app."""
    specs = [house.training(f"j{n}", work_s=work_s, gpus=2, save_every_s=60) for n in range(3)]
    specs[0] = replace(specs[0], deadline_s=30.0)
    specs[1:] = [replace(spec, app="search") for spec in specs[1:]]
    return list(await asyncio.gather(*(house.submit(spec) for spec in specs)))


async def until_finished(house: House, job_ids: list[str]) -> None:
    for job_id in job_ids:
        await house.until_state(job_id, JobState.SUCCEEDED)


async def switch(house: House, policy: str) -> None:
    """An operator writes another policy into the settings and starts the coordinator again."""
    plan = replace(house.cell.plan, policy=policy)
    config = house.cell.run_dir / f"{COORDINATOR}.toml"
    config.write_text(coordinator_toml(plan, name=COORDINATOR, nats_url=house.cell.nats.url))
    await house.kill_coordinator()

    async def leads() -> bool:
        return (await house.status()).policy == policy

    await house.until(f"{policy} leads", leads)


@pytest.mark.parametrize("policy", ["themis:lease_s=1.5", "tiresias:limits=3"])
async def test_jobs_take_turns_and_nothing_is_refused(tmp_path: Path, policy: str) -> None:
    """Three jobs for two places: one is stopped for another, comes again, and all succeed; no
    decision was one that could not be done."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0, policy=policy) as house:
        await until_finished(house, await submit_three(house, work_s=3.0))
        figures = await house.figures()
        assert (figures["jobs_finished"], figures["jobs_failed"]) == (3, 0)
        assert (figures["deadlines_due"], figures["deadlines_met"]) == (1, 1)
        assert figures["preemptions"] > 0
        assert decided(house, "decided Start") > 3
        assert complaints(house) == []


async def test_deadlines_and_shares_decide_one_after_the_other(tmp_path: Path) -> None:
    """Under qos the deadline is met and all succeed, and under afs that takes over from it, too."""
    async with running_cell(tmp_path, training_nodes=1, inference_nodes=0, policy="qos") as house:
        await until_finished(house, await submit_three(house, work_s=2.0))
        figures = await house.figures()
        assert (figures["deadlines_due"], figures["deadlines_met"]) == (1, 1)
        await switch(house, "afs")
        await until_finished(house, await submit_three(house, work_s=2.0))
        figures = await house.figures()
        assert (figures["jobs_finished"], figures["jobs_failed"]) == (6, 0)
        assert complaints(house) == []


async def test_a_policy_takes_over_from_another_while_jobs_run(tmp_path: Path) -> None:
    """From one that remembers to others that remember something else, and back with a knob turned:
    each leads over the journal of those before, and the jobs go on."""
    async with running_cell(
        tmp_path, training_nodes=1, inference_nodes=0, policy="themis:lease_s=600"
    ) as house:
        job_ids = await submit_three(house, work_s=300.0)
        await house.until_state(job_ids[0], JobState.RUNNING)
        before = {job_id: (await house.job(job_id)).state for job_id in job_ids}
        for policy in ("tiresias:limits=6000", "gandiva:jobs_per_gpu=1", "themis:lease_s=300"):
            await switch(house, policy)
        rows = await house.jobs()
        assert {row.job_id: row.state for row in rows} == before
        assert sorted(row.attempt for row in rows) == [0, 1, 1]
        assert complaints(house) == []
