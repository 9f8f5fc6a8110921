"""What stopping a job costs, by both models, and who is waited for instead."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName, NodeRole
from coordinator.policies.aryl.reclaim.choose_nodes import Reclaiming, choose_nodes
from coordinator.policies.aryl.reclaim.occupancy import Occupancy
from coordinator.policies.aryl.reclaim.preemption_cost import RESTART_S, CostModel, Costs
from coordinator.policies.contract.decisions import Decision, Preempt, Reclaim, Resize
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import policy
from tests.draws import pick, whole
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_cluster,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
)
from tests.tables import each_row

NEAR = "aryl:reclaim=near-optimum"


BY_WORK = f"{NEAR}:reclaim_cost=lost-gpu-s"


WAITING = f"{BY_WORK}:waits_for_finish=true"


often = settings(max_examples=150, deadline=None)


def ran(job: JobView, *, run_s: float, saved_s_ago: float | None, left_s: float = 1e6) -> JobView:
    """A running job that began some time ago and saved since, or never."""
    gpus = sum(worker.gpus for worker in job.placed)
    age_s = run_s if saved_s_ago is None else saved_s_ago
    return job_with(
        job,
        started_at_s=NOW_S - run_s,
        as_of_s=NOW_S,
        unsaved_gpus=gpus,
        unsaved_gpu_s=age_s * gpus,
        has_saved=saved_s_ago is not None,
        remaining_work_s=left_s * len(job.placed),
        work_rate=len(job.placed),
    )


def one_each(
    *jobs: tuple[str, float, float | None], left_s: float = 1e6
) -> tuple[list[NodeView], list[JobView]]:
    """Each job alone on a lent node of its name, with (name, running time, time since it saved)."""
    nodes, views = make_cluster({f"n-{name}": {name: 8} for name, _, _ in jobs})
    how = {name: (run_s, saved_s) for name, run_s, saved_s in jobs}
    return nodes, [
        ran(view, run_s=how[view.job_id][0], saved_s_ago=how[view.job_id][1], left_s=left_s)
        for view in views
    ]


def taken(snapshot: ClusterSnapshot, name: str) -> tuple[Decision, ...]:
    """What a policy takes back."""
    return policy(name).lend(snapshot)


def victims(decisions: tuple[Decision, ...]) -> list[str]:
    """Who stops."""
    return [decision.job_id for decision in decisions if isinstance(decision, Preempt)]


# --- expected lost GPU-seconds ------------------------------------------------------------------


def test_the_cost_is_work_since_the_checkpoint_and_the_restart() -> None:
    """Eight GPUs that saved 100 s ago lose 8 x (100 + 63) GPU-seconds where nobody waits."""
    nodes, jobs = one_each(("a", 5000.0, 100.0))
    costs = Costs(make_snapshot(nodes=nodes, jobs=jobs))
    assert costs.expected_lost_gpu_s(JobId("a")) == pytest.approx(8 * (100.0 + 63.0))
    assert costs.expected_lost_gpu_s(JobId("nobody")) == 0.0


def test_the_cost_has_the_wait_of_whoever_queues_again() -> None:
    """Shorter jobs that wait go first: their work over all GPUs is the victim's wait."""
    nodes, jobs = one_each(("a", 5000.0, 100.0), ("b", 5000.0, 100.0))
    short = make_job_view("short", remaining_work_s=1600.0, gpus_per_worker=4)
    long = make_job_view("long", remaining_work_s=1e7, gpus_per_worker=8)
    costs = Costs(make_snapshot(nodes=nodes, jobs=[*jobs, short, long]))
    wait_s = 1600.0 * 4 / 16
    expected = 8 * (100.0 + RESTART_S + wait_s)
    assert costs.expected_lost_gpu_s(JobId("a")) == pytest.approx(expected)


