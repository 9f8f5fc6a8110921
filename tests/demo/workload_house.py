"""The demo's main job on an API that answers, fails and refuses as a test says. Starts no cell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from common import subjects
from common.api import (
    ApiError,
    ApiErrorCode,
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
from common.bus import BusMessage
from common.messages import decode, encode
from coordinator.client import Client
from coordinator.demo.cell import Cell
from coordinator.demo.plan import CELL, CellPlan
from coordinator.demo.workload import Workload
from coordinator.engine.state.accounting import Durations, Figures, ReclaimTimes, plain
from tests.fakeclock import FakeClock
from tests.fakes import FakeBus

FIGURES = Figures(
    jobs_submitted=9,
    jobs_finished=7,
    jobs_failed=1,
    jobs_finished_on_loan=2,
    deadlines_due=5,
    deadlines_met=3,
    queueing_s=Durations(mean=1.0, p50=0.5, p95=4.0),
    jct_s=Durations(mean=10.0, p50=8.0, p95=40.0),
    training_gpu_ratio=0.75,
    on_loan_gpu_ratio=0.5,
    loans=3,
    loans_cancelled=1,
    leases_lapsed=0,
    lapse_s=ReclaimTimes(),
    lapses_late=0,
    reclaims=2,
    reclaim_s=ReclaimTimes(p50=5.0, max=6.0),
    reclaims_late=0,
    preemptions=1,
    lost_gpu_s=12.0,
    flexible_workers_released=4,
    resizes=5,
    gang_timeouts=0,
)


def status(known: Figures) -> Status:
    return Status(
        cell=CELL, epoch=1, policy="aryl", is_frozen=False, nodes=2, nodes_heard=2,
        training_gpus=8, training_gpus_held=4, on_loan_nodes=0, on_loan_gpus=0,
        on_loan_gpus_held=0, coming_home_nodes=0, inference_nodes=0, serving_nodes=0,
        pending_jobs=1, running_jobs=2, gpu_busy_ratio_training=0.5,
        gpu_busy_ratio_inference=None, figures=plain(known), bad_messages=0, up_s=1.0,
    )  # fmt: skip


class Api:
    """The coordinator's end: it answers as the test says."""

    def __init__(self, bus: FakeBus) -> None:
        self._bus = bus
        self.submitted: list[Submit] = []
        self.refused_names: set[str] = set()
        self.silent_for = 0
        """How many answers get lost."""
        self.nodes: tuple[NodeRow, ...] = ()
        self.loans: tuple[LoanRow, ...] = ()
        self.figures = FIGURES
        self.why: tuple[str, ...] = ()
        self.on_loan_nodes = 0

    async def open(self) -> None:
        await self._bus.subscribe(subjects.api_all(CELL), self._on_request)

    async def _on_request(self, message: BusMessage) -> None:
        verb = message.subject.rpartition(".")[2]
        if verb == "submit":
            await self._on_submit(message)
        elif verb == GetStatus.__struct_config__.tag:
            said = msgspec.structs.replace(status(self.figures), on_loan_nodes=self.on_loan_nodes)
            await message.respond(encode(said))
        elif verb == ListNodes.__struct_config__.tag:
            await message.respond(encode(Nodes(rows=self.nodes)))
        elif verb == ListLoans.__struct_config__.tag:
            await message.respond(encode(Loans(rows=self.loans)))
        elif verb == Describe.__struct_config__.tag:
            request = decode(message.data, Describe)
            answer = Description(kind=request.kind, name=request.name, why=self.why)
            await message.respond(encode(answer))

    async def _on_submit(self, message: BusMessage) -> None:
        request = decode(message.data, Submit)
        self.submitted.append(request)
        if self.silent_for:
            self.silent_for -= 1
        elif request.spec.name in self.refused_names:
            error = ApiError(code=ApiErrorCode.USAGE, message="too large", field="workers")
            await message.respond(encode(error))
        else:
            await message.respond(encode(Submitted(job_id=f"j{len(self.submitted)}")))


class House:
    """A workload at a great speed on an API of the test's."""

    def __init__(self, run_dir: Path, *, inference_nodes: int = 0) -> None:
        self.clock = FakeClock()
        self.bus = FakeBus(clock=self.clock)
        self.api = Api(self.bus)
        plan = CellPlan(training_nodes=2, inference_nodes=inference_nodes)
        self.run_dir = run_dir
        self.cell = Cell(plan, run_dir, clock=self.clock)
        self.workload = Workload(
            self.cell,
            Client(self.bus, cell=CELL, tenant="ops", user="trace"),
            speed=120.0,
            clock=self.clock,
        )

    async def submit_for(self, length_s: float) -> asyncio.Task[None]:
        """Let the workload submit for so long."""
        task = asyncio.create_task(self.workload.submit_all())
        await self.clock.advance(length_s)
        return task


@asynccontextmanager
async def open_house(run_dir: Path, *, inference_nodes: int = 0) -> AsyncIterator[House]:
    """A house whose API listens; its cell holds ports until the end."""
    made = House(run_dir, inference_nodes=inference_nodes)
    await made.api.open()
    try:
        yield made
    finally:
        await made.cell.stop()
