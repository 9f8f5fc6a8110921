"""The main job of the demo: real submissions from a real trace, and its figures at the end.

Must not know processes; it speaks to a cell's API as any submitter does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from common.api import GetStatus, ListLoans, LoanRow, Loans, Status, Submit, Submitted
from common.clock import Clock
from common.errors import ArylError, Unavailable
from coordinator.client import ApiRefused, Client
from coordinator.demo.cell import Cell
from coordinator.demo.traces import JobOptions, Submission, read_jobs, submissions

log = logging.getLogger(__name__)

RETRY_S = 1.0


class Quantiles(Struct, frozen=True, kw_only=True):
    """Seconds of the machine's own clock."""

    mean: float
    p50: float
    p95: float


class ReclaimTimes(Struct, frozen=True, kw_only=True):
    """Seconds from the reclaim order to serving again."""

    p50: float
    max: float


class Run(Struct, frozen=True, kw_only=True):
    """One run of `aryl up` in figures, under their glossary names.

    All seconds are real ones: `speed` scales arrivals, run times and load, never a control period.
    """

    policy: str
    speed: float
    duration_s: float
    jobs_submitted: int
    jobs_finished: int
    jobs_failed: int
    queueing_s: Quantiles
    jct_s: Quantiles
    training_gpu_ratio: float
    inference_gpu_busy_ratio: float
    on_loan_gpu_ratio: float
    loans: int
    loans_cancelled: int
    reclaims: int
    reclaim_s: ReclaimTimes
    reclaim_deadline_s: float
    reclaims_late: int
    preemptions: int
    lost_gpu_s: float
    resizes: int
    flexible_workers_released: int
    jobs_finished_on_loan: int
    requests_served: int
    requests_refused: int


class Workload:
    """A trace's jobs and a service's load, on one cell.

    Args:
        speed: trace seconds per real second.
    """

    def __init__(self, cell: Cell, client: Client, *, speed: float, clock: Clock) -> None:
        options = JobOptions(
            speed=speed,
            checkpoint_root=cell.checkpoint_root,
            most_gpus=2 * cell.plan.gpus_per_node,
            gpus_per_node=cell.plan.gpus_per_node,
            grace_s=cell.plan.periods.grace_s,
        )
        self.submissions: Sequence[Submission] = submissions(read_jobs(), options)
        self.status: Status | None = None
        self.loans: tuple[LoanRow, ...] = ()
        self.requests: dict[str, Any] = {}
        self._cell = cell
        self._client = client
        self._speed = speed
        self._clock = clock
        self._busy_ratios: list[float] = []
        self._began_at_s = clock.now_s()

    async def submit_all(self) -> None:
        """Submit each job at its time; a lost answer is asked again under the same request id."""
        self._began_at_s = self._clock.now_s()
        for number, submission in enumerate(self.submissions):
            wait_s = self._began_at_s + submission.at_s - self._clock.now_s()
            if wait_s > 0:
                await self._clock.sleep(wait_s)
            await self._submit(submission, f"{submission.spec.name}-{number}")

    async def _submit(self, submission: Submission, request_id: str) -> None:
        request = Submit(spec=submission.spec, request_id=request_id)
        while True:
            try:
                await self._client.ask(request, Submitted)
            except Unavailable:
                await self._clock.sleep(RETRY_S)
            except ApiRefused as error:
                log.warning("%s was refused: %s", submission.spec.name, error)
                return
            else:
                return

    async def observe(self) -> bool:
        """Read the cell's figures; what cannot be read now stays as it was.

        Returns:
            Whether they are of now.
        """
        try:
            self.status = await self._client.ask(GetStatus(), Status)
            loans = await self._client.ask(ListLoans(is_live_only=False), Loans)
            self.loans = loans.rows
            self.requests = await self._cell.router_stats()
        except ArylError as error:
            log.info("figures: %s", error)
            return False
        ratio = self.status.gpu_busy_ratio_inference
        if ratio is not None:
            self._busy_ratios.append(ratio)
        return True

    async def last_look(self, *, limit_s: float) -> None:
        """Read the figures once more, waiting a while for a coordinator that is just away."""
        end_s = self._clock.now_s() + limit_s
        while not await self.observe() and self._clock.now_s() < end_s:
            await self._clock.sleep(RETRY_S)

    def run(self) -> Run:
        """The figures so far.

        Raises:
            Unavailable: no coordinator has answered.
        """
        if self.status is None:
            raise Unavailable("no coordinator answered: there are no figures")
        figures: dict[str, Any] = self.status.figures
        plan = self._cell.plan
        return Run(
            policy=self.status.policy,
            speed=self._speed,
            duration_s=self._clock.now_s() - self._began_at_s,
            jobs_submitted=figures["jobs_submitted"],
            jobs_finished=figures["jobs_finished"],
            jobs_failed=figures["jobs_failed"],
            queueing_s=Quantiles(**figures["queueing_s"]),
            jct_s=Quantiles(**figures["jct_s"]),
            training_gpu_ratio=figures["training_gpu_ratio"],
            inference_gpu_busy_ratio=_mean(self._busy_ratios),
            on_loan_gpu_ratio=figures["on_loan_gpu_ratio"],
            loans=figures["loans"],
            loans_cancelled=figures["loans_cancelled"],
            reclaims=figures["reclaims"],
            reclaim_s=ReclaimTimes(**figures["reclaim_s"]),
            reclaim_deadline_s=plan.periods.reclaim_deadline_s,
            reclaims_late=figures["reclaims_late"],
            preemptions=figures["preemptions"],
            lost_gpu_s=figures["lost_gpu_s"],
            resizes=figures["resizes"],
            flexible_workers_released=figures["flexible_workers_released"],
            jobs_finished_on_loan=figures["jobs_finished_on_loan"],
            requests_served=self.requests.get("requests_total", 0)
            - self.requests.get("refused_total", 0),
            requests_refused=self.requests.get("refused_total", 0),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


async def play(cell: Cell, workload: Workload, *, speed: float) -> None:
    """Begin the load, then submit until the trace ends or somebody cancels."""
    if cell.plan.inference_nodes:
        cell.start_load(speed=speed)
    await workload.submit_all()
    await asyncio.Event().wait()