def test_silence_counts_as_the_median_of_those_that_report() -> None:
    """A job without a checkpoint counts the median age, or its own running time when shorter."""
    nodes, jobs = one_each(
        ("a", 9e4, 100.0),
        ("b", 9e4, 300.0),
        ("c", 9e4, 700.0),
        ("old", 9e4, None),
        ("new", 9.0, None),
    )
    costs = Costs(make_snapshot(nodes=nodes, jobs=jobs))
    ages_s = {
        name: costs.expected_lost_gpu_s(JobId(name)) / 8 - RESTART_S
        for name in ("a", "b", "c", "old", "new")
    }
    assert ages_s == pytest.approx({"a": 100.0, "b": 300.0, "c": 700.0, "old": 300.0, "new": 9.0})


def test_where_nobody_reports_all_work_is_lost() -> None:
    """Without any checkpoint there is no median: a job counts all that it ran."""
    nodes, jobs = one_each(("a", 500.0, None), ("b", 4000.0, None))
    costs = Costs(make_snapshot(nodes=nodes, jobs=jobs))
    assert costs.expected_lost_gpu_s(JobId("b")) == pytest.approx(8 * (4000.0 + RESTART_S))


def test_reporting_an_old_checkpoint_protects_no_less_than_silence() -> None:
    """Of two jobs alike the one that reports is no victim for it, unless it saved lately."""
    others = (("x", 9e4, 100.0), ("y", 9e4, 300.0))
    for saved_s, victim in ((301.0, "b"), (99.0, "a")):
        nodes, jobs = one_each(*others, ("a", 9e4, saved_s), ("b", 9e4, None))
        own = [node for node in nodes if node.name in ("n-a", "n-b")]
        snapshot = make_snapshot(nodes=nodes, jobs=jobs)
        how = Reclaiming(costs=Costs(snapshot), model=CostModel.LOST_GPU_S, is_searching=True)
        choice = choose_nodes(Occupancy(snapshot), own, 1, how)
        assert choice.victims == (victim,)


def test_the_models_differ_where_one_job_is_dearer_than_two() -> None:
    """One job that loses a day, or two that have just saved: fewest users, or least work."""
    nodes, jobs = make_cluster({"n1": {"day": 8}, "n2": {"x": 4, "y": 4}})
    age_s = {"day": 86400.0, "x": 5.0, "y": 5.0}
    jobs = [ran(job, run_s=1e5, saved_s_ago=age_s[job.job_id]) for job in jobs]
    service = make_service_view(load=5.0, min_serving=1)
    snapshot = make_snapshot(nodes=nodes, jobs=jobs, services=[service])
    assert victims(taken(snapshot, NEAR)) == ["day"]
    by_work = taken(snapshot, BY_WORK)
    assert victims(by_work) == ["x", "y"]
    (reclaim,) = (decision for decision in by_work if isinstance(decision, Reclaim))
    assert reclaim.predicted_cost_gpu_s == pytest.approx(8 * (5.0 + RESTART_S))
    assert "none can be cheaper" in reclaim.reason


def test_among_as_many_jobs_the_least_work_is_lost() -> None:
    """The number of jobs comes first, and then who loses least."""
    nodes, jobs = one_each(("a", 9e4, 900.0), ("b", 9e4, 30.0), ("c", 9e4, 60.0))
    service = make_service_view(load=15.0, min_serving=1)
    snapshot = make_snapshot(nodes=nodes, jobs=jobs, services=[service])
    assert victims(taken(snapshot, NEAR)) == ["b", "c"]


# --- shrink, wait or preempt --------------------------------------------------------------------


def waiting_snapshot(
    left_s: float, *, source: str = "declared", deadline_s: float = 300.0
) -> ClusterSnapshot:
    """One node with a job that has so long to go, and one with a job without end."""
    nodes, jobs = one_each(("ends", 9e4, 900.0), ("stays", 9e4, 1.0))
    jobs = [
        job_with(job, remaining_work_s=left_s, estimate_source=source)
        if job.job_id == "ends"
        else job
        for job in jobs
    ]
    service = make_service_view(
        load=5.0, min_serving=1, reclaim_deadline_s=deadline_s, return_s=120.0
    )
    return make_snapshot(nodes=nodes, jobs=jobs, services=[service])


