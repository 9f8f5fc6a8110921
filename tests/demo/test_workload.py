"""The demo's main job against an API that fails, refuses and goes away; no cell is started."""

from __future__ import annotations

import asyncio
import io
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from common.errors import Unavailable
from common.model import NodeRole, Pool
from coordinator.cli.run_report import progress_view, progress_words
from coordinator.cli.up import LAST_LOOK_S, without_last_look
from coordinator.demo.plan import ANSWER_TIMEOUT_S
from coordinator.demo.serving import write_json
from coordinator.demo.workload import Requests
from coordinator.engine.state.accounting import figures
from coordinator.engine.state.tables import ClusterState
from tests.cli.fake_cell import loan_row, node_row
from tests.demo.workload_house import FIGURES, House, open_house


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A house without a service."""
    async with open_house(tmp_path) as made:
        yield made


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_each_job_is_submitted_at_its_time_and_once(house: House) -> None:
    """After a minute: just the jobs of the trace's first 60 s of demo time, in order."""
    task = await house.submit_for(60.0)
    due = [found for found in house.workload.submissions if found.at_s <= 60.0]
    assert [request.spec for request in house.api.submitted] == [found.spec for found in due]
    assert len({request.request_id for request in house.api.submitted}) == len(due) > 10
    await end(task)


async def test_a_lost_answer_is_asked_again_under_the_same_request(house: House) -> None:
    """The coordinator may have taken it: only the same request id makes asking again safe."""
    house.api.silent_for = 2
    task = await house.submit_for(60.0)
    counts = Counter(request.request_id for request in house.api.submitted)
    assert house.api.submitted[0].request_id == house.api.submitted[2].request_id
    assert sorted(counts.values(), reverse=True)[:2] == [3, 1]
    await end(task)


async def test_a_refused_job_is_left_out_and_the_next_one_comes(house: House) -> None:
    """A refusal is an answer: it is not asked again, and ends nothing."""
    first = house.workload.submissions[0].spec.name
    house.api.refused_names.add(first)
    task = await house.submit_for(60.0)
    names = [request.spec.name for request in house.api.submitted]
    assert names.count(first) == 1
    assert len(names) > 10
    await end(task)


async def test_figures_are_the_coordinators_under_the_same_names(house: House) -> None:
    """The last look fills the table."""
    await house.workload.observe()
    run = house.workload.run()
    assert (run.jobs_finished, run.loans, run.reclaims, run.resizes) == (7, 3, 2, 5)
    assert (run.deadlines_due, run.deadlines_met) == (5, 3)
    assert (run.queueing_s.p95, run.jct_s.mean, run.reclaim_s.max) == (4.0, 10.0, 6.0)
    assert run.requests_refused == 0


async def test_what_nobody_measured_is_no_zero(house: House) -> None:
    """A cell in which nothing has ended or come home yet has no times of that, as numbers for
    scripts or in the table for people."""
    house.api.figures = figures(ClusterState())
    await house.workload.observe()
    run = house.workload.run()
    for times in (run.queueing_s, run.jct_s):
        assert (times.mean, times.p50, times.p95) == (None, None, None)
    for way_home in (run.reclaim_s, run.lapse_s):
        assert (way_home.p50, way_home.max) == (None, None)


async def test_why_nothing_was_lent_is_asked_until_something_is(tmp_path: Path) -> None:
    """The coordinator's words of the last look; of a run with a loan there are none."""
    async with open_house(tmp_path, inference_nodes=2) as house:
        house.api.figures = figures(ClusterState())
        for why in (("chat: 0 spare", "min_serving is 2"), ("the cell is frozen",)):
            house.api.why = why
            await house.workload.observe()
            assert house.workload.run().why_none_lent == why
        house.api.figures = FIGURES
        await house.workload.observe()
        assert house.workload.run().why_none_lent == ()


async def test_a_node_that_is_on_loan_is_lent_whoever_counted_it(tmp_path: Path) -> None:
    """A coordinator that lost its journal may know of no loan that it made: while a node is away,
    nothing says why none is."""
    async with open_house(tmp_path, inference_nodes=2) as house:
        house.api.figures, house.api.why = figures(ClusterState()), ("chat: 0 spare",)
        house.api.on_loan_nodes = 1
        await house.workload.observe()
        assert house.workload.run().why_none_lent == ()


