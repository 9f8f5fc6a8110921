"""What is remembered of a job's saves, for its time line."""

from __future__ import annotations

from coordinator.engine.jobs.progress import SAVES_KEPT
from coordinator.service.api.rows import save_rows
from tests.engine.house import House
from tests.engine.stopped_jobs import SLOW, running, says


def test_the_latest_saves_of_a_job_are_remembered_once_each() -> None:
    """By when the job claimed them; one that is verified later is the same save."""
    house = House(delays=SLOW)
    job = running(house, "t0")
    began_s = house.sim.loop.now_s
    says(house, job, 10, is_verified=False)
    house.wait(1.0)
    says(house, job, 10)
    house.wait(1.0)
    says(house, job, 20, saved_ago_s=0.5)
    says(house, job, 20)
    rows = [(row.at_s - began_s, row.step, row.is_verified) for row in save_rows(job)]
    assert rows == [(0.0, 10, True), (1.5, 20, True)]
    for step in range(30, 30 + 2 * SAVES_KEPT):
        says(house, job, step)
    assert [row.step for row in save_rows(job)] == list(range(30 + SAVES_KEPT, 30 + 2 * SAVES_KEPT))
