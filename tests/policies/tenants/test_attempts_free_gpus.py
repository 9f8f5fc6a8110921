"""What fits on free GPUs starts there, whatever a policy would have taken of guarantees for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from common.model import JobId
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import Decision, Start
from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.registry import policy
from tests.harness.builders import job_with, make_job_view, make_node_view, make_snapshot
from tests.policies.families import FAMILIES
from tests.policies.tenant_books import names, runs
from tests.policies.tenant_passes import NODE_GPUS, Asked, Cell
from tests.tables import each_row

SOON_S = 60.0


ROUNDS = {"gandiva-sets", "las", "pollux", "themis-lp"}
"""They look at newcomers once in a while; the page says how often."""


LINES = {"drf", "fifo", "gandiva-lyra", "mesos", "tetris", "yarn", "yarn-capacity", "yarn-fair"}
"""They stop nobody for the first of their line, and let it keep others of its tenant waiting."""


def started(
    policy: str, tenants: Sequence[TenantSettings], jobs: Iterable[Asked]
) -> dict[JobId, float]:
    """When each job starts first, on one node."""
    played, found = Cell(policy, tenants, nodes=1, check=True), dict[JobId, float]()

    def heard(decisions: Sequence[Decision]) -> None:
        for each in decisions:
            if isinstance(each, Start):
                found.setdefault(each.job_id, played.loop.now_s)

    played.hear = heard
    played.ask(jobs)
    played.run(until_s=3000.0)
    return found


@each_row("covered_gpus", [0, 1])
@each_row("of_large", ["c", "d"])
@each_row("policy", sorted(set(FAMILIES) - ROUNDS - LINES))
def test_a_job_starts_on_the_free_gpu_that_a_larger_one_before_it_has_no_use_for(
    policy: str, of_large: str, covered_gpus: int
) -> None:
    """The larger one could start on another tenant's guarantee alone, by a stop that is refused."""
    tenants = [
        TenantSettings(name="b", guarantee_gpus=NODE_GPUS - 1),
        TenantSettings(name="c", guarantee_gpus=covered_gpus),
        TenantSettings(name="d"),
    ]
    long = [Asked(tenant="b", work_s=40_000.0) for _ in range(NODE_GPUS - 1)]
    large = Asked(tenant=of_large, at_s=1000.0, gpus=2, work_s=600.0)
    found = started(policy, tenants, [*long, large, Asked(tenant="c", at_s=1010.0, work_s=600.0)])
    assert found[JobId(f"c{NODE_GPUS}")] <= 1010.0 + SOON_S


@each_row("policy", sorted(set(FAMILIES) - ROUNDS - LINES - {"philly"}))
def test_a_larger_one_that_is_refused_uses_up_no_room_of_its_tenant(policy: str) -> None:
    """Its tenant may use two GPUs, and the larger one, which is refused, would be both. (Under
    `philly` it holds the free one meanwhile.)"""
    tenants = [
        TenantSettings(name="b", guarantee_gpus=NODE_GPUS - 1),
        TenantSettings(name="c", guarantee_gpus=2, borrow_limit_gpus=0),
    ]
    long = [Asked(tenant="b", work_s=40_000.0) for _ in range(NODE_GPUS - 1)]
    large = Asked(tenant="c", at_s=1000.0, gpus=2, work_s=300.0)
    found = started(policy, tenants, [*long, large, Asked(tenant="c", at_s=1010.0, work_s=600.0)])
    assert found[JobId(f"c{NODE_GPUS}")] <= 1010.0 + SOON_S


@each_row("deadline_s", [None, 1500.0, 2500.0])
@each_row("policy", sorted(set(FAMILIES) - ROUNDS))
def test_an_elastic_job_that_a_guarantee_covers_starts_on_free_gpus_however_large_it_might_be(
    policy: str, deadline_s: float | None
) -> None:
    """Its policy would give it more than is free, at the cost of another tenant within its own."""
    tenants = [TenantSettings(name=name, guarantee_gpus=4) for name in "ab"]
    jobs = [
        Asked(tenant="b", workers=(1, 4), work_s=15_000.0),
        Asked(tenant="a", gpus=2, work_s=40_000.0),
        Asked(tenant="a", at_s=100.0, workers=(1, 5), work_s=2000.0, deadline_s=deadline_s),
    ]
    if policy == "qos-elasticflow" and deadline_s == 1500.0:
        return  # it is refused
    assert started(policy, tenants, jobs)[JobId("a2")] <= 100.0 + SOON_S


