"""The leader's lease on a thread of its own, so that no work of the decision loop delays a renewal.

The thread has an event loop and a lease of its own; the caller's loop only asks it. A long pass, a
list or a flood of messages blocks the caller's loop and leaves this one free. `lease` has the
rules, including the one that ends a lease whose decisions stall.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeVar

from coordinator.service.ports import LeasePort

T = TypeVar("T")


class LeaseThread:
    """`LeasePort` that passes each call on to a lease on another event loop."""

    def __init__(self, lease: LeasePort, loop: asyncio.AbstractEventLoop) -> None:
        self._lease = lease
        self._loop = loop

    @property
    def valid_until_s(self) -> float:
        """On this machine's boot clock; a float that the thread replaces whole."""
        return self._lease.valid_until_s

    @property
    def record_before(self) -> int:
        """Number of a record that the previous holder has written.

        Set once, when the lease is taken.
        """
        return self._lease.record_before

    def note_record(self, number: int) -> None:
        """Report this record with the next renewal; an integer that is replaced whole."""
        self._lease.note_record(number)

    async def look(self) -> None:
        """Look up the present holder."""
        await _on(self._loop, self._lease.look())

    async def acquire(self, holder: str, highest_reported_epoch: Callable[[], int]) -> int:
        """Wait until this holder leads; the thread calls `highest_reported_epoch`."""
        return await _on(self._loop, self._lease.acquire(holder, highest_reported_epoch))

    async def renew(self) -> None:
        """Renew it once."""
        await _on(self._loop, self._lease.renew())

    async def keep(self, progressed_at_s: Callable[[], float], *, stall_s: float) -> None:
        """Renew it on the thread until it is lost; the thread calls `progressed_at_s`."""
        await _on(self._loop, self._lease.keep(progressed_at_s, stall_s=stall_s))

    async def release(self) -> None:
        """Give it up at once."""
        await _on(self._loop, self._lease.release())


@contextlib.asynccontextmanager
async def in_thread(
    make: Callable[[], AbstractAsyncContextManager[LeasePort]],
) -> AsyncGenerator[LeaseThread]:
    """Run a lease on a thread of its own for as long as the block runs.

    Args:
        make: makes the lease, and any connection that it needs; the thread enters and leaves it.

    Raises:
        Exception: any error of `make`.
    """
    loop = asyncio.new_event_loop()
    # A daemon: a thread that hangs must not outlive a process that ends.
    thread = threading.Thread(target=_run, args=(loop,), name="lease", daemon=True)
    thread.start()
    stack = AsyncExitStack()
    try:
        yield LeaseThread(await _on(loop, stack.enter_async_context(make())), loop)
    finally:
        try:
            await _on(loop, stack.aclose())
        finally:
            loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """The thread: run the loop until it is stopped, then end the tasks left on it."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    finally:
        loop.close()


async def _on(loop: asyncio.AbstractEventLoop, doing: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine on another thread's loop; a cancellation reaches it there."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(doing, loop))
