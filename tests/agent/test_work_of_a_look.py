"""What an agent does each second: opened files and timers are counted, as they cost CPU time.

A figure here grows only with a reason: each is paid on every node, each second.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from agent.gpu.mps import without_servers
from agent.proc.process_tree import strangers
from agent.telemetry.collectors import CostCollector, HostCollector
from common.messages import GpuProcess, GpuReport, WorkerPhase
from common.model import GpuUuid, NodeRole, WorkerKey
from tests.harness.node.agent import AgentHarness
from tests.harness.node.life import key, order
from tests.harness.node.workers import WorkerHarness, make_order, make_workers

harness = pytest.fixture(make_workers)

_LISTENERS: list[tuple[int, list[str]]] = []
"""The thread of each listener, and what it opened. A hook cannot be removed: it is made once."""


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if _LISTENERS and event in ("open", "os.scandir", "os.listdir"):
        for thread, paths in _LISTENERS:
            if thread == threading.get_ident():
                paths.append(str(arguments[0]))


sys.addaudithook(_heard)


@contextlib.contextmanager
def opened() -> Generator[list[str]]:
    """The files and directories that this thread opens in the block."""
    paths: list[str] = []
    listener = (threading.get_ident(), paths)
    _LISTENERS.append(listener)
    try:
        yield paths
    finally:
        _LISTENERS.remove(listener)


async def test_a_look_opens_two_files_of_each_running_worker(harness: WorkerHarness) -> None:
    """Its status, and whether its shim lives; and once the directory of all."""
    keys = [await harness.start(make_order("sleep", "600", index=index)) for index in range(3)]
    await harness.runner.statuses(keys)
    with opened() as paths:
        statuses = await harness.runner.statuses(keys)
    assert [status.key for status in statuses] == keys
    files = [
        path
        for status in statuses
        for path in (
            f"{harness.directory(status.key)}/status.json",
            f"/proc/{status.shim_pid}/stat",
        )
    ]
    assert paths == [str(harness.run_dir), *files]


def test_a_process_of_a_worker_costs_no_walk_to_its_ancestors(tmp_path: Path) -> None:
    """A worker's own process costs no read and its child one; only a stranger costs a walk."""
    parents = {7: 1, 8: 7, 9: 8, 20: 1, 21: 20}
    for pid, parent in parents.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) S {parent} {pid} {pid} 0\n")
    reads = {
        (7, 8): 0,
        (9,): 1,
        (21,): 2,
        (99,): 1,
    }
    for pids, count in reads.items():
        with opened() as paths:
            found = strangers(pids, (7, 8), proc=tmp_path)
        assert found == {21} & set(pids)
        assert len(paths) == count, pids


async def test_a_sample_of_the_machine_opens_five_files() -> None:
    """CPUs and memory; the agent and its child; and of each GPU process the name."""
    host, cost = HostCollector(), CostCollector(os.getppid)
    process = GpuProcess(pid=os.getpid(), memory_used_bytes=None)
    gpu = GpuReport(
        uuid=GpuUuid("GPU-1"), index=0, gpu_type="H100", memory_total_bytes=1, processes=(process,)
    )
    with opened() as paths:
        await host.collect()
        await cost.collect()
        without_servers((gpu,))
    me, parent = f"/proc/{os.getpid()}", f"/proc/{os.getppid()}"
    assert paths == [
        "/proc/stat", "/proc/meminfo", f"{parent}/stat", f"{me}/stat", f"{me}/comm",
    ]  # fmt: skip


class Locks(set[WorkerKey]):
    """The workers with a live shim; counts how often that is asked."""

    asked = 0

    def __contains__(self, worker: object) -> bool:
        self.asked += 1
        return super().__contains__(worker)


async def test_an_agent_at_rest_wakes_twice_a_second_and_tries_no_lock() -> None:
    """The sample, the step and the looks at lease and contact share their wake-ups.

    Whether the shim of a worker that runs lives shows in its status.
    """
    async with AgentHarness(report_period_s=1.0, step_period_s=0.25) as agents:
        await agents.want(NodeRole.TRAINING, order())
        await agents.until_phase(key(), WorkerPhase.RUNNING)
        await agents.clock.advance(10.0)  # what a start changes is over
        locks = agents.runner.shims = Locks(agents.runner.shims)
        clock, wakes = agents.clock, 0
        end_s = clock.now_s() + 20.0
        while (next_s := clock.next_deadline_s) is not None and next_s <= end_s:
            await clock.advance(next_s - clock.now_s())
            wakes += 1
        assert wakes <= 40
        assert locks.asked == 0
