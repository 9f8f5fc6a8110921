"""Tenants: what is whose fair share, what is kept back and lent, how much a tenant may take, and
what settings are refused."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.errors import ConfigError
from common.model import GpuUuid, JobState
from coordinator.engine.state.settings import TenantSettings, check_tenants
from coordinator.policies.contract.decisions import Preempt
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.tenants.tenancy import Tenancy, fair_split, waiting_gpus, water_fill
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)
from tests.policies.machines import cell as machine_cell
from tests.policies.machines import decide, job, machine, started
from tests.tables import each_row

SUSPENDED = JobState.SUSPENDED


def job_of(tenant: str, gpus: int, *, name: str, node: str | None = None) -> JobView:
    """A job of one worker, waiting or on a node."""
    made = make_job_view(
        name,
        gpus_per_worker=gpus,
        state=JobState.PENDING if node is None else JobState.RUNNING,
        placed=() if node is None else (make_worker_view(name, 0, node, gpus=gpus),),
    )
    return replace(made, tenant=tenant)


def cell(
    *jobs: JobView, tenants: tuple[TenantView, ...], nodes: int = 2, gpus: int = 8
) -> ClusterSnapshot:
    """Training nodes with these jobs on them."""
    there = [
        make_node_view(
            f"n{n}",
            gpus=gpus,
            workers=[w for job in jobs for w in job.placed if w.node == f"n{n}"],
        )
        for n in range(nodes)
    ]
    return replace(make_snapshot(nodes=there, jobs=jobs), tenants=tenants)


def test_what_is_taken_in_one_tenancy_is_free_in_another_of_the_same_tenants() -> None:
    """They share the tree alone; and who names a tenant more has it in a tree of its own."""
    snapshot = cell(
        job_of("a", 4, name="j", node="n0"), tenants=(TenantView(name="a", guarantee_gpus=8),)
    )
    one, other = Tenancy(snapshot), Tenancy(snapshot)
    one.take(snapshot.jobs[0], 4)
    assert (one.used["a"], other.used["a"], Tenancy(snapshot).used["a"]) == (8, 4, 4)
    assert "c" in Tenancy(snapshot, ("c",)).views
    assert "c" not in Tenancy(snapshot).views
    more = replace(snapshot, tenants=(TenantView(name="a", guarantee_gpus=2),))
    assert Tenancy(more).views["a"].guarantee_gpus == 2


# --- fair shares --------------------------------------------------------------------------------


def test_guarantees_first_and_the_rest_by_weight() -> None:
    """KAI-Scheduler's example: 100 GPUs, deserved 10 / 10, asked 100 / 100, weights 3 : 1."""
    views = [
        TenantView(name="a", weight=3.0, guarantee_gpus=10),
        TenantView(name="b", weight=1.0, guarantee_gpus=10),
    ]
    assert fair_split(100.0, views, {"a": 100, "b": 100}) == {"a": 70.0, "b": 30.0}


def test_what_one_does_not_ask_for_goes_to_the_others_by_weight() -> None:
    """The part of whoever is content is split again, not lost."""
    views = [
        TenantView(name=name, weight=weight) for name, weight in (("a", 2), ("b", 1), ("c", 1))
    ]
    assert fair_split(80.0, views, {"a": 10, "b": 100, "c": 30}) == {"a": 10, "b": 40.0, "c": 30}


def test_what_a_tenant_does_not_lend_is_nobody_s() -> None:
    """Ten idle GPUs of a guarantee, of which it lends four: the other gets its own and four."""
    views = [
        TenantView(name="a", guarantee_gpus=10, lend_limit_gpus=4),
        TenantView(name="b", guarantee_gpus=10),
    ]
    assert fair_split(20.0, views, {"a": 0, "b": 100}) == {"a": 0.0, "b": 14.0}


def test_shares_go_down_the_tree() -> None:
    """Two teams in one division split its share, and nobody else's idle GPUs pass them by."""
    tenants = (
        TenantView(name="division", guarantee_gpus=12),
        TenantView(name="t1", parent="division", guarantee_gpus=4, weight=1.0),
        TenantView(name="t2", parent="division", guarantee_gpus=4, weight=3.0),
        TenantView(name="other", guarantee_gpus=4),
    )
    snapshot = cell(
        *(job_of(name, 100, name=name) for name in ("t1", "t2")),
        job_of("other", 2, name="o"),
        tenants=tenants,
    )
    tenancy = Tenancy(snapshot)
    shares = tenancy.fair_shares(waiting_gpus(snapshot, tenancy))
    assert shares == {"division": 14.0, "other": 2.0, "t1": 5.5, "t2": 8.5}


parts = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.integers(1, 9).map(float), st.integers(0, 50).map(float)),
    min_size=1,
)


