"""Promised deadlines in trees of tenants, played: what their rules may take is not promised.

Predictions are exact, nothing takes time, no node is lost, workers have one GPU each, and jobs save
when they are asked to.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from common.clock import SystemClock
from coordinator.engine.state.settings import TenantSettings
from coordinator.sim.inputs.inputs import parse_cluster
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import TraceJob, Workload
from tests.draws import pick, whole, yes_or_no

GPUS = 8
Limits = tuple[int, int | None, int | None]
"""Of a tenant: its guarantee, and what it may borrow and lends."""
Asked = tuple[str, int, int, int | None, int, bool]
"""Of a job: its tenant, when it comes, its work, its deadline, its workers, and whether it may have
fewer."""

NONE: Limits = (0, None, None)
NAMES = ("a", "a1", "a2", "b", "b1", "b1x", "b1y")
PARENTS = {"a1": "a", "a2": "a", "b1": "b", "b1x": "b1", "b1y": "b1"}


def missed(
    tree: dict[str, Limits], jobs: list[Asked], *, nodes: str = f"1x{GPUS}"
) -> tuple[int, int]:
    """Promises that were broken, and all; nothing where some job could never run.

    nodes: how many of how many GPUs.
    """
    tenants = tuple(
        TenantSettings(
            name=name,
            parent=PARENTS.get(name, ""),
            guarantee_gpus=guarantee,
            borrow_limit_gpus=borrows,
            lend_limit_gpus=lends,
        )
        for name, (guarantee, borrows, lends) in tree.items()
    )
    rows = tuple(
        TraceJob(
            job_id=f"j{number}",
            submit_s=float(at_s),
            duration_s=float(work_s),
            gpus=gpus,
            gpus_per_worker=1,
            min_workers=1 if is_elastic else gpus,
            max_workers=gpus,
            deadline_s=None if deadline_s is None else float(deadline_s),
            tenant=tenant,
        )
        for number, (tenant, at_s, work_s, deadline_s, gpus, is_elastic) in enumerate(
            sorted(jobs, key=lambda job: job[1])
        )
    )
    options = RunOptions(
        policy="qos-elasticflow:margin=1",
        has_delays=False,
        saves=Saves.ON_REQUEST,
        engine={"tenants": tenants},
        check=True,
    )
    workload = Workload(
        name="tree", jobs=rows, loads=(), nodes=parse_cluster(f"{nodes}+0x8"), length_s=200.0
    )
    result = play(workload, options, clock=SystemClock()).result
    return result.promises_missed or 0, result.promised or 0


def test_one_without_a_promise_leaves_the_room_of_its_tenant_to_one_with_it() -> None:
    """Though GPUs are free beside it: it is the borrow limit that both share."""
    tree: dict[str, Limits] = {"a": (0, 1, 0)}
    assert missed(tree, [("a", 0, 237, None, 4, True), ("a", 9, 6, 60, 4, True)]) == (0, 1)


def test_what_jobs_of_a_tenant_itself_are_due_is_not_promised_to_those_below_it() -> None:
    """When one of its own comes it gets the guarantee that nobody below it was given."""
    tree: dict[str, Limits] = {"a": (2, 0, None), "a1": (0, None, None), "b": (3, None, 0)}
    jobs: list[Asked] = [("a1", 0, 89, 148, 3, True), ("a", 9, 49, 74, 1, True)]
    assert missed(tree, jobs) == (0, 1)


def test_a_guarantee_that_is_taken_back_costs_no_promised_share() -> None:
    """Whoever has no promise gives it back, be that a whole job, where others have flexible workers
    that they need to be in time."""
    tree: dict[str, Limits] = {"b": (1, None, None)}
    asked: list[Asked] = [("a", 0, 230, 264, 2, True)] * 4
    without: list[Asked] = [("a", 0, 212, None, 2, True)] * 2
    jobs = [*asked, *without, ("b", 10, 200, None, 1, True)]
    broken, promised = missed(tree, jobs)
    assert (broken, promised) == (0, 3)


def test_what_a_refused_job_would_be_due_keeps_nobody_from_its_promised_share() -> None:
    """It ends in that very pass, so it takes nothing back from whoever starts in it."""
    tree: dict[str, Limits] = {
        "a": (0, 1, 0),
        "b": (1, 2, None),
        "b1": (1, None, None),
        "b1x": (1, 4, None),
    }
    jobs: list[Asked] = [
        ("b1", 0, 8, 14, 2, False),
        ("c", 0, 176, 199, 4, False),
        ("b", 0, 51, None, 4, True),
        ("", 0, 158, None, 3, True),
        ("b1x", 9, 231, 255, 3, True),
        ("b", 9, 19, 44, 3, True),
    ]
    assert missed(tree, jobs) == (0, 3)


def test_a_start_that_was_promised_needs_no_gpu_of_another_guarantee_where_others_idle() -> None:
    """The share of who runs is fewer workers by then: what it leaves is its tenant's all the same,
    so that it keeps them, and the start is on GPUs that nobody has."""
    tree: dict[str, Limits] = {"a": (4, None, None)}
    jobs: list[Asked] = [("a", 30, 210, 300, 2, True), ("c", 120, 60, 100, 2, False)]
    assert missed(tree, jobs, nodes=f"{GPUS}x1") == (0, 2)


def test_of_a_step_that_only_partly_is_of_a_guarantee_the_rest_is_there_for_a_promise() -> None:
    """By its share it goes from four workers to two, of a guarantee of three: one is enough, and
    all that nobody may take for another tenant."""
    tree: dict[str, Limits] = {"a": (3, None, None)}
    jobs: list[Asked] = [
        ("a", 0, 290, 420, 4, True),
        ("c", 40, 130, 200, 3, False),
        ("c", 80, 100, 200, 3, False),
        ("b", 90, 290, 300, 3, False),
    ]
    assert missed(tree, jobs, nodes="1x12") == (0, 4)


def test_what_an_inner_guarantee_covers_goes_to_nobody_beside_it_first() -> None:
    """A team's job starts on what is due to its division; not on what that one's own jobs have."""
    tree: dict[str, Limits] = {"a": (2, None, None), "a1": (0, None, None)}
    jobs: list[Asked] = [
        ("c", 0, 100, 200, 4, False),
        ("a", 0, 172, 280, 2, True),
        ("b", 0, 100, 200, 1, False),
        ("b", 52, 40, 49, 2, False),
        ("a1", 52, 10, None, 1, False),
    ]
    assert missed(tree, jobs) == (0, 4)


def test_what_a_division_is_due_beside_what_its_team_keeps_is_promised_to_nobody() -> None:
    """Its guarantee covers a job of its own as well, though all of it is a team's that lends none:
    of eight GPUs that job and the team leave four."""
    tree: dict[str, Limits] = {"b": (2, None, None), "b1": (2, None, 0)}
    own: Asked = ("b", 0, 203, 300, 2, False)
    assert missed(tree, [own, ("c", 0, 10, 100, 5, False)]) == (0, 1)
    assert missed(tree, [own, ("c", 0, 10, 100, 4, False)]) == (0, 2)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Limits]:
    """Three levels; the guarantees of children are parts of their parent's."""
    limit = st.none() | st.integers(0, 4)
    found: dict[str, Limits] = {}
    left = {"": GPUS}
    for name in NAMES:
        parent = PARENTS.get(name, "")
        guarantee = draw(st.integers(0, min(4, left[parent])))
        left[parent] -= guarantee
        left[name] = guarantee
        found[name] = (guarantee, draw(limit), draw(limit))
    return found