async def test_a_cell_without_inference_nodes_says_that_nothing_can_be_lent(house: House) -> None:
    """It has no service that somebody could be asked about."""
    house.api.figures = figures(ClusterState())
    await house.workload.observe()
    [why] = house.workload.run().why_none_lent
    assert "no inference node" in why


async def test_utilization_is_the_mean_over_the_run_for_each_kind_of_node(house: House) -> None:
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
    await house.workload.observe()
    assert house.workload.run().on_loan_gpu_busy_ratio is None
    for rows in looks:
        house.api.nodes = rows
        await house.workload.observe()
    run = house.workload.run()
    assert run.training_gpu_busy_ratio == pytest.approx(0.75)
    assert run.on_loan_gpu_busy_ratio == pytest.approx(1.0)
    assert run.inference_gpu_busy_ratio == pytest.approx((8 * 0.25 + 4 * 1.0) / 12)
    assert house.workload.on_loan_busy.last == pytest.approx(1.0)


async def test_refused_is_what_the_load_driver_saw_refused(house: House) -> None:
    """A timeout or a dead router is in no router's count; a driver that was started again counts
    from zero, and what the first one saw stays. Where nothing was lent, no loan is to blame."""
    write_json(house.run_dir / "load.json", {"ok_total": 90, "refused_total": 4})
    await house.workload.observe()
    assert (house.workload.requests.served, house.workload.requests.refused) == (90, 4)
    write_json(house.run_dir / "load.json", {"ok_total": 5, "refused_total": 1})
    await house.workload.observe()
    run = house.workload.run()
    assert (run.requests_served, run.requests_refused_total) == (95, 5)
    assert run.requests_refused == 0


@pytest.mark.parametrize("state", ["draining", "on loan", "coming home"])
async def test_refused_during_loans_is_what_was_refused_while_a_node_was_lent(
    house: House, state: str
) -> None:
    """From the decision to the node serving again, and until what was sent by then has timed out;
    before and after, refusals count in the total alone."""

    async def refused(total: int) -> tuple[int, int]:
        write_json(house.run_dir / "load.json", {"ok_total": 90, "refused_total": total})
        await house.workload.observe()
        run = house.workload.run()
        return run.requests_refused, run.requests_refused_total

    recommended = loan_row(state="recommended", returned_at_s=None)
    house.api.loans = (recommended,)
    assert await refused(1) == (0, 1)
    house.api.loans = (recommended, loan_row("l1", state=state, returned_at_s=None))
    assert await refused(3) == (2, 3)
    house.api.loans = (loan_row("l1", state="returned", returned_at_s=9.0),)
    assert await refused(4) == (3, 4)
    await house.clock.advance(ANSWER_TIMEOUT_S - 1.0)
    assert await refused(5) == (4, 5)
    await house.clock.advance(2.0)
    assert await refused(7) == (4, 7)
    house.api.loans += (loan_row("l2", state="lapsed", returned_at_s=9.5),)
    assert await refused(8) == (5, 8), "one that came and went since the last look"


def test_without_a_driver_the_routers_count_stands() -> None:
    """A visitor's own requests, with no driver beside them."""
    requests = Requests()
    requests.note_router({"requests_total": 12, "refused_total": 2}, is_lent=False)
    assert (requests.served, requests.refused) == (10, 2)
    requests.note_router({}, is_lent=False)
    assert (requests.served, requests.refused) == (0, 0)


async def test_without_an_answer_there_are_no_figures(house: House) -> None:
    """A table of zeros would be a lie."""
    house.bus.cut()
    looking = asyncio.create_task(house.workload.last_look(limit_s=3.0))
    await house.clock.advance_until(looking.done, limit_s=120.0)
    assert looking.result() is False
    assert without_last_look(house.workload).endswith("nor before")
    with pytest.raises(Unavailable, match="no figures"):
        house.workload.run()


async def test_what_is_shown_says_how_old_it_is(house: House) -> None:
    """With nobody answering, the line for a log and the live view carry the figures' age."""
    await house.workload.observe()
    assert "old" not in progress_words(house.workload)
    house.bus.cut()
    await house.clock.advance(42.0)
    assert "figures 42 s old: no coordinator answers; " in progress_words(house.workload)
    paper = Console(width=120, file=io.StringIO(), record=True)
    paper.print(progress_view(house.workload, 52.0, None))
    assert "42 s old: no coordinator answers" in paper.export_text()


