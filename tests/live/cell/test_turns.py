"""Jobs that take turns on the same GPUs, in a real cell: real processes are suspended and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.model import JobState
from coordinator.policies.contract.decisions import Resume, Suspend
from tests.harness.live.cell import LiveHarness, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

POLICY = "gandiva:slice_s=3:packs=false:migrates=false"
COUNT = 'for n in $(seq 60); do echo {name} >> "$OUT/{name}"; sleep 0.1; done'


async def submit(harness: LiveHarness, name: str) -> str:
    """A job on all GPUs that counts to sixty, in six seconds of its own."""
    return await harness.submit(harness.shell(name, COUNT.format(name=name), gpus=2))


async def test_two_jobs_take_turns_and_only_one_computes(tmp_path: Path) -> None:
    """Each is suspended and resumed without a new attempt, also across a dead coordinator, and
    while one computes the other one stands still."""
    async with running_cell(
        tmp_path, training_nodes=1, inference_nodes=0, gpus_per_node=2, policy=POLICY
    ) as harness:
        first = await submit(harness, "first")
        second = await submit(harness, "second")
        await harness.until_job(first, "gives way", lambda row: row.state == JobState.SUSPENDED)

        async def stands_still() -> bool:
            return set((await harness.phases(first)).values()) == {"suspended"}

        await harness.until("its worker is suspended", stands_still)
        count = len(harness.said("first"))

        async def other_goes_on() -> bool:
            return len(harness.said("second")) >= 5

        await harness.until("the other one computes", other_goes_on)
        if (await harness.job(first)).state == JobState.SUSPENDED:
            assert len(harness.said("first")) == count
        # Without a coordinator for long it would end before its own turn to give way.
        await harness.until_job(second, "gives way", lambda row: row.state == JobState.SUSPENDED)
        await harness.kill_coordinator()
        for job in (first, second):
            row = await harness.until_state(job, JobState.SUCCEEDED)
            assert (row.attempt, row.preemption_count) == (1, 0)
        assert (len(harness.said("first")), len(harness.said("second"))) == (60, 60)
        made = [decision for _, record in await harness.journal() for decision in record.decisions]
    assert {each.job_id for each in made if isinstance(each, Suspend)} == {first, second}
    assert {each.job_id for each in made if isinstance(each, Resume)} >= {first}
