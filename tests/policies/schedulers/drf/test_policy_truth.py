"""DRF: no tenant gains by asking for more than its jobs need (NSDI'11, sections 3 and 4)."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.draws import whole
from tests.policies.machines import cell, decide, job, machine, started

WHOLE, JOBS = 96, 96
"""Of each resource on the one machine; jobs that each tenant has, more than it can ever run."""


class Wants(NamedTuple):
    """What one job of a tenant needs, or says that it needs."""

    gpus: int
    cpus: int
    memory_gb: int


def ran(wants: list[Wants]) -> Counter[str]:
    """Jobs of each tenant that start on an empty machine."""
    jobs = tuple(
        job(
            f"j{tenant}-{number:03d}",
            f"t{tenant}",
            gpus=each.gpus,
            cpus=each.cpus,
            memory_gb=each.memory_gb,
        )
        for tenant, each in enumerate(wants)
        for number in range(JOBS)
    )
    tenants = {str(each.job_id): each.tenant for each in jobs}
    there = machine("n0", gpus=WHOLE, cpus=WHOLE, memory_gb=WHOLE)
    return Counter(str(tenants[name]) for name in started(decide("drf", cell(there, jobs=jobs))))


def useful(got: int, said: Wants, needed: Wants) -> int:
    """Jobs that what was given is enough for; what is beyond the need in one resource is of no use
    without the others."""
    return min(got * each // need for each, need in zip(said, needed, strict=True))


WANTS = st.builds(Wants, st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))


MORE = st.builds(Wants, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))


def in_largest(wants: Wants) -> int:
    """What it wants of its dominant resource; of each the machine has as much."""
    return max(wants)


@settings(max_examples=50, deadline=None)
@given(wants=st.lists(WANTS, min_size=2, max_size=3), more=MORE, place=whole(0, 5))
@example(wants=[Wants(2, 1, 2), Wants(2, 5, 1)], more=Wants(2, 1, 2), place=0)
@example(wants=[Wants(2, 5, 5), Wants(1, 1, 1)], more=Wants(2, 2, 2), place=1)
def test_strategy_proofness(wants: list[Wants], more: Wants, place: int) -> None:
    """Who says more than its jobs need gains no more than whole gangs round off: less than one as
    it said, one of its own and the largest of another together; with parts of jobs it would gain
    nothing. Whoever that is, as of equals the first in line is served."""
    liar = place % len(wants)
    needed, others = wants[liar], [*wants[:liar], *wants[liar + 1 :]]
    said = Wants(*(need + extra for need, extra in zip(needed, more, strict=True)))
    honest = ran(wants)[f"t{liar}"]
    lying = ran([*wants[:liar], said, *wants[liar + 1 :]])[f"t{liar}"]
    gained = useful(lying, said, needed) - honest
    rounded = sum(map(in_largest, (said, needed, max(others, key=in_largest))))
    assert gained * in_largest(needed) < rounded
