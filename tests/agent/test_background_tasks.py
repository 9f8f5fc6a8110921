"""What a node does beside its steps: an error in it is raised to whoever looks, or logged."""

from __future__ import annotations

import asyncio
import logging

import pytest

from agent.background_tasks import Errands


class BoomError(Exception):
    """What an errand ends in."""


async def fails(text: str) -> None:
    """An errand that goes wrong at once."""
    raise BoomError(text)


async def fails_when_cancelled(text: str) -> None:
    """An errand that goes wrong while it is being ended."""
    try:
        await asyncio.Event().wait()
    finally:
        await fails(text)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as an error, without where."""
    return [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]


async def run(errands: Errands, told: asyncio.Event) -> None:
    """Begin an errand that fails, and return when that is known."""
    errands.begin(fails("late"), name="StopWorker")
    await told.wait()


async def test_a_failure_that_nobody_looked_at_is_logged_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An agent that ends takes no further step, which would have raised it."""
    told = asyncio.Event()
    errands = Errands(on_failure=told.set)
    await run(errands, told)
    await errands.close()
    assert logged(caplog) == ["StopWorker: BoomError: late"]
    await errands.close()
    assert len(logged(caplog)) == 1


async def test_a_failure_while_everything_is_ended_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of each errand: at the last moment there is no first one that would stand for the others."""
    errands = Errands(on_failure=lambda: None)
    for text in ("one", "two"):
        errands.begin(fails_when_cancelled(text), name=f"hook {text}")
    await asyncio.sleep(0)
    await errands.close()
    assert sorted(logged(caplog)) == ["hook one: BoomError: one", "hook two: BoomError: two"]


async def test_a_failure_that_was_raised_is_not_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever looked has it."""
    told = asyncio.Event()
    errands = Errands(on_failure=told.set)
    await run(errands, told)
    with pytest.raises(BoomError, match="late"):
        errands.raise_failure()
    await errands.close()
    assert logged(caplog) == []


async def test_what_was_dropped_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """It was told to end, and did."""
    errands = Errands(on_failure=lambda: None)
    errands.begin(_waits(), name="CheckReserve", droppable="key")
    await asyncio.sleep(0)
    errands.drop_all_but(())
    await errands.close()
    errands.raise_failure()
    assert logged(caplog) == []


async def _waits() -> None:
    await asyncio.Event().wait()
