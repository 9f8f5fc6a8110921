"""A job that fits on an idle cell runs there under Themis, whatever its knobs and its bids are."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobState
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.themis.arbiter import Arbiter
from coordinator.policies.schedulers.themis.finish_time_fairness import Aim, Alone
from coordinator.policies.schedulers.themis.knobs import ThemisKnobs
from coordinator.policies.schedulers.themis.lease_terms import Horizon, Payment
from coordinator.policies.schedulers.themis.leases import Memory
from tests.draws import pick, whole
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.tables import each_row

WORK_S = 36_000.0


def waiting(
    name: str,
    *,
    workers: tuple[int, int],
    work_s: float = WORK_S,
    far_ratio: float = 1.0,
    app: str | None = None,
) -> JobView:
    """A job of one GPU a worker; `far_ratio` of its speed is left over several racks."""
    job = make_job_view(name, workers=workers, remaining_work_s=work_s, submitted_at_s=NOW_S)
    profile = JobProfile(far_speed_ratio=far_ratio)
    return job_with(job, app=app, whole_work_s=work_s, profile=profile)


def cell(jobs: Iterable[JobView], racks: Iterable[int]) -> ClusterSnapshot:
    """Idle nodes of so many GPUs, each in a rack of its own."""
    nodes = [
        replace(make_node_view(f"n{at}", gpus=gpus), rack=f"r{at}") for at, gpus in enumerate(racks)
    ]
    return make_snapshot(nodes=nodes, jobs=list(jobs))


def ran(snapshot: ClusterSnapshot, knobs: ThemisKnobs) -> Arbiter:
    """All auctions of a pass."""
    arbiter = Arbiter(knobs, snapshot, Memory())
    arbiter.run()
    return arbiter


@each_row("horizon", [*Horizon])
@each_row("far_ratio", [0.9, 0.5, 0.01])
def test_a_gang_that_is_slow_over_racks_starts_over_them_where_nobody_is(
    horizon: Horizon, far_ratio: float
) -> None:
    """Its share is the whole cell, in one place: all that there is would bring less for good."""
    gang = waiting("gang", workers=(4, 4), far_ratio=far_ratio)
    arbiter = ran(cell([gang], (2, 2)), ThemisKnobs(horizon=horizon))
    assert arbiter.sale.given.keys() == {"gang"}
    assert arbiter.sale.outcome.keys() == {"job gang"}


@pytest.mark.parametrize("far_ratio", [0.5, 0.01])
def test_held_for_good_a_slow_gang_is_worth_less_than_a_fast_one(far_ratio: float) -> None:
    """Both may run where one alone can: the one that makes the more of the GPUs has them."""
    jobs = [
        waiting("fast", workers=(4, 4)),
        waiting("slow", workers=(4, 4), far_ratio=far_ratio),
    ]
    for seed in range(1, 9):
        knobs = ThemisKnobs(f=0.0, payment=Payment.NONE, horizon=Horizon.GOOD, seed=seed)
        assert ran(cell(jobs, (2, 2)), knobs).sale.given.keys() == {"fast"}


@pytest.mark.parametrize("aim", [*Aim])
def test_a_trial_that_does_not_help_its_app_runs_where_nobody_else_would(aim: Aim) -> None:
    """It would end later over racks than after the first one, or an app is done with the first."""
    jobs = [
        waiting("first", workers=(4, 4), work_s=6_000.0, app="search"),
        waiting("second", workers=(3, 3), far_ratio=0.2, app="search"),
    ]
    found = policy(f"themis:aim={aim}").allocate(cell(jobs, (4, 2, 1)), b"")
    reasons = {str(each.job_id): each.reason for each in found.decisions if isinstance(each, Start)}
    assert reasons.keys() == {"first", "second"}
    assert reasons["second"].startswith("its GPUs would idle; rho of its app ")


def test_a_trial_that_does_not_help_its_app_takes_nobodys_gpus() -> None:
    """Who bids has them, and only what is left then would idle."""
    jobs = [
        waiting("first", workers=(4, 4), work_s=6_000.0, app="search"),
        waiting("second", workers=(3, 3), far_ratio=0.2, app="search"),
        waiting("other", workers=(2, 2)),
    ]
    for seed in range(1, 9):
        given = ran(cell(jobs, (4, 2, 1)), ThemisKnobs(aim=Aim.FIRST, seed=seed)).sale.given
        assert given.keys() == {"first", "other"}


def running(job: JobView, node: str, *, ago_s: float) -> JobView:
    """The same job on one node for so long; it loses nothing by a stop."""
    workers = tuple(make_worker_view(job.job_id, at, node, gpus=1) for at in range(job.workers.min))
    return job_with(
        job,
        state=JobState.RUNNING,
        gpu_type="H100",
        started_at_s=NOW_S - ago_s,
        placed=workers,
        saves_when_asked=True,
        attained_gpu_s=ago_s,
    )


def test_gpus_on_which_a_job_stays_do_not_idle() -> None:
    """Nobody bid for those of a trial whose lease is over: it has them on, and none replaces it."""
    lease_s = ThemisKnobs().lease_s
    trials = [
        running(waiting("helps", workers=(4, 4), app="search"), "n0", ago_s=0.0),
        running(waiting("stays", workers=(2, 2), work_s=1e6, app="search"), "n1", ago_s=lease_s),
        waiting("comes", workers=(2, 2), work_s=1e6, app="search"),
    ]
    nodes = [make_node_view("n0", gpus=4, free_gpus=0), make_node_view("n1", gpus=2, free_gpus=0)]
    arbiter = ran(make_snapshot(nodes=nodes, jobs=trials), ThemisKnobs(aim=Aim.FIRST))
    assert arbiter.leases.back == {"stays"}
    assert not arbiter.sale.given
    assert not arbiter.plan().decisions


KNOBS = st.builds(
    ThemisKnobs,
    f=st.sampled_from((0.0, 0.5, 0.8, 1.0)),
    lease_s=st.sampled_from((0.001, 1.0, 1200.0, 1e9)),
    payment=st.sampled_from([*Payment]),
    horizon=st.sampled_from([*Horizon]),
    spread=st.sampled_from((0.0, 1.0)),
    patience=st.sampled_from((0.0, 8.0, 1e6)),
    aim=st.sampled_from([*Aim]),
    alone=st.sampled_from([*Alone]),
    seed=st.integers(0, 9),
)


@st.composite
def idle_cells(draw: st.DrawFn) -> ClusterSnapshot:
    """Nodes in several racks without anybody, and jobs, some of them trials of one app."""
    count = draw(whole(1, 4))
    racks = draw(st.lists(st.sampled_from(("r1", "r2", "r3")), min_size=count, max_size=count))
    nodes = [
        replace(make_node_view(f"n{at}", gpus=draw(whole(1, 4))), rack=rack)
        for at, rack in enumerate(racks)
    ]
    jobs: list[JobView] = []
    for number in range(draw(whole(1, 5))):
        least = draw(whole(1, 6))
        far, near = sorted(draw(pick(1e-3, 0.3, 0.5, 0.99, 1.0)) for _ in range(2))
        work_s = draw(pick(0.0, 1.0, WORK_S, 1e9))
        job = make_job_view(
            f"j{number}",
            workers=(least, least + draw(whole(0, 3))),
            gpus_per_worker=draw(whole(1, 2)),
            remaining_work_s=work_s,
            submitted_at_s=NOW_S - draw(pick(0.0, 3600.0, 1e8)),
        )
        app = draw(pick(None, None, "search"))
        profile = JobProfile(rack_speed_ratio=near, far_speed_ratio=far)
        jobs.append(job_with(job, whole_work_s=work_s, app=app, profile=profile))
    return make_snapshot(nodes=nodes, jobs=jobs)


@settings(max_examples=300, deadline=None)
@given(snapshot=idle_cells(), knobs=KNOBS)
def test_after_one_pass_on_an_idle_cell_nobody_waits_who_fits(
    snapshot: ClusterSnapshot, knobs: ThemisKnobs
) -> None:
    """Under every knob, however far apart the GPUs are and whatever a job's app makes of it."""
    arbiter = ran(snapshot, knobs)
    free = {node.name: node.free_gpus for node in snapshot.nodes}
    started: set[str] = set()
    for decision in arbiter.plan().decisions:
        assert isinstance(decision, Start)
        started.add(decision.job_id)
        for placement in decision.placements:
            size = next(j for j in snapshot.jobs if j.job_id == decision.job_id).gpus_per_worker
            free[placement.node] -= placement.worker_count * size
    assert all(gpus >= 0 for gpus in free.values())
    for job in snapshot.jobs:
        room = sum(gpus // job.gpus_per_worker for gpus in free.values())
        assert job.job_id in started or room < job.workers.min
