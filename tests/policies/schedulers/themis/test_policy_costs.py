"""What a pass of Themis costs when thousands wait, in calls, and that nothing else comes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import GpuRequest, NodeName, Preemptibility, WorkerRange
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.free_gpus import FreeGpus, gang_shape
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.themis.app_standing import starved
from coordinator.policies.schedulers.themis.arbiter import Arbiter
from coordinator.policies.schedulers.themis.finish_time_fairness import Aim
from coordinator.policies.schedulers.themis.knobs import ThemisKnobs
from coordinator.policies.schedulers.themis.leases import Memory
from coordinator.policies.schedulers.themis.partial_allocation import Bid, proportional_fair
from coordinator.policies.schedulers.themis.placement_levels import has_room
from tests.draws import pick, whole
from tests.harness.builders import NOW_S, job_with, make_job_view, make_node_view, make_snapshot
from tests.policies.counted_calls import calls
from tests.policies.schedulers.themis.test_policy import cluster, running, waiting
from tests.tables import each_row

STARVED_S = 1e5
"""Longer than patience lasts."""


def cost(snapshot: ClusterSnapshot, name: str = "themis") -> int:
    """Calls of a first pass, in a process that has made another one.

    Each other pass of a process finds coders and a registry that are made once.
    """
    policy(name).allocate(cluster({"n0": 1}, [waiting("w0")]), b"")
    return calls(lambda: policy(name).allocate(snapshot, b""))


# --- gangs that nobody can help -----------------------------------------------------------------


def fixed(job: JobView) -> JobView:
    """It did not agree to be stopped."""
    return replace(job, preemptibility=Preemptibility.NON)


def unsaved(job: JobView) -> JobView:
    """A stop would throw away all that it computed."""
    return job_with(job, saves_when_asked=False, unsaved_gpu_s=300.0, attained_gpu_s=300.0)


def stoppable(job: JobView) -> JobView:
    """Its lease goes on, and may be let end."""
    return job


def alike(at: int) -> JobView:
    """One of many gangs of one shape, wider than all nodes together."""
    return waiting(f"w{at}", workers=(100, 100), waited_s=STARVED_S + at)


def unlike(at: int) -> JobView:
    """One of many gangs, each of its own shape, all of them wider than all nodes together."""
    return waiting(f"w{at}", workers=(100 + at, 100 + at), waited_s=STARVED_S + at)


@each_row("kind", [fixed, unsaved, stoppable])
@each_row("gang", [alike, unlike])
def test_a_starved_gang_costs_no_look_at_who_runs(
    kind: Callable[[JobView], JobView], gang: Callable[[int], JobView]
) -> None:
    """Twenty more of them cost as much beside 64 running jobs as beside 8, on as many nodes."""

    def added(running_jobs: int) -> int:
        holders = [
            kind(running(waiting(f"r{at}", work_s=1e5), [f"n{at % 8}"], started_s_ago=300.0))
            for at in range(running_jobs)
        ]
        few, many = (
            cluster(
                dict.fromkeys((f"n{at}" for at in range(8)), 8), [*holders, *map(gang, range(n))]
            )
            for n in (20, 40)
        )
        assert policy("themis").allocate(many, b"").decisions == ()
        return cost(many) - cost(few)

    assert added(64) == added(8)


def test_a_starved_gang_like_one_before_it_costs_no_look_at_the_nodes() -> None:
    """Twenty more of one shape cost as much on 64 nodes as on 8."""

    def added(nodes: int) -> int:
        names = [f"n{at}" for at in range(nodes)]
        holders = [
            fixed(running(waiting(f"r{name}"), [name], started_s_ago=300.0)) for name in names
        ]
        few, many = (
            cluster(dict.fromkeys(names, 1), [*holders, *map(alike, range(n))]) for n in (20, 40)
        )
        return cost(many) - cost(few)

    assert added(64) == added(8)


def test_a_trial_whose_app_gains_nothing_by_it_costs_no_look_at_its_other_trials() -> None:
    """All fit and none is worth it: twice as many cost about twice as much."""

    def search(trials: int) -> ClusterSnapshot:
        first = running(waiting("first", work_s=10.0, app="search"), ["n0"], started_s_ago=60.0)
        others = (
            waiting(f"t{at}", work_s=1e6 + at, app="search", waited_s=STARVED_S + at)
            for at in range(trials)
        )
        return cluster({"n0": 1, "n1": 4}, [first, *others])

    few, many = (cost(search(trials), "themis:aim=first") for trials in (60, 120))
    assert many < 2.5 * few


# --- apps of many trials ------------------------------------------------------------------------


def search_on_little(trials: int, most: int) -> ClusterSnapshot:
    """One app of so many trials of 1 to `most` workers, and eight GPUs."""
    jobs = (
        waiting(f"t{at}", workers=(1, most), work_s=3600.0 + at, app="search")
        for at in range(trials)
    )
    return cluster({"n0": 4, "n1": 4}, jobs)


@pytest.mark.parametrize("most", [1, 8])
def test_twice_as_many_trials_of_an_app_cost_about_twice_as_much(most: int) -> None:
    """Nor does each worker that a bid grows by cost a look at all of them."""
    few, many = (cost(search_on_little(trials, most)) for trials in (60, 120))
    assert many < 2.5 * few


def test_for_demands_above_what_is_free_no_nodes_are_looked_for() -> None:
    """Four trials more, each as wide as the cell, cost as much on 32 nodes as on 8."""

    def added(nodes: int) -> int:
        sizes = {f"n{at}": 1 for at in range(nodes)}
        few, many = (
            cluster(
                sizes,
                [
                    waiting(f"t{at}", workers=(nodes, nodes), work_s=3600.0 + at, app="search")
                    for at in range(trials)
                ],
            )
            for trials in (4, 8)
        )
        return cost(many) - cost(few)

    assert added(32) == added(8)


# --- many bids for the same GPUs ----------------------------------------------------------------


def test_a_bid_that_does_not_fit_costs_an_exchange_of_others_no_call() -> None:
    """Twelve bidders want the same node: tables twice as long cost less than three times as much,
    not four times, though each exchange looks whether any bid fits what it has left free."""

    def auction(alike: int) -> int:
        tables = [
            [Bid((), 1.0)]
            + [
                Bid(((0, gpus),), 1.0 + gpus * (1.0 + bidder / 100.0) - at / 1000.0)
                for gpus in range(1, 5)
                for at in range(alike)
            ]
            for bidder in range(12)
        ]
        return calls(lambda: proportional_fair(tables, [4, 1]))

    assert auction(4) < 3.0 * auction(2)


# --- and the same comes of it -------------------------------------------------------------------


class OneByOne(Arbiter):
    """It finds out of every starved gang by itself whether it can be helped."""

    def _serve_starved(self) -> None:
        since_s = NOW_S - self._knobs.patience * self._knobs.lease_s
        for standing, job in starved(self.standings.values(), since_s):
            fits = partial(has_room, job, nodes=FreeGpus(self._snapshot).nodes)
            if fits(self.sale.free):
                is_helped = self.sale.give_gang(standing, job, "its gang has waited long enough")
            else:
                is_helped = self.leases.meeting(self.sale.free).is_called(fits)
            if is_helped:
                return


@st.composite
def crowds(draw: st.DrawFn) -> ClusterSnapshot:
    """A few nodes of two types, jobs on some that may be stopped or not, and starved gangs."""
    sizes = {f"n{at}": draw(whole(1, 4)) for at in range(draw(whole(1, 4)))}
    holders: list[JobView] = []
    for name in sizes:
        if draw(st.booleans()):
            job = waiting(f"r{name}", work_s=draw(pick(10.0, 1e5)), app=draw(pick(None, "a")))
            job = running(job, [name], started_s_ago=draw(pick(300.0, 700.0, 1200.0)))
            holders.append(draw(pick(fixed, unsaved, stoppable))(job))
    gangs = [
        job_with(
            waiting(
                f"w{at}",
                gpus=draw(whole(1, 2)),
                workers=(least := draw(whole(1, 6)), least + draw(whole(0, 2))),
                work_s=draw(pick(600.0, 1e6)),
                waited_s=draw(pick(100.0, 5e4, 1e5)),
                app=draw(pick(None, "a", "b")),
            ),
            priority=draw(whole(0, 1)),
            nodes_avoided=draw(pick((), ("n0",))),
        )
        for at in range(draw(whole(1, 8)))
    ]
    snapshot = cluster(sizes, [*holders, *gangs])
    nodes = [
        replace(node, gpu_type="A100" if node.name == "n3" else node.gpu_type)
        for node in snapshot.nodes
    ]
    return replace(snapshot, nodes=tuple(nodes))


@settings(max_examples=300)
@given(snapshot=crowds(), aim=pick(*Aim), meets_in_s=pick(0.0, 500.0))
def test_what_was_found_of_one_gang_holds_for_its_like(
    snapshot: ClusterSnapshot, aim: Aim, meets_in_s: float
) -> None:
    """The pass decides and remembers what it would if it looked at every gang by itself."""
    made: list[object] = []
    for kind in (Arbiter, OneByOne):
        memory = Memory(meets_at_s=NOW_S + meets_in_s)
        arbiter = kind(ThemisKnobs(aim=aim, patience=1.0), snapshot, memory)
        arbiter.run()
        made.append((arbiter.plan(), arbiter.memory, arbiter.sale.given))
    assert made[0] == made[1]


UNLIKE = st.sampled_from(
    [
        {"gpus_per_worker": 2},
        {"workers": WorkerRange(min=3, max=6)},
        {"gpu": GpuRequest(types=("A100",))},
        {"gpu": GpuRequest(worker_multiplier={"H100": 2})},
        {"nodes_avoided": ("n1",)},
    ]
)
"""What one gang may have unlike another one that is the same besides."""


@given(free=st.tuples(whole(0, 6), whole(0, 6), whole(0, 6)), other=UNLIKE)
def test_gangs_that_do_not_have_room_alike_are_not_alike(
    free: tuple[int, int, int], other: dict[str, Any]
) -> None:
    """Whatever decides whether a base gang has room is part of what it is remembered by."""
    one = make_job_view("a", workers=(2, 6))
    changed = job_with(one, **other)
    nodes = {
        NodeName(f"n{at}"): make_node_view(f"n{at}", gpus=8, gpu_type="A100" if at == 2 else "H100")
        for at in range(3)
    }
    room = {NodeName(f"n{at}"): gpus for at, gpus in enumerate(free)}
    if has_room(one, room, nodes) != has_room(changed, room, nodes):
        assert gang_shape(one) != gang_shape(changed)


def test_trials_that_differ_in_the_type_they_prefer_have_each_its_own() -> None:
    """The order of the types that a job names is part of its gang, too."""
    orders = {"a": ("H100", "A100"), "b": ("A100", "H100")}
    jobs = [
        replace(waiting(name, app="search"), gpu=GpuRequest(types=types))
        for name, types in orders.items()
    ]
    nodes = [make_node_view(f"n-{kind}", gpus=2, gpu_type=kind) for kind in orders["a"]]
    found = policy("themis").allocate(make_snapshot(nodes=nodes, jobs=jobs), b"")
    starts = {each.job_id: each.gpu_type for each in found.decisions if isinstance(each, Start)}
    assert starts == {"a": "H100", "b": "A100"}
