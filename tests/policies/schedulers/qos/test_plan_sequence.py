"""Promises planned row after row: as if each row was planned anew, at less cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from msgspec import structs

from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.schedulers.qos.admission import Book
from coordinator.policies.schedulers.qos.minimum_shares import Claim, fill
from coordinator.policies.schedulers.qos.plan_sequence import Row
from coordinator.policies.schedulers.qos.quotas import Quotas, Room, Rooms
from coordinator.policies.schedulers.qos.timeline import Plan
from tests.policies.counted_calls import calls
from tests.tables import each_row

GPUS = 8


TENANTS = {
    "a": TenantView(name="a", guarantee_gpus=3),
    "b": TenantView(name="b", guarantee_gpus=1, borrow_limit_gpus=4),
}


def claim(number: int, work_s: float, deadline_s: float, tenant: str = "") -> Claim:
    """Of a job of one, two or four workers."""
    return Claim(
        job_id=f"c{number:04}",
        sizes=(1, 2, 4),
        rates=(1.0, 1.8, 3.0),
        gpus_per_worker=1,
        work_s=work_s,
        deadline_s=deadline_s,
        tenant=tenant,
    )


def anew(claims: Sequence[Claim], quotas: Quotas) -> dict[str, Plan]:
    """Plans of a row of which nothing was planned before."""
    room, plans = Room(0.0, GPUS, Rooms(quotas)), dict[str, Plan]()
    for each in claims:
        plan = fill(room.line(each), each, 0.0)
        if plan is not None:
            room.take(plan, each)
            plans[each.job_id] = plan
    return plans


@each_row("is_shared", [False, True])
@each_row("seed", range(3))
def test_a_row_is_planned_as_if_none_had_been_before(seed: int, is_shared: bool) -> None:
    """Whatever claims it has in common with the one before: all, none, or those at its begin."""
    chance = random.Random(seed)
    names = ("a", "b", "") if is_shared else ("",)
    quotas = Quotas(capacity=GPUS, views=TENANTS) if is_shared else Quotas()
    row = Row(Room(0.0, GPUS, Rooms(quotas)), 0.0)
    line = [
        claim(at, chance.uniform(5.0, 40.0), 10.0 + 4.0 * at, chance.choice(names))
        for at in range(90)
    ]
    for _ in range(30):
        shown = [each for each in line if chance.random() < chance.choice((0.9, 1.0, 1.0))]
        assert row.plans(shown, is_all=False) == anew(shown, quotas)
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(line))
            line[at] = structs.replace(line[at], work_s=chance.uniform(5.0, 40.0))
        if chance.random() < 0.3:
            line = line[: chance.randint(1, len(line))] + line[:2]


def test_where_some_plans_are_no_use_none_is_made_behind_the_first_that_fails() -> None:
    """What comes behind it is planned when it is asked for again, for its own sake."""
    row = Row(Room(0.0, GPUS, Rooms(Quotas())), 0.0)
    line = [claim(0, 5.0, 10.0), claim(1, 99.0, 11.0), claim(2, 5.0, 30.0)]
    assert list(row.plans(line, is_all=True)) == ["c0000"]
    assert list(row.plans(line, is_all=True)) == ["c0000"]
    assert list(row.plans(line, is_all=False)) == ["c0000", "c0002"]
    assert list(row.plans(line[:1], is_all=True)) == ["c0000"]
    assert list(row.plans([line[0], line[2]], is_all=True)) == ["c0000", "c0002"]


@each_row("stops", [False, True])
@each_row("seed", range(3))
def test_a_row_beside_gangs_that_stay_is_planned_as_if_none_had_been_before(
    seed: int, stops: bool
) -> None:
    """Whoever has a gang until its turn comes, and whichever old plans are kept at first."""
    chance = random.Random(seed)
    quotas = Quotas(capacity=GPUS, views=TENANTS)
    line = [
        claim(at, chance.uniform(10.0, 60.0), 20.0 + 4.0 * at, chance.choice(("a", "b", "")))
        for at in range(80)
    ]
    running = range(0, 8, 4)
    for at in running:
        line[at] = structs.replace(line[at], runs=True, pauses=False, present=1, redo_s=3.0)
    holding = [] if stops else [line[at] for at in running]

    def fresh() -> Row:
        return Row(Room(0.0, GPUS, Rooms(quotas)), 0.0, holding, stops=stops)

    hurried = [structs.replace(each, deadline_s=0.8 * each.deadline_s) for each in line]
    row, olds = fresh(), fresh().plans(hurried, is_all=False)
    assert 20 < len(olds) < 80
    for _ in range(40):
        names = chance.choice((sorted(olds), chance.sample(sorted(olds), len(olds))))
        kept = {name: olds[name] for name in names[: chance.choice((0, 1, 9))]}
        shown = [each for each in line if each.runs or chance.random() < chance.choice((0.9, 1.0))]
        is_all = chance.random() < 0.3
        assert row.plans(shown, kept, is_all=is_all) == fresh().plans(shown, kept, is_all=is_all)
        at = chance.randrange(8, len(line))
        line[at] = structs.replace(line[at], work_s=chance.uniform(10.0, 60.0))


def booked(count: int) -> Book:
    """So many promises, one after another by deadline."""
    book = Book(0.0, GPUS, {})
    book.promise([claim(at, 30.0 + at % 7, 45.0 + 5.0 * at) for at in range(count)])
    assert len(book.claims) == count
    return book


def test_one_that_keeps_its_gang_does_so_whatever_row_was_planned_before() -> None:
    """Another one waits until it is done, though a row without it has begun with that one."""
    book = Book(0.0, GPUS, {})
    book.promise([structs.replace(claim(0, 10.0, 25.0), sizes=(1,), rates=(1.0,))])
    assert book.with_more([claim(1, 5.0, 40.0)]) is not None
    runs = structs.replace(
        claim(2, 10.0, 30.0), sizes=(8,), rates=(1.0,), runs=True, pauses=False, present=8
    )
    plans = book.with_more([runs])
    assert plans is not None
    assert {name: plan[0].start_s for name, plan in plans.items()} == {"c0000": 10.0, "c0002": 0.0}


def admit_all(book: Book, claims: Sequence[Claim]) -> None:
    """One by one."""
    for each in claims:
        book.admit([each])


def test_a_refusal_costs_no_pass_for_each_date_that_is_tried() -> None:
    """The earliest date of one that is refused costs at most twenty times the plans of all others,
    though more than thirty dates are tried, most with several ways to plan."""
    claims = [claim(at, 30.0 + at % 7, 45.0 + 5.0 * at) for at in range(120)]
    refused = structs.replace(claim(999, 400.0, 60.0), sizes=(8,), rates=(5.0,))
    plain = calls(lambda: Book(0.0, GPUS, {}).promise(claims))
    book = booked(120)
    found: list[float] = []
    cost = calls(lambda: found.append(book.earliest_s(refused)))
    assert found[0] > 60.0
    assert cost <= 20 * plain


def test_a_refusal_beside_one_that_never_saves_costs_no_pass_for_each_date() -> None:
    """Its earliest date costs at most twelve times the plans of all, though it keeps its gang."""
    runs = structs.replace(
        claim(500, 90.0, 200.0), sizes=(1,), rates=(1.0,), runs=True, pauses=False, present=1
    )
    claims = [runs, *(claim(at, 20.0 + at % 7, 45.0 + 5.0 * at) for at in range(120))]
    refused = structs.replace(claim(999, 400.0, 60.0), sizes=(8,), rates=(5.0,))
    book = Book(0.0, GPUS, {})
    plain = calls(lambda: book.promise(claims))
    assert len(book.claims) == len(claims)
    found: list[float] = []
    cost = calls(lambda: found.append(book.earliest_s(refused)))
    assert found[0] > 60.0
    assert cost <= 12 * plain


def test_newcomers_in_order_of_deadline_cost_no_pass_for_each() -> None:
    """One of 120 that are admitted one by one costs less than three times what one of 30 does."""
    per_job: list[float] = []
    for count in (30, 120):
        claims = [claim(at, 30.0 + at % 7, 45.0 + 5.0 * at) for at in range(count)]
        book = Book(0.0, GPUS, {})
        book.promise([])
        cost = calls(partial(admit_all, book, claims))
        assert len(book.claims) == count
        per_job.append(cost / count)
    assert per_job[1] <= 3 * per_job[0]
