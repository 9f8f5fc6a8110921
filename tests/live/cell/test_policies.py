"""Policies on a real cell: jobs take turns and finish, nothing is refused, and policies change."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from msgspec.structs import replace

from common.model import JobSpec, JobState
from coordinator.demo.cell import COORDINATOR
from coordinator.demo.plan import coordinator_toml
from coordinator.policies.registry import COMPARED
from tests.harness.live.cell import PATIENCE_S, PERIODS, LiveHarness, running_cell
from tests.live.cell import patient_worker

pytestmark = [pytest.mark.nats, pytest.mark.slow]


LED = replace(PERIODS, leader_ttl_s=12.0)
"""Whoever leads keeps to it on a busy machine too: that it could not would be a complaint."""
ELSEWHERE = {"themis", "tiresias", "qos", "afs", "gandiva"}
"""Policies with a test of their own here, or of their turns."""
SHORT = {"pollux": "pollux:round_s=1:generations=10"}
"""Knobs for jobs of a second; the papers' rounds are a minute and more."""
REST = tuple(SHORT.get(name, name) for name in COMPARED if name not in ELSEWHERE)


def a_node_under(policy: str, directory: Path) -> AbstractAsyncContextManager[LiveHarness]:
    """A cell of one node."""
    return running_cell(directory, training_nodes=1, inference_nodes=0, policy=policy, periods=LED)


def decided(harness: LiveHarness, kind: str) -> int:
    """So often the cell's coordinators said this of a decision."""
    log = (harness.cell.run_dir / "logs" / f"{COORDINATOR}.log").read_text()
    return log.count(f'msg="{kind} ')


def complaints(harness: LiveHarness) -> list[str]:
    """What the coordinators refused to themselves, or were troubled by."""
    log = (harness.cell.run_dir / "logs" / f"{COORDINATOR}.log").read_text()
    marks = ('msg="refused ', "level=error", "Traceback", "lead to other decisions")
    return [line for line in log.splitlines() if any(mark in line for mark in marks)]


async def submit_three(harness: LiveHarness, *, work_s: float, gpus: int = 2) -> list[str]:
    """Three jobs, of half a node each, one of them with a deadline, two of them one app."""
    specs = [harness.training(f"j{n}", work_s=work_s, gpus=gpus, save_every_s=60) for n in range(3)]
    specs[0] = replace(specs[0], deadline_s=30.0)
    specs[1:] = [replace(spec, app="search") for spec in specs[1:]]
    return list(await asyncio.gather(*(harness.submit(spec) for spec in specs)))


def patient(harness: LiveHarness, name: str) -> JobSpec:
    """A job of half a node that saves when it is asked to, and goes on until it may end."""
    options = ("--work-s=3600", "--step-s=0.1", "--save-s=0.1", "--save-every-s=60")
    return replace(
        harness.training(name, work_s=3600.0, gpus=2),
        command=(sys.executable, "-I", patient_worker.__file__, *options),
        env={"OUT": str(harness.directory)},
    )


async def until_finished(harness: LiveHarness, job_ids: list[str]) -> None:
    for job_id in job_ids:
        await harness.until_state(job_id, JobState.SUCCEEDED)


async def until_running(harness: LiveHarness, count: int) -> dict[str, JobState]:
    """Wait until so many jobs run and have begun their work; the states of all jobs."""

    async def look() -> dict[str, JobState] | None:
        rows = await harness.jobs()
        begun = [row for row in rows if row.state == JobState.RUNNING and row.step is not None]
        return {row.job_id: row.state for row in rows} if len(begun) == count else None

    return await harness.until(f"{count} jobs run", look)


async def switch(harness: LiveHarness, policy: str) -> None:
    """An operator writes another policy into the settings and starts the coordinator again."""
    plan = replace(harness.cell.plan, policy=policy)
    config = harness.cell.run_dir / f"{COORDINATOR}.toml"
    config.write_text(coordinator_toml(plan, name=COORDINATOR, nats_url=harness.cell.nats.url))
    starts = harness.cell.units.starts(COORDINATOR)
    harness.cell.units.signal(COORDINATOR, signal.SIGTERM)

    async def leads() -> bool:
        is_new = harness.cell.units.starts(COORDINATOR) > starts
        return is_new and (await harness.status()).policy == policy

    await harness.until(f"{policy} leads", leads)