def test_a_natural_finish_within_the_deadline_is_waited_for() -> None:
    """A job with 60 s to go is not stopped where 180 s are left: the node waits 90 s at most, and
    the reason says what stopping would have cost."""
    (reclaim,) = taken(waiting_snapshot(60.0), WAITING)
    assert isinstance(reclaim, Reclaim)
    assert (reclaim.node, reclaim.wait_s, reclaim.predicted_cost_gpu_s) == ("n-ends", 90.0, 0.0)
    assert "waits up to 90 s for ends to end" in reclaim.reason
    assert f"would lose {8 * (900.0 + RESTART_S):.0f} GPU-s" in reclaim.reason


@each_row(
    ("left_s", "source", "deadline_s"),
    [
        (121.0, "declared", 300.0),  # with half as much again it could be too late
        (91.0, "history of 3 runs", 300.0),
        (10.0, "default", 300.0),  # a guess
        (10.0, "median of 4 jobs of this size", 300.0),
        (60.0, "declared", 120.0),  # the way home takes all of the deadline
    ],
)
def test_who_may_end_too_late_is_not_waited_for(
    left_s: float, source: str, deadline_s: float
) -> None:
    """The estimate's uncertainty must fit into what the way home leaves of the deadline."""
    snapshot = waiting_snapshot(left_s, source=source, deadline_s=deadline_s)
    assert victims(taken(snapshot, WAITING)) == ["stays"]


def test_nobody_waits_unless_the_rule_is_on_and_a_recall_never_does() -> None:
    """Waiting is a knob; an operator who recalls a service wants its nodes now."""
    snapshot = waiting_snapshot(60.0)
    assert victims(taken(snapshot, BY_WORK)) == ["stays"]
    recalled = replace(
        snapshot, services=tuple(replace(s, is_recalled=True) for s in snapshot.services)
    )
    decisions = taken(recalled, WAITING)
    assert victims(decisions) == ["ends", "stays"]
    assert all(decision.wait_s == 0 for decision in decisions if isinstance(decision, Reclaim))


def test_of_two_that_may_be_waited_for_the_one_that_ends_first_goes_home() -> None:
    """Both end within the slack; a node that comes home at once serves sooner than one that waits
    for minutes, whatever they are called and however many flexible workers it has to release."""
    nodes, jobs = make_cluster(
        {"n1": {"later": 4}, "n2": {"sooner": 4}}, flexible={"n2": {"wide": 4}}
    )
    left_s = {"later": 250.0, "sooner": 60.0, "wide": 1e6}
    jobs = [ran(job, run_s=9e4, saved_s_ago=9.0, left_s=left_s[job.job_id]) for job in jobs]
    snapshot = make_snapshot(nodes=nodes, jobs=jobs, services=[make_service_view()])
    how = Reclaiming(costs=Costs(snapshot), slack_s=400.0)
    choice = choose_nodes(Occupancy(snapshot), nodes, 1, how)
    assert (choice.nodes, choice.victims) == ((NodeName("n2"),), ())
    assert choice.awaited == ((JobId("sooner"), 90.0),)


def test_shrinking_comes_before_waiting() -> None:
    """A node with flexible workers only goes first; then one that waits; then who must stop."""
    nodes, jobs = make_cluster(
        {"n1": {"ends": 8}, "n3": {"stays": 8}}, flexible={"n2": {"wide": 8}}
    )
    left_s = {"ends": 30.0, "stays": 1e6, "wide": 1e6}
    jobs = [ran(job, run_s=9e4, saved_s_ago=9.0, left_s=left_s[job.job_id]) for job in jobs]
    order: list[set[str]] = []
    for load in (5.0, 15.0, 25.0):
        service = make_service_view(load=load, min_serving=1)
        snapshot = make_snapshot(nodes=nodes, jobs=jobs, services=[service])
        decisions = taken(snapshot, WAITING)
        order.append({d.node for d in decisions if isinstance(d, Reclaim)})
        assert any(isinstance(decision, Resize) for decision in decisions)
        assert victims(decisions) == (["stays"] if load == 25.0 else [])
    assert order == [{"n2"}, {"n1", "n2"}, {"n1", "n2", "n3"}]


# --- properties over clusters -------------------------------------------------------------------


