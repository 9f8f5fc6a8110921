"""Plans: one at a time, each played by a process of its own.

The loop only encodes the question. The process gives way to the leader, has a time limit, and is
killed at its end. After a plan the next one waits for as long as that one took: plans take at most
half of one CPU.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE

from common.children import send_signal
from common.clock import Clock
from common.errors import Unavailable
from common.plans import Plan
from coordinator.engine import what_if
from coordinator.service.coordinator import Coordinator

MODULE = "coordinator.plan.child"
"""A module of an upper floor: the two meet on a pipe, as `coordinator.engine.what_if` has it."""
MAX_WAITING = 8
"""Plans that wait or are played; one more is refused, and its caller may ask again."""
START_S = 18.0
"""Beyond its limit: for the interpreter, the copies, and the pass that it is in."""


class Plans:
    """The plans of a leader."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._turn = asyncio.Lock()
        self.waiting = 0
        """Plans that wait or are played."""
        self._rests_until_s = 0.0

    async def answer(self, request: Plan, tenant: str, user: str) -> bytes:
        """The encoded answer: `Planned` or `ApiError`.

        Raises:
            Unavailable: too many plans wait, this one took too long, or its process failed.
        """
        if self.waiting >= MAX_WAITING:
            raise Unavailable(f"{MAX_WAITING} plans wait here; ask again")
        self.waiting += 1
        try:
            async with self._turn:
                return await self._play(request, tenant, user)
        finally:
            self.waiting -= 1

    async def _play(self, request: Plan, tenant: str, user: str) -> bytes:
        clock = self._coordinator.clock
        await clock.sleep(max(0.0, self._rests_until_s - clock.now_s()))
        await self._coordinator.settled()
        if not self._coordinator.is_leading:
            raise Unavailable("this coordinator does not lead")
        decider = self._coordinator.decider
        question = what_if.ask(
            self._coordinator.engine,
            request,
            tenant=tenant,
            user=user,
            now_s=decider.time.now_s(),
            loan_pass_at_s=decider.loan_pass_at_s,
        )
        began_s = clock.now_s()
        try:
            return await asked(question, clock=clock, limit_s=request.limit_s + START_S)
        finally:
            ended_s = clock.now_s()
            self._rests_until_s = ended_s + (ended_s - began_s)


async def asked(question: bytes, *, clock: Clock, limit_s: float) -> bytes:
    """The answer of a new process; the process does not outlive this call."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE, stdin=PIPE, stdout=PIPE
        )
    except OSError as error:
        raise Unavailable(f"no process for a plan: {error}") from error
    try:
        async with clock.timeout(limit_s):
            answer, _ = await process.communicate(question)
    except TimeoutError as error:
        raise Unavailable(f"the plan took longer than {limit_s:g} s; ask for less") from error
    finally:
        if process.returncode is None:
            send_signal(process, signal.SIGKILL)
    if process.returncode != 0:
        raise Unavailable(
            f"the plan's process ended with {process.returncode}; see the coordinator's log"
        )
    return answer
