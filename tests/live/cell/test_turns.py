"""Jobs that take turns on the same GPUs, in a real cell: real processes are suspended and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.model import JobState
from coordinator.policies.contract.decisions import Resume, Suspend
from tests.live.cell.house import House, running_cell

pytestmark = [pytest.mark.nats, pytest.mark.slow]

POLICY = "gandiva:slice_s=3:packs=false:migrates=false"
COUNT = 'for n in $(seq 60); do echo {name} >> "$OUT/{name}"; sleep 0.1; done'


async def submit(house: House, name: str) -> str:
    """A job on all GPUs that counts to sixty, in six seconds of its own."""
    return await house.submit(house.shell(name, COUNT.format(name=name), gpus=2))


async def test_two_jobs_take_turns_and_only_one_computes(tmp_path: Path) -> None:
    """Each is suspended and resumed without a new attempt, also across a dead coordinator, and
    while one computes the other one stands still."""
    async with running_cell(
        tmp_path, training_nodes=1, inference_nodes=0, gpus_per_node=2, policy=POLICY
    ) as house:
        first = await submit(house, "first")
        second = await submit(house, "second")
        await house.until_job(first, "gives way", lambda row: row.state == JobState.SUSPENDED)

        async def stands_still() -> bool:
            return set((await house.phases(first)).values()) == {"suspended"}

        await house.until("its worker is suspended", stands_still)
        count = len(house.said("first"))

        async def other_goes_on() -> bool:
            return len(house.said("second")) >= 5

        await house.until("the other one computes", other_goes_on)
        if (await house.job(first)).state == JobState.SUSPENDED:
            assert len(house.said("first")) == count
        # Without a coordinator for long it would end before its own turn to give way.
        await house.until_job(second, "gives way", lambda row: row.state == JobState.SUSPENDED)
        await house.kill_coordinator()
        for job in (first, second):
            row = await house.until_state(job, JobState.SUCCEEDED)
            assert (row.attempt, row.preemption_count) == (1, 0)
        assert (len(house.said("first")), len(house.said("second"))) == (60, 60)
        made = [decision for _, record in await house.journal() for decision in record.decisions]
    assert {each.job_id for each in made if isinstance(each, Suspend)} == {first, second}
    assert {each.job_id for each in made if isinstance(each, Resume)} >= {first}
