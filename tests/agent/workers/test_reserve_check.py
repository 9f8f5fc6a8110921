"""The look at a job's paths: shared by those who ask the same, and ended when it hangs."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from agent.core.state import Refusal
from agent.workers import reserve_check
from agent.workers.reserve_check import OneLook
from agent.workers.shim_runner import ShimRunner
from agent.workers.spec import Account
from agent.workers.starters import DetachedStarter
from common.clock import Clock, SystemClock
from common.faults import Fault
from tests.harness.fake_clock import FakeClock
from tests.harness.node.workers import PATIENCE_S, make_order


class Hanging:
    """Storage that does not answer: its checker says that it has begun, and waits for ever."""

    def __init__(self, directory: Path) -> None:
        self._mark = directory / "pid"
        self.checker = directory / "checker.py"
        new = f"{self._mark}.new"
        self.checker.write_text(
            f"import os, time\nopen({new!r}, 'w').write(str(os.getpid()))\n"
            f"os.rename({new!r}, {str(self._mark)!r})\ntime.sleep(600)\n"
        )

    def _process(self) -> psutil.Process | None:
        return psutil.Process(int(self._mark.read_text())) if self._mark.exists() else None

    async def begun(self) -> psutil.Process:
        """The process that looks, once it does."""
        clock = SystemClock()
        async with clock.timeout(PATIENCE_S):
            while (found := self._process()) is None:
                await clock.sleep(0.01)
        return found


async def until_ended(process: psutil.Process) -> None:
    """Gone, and buried by its parent's loop, which must not end before."""
    clock = SystemClock()
    async with clock.timeout(PATIENCE_S):
        while process.is_running():
            await clock.sleep(0.01)


@pytest.mark.slow
async def test_an_agent_that_ends_leaves_nobody_behind_who_looks(tmp_path: Path) -> None:
    """The look is cancelled with the agent's step, and its process ends with it."""
    hanging, clock = Hanging(tmp_path), SystemClock()
    looking = asyncio.create_task(
        reserve_check.refusal({}, account=None, clock=clock, checker=hanging.checker)
    )
    process = await hanging.begun()
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
    await until_ended(process)


@pytest.mark.slow
async def test_storage_that_does_not_answer_is_a_refusal(tmp_path: Path) -> None:
    """The limit is told, and the process that waits for the storage is ended."""
    hanging, clock = Hanging(tmp_path), FakeClock()
    looking = asyncio.create_task(
        reserve_check.refusal({}, account=None, clock=clock, checker=hanging.checker)
    )
    process = await hanging.begun()
    await clock.advance(reserve_check.CHECK_TIMEOUT_S)
    said = await looking
    assert said is not None
    assert "did not answer in 10 s" in said.error
    assert said.fault == Fault.STORAGE
    await until_ended(process)


CLOCK = FakeClock()


class Storage:
    """Looks that last until a test ends them."""

    def __init__(self) -> None:
        self.looked: list[str] = []
        self.dropped: list[str] = []
        self.gate = asyncio.Event()
        self.answer: Refusal | OSError | None = None

    async def __call__(
        self, question: dict[str, str], *, account: Account | None, clock: Clock
    ) -> Refusal | None:
        self.looked.append(question["workdir"])
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.dropped.append(question["workdir"])
            raise
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


def ask(look: OneLook, workdir: str = "/a") -> asyncio.Task[Refusal | None]:
    """Somebody who asks."""
    return asyncio.create_task(look({"workdir": workdir}, account=None, clock=CLOCK))


async def test_a_gang_looks_once_on_each_node_however_many_workers_it_has(tmp_path: Path) -> None:
    """Storage that hangs costs one process, and all of them have its answer at once."""
    storage = Storage()
    runner = ShimRunner(
        tmp_path, clock=CLOCK, starter=DetachedStarter(CLOCK), refuse=storage, is_root_allowed=True
    )
    gang = [make_order("sleep", "1", workdir="/gang", index=index) for index in range(8)]
    other = make_order("sleep", "1", workdir="/other", job_id="job-2")
    checks = [asyncio.create_task(runner.check_reserve(order)) for order in (*gang, other)]
    await CLOCK.settle()
    assert storage.looked == ["/gang", "/other"]
    storage.answer = Refusal("the storage did not answer", Fault.STORAGE)
    storage.gate.set()
    assert await asyncio.gather(*checks) == [storage.answer] * 9


async def test_who_asks_after_the_answer_has_a_look_of_its_own() -> None:
    """What was so then need not be so now."""
    storage = Storage()
    look = OneLook(storage)
    storage.gate.set()
    assert [await ask(look), await ask(look)] == [None, None]
    assert storage.looked == ["/a", "/a"]


async def test_a_look_ends_with_the_last_one_who_waits_for_it() -> None:
    """One worker that is withdrawn takes no answer from the others."""
    storage = Storage()
    look = OneLook(storage)
    first, second = ask(look), ask(look)
    await CLOCK.settle()
    first.cancel()
    await CLOCK.settle()
    assert storage.dropped == []
    second.cancel()
    await CLOCK.settle()
    assert storage.dropped == ["/a"]
    later = ask(look)
    await CLOCK.settle()
    storage.gate.set()
    assert await later is None
    assert storage.looked == ["/a", "/a"]


async def test_who_asks_while_a_look_is_being_dropped_has_one_of_its_own() -> None:
    """It is cancelled for nobody but those who left."""
    storage = Storage()
    look = OneLook(storage)
    first = ask(look)
    await CLOCK.settle()
    first.cancel()
    later = ask(look)
    await CLOCK.settle()
    storage.gate.set()
    assert await later is None


async def test_a_look_that_fails_fails_for_all() -> None:
    """And the next one is made anew."""
    storage = Storage()
    look = OneLook(storage)
    asked = [ask(look), ask(look)]
    storage.answer = OSError("out of descriptors")
    storage.gate.set()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert found == [storage.answer] * 2
    storage.answer = None
    with pytest.raises(OSError, match="out of descriptors"):
        await asked[0]
    assert await ask(look) is None


async def test_the_users_of_two_accounts_do_not_share_a_look() -> None:
    """What one may enter the other may not."""
    storage = Storage()
    look = OneLook(storage)
    ann = Account(name="ann", uid=1001, gid=1001, home="/home/ann")
    accounts = (None, ann, structs.replace(ann, uid=1002))
    asked = [
        asyncio.create_task(look({"workdir": "/a"}, account=account, clock=CLOCK))
        for account in accounts
    ]
    await CLOCK.settle()
    assert len(storage.looked) == len(accounts)
    storage.gate.set()
    await asyncio.gather(*asked)
