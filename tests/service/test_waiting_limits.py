"""A tenant has no more jobs waiting than its limit; what was acknowledged is never refused."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from common import subjects
from common.api import ApiError, ApiErrorCode, Cancel, Done, Submit, Submitted
from common.messages import encode
from coordinator.engine.state.settings import TenantSettings
from coordinator.service.settings import CoordinatorSettings
from tests.service.cell import CELL, Cell, Reply, make_settings, make_spec

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
