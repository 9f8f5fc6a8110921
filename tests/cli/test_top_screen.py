"""The live screen of `aryl top`: what a person sees at 80x24, and what the keys do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from textual.pilot import Pilot

from common.api import Description, Jobs, Loans, Nodes
from common.clock import SystemClock
from common.errors import Unavailable
from common.model import JobState, NodeRole
from coordinator.cli.top_screen import Top, Why
from coordinator.cli.top_sheets import JOBS, NODES, NOW, View, concerns
from tests.cli.fake_cell import NOW_S, job_row, loan_row, node_row, status

TURNS = 1_000
"""So often a test lets the screen work before it gives up; nothing is timed."""


def waiting(count: int) -> list[str]:
    """Ids of jobs that wait."""
    return [f"jwait{place:02d}" for place in range(count)]


def cell(jobs: int = 30, nodes: int = 3) -> View:
    """A loan that comes home, a lost node, a running job and a queue."""
    queue = [
        job_row(name, name="[red]x", state=JobState.PENDING, queueing_s=float(place))
        for place, name in enumerate(waiting(jobs))
    ]
    return View(
        status=status(),
        nodes=Nodes(
            rows=(
                *(node_row(f"t{place}") for place in range(nodes)),
                node_row("gone", role=NodeRole.LOST),
            )
        ),
        loans=Loans(
            rows=(
                loan_row(node="back", reclaim_ordered_at_s=NOW_S - 12.0, returned_at_s=None),
                loan_row(lease_id="l8", node="away", reclaim_ordered_at_s=None),
            )
        ),
        jobs=Jobs(rows=(job_row("jrun"), *queue)),
        now_s=NOW_S,
    )


class Cell:
    """Answers the screen."""

    def __init__(self) -> None:
        self.view = cell()
        self.is_away = False
        self.explained: list[tuple[str, str]] = []

    async def look(self) -> View:
        """A frame."""
        if self.is_away:
            raise Unavailable("nobody answers")
        return self.view

    async def explain(self, kind: str, name: str) -> Description:
        """One thing."""
        self.explained.append((kind, name))
        return Description(kind=kind, name=name, why=(f"the reason of {name}",))


def rows(app: Top) -> list[str]:
    """The lines of the sheet."""
    return [str(option.prompt) for option in app._rows.options]


async def until(pilot: Pilot[None], is_so: Callable[[], bool]) -> None:
    """Let the screen work until it is so."""
    for _ in range(TURNS):
        if is_so():
            return
        await pilot.pause()
    raise AssertionError("never so")


@asynccontextmanager
async def screen(of: Cell) -> AsyncIterator[Pilot[None]]:
    """A screen of 80x24 with a first frame."""
    app = Top(of.look, of.explain, clock=SystemClock())
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: bool(rows(app)))
        yield pilot


def top(pilot: Pilot[None]) -> Top:
    """The program under test."""
    assert isinstance(pilot.app, Top)
    return pilot.app


async def test_what_comes_home_and_what_waits_stand_first() -> None:
    """Without a key: the way home against its deadline, then trouble, then the queue with names as
    they are."""
    async with screen(Cell()) as pilot:
        found = rows(top(pilot))
        assert found[0].startswith("coming home  back")
        assert "12s of" in found[0]
        assert found[1].startswith("lost")
        assert [line.split()[1] for line in found[2:]] == waiting(30)
        assert "[red]x" in found[2]
        assert all(len(line) <= 78 for line in found)


async def test_keys_turn_filter_sort_and_explain() -> None:
    """Tab shows the jobs, `/` keeps rows that contain a text, `s` sorts, `r` reverses, Enter
    explains the highlighted row, Escape leads back."""
    of = Cell()
    async with screen(of) as pilot:
        app = top(pilot)
        await pilot.press("tab", "slash", *"wait0", "enter")
        await until(pilot, lambda: len(rows(app)) == 10)
        headings = JOBS.headings()
        await pilot.press(*["s"] * (headings.index("QUEUED") + 1), "r")
        await until(pilot, lambda: rows(app)[0].startswith("jwait09"))
        await pilot.press("home", "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, Why))
        assert of.explained == [("job", "jwait08")]
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, Why))
        await pilot.press("escape")
        await until(pilot, lambda: len(rows(app)) == 31)


async def test_a_row_stays_highlighted_while_others_come_and_go() -> None:
    """The cursor stays on its job, not on its line."""
    of = Cell()
    async with screen(of) as pilot:
        app = top(pilot)
        await pilot.press(*["down"] * 4)
        of.view = structs.replace(of.view, loans=Loans(rows=()))
        await until(pilot, lambda: rows(app)[0].startswith("lost"))
        at = app._rows.highlighted
        assert at is not None
        assert rows(app)[at].split()[1] == "jwait02"


async def test_the_last_rows_stay_while_the_coordinator_is_away() -> None:
    """A note says so."""
    of = Cell()
    async with screen(of) as pilot:
        app = top(pilot)
        of.is_away = True
        await until(pilot, lambda: "not up to date" in str(app._note.content))
        assert len(rows(app)) == 32


@given(st.text(max_size=4), st.sampled_from(["", *NODES.headings()]), st.booleans())
def test_a_sheet_shows_each_row_that_contains_the_text_once(
    text: str, heading: str, is_reversed: bool
) -> None:
    """Neither order nor direction adds or loses a row."""
    view = cell(nodes=12)
    found = NODES.chosen(view, text=text, heading=heading, is_reversed=is_reversed)
    plain = NODES.chosen(view, text=text)
    assert sorted(row.node for row in found) == sorted(row.node for row in plain)
    of = NODES.columns(NOW_S)
    for row in view.nodes.rows:
        has = any(text.casefold() in column.value(row).casefold() for column in of)
        assert has == (row in plain)


def test_the_nearest_deadline_stands_first() -> None:
    """Of two nodes on their way home, the one with less time left."""
    late = loan_row(
        lease_id="l2", node="late", reclaim_ordered_at_s=NOW_S - 50.0, returned_at_s=None
    )
    early = loan_row(node="early", reclaim_ordered_at_s=NOW_S - 5.0, returned_at_s=None)
    view = structs.replace(cell(), loans=Loans(rows=(early, late)))
    assert [one.name for one in concerns(view)[:2]] == ["late", "early"]
    assert [row.name for row in NOW.chosen(view)][:2] == ["late", "early"]


@pytest.mark.parametrize("width", [60, 80, 200])
async def test_a_row_fits_the_screen(width: int) -> None:
    """Whatever the width, no row is cut by the edge."""
    of = Cell()
    app = Top(of.look, of.explain, clock=SystemClock())
    async with app.run_test(size=(width, 24)) as pilot:
        await until(pilot, lambda: bool(rows(app)))
        assert all(len(line) <= width - 2 for line in rows(app))
