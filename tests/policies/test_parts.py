"""What the folder of parts promises: each is for several schedulers."""

from __future__ import annotations

import grimp

PARTS = "coordinator.policies.parts"


def test_a_part_has_at_least_two_users() -> None:
    """A module that one scheduler alone imports belongs into that scheduler's folder."""
    graph = grimp.build_graph("coordinator", include_external_packages=False, cache_dir=None)
    users = {
        part: graph.find_modules_that_directly_import(part) for part in graph.find_children(PARTS)
    }
    assert users
    assert {part: sorted(found) for part, found in users.items() if len(found) < 2} == {}
