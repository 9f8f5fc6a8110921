"""The demo's main job against an API that fails, refuses and goes away; no cell is started."""

from __future__ import annotations

import asyncio
import io
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

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
from common.errors import Unavailable
from common.messages import decode, encode
from common.model import NodeRole, Pool
from coordinator.cli.run_report import progress_view, progress_words
from coordinator.cli.up import LAST_LOOK_S, without_last_look
from coordinator.client import Client
from coordinator.demo.cell import Cell
from coordinator.demo.plan import ANSWER_TIMEOUT_S, CELL, CellPlan
from coordinator.demo.serving import write_json
from coordinator.demo.workload import Requests, Workload
from coordinator.engine.state.accounting import Durations, Figures, ReclaimTimes, figures, plain
from coordinator.engine.state.tables import ClusterState
from tests.cli.fake_cell import loan_row, node_row
from tests.harness.fake_clock import FakeClock
from tests.harness.fakes import FakeBus

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


class DemoLoad:
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
async def open_workload(run_dir: Path, *, inference_nodes: int = 0) -> AsyncIterator[DemoLoad]:
    """A workload whose API listens; its cell holds ports until the end."""
    made = DemoLoad(run_dir, inference_nodes=inference_nodes)
    await made.api.open()
    try:
        yield made
    finally:
        await made.cell.stop()


@pytest.fixture
async def played(tmp_path: Path) -> AsyncIterator[DemoLoad]:
    """A workload without a service."""
    async with open_workload(tmp_path) as made:
        yield made


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_each_job_is_submitted_at_its_time_and_once(played: DemoLoad) -> None:
    """After a minute: just the jobs of the trace's first 60 s of demo time, in order."""
    task = await played.submit_for(60.0)
    due = [found for found in played.workload.submissions if found.at_s <= 60.0]
    assert [request.spec for request in played.api.submitted] == [found.spec for found in due]
    assert len({request.request_id for request in played.api.submitted}) == len(due) > 10
    await end(task)


async def test_a_lost_answer_is_asked_again_under_the_same_request(played: DemoLoad) -> None:
    """The coordinator may have taken it: only the same request id makes asking again safe."""
    played.api.silent_for = 2
    task = await played.submit_for(60.0)
    counts = Counter(request.request_id for request in played.api.submitted)
    assert played.api.submitted[0].request_id == played.api.submitted[2].request_id
    assert sorted(counts.values(), reverse=True)[:2] == [3, 1]
    await end(task)


async def test_a_refused_job_is_left_out_and_the_next_one_comes(played: DemoLoad) -> None:
    """A refusal is an answer: it is not asked again, and ends nothing."""
    first = played.workload.submissions[0].spec.name
    played.api.refused_names.add(first)
    task = await played.submit_for(60.0)
    names = [request.spec.name for request in played.api.submitted]
    assert names.count(first) == 1
    assert len(names) > 10
    await end(task)


async def test_figures_are_the_coordinators_under_the_same_names(played: DemoLoad) -> None:
    """The last look fills the table."""
    await played.workload.observe()
    run = played.workload.run()
    assert (run.jobs_finished, run.loans, run.reclaims, run.resizes) == (7, 3, 2, 5)
    assert (run.deadlines_due, run.deadlines_met) == (5, 3)
    assert (run.queueing_s.p95, run.jct_s.mean, run.reclaim_s.max) == (4.0, 10.0, 6.0)
    assert run.requests_refused == 0


async def test_what_nobody_measured_is_no_zero(played: DemoLoad) -> None:
    """A cell in which nothing has ended or come home yet has no times of that, as numbers for
    scripts or in the table for people."""
    played.api.figures = figures(ClusterState())
    await played.workload.observe()
    run = played.workload.run()
    for times in (run.queueing_s, run.jct_s):
        assert (times.mean, times.p50, times.p95) == (None, None, None)
    for way_home in (run.reclaim_s, run.lapse_s):
        assert (way_home.p50, way_home.max) == (None, None)


async def test_why_nothing_was_lent_is_asked_until_something_is(tmp_path: Path) -> None:
    """The coordinator's words of the last look; of a run with a loan there are none."""
    async with open_workload(tmp_path, inference_nodes=2) as played:
        played.api.figures = figures(ClusterState())
        for why in (("chat: 0 spare", "min_serving is 2"), ("the cell is frozen",)):
            played.api.why = why
            await played.workload.observe()
            assert played.workload.run().why_none_lent == why
        played.api.figures = FIGURES
        await played.workload.observe()
        assert played.workload.run().why_none_lent == ()


async def test_a_node_that_is_on_loan_is_lent_whoever_counted_it(tmp_path: Path) -> None:
    """A coordinator that lost its journal may know of no loan that it made: while a node is away,
    nothing says why none is."""
    async with open_workload(tmp_path, inference_nodes=2) as played:
        played.api.figures, played.api.why = figures(ClusterState()), ("chat: 0 spare",)
        played.api.on_loan_nodes = 1
        await played.workload.observe()
        assert played.workload.run().why_none_lent == ()


