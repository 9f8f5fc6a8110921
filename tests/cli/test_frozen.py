"""What the command line says of a freeze: that one decision is still made, and which."""

from __future__ import annotations

from common.api import GetStatus
from tests.cli.fake_cell import FakeCell, aryl, status


def test_the_glance_says_that_services_still_get_back_what_is_theirs() -> None:
    """Whoever looks at a frozen cell must not think that nodes stay lent."""
    frozen = FakeCell({GetStatus: status(is_frozen=True)})
    assert "FROZEN, decides only what services get back" in aryl(frozen, "status").out
    assert "FROZEN" not in aryl(FakeCell({GetStatus: status()}), "status").out


def test_the_help_of_freeze_says_what_goes_on() -> None:
    """Before it is ordered, not only after."""
    said = " ".join(aryl(FakeCell({}), "freeze", "--help").out.split())
    assert "services still get back the nodes that their load needs" in said
    assert "leases are renewed" in said