@each_row("policy", sorted(set(FAMILIES) - ROUNDS))
def test_a_team_within_its_guarantee_goes_before_an_outsider_s_gang_though_a_sibling_borrows(
    policy: str,
) -> None:
    """Its organisation has more than its guarantee by the sibling; the gang is first in the line,
    and has none."""
    tenants = [
        TenantSettings(name="a", guarantee_gpus=2),
        TenantSettings(name="a0", parent="a", guarantee_gpus=2),
        TenantSettings(name="a1", parent="a"),
        TenantSettings(name="b"),
    ]
    jobs = [
        Asked(tenant="a1", gpus=3, work_s=20_000.0),
        Asked(tenant="b", gpus=3, work_s=20_000.0),
        Asked(tenant="b", at_s=10.0, gpus=8, work_s=3000.0),
        Asked(tenant="a0", at_s=100.0, work_s=500.0),
    ]
    assert started(policy, tenants, jobs)[JobId("a03")] <= 100.0 + SOON_S


def test_gpus_that_a_policy_has_no_use_for_without_stops_are_not_asked_about_every_second() -> None:
    """`tiresias` would stop the gang of eight for the one of twelve, which takes from the guarantee
    of `c`; whoever else fits has no room by quota. Until the gang ends nothing changes."""
    tenants = [
        TenantSettings(name="a", guarantee_gpus=8),
        TenantSettings(name="c", guarantee_gpus=4, lend_limit_gpus=0),
        TenantSettings(name="e", parent="a"),
    ]
    played = Cell("tiresias-dlas", tenants, nodes=2, check=True)
    played.ask(
        [
            Asked(tenant="e", work_s=900.0),
            Asked(tenant="e", workers=(4, 4), work_s=7200.0),
            Asked(tenant="a", gpus=4, work_s=1800.0),
            Asked(tenant="e", gpus=8, work_s=900.0, priority=1),
            Asked(tenant="c", workers=(3, 3), gpus=4, work_s=21_600.0, priority=1),
        ]
    )
    played.run(until_s=30_000.0)
    ended = {str(name): job.finished_at_s for name, job in played.engine.state.jobs.items()}
    assert ended == {"e0": 900.0, "e1": 3600.0, "a2": 1800.0, "e3": 1800.0, "c4": 9000.0}
    assert played.passes < 40


def test_who_was_stopped_starts_again_where_its_policy_is_refused_what_it_wants_of_free_gpus() -> (
    None
):
    """`qos-edf` would stop others for another worker of `c2`, which a guarantee forbids: `a1` has
    one of the two GPUs that are free all the same."""
    tenants = [
        TenantSettings(name="a", guarantee_gpus=4, borrow_limit_gpus=8),
        TenantSettings(name="c", parent="a", guarantee_gpus=3),
    ]
    played = Cell("qos-edf", tenants, nodes=1, check=True)
    played.ask(
        [
            Asked(tenant="c", workers=(1, 3), work_s=300.0),
            Asked(tenant="a", work_s=1800.0),
            Asked(tenant="c", workers=(1, 3), gpus=4, work_s=300.0, deadline_s=450.0),
            Asked(tenant="a", gpus=2, work_s=900.0, deadline_s=630.0),
            Asked(tenant="a", workers=(2, 2), work_s=600.0, deadline_s=1200.0),
        ]
    )
    played.run(until_s=30_000.0)
    ended = {str(name): job.finished_at_s for name, job in played.engine.state.jobs.items()}
    assert ended == {"c0": 150.0, "a1": 2100.0, "c2": 450.0, "a3": 900.0, "a4": 300.0}
    assert played.passes < 40


@each_row("name", ["afs", "srsf", "srtf", "themis-simple"])
def test_no_reason_to_wait_is_told_of_a_job_that_starts(name: str) -> None:
    """The larger job of its tenant is refused; in the pass that is made to explain that it would
    have used up what the tenant may use."""
    made = policy(name)
    long = [
        job_with(runs(f"b{at}", "b", "n0", 1), remaining_work_s=40_000.0)
        for at in range(NODE_GPUS - 1)
    ]
    waiting = [
        replace(make_job_view(job_id, gpus_per_worker=gpus, remaining_work_s=left_s), tenant="c")
        for job_id, gpus, left_s in (("large", 2, 300.0), ("small", 1, 600.0))
    ]
    workers = [worker for job in long for worker in job.placed]
    snapshot = make_snapshot(
        nodes=[make_node_view("n0", gpus=NODE_GPUS, workers=workers)], jobs=[*long, *waiting]
    )
    tenants = (
        TenantView(name="b", guarantee_gpus=NODE_GPUS - 1),
        TenantView(name="c", guarantee_gpus=2, borrow_limit_gpus=0),
    )
    snapshot = replace(snapshot, tenants=tenants)
    assert names(made.allocate(snapshot, b"").decisions, Start) == {"small"}
    assert {hold.job_id for hold in made.pending_reasons(snapshot, b"")} == {"large"}
