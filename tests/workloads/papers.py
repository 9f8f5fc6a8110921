"""The paper's workloads, each made once in an interpreter. Knows no scenario, and tests nothing.

Fifty thousand jobs take half a second to draw, and nothing can change them afterwards. What is to
be made anew, `coordinator.workloads.named.named` makes.
"""

from __future__ import annotations

from functools import cache

from coordinator.workloads.named import named
from coordinator.workloads.records import Workload


@cache
def paper(name: str) -> Workload:
    """The workload of a name that there is, such as `paper-1`."""
    found = named(name)
    assert found is not None, name
    return found
