"""Jobs for a live cell, submitted through the public API, and which of them were acknowledged.

Must not know faults. A submission is repeated under its id until it is acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
from pathlib import Path

from common.api import JobRow, Jobs, ListJobs, Submit, Submitted
from common.clock import SystemClock
from common.errors import ArylError
from common.model import (
    FINAL_JOB_STATES,
    CheckpointSpec,
    JobSpec,
    RetrySpec,
)
from coordinator.client import ApiRefused, Client
from tests.harness.builders import make_spec
from tests.live.recording import Job

log = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("beating_worker.py")
AGAIN_S = 0.3
LOOK_S = 1.0
LONG_S = 100_000.0
MANY_RESTARTS = 1000
ENDS = (-9, 1, 3, 4, 137)
"""What a worker that the nemesis killed ends with, and those of its gang that miss it."""


class Shape:
    """A kind of job: its gang, its GPUs, and how long it computes with the fewest workers."""

    def __init__(
        self, name: str, *, workers: tuple[int, int], gpus: int, work_s: tuple[float, float]
    ) -> None:
        self.name = name
        self.workers = workers
        self.gpus = gpus
        self.work_s = work_s

    @property
    def must_end(self) -> bool:
        """Whether it ends by itself before the run is over."""
        return self.work_s[1] < LONG_S


SHORT = (
    Shape("quick", workers=(1, 1), gpus=1, work_s=(1, 4)),
    Shape("single", workers=(1, 1), gpus=1, work_s=(4, 15)),
    Shape("gang", workers=(2, 2), gpus=1, work_s=(3, 10)),
    Shape("wide", workers=(1, 1), gpus=2, work_s=(3, 10)),
    Shape("elastic", workers=(1, 3), gpus=1, work_s=(10, 30)),
)
LONG = (
    Shape("stretchy", workers=(1, 3), gpus=1, work_s=(LONG_S, LONG_S)),
    Shape("steady", workers=(1, 1), gpus=1, work_s=(LONG_S, LONG_S)),
)
"""Each keeps a GPU for itself. With one on each training node, a job that needs a whole node would
wait for a loan that may never come."""


class Workload:
    """Keeps some jobs waiting and running for as long as it is asked to.

    Args:
        most_waiting: short jobs that are under way at a time.
        long_count: jobs that never end; fewer than the training nodes.
    """

    def __init__(
        self,
        client: Client,
        *,
        beats_dir: Path,
        checkpoint_root: Path,
        grace_s: float,
        most_waiting: int,
        long_count: int,
        rng: random.Random,
    ) -> None:
        self.jobs: list[Job] = []
        self.last_seen: dict[str, str] = {}
        self._client = client
        self._beats_dir = beats_dir
        self._checkpoint_root = checkpoint_root
        self._grace_s = grace_s
        self._most_waiting = most_waiting
        self._long = LONG[:long_count]
        self._rng = rng
        self._clock = SystemClock()
        self._number = 0
        self._live: set[str] = set()
        self._forgone: set[str] = set()

    def live(self) -> list[str]:
        """Jobs that were acknowledged and, as far as is known, have not ended."""
        return sorted(self._live - self._forgone)

    def forgo(self, job: str) -> None:
        """A person is about to cancel it."""
        self._forgone.add(job)

    async def run(self) -> None:
        """Submit until cancelled."""
        long_by_name: dict[str, str] = {}
        while True:
            with contextlib.suppress(ArylError):
                await self.look()
            for shape in self._long:
                if long_by_name.get(shape.name) not in self._live - self._forgone:
                    long_by_name[shape.name] = await self._submit(shape)
            short = len(self._live) - len(self._long)
            if short < self._most_waiting:
                await self._submit(self._rng.choice(SHORT))
            await self._clock.sleep(LOOK_S * self._rng.uniform(0.2, 1.0))

    async def look(self) -> tuple[JobRow, ...]:
        """Which jobs are live; notes it."""
        rows = (await self._client.ask(ListJobs(is_live_only=True), Jobs)).rows
        known = {row.job_id for row in rows if row.state not in FINAL_JOB_STATES}
        self._live &= known
        return rows

    async def must_end(self) -> list[str]:
        """Short jobs that have not ended, by a coordinator's word.

        Raises:
            ArylError: no coordinator answers.
        """
        await self.look()
        short = {job.job for job in self.jobs if job.must_end}
        return sorted(short & self._live)

    async def _submit(self, shape: Shape) -> str:
        self._number += 1
        name = f"{shape.name}-{self._number}"
        spec = self._spec(name, shape)
        request = Submit(spec=spec, request_id=name)
        while True:
            try:
                job = (await self._client.ask(request, Submitted)).job_id
            except ApiRefused as error:
                log.info("%s: %s", name, error)
                await self._clock.sleep(AGAIN_S)
            except ArylError:
                await self._clock.sleep(AGAIN_S)
            else:
                break
        now_s = self._clock.now_s()
        self.jobs.append(Job(job=job, name=name, acknowledged_at_s=now_s, must_end=shape.must_end))
        self._live.add(job)
        return job

    def _spec(self, name: str, shape: Shape) -> JobSpec:
        work_s = self._rng.uniform(*shape.work_s)
        options = (f"--work-s={work_s:.1f}", "--step-s=0.1", "--save-s=0.1", "--save-every-s=2")
        return make_spec(
            name=name,
            command=(sys.executable, "-S", str(WORKER), *options),
            env={"BEATS": str(self._beats_dir)},
            workers=shape.workers,
            gpus_per_worker=shape.gpus,
            expected_runtime_s=min(work_s, 600.0),
            retry=RetrySpec(max_restarts=MANY_RESTARTS, on_exit_codes=ENDS),
            checkpoint=CheckpointSpec(
                path=str(self._checkpoint_root / name), grace_s=self._grace_s
            ),
        )


async def settle(workload: Workload, *, within_s: float) -> bool:
    """Wait until every short job has ended; whether it came to that."""
    clock = SystemClock()
    end_s = clock.now_s() + within_s
    while clock.now_s() < end_s:
        with contextlib.suppress(ArylError):
            if not await workload.must_end():
                return True
        await asyncio.sleep(AGAIN_S)
    return False
