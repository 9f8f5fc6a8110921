"""Counts as people read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.contract.text import counted, some
from coordinator.policies.registry import POLICIES
from tests.policies.tenant_books import shared_cells

MANY = "GPUs|nodes|servers|workers|jobs|gangs|turns|tries|bidders"
ONE_AS_MANY = re.compile(rf"(?<![\d.,-])1 ({MANY})\b")


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (-1, "-1 nodes")]
)
def test_one_thing_is_counted_as_one(count: int, said: str) -> None:
    """And any other number of it as several, none included."""
    assert counted(count, "node") == said


def test_words_whose_plural_is_irregular_are_given_both() -> None:
    """The verb, too, where one follows."""
    assert counted(1, "process", "processes") == "1 process"
    assert counted(2, "process", "processes") == "2 processes"
    assert counted(1, "worker runs", "workers run") == "1 worker runs"


@pytest.mark.parametrize(
    ("names", "said"),
    [((), ""), (("a",), "a"), (("a", "b"), "a, b"), (("a", "b", "c", "d"), "a, b and 2 more")],
)
def test_of_many_names_some_are_said_and_the_others_counted(
    names: tuple[str, ...], said: str
) -> None:
    """In their order, and so many at most as the sentence has room for."""
    assert some(names, 2) == said


@pytest.mark.slow
@settings(max_examples=160, deadline=None)
@given(policy=st.sampled_from(sorted(POLICIES)), snapshot=shared_cells())
def test_no_reason_of_any_policy_counts_one_as_many(policy: str, snapshot: ClusterSnapshot) -> None:
    """What people read of decisions and of waiting says one GPU, one node, one job."""
    made = POLICIES[policy]
    found = made.allocate(snapshot, b"")
    said = [decision.reason for decision in found.decisions]
    said += [why for hold in made.pending_reasons(snapshot, b"") for why in hold.blockers]
    said += [why for job in snapshot.jobs for why in made.standing(snapshot, b"", job.job_id)]
    assert [text for text in said if ONE_AS_MANY.search(text)] == []