@pytest.mark.parametrize("policy", ["themis:lease_s=1.5", "tiresias:limits=3"])
async def test_jobs_take_turns_and_nothing_is_refused(tmp_path: Path, policy: str) -> None:
    """Three jobs for two places: one is stopped for another, comes again, and all succeed; no
    decision was one that could not be done."""
    async with a_node_under(policy, tmp_path) as harness:
        trials = [replace(patient(harness, f"j{n}"), app="search") for n in (1, 2)]
        holders = list(await asyncio.gather(*map(harness.submit, trials)))
        await until_running(harness, 2)
        # Its deadline is beyond all that the test has patience for.
        third = replace(patient(harness, "j0"), deadline_s=4 * PATIENCE_S)
        job_ids = [await harness.submit(third), *holders]

        async def has_given_way() -> bool:
            rows = await harness.jobs()
            return any(row.preemption_count and row.state != JobState.PREEMPTING for row in rows)

        # Nobody has done its work before that, however late leases and queues are looked at.
        await harness.until("one has stopped for another", has_given_way)
        (harness.directory / "go").touch()
        await until_finished(harness, job_ids)
        figures = await harness.figures()
        assert (figures["jobs_finished"], figures["jobs_failed"]) == (3, 0)
        assert (figures["deadlines_due"], figures["deadlines_met"]) == (1, 1)
        assert figures["preemptions"] > 0
        assert decided(harness, "decided Start") > 3
        assert complaints(harness) == []


async def test_deadlines_and_shares_decide_one_after_the_other(tmp_path: Path) -> None:
    """Under qos the deadline is met and all succeed, and under afs that takes over from it, too."""
    async with a_node_under("qos", tmp_path) as harness:
        await until_finished(harness, await submit_three(harness, work_s=2.0))
        figures = await harness.figures()
        assert (figures["deadlines_due"], figures["deadlines_met"]) == (1, 1)
        await switch(harness, "afs")
        await until_finished(harness, await submit_three(harness, work_s=2.0))
        figures = await harness.figures()
        assert (figures["jobs_finished"], figures["jobs_failed"]) == (6, 0)
        assert complaints(harness) == []


@pytest.mark.parametrize(
    "policies", [REST[: len(REST) // 2], REST[len(REST) // 2 :]], ids=("rules", "systems")
)
async def test_every_other_policy_leads_and_its_jobs_finish(
    tmp_path: Path, policies: tuple[str, ...]
) -> None:
    """One after the other on one cell: each starts what is submitted under it, and all succeed."""
    async with a_node_under(policies[0], tmp_path) as harness:
        for policy in policies:
            if policy != policies[0]:
                await switch(harness, policy)
            await until_finished(harness, await submit_three(harness, work_s=0.3, gpus=1))
        figures = await harness.figures()
        assert (figures["jobs_finished"], figures["jobs_failed"]) == (3 * len(policies), 0)
        assert complaints(harness) == []


async def test_a_policy_takes_over_from_another_while_jobs_run(tmp_path: Path) -> None:
    """From one that remembers to others that remember something else, and back with a knob turned:
    each leads over the journal of those before, and the jobs go on."""
    async with a_node_under("themis:lease_s=600", tmp_path) as harness:
        await submit_three(harness, work_s=300.0)
        before = await until_running(harness, 2)
        for policy in ("tiresias:limits=6000", "gandiva:jobs_per_gpu=1", "themis:lease_s=300"):
            await switch(harness, policy)
        rows = await harness.jobs()
        assert {row.job_id: row.state for row in rows} == before
        assert sorted(row.attempt for row in rows) == [0, 1, 1]
        assert complaints(harness) == []
