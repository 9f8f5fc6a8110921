"""What people ask about the past: whose lines they see, and that an answer is of this moment."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.api import (
    ApiError,
    ApiErrorCode,
    Cancel,
    EndedJobs,
    GetHistory,
    GetUsage,
    History,
    ListEndedJobs,
    Operate,
    Submit,
    Submitted,
    Usage,
)
from common.history import HistoryLine, OrderRecord, StoryKind
from common.model import ArraySpec
from tests.harness.cluster.coordinator import Cell, make_settings, make_spec, running
from tests.tables import each_row

ORDERS = GetHistory(kinds=(StoryKind.ORDER, StoryKind.REFUSED))


async def history(cell: Cell, request: GetHistory, *, tenant: str = "ops") -> History:
    """An answer, once refused orders are in the journal, which no caller waits for."""
    await cell.clock.advance(1.0)
    found = await cell.ask(request, tenant=tenant)
    assert isinstance(found, History)
    return found


def order(line: HistoryLine) -> OrderRecord:
    assert isinstance(line.detail, OrderRecord)
    return line.detail


async def test_each_order_is_on_record_with_who_what_and_from_where() -> None:
    """Accepted ones and refused ones, with the reason that the person got."""
    async with Cell(training=1, has_index=True) as cell:
        await cell.lead()
        spec = make_spec()
        submit = Submit(spec=spec, request_id="r1", client="host-7, aryl 1.0")
        made = await cell.ask(submit)
        assert isinstance(made, Submitted)
        await cell.ask(Operate(action="drain", target="t0", reason="fans"), tenant="team")
        drain = Operate(action="drain", target="t0", reason="fans", deadline_s=60.0)
        await cell.ask(drain, tenant="ops", user="ada")
        await cell.ask(Cancel(job_id="no such job"), tenant="ops", user="ada")
        found = await history(cell, ORDERS)
    told = [(one.tenant, one.user, one.verb, one.target) for one in map(order, found.rows)]
    assert told == [
        ("team", "ann", "submit", made.job_id),
        ("team", "ann", "drain", "t0"),
        ("ops", "ada", "drain", "t0"),
        ("ops", "ada", "cancel", "no such job"),
    ]
    first, denied, drained, unknown = map(order, found.rows)
    assert first.client == "host-7, aryl 1.0"
    assert first.values == {"name": spec.name, "gpus": "8"}
    assert denied.refused == "only tenant ops may do this"
    assert (drained.refused, drained.reason, drained.values) == ("", "fans", {"deadline_s": "60"})
    assert "no job 'no such job'" in unknown.refused
    assert [line.kind for line in found.rows].count(StoryKind.REFUSED) == 2


async def test_refused_orders_are_recorded_up_to_a_rate_and_counted_beyond() -> None:
    """A script that is refused in a loop fills neither journal nor history."""
    settings = replace(make_settings(), refused_orders_per_s=0.5)
    async with Cell(training=1, has_index=True) as cell:
        await cell.lead(settings=settings)
        for _ in range(30):
            await cell.ask(Operate(action="freeze"))
        found = await history(cell, ORDERS)
        assert len(found.rows) == 5
        await cell.clock.advance(10.0)
        await cell.ask(Operate(action="freeze"))
        [last] = (await history(cell, replace(ORDERS, limit=1))).rows
        assert order(last).unrecorded == 25


@each_row(
    "request", [GetHistory(), GetUsage(by=("user",), since_at_s=0.0), ListEndedJobs(since_at_s=0.0)]
)
async def test_a_tenant_sees_its_own_and_operators_see_all(
    request: GetHistory | GetUsage | ListEndedJobs,
) -> None:
    """Whoever asks for another tenant's past is refused, and by default gets the own one."""
    async with Cell(training=2, has_index=True) as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        await cell.ask(Cancel(job_id=job_id))
        await cell.until(lambda: not coordinator.engine.state.live_jobs)
        own, all_of_it = await cell.ask(request), await cell.ask(request, tenant="ops")
        foreign = await cell.ask(request, tenant="other")
        named = await cell.ask(replace(request, tenant="team"), tenant="ops")
        denied = await cell.ask(replace(request, tenant="team"), tenant="other")
        assert isinstance(denied, ApiError)
        assert (denied.code, denied.field) == (ApiErrorCode.DENIED, "tenant")
        for found in (own, all_of_it, foreign, named):
            assert isinstance(found, History | Usage | EndedJobs)
        assert own.rows  # type: ignore[union-attr]  # checked above
        assert not foreign.rows  # type: ignore[union-attr]
        if isinstance(own, History) and isinstance(all_of_it, History):
            assert {line.tenant for line in own.rows} == {"team"}
            assert {line.tenant for line in all_of_it.rows} == {"team", ""}


