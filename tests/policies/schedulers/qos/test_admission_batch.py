"""Many newcomers with deadlines at once: answered in turn, some in each pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from common.model import JobId
from coordinator.policies.contract.decisions import Reject
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.qos.admission import Book
from coordinator.policies.schedulers.qos.admission_batch import AGAIN_S, MOST_PLANS, answer
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from tests.harness.builders import NOW_S, job_with, make_job_view, make_node_view, make_snapshot

CROWD = 400
"""A pass answers some 250 of these."""


# --- in turn --------------------------------------------------------------------------------------


def claims(count: int) -> list[Claim]:
    """Of jobs of 30 s on one GPU; every second one is in a hurry that leaves no room for all."""
    return [
        Claim(
            job_id=f"c{at:03}",
            sizes=(1, 2),
            rates=(1.0, 1.8),
            gpus_per_worker=1,
            work_s=30.0,
            deadline_s=40.0 + at % 5 if at % 2 else 200.0 + at,
        )
        for at in range(count)
    ]


def asked(
    book: Book,
    newcomers: Sequence[Claim],
    *,
    together: bool = False,
    most_plans: int = MOST_PLANS,
) -> tuple[list[str], Sequence[Claim]]:
    """Who is refused, and who has no answer yet."""
    refused = list[str]()
    later = answer(
        book,
        newcomers,
        lambda claim: refused.append(claim.job_id),
        together=together,
        most_plans=most_plans,
    )
    return refused, later


def test_who_is_answered_later_gets_the_answer_that_it_would_have_got() -> None:
    """However much is answered at once: who is refused, and what is promised to the others."""
    whole = Book(0.0, 4, {})
    refused, later = asked(whole, claims(40))
    assert not later
    assert 0 < len(refused) < 40
    parts, left, rounds = Book(0.0, 4, {}), list(claims(40)), 0
    said = list[str]()
    while left:
        more, later = asked(parts, left, most_plans=60)
        assert list(later) == left[len(left) - len(later) :]
        said, left, rounds = [*said, *more], list(later), rounds + 1
    assert rounds > 3
    assert said == refused
    assert parts.plans == whole.plans


def test_a_pass_tries_as_many_plans_for_twice_the_crowd() -> None:
    """So that its length has a bound, whoever asks."""
    some, more = Book(0.0, 4, {}), Book(0.0, 4, {})
    assert asked(some, claims(40), most_plans=60)[1]
    assert asked(more, claims(80), most_plans=60)[1]
    assert 60 <= more.tried == some.tried


def test_the_first_is_answered_whatever_it_costs() -> None:
    """Else a pass could answer nobody, and so could all that follow."""
    _, later = asked(Book(0.0, 4, {}), claims(5), most_plans=0)
    assert [each.job_id for each in later] == ["c001", "c002", "c003", "c004"]


def test_those_that_are_admitted_together_are_answered_together() -> None:
    """All or none, however much that is."""
    refused, later = asked(Book(0.0, 4, {}), claims(40), together=True, most_plans=0)
    assert not later
    assert len(refused) == 40


# --- as a policy ----------------------------------------------------------------------------------


def asks(number: int) -> JobView:
    """Of half an hour on one worker; the first dozens leave the others no room."""
    plain = make_job_view(f"j{number:04}", workers=(1, 4), submitted_at_s=NOW_S - 1000.0 + number)
    return job_with(
        plain,
        remaining_work_s=1800.0,
        estimated_left_s=1800.0,
        as_of_s=NOW_S,
        deadline_at_s=NOW_S + 3600.0 + 60.0 * (number % 50),
    )


def crowd(count: int) -> ClusterSnapshot:
    """One idle node of 8 GPUs, and so many newcomers."""
    return make_snapshot(nodes=[make_node_view("n0")], jobs=[asks(at) for at in range(count)])


@pytest.mark.slow
def test_a_pass_answers_those_that_came_first_and_wants_the_next_one_soon() -> None:
    """The others wait, are not refused, and are told how many come before them."""
    snapshot, elasticflow = crowd(CROWD), policy("qos-elasticflow")
    found = elasticflow.allocate(snapshot, b"")
    assert found.wake_at_s == NOW_S + AGAIN_S
    refused = [each.job_id for each in found.decisions if isinstance(each, Reject)]
    told = {
        hold.job_id: " ".join(hold.blockers) for hold in elasticflow.pending_reasons(snapshot, b"")
    }
    later = [name for name in sorted(told) if "one of the next passes" in told[name]]
    assert later == [JobId(f"j{at:04}") for at in range(CROWD - len(later), CROWD)]
    assert not set(later) & set(refused)
    assert refused == sorted(refused)
    assert "before it" not in told[later[0]]
    assert f"{len(later) - 1} jobs before it" in told[later[-1]]
    assert all(one != other for one, other in pairwise(told[name] for name in later))
