"""A book of promises after all that can be asked of it: plans, and those that go on beside them."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from coordinator.policies.schedulers.qos.admission import Book
from coordinator.policies.schedulers.qos.minimum_shares import Claim, is_whole, now_of
from tests.draws import pick, whole, yes_or_no

GPUS = 4


def claim(name: str, work_s: float, deadline_s: float, size: int = 1, **more: object) -> Claim:
    """Of a job of one size that is as fast as it has workers."""
    plain = Claim(
        job_id=name,
        sizes=(size,),
        rates=(float(size),),
        gpus_per_worker=1,
        work_s=work_s,
        deadline_s=deadline_s,
    )
    return structs.replace(plain, **more)


def test_one_that_goes_on_is_stopped_where_a_newcomer_is_promised_its_gpus() -> None:
    """Plans by which it stops are no plans beside it, though they came to be while it was looked
    for some."""
    never_saves = claim(
        "soft", 92.0, inf, 2, runs=True, present=2, pauses=False, keeps=True, redo_s=292.0
    )
    book = Book(0.0, 2, {})
    book.promise([claim("old", 470.0, 314.0, 2)], [never_saves])
    assert book.spared == [never_saves]
    assert book.admit([claim("new", 215.0, 474.0)])
    assert book.spared == []
    assert sorted(book.plans) == ["new", "old"]
    assert all(gpus >= 0 for _, gpus in book.room().pool.steps())


@st.composite
def claims(draw: st.DrawFn, name: str, *, free: int = 0, is_soft: bool = False) -> Claim:
    """Any job; one that runs has no more than so many workers."""
    sizes = draw(pick((1,), (2,), (1, 2), (1, 2, 4), (3,), (2, 4)))
    runs = sizes[0] <= free and (is_soft or draw(yes_or_no()))
    pauses = not is_soft and draw(yes_or_no())
    has_costs = draw(yes_or_no())
    return Claim(
        job_id=name,
        sizes=sizes,
        rates=tuple(size * (1 - 0.03 * size) for size in sizes),
        gpus_per_worker=1,
        work_s=float(draw(whole(5, 300))),
        deadline_s=inf if is_soft and draw(yes_or_no()) else float(draw(whole(10, 500))),
        runs=runs,
        present=sizes[0] if runs else 0,
        pauses=pauses,
        keeps=is_soft and runs,
        redo_s=0.0 if pauses else float(draw(whole(0, 100))),
        stop_gpu_s=float(draw(whole(0, 300))) if runs else 0.0,
        begins_s=5.0 if has_costs and not runs else 0.0,
        again_s=8.0 if has_costs else 0.0,
        resize_s=2.0 if has_costs else 0.0,
        grow_s=6.0 if has_costs else 0.0,
    )


def check(book: Book) -> None:
    """All that hold have room at once, and each plan does its work in time."""
    assert all(gpus >= 0 for _, gpus in book.room().pool.steps())
    for each in book.claims:
        plan = book.plans[each.job_id]
        assert plan[-1].end_s <= each.deadline_s
        assert each.pauses or is_whole(plan)
        is_redone = each.runs and not each.pauses and not now_of(plan, 0.0)
        asked = (each.anew() if is_redone else each).lean()
        assert asked.done_by(plan, 0.0) >= asked.work_s * (1 - 1e-6)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_is_asked_of_a_book_all_that_hold_have_room_at_once(data: st.DataObject) -> None:
    """Promises, newcomers, other dates and pauses, beside jobs that never save."""
    free, promised, soft = GPUS, list[Claim](), list[Claim]()
    for at in range(data.draw(whole(0, 4))):
        promised.append(data.draw(claims(f"p{at}", free=free)))
        free -= promised[-1].present
    for at in range(data.draw(whole(0, 3))):
        found = data.draw(claims(f"s{at}", free=free, is_soft=True))
        if found.runs:
            soft.append(found)
            free -= found.present
    book = Book(0.0, GPUS, {})
    book.promise(promised, soft)
    check(book)
    for at in range(data.draw(whole(0, 4))):
        book.admit([data.draw(claims(f"n{at}"))])
        check(book)
    for each in book.claims[:2]:
        book.bears(each.job_id, float(data.draw(pick(1, 10, 50))))
        check(book)
    book.put_off({}, [each.job_id for each in promised])
    check(book)
