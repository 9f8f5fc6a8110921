"""How long is waited until nothing is left of a worker, and for whom."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from agent.workers import lost as workers_lost
from agent.workers import starters
from agent.workers.lost import ASK_S, LostWorkers
from agent.workers.shim_runner import ShimRunner
from common.clock import SystemClock
from common.errors import Unavailable
from tests.agent.worker_house import (
    PATIENCE_S,
    WorkerHouse,
    is_alive,
    kill,
    make_order,
    make_workers,
)
from tests.agent.workers.test_withdrawn import HangingDiskStarter

house = pytest.fixture(make_workers)


class BusyClock(SystemClock):
    """Of a machine so busy that whatever is timed takes as much longer as a question may take."""

    def timeout(self, delay_s: float | None) -> AbstractAsyncContextManager[object]:
        return super().timeout(None if delay_s is None else delay_s - ASK_S)


class FastClock(SystemClock):
    """Whoever sleeps on it has slept at once."""

    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s

    async def sleep(self, delay_s: float) -> None:
        self.ahead_s += delay_s
        await super().sleep(0)


def is_deaf(_: set[int], __: signal.Signals, ___: Callable[[int], bool]) -> None:
    """No signal takes effect."""


class HurriedClock(SystemClock):
    """All time limits are over at once."""

    def timeout(self, delay_s: float | None) -> AbstractAsyncContextManager[object]:
        return super().timeout(None if delay_s is None else 0.0)


async def test_a_look_has_a_time_limit(tmp_path: Path) -> None:
    """One through all processes may never end, as where a process cannot be read: nobody may then
    say that there is none."""
    lost, key = LostWorkers(HurriedClock()), make_order("true").key
    with pytest.raises(Unavailable, match="the search for its processes took too long"):
        await lost.end_all_left(key, tmp_path / "nobody-was-here", os.geteuid())


async def test_a_slow_look_that_finds_nobody_is_no_reason_against_a_start(
    house: WorkerHouse, tmp_path: Path
) -> None:
    """Through all processes of a busy machine it takes seconds; only who was seen is waited for."""
    lost = LostWorkers(BusyClock())
    key = make_order("true").key
    await lost.end_all_left(key, tmp_path / "nobody-was-here", os.geteuid())
    left = await house.status(await house.start(make_order("sleep", "600")))
    await lost.end_all_left(left.key, house.directory(left.key), os.geteuid())
    assert not is_alive(left.pid)


async def test_who_was_seen_and_does_not_die_is_waited_for_as_long_as_a_question_may_take(
    house: WorkerHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in the kernel for its disk, say: a start beside it would share its GPUs."""
    left = await house.status(await house.start(make_order("sleep", "600")))
    clock = FastClock()

    monkeypatch.setattr(workers_lost, "_signal", is_deaf)
    async with house.clock.timeout(PATIENCE_S):
        with pytest.raises(Unavailable, match="not dead yet"):
            await LostWorkers(clock).end_all_left(left.key, house.directory(left.key), os.geteuid())
    assert clock.ahead_s <= ASK_S
    assert is_alive(left.pid)


async def test_a_start_has_begun_where_its_worker_can_neither_be_told_nor_is_dead_yet(
    house: WorkerHouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job spoilt the lock and the socket, and cleaned its environment: called a start that
    failed, it would run twice."""
    monkeypatch.setattr(starters, "START_TIMEOUT_S", 2.0)
    clock = FastClock()
    starter = HangingDiskStarter(house.clock)
    runner = ShimRunner(house.run_dir, clock=clock, starter=starter, is_root_allowed=True)
    spoils = 'cd "$ARYL_WORKER_DIRECTORY"; rm lock control.sock; mkdir lock control.sock; cd /; '
    says = 'echo $$ $PPID > "$OUT/new"; mv "$OUT/new" "$OUT/pids"; '
    script = f"{spoils}{says}exec env -i sleep 600"
    order = make_order("sh", "-c", script, env={"OUT": str(tmp_path)})
    starting = asyncio.create_task(runner.start(order, endpoint="node-1:29400"))
    await house.until((tmp_path / "pids").exists, "the worker computes")
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    try:
        monkeypatch.setattr(workers_lost, "_signal", is_deaf)
        async with house.clock.timeout(PATIENCE_S):
            await starting
        assert all(is_alive(pid) for pid in pids)
    finally:
        for pid in pids:
            kill(pid)
