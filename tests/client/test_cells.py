"""The cell of scripts: each method is a request, with asyncio and without."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from common.api import (
    Change,
    Describe,
    Description,
    Done,
    Hold,
    Operate,
    Release,
    Requeue,
    Throttle,
)
from common.errors import ConfigError
from common.model import JobChange
from coordinator.client import AsyncCell, Cell, Client
from tests.cli.fake_cell import FakeCell, job_row, node_row
from tests.harness.fake_clock import FakeClock


def _cell(of: FakeCell, clock: FakeClock | None = None) -> AsyncCell:
    client = Client(of, cell="lab", tenant="ops", user="ada", timeout_s=1.0)
    return AsyncCell(client, clock=clock or FakeClock())


async def test_orders_about_jobs_are_methods_and_answer_in_words() -> None:
    """A change sends the fields that it sets, and no other."""
    orders = (Hold, Release, Requeue, Change, Throttle)
    of = FakeCell({kind: Done(detail="done") for kind in orders})
    cell = _cell(of)
    answers = [
        await cell.hold("1", "2"),
        await cell.release("1"),
        await cell.requeue("1", is_held=True),
        await cell.change("1", JobChange(priority=5, time_limit_s=None)),
        await cell.throttle("1", None),
    ]
    assert answers == ["done"] * 5
    assert of.asked == [
        Hold(job_ids=("1", "2")),
        Release(job_ids=("1",)),
        Requeue(job_ids=("1",), is_held=True),
        Change(job_id="1", priority=5, time_limit_s=None),
        Throttle(job_id="1", throttle=None),
    ]


async def test_a_description_of_a_job_or_a_node_has_its_row_in_full() -> None:
    """Labels, CPUs and the request are only in rows for a caller that asks for them."""
    of = FakeCell({Describe: Description(kind="node", name="t0", node=node_row("t0"))})
    cell = _cell(of)
    for kind in ("node", "job", "service", "loan"):
        await cell.describe(kind, "t0")
    assert of.asked == [
        Describe(kind="node", name="t0", in_full=True),
        Describe(kind="job", name="t0", in_full=True),
        Describe(kind="service", name="t0"),
        Describe(kind="loan", name="t0"),
    ]


async def test_a_drain_begins_now_or_at_an_instant_of_this_machine() -> None:
    """The coordinator is told how long that is from now; one that is past is refused here."""
    of, clock = FakeCell({Operate: Done(detail="done")}), FakeClock()
    cell = _cell(of, clock)
    await cell.drain("t0", deadline_s=5.0)
    await cell.drain("t0", at_s=clock.wall_s() + 60.0, reason="fan")
    await cell.undrain("t0")
    assert of.asked == [
        Operate(action="drain", target="t0", deadline_s=5.0),
        Operate(action="drain_at", target="t0", in_s=60.0, reason="fan"),
        Operate(action="uncordon", target="t0"),
    ]
    with pytest.raises(ConfigError, match=r"at_s: .* expected an instant to come"):
        await cell.drain("t0", at_s=clock.wall_s() - 1.0)


async def test_a_wait_that_takes_too_long_names_its_job() -> None:
    """The error of asyncio alone has no text."""
    clock = FakeClock()
    of = FakeCell({Describe: Description(kind="job", name="j1", job=job_row("j1"))})
    waiting = asyncio.create_task(_cell(of, clock).wait("j1", timeout_s=5.0))
    await clock.advance(6.0)
    with pytest.raises(TimeoutError, match="job j1 has not ended in 5 s"):
        await waiting


def test_both_cells_have_the_same_methods() -> None:
    """With the same arguments: a script moves from one to the other by `await`."""
    own, others = _methods(AsyncCell), _methods(Cell)
    assert own == others


def _methods(kind: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
