"""A loan that its node gave up, as an operator reads it."""

from __future__ import annotations

import re

from common.api import Describe, Description, ListLoans, Loans
from tests.cli.fake_cell import FakeCell, aryl, loan_row

WHY = "GPU GPU-1 is used by process 7"


def test_how_long_the_way_back_took_stands_where_a_reclaims_time_does() -> None:
    """With what was promised of it, where anything was; and in the list, with the reason."""
    row = loan_row(
        state="turned back", reclaim_deadline_s=None, turned_back=WHY, reclaim_reason=WHY,
        turn_back_s=14.0, turn_back_deadline_s=60.0,
    )  # fmt: skip
    answer = Description(kind="loan", name="l7", loan=row)
    told = aryl(FakeCell({Describe: answer}), "loan", "describe", "l7").out
    assert re.findall(r"^took +(.+)$", told, re.MULTILINE) == [
        "14s of 1m since its node turned back"
    ]
    listed = aryl(FakeCell({ListLoans: Loans(rows=(row,))}), "loan", "list", "--all").out
    [line] = [line for line in listed.splitlines() if "l7" in line]
    assert "turned back" in line
    assert "14s" in line
    assert WHY in line
