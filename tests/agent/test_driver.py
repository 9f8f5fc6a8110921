"""The node's driver alone: look, write down, do; what happens when doing fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Collection, Iterable

import msgspec
import pytest
from msgspec.structs import replace

from agent.core.state import HookKind, Refusal, StopWorker
from agent.settings import ServerSettings
from agent.telemetry.machine import ThisMachine
from agent.workers.record import SHIM_LOST
from agent.workers.runner import StorageSilentError, WorkerStatus
from common.errors import Unavailable
from common.faults import Fault
from common.messages import (
    OrderPhase,
    StopOrder,
    Trespass,
    WorkerPhase,
)
from common.model import GpuUuid, NodeRole, StopReason, WorkerKey
from tests.harness.node.agent import AgentHarness, NodeHarness
from tests.harness.node.life import LifeHarness, key, order
from tests.harness.node.models import ModelRunner, running

R, P = NodeRole, WorkerPhase


async def test_what_is_to_be_done_is_on_disk_before_it_is_done() -> None:
    """Killed in between, the next agent knows of every process that may exist."""
    harness = NodeHarness()
    known: dict[str, bool] = {}

    def watch(name: str, worker: WorkerKey) -> None:
        memory = harness.ledger.load()
        known[name] = memory is not None and str(worker) in memory.workers

    harness.runner.watch = watch
    await harness.run_one()
    assert known == {"check": True, "start": True}


# --- doing that fails -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (OSError("disk"), Fault.NODE),
        (Unavailable("disk"), Fault.NODE),
        (StorageSilentError("disk"), Fault.STORAGE),
    ],
)
async def test_a_worker_that_cannot_be_started_is_a_node_fault_with_the_reason(
    error: Exception, fault: Fault
) -> None:
    """The coordinator places it elsewhere, free of charge; but storage that does not answer may be
    the job's own, which it counts."""
    harness = NodeHarness()
    harness.runner.watch = lambda name, _: (
        harness.runner.failures.append(error) if name == "start" else None
    )
    harness.accept(R.TRAINING, order())
    await harness.turn(3)
    assert harness.said().phase == P.REFUSED
    assert harness.said().fault == fault
    assert "disk" in harness.said().error


async def test_a_shim_that_comes_to_life_after_its_start_was_given_up_is_stopped() -> None:
    """Its job runs elsewhere by then, or its GPUs belong to another."""
    harness = NodeHarness()
    harness.accept(R.TRAINING, order(phase=OrderPhase.RESERVE))
    await harness.turn(2)
    harness.runner.failures = [Unavailable("its shim did not start")]
    harness.accept(R.TRAINING, order())
    await harness.turn(2)
    assert harness.said().phase == P.REFUSED
    harness.runner.known[key()] = running(key())
    await harness.turn(2)
    assert harness.runner.stops == [(key(), StopReason.STALE, 0.0)]


async def test_a_forgotten_worker_whose_shim_runs_after_all_is_stopped_then_removed() -> None:
    """Forgetting never leaves a process behind."""
    harness = NodeHarness()
    harness.runner.refusal = Refusal("command 'x' was not found", Fault.JOB, "command")
    harness.accept(R.TRAINING, order())
    await harness.turn(2)
    harness.accept(R.TRAINING, acknowledged=(key(),))
    await harness.turn()
    harness.runner.known[key()] = running(key())
    await harness.turn(3)
    assert harness.runner.stops == [(key(), StopReason.STALE, 0.0)]
    assert harness.runner.known == {}


async def test_a_stop_that_did_not_reach_the_shim_is_told_again() -> None:
    """A shim that is busy for a moment must not keep its worker for ever."""
    harness = NodeHarness()
    await harness.run_one()
    harness.stop_one()
    harness.runner.failures = [Unavailable("its shim does not take orders now")]
    await harness.turn()
    assert harness.runner.stops == []
    await harness.turn()
    assert harness.runner.stops == [(key(), StopReason.CANCEL, 9.0)]


async def test_a_resize_that_did_not_reach_the_shim_is_told_again() -> None:
    """A job computes with the number of workers that it was told last."""
    harness = NodeHarness()
    await harness.run_one()
    harness.accept(R.TRAINING, order(worker_count=3))
    harness.runner.failures = [Unavailable("its shim does not take orders now")]
    await harness.turn(4)
    assert [call[0] for call in harness.runner.calls].count("resize") == 2


async def test_a_check_of_a_reservation_that_failed_is_made_again() -> None:
    """A gang must not wait for an answer that never comes."""
    harness = NodeHarness()
    harness.runner.failures = [OSError("out of descriptors")]
    harness.accept(R.TRAINING, order(phase=OrderPhase.RESERVE))
    await harness.turn(4)
    assert harness.said().phase == P.READY


