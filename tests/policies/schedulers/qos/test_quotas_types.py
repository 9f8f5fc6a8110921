"""Quotas on two GPU types at a time: what is planned on one counts on the other at once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from common.model import JobState, Preemptibility
from coordinator.policies.contract.decisions import Decision, Reject, Resize, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

EXACT = "qos-elasticflow:margin=1"


def team(
    name: str, kind: str, *, most: int = 1, has: int = 0, gpus: int = 1, within_s: float | None
) -> JobView:
    """A job of the one tenant, of workers of one GPU each, for one type; it runs with so many."""
    placed = [make_worker_view(name, at, kind, gpus=gpus, is_flexible=at > 0) for at in range(has)]
    made = make_job_view(
        name,
        state=JobState.RUNNING if has else JobState.PENDING,
        workers=(1, most),
        gpus_per_worker=gpus,
        types=(kind,),
        gpu_type=kind if has else None,
        remaining_work_s=100.0,
        submitted_at_s=NOW_S,
        placed=placed,
    )
    return job_with(
        made,
        tenant="team",
        as_of_s=NOW_S,
        first_started_at_s=NOW_S if has else None,
        deadline_at_s=None if within_s is None else NOW_S + within_s,
    )


def cell(jobs: Sequence[JobView], *, limit: int) -> ClusterSnapshot:
    """Eight GPUs of each type, of which the tenant may use so many altogether."""
    nodes = [
        make_node_view(
            kind,
            gpu_type=kind,
            workers=[worker for job in jobs for worker in job.placed if worker.node == kind],
        )
        for kind in ("A100", "H100")
    ]
    tenant = TenantView(name="team", guarantee_gpus=limit, borrow_limit_gpus=0)
    return replace(make_snapshot(nodes=nodes, jobs=jobs), tenants=(tenant,))


def decided(snapshot: ClusterSnapshot, memory: bytes = b"") -> tuple[Decision, ...]:
    """What one pass decides."""
    return policy(EXACT).allocate(snapshot, memory).decisions


def changes(decisions: Sequence[Decision]) -> dict[str, int]:
    """Workers more or fewer, by job."""
    found: dict[str, int] = {}
    for made in decisions:
        match made:
            case Start():
                found[made.job_id] = sum(place.worker_count for place in made.placements)
            case Resize():
                more = sum(place.worker_count for place in made.added)
                found[made.job_id] = more - len(made.removed_workers)
            case _:
                raise AssertionError(made)
    return found


def test_nobody_grows_by_what_a_newcomer_on_another_type_is_promised_in_the_same_pass() -> None:
    """Of four GPUs three are used on the first type: the newcomer on the other has the fourth."""
    soft = team("soft", "A100", most=4, has=3, within_s=None)
    newcomer = team("new", "H100", within_s=150.0)
    assert changes(decided(cell([soft], limit=4))) == {"soft": 1}
    assert changes(decided(cell([soft, newcomer], limit=4))) == {"new": 1}


def test_two_newcomers_on_two_types_are_not_promised_the_same_quota() -> None:
    """Each would fit alone; the second has to wait for the first."""
    jobs = [
        team("a", "A100", gpus=4, within_s=350.0),
        team("h", "H100", gpus=4, within_s=350.0),
    ]
    found = policy(EXACT).allocate(cell(jobs, limit=7), b"")
    assert changes(found.decisions) == {"a": 1}
    [plan] = msgspec.msgpack.decode(found.memory)[0]["h"]
    assert plan[0] >= NOW_S + 100.0


def test_a_plan_that_is_made_no_more_holds_no_quota_on_another_type() -> None:
    """Who cannot be in time any more was promised four; another one may use them meanwhile."""
    late = team("late", "A100", gpus=4, within_s=50.0)
    soft = team("soft", "H100", most=4, has=1, within_s=None)
    stored = [{"late": [[NOW_S, NOW_S + 100.0, 1]]}, NOW_S, NOW_S, NOW_S + 60.0]
    both = cell([late, soft], limit=4)
    lone = replace(both, nodes=(make_node_view("A100", gpu_type="A100", gpus=2), both.nodes[1]))
    assert changes(decided(lone, msgspec.msgpack.encode(stored))) == {"soft": 3}


def test_workers_beyond_a_base_gang_on_another_type_keep_no_promise_out() -> None:
    """They are given back for it, in the same pass; not by who cannot be stopped."""
    soft = team("soft", "H100", most=2, has=2, within_s=None)
    newcomer = team("new", "A100", gpus=4, within_s=120.0)
    assert changes(decided(cell([soft, newcomer], limit=5))) == {"new": 1, "soft": -1}
    firm = replace(soft, preemptibility=Preemptibility.SEMI)
    found = decided(cell([firm, newcomer], limit=5))
    assert [made.job_id for made in found if isinstance(made, Reject)] == ["new"]


def test_who_goes_to_another_type_takes_its_quota_along() -> None:
    """What it is planned to use there is promised to nobody on the type that it left."""
    last = team("last", "A100", gpus=4, within_s=900.0)
    last = job_with(last, gpu=replace(last.gpu, types=("A100", "H100")), remaining_work_s=200.0)
    other = team("other", "A100", gpus=8, has=1, within_s=None)
    other = replace(other, tenant="others", deadline_at_s=NOW_S + 101.0)
    plans = {"last": [[NOW_S + 100.0, NOW_S + 300.0, 1]], "other": [[NOW_S, NOW_S + 100.0, 1]]}
    stored = [plans, NOW_S, NOW_S, NOW_S, (), {}, {}, (), {"last": "A100"}]
    newcomer = team("new", "A100", gpus=4, within_s=305.0)
    snapshot = cell([last, other, newcomer], limit=4)
    found = policy(EXACT).allocate(snapshot, msgspec.msgpack.encode(stored))
    assert changes(found.decisions) == {"last": 1}
    memory = msgspec.msgpack.decode(found.memory)
    assert memory[8] == {"last": "H100"}
    assert memory[0]["new"][0][0] >= NOW_S + 200.0


def test_two_that_each_go_to_the_type_of_the_other_are_not_promised_the_same_quota() -> None:
    """Each is late where it is asked first, as those GPUs are due for another one, and would be in
    time where the other was; the tenant may use eight GPUs, and both together need nine."""
    due, dh = (
        team("due", "A100", gpus=8, within_s=161.0),
        team("dh", "H100", gpus=4, within_s=521.0),
    )
    run = team("run", "A100", gpus=2, has=1, within_s=61.0)
    others = [
        job_with(job, tenant="others", remaining_work_s=work_s)
        for job, work_s in ((due, 100.0), (dh, 500.0), (run, 60.0))
    ]
    first = team("first", "A100", gpus=4, within_s=110.0)
    second = job_with(team("second", "H100", gpus=5, within_s=55.0), remaining_work_s=50.0)
    newcomers = [
        replace(job, gpu=replace(job.gpu, types=types))
        for job, types in ((first, ("A100", "H100")), (second, ("H100", "A100")))
    ]
    stored = {
        "run": [[NOW_S, NOW_S + 60.0, 1]],
        "due": [[NOW_S + 60.0, NOW_S + 160.0, 1]],
        "dh": [[NOW_S + 20.0, NOW_S + 520.0, 1]],
    }
    tenants = (
        TenantView(name="others"),
        TenantView(name="team", guarantee_gpus=0, borrow_limit_gpus=8),
    )
    snapshot = replace(cell([*others, *newcomers], limit=8), tenants=tenants)
    found = policy(EXACT).allocate(snapshot, msgspec.msgpack.encode([stored]))
    assert [made.job_id for made in found.decisions if isinstance(made, Reject)] == ["second"]


def test_dates_that_late_jobs_get_on_two_types_share_one_quota() -> None:
    """Each had its own plan; of what the tenant may use only one at a time can have four GPUs."""
    jobs = [
        team("a", "A100", gpus=4, within_s=50.0),
        team("h", "H100", gpus=4, within_s=50.0),
    ]
    plans = {"a": [[NOW_S - 9.0, NOW_S + 91.0, 1]], "h": [[NOW_S - 9.0, NOW_S + 91.0, 1]]}
    stored = [plans, NOW_S, NOW_S, NOW_S, (), {}, {}, (), {}]
    snapshot = replace(cell(jobs, limit=4), start_s=1.0)
    found = policy(EXACT).allocate(snapshot, msgspec.msgpack.encode(stored))
    dates = msgspec.msgpack.decode(found.memory)[6]
    assert dates["a"] < NOW_S + 110.0
    assert dates["h"] > NOW_S + 200.0


def test_workers_that_stand_for_one_on_another_type_count_there_as_many() -> None:
    """Two of two GPUs each are planned on the first type, and leave three of seven."""
    twice = team("a", "A100", gpus=2, within_s=350.0)
    twice = replace(twice, gpu=replace(twice.gpu, worker_multiplier={"A100": 2}))
    other = team("h", "H100", gpus=4, within_s=350.0)
    found = policy(EXACT).allocate(cell([twice, other], limit=7), b"")
    assert changes(found.decisions) == {"a": 2}
    assert msgspec.msgpack.decode(found.memory)[0]["h"][0][0] >= NOW_S + 100.0
