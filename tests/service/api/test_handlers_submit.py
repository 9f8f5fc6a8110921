"""Jobs of which a submission warns or which it refuses: limits of tenants, room in the fleet."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from common import subjects
from common.api import (
    ApiError,
    ApiErrorCode,
    Cancel,
    Describe,
    Description,
    Done,
    GetStatus,
    Jobs,
    ListJobs,
    Operate,
    Status,
    Submit,
    Submitted,
)
from common.messages import encode
from common.model import Mode
from coordinator import plain_text
from coordinator.engine.state.settings import TenantSettings
from coordinator.plain_text import glance
from coordinator.service.settings import CoordinatorSettings
from tests.harness.cluster.coordinator import CELL, Cell, Reply, make_settings, make_spec
from tests.tables import each_row

LIMIT, OWN_LIMIT = 3, 5


def _settings() -> CoordinatorSettings:
    settings = make_settings()
    engine = replace(
        settings.engine,
        waiting_jobs_max=LIMIT,
        tenants=(TenantSettings(name="large", waiting_jobs_max=OWN_LIMIT),),
    )
    return replace(settings, engine=engine)


def _submit(number: int) -> Submit:
    """A job that waits for ever: no two nodes of the cell could hold it."""
    return Submit(spec=make_spec(f"j{number}", workers=(9, 9)), request_id=f"r{number}")


def _is_refused(reply: Reply, *words: str) -> bool:
    if not isinstance(reply, ApiError):
        return False
    assert (reply.code, reply.field) == (ApiErrorCode.CONFLICT, "tenant")
    assert all(word in reply.message for word in words), reply.message
    return True


async def test_a_tenant_is_refused_a_job_beyond_its_limit_until_one_waits_no_longer() -> None:
    """The refusal names the limit, how many wait and what to do; others, repeats and later
    submissions are taken."""
    async with Cell() as cell:
        await cell.lead(settings=_settings())
        taken = [await cell.ask(_submit(number)) for number in range(LIMIT)]
        assert all(isinstance(reply, Submitted) for reply in taken)
        refused = await cell.ask(_submit(LIMIT))
        assert _is_refused(refused, "3 jobs", "engine.waiting_jobs_max", "aryl job cancel")
        assert await cell.ask(_submit(0)) == taken[0]
        assert isinstance(await cell.ask(_submit(LIMIT), tenant="other"), Submitted)
        first = taken[0]
        assert isinstance(first, Submitted)
        assert isinstance(await cell.ask(Cancel(job_id=first.job_id)), Done)
        assert isinstance(await cell.ask(_submit(LIMIT)), Submitted)


async def test_a_burst_does_not_go_beyond_a_limit_of_the_tenant_s_own() -> None:
    """Of submissions side by side as many are taken as the tenant's own limit lets wait."""
    async with Cell() as cell:
        coordinator = await cell.lead(settings=_settings())
        replies = await cell.meanwhile(
            asyncio.gather(
                *(
                    cell.caller.request(
                        subjects.api(CELL, "large", "ann", "submit"),
                        encode(_submit(number)),
                        timeout_s=30.0,
                    )
                    for number in range(2 * OWN_LIMIT)
                )
            )
        )
        refused = [
            _is_refused(cell.reply(reply), "engine.tenants, large: waiting") for reply in replies
        ]
        assert sum(refused) == OWN_LIMIT
        assert coordinator.engine.waiting_jobs("large") == OWN_LIMIT


async def test_a_lower_limit_loses_no_job_that_was_acknowledged() -> None:
    """A coordinator that starts with a lower limit keeps what waits, and refuses what is new."""
    async with Cell() as cell:
        await cell.lead(settings=make_settings())
        for number in range(LIMIT + 2):
            assert isinstance(await cell.ask(_submit(number)), Submitted)
        await cell.leaders[0].crash()
        coordinator = await cell.lead("two", settings=_settings())
        assert coordinator.engine.waiting_jobs("team") == LIMIT + 2
        assert _is_refused(await cell.ask(_submit(99)), "5 jobs")
        assert coordinator.engine.check() == []


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