async def test_files_that_could_not_be_removed_are_tried_again() -> None:
    """A node must not fill up with what nobody asks for any more."""
    harness = NodeHarness()
    await harness.run_one()
    harness.runner.end(key())
    await harness.turn()
    harness.accept(R.TRAINING, acknowledged=(key(),))
    harness.runner.failures = [OSError("busy")]
    await harness.turn()
    assert key() in harness.runner.known
    await harness.turn()
    assert key() not in harness.runner.known


async def test_one_action_that_fails_does_not_keep_the_others_from_being_done() -> None:
    """Two workers to stop, one shim busy: the other one is stopped now."""
    harness = NodeHarness()
    await harness.run_one(order(key(0), gpus=(0,)), order(key(1), gpus=(1,)))
    stops = tuple(
        StopOrder(key=key(index), reason=StopReason.CANCEL, grace_s=5.0) for index in (0, 1)
    )
    harness.accept(R.TRAINING, stops=stops)
    harness.runner.failures = [Unavailable("busy")]
    await harness.turn()
    assert [stopped for stopped, _, _ in harness.runner.stops] == [key(1)]


async def test_a_worker_whose_shim_died_is_a_node_fault() -> None:
    """The job is not blamed for what it did not do."""
    harness = NodeHarness()
    await harness.run_one()
    lost = WorkerStatus(key=key(), phase=P.EXITED, pid=0, error=SHIM_LOST, fault=Fault.SHIM_LOST)
    harness.runner.known[key()] = lost
    await harness.turn()
    assert harness.said().phase == P.EXITED
    assert harness.said().fault == Fault.SHIM_LOST


# --- trespass ---------------------------------------------------------------------------------


async def test_a_gpu_process_of_no_worker_is_told_and_one_of_a_worker_is_not() -> None:
    """CUDA_VISIBLE_DEVICES isolates nobody, so a trespasser is seen and named."""
    harness = NodeHarness()
    await harness.run_one()
    sleeper = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        harness.machine.pids[1] = sleeper.pid
        await harness.turn()
        assert harness.life.detail == f"trespass: process {sleeper.pid} on GPU-1"
        owner = f"uid {os.getuid()}: sleep"
        found = Trespass(pid=sleeper.pid, gpu_uuid=GpuUuid("GPU-1"), owner=owner)
        assert list(harness.life.trespasses) == [found]
        status = harness.runner.known[key()]
        harness.runner.known[key()] = msgspec.structs.replace(status, pid=sleeper.pid)
        await harness.turn()
        assert harness.life.detail == ""
        assert list(harness.life.trespasses) == []
    finally:
        sleeper.kill()
        await sleeper.wait()


async def test_the_machine_is_asked_through_its_port() -> None:
    """Ports and kinship come from whoever stands for the machine, so a model can."""

    class Model:
        def free_port(self) -> int:
            return 4711

        def listening_ports(self) -> frozenset[int]:
            return frozenset()

        def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
            return set(pids)

        def beside_server(self, pids: Iterable[int], server: ServerSettings) -> set[int] | None:
            return None

        def owner(self, pid: int) -> str:
            return ""

    harness = NodeHarness(world=Model())
    harness.accept(R.TRAINING, replace(order(), phase=OrderPhase.RESERVE))
    await harness.turn(3)
    assert (harness.said().phase, harness.said().endpoint) == (P.READY, "127.0.0.1:4711")
    harness.machine.pids[0] = 1
    await harness.turn()
    assert [found.pid for found in harness.life.trespasses] == [1]


# --- commands ---------------------------------------------------------------------------------


async def test_a_command_of_the_server_runs_beside_everything_else() -> None:
    """A server takes minutes to start; reports and workers do not wait for it."""
    harness = NodeHarness(inference=True)
    gate = asyncio.Event()
    harness.machine.gate = gate
    await harness.turn(4)
    assert (harness.role(), harness.machine.commands) == (R.WARMING, ["start"])
    gate.set()
    await harness.turn(3)
    assert harness.role() == R.SERVING


async def test_leaving_ends_a_command_that_runs_and_lets_go_of_the_machine() -> None:
    """Nothing outlives its block; the next agent asks for the command again."""
    harness = NodeHarness(inference=True)
    harness.machine.gate = asyncio.Event()
    await harness.turn(2)
    await harness.node.close()
    assert harness.machine.commands == ["start", "cancelled", "closed"]
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("hook")] == []


async def test_a_command_is_told_its_node_service_and_gpus() -> None:
    """By its environment, because it is run without a shell."""
    harness = NodeHarness(inference=True)
    await harness.turn(2)
    assert harness.machine.variables == {
        "ARYL_NODE": "n1",
        "ARYL_SERVICE": "chat",
        "ARYL_GPU_UUIDS": "GPU-0,GPU-1",
    }