@st.composite
def lent(draw: st.DrawFn) -> tuple[list[NodeView], list[JobView], int]:
    """Lent nodes with base and flexible workers, jobs of any age, and how many are wanted."""
    count = draw(whole(1, 9))
    base = draw(st.lists(st.sets(st.integers(0, 6), max_size=3), min_size=count, max_size=count))
    extra = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    nodes, jobs = make_cluster(
        {f"n{i}": {f"j{j}": 2 for j in sorted(held)} for i, held in enumerate(base)},
        flexible={f"n{i}": {f"j{i % 7}": 1} for i, has in enumerate(extra) if has},
    )
    nodes += [make_node_view(f"d{i}", role=NodeRole.DRAINING) for i in range(draw(whole(0, 1)))]
    views = [
        ran(
            job,
            run_s=1e5,
            saved_s_ago=float(draw(whole(0, 2000))),
            left_s=float(draw(pick(20, 90, 5000))),
        )
        for job in jobs
    ]
    return nodes, views, draw(whole(0, count + 1))


every_way = st.builds(
    lambda model, is_searching, slack_s: (model, is_searching, slack_s),
    st.sampled_from(CostModel),
    st.booleans(),
    st.sampled_from((0.0, 60.0, 200.0)),
)


@often
@given(lent(), every_way, st.randoms(use_true_random=False))
def test_choices_are_sound_in_every_way(
    cluster: tuple[list[NodeView], list[JobView], int],
    way: tuple[CostModel, bool, float],
    chance: object,
) -> None:
    """As many nodes as wanted; no victim where flexible release or waiting is enough; irreducible;
    the awaited end in time and do not stop; the same for any order of the nodes; never dearer than
    the greedy."""
    nodes, jobs, wanted = cluster
    model, is_searching, slack_s = way
    snapshot = make_snapshot(nodes=nodes, jobs=jobs)
    occupancy, costs = Occupancy(snapshot), Costs(snapshot)
    how = Reclaiming(costs=costs, model=model, is_searching=is_searching, slack_s=slack_s)
    choice = choose_nodes(occupancy, nodes, wanted, how)
    count = min(wanted, len(nodes))
    awaited = {job for job, _ in choice.awaited}
    stops = set(choice.victims)
    ends_s = {job.job_id: costs.ends_within_s(job.job_id) for job in jobs}
    base = {
        node.name: {
            job
            for job in occupancy.base_jobs(node.name)
            if (ends_s[job] or 1e9) > slack_s or not slack_s
        }
        for node in nodes
    }
    assert len(choice.nodes) == len(set(choice.nodes)) == count
    assert set().union(*(base[name] for name in choice.nodes)) == stops
    assert not awaited & stops
    assert all(0 < at_s <= slack_s and at_s == ends_s[job] for job, at_s in choice.awaited)
    if sum(not held for held in base.values()) >= count:
        assert not stops
    for victim in stops:
        assert sum(held <= stops - {victim} for held in base.values()) < count
    chance.shuffle(nodes)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    assert choose_nodes(occupancy, nodes, wanted, how) == choice
    greedy = choose_nodes(occupancy, nodes, wanted, replace(how, is_searching=False))
    assert _price(costs, model, choice.victims) <= _price(costs, model, greedy.victims) + 1e-6


def _price(costs: Costs, model: CostModel, stopped: tuple[JobId, ...]) -> float:
    """To half a GPU-second a job: costs are compared as whole ones."""
    if model == CostModel.JOBS:
        return len(stopped)
    return sum(round(costs.expected_lost_gpu_s(job)) for job in stopped)


def test_a_job_that_is_not_running_does_not_end_by_itself() -> None:
    """Whoever starts or stops is not waited for, whatever the estimate says."""
    nodes, jobs = one_each(("a", 10.0, 1.0), left_s=5.0)
    for state, is_awaited in ((JobState.RUNNING, True), (JobState.STARTING, False)):
        snapshot = make_snapshot(nodes=nodes, jobs=[replace(jobs[0], state=state)])
        how = Reclaiming(costs=Costs(snapshot), slack_s=100.0)
        choice = choose_nodes(Occupancy(snapshot), nodes, 1, how)
        assert bool(choice.awaited) == is_awaited
        assert bool(choice.victims) != is_awaited
        assert choice.nodes == (NodeName("n-a"),)
