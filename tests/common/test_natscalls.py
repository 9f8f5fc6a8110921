"""Calls of nats-py: no cancellation is lost in one, however the library waits."""

from __future__ import annotations

import asyncio

import pytest

from common.bus import BusMessage, NatsBus
from common.errors import Unavailable
from common.natscalls import as_unavailable, heeded_cancellation
from common.subjects import reply_inbox
from tests.harness.inbox import ECHO, PATIENCE_S, echo


async def ended(task: asyncio.Task[object]) -> None:
    """A task that is cancelled ends; one that goes on is a failure, not a wait for ever."""
    _, running = await asyncio.wait({task}, timeout=PATIENCE_S)
    assert not running, "goes on"


@pytest.mark.parametrize("answer", [b"late", TimeoutError()])
async def test_an_answer_that_comes_with_the_cancellation_does_not_undo_it(
    answer: bytes | Exception,
) -> None:
    """Neither a result nor an error of the same turn of the loop hides that the task must end."""
    future = asyncio.get_running_loop().create_future()

    async def ask() -> None:
        with as_unavailable("somebody"):
            await asyncio.wait_for(future, PATIENCE_S)

    task = asyncio.create_task(ask())
    await asyncio.sleep(0)
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    task.cancel()
    await ended(task)
    assert task.cancelled()


async def test_a_timeout_inside_is_no_cancellation() -> None:
    """A deadline of the call's own cancels too, and takes that back."""
    with pytest.raises(Unavailable, match="no answer in time"), as_unavailable("somebody"):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_before_is_left_to_whoever_handles_it() -> None:
    """Tidying up after a cancellation makes calls too; those end as they would."""

    async def tidy() -> bytes:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            with heeded_cancellation():
                return b"tidy"
        return b""

    task = asyncio.create_task(tidy())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == b"tidy"


@pytest.mark.nats
async def test_a_request_that_is_answered_while_it_is_cancelled_ends(nats_bus: NatsBus) -> None:
    """What reads figures again and again ends when told so, though its answer has just come."""
    asking: list[asyncio.Task[None]] = []

    async def tell_it_to_end(message: BusMessage) -> None:
        # The answer's second reader: it runs in the turn of the loop in which the first one does.
        asking[0].cancel()

    async def ask() -> None:
        while True:
            await nats_bus.request(ECHO, b"1", timeout_s=PATIENCE_S)

    await nats_bus.subscribe(ECHO, echo)
    await nats_bus.request(ECHO, b"0", timeout_s=PATIENCE_S)  # makes its inbox
    await nats_bus.subscribe(f"{reply_inbox(ECHO)}.>", tell_it_to_end)
    asking.append(asyncio.create_task(ask()))
    await ended(asking[0])
    assert asking[0].cancelled()