async def test_a_failed_command_is_in_the_words_of_the_node_and_tried_again() -> None:
    """Whoever looks at the node sees what the operator's command said."""
    harness = NodeHarness(inference=True)
    harness.machine.command_errors = ["systemctl exited with 1: no such unit"]
    await harness.turn()
    assert harness.life.detail == f"{HookKind.START} command: systemctl exited with 1: no such unit"
    await harness.turn(5)
    assert harness.role() == R.SERVING


def test_a_rendezvous_port_is_one_that_nobody_listens_on() -> None:
    """Two questions in a row need not give the same one."""
    assert 0 < ThisMachine().free_port() < 65536


# --- graces on the way home -------------------------------------------------------------------


async def test_the_next_agent_asks_who_may_be_there_of_a_start_that_it_has_to_stop() -> None:
    """The agent before it began that one, and no status spoke of it: it is over when nobody is."""
    harness = NodeHarness()
    harness.accept(R.TRAINING, order(phase=OrderPhase.RESERVE))
    await harness.turn(3)
    harness.accept(R.TRAINING, order())
    harness.ledger.is_full = True
    await harness.turn()
    harness.ledger.is_full = False
    harness.runner.shims.add(key())
    harness.stop_one()
    await harness.turn(5)
    assert harness.runner.stops == [(key(), StopReason.CANCEL, 0.0)]
    assert harness.said().phase == P.READY
    harness.runner.shims.clear()
    await harness.turn()
    assert (harness.said().phase, harness.said().stop_reason) == (P.EXITED, StopReason.CANCEL)


class LongLook(ModelRunner):
    """Which takes its time between what it sees and what it says, as for another worker's log."""

    async def statuses(self, started: Collection[WorkerKey] = ()) -> tuple[WorkerStatus, ...]:
        seen = tuple(self.known[worker] for worker in sorted(self.known))
        await self.stall.at("statuses")
        return seen


@pytest.fixture
async def training() -> AsyncGenerator[AgentHarness]:
    """A node of the training pool whose looks take as long as a test says."""
    async with AgentHarness() as harness:
        harness.runner = harness.node.runner = LongLook()
        harness.runner.stall = harness.stall
        await harness.clock.advance(2.0)
        yield harness


async def begin_beside_a_look(harness: AgentHarness) -> None:
    """A start is answered while a look is under way that was begun before its worker was there."""
    harness.stall.begin("start")
    await harness.want(R.TRAINING, order())
    await harness.until(lambda: ("start", key()) in harness.runner.calls)
    starting = harness.stall
    harness.stall = harness.runner.stall = type(starting)()
    harness.runner.stall.begin("statuses")
    await harness.clock.advance(2.0)
    starting.end()
    await harness.clock.advance(0.1)
    assert key() in harness.runner.known


async def test_a_worker_that_came_to_life_beside_a_look_is_not_lost(training: AgentHarness) -> None:
    """Its whole gang would be stopped for it, and its node blamed."""
    await begin_beside_a_look(training)
    training.runner.stall.end()
    await training.clock.advance(3.0)
    assert training.phase(key()) == P.RUNNING
    assert training.runner.stops == []


async def test_a_worker_that_is_stopped_as_it_comes_to_life_beside_a_look_was_stopped(
    training: AgentHarness,
) -> None:
    """That is no fault of its node, nor over before its shim says so."""
    await begin_beside_a_look(training)
    stop = StopOrder(key=key(), reason=StopReason.CANCEL, grace_s=5.0)
    await training.want(R.TRAINING, stops=(stop,))
    training.runner.stall.end()
    await training.until_phase(key(), P.EXITED)
    said = training.worker(key())
    assert said is not None
    assert (said.stop_reason, said.error) == (StopReason.CANCEL, "")


def test_a_worker_of_which_the_next_look_sees_nothing_is_lost() -> None:
    """One look is older than the answer to its start, no more."""
    life_harness = LifeHarness(inference=False)
    life_harness.want(R.TRAINING, order(phase=OrderPhase.RUN))
    life_harness.step()
    life_harness.life.workers.checked(key(), endpoint="n1:29500", refusal=None)
    life_harness.step()
    life_harness.life.workers.started(key(), error="")
    life_harness.step()
    assert [report.phase for report in life_harness.life.workers.reports()] == [P.RUNNING]
    actions = life_harness.step()
    [report] = life_harness.life.workers.reports()
    assert (report.phase, report.fault) == (P.EXITED, Fault.SHIM_LOST)
    assert report.error == "the worker and its supervisor are gone"
    assert not any(isinstance(action, StopWorker) for action in actions)
