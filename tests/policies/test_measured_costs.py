"""What the measured cost of a job's resizes changes: what one gains, and when the next may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobState
from coordinator.policies.aryl.knapsack import Group, solve, solve_exact, solve_greedy
from coordinator.policies.contract.cooldown import RESTS_PER_COST, resizable_at_s
from coordinator.policies.contract.decisions import Decision, Resize, placed_count
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from tests import strategies
from tests.builders import (
    NOW_S,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.aryl.test_knapsack import brute_force_s, value_s, weight_gpus
from tests.policies.test_knapsack_rates import largest_step_s

PRICED = st.builds(
    lambda group, cost_s: replace(group, resize_cost_s=cost_s, change_cost_s=0.0),
    st.one_of(strategies.groups(is_moving=True), strategies.rated_groups(is_moving=True)),
    st.integers(0, 60).map(float),
)
GROUPS = st.lists(PRICED, max_size=4)
CAPACITY_GPUS = st.integers(0, 24)


@given(GROUPS, CAPACITY_GPUS)
def test_the_knapsack_is_exact_where_each_resize_has_one_price(
    groups: list[Group], capacity_gpus: int
) -> None:
    """By dynamic programming the optimum, by steps no more than one step below it."""
    best_s = brute_force_s(groups, capacity_gpus)
    exact, greedy = solve_exact(groups, capacity_gpus), solve_greedy(groups, capacity_gpus)
    assert value_s(groups, exact) == pytest.approx(best_s)
    assert weight_gpus(groups, greedy) <= capacity_gpus
    missed_s = best_s - value_s(groups, greedy)
    assert missed_s <= max(map(largest_step_s, groups), default=0.0) + 1e-6


@given(PRICED)
def test_alone_a_job_moves_only_for_more_than_its_price(group: Group) -> None:
    """Where nothing competes it gets what it is worth most with, and that may be where it is."""
    [extra] = solve([group], group.extra_max * group.gpus_per_worker)
    assert group.value_s(extra) == pytest.approx(
        max(map(group.value_s, range(group.extra_max + 1)))
    )


def wide(cost_s: float | None, *, left_s: float) -> ClusterSnapshot:
    """A job of one to four workers that has one, on a node with three free GPUs.

    left_s: running time left with its one worker; with four it is a quarter.
    """
    job = make_job_view(
        "j",
        state=JobState.RUNNING,
        workers=(1, 4),
        remaining_work_s=left_s,
        placed=[make_worker_view("j", 0, "n1")],
    )
    job = replace(job, resize_cost_s=cost_s)
    return make_snapshot(nodes=[make_node_view("n1", gpus=4, workers=job.placed)], jobs=[job])


def grown(snapshot: ClusterSnapshot, name: str) -> tuple[int, float | None]:
    """Workers that the job gets, and what its resize is thought to cost in GPU-seconds."""
    decisions: tuple[Decision, ...] = policy(name).allocate(snapshot, b"").decisions
    resizes = [decision for decision in decisions if isinstance(decision, Resize)]
    if not resizes:
        return 0, None
    return placed_count(resizes[0].added), resizes[0].predicted_cost_gpu_s


@pytest.mark.parametrize("name", ["aryl-elastic", "aryl", "foresight"])
def test_a_job_grows_where_that_saves_more_than_its_measured_price(name: str) -> None:
    """100 s left become 25 s with three more: worth 60 s once, not 80 s; else it is 5 s each."""
    assert grown(wide(60.0, left_s=100.0), name) == (3, 60.0)
    assert grown(wide(80.0, left_s=100.0), name) == (0, None)
    assert grown(wide(None, left_s=100.0), name) == (3, 5.0)
    said = policy(name).standing(
        wide(80.0, left_s=100.0), b"", wide(80.0, left_s=100.0).jobs[0].job_id
    )
    assert any("a resize was measured to cost 80 s" in line for line in said)


@pytest.mark.parametrize(
    ("cost_s", "rest_s"), [(None, 60.0), (1.0, 60.0), (23.0, 23.0 * RESTS_PER_COST)]
)
def test_the_cooldown_grows_with_the_price(cost_s: float | None, rest_s: float) -> None:
    """Growing takes up no more than a tenth of a job's time; the setting is the least."""
    snapshot = replace(wide(cost_s, left_s=1e5), resize_cooldown_s=60.0)

    def resized(ago_s: float) -> JobView:
        return replace(snapshot.jobs[0], last_resized_at_s=NOW_S - ago_s)

    assert resizable_at_s(snapshot, resized(rest_s)) is None
    assert resizable_at_s(snapshot, resized(rest_s - 1.0)) == pytest.approx(NOW_S + 1.0)
