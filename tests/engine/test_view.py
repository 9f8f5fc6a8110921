"""Tenants in the engine: what a policy that does not keep to them is refused."""

from __future__ import annotations

from common.model import JobState
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.policies.contract.decisions import Preempt, Resize
from tests.engine.house import House, start, state


def house_of(*tenants: TenantSettings) -> House:
    """Two nodes, and a policy that knows no tenants."""
    return House(inference=0, settings=EngineSettings(tenants=tenants, min_runtime_s=0.0))


def test_a_start_beyond_a_quota_is_refused() -> None:
    """Whatever the policy says: the job waits on, and the refusal names tenant and limit."""
    house = house_of(TenantSettings(name="a", guarantee_gpus=8, borrow_limit_gpus=0))
    first, second = house.submit("j1", tenant="a"), house.submit("j2", tenant="a")
    house.start(first, "t0")
    (why,) = house.refusals(start(second, "t1"))
    assert why.startswith("tenant a: 8 GPUs on top of the 8")
    assert state(second) == JobState.PENDING


def test_a_guaranteed_job_is_not_stopped_for_another_tenant() -> None:
    """Both the stop and the start on what it holds are refused."""
    house = house_of(TenantSettings(name="a", guarantee_gpus=8))
    safe, other = house.submit("j1", tenant="a"), house.submit("j2", tenant="b")
    house.start(safe, "t0")
    whys = house.refusals(Preempt(job_id=safe.job_id, reason="test"), start(other, "t0"))
    assert whys == [
        "tenant a is within its guarantee and loses nothing to another tenant",
        "no job starts on the GPUs it would free",
    ]
    assert state(safe) == JobState.RUNNING


def test_a_shrink_for_nobody_gives_another_tenant_nothing_a_pass_later() -> None:
    """Under any policy: the job keeps its workers, and the other's start finds no room."""
    house = house_of(TenantSettings(name="a", guarantee_gpus=16))
    wide = house.submit("j1", tenant="a", workers=(1, 2))
    other = house.submit("j2", tenant="b")
    house.start(wide, "t0", flexible=("t1",))
    house.wait(1.0)
    leaves = Resize(job_id=wide.job_id, removed_workers=(1,), reason="test")
    (why,) = house.refusals(leaves)
    assert why == "tenant a is within its guarantee, and none of its jobs takes all of this"
    assert house.refusals(start(other, "t1")) != []
    house.wait(60.0)
    assert wide.running_workers == 2
    assert state(other) == JobState.PENDING


def test_a_stop_for_nobody_gives_another_tenant_nothing_a_pass_later() -> None:
    """Neither does a job go that has to wait for its turn again behind the other's."""
    house = house_of(TenantSettings(name="a", guarantee_gpus=8))
    safe, other = house.submit("j1", tenant="a"), house.submit("j2", tenant="b")
    house.start(safe, "t0")
    assert len(house.refusals(Preempt(job_id=safe.job_id, reason="test"))) == 1
    assert len(house.refusals(start(other, "t0"))) == 1
    assert state(safe) == JobState.RUNNING