async def test_a_coordinator_that_is_away_for_a_moment_costs_no_figures(house: House) -> None:
    """What was read before stays, and a last look waits for its return."""
    assert await house.workload.observe()
    house.bus.cut()
    look = asyncio.create_task(house.workload.observe())
    await house.clock.advance_until(look.done, limit_s=60.0)
    assert look.result() is False
    assert house.workload.run().jobs_finished == 7
    await house.clock.advance(30.0)
    assert house.workload.run().figures_age_s >= 30.0
    last = asyncio.create_task(house.workload.last_look(limit_s=60.0))
    await house.clock.advance(5.0)
    house.bus.heal()
    await house.clock.advance_until(last.done, limit_s=60.0)
    assert house.workload.run().figures_age_s < 1.0
    assert await house.workload.observe()


async def test_a_last_look_ends_in_time_and_says_what_is_missing(house: House) -> None:
    """A NATS that hangs answers nothing and refuses nothing: its own timeouts are longer."""
    assert await house.workload.last_look(limit_s=LAST_LOOK_S) is True
    house.bus.cut()
    await house.clock.advance(6.0)
    began_s = house.clock.now_s()
    last = asyncio.create_task(house.workload.last_look(limit_s=LAST_LOOK_S))
    await house.clock.advance_until(last.done, limit_s=60.0)
    assert last.result() is False
    assert house.clock.now_s() - began_s < LAST_LOOK_S + 1.0
    said = without_last_look(house.workload)
    assert "the figures are 10 s old, and what happened since is missing" in said


async def test_a_job_that_starts_is_in_no_queue_and_is_counted(house: House) -> None:
    """In a line for a log and in the live view: waiting, starting and running are all live jobs."""
    await house.workload.observe()
    status = house.workload.status
    assert status is not None
    house.workload.status = msgspec.structs.replace(
        status, pending_jobs=3, starting_jobs=2, running_jobs=1
    )
    counts = "3 waiting, 2 starting, 1 running"
    assert f"jobs {counts}, " in progress_words(house.workload)
    paper = Console(width=120, file=io.StringIO(), record=True)
    paper.print(progress_view(house.workload, 52.0, None))
    assert counts in paper.export_text()


async def test_what_a_policy_refused_is_said_while_it_runs(house: House) -> None:
    """In a line for a log, in the live view and in the figures of the run; nothing of nobody."""
    await house.workload.observe()
    assert "rejected" not in progress_words(house.workload)
    house.api.figures = msgspec.structs.replace(FIGURES, jobs_rejected=14)
    await house.workload.observe()
    assert "running, 14 rejected, 7 finished" in progress_words(house.workload)
    paper = Console(width=120, file=io.StringIO(), record=True)
    paper.print(progress_view(house.workload, 52.0, None))
    assert "running, 14 rejected, 7 finished" in paper.export_text()
    assert house.workload.run().jobs_rejected == 14


async def test_turns_on_shared_gpus_are_told_while_they_are_taken(house: House) -> None:
    """Suspended jobs beside those that run, and how often that and a move happened; of none of
    them a word where none is."""
    await house.workload.observe()
    paper = Console(width=140, file=io.StringIO(), record=True)
    paper.print(progress_view(house.workload, 52.0, None))
    assert not re.search("suspen|migration", paper.export_text() + progress_words(house.workload))
    house.api.figures = msgspec.structs.replace(
        FIGURES, suspensions=104, migrations=1, migration_lost_gpu_s=30.0
    )
    await house.workload.observe()
    status = house.workload.status
    assert status is not None
    house.workload.status = msgspec.structs.replace(status, running_jobs=2, suspended_jobs=3)
    assert " 2 running, 3 suspended, 7 finished" in progress_words(house.workload)
    paper.print(progress_view(house.workload, 52.0, None))
    shown = paper.export_text()
    assert " 2 running, 3 suspended, 7 finished" in shown
    assert ", 104 suspensions, 1 migration\n" in re.sub(" *\n", "\n", shown)
    found = house.workload.run()
    assert (found.jobs_running, found.jobs_suspended) == (2, 3)
    assert (found.suspensions, found.migrations, found.migration_lost_gpu_s) == (104, 1, 30.0)
