"""Capacities of YARN's queues: guarantees first, then by weight, down the tree of tenants."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.registry import POLICIES
from coordinator.policies.schedulers.yarn import capacities
from coordinator.policies.tenants.tenancy import Tenancy, fair_split
from coordinator.policies.tenants.tree import WHOLE
from tests.draws import pick, whole
from tests.policies.tenant_books import cell, names, waits
from tests.tables import each_row

GPUS = 64


@st.composite
def trees(draw: st.DrawFn) -> tuple[TenantView, ...]:
    """Organisations and their teams; guarantees of siblings fit in what their parent is promised,
    and those of all in the cell."""
    found: list[TenantView] = []
    left = GPUS - 1
    for org in range(draw(whole(1, 3))):
        own = draw(whole(0, left))
        left -= own
        found.append(TenantView(name=f"o{org}", guarantee_gpus=own, weight=draw(weights())))
        for team in range(draw(whole(0, 3))):
            part = draw(whole(0, own))
            own -= part
            made = TenantView(name=f"o{org}t{team}", parent=f"o{org}", guarantee_gpus=part)
            found.append(replace(made, weight=draw(weights())))
    return tuple(found)


def weights() -> st.SearchStrategy[float]:
    """Of very different tenants, and of alike ones."""
    return pick(0.5, 1.0, 1.0, 3.0, 10.0)


def tenancy(tenants: tuple[TenantView, ...]) -> Tenancy:
    """On an idle cell."""
    return Tenancy(cell(tenants=tenants, nodes=GPUS // 8))


@settings(deadline=None)
@given(tenants=trees())
def test_a_capacity_is_what_all_are_due_where_everybody_asks_for_everything(
    tenants: tuple[TenantView, ...],
) -> None:
    """So a queue without a guarantee is due its weight's part of what those of its siblings leave
    of their parent's capacity, or of one GPU where they leave less."""
    made = tenancy(tenants)
    found = capacities(made)
    assert found[WHOLE] == GPUS
    for parent, children in made.children.items():
        views = [made.views[name] for name in children]
        promised = sum(view.guarantee_gpus for view in views)
        there = max(found[parent], promised + 1.0)
        due = fair_split(there, views, dict.fromkeys(children, 100.0 * GPUS))
        assert {name: found[name] for name in children} == pytest.approx(due)


@settings(deadline=None)
@given(tenants=trees(), data=st.data())
def test_a_guarantee_never_lowers_a_capacity(
    tenants: tuple[TenantView, ...], data: st.DataObject
) -> None:
    """Nor does it raise that of any sibling: who is promised something is not the worse for it."""
    tops = [view for view in tenants if not view.parent]
    one = data.draw(pick(*tops))
    more = data.draw(whole(0, GPUS - 1 - sum(view.guarantee_gpus for view in tops)))
    after = replace(one, guarantee_gpus=one.guarantee_gpus + more)
    changed = tuple(after if view is one else view for view in tenants)
    old, new = capacities(tenancy(tenants)), capacities(tenancy(changed))
    assert new[one.name] >= old[one.name] - 1e-9
    assert all(new[view.name] <= old[view.name] + 1e-9 for view in tops if view is not one)


@each_row(
    ("guarantee_gpus", "weight", "got"),
    [(0, 1.0, 32), (16, 1.0, 40), (16, 3.0, 52), (48, 1.0, 56), (63, 1.0, 63)],
)
def test_what_a_guarantee_leaves_is_served_by_weight(
    guarantee_gpus: int, weight: float, got: int
) -> None:
    """Of 64 GPUs two queues with 64 jobs of one GPU each; the second one has no guarantee, and its
    first job came first."""
    tenants = (
        TenantView(name="a", guarantee_gpus=guarantee_gpus, weight=weight),
        TenantView(name="b"),
    )
    line = [waits(f"b{n:02d}", "b", 1, submitted_at_s=-50.0) for n in range(GPUS)]
    line += [waits(f"a{n:02d}", "a", 1) for n in range(GPUS)]
    snapshot = cell(*line, tenants=tenants, nodes=GPUS // 8)
    started = names(POLICIES["yarn-capacity"].allocate(snapshot, b"").decisions, Start)
    assert Counter(name[0] for name in started) == {"a": got, "b": GPUS - got}


def test_a_queue_to_which_guarantees_leave_nothing_is_served_all_the_same() -> None:
    """All GPUs are promised to two, one of which is idle: the other one borrows most of its part,
    and the third some."""
    tenants = (
        TenantView(name="a", guarantee_gpus=32),
        TenantView(name="b", guarantee_gpus=32),
        TenantView(name="c"),
    )
    line = [waits(f"{name}{n:02d}", name, 1) for name in "ac" for n in range(GPUS)]
    snapshot = cell(*line, tenants=tenants, nodes=GPUS // 8)
    started = names(POLICIES["yarn-capacity"].allocate(snapshot, b"").decisions, Start)
    assert Counter(name[0] for name in started) == {"a": 63, "c": 1}
