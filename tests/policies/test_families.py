"""The sample of policies that cells are played with."""

from __future__ import annotations

from coordinator.policies.registry import POLICIES
from tests.policies.families import FAMILIES, family


def test_no_family_of_policies_is_without_one_in_the_sample() -> None:
    """A scheduler that is added has a place of its own, and comes in with it."""
    assert {family(name) for name in FAMILIES} == {family(name) for name in POLICIES}
