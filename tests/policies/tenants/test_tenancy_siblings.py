"""What teams of one division borrow of each other is no matter for its siblings' guarantees."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.registry import POLICIES
from coordinator.policies.tenants.tenancy import Claim, Tenancy, left_to
from coordinator.policies.tenants.tree import WHOLE
from tests.draws import pick
from tests.policies.tenant_books import cell, names, runs, waits
from tests.tables import each_row

ORGANISATION = (
    TenantView(name="p", guarantee_gpus=16, borrow_limit_gpus=0),
    TenantView(name="a", parent="p", guarantee_gpus=8),
    TenantView(name="b", parent="p", guarantee_gpus=8),
    TenantView(name="b1", parent="b", guarantee_gpus=4, lend_limit_gpus=0),
    TenantView(name="b2", parent="b", guarantee_gpus=4),
)


@each_row("policy", sorted(POLICIES))
def test_what_a_team_keeps_from_its_sibling_division_counts_up_to_that_one_s_guarantee(
    policy: str,
) -> None:
    """Division `b` has all of its eight, of which `b2` borrows four, and `b1` keeps four more: the
    eight of `a` are covered by its guarantee, and are free. Its job starts under every policy, in
    the next round at the latest."""
    has, asks = runs("has", "b2", "n0", 8), waits("asks", "a", 8)
    tenants = tuple(sorted(ORGANISATION, key=lambda view: view.name))
    for lends in (0, 2, None):
        limits = [
            replace(view, lend_limit_gpus=lends) if view.name == "b1" else view for view in tenants
        ]
        snapshot = cell(has, asks, tenants=tuple(limits), nodes=3)
        assert Tenancy(snapshot).room(asks) == 8
        found = POLICIES[policy].allocate(snapshot, b"")
        if not found.decisions and found.wake_at_s is not None:
            later = replace(snapshot, now_s=found.wake_at_s)
            found = POLICIES[policy].allocate(later, found.memory)
        assert names(found.decisions, Start) == {"asks"}


def test_what_a_sibling_uses_beyond_its_guarantee_counts_in_full() -> None:
    """Within a guarantee as well: it has to be given back first. What is kept beside it counts only
    up to that guarantee."""
    over = Claim(guarantee_gpus=4, used=6.0, kept=3.0)
    within = Claim(guarantee_gpus=4, used=3.0, kept=3.0)
    assert left_to(8, 16.0, [over]) == 8
    assert left_to(8, 12.0, [over]) == 6
    assert left_to(8, 12.0, [within]) == 8
    assert left_to(8, 11.0, [within]) == 7


@st.composite
def trees(draw: st.DrawFn) -> tuple[TenantView, ...]:
    """Three levels with limits at each; guarantees within the ones above, and all within 64."""
    limit = pick(None, 0, 0, 4)

    def views(name: str, parent: str, depth: int) -> list[TenantView]:
        below = [views(f"{name}{n}", name, depth - 1) for n in (1, 2)] if depth else []
        more = draw(pick(0, 0, 4) if depth else pick(0, 4, 4, 8))
        has = more + sum(part[0].guarantee_gpus for part in below)
        own = TenantView(
            name=name,
            parent=parent,
            guarantee_gpus=has,
            borrow_limit_gpus=draw(limit),
            lend_limit_gpus=draw(limit),
        )
        return [own, *(view for part in below for view in part)]

    found = [*views("a", WHOLE, 2), *views("b", WHOLE, 2)]
    assume(sum(view.guarantee_gpus for view in found if not view.parent) <= 64)
    return tuple(found)


@settings(max_examples=200)
@given(
    tenants=trees(),
    takes=st.lists(
        st.tuples(pick("a11", "a12", "a21", "a22", "b11", "b12", "nobody"), pick(2, 4, 6, 8)),
        max_size=5,
    ),
    is_asked=st.booleans(),
)
def test_a_guarantee_is_room_where_nobody_beside_it_has_more_than_its_own(
    tenants: tuple[TenantView, ...], takes: list[tuple[str, int]], is_asked: bool
) -> None:
    """Whatever teams below a sibling, and other roots, hold beyond theirs, with limits at every
    level: what is left of a team's guarantee it may take. Nobody takes more than it may, and what
    one was let take is within its limits and those above it."""
    tenancy = Tenancy(cell(waits("j", "nobody", 1), tenants=tenants, nodes=8))
    for name, asked in takes:
        job = waits("j", name, 1)
        gpus = min(asked, 64 - tenancy.used[WHOLE])
        if is_asked:
            gpus = max(0, int(min(gpus, tenancy.room(job))))
        tenancy.take(job, gpus)
        if is_asked:
            assert all(tenancy.used[n] <= tenancy.limit_gpus(n) for n in tenancy.path(job))
    for view in tenants:
        if tenancy.children[view.name]:
            continue
        up = tenancy.path_of(view.name)
        beside = [
            other
            for own in up[:-1]
            for other in tenancy.children[tenancy.views[own].parent]
            if other != own
        ]
        left = view.guarantee_gpus - tenancy.used[view.name]
        if left >= 0 and all(
            tenancy.used[other] <= tenancy.views[other].guarantee_gpus for other in beside
        ):
            assert tenancy.room(waits("j", view.name, 1)) >= left
            assert not tenancy.why_not(waits("j", view.name, 1), int(left))