def most(tree: dict[str, Limits], name: str) -> float:
    """GPUs that a tenant surely may have once: by the borrow limits on its way up, less all that
    others below each tenant there, or anybody, keep for themselves."""
    found: float = GPUS - sum(map(kept, tree.values()))
    while name:
        guarantee, borrows, _ = tree.get(name, NONE)
        limit = GPUS if borrows is None else guarantee + borrows
        below = sum(kept(limits) for other, limits in tree.items() if name in above(other))
        found = min(found, limit - below)
        name = PARENTS.get(name, "")
    return found


def kept(limits: Limits) -> int:
    """GPUs of its guarantee that a tenant does not lend."""
    guarantee, _, lends = limits
    return 0 if lends is None else max(0, guarantee - lends)


def above(name: str) -> list[str]:
    """Its parent, the parent of that, and so on."""
    parent = PARENTS.get(name, "")
    return [parent, *above(parent)] if parent else []


ASKED = st.tuples(
    pick(*NAMES, "c"),
    st.integers(0, 200),
    st.integers(1, 300),
    st.none() | st.integers(1, 600),
    st.integers(1, 4),
    st.booleans(),
)


LAID_OUT = pick(f"1x{GPUS}", f"2x{GPUS // 2}", f"{GPUS}x1")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(trees(), st.lists(ASKED, min_size=2, max_size=14), LAID_OUT)
@example(
    {"a": (2, None, 0), "b": (4, 4, None), "b1": (4, 0, 1)},
    [
        ("b", 0, 182, None, 2, False),
        ("b", 0, 173, 260, 1, True),
        ("a", 166, 207, 416, 4, True),
    ],
    "1x8",
)
@example(
    {"a": (1, 0, None), "a2": (1, None, 0)},
    [("a", 0, 1, None, 1, False), ("b", 0, 9, 20, 1, True)],
    "1x8",
)
def test_no_promise_is_broken_in_any_tree(
    tree: dict[str, Limits], jobs: list[Asked], nodes: str
) -> None:
    """Whoever comes, whatever is lent and taken back, and at whatever level of the tree."""
    jobs = [job for job in jobs if (1 if job[5] else job[4]) <= most(tree, job[0])]
    assume(jobs)
    assert missed(tree, jobs, nodes=nodes)[0] == 0


