"""The main job of the demo: real submissions from a real trace, and its figures at the end.

It speaks to a cell's API as any submitter does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import msgspec
from msgspec import Struct

from common.api import (
    Describe,
    Description,
    GetStatus,
    ListLoans,
    ListNodes,
    LoanRow,
    Loans,
    NodeRow,
    Nodes,
    Status,
    Submit,
    Submitted,
)
from common.clock import Clock
from common.errors import ArylError, Unavailable
from common.model import NodeRole, Pool
from coordinator.client import ApiRefused, Client
from coordinator.demo.cell import Cell
from coordinator.demo.plan import ANSWER_TIMEOUT_S, SERVICE
from coordinator.demo.traces import JobOptions, read_jobs, submissions
from coordinator.engine.state.accounting import Figures
from coordinator.workloads.records import WorkloadJob

log = logging.getLogger(__name__)

RETRY_S = 1.0
COMING_HOME = "coming home"
OUT = ("draining", "on loan", COMING_HOME)
"""A loan in one of these states keeps a node from serving."""


class Run(Figures, frozen=True, kw_only=True):
    """One run of `aryl up` in figures, under their glossary names: the cell's, and others.

    All seconds are real ones: `speed` scales arrivals, run times and load, never a control period.
    """

    policy: str
    speed: float
    duration_s: float
    jobs_pending: int
    jobs_starting: int
    jobs_running: int
    jobs_suspended: int = 0
    training_gpu_busy_ratio: float | None
    on_loan_gpu_busy_ratio: float | None
    inference_gpu_busy_ratio: float | None
    reclaim_deadline_s: float
    requests_served: int
    requests_refused: int
    requests_refused_total: int
    figures_age_s: float
    why_none_lent: tuple[str, ...]


class Busy(Struct, kw_only=True):
    """NVML's busy share of some GPUs: of the last sample, and the mean of all samples.

    A sample counts by its number of GPUs, so that one lent node for a while is not half of the
    mean.
    """

    last: float | None = None
    busy_gpus: float = 0.0
    gpus: int = 0

    def note(self, rows: Iterable[NodeRow]) -> None:
        """Add one sample of the nodes of a group; nodes without values do not count."""
        said = [(row.gpu_busy_ratio, row.gpus) for row in rows if row.gpu_busy_ratio is not None]
        gpus = sum(count for _, count in said)
        busy_gpus = sum(ratio * count for ratio, count in said)
        self.last = busy_gpus / gpus if gpus else None
        self.busy_gpus += busy_gpus
        self.gpus += gpus

    @property
    def mean(self) -> float | None:
        """Over the run; None when nothing was measured."""
        return self.busy_gpus / self.gpus if self.gpus else None


class Requests:
    """The outcomes of the requests to the service.

    They are the load driver's own counts, which see what a user sees: a timeout and a dead router
    are refusals, too. Without a driver they are the router's.

    refused_during_loans: refusals that were noted while nodes were lent.
    """

    def __init__(self) -> None:
        self.served = 0
        self.refused = 0
        self.refused_during_loans = 0
        self._before = (0, 0)
        self._last = (0, 0)

    def note_driver(self, stats: dict[str, Any], *, is_lent: bool) -> None:
        """Add the driver's counts; a restarted driver counts from zero."""
        now = (int(stats["ok_total"]), int(stats["refused_total"]))
        if sum(now) < sum(self._last):
            self._before = (self._before[0] + self._last[0], self._before[1] + self._last[1])
        self._last = now
        self._note(self._before[0] + now[0], self._before[1] + now[1], is_lent=is_lent)

    def note_router(self, stats: dict[str, Any], *, is_lent: bool) -> None:
        """Add the router's counts."""
        refused = int(stats.get("refused_total", 0))
        self._note(int(stats.get("requests_total", 0)) - refused, refused, is_lent=is_lent)

    def _note(self, served: int, refused: int, *, is_lent: bool) -> None:
        if is_lent:
            self.refused_during_loans += max(0, refused - self.refused)
        self.served, self.refused = served, refused


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
            grace_s=cell.plan.periods.trace_grace_s,
        )
        self.submissions: Sequence[WorkloadJob] = submissions(read_jobs(), options)
        self.status: Status | None = None
        self.loans: tuple[LoanRow, ...] = ()
        self.why_none_lent: tuple[str, ...] = ()
        self.requests = Requests()
        self._lent_until_s = -inf
        self._leases: set[str] = set()
        self.training_busy = Busy()
        self.on_loan_busy = Busy()
        self.inference_busy = Busy()
        self._cell = cell
        self._client = client
        self._speed = speed
        self._clock = clock
        self._began_at_s = clock.now_s()
        self._seen_at_s: float | None = None

    async def submit_all(self) -> None:
        """Submit each job at its time.

        A lost answer is requested again under the same request id.
        """
        self._began_at_s = self._clock.now_s()
        for number, submission in enumerate(self.submissions):
            wait_s = self._began_at_s + submission.at_s - self._clock.now_s()
            if wait_s > 0:
                await self._clock.sleep(wait_s)
            await self._submit(submission, f"{submission.spec.name}-{number}")

    async def _submit(self, submission: WorkloadJob, request_id: str) -> None:
        request = Submit(spec=submission.spec, request_id=request_id)
        client = self._client.of(submission.tenant)
        while True:
            try:
                await client.ask(request, Submitted)
            except Unavailable:
                await self._clock.sleep(RETRY_S)
            except ApiRefused as error:
                log.warning("%s was refused: %s", submission.spec.name, error)
                return
            else:
                return

    async def observe(self) -> bool:
        """Read the cell's figures; a figure that cannot be read now keeps its value.

        Returns:
            Whether they are current.
        """
        try:
            status = await self._client.ask(GetStatus(), Status)
            nodes = await self._client.ask(ListNodes(), Nodes)
            loans = await self._client.ask(ListLoans(is_live_only=False), Loans)
            is_any_lent = status.figures["loans"] or status.on_loan_nodes
            why = () if is_any_lent else await self._why_none_lent()
        except ArylError as error:
            log.info("figures: %s", error)
            is_fresh = False
        else:
            self.status, self.loans, self.why_none_lent = status, loans.rows, why
            self._seen_at_s = self._clock.now_s()
            self._note_busy(nodes.rows)
            is_fresh = True
        self._note_loans()
        await self._count_requests()
        return is_fresh

    async def _why_none_lent(self) -> tuple[str, ...]:
        """The coordinator's reason why the service's nodes stay home; errors as `Client.ask`."""
        if not self._cell.plan.inference_nodes:
            return ("the cell has no inference node, so there is nothing to lend",)
        about = Describe(kind="service", name=SERVICE)
        return (await self._client.ask(about, Description)).why

    @property
    def age_s(self) -> float:
        """How old the figures are: time since a coordinator answered, in seconds."""
        return 0.0 if self._seen_at_s is None else self._clock.now_s() - self._seen_at_s

    def _note_busy(self, rows: Sequence[NodeRow]) -> None:
        self.training_busy.note(row for row in rows if row.home_pool == Pool.TRAINING)
        self.inference_busy.note(row for row in rows if row.home_pool == Pool.INFERENCE)
        self.on_loan_busy.note(row for row in rows if row.role == NodeRole.ON_LOAN)

    def _note_loans(self) -> None:
        """Record until when a refusal may be a loan's.

        A request sent during a loan times out after it. A loan that came and went between two looks
        counts like the others.
        """
        is_out = any(loan.state in OUT for loan in self.loans)
        leases = {loan.lease_id for loan in self.loans if loan.returned_at_s is not None}
        if is_out or not leases <= self._leases:
            self._lent_until_s = self._clock.now_s() + ANSWER_TIMEOUT_S
        self._leases |= leases

    async def _count_requests(self) -> None:
        is_lent = self._clock.now_s() <= self._lent_until_s
        driven = self._cell.load_stats()
        if driven is not None:
            self.requests.note_driver(driven, is_lent=is_lent)
            return
        try:
            self.requests.note_router(await self._cell.router_stats(), is_lent=is_lent)
        except Unavailable as error:
            log.info("requests: %s", error)

    async def last_look(self, *, limit_s: float) -> bool:
        """Read the figures once more, waiting a while for a coordinator that is briefly away.

        limit_s: it takes no longer, even if a peer hangs. Returns whether the figures are current.
        """
        with contextlib.suppress(TimeoutError):
            async with self._clock.timeout(limit_s):
                while not await self.observe():
                    await self._clock.sleep(RETRY_S)
                return True
        return False

    def run(self) -> Run:
        """The figures so far.

        Raises:
            Unavailable: no coordinator has answered.
        """
        if self.status is None:
            raise Unavailable("no coordinator answered: there are no figures")
        status = self.status
        seen = {
            "policy": status.policy,
            "speed": self._speed,
            "duration_s": self._clock.now_s() - self._began_at_s,
            "jobs_pending": status.pending_jobs,
            "jobs_starting": status.starting_jobs,
            "jobs_running": status.running_jobs,
            "jobs_suspended": status.suspended_jobs,
            "training_gpu_busy_ratio": self.training_busy.mean,
            "on_loan_gpu_busy_ratio": self.on_loan_busy.mean,
            "inference_gpu_busy_ratio": self.inference_busy.mean,
            "reclaim_deadline_s": self._cell.plan.periods.reclaim_deadline_s,
            "requests_served": self.requests.served,
            "requests_refused": self.requests.refused_during_loans,
            "requests_refused_total": self.requests.refused,
            "figures_age_s": self.age_s,
            "why_none_lent": self.why_none_lent,
        }
        return msgspec.convert(status.figures | seen, Run)


async def play(cell: Cell, workload: Workload, *, speed: float) -> None:
    """Begin the load, then submit until the trace ends or the caller cancels."""
    if cell.plan.inference_nodes:
        cell.start_load(speed=speed)
    await workload.submit_all()
    await asyncio.Event().wait()
