"""Golden reports: small runs whose figures are in the repository.

Who changes a policy or the engine sees here what it does to them. To accept a change, run
`python -m tests.sim.reports` and review the difference.
"""

from __future__ import annotations

import json

import pytest

from tests.sim.reports import GOLDEN, REPORTS, report


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REPORTS))
def test_a_report_is_what_it_was(name: str) -> None:
    """Every figure to the last digit that is written."""
    assert report(name) == json.loads((GOLDEN / f"{name}.json").read_text())