async def test_a_number_stands_for_its_job_and_an_unknown_name_is_refused() -> None:
    """Also an array's number with the index of a task; no line is no answer to a wrong name."""
    async with Cell(training=1, has_index=True) as cell:
        await cell.lead()
        spec = replace(make_spec(), array=ArraySpec(indices="4-5"))
        made = await cell.ask(Submit(spec=spec, request_id="r1"))
        assert isinstance(made, Submitted)
        for name, job_id in (("1", made.job_id), ("1_4", f"{made.job_id}_4")):
            found = await history(cell, GetHistory(names=(name,)))
            assert found.rows
            assert found == await history(cell, GetHistory(names=(job_id,)))
        for name in ("77", "1_9", "nowhere"):
            refused = await cell.ask(GetHistory(names=(name,)), tenant="ops")
            assert isinstance(refused, ApiError)
            assert refused.code == ApiErrorCode.NOT_FOUND


async def test_a_report_has_what_still_runs_up_to_now() -> None:
    """A job of a week is in the report of today, with its part of today."""
    async with Cell(training=1, has_index=True) as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        await cell.clock.advance(600.0)
        half_s = cell.clock.wall_s() - 300.0
        request = GetUsage(by=("tenant", "job"), since_at_s=half_s)
        found = await cell.ask(request, tenant="ops")
        assert isinstance(found, Usage)
        [row] = found.rows
        assert row.key == ("team", job_id)
        assert row.training_gpu_s == pytest.approx(8 * 300.0, rel=1e-3)
        assert (row.waited_s, row.lost_gpu_s) == (0.0, 0.0)
        whole = await cell.ask(replace(request, since_at_s=0.0), tenant="ops")
        assert isinstance(whole, Usage)
        held_s = coordinator.engine.state.counters.training_held_gpu_s
        assert whole.rows[0].training_gpu_s == pytest.approx(held_s, rel=1e-2)


@each_row(
    ("request", "field"),
    [
        (GetUsage(by=("shoe_size",), since_at_s=0.0), "by"),
        (GetUsage(by=(), since_at_s=0.0), "by"),
        (GetUsage(by=("user", "user"), since_at_s=0.0), "by"),
        (GetUsage(by=("user",), since_at_s=9e9, until_at_s=1e9), "since"),
    ],
)
async def test_a_report_that_is_none_is_refused_by_its_field(request: GetUsage, field: str) -> None:
    """The error names the field and what was expected."""
    async with Cell(has_index=True) as cell:
        await cell.lead()
        found = await cell.ask(request)
        assert isinstance(found, ApiError)
        assert (found.code, found.field) == (ApiErrorCode.USAGE, field)


async def test_lines_that_the_history_does_not_take_are_answered_all_the_same() -> None:
    """While JetStream is away the newest lines come from the leader's state."""
    async with Cell(training=1, has_index=True) as cell:
        coordinator = await cell.lead()
        await history(cell, ORDERS)
        assert coordinator.history is not None
        coordinator.history.is_down = True  # type: ignore[attr-defined]  # it is the fake
        await cell.ask(Operate(action="freeze"), tenant="ops")
        found = await history(cell, ORDERS)
        assert [order(line).verb for line in found.rows] == ["freeze"]
        assert found.missing_lines == 0
