"""What is left of a worker whose files are gone: who is waited for, for how long, and ended."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from agent.proc.process_tree import thread_states
from agent.shim import files as shim_files
from agent.workers import lost as workers_lost
from agent.workers import starters
from agent.workers.lost import ASK_S, HALTED, UNREAD_S, LostWorkers
from agent.workers.runner import WorkerStatus
from agent.workers.shim_runner import ShimRunner
from common.clock import SystemClock
from common.errors import Unavailable
from common.faults import Fault
from common.messages import WorkerPhase
from common.model import NodeRole, StopReason, WorkerKey
from tests.harness.node.agent import NodeHarness
from tests.harness.node.life import key as first_key
from tests.harness.node.models import ModelRunner
from tests.harness.node.workers import (
    PATIENCE_S,
    HangingDiskStarter,
    WorkerHarness,
    is_alive,
    kill,
    make_order,
    make_workers,
)

P, R = WorkerPhase, NodeRole
NOBODY = 65534

REMOVES = 'd=$ARYL_WORKER_DIRECTORY; while [ -e "$d" ]; do rm -rf "$d"; done; '
EMPTIES = (
    'cd "$ARYL_WORKER_DIRECTORY"; while [ ! -e status.json ]; do :; done; rm -rf ./*; cd "$OUT"; '
)
UNREACHED = (
    'cd "$ARYL_WORKER_DIRECTORY"; while [ ! -e status.json ]; do :; done; rm *.json *.sock; '
    'cd "$OUT"; '
)
WAITS = 'echo $$ >> "$OUT/pids"; exec sleep 600'


harness = pytest.fixture(make_workers)


class AheadClock(SystemClock):
    """The real clock, as much further on as a test says; counts the times it was waited on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.timeout_count = 0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s

    def timeout(self, delay_s: float | None) -> AbstractAsyncContextManager[object]:
        self.timeout_count += 1
        return super().timeout(delay_s)


class NotingRunner(ModelRunner):
    """Remembers of whom it was told last that they were seen to run."""

    started: Collection[WorkerKey] = ()

    async def statuses(self, started: Collection[WorkerKey] = ()) -> tuple[WorkerStatus, ...]:
        self.started = started
        return await super().statuses(started)


def noted(path: Path) -> list[int]:
    """The processes that a job wrote down."""
    return [int(word) for word in (path / "pids").read_text().split()]


def shim_of(harness: WorkerHarness, key: WorkerKey) -> int:
    """The shim of a worker, as its status says."""
    pid = harness.raw(key)["shim_pid"]
    assert isinstance(pid, int)
    return pid


async def waiting(harness: WorkerHarness, index: int = 0) -> WorkerStatus:
    """A worker that runs until somebody ends it."""
    return await harness.status(await harness.start(make_order("sleep", "600", index=index)))


async def look(harness: WorkerHarness, *keys: WorkerKey) -> dict[WorkerKey, WorkerStatus]:
    """What is said of workers that were seen to run."""
    return {status.key: status for status in await harness.runner.statuses(keys)}


async def until_over(harness: WorkerHarness, key: WorkerKey) -> None:
    """Return when nothing is said of it any more."""
    async with harness.clock.timeout(PATIENCE_S):
        while key in await look(harness, key):
            await harness.clock.sleep(0.02)


