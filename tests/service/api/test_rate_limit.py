"""Requests a second of each tenant: a limit, a clear refusal, and orders that always pass."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from common.api import ApiError, ApiErrorCode, Cancel, Done, GetStatus, Operate, Status, Submit
from coordinator.service.api.rate_limit import BURST_S, TENANTS, Rates
from tests.harness.cluster.coordinator import Cell, make_settings, make_spec, submit


@given(
    per_s=st.floats(0.01, 1000.0),
    waits_s=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=200),
)
def test_a_tenant_gets_its_rate_and_one_burst(per_s: float, waits_s: list[float]) -> None:
    """Never more than that in all, and one that waits as long as it is asked to is let in."""
    rates = Rates(per_s=per_s, by_tenant={})
    now_s = 0.0
    for taken, wait_s in enumerate(waits_s):
        now_s += wait_s
        left_s = rates.wait_s("a", now_s=now_s)
        if left_s:
            now_s += left_s * (1 + 1e-6) + 1e-6
            left_s = rates.wait_s("a", now_s=now_s)
        assert left_s == 0.0
        assert taken < max(1.0, per_s * BURST_S) + per_s * now_s + 1


def test_a_tenant_is_not_refused_for_another_one() -> None:
    """Each has a bucket of its own, and the rate that its settings name."""
    rates = Rates(per_s=1.0, by_tenant={"large": 100.0})
    for _ in range(int(BURST_S)):
        assert rates.wait_s("a", now_s=0.0) == 0.0
    assert rates.wait_s("a", now_s=0.0) == 1.0
    assert rates.wait_s("b", now_s=0.0) == 0.0
    assert all(rates.wait_s("large", now_s=0.0) == 0.0 for _ in range(900))
    assert rates.refused_count == 1


def test_made_up_tenants_fill_no_memory_and_free_no_busy_one() -> None:
    """Only tenants that asked nothing for a while are forgotten, which are as good as new."""
    rates = Rates(per_s=1.0, by_tenant={})
    for number in range(TENANTS):
        rates.wait_s(f"t{number}", now_s=0.0)
    while not rates.wait_s("busy", now_s=BURST_S):
        pass
    rates.wait_s("one-more", now_s=BURST_S)
    assert rates.wait_s("busy", now_s=BURST_S)


async def test_a_request_beyond_the_rate_is_refused_and_an_operator_is_not() -> None:
    """The refusal names tenant, limit and time to wait; cancel and orders of `ops` pass."""
    settings = msgspec.structs.replace(
        make_settings(), requests_per_s=0.1, requests_per_s_by_tenant={"large": 50.0}
    )
    async with Cell() as cell:
        await cell.lead(settings=settings)
        job_id = await submit(cell)
        refused = await cell.ask(Submit(spec=make_spec(), request_id="too-many"))
        assert isinstance(refused, ApiError)
        assert refused.code == ApiErrorCode.UNAVAILABLE
        assert "tenant team exceeds requests_per_s, which is 0.1" in refused.message
        assert "ask again in" in refused.message
        assert isinstance(await cell.ask(GetStatus(), tenant="large"), Status)
        assert isinstance(await cell.ask(GetStatus(), tenant="ops"), Status)
        assert isinstance(await cell.ask(GetStatus(), tenant="ops"), ApiError)
        assert isinstance(await cell.ask(Operate(action="freeze"), tenant="ops"), Done)
        assert isinstance(await cell.ask(Cancel(job_id=job_id), tenant="ops"), Done)