async def test_a_cell_without_inference_nodes_says_that_nothing_can_be_lent(
    played: DemoLoad,
) -> None:
    """It has no service that somebody could be asked about."""
    played.api.figures = figures(ClusterState())
    await played.workload.observe()
    [why] = played.workload.run().why_none_lent
    assert "no inference node" in why


async def test_utilization_is_the_mean_over_the_run_for_each_kind_of_node(
    played: DemoLoad,
) -> None:
    """By GPUs and looks: training, on loan, and the inference pool with its lent nodes. What says
    nothing does not count, and of what never was there is no figure."""
    training = node_row("t0", home_pool=Pool.TRAINING, role=NodeRole.TRAINING, gpus=8)
    serving = node_row("i0", home_pool=Pool.INFERENCE, role=NodeRole.SERVING, gpus=8)
    lent = node_row("i1", home_pool=Pool.INFERENCE, role=NodeRole.ON_LOAN, gpus=4)
    busy = msgspec.structs.replace
    looks = (
        (busy(training, gpu_busy_ratio=0.5), busy(serving, gpu_busy_ratio=0.25)),
        (busy(training, gpu_busy_ratio=None), busy(serving, gpu_busy_ratio=None)),
        (busy(training, gpu_busy_ratio=1.0), busy(lent, gpu_busy_ratio=1.0)),
    )
    await played.workload.observe()
    assert played.workload.run().on_loan_gpu_busy_ratio is None
    for rows in looks:
        played.api.nodes = rows
        await played.workload.observe()
    run = played.workload.run()
    assert run.training_gpu_busy_ratio == pytest.approx(0.75)
    assert run.on_loan_gpu_busy_ratio == pytest.approx(1.0)
    assert run.inference_gpu_busy_ratio == pytest.approx((8 * 0.25 + 4 * 1.0) / 12)
    assert played.workload.on_loan_busy.last == pytest.approx(1.0)


async def test_refused_is_what_the_load_driver_saw_refused(played: DemoLoad) -> None:
    """A timeout or a dead router is in no router's count; a driver that was started again counts
    from zero, and what the first one saw stays. Where nothing was lent, no loan is to blame."""
    write_json(played.run_dir / "load.json", {"ok_total": 90, "refused_total": 4})
    await played.workload.observe()
    assert (played.workload.requests.served, played.workload.requests.refused) == (90, 4)
    write_json(played.run_dir / "load.json", {"ok_total": 5, "refused_total": 1})
    await played.workload.observe()
    run = played.workload.run()
    assert (run.requests_served, run.requests_refused_total) == (95, 5)
    assert run.requests_refused == 0


@pytest.mark.parametrize("state", ["draining", "on loan", "coming home"])
async def test_refused_during_loans_is_what_was_refused_while_a_node_was_lent(
    played: DemoLoad, state: str
) -> None:
    """From the decision to the node serving again, and until what was sent by then has timed out;
    before and after, refusals count in the total alone."""

    async def refused(total: int) -> tuple[int, int]:
        write_json(played.run_dir / "load.json", {"ok_total": 90, "refused_total": total})
        await played.workload.observe()
        run = played.workload.run()
        return run.requests_refused, run.requests_refused_total

    recommended = loan_row(state="recommended", returned_at_s=None)
    played.api.loans = (recommended,)
    assert await refused(1) == (0, 1)
    played.api.loans = (recommended, loan_row("l1", state=state, returned_at_s=None))
    assert await refused(3) == (2, 3)
    played.api.loans = (loan_row("l1", state="returned", returned_at_s=9.0),)
    assert await refused(4) == (3, 4)
    await played.clock.advance(ANSWER_TIMEOUT_S - 1.0)
    assert await refused(5) == (4, 5)
    await played.clock.advance(2.0)
    assert await refused(7) == (4, 7)
    played.api.loans += (loan_row("l2", state="lapsed", returned_at_s=9.5),)
    assert await refused(8) == (5, 8), "one that came and went since the last look"


def test_without_a_driver_the_routers_count_stands() -> None:
    """A visitor's own requests, with no driver beside them."""
    requests = Requests()
    requests.note_router({"requests_total": 12, "refused_total": 2}, is_lent=False)
    assert (requests.served, requests.refused) == (10, 2)
    requests.note_router({}, is_lent=False)
    assert (requests.served, requests.refused) == (0, 0)


async def test_without_an_answer_there_are_no_figures(played: DemoLoad) -> None:
    """A table of zeros would be a lie."""
    played.bus.cut()
    looking = asyncio.create_task(played.workload.last_look(limit_s=3.0))
    await played.clock.advance_until(looking.done, limit_s=120.0)
    assert looking.result() is False
    assert without_last_look(played.workload).endswith("nor before")
    with pytest.raises(Unavailable, match="no figures"):
        played.workload.run()