@pytest.mark.parametrize("script", [REMOVES, EMPTIES + "exec env -i sleep 600 & wait; ", UNREACHED])
async def test_a_worker_that_removes_its_files_as_it_begins_is_ended(
    harness: WorkerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """Nobody ever heard that it began, and nothing of it may compute when it counts as over."""
    monkeypatch.setattr(starters, "START_TIMEOUT_S", 2.0)
    monkeypatch.setattr(starters, "POLL_S", 0.5)  # it is there for a moment
    job = make_order(
        "sh", "-c", 'echo $$ >> "$OUT/pids"; ' + script + WAITS, env={"OUT": str(tmp_path)}
    )
    await harness.start(job)
    await until_over(harness, job.key)
    assert noted(tmp_path)
    assert [pid for pid in noted(tmp_path) if is_alive(pid)] == []


async def test_a_worker_that_removes_its_first_status_goes_on(
    harness: WorkerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No storage was silent, and its shim says it again."""
    monkeypatch.setattr(starters, "START_TIMEOUT_S", 2.0)
    monkeypatch.setattr(starters, "POLL_S", 0.5)  # it is there for a moment
    path = '"$ARYL_WORKER_DIRECTORY/status.json"'
    script = f"while [ ! -e {path} ]; do :; done; rm {path}; exec sleep 600"
    key = await harness.start(make_order("sh", "-c", script))
    assert (await harness.status(key)).phase == P.RUNNING


async def test_a_stop_of_a_worker_whose_directory_is_gone_ends_it(harness: WorkerHarness) -> None:
    """An agent that was started again has not seen it run, and must not think that it never did."""
    status = await waiting(harness)
    remove(harness.directory(status.key))
    await harness.new_runner().stop(status.key, StopReason.STALE, 0.0)
    assert not is_alive(status.pid)
    assert not is_alive(status.shim_pid)


async def test_a_worker_begins_again_only_when_nothing_of_its_first_start_is_left(
    harness: WorkerHarness,
) -> None:
    """An agent that was killed meanwhile has it started anew: two would be on its GPUs."""
    first = await waiting(harness)
    remove(harness.directory(first.key))
    await harness.new_runner().start(make_order("sleep", "600"), endpoint="node-1:29400")
    assert not is_alive(first.pid)
    assert not is_alive(first.shim_pid)
    assert (await harness.status(first.key)).phase == P.RUNNING


def remove(directory: Path) -> None:
    """It is gone with all that was in it."""
    directory.rename(directory.parent.parent / "removed")


async def test_a_link_to_itself_in_place_of_a_directory_ends_no_agent(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """The worker is ended, and the look goes on to the next."""
    status, other = await waiting(harness), await waiting(harness, 1)
    directory = harness.directory(status.key)
    directory.rename(tmp_path / "away")
    directory.symlink_to(directory)
    await harness.until_status(status.key, lambda s: s.phase == P.EXITED, "exited")
    assert not is_alive(status.pid)
    await harness.until(lambda: not is_alive(status.shim_pid), "its shim has left")
    await harness.runner.forget(status.key)
    assert not directory.is_symlink()
    assert (await look(harness, other.key))[other.key].phase == P.RUNNING


async def test_a_file_in_place_of_all_directories_ends_no_agent(harness: WorkerHarness) -> None:
    """There is no worker there."""
    harness.run_dir.write_text("")
    assert await harness.runner.statuses() == ()


def refuse(monkeypatch: pytest.MonkeyPatch, number: int, *, is_so: Callable[[], bool]) -> None:
    """No status can be read as long as this is so."""
    really = os.open

    def opened(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).endswith(shim_files.STATUS_FILE) and is_so():
            raise OSError(number, "refused")
        return really(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
async def test_a_disk_that_fails_for_once_ends_no_worker(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """What was known of it holds until that has lasted for a while."""
    harness.clock = clock = AheadClock()
    harness.runner = harness.new_runner()
    status, failing = await waiting(harness), [True]
    refuse(monkeypatch, number, is_so=lambda: bool(failing))
    for _ in range(3):
        found = (await look(harness, status.key))[status.key]
        assert (found.phase, found.pid) == (P.RUNNING, status.pid)
    failing.clear()
    assert (await look(harness, status.key))[status.key].phase == P.RUNNING
    failing.append(True)
    clock.ahead_s = UNREAD_S
    assert (await look(harness, status.key))[status.key].phase == P.RUNNING
    clock.ahead_s = 2 * UNREAD_S
    assert (await look(harness, status.key))[status.key].fault == Fault.SHIM_LOST
    async with harness.clock.timeout(PATIENCE_S):  # its shim may halt after the first look
        while is_alive(status.pid):
            await harness.clock.sleep(0.02)
            await look(harness, status.key)


async def test_a_look_without_a_descriptor_left_ends_no_worker(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent ends, and all of its workers would."""
    status, failing = await waiting(harness), [True]
    refuse(monkeypatch, errno.EMFILE, is_so=lambda: bool(failing))
    with pytest.raises(OSError, match="refused"):
        await look(harness, status.key)
    failing.clear()
    assert not {"T"} & thread_states(status.shim_pid)
    assert is_alive(status.pid)


async def test_who_was_killed_for_its_status_did_not_fail_by_itself(harness: WorkerHarness) -> None:
    """Its shim may see the end and write it down after all."""
    status = await waiting(harness)
    path = harness.directory(status.key) / shim_files.STATUS_FILE
    told = path.read_bytes()
    path.write_bytes(b"no status")
    await harness.until_status(status.key, lambda _: not is_alive(status.pid), "it is ended")
    path.write_bytes(told)
    found = await harness.until_status(status.key, lambda s: s.phase == P.EXITED, "exited")
    assert found.fault == Fault.SHIM_LOST


async def test_a_status_that_goes_during_a_look_is_asked_for_by_the_next(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shim lives, and nobody has asked it yet."""
    status = await waiting(harness)
    hung = await waiting(harness, 1)
    really = LostWorkers.ask

    async def ask(lost: LostWorkers, key: WorkerKey, directory: Path, uid: int) -> bool:
        (harness.directory(status.key) / shim_files.STATUS_FILE).unlink(missing_ok=True)
        return await really(lost, key, directory, uid)

    monkeypatch.setattr(LostWorkers, "ask", ask)
    (harness.directory(hung.key) / shim_files.STATUS_FILE).unlink()
    found = (await look(harness, hung.key, status.key))[status.key]
    assert (found.phase, found.pid) == (P.RUNNING, status.pid)
    monkeypatch.setattr(LostWorkers, "ask", really)
    assert (await look(harness, hung.key, status.key))[status.key].phase == P.RUNNING
    assert is_alive(status.pid)


async def test_a_shim_that_did_not_answer_is_asked_once_and_again_when_it_has_spoken(
    harness: WorkerHarness,
) -> None:
    """Each time would hold up the node's step; a disk that was slow once is no reason for ever."""
    status, clock = await waiting(harness), AheadClock()
    lost, directory = LostWorkers(clock), harness.directory(status.key)
    uid, path = directory.stat().st_uid, harness.directory(status.key) / shim_files.STATUS_FILE
    told = path.read_bytes()
    os.kill(status.shim_pid, signal.SIGSTOP)
    path.unlink()
    assert [await lost.ask(status.key, directory, uid) for _ in range(2)] == [False, False]
    assert clock.timeout_count == 1
    path.write_bytes(told)
    lost.found(status, directory, uid)
    path.unlink()
    os.kill(status.shim_pid, signal.SIGCONT)
    assert await lost.ask(status.key, directory, uid)


async def test_a_shim_that_an_agent_before_this_one_halted_goes_on(harness: WorkerHarness) -> None:
    """It died before it killed it, and nobody else would ever let it go."""
    status = await waiting(harness)
    os.kill(status.shim_pid, signal.SIGSTOP)
    await harness.until(lambda: "T" in thread_states(status.shim_pid), "it is halted")
    assert await harness.new_runner().adopt() == (status.key,)
    await harness.until(lambda: "T" not in thread_states(status.shim_pid), "it goes on")


async def test_a_shim_whose_halt_takes_effect_late_goes_on(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for its disk, and did not look halted yet when the next agent came."""
    status = await waiting(harness)
    os.kill(status.shim_pid, signal.SIGSTOP)
    await harness.until(lambda: "T" in thread_states(status.shim_pid), "it is halted")

    def waits_for_its_disk(_: int) -> set[str]:
        return {"D"}

    with monkeypatch.context() as late:
        late.setattr(workers_lost, "thread_states", waits_for_its_disk)
        assert await harness.new_runner().adopt() == (status.key,)
    await harness.until(lambda: "T" not in thread_states(status.shim_pid), "it goes on")


async def test_a_shim_that_never_halts_is_killed_by_the_second_look(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its disk, and would be waited for without end."""
    status = await waiting(harness)
    remove(harness.directory(status.key))

    def waits_for_its_disk(_: int) -> set[str]:
        return {"D"}

    monkeypatch.setattr(workers_lost, "thread_states", waits_for_its_disk)
    await look(harness, status.key)
    assert is_alive(status.pid)
    await look(harness, status.key)
    await harness.until(lambda: not is_alive(status.pid), "it is ended")
    await until_over(harness, status.key)


@pytest.mark.slow
@pytest.mark.parametrize("look_at", ["descendants", "marked", "_shims"])
async def test_a_number_that_is_another_process_s_since_the_look_is_not_signalled(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch, look_at: str
) -> None:
    """A look takes seconds on a busy machine, and the process that was seen may end meanwhile."""
    status = await waiting(harness)
    bystander = await asyncio.create_subprocess_exec("sleep", "600")
    module = shim_files if look_at == "descendants" else workers_lost
    really = getattr(module, look_at)

    def seen(*place: Path | int) -> dict[int, int] | set[int]:
        found: dict[int, int] | set[int] = really(*place)
        if isinstance(found, dict):  # the process that was seen began earlier
            return found | {bystander.pid: shim_files.start_ticks(bystander.pid) - 1}
        return found | {bystander.pid}

    monkeypatch.setattr(module, look_at, seen)
    lost, directory = LostWorkers(harness.clock), harness.directory(status.key)
    uid = directory.stat().st_uid
    try:
        async with harness.clock.timeout(PATIENCE_S):
            while is_alive(status.pid):
                lost.end_left(status.key, directory, uid)
                await harness.clock.sleep(0.02)
        assert not is_reached(bystander.pid)
    finally:
        monkeypatch.undo()
        await lost.end_all_left(status.key, directory, uid)
        bystander.kill()
        await bystander.wait()


def is_reached(pid: int) -> bool:
    """Whether a process that handles no signal was sent SIGSTOP or SIGKILL."""
    return not is_alive(pid) or HALTED in thread_states(pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run as another account")
async def test_what_another_account_runs_below_a_shim_is_left_alone(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """A job can name nobody else's processes to an agent that may be root."""
    program = f"import os; os.setuid({NOBODY}); os.execv('/bin/sleep', ['sleep', '600'])"
    given = (sys.executable, "-I", "-S", "-c", program)
    script = '"$@" & echo $! >> "$OUT/pids"; exec sleep 600'
    job = make_order("sh", "-c", script, "sh", *given, env={"OUT": str(tmp_path)})
    key = await harness.start(job)
    await harness.until((tmp_path / "pids").exists, "both run")
    pid = noted(tmp_path)[0]
    await harness.until(lambda: Path(f"/proc/{pid}").stat().st_uid == NOBODY, "it is another's")
    remove(harness.directory(key))
    try:
        await until_over(harness, key)
        assert is_alive(pid)
    finally:
        kill(pid)


async def test_a_suspended_worker_is_looked_for_as_one_that_runs() -> None:
    """Whoever suspended it waits for its turn to come again."""
    harness = NodeHarness()
    harness.runner = harness.node.runner = runner = NotingRunner()
    await harness.run_one()
    harness.runner.known[first_key()] = WorkerStatus(key=first_key(), phase=P.SUSPENDED, pid=1)
    await harness.turn(2)
    assert list(runner.started) == [first_key()]


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
    harness: WorkerHarness, tmp_path: Path
) -> None:
    """Through all processes of a busy machine it takes seconds; only who was seen is waited for."""
    lost = LostWorkers(BusyClock())
    key = make_order("true").key
    await lost.end_all_left(key, tmp_path / "nobody-was-here", os.geteuid())
    left = await harness.status(await harness.start(make_order("sleep", "600")))
    await lost.end_all_left(left.key, harness.directory(left.key), os.geteuid())
    assert not is_alive(left.pid)


async def test_who_was_seen_and_does_not_die_is_waited_for_as_long_as_a_question_may_take(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in the kernel for its disk, say: a start beside it would share its GPUs."""
    left = await harness.status(await harness.start(make_order("sleep", "600")))
    clock = FastClock()

    monkeypatch.setattr(workers_lost, "_signal", is_deaf)
    async with harness.clock.timeout(PATIENCE_S):
        with pytest.raises(Unavailable, match="not dead yet"):
            await LostWorkers(clock).end_all_left(
                left.key, harness.directory(left.key), os.geteuid()
            )
    assert clock.ahead_s <= ASK_S
    assert is_alive(left.pid)


async def test_a_start_has_begun_where_its_worker_can_neither_be_told_nor_is_dead_yet(
    harness: WorkerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job spoilt the lock and the socket, and cleaned its environment: called a start that
    failed, it would run twice."""
    monkeypatch.setattr(starters, "START_TIMEOUT_S", 2.0)
    clock = FastClock()
    starter = HangingDiskStarter(harness.clock)
    runner = ShimRunner(harness.run_dir, clock=clock, starter=starter, is_root_allowed=True)
    spoils = 'cd "$ARYL_WORKER_DIRECTORY"; rm lock control.sock; mkdir lock control.sock; cd /; '
    says = 'echo $$ $PPID > "$OUT/new"; mv "$OUT/new" "$OUT/pids"; '
    script = f"{spoils}{says}exec env -i sleep 600"
    order = make_order("sh", "-c", script, env={"OUT": str(tmp_path)})
    starting = asyncio.create_task(runner.start(order, endpoint="node-1:29400"))
    await harness.until((tmp_path / "pids").exists, "the worker computes")
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    try:
        monkeypatch.setattr(workers_lost, "_signal", is_deaf)
        async with harness.clock.timeout(PATIENCE_S):
            await starting
        assert all(is_alive(pid) for pid in pids)
    finally:
        for pid in pids:
            kill(pid)
