"""How many nodes a service lends or wants back: spare over a forecast, hold-off, hysteresis."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import NodeRole
from coordinator.policies.aryl.lending.balance import Balance, balance, is_lending, numbers
from coordinator.policies.aryl.lending.demand import choose_loans
from coordinator.policies.contract.snapshot import LoadSample, NodeView, ServiceView, nodes_for
from tests.harness.builders import (
    NOW_S,
    make_node_view,
    make_service_view,
    make_snapshot,
)
from tests.tables import each_row


def serving(count: int, *, since_s: float = 0.0) -> list[NodeView]:
    """Nodes that serve."""
    return [
        make_node_view(f"n{number}", role=NodeRole.SERVING, serving_since_s=since_s)
        for number in range(count)
    ]


def level(*values: float, step_s: float = 60.0, age_s: float = 0.0) -> list[LoadSample]:
    """Samples at equal distances, the last one `age_s` ago."""
    last_s = NOW_S - age_s
    return [
        LoadSample(last_s - step_s * (len(values) - 1 - index), value)
        for index, value in enumerate(values)
    ]


def have(nodes: Sequence[NodeView], service: ServiceView) -> Balance:
    """Balance of the one service."""
    return balance(make_snapshot(nodes=nodes, services=[service]), service)


def lent(nodes: Sequence[NodeView], service: ServiceView) -> list[str]:
    """Names of the nodes that would be lent, whoever wants them."""
    snapshot = make_snapshot(nodes=nodes, services=[service])
    chosen = choose_loans(snapshot, service, balance(snapshot, service), None)
    return [str(name) for name in chosen]


@each_row(
    ("load", "min_serving", "headroom_ratio", "needed"),
    [
        (0.0, 0, 0.0, 0),
        (0.0, 2, 0.0, 2),
        (30.0, 2, 0.0, 3),
        (30.1, 2, 0.0, 4),
        (30.0, 0, 0.02, 4),  # 2 % of 10 nodes is one node, rounded up
        (30.0, 0, 0.3, 6),
        (30.0, 5, 0.1, 5),  # the least number is not raised by headroom
        (900.0, 0, 0.3, 10),  # never more than it has
    ],
)
def test_nodes_for_a_load(
    load: float, min_serving: int, headroom_ratio: float, needed: int
) -> None:
    """max(min_serving, ceil(load / capacity) + headroom), at most all: ten nodes of 10 each."""
    service = make_service_view(
        capacity_per_node=10.0, min_serving=min_serving, headroom_ratio=headroom_ratio
    )
    assert nodes_for(service, load, 10) == needed


def test_spare_is_what_is_ready_beyond_the_need() -> None:
    """Only nodes that serve and are not cordoned are ready; what comes home is not spare yet."""
    nodes = [
        *serving(4),
        make_node_view("x1", role=NodeRole.SERVING, is_drained_by_operator=True),
        make_node_view("x2", role=NodeRole.WARMING),
        make_node_view("x3", role=NodeRole.VACATING),
        make_node_view("x4", role=NodeRole.ON_LOAN, is_reclaimed=True),
        make_node_view("x5", role=NodeRole.ON_LOAN),
        make_node_view("x6", role=NodeRole.DRAINING),
        make_node_view("x7", role=NodeRole.LOST),
        make_node_view("y1", role=NodeRole.SERVING, service="search"),
        make_node_view("t1"),
    ]
    found = have(nodes, make_service_view(load=25.0))
    assert [node.name for node in found.ready] == ["n0", "n1", "n2", "n3"]
    assert [node.name for node in found.coming] == ["x2", "x3", "x4"]
    assert (found.needed, found.spare, found.shortfall) == (3, 1, 0)


def test_a_node_whose_server_is_down_serves_nobody() -> None:
    """Another one is not lent as if it did, and one that is lent is called home in its place."""
    service = make_service_view(load=25.0)
    [down, *others] = serving(4)
    down = replace(down, serving_since_s=None)
    assert have([down, *others], service).spare == 0
    assert lent([down, *others], service) == []
    away = make_node_view("l1", role=NodeRole.ON_LOAN)
    assert have([*others, away], service).shortfall == 0
    assert have([down, *others[1:], away], service).shortfall == 1


def test_shortfall_counts_what_is_already_coming() -> None:
    """Nodes on their way home are not called twice."""
    nodes = [*serving(2), make_node_view("x2", role=NodeRole.WARMING)]
    nodes += [make_node_view(f"l{number}", role=NodeRole.ON_LOAN) for number in range(3)]
    found = have(nodes, make_service_view(load=55.0))
    assert (found.needed, found.shortfall, found.spare) == (6, 3, 0)


def test_a_load_above_all_nodes_of_a_service_does_not_read_as_enough() -> None:
    """A need is at most what the service has; the sentence names what the load alone needs."""
    for load, needs in (
        (25.0, "3 nodes with headroom (3 before"),
        (55.0, "6 nodes, and the service has 3 (3 before"),
    ):
        service = make_service_view(load=load)
        assert f"per node needs {needs} lending)" in numbers(service, have(serving(3), service))


def test_the_forecast_looks_as_far_as_a_return_and_a_loan_period() -> None:
    """A steady rise counts by where it will be when a node lent now could be home again."""
    service = make_service_view(
        load=level(10.0, 11.0, 12.0), return_s=120.0, loan_period_s=300.0
    )  # one more per minute
    found = have(serving(9), service)
    assert found.horizon_s == 420.0
    assert found.forecast_load == pytest.approx(19.0)
    assert found.needed == 2


def test_a_dip_lends_nothing() -> None:
    """To lend, the peak of the last loan period counts; to reclaim, only the present and what is
    ahead. Between the two levels nothing moves."""
    dip = make_service_view(load=level(50.0, 50.0, 50.0, 20.0), loan_period_s=300.0)
    found = have(serving(4), dip)
    assert (found.needed, found.needed_to_lend) == (2, 4)
    assert (found.spare, found.shortfall) == (0, 0)
    over = make_service_view(load=level(50.0, *[20.0] * 6), loan_period_s=300.0)
    assert have(serving(4), over).spare == 2


def test_the_longest_serving_node_is_lent_first() -> None:
    """Ties by name; no more than is spare."""
    nodes = [
        make_node_view("n1", role=NodeRole.SERVING, serving_since_s=300.0),
        make_node_view("n2", role=NodeRole.SERVING, serving_since_s=100.0),
        make_node_view("n3", role=NodeRole.SERVING, serving_since_s=100.0),
        make_node_view("n4", role=NodeRole.SERVING, serving_since_s=200.0),
    ]
    assert lent(nodes, make_service_view(load=5.0)) == ["n2", "n3", "n4"]


def test_a_node_that_became_ready_is_held_off() -> None:
    """hold_off_s after it began to serve it may be lent, not a second before."""
    service = make_service_view(load=5.0, hold_off_s=600.0)
    assert lent(serving(3, since_s=NOW_S - 600.0), service) == ["n0", "n1"]
    assert lent(serving(3, since_s=NOW_S - 599.0), service) == []


def test_no_node_goes_in_the_place_of_one_that_is_held_off() -> None:
    """A service that has just got nodes back keeps as many of what is spare, whichever they are."""
    service = make_service_view(load=5.0, hold_off_s=600.0)  # one node needed
    home = make_node_view("home", role=NodeRole.SERVING, serving_since_s=NOW_S)
    assert lent([*serving(1), home], service) == []
    assert lent([*serving(2), home], service) == ["n0"]
    later = make_node_view("home", role=NodeRole.SERVING, serving_since_s=NOW_S - 600.0)
    assert lent([*serving(1), later], service) == ["n0"]


def test_only_what_can_come_back_in_time_is_lent() -> None:
    """TTL, grace, device and warm-up together must fit into the reclaim deadline."""
    nodes = serving(3)
    assert lent(nodes, make_service_view(load=5.0, return_s=300.0, reclaim_deadline_s=300.0))
    assert not lent(nodes, make_service_view(load=5.0, return_s=300.5, reclaim_deadline_s=300.0))


def test_without_a_known_load_nothing_is_lent() -> None:
    """Never measured, or last measured more than a loan period ago, is not zero."""
    nodes = serving(3)
    assert not lent(nodes, make_service_view())
    assert not lent(nodes, make_service_view(load=level(5.0, age_s=301.0), loan_period_s=300.0))
    assert lent(nodes, make_service_view(load=level(5.0, age_s=300.0), loan_period_s=300.0))


def test_a_recalled_service_lends_nothing() -> None:
    """Whatever is spare."""
    service = make_service_view(load=5.0, is_recalled=True)
    assert not is_lending(make_snapshot(services=[service]), service)
    assert not lent(serving(3), service)


@given(
    st.lists(st.integers(0, 120), min_size=1, max_size=8),
    st.integers(1, 12),
    st.integers(0, 4),
    st.sampled_from((0.0, 0.02, 0.3)),
)
def test_lending_leaves_at_least_what_is_needed(
    loads: list[int], node_count: int, min_serving: int, headroom_ratio: float
) -> None:
    """After all spare nodes are gone the service still has what it needs, and a service never
    lends and calls home at once."""
    service = make_service_view(
        load=level(*[float(load) for load in loads]),
        min_serving=min_serving,
        headroom_ratio=headroom_ratio,
    )
    nodes = serving(node_count)
    found = have(nodes, service)
    names = lent(nodes, service)
    assert len(nodes) - len(names) >= min(found.needed, node_count)
    assert not (names and found.shortfall)
    left = [node for node in nodes if node.name not in names]
    gone = [make_node_view(name, role=NodeRole.DRAINING) for name in names]
    assert have([*left, *gone], service).shortfall == 0 or not names