async def test_what_is_shown_says_how_old_it_is(played: DemoLoad) -> None:
    """With nobody answering, the line for a log and the live view carry the figures' age."""
    await played.workload.observe()
    assert "old" not in progress_words(played.workload)
    played.bus.cut()
    await played.clock.advance(42.0)
    assert "figures 42 s old: no coordinator answers; " in progress_words(played.workload)
    paper = Console(width=120, file=io.StringIO(), record=True)
    paper.print(progress_view(played.workload, 52.0, None))
    assert "42 s old: no coordinator answers" in paper.export_text()


async def test_a_coordinator_that_is_away_for_a_moment_costs_no_figures(
    played: DemoLoad,
) -> None:
    """What was read before stays, and a last look waits for its return."""
    assert await played.workload.observe()
    played.bus.cut()
    look = asyncio.create_task(played.workload.observe())
    await played.clock.advance_until(look.done, limit_s=60.0)
    assert look.result() is False
    assert played.workload.run().jobs_finished == 7
    await played.clock.advance(30.0)
    assert played.workload.run().figures_age_s >= 30.0
    last = asyncio.create_task(played.workload.last_look(limit_s=60.0))
    await played.clock.advance(5.0)
    played.bus.heal()
    await played.clock.advance_until(last.done, limit_s=60.0)
    assert played.workload.run().figures_age_s < 1.0
    assert await played.workload.observe()


async def test_a_last_look_ends_in_time_and_says_what_is_missing(played: DemoLoad) -> None:
    """A NATS that hangs answers nothing and refuses nothing: its own timeouts are longer."""
    assert await played.workload.last_look(limit_s=LAST_LOOK_S) is True
    played.bus.cut()
    await played.clock.advance(6.0)
    began_s = played.clock.now_s()
    last = asyncio.create_task(played.workload.last_look(limit_s=LAST_LOOK_S))
    await played.clock.advance_until(last.done, limit_s=60.0)
    assert last.result() is False
    assert played.clock.now_s() - began_s < LAST_LOOK_S + 1.0
    said = without_last_look(played.workload)
    assert "the figures are 10 s old, and what happened since is missing" in said


async def test_a_job_that_starts_is_in_no_queue_and_is_counted(played: DemoLoad) -> None:
    """In a line for a log and in the live view: waiting, starting and running are all live jobs."""
    await played.workload.observe()
    status = played.workload.status
    assert status is not None
    played.workload.status = msgspec.structs.replace(
        status, pending_jobs=3, starting_jobs=2, running_jobs=1
    )
    counts = "3 waiting, 2 starting, 1 running"
    assert f"jobs {counts}, " in progress_words(played.workload)
    paper = Console(width=120, file=io.StringIO(), record=True)
    paper.print(progress_view(played.workload, 52.0, None))
    assert counts in paper.export_text()


async def test_what_a_policy_refused_is_said_while_it_runs(played: DemoLoad) -> None:
    """In a line for a log, in the live view and in the figures of the run; nothing of nobody."""
    await played.workload.observe()
    assert "rejected" not in progress_words(played.workload)
    played.api.figures = msgspec.structs.replace(FIGURES, jobs_rejected=14)
    await played.workload.observe()
    assert "running, 14 rejected, 7 finished" in progress_words(played.workload)
    paper = Console(width=120, file=io.StringIO(), record=True)
    paper.print(progress_view(played.workload, 52.0, None))
    assert "running, 14 rejected, 7 finished" in paper.export_text()
    assert played.workload.run().jobs_rejected == 14


async def test_turns_on_shared_gpus_are_told_while_they_are_taken(played: DemoLoad) -> None:
    """Suspended jobs beside those that run, and how often that and a move happened; of none of
    them a word where none is."""
    await played.workload.observe()
    paper = Console(width=140, file=io.StringIO(), record=True)
    paper.print(progress_view(played.workload, 52.0, None))
    assert not re.search("suspen|migration", paper.export_text() + progress_words(played.workload))
    played.api.figures = msgspec.structs.replace(
        FIGURES, suspensions=104, migrations=1, migration_lost_gpu_s=30.0
    )
    await played.workload.observe()
    status = played.workload.status
    assert status is not None
    played.workload.status = msgspec.structs.replace(status, running_jobs=2, suspended_jobs=3)
    assert " 2 running, 3 suspended, 7 finished" in progress_words(played.workload)
    paper.print(progress_view(played.workload, 52.0, None))
    shown = paper.export_text()
    assert " 2 running, 3 suspended, 7 finished" in shown
    assert ", 104 suspensions, 1 migration\n" in re.sub(" *\n", "\n", shown)
    found = played.workload.run()
    assert (found.jobs_running, found.jobs_suspended) == (2, 3)
    assert (found.suspensions, found.migrations, found.migration_lost_gpu_s) == (104, 1, 30.0)