@given(whole=st.integers(0, 120), parts=parts)
def test_water_fills_up(whole: int, parts: dict[str, tuple[float, float]]) -> None:
    """Shares sum to the whole or to all caps; nobody below its cap has less per weight (Pareto)."""
    got = water_fill(float(whole), parts)
    assert sum(got.values()) == pytest.approx(min(whole, sum(cap for _, cap in parts.values())))
    levels = {name: got[name] / weight for name, (weight, _) in parts.items()}
    for name, (_, cap) in parts.items():
        assert got[name] <= cap
        if got[name] < cap - 1e-9:
            assert levels[name] == pytest.approx(max(levels.values()))


@given(whole=st.integers(0, 120), parts=parts, more=st.integers(1, 9))
def test_more_weight_is_never_less(
    whole: int, parts: dict[str, tuple[float, float]], more: int
) -> None:
    """Monotone in weight: the heavier gets at least as much, each other at most as much."""
    name = min(parts)
    heavier = parts | {name: (parts[name][0] + more, parts[name][1])}
    before, after = water_fill(float(whole), parts), water_fill(float(whole), heavier)
    assert after[name] >= before[name] - 1e-9
    assert all(after[other] <= before[other] + 1e-9 for other in parts if other != name)


views = st.lists(
    st.builds(
        TenantView,
        name=st.sampled_from("abcdef"),
        weight=st.integers(1, 9).map(float),
        guarantee_gpus=st.integers(0, 20),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda view: view.name,
)


@given(whole=st.integers(0, 150), views=views, data=st.data())
def test_a_guarantee_is_part_of_the_share(
    whole: int, views: list[TenantView], data: st.DataObject
) -> None:
    """Where guarantees fit, each gets what it asks of its own, and idle GPUs are nobody's only if
    nobody asks."""
    assume(sum(view.guarantee_gpus for view in views) <= whole)
    asked = {view.name: float(data.draw(st.integers(0, 60))) for view in views}
    shares = fair_split(float(whole), views, asked)
    for view in views:
        assert shares[view.name] >= min(asked[view.name], view.guarantee_gpus) - 1e-9
        assert shares[view.name] <= asked[view.name] + 1e-9
    assert sum(shares.values()) == pytest.approx(min(whole, sum(asked.values())))


# --- room ---------------------------------------------------------------------------------------


def test_a_tenant_may_use_its_guarantee_and_what_it_may_borrow() -> None:
    """Eight guaranteed, four borrowed at most, eight used: there is room for four."""
    job = job_of("a", 4, name="more")
    snapshot = cell(
        job_of("a", 8, name="r", node="n0"),
        job,
        tenants=(TenantView(name="a", guarantee_gpus=8, borrow_limit_gpus=4),),
    )
    tenancy = Tenancy(snapshot)
    assert tenancy.room(job) == 4
    assert not tenancy.why_not(job, 4)
    assert "borrow limit of 4" in tenancy.why_not(job, 5)


def test_what_another_keeps_cannot_be_borrowed() -> None:
    """Of sixteen GPUs another keeps six of its idle eight: ten are there to take."""
    job = job_of("a", 8, name="j")
    snapshot = cell(job, tenants=(TenantView(name="b", guarantee_gpus=8, lend_limit_gpus=2),))
    tenancy = Tenancy(snapshot)
    assert tenancy.room(job) == 10
    assert "b lends no more of its own" in tenancy.why_not(job, 12)


def test_a_parent_s_limit_holds_for_its_children() -> None:
    """A team has room of its own, and its division none."""
    job = job_of("team", 4, name="j")
    snapshot = cell(
        job_of("division", 8, name="r", node="n0"),
        job,
        tenants=(
            TenantView(name="division", guarantee_gpus=8, borrow_limit_gpus=2),
            TenantView(name="team", parent="division", guarantee_gpus=2),
        ),
    )
    assert Tenancy(snapshot).room(job) == 2
    assert "tenant division" in Tenancy(snapshot).why_not(job, 4)


def nested(*jobs: JobView, lends: int | None = 0, kept: int | None = None) -> ClusterSnapshot:
    """64 GPUs: a division of 32 whose one team has all of these, and others."""
    tenants = (
        TenantView(name="research", guarantee_gpus=32, lend_limit_gpus=kept),
        TenantView(name="vision", parent="research", guarantee_gpus=32, lend_limit_gpus=lends),
        TenantView(name="ops"),
    )
    return cell(*jobs, tenants=tenants, nodes=8)


@each_row(
    ("lends", "kept", "left"),
    [(0, None, 32), (8, None, 40), (8, 0, 32), (0, 16, 32), (None, 4, 36)],
)
def test_what_a_team_does_not_lend_outsiders_of_its_division_do_not_get_either(
    lends: int | None, kept: int | None, left: int
) -> None:
    """A division keeps the larger of what it does not lend itself and of what its teams do not."""
    job, wanted = job_of("ops", 8, name="j"), job_of("ops", 64, name="w")
    tenancy = Tenancy(nested(job, lends=lends, kept=kept))
    assert tenancy.room(job) == left
    assert "lend" in tenancy.why_not(job, left + 1) and not tenancy.why_not(job, left)
    assert tenancy.fair_shares(waiting_gpus(nested(wanted), tenancy))["ops"] == left


def test_what_a_team_does_not_lend_its_siblings_do_not_get_of_their_division_s_share() -> None:
    """Nor is it taken twice from what they may borrow: half of the 32 that nobody keeps."""
    jobs = [job_of(name, 40, name=name) for name in ("nlp", "ops")]
    snapshot = nested(*jobs)
    snapshot = replace(
        snapshot, tenants=(*snapshot.tenants, TenantView(name="nlp", parent="research"))
    )
    tenancy = Tenancy(snapshot)
    shares = tenancy.fair_shares(waiting_gpus(snapshot, tenancy))
    assert shares == {"research": 16.0, "vision": 0.0, "nlp": 16.0, "ops": 32.0 - 16.0}
    assert tenancy.room(jobs[0]) == 32


def test_its_own_tenants_are_not_named_as_those_that_do_not_lend() -> None:
    """Who exceeds what others leave is told of others."""
    job = job_of("vision", 8, name="j")
    snapshot = nested(job)
    keeps = TenantView(name="keeper", guarantee_gpus=8, lend_limit_gpus=0)
    why = Tenancy(replace(snapshot, tenants=(*snapshot.tenants, keeps))).why_not(job, 60)
    assert why.endswith("it may take 56: keeper lends no more of its own")


# --- shared GPUs --------------------------------------------------------------------------------


def sits(name: str, tenant: str, *uuids: int, state: JobState = JobState.RUNNING) -> JobView:
    """A job on named GPUs of the first node."""
    made = job_of(tenant, len(uuids), name=name, node="n0")
    named = tuple(GpuUuid(f"GPU-{uuid}") for uuid in uuids)
    return replace(made, state=state, placed=(replace(made.placed[0], gpu_uuids=named),))


@each_row("computes", ["a", "b"])
@each_row("is_turned", [False, True])
def test_tenants_that_take_turns_on_gpus_have_equal_parts(computes: str, is_turned: bool) -> None:
    """Whoever computes now, and whoever comes first by name; the sum is the GPUs in use."""
    jobs = [
        sits(name, name, *range(8), state=JobState.RUNNING if name == computes else SUSPENDED)
        for name in "ab"
    ]
    used = Tenancy(cell(*(reversed(jobs) if is_turned else jobs), tenants=())).used
    assert (used["a"], used["b"], used[""]) == (4, 4, 8)


def test_a_tenant_has_a_part_for_each_of_its_jobs() -> None:
    """Of one GPU with two jobs of one and one of another; of a division all of its teams' parts."""
    jobs = [sits("x", "a", 0), sits("y", "b", 0), sits("z", "a", 0), sits("w", "a", 1)]
    tenants = (TenantView(name="p"), *(TenantView(name=name, parent="p") for name in "ab"))
    used = Tenancy(cell(*jobs, tenants=tenants)).used
    assert (used["a"], used["b"]) == (Fraction(5, 3), Fraction(1, 3))
    assert used["p"] == used[""] == 2 and isinstance(used["p"], int)


@given(jobs=st.lists(st.tuples(st.sampled_from("abc"), st.sets(st.integers(0, 7), min_size=1))))
def test_parts_of_shared_gpus_are_the_gpus_in_use(jobs: list[tuple[str, set[int]]]) -> None:
    """Exactly, whoever shares with whom; and a job of those of one tenant adds none."""
    there = [sits(f"j{n}", tenant, *uuids) for n, (tenant, uuids) in enumerate(jobs)]
    used = Tenancy(cell(*there, tenants=())).used
    everyone = set[int]().union(*(uuids for _, uuids in jobs))
    assert sum(used.get(name, 0) for name in "abc") == used[""] == len(everyone)
    for name in "abc":
        own = set[int]().union(*(uuids for tenant, uuids in jobs if tenant == name))
        assert used.get(name, 0) <= len(own)


# --- settings -----------------------------------------------------------------------------------


@each_row(
    ("tenants", "says"),
    [
        ([{"name": "a"}, {"name": "a"}], "a is listed twice"),
        ([{"name": "a", "parent": "x"}], "a: parent 'x' is not one of a"),
        (
            [{"name": "a", "parent": "b"}, {"name": "b", "parent": "a"}],
            "a in b in a is a circle",
        ),
        (
            [
                {"name": "p", "guarantee_gpus": 4},
                {"name": "c", "parent": "p", "guarantee_gpus": 3},
                {"name": "d", "parent": "p", "guarantee_gpus": 2},
            ],
            "c, d are guaranteed 5 GPUs, more than the 4 of their parent p",
        ),
    ],
)
def test_what_is_no_tree_of_tenants_is_refused(tenants: list[dict[str, object]], says: str) -> None:
    """Each with an error that names the tenant."""
    made = tuple(TenantSettings(**each) for each in tenants)  # type: ignore[arg-type]  # told below
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_tenants(made)


@settings(max_examples=50)
@given(guarantees=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_tree_whose_guarantees_fit_is_taken(guarantees: list[int]) -> None:
    """Children may be promised all of their parent's, and no more."""
    children = tuple(
        TenantSettings(name=f"c{n}", parent="p", guarantee_gpus=gpus)
        for n, gpus in enumerate(guarantees)
    )
    check_tenants((TenantSettings(name="p", guarantee_gpus=sum(guarantees)), *children))


def promised(snapshot: ClusterSnapshot, *tenants: TenantView) -> ClusterSnapshot:
    """The same cell with these promises."""
    return replace(snapshot, tenants=tuple(sorted(tenants, key=lambda each: each.name)))


def one_node(*jobs: JobView, gpus: int = 8) -> ClusterSnapshot:
    """A node with all of these."""
    return machine_cell(machine("n0", gpus=gpus, jobs=jobs), jobs=jobs)


# --- what a tenant may take ---------------------------------------------------------------------


@each_row(("used", "room"), [(0, 6), (3, 6), (4, 6), (5, 5), (6, 4)])
def test_a_tenant_keeps_of_its_idle_guarantee_what_it_does_not_lend(used: int, room: int) -> None:
    """Of six promised two are lent: with `used` in use, 6 - used - 2 of the idle ones are kept."""
    mine = job("b", "B")
    jobs = (mine, *([job("a", "A", gpus=used, nodes=("n0",))] if used else []))
    snapshot = promised(
        one_node(*jobs, gpus=10),
        TenantView(name="A", guarantee_gpus=6, lend_limit_gpus=2),
        TenantView(name="B"),
    )
    assert Tenancy(snapshot).room(mine) == room


def test_a_guarantee_is_room_whatever_others_keep() -> None:
    """A keeps six of four GPUs to itself; B may still take the two that it is promised."""
    mine = job("b", "B")
    snapshot = promised(
        one_node(mine, gpus=4),
        TenantView(name="A", guarantee_gpus=6, lend_limit_gpus=0),
        TenantView(name="B", guarantee_gpus=2),
    )
    assert Tenancy(snapshot).room(mine) == 2


def test_what_it_may_not_borrow_is_nobody_s_due() -> None:
    """A asks for ten and may have three; what is over is B's."""
    jobs = (job("a", "A", gpus=10), job("b", "B", gpus=10))
    snapshot = promised(
        one_node(*jobs, gpus=10),
        TenantView(name="A", guarantee_gpus=2, borrow_limit_gpus=1, weight=9.0),
        TenantView(name="B"),
    )
    tenancy = Tenancy(snapshot)
    assert tenancy.fair_shares(waiting_gpus(snapshot, tenancy)) == {"A": 3.0, "B": 7.0}


# --- what is given back -------------------------------------------------------------------------


def test_the_tenant_with_the_least_of_its_guarantee_is_served_first() -> None:
    """C can give two GPUs back: to B, that has none of its four, though A's job came first."""
    jobs = (
        *(job(f"c{n}", "C", gpus=2, nodes=("n0",)) for n in range(4)),
        job("a0", "A", gpus=2, nodes=("n0",)),
        job("a1", "A", gpus=2, submitted_at_s=1.0),
        job("b0", "B", gpus=2, submitted_at_s=2.0),
    )
    snapshot = promised(
        one_node(*jobs, gpus=10),
        TenantView(name="A", guarantee_gpus=4),
        TenantView(name="B", guarantee_gpus=4),
        TenantView(name="C", guarantee_gpus=6),
    )
    assert started(decide("fifo", snapshot)) == ["b0"]


def test_the_borrower_s_job_that_loses_least_is_stopped() -> None:
    """By the work that a stop throws away, not by names."""
    lost = {"b0": 900.0, "b1": 50.0, "b2": 400.0}
    jobs = (
        *(
            job_with(job(name, "B", gpus=2, nodes=("n0",)), unsaved_gpu_s=gpu_s)
            for name, gpu_s in lost.items()
        ),
        job("a", "A", gpus=2),
    )
    snapshot = promised(one_node(*jobs, gpus=6), TenantView(name="A", guarantee_gpus=2))
    found = decide("fifo", snapshot)
    assert [each.job_id for each in found.decisions if isinstance(each, Preempt)] == ["b1"]
    assert started(found) == ["a"]