@st.composite
def of_one_team(draw: st.DrawFn) -> dict[str, Limits]:
    """A division with all or nothing of its guarantee given to its one team, beside another one."""
    guarantee, keeps = draw(whole(2, 4)), draw(yes_or_no())
    team = guarantee if draw(yes_or_no()) else 0
    beside = draw(pick(0, 2, 3, 4))
    return {
        "a": (beside, None, None),
        "b": (guarantee, None, None),
        "b1": (team, None, 0 if keeps else None),
    }


@st.composite
def in_reach(draw: st.DrawFn, *, first: bool) -> Asked:
    """A job whose share is less than all its workers at times, as its deadline is not far; the
    first is elastic, of the division itself, and there when others come."""
    work_s, tenths = 10 * draw(whole(4, 30)), draw(whole(12, 20))
    if first:
        at_s, tenant, is_elastic = 30 * draw(whole(0, 1)), "b", True
    else:
        at_s, tenant = 30 * draw(whole(2, 5)), draw(pick("a", "b", "c"))
        is_elastic = draw(yes_or_no())
    return tenant, at_s, work_s, work_s * tenths // 10, draw(whole(2, 5)), is_elastic


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    of_one_team(),
    in_reach(first=True),
    st.lists(in_reach(first=False), min_size=1, max_size=3),
    LAID_OUT,
)
def test_no_promise_is_broken_where_shares_shrink_within_a_guarantee(
    tree: dict[str, Limits], first: Asked, others: list[Asked], nodes: str
) -> None:
    """Nor where a division runs jobs of its own on what it gave to a team."""
    jobs = [job for job in (first, *others) if (1 if job[5] else job[4]) <= most(tree, job[0])]
    assume(jobs)
    assert missed(tree, jobs, nodes=nodes)[0] == 0
