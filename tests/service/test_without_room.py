"""Jobs that the fleet as it is could never run: told at once, and again wherever one looks."""

from __future__ import annotations

from msgspec.structs import replace

from common.api import (
    Describe,
    Description,
    GetStatus,
    Jobs,
    ListJobs,
    Operate,
    Status,
    Submit,
    Submitted,
)
from common.model import Mode
from coordinator import plain_text
from coordinator.plain_text import glance
from coordinator.service.settings import CoordinatorSettings
from tests.service.cell import Cell, make_settings, make_spec
from tests.tables import each_row

TOO_MUCH = "can never run here: the 1 node of type H100 has 8 GPUs together, room for 1 worker"


def keeping(count: int, *, mode: Mode = Mode.ACT) -> CoordinatorSettings:
    """The service keeps so many nodes whatever its load."""
    settings = make_settings(mode=mode)
    [service] = settings.engine.services
    engine = replace(settings.engine, services=(replace(service, min_serving=count),))
    return replace(settings, engine=engine)


async def submit(cell: Cell, workers: int, *, gpus: int = 8) -> Submitted:
    """What the cell says to a gang."""
    spec = make_spec(f"j{workers}", workers=(workers, workers), gpus_per_worker=gpus)
    answer = await cell.ask(Submit(spec=spec, request_id=spec.name))
    assert isinstance(answer, Submitted), answer
    return answer


async def why(cell: Cell, kind: str, name: str) -> tuple[str, ...]:
    """The sentences of `explain`."""
    answer = await cell.ask(Describe(kind=kind, name=name))
    assert isinstance(answer, Description), answer
    return answer.why


async def status(cell: Cell) -> Status:
    """The cell at a glance."""
    answer = await cell.ask(GetStatus())
    assert isinstance(answer, Status), answer
    return answer


@each_row("policy", ["aryl", "philly", "gandiva", "tiresias", "themis", "yarn"])
async def test_a_job_beyond_the_fleet_is_taken_with_a_warning(policy: str) -> None:
    """Whatever the policy: in its answer, first in the list, first in `explain`, in the status."""
    async with Cell() as cell:
        await cell.lead(settings=make_settings(policy=policy))
        assert (await submit(cell, 1)).warnings == ()
        answer = await submit(cell, 2)
        assert answer.warnings == (TOO_MUCH,)
        reasons = await why(cell, "job", answer.job_id)
        assert reasons[0] == TOO_MUCH
        assert reasons.count(TOO_MUCH) == 1
        listed = await cell.ask(ListJobs(is_live_only=True))
        assert isinstance(listed, Jobs)
        [row] = [row for row in listed.rows if row.job_id == answer.job_id]
        assert plain_text.why(row) == TOO_MUCH
        found = await status(cell)
        assert (found.jobs_without_room, found.without_room_why) == (1, (TOO_MUCH,))
        assert ("no room", f"1 pending job has no room in this fleet: {TOO_MUCH}") in glance(found)


async def test_an_empty_cell_says_that_it_knows_no_nodes() -> None:
    """It may be that they were not heard yet: the job waits for them."""
    async with Cell(training=0) as cell:
        await cell.lead()
        assert (await submit(cell, 1)).warnings == ("no nodes are known",)


async def test_a_minimum_that_keeps_too_many_nodes_at_home_is_named() -> None:
    """The job would wait for ever for loans that no load allows."""
    async with Cell(inference=2) as cell:
        await cell.lead(settings=keeping(1))
        answer = await submit(cell, 3)
        limit = "chat lends at most 1 of its 2 nodes (min_serving is 1)"
        [warning] = answer.warnings
        assert limit in warning
        assert (await why(cell, "job", answer.job_id))[0] == warning
        assert (await status(cell)).without_room_why == (warning,)
        assert (await submit(cell, 2)).warnings == ()


async def test_what_a_service_may_lend_at_most_is_told_of_its_loans() -> None:
    """Of one that waits for an operator, and of one that is out."""
    async with Cell(inference=2) as cell:
        coordinator = await cell.lead(settings=keeping(1, mode=Mode.RECOMMEND))
        await submit(cell, 2)
        state = coordinator.engine.state
        await cell.until(lambda: bool(state.recommendations))
        [name] = state.recommendations
        limit = "chat lends at most 1 of its 2 nodes (min_serving is 1)"
        assert limit in await why(cell, "loan", name)
        await cell.ask(Operate(action="approve_loan", target=name), tenant="ops")
        await cell.until(lambda: bool(state.loans))
        [lease_id] = state.loans
        assert limit in await why(cell, "loan", lease_id)


async def test_a_job_whose_nodes_are_made_ready_is_counted() -> None:
    """It waits no longer and does not run yet; a status that counts neither loses it."""
    async with Cell() as cell:
        await cell.lead()
        await submit(cell, 1)
        seen: set[tuple[int, int, int]] = set()
        while not cell.agents["t0"].running():
            found = await status(cell)
            seen.add((found.pending_jobs, found.starting_jobs, found.running_jobs))
            await cell.clock.advance(0.1)
        assert all(sum(counts) == 1 for counts in seen)
        assert (0, 1, 0) in seen
