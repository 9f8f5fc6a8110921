"""Growth for a deadline where a tenant's limit is in the way: its GPUs are kept from nobody."""

from __future__ import annotations

from collections.abc import Sequence

from common.model import JobId, JobState, NodeName, Pool
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.policies.contract.decisions import Decision, Start
from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.schedulers.qos.reach import Reach
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.simulation import Simulation, Submission
from tests.harness.builders import make_spec
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import cell, runs, waits
from tests.policies.tenant_passes import Asked, Cell
from tests.tables import each_row

COVERED = TenantSettings(name="c", guarantee_gpus=3)
LIMITS = {
    "borrows one": (TenantSettings(name="b", borrow_limit_gpus=1), COVERED),
    "nobody is due": (TenantSettings(name="b", borrow_limit_gpus=1),),
    "lends nothing": (
        TenantSettings(name="b"),
        TenantSettings(name="c", guarantee_gpus=3, lend_limit_gpus=0),
    ),
}


def starts(policy: str, tenants: tuple[TenantSettings, ...], deadline_s: float) -> dict[str, float]:
    """When who starts on one node of 4 GPUs: `grows` of `b` has a deadline and may have all of
    them, `fits` of `c` asks for the other three 100 s later."""
    node = NodeSpec(name=NodeName("n0"), home_pool=Pool.TRAINING, gpu_type="V100", gpus=4)
    played = Simulation(EngineSettings(policy=policy, tenants=tenants), [node], check=True)
    found: dict[str, float] = {}

    def heard(decisions: Sequence[Decision]) -> None:
        for each in decisions:
            if isinstance(each, Start):
                found.setdefault(str(each.job_id), played.loop.now_s)

    played.hear = heard
    for name, tenant, at_s, workers, runs_s, due_s in (
        ("grows", "b", 0.0, (1, 4), 20000.0, deadline_s),
        ("fits", "c", 100.0, (3, 3), 600.0, None),
    ):
        spec = make_spec(name, workers=workers, expected_runtime_s=runs_s, deadline_s=due_s)
        work_s = workers[0] * runs_s
        job = Submission(at_s=at_s, job_id=JobId(name), spec=spec, work_s=work_s, tenant=tenant)
        played.submit([job])
    played.begin()
    played.loop.run(3000.0)
    return found


@each_row("deadline_s", [18000.0, 30000.0])
@each_row("limits", LIMITS)
@each_row("policy", ["qos", "qos-edf", "qos-elasticflow"])
def test_growth_that_a_limit_forbids_keeps_no_gpu_from_others(
    policy: str, limits: str, deadline_s: float
) -> None:
    """Though the growth is by the earlier deadline, and would be in time by it alone."""
    assert starts(policy, LIMITS[limits], deadline_s)["fits"] == 100.0


@each_row("limits", LIMITS)
@each_row("policy", FAMILIES)
def test_two_that_a_limit_lets_run_one_by_one_are_both_in_time(policy: str, limits: str) -> None:
    """Beside GPUs on which both would fit. Who waits for its tenant's limit is told so."""
    played = Cell(policy, LIMITS[limits], nodes=1, check=True)
    gpus = {"borrows one": 1, "nobody is due": 1, "lends nothing": 3}[limits]
    job = Asked(
        tenant="b", at_s=0.0, workers=(gpus, gpus), gpus=1, work_s=gpus * 600.0, deadline_s=9000.0
    )
    played.ask([job, job])
    played.begin()
    played.loop.run(until_s=100.0)
    jobs = played.engine.state.jobs
    waits = [name for name, entry in jobs.items() if entry.state == JobState.PENDING]
    assert len(waits) == 1
    assert any(line.startswith("tenant b") for line in played.engine.explain.blockers(waits[0]))
    played.loop.run(until_s=9000.0)
    assert {entry.state for entry in jobs.values()} == {JobState.SUCCEEDED}


LIMITED = TenantView(name="a", borrow_limit_gpus=4)


def test_jobs_of_one_tenant_have_its_limit_together() -> None:
    """Who has more workers than is left of it keeps these; what one is given the other is not."""
    first, second = runs("first", "a", "n0", 2), waits("second", "a", 1)
    reach = Reach(cell(first, second, tenants=(LIMITED,)))
    assert reach.most(first, 1, 16) == 4
    reach.take(first, 3)
    assert reach.most(second, 1, 16) == 1
    reach.take(second, 1)
    assert reach.most(second, 1, 16) == 1
    assert reach.most(first, 1, 16) == 3
    assert reach.most(first, 2, 16) == 1


def test_without_limits_all_that_there_is_can_be_had() -> None:
    """A guarantee alone bounds nobody; who is due gets its GPUs back."""
    job = waits("job", "b", 1)
    reach = Reach(cell(job, tenants=(TenantView(name="a", guarantee_gpus=16),)))
    reach.take(job, 5)
    assert reach.most(job, 2, 16) == 8


def test_a_limit_that_was_lowered_takes_nothing_from_who_runs() -> None:
    """It is for what comes."""
    job = runs("large", "a", "n0", 6)
    reach = Reach(cell(job, tenants=(LIMITED,)))
    assert reach.most(job, 1, 16) == 6
