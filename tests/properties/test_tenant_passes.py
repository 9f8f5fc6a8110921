"""Guarantees over many passes on the real engine: what one pass leaves, no later one gives away."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model import Preemptibility
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.registry import POLICIES
from coordinator.sim.run.cluster import Delays
from tests.policies.tenant_passes import CONCAVE, TENANTS, Asked, Cell, asked, trees
from tests.tables import each_row

slow = pytest.mark.slow

NON = Preemptibility.NON


class Case(NamedTuple):
    """A cell in which a policy shrinks jobs and nobody takes all of that in the same pass."""

    nodes: int
    resize_cooldown_s: float
    jobs: tuple[Asked, ...]


CROWDED = Case(
    1,
    300.0,
    (
        Asked(
            tenant="d",
            at_s=300.0,
            workers=(1, 7),
            work_s=7200.0,
            deadline_s=21600.0,
            speedup=CONCAVE,
        ),
        Asked(tenant="a", at_s=30.0, workers=(1, 3), work_s=1800.0, preemptibility=NON),
        Asked(
            tenant="c",
            at_s=30.0,
            workers=(1, 3),
            work_s=7200.0,
            speedup=CONCAVE,
            preemptibility=NON,
        ),
        Asked(tenant="d", workers=(1, 3), work_s=1800.0),
        Asked(tenant="d", workers=(1, 7), work_s=7200.0, speedup=CONCAVE, preemptibility=NON),
    ),
)
"""The shrink makes room for a job of its own tenant, and for one that the guard refuses."""

COOLING = Case(
    1,
    60.0,
    (
        Asked(tenant="d", workers=(1, 3), gpus=2, work_s=120.0),
        Asked(tenant="d", workers=(1, 7), work_s=1800.0),
        Asked(
            tenant="a",
            workers=(1, 3),
            work_s=7200.0,
            deadline_s=5040.0,
            speedup=CONCAVE,
            preemptibility=NON,
        ),
        Asked(tenant="a", at_s=90.0, workers=(1, 3), work_s=120.0),
        Asked(
            tenant="d",
            at_s=300.0,
            workers=(1, 7),
            work_s=1800.0,
            deadline_s=5400.0,
            speedup=CONCAVE,
            preemptibility=NON,
        ),
        Asked(tenant="b", at_s=300.0, workers=(2, 2), work_s=600.0, deadline_s=1800.0),
    ),
)
"""Those whose shares grow were resized a moment ago, or start."""

PROMISED = Case(
    2,
    300.0,
    (
        Asked(
            tenant="a", gpus=2, work_s=120.0, deadline_s=360.0, speedup=CONCAVE, preemptibility=NON
        ),
        Asked(
            tenant="d",
            workers=(1, 7),
            work_s=120.0,
            deadline_s=360.0,
            speedup=CONCAVE,
            preemptibility=NON,
        ),
        Asked(
            tenant="c",
            workers=(1, 3),
            work_s=120.0,
            deadline_s=360.0,
            speedup=CONCAVE,
            preemptibility=NON,
        ),
        Asked(tenant="a", at_s=30.0, workers=(1, 7), work_s=600.0, deadline_s=420.0),
        Asked(
            tenant="d",
            at_s=90.0,
            workers=(1, 3),
            gpus=2,
            work_s=120.0,
            speedup=CONCAVE,
            preemptibility=NON,
        ),
    ),
)
"""Shares of jobs with deadlines double and halve."""

HURRIED = Case(
    2,
    300.0,
    (
        Asked(tenant="c", at_s=90.0, work_s=600.0, deadline_s=420.0),
        Asked(tenant="a", at_s=300.0, workers=(2, 8), work_s=7200.0, deadline_s=21600.0),
        Asked(tenant="a", at_s=90.0, workers=(1, 7), gpus=2, work_s=600.0, deadline_s=420.0),
        Asked(tenant="d", at_s=90.0, work_s=1800.0, deadline_s=5400.0, preemptibility=NON),
        Asked(tenant="b", at_s=300.0, workers=(2, 8), gpus=2, work_s=1800.0, deadline_s=5400.0),
        Asked(tenant="d", at_s=30.0, workers=(1, 7), work_s=600.0),
        Asked(
            tenant="a",
            at_s=30.0,
            workers=(1, 3),
            work_s=120.0,
            deadline_s=360.0,
            preemptibility=NON,
        ),
        Asked(tenant="a", at_s=30.0, workers=(1, 7), work_s=7200.0, speedup=CONCAVE),
        Asked(
            tenant="a",
            workers=(2, 8),
            work_s=600.0,
            deadline_s=1800.0,
            speedup=CONCAVE,
            preemptibility=NON,
        ),
    ),
)
"""Early deadlines come first, and take the workers that others have beyond their base gangs."""

MOST_PASSES = 8
"""In one instant: facts come in turns, and a decision that is dropped asks for no pass."""

SHRINKING = {
    "afs": CROWDED,
    "afs-lyra": CROWDED,
    "afs-p": CROWDED,
    "aryl": CROWDED,
    "aryl-elastic": CROWDED,
    "foresight": CROWDED,
    "gandiva-lyra": CROWDED,
    "pollux": COOLING,
    "qos": CROWDED,
    "qos-edf": HURRIED,
    "qos-elasticflow": PROMISED,
}
"""Policies that did so, each with a case in which another tenant had the GPUs a pass later."""


def played(
    policy: str,
    case: Case,
    tenants: tuple[TenantSettings, ...] = TENANTS,
    *,
    delays: Delays | None = None,
    check: bool = False,
) -> Cell:
    """The first 25 minutes of a cell."""
    cell = Cell(
        policy,
        tenants,
        nodes=case.nodes,
        resize_cooldown_s=case.resize_cooldown_s,
        delays=delays,
        check=check,
    )
    cell.ask(case.jobs)
    cell.run(until_s=1500.0)
    return cell


@each_row("policy", sorted(SHRINKING))
def test_what_a_job_left_for_nobody_is_not_another_tenant_s_a_pass_later(policy: str) -> None:
    """It is not left at all: nothing is lost, and nothing that the tenant is due lies idle."""
    books = played(policy, SHRINKING[policy]).books
    assert books.losses == []
    assert books.idled == []


cases = st.builds(
    Case,
    st.sampled_from((1, 2)),
    st.sampled_from((0.0, 60.0, 300.0)),
    st.lists(asked(), min_size=4, max_size=10).map(tuple),
)
policies = st.one_of(st.sampled_from(sorted(POLICIES)), st.sampled_from(sorted(SHRINKING)))
waits = st.sampled_from((None, Delays(ready_s=2.0, start_s=1.0, stop_s=7.0, report_s=1.0)))


@slow
@settings(max_examples=160, deadline=None)
@given(policy=policies, case=cases, tenants=st.one_of(st.just(TENANTS), trees()), delays=waits)
def test_a_tenant_within_its_guarantee_loses_nothing_to_another_over_any_number_of_passes(
    policy: str, case: Case, tenants: tuple[TenantSettings, ...], delays: Delays | None
) -> None:
    """Under every policy, while jobs come, grow, shrink, are stopped and end.

    Nor does a pass leave a job waiting within a guarantee where what one borrower holds would do.
    """
    cell = played(policy, case, tenants, delays=delays, check=True)
    assert cell.books.losses == []
    assert cell.books.idled == []
    assert cell.engine.state.counters.decisions_refused == 0
    assert cell.most_passes <= MOST_PASSES
