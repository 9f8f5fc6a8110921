"""`qos-elasticflow` gives nobody workers to take them back in the next pass."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from coordinator.policies.contract.decisions import Resize
from coordinator.policies.schedulers.qos.admission import Book
from coordinator.policies.schedulers.qos.marginal_return import Sharing
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from coordinator.sim.run.cluster import Delays
from tests.policies.tenant_passes import Asked, Cell

GPUS = 8


DELAYS = Delays(start_s=5.0, ready_s=20.0, stop_s=7.0)


def claim(
    gains: tuple[float, ...], work_s: float, slack: float, costs_s: tuple[float, float]
) -> Claim:
    """A job that waits: each doubling of its workers computes so many times faster."""
    rates = [1.0]
    for gain in gains:
        rates.append(rates[-1] * gain)
    resize_s, grow_s = costs_s
    return Claim(
        job_id="a",
        sizes=tuple(2**at for at in range(len(rates))),
        rates=tuple(rates),
        gpus_per_worker=1,
        work_s=work_s,
        deadline_s=work_s * slack,
        resize_s=resize_s,
        grow_s=grow_s,
        again_s=grow_s,
    )


def settled(asks: Claim, slot_s: float) -> list[int]:
    """Its workers from pass to pass at one instant, until some come again."""
    seen: list[int] = []
    book = Book(0.0, GPUS, {})
    book.promise([])
    is_promised = book.admit([asks])
    while asks.present not in seen:
        seen.append(asks.present)
        soft = [] if asks.job_id in book.plans else [asks]
        workers = Sharing(book, soft, now_s=0.0, gpus=GPUS, slot_s=slot_s).share()["a"]
        asks = structs.replace(asks, present=workers, runs=workers > 0)
        book = Book(0.0, GPUS, book.plans)
        book.promise([asks] if is_promised else [])
    return seen[seen.index(asks.present) :]


@given(
    gains=st.lists(st.floats(1.01, 2.0), min_size=1, max_size=3).map(tuple),
    work_s=st.floats(100.0, 5000.0),
    slack=st.floats(1.0, 1.1) | st.floats(0.2, 3.0),
    costs_s=st.sampled_from([(0.0, 0.0), (30.0, 45.0), (30.0, 30.0)]),
    slot_s=st.sampled_from([60.0, 300.0]),
)
@example(gains=(1.8, 1.05), work_s=3585.0, slack=1.01, costs_s=(30.0, 45.0), slot_s=60.0)
@example(gains=(1.05, 1.5), work_s=4732.0, slack=1.01, costs_s=(30.0, 45.0), slot_s=300.0)
def test_who_is_alone_comes_to_rest(
    gains: tuple[float, ...],
    work_s: float,
    slack: float,
    costs_s: tuple[float, float],
    slot_s: float,
) -> None:
    """Safety: on a cell of its own a job has some size at last that the next pass leaves to it."""
    assert len(settled(claim(gains, work_s, slack, costs_s), slot_s)) == 1


@pytest.mark.parametrize(
    ("work_s", "deadline_s", "speedup"),
    [
        (4909.0, 5206.0, (1.05, 1.89)),
        (1644.0, 1791.0, (1.05, 1.26)),
        (2506.0, 2633.0, (1.5, 2.7)),
    ],
)
def test_passes_for_others_resize_nobody_to_and_fro(
    work_s: float, deadline_s: float, speedup: tuple[float, float]
) -> None:
    """A short job a minute beside a long one, on a node that holds both: two resizes at most."""
    cell = Cell("qos-elasticflow", (), nodes=1, delays=DELAYS)
    two, four = speedup
    long = Asked(
        tenant="a",
        workers=(1, 4),
        work_s=work_s,
        deadline_s=deadline_s,
        speedup=((1, 1.0), (2, two), (4, four)),
    )
    short = [Asked(tenant="b", at_s=60.0 * number, work_s=50.0) for number in range(1, 60)]
    cell.ask([long, *short])
    cell.run(until_s=1e6)
    assert sum(isinstance(decision, Resize) for decision in cell.decisions) <= 2


def test_who_ends_earlier_goes_before_who_keeps_what_it_has() -> None:
    """Four workers end `a` no earlier than one does: `b` is given them, as they end it earlier."""
    keeps = structs.replace(claim((1.05, 1.05), 3000.0, 2.0, (30.0, 45.0)), runs=True, present=4)
    grows = structs.replace(
        claim((1.5, 1.5), 1000.0, 1.0, (5.0, 5.0)),
        job_id="b", deadline_s=inf, runs=True, present=1,
    )  # fmt: skip
    book = Book(0.0, 5, {})
    book.promise([keeps])
    assert Sharing(book, [grows], now_s=0.0, gpus=5, slot_s=60.0).share() == {"a": 1, "b": 4}
    assert Sharing(book, [], now_s=0.0, gpus=5, slot_s=60.0).share() == {"a": 4}


def test_where_changes_take_no_time_plans_are_the_papers() -> None:
    """Who would end no earlier by four workers than by two keeps two, whatever it has."""
    free = (0.0, 0.0)
    wide = structs.replace(claim((2.0, 2.0), 2100.0, 0.5, free), runs=True, present=4)
    other = structs.replace(claim((1.05, 1.05), 500.0, 1.2, free), job_id="b", runs=True, present=2)
    book = Book(0.0, GPUS, {})
    book.promise([wide, other])
    assert Sharing(book, [], now_s=0.0, gpus=GPUS, slot_s=60.0).share() == {"a": 2, "b": 4}
