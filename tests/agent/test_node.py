"""The node's driver alone: look, write down, do; what happens when doing fails; the way home."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import pytest
from msgspec.structs import replace

from agent.go_home import go_home
from agent.machine import ThisMachine
from agent.state import HookKind
from agent.worker_record import SHIM_LOST
from agent.workers import WorkerStatus
from common.errors import Unavailable
from common.messages import (
    DesiredState,
    OrderPhase,
    StopOrder,
    Trespass,
    WorkerOrder,
    WorkerPhase,
    WorkerReport,
)
from common.model import GpuUuid, LeaseId, NodeRole, StopReason, WorkerKey
from tests.agent.agent_house import AgentHouse, running
from tests.agent.bench import key, lease, order

R, P = NodeRole, WorkerPhase


class House(AgentHouse):
    """A node without an agent: a test calls its driver."""

    async def turn(self, count: int = 1, *, after_s: float = 1.0) -> None:
        """Look and do, so often."""
        for _ in range(count):
            await self.clock.advance(after_s)
            await self.node.sample()
            await self.node.step()
            await self.clock.settle()

    def accept(
        self,
        role: NodeRole,
        *orders: WorkerOrder,
        stops: tuple[StopOrder, ...] = (),
        acknowledged: tuple[WorkerKey, ...] = (),
        is_lent: bool = False,
    ) -> None:
        """A newer desired state."""
        self.generation += 1
        desired = DesiredState(
            node="n1", epoch=1, generation=self.generation, role=role, workers=orders, stops=stops,
            acknowledged=acknowledged, lease=lease() if is_lent else None,
        )  # fmt: skip
        assert self.life.accept(desired, now_s=self.clock.now_s()).is_accepted

    def role(self) -> NodeRole:
        """A call, so that a type checker does not think that it stays the same."""
        return self.life.memory.role

    def said(self, worker: WorkerKey | None = None) -> WorkerReport:
        """What the node would report of a worker."""
        wanted = worker or key()
        return next(report for report in self.life.workers.reports() if report.key == wanted)

    async def run_one(self, *orders: WorkerOrder) -> None:
        """Bring workers to RUNNING."""
        orders = orders or (order(),)
        self.accept(R.TRAINING, *orders)
        await self.turn(3)
        assert [self.said(one.key).phase for one in orders] == [P.RUNNING] * len(orders)

    def stop_one(self, *, grace_s: float = 9.0) -> None:
        """Order the default worker to stop."""
        stop = StopOrder(key=key(), reason=StopReason.CANCEL, grace_s=grace_s)
        self.accept(R.TRAINING, order(), stops=(stop,))

    async def lend_with(self, *orders: WorkerOrder, until_s: float = 1e6) -> None:
        """Bring an inference node on loan, with workers that run."""
        await self.turn(5)
        self.accept(R.ON_LOAN, *orders, is_lent=True)
        await self.turn()
        self.life.renewed(LeaseId("l1-1"), until_s)
        await self.turn(8)
        assert self.role() == R.ON_LOAN
        assert [self.said(one.key).phase for one in orders] == [P.RUNNING] * len(orders)


# --- writing down, then doing -----------------------------------------------------------------


async def test_what_is_to_be_done_is_on_disk_before_it_is_done() -> None:
    """Killed in between, the next agent knows of every process that may exist."""
    house = House()
    known: dict[str, bool] = {}

    def watch(name: str, worker: WorkerKey) -> None:
        memory = house.ledger.load()
        known[name] = memory is not None and str(worker) in memory.workers

    house.runner.watch = watch
    await house.run_one()
    assert known == {"check": True, "start": True}


async def test_nothing_is_done_that_could_not_be_written_down() -> None:
    """A full disk ends the agent loudly instead of making it forget."""
    house = House()
    await house.turn()
    house.accept(R.TRAINING, order())
    house.ledger.is_full = True
    with pytest.raises(Unavailable, match="no space"):
        await house.turn()
    assert house.runner.calls == []


# --- doing that fails -------------------------------------------------------------------------


async def test_a_worker_that_cannot_be_started_is_a_node_fault_with_the_reason() -> None:
    """The coordinator places it elsewhere, free of charge."""
    house = House()
    house.runner.watch = lambda name, _: (
        house.runner.failures.append(OSError("disk")) if name == "start" else None
    )
    house.accept(R.TRAINING, order())
    await house.turn(3)
    assert house.said().phase == P.REFUSED
    assert house.said().error.startswith("node fault")
    assert "disk" in house.said().error


async def test_a_shim_that_comes_to_life_after_its_start_was_given_up_is_stopped() -> None:
    """Its job runs elsewhere by then, or its GPUs belong to another."""
    house = House()
    house.accept(R.TRAINING, order(phase=OrderPhase.RESERVE))
    await house.turn(2)
    house.runner.failures = [Unavailable("its shim did not start")]
    house.accept(R.TRAINING, order())
    await house.turn(2)
    assert house.said().phase == P.REFUSED
    house.runner.known[key()] = running(key())
    await house.turn(2)
    assert house.runner.stops == [(key(), StopReason.STALE, 0.0)]


async def test_a_forgotten_worker_whose_shim_runs_after_all_is_stopped_then_removed() -> None:
    """Forgetting never leaves a process behind."""
    house = House()
    house.runner.refusal = "command 'x' was not found"
    house.accept(R.TRAINING, order())
    await house.turn(2)
    house.accept(R.TRAINING, acknowledged=(key(),))
    await house.turn()
    house.runner.known[key()] = running(key())
    await house.turn(3)
    assert house.runner.stops == [(key(), StopReason.STALE, 0.0)]
    assert house.runner.known == {}


async def test_a_stop_that_did_not_reach_the_shim_is_told_again() -> None:
    """A shim that is busy for a moment must not keep its worker for ever."""
    house = House()
    await house.run_one()
    house.stop_one()
    house.runner.failures = [Unavailable("its shim does not take orders now")]
    await house.turn()
    assert house.runner.stops == []
    await house.turn()
    assert house.runner.stops == [(key(), StopReason.CANCEL, 9.0)]


async def test_a_resize_that_did_not_reach_the_shim_is_told_again() -> None:
    """A job computes with the number of workers that it was told last."""
    house = House()
    await house.run_one()
    house.accept(R.TRAINING, order(worker_count=3))
    house.runner.failures = [Unavailable("its shim does not take orders now")]
    await house.turn(4)
    assert [call[0] for call in house.runner.calls].count("resize") == 2


async def test_a_check_of_a_reservation_that_failed_is_made_again() -> None:
    """A gang must not wait for an answer that never comes."""
    house = House()
    house.runner.failures = [OSError("out of descriptors")]
    house.accept(R.TRAINING, order(phase=OrderPhase.RESERVE))
    await house.turn(4)
    assert house.said().phase == P.READY


async def test_files_that_could_not_be_removed_are_tried_again() -> None:
    """A node must not fill up with what nobody asks for any more."""
    house = House()
    await house.run_one()
    house.runner.end(key())
    await house.turn()
    house.accept(R.TRAINING, acknowledged=(key(),))
    house.runner.failures = [OSError("busy")]
    await house.turn()
    assert key() in house.runner.known
    await house.turn()
    assert key() not in house.runner.known


async def test_one_action_that_fails_does_not_keep_the_others_from_being_done() -> None:
    """Two workers to stop, one shim busy: the other one is stopped now."""
    house = House()
    await house.run_one(order(key(0), gpus=(0,)), order(key(1), gpus=(1,)))
    stops = tuple(
        StopOrder(key=key(index), reason=StopReason.CANCEL, grace_s=5.0) for index in (0, 1)
    )
    house.accept(R.TRAINING, stops=stops)
    house.runner.failures = [Unavailable("busy")]
    await house.turn()
    assert [stopped for stopped, _, _ in house.runner.stops] == [key(1)]


async def test_a_worker_whose_shim_died_is_a_node_fault() -> None:
    """The job is not blamed for what it did not do."""
    house = House()
    await house.run_one()
    house.runner.known[key()] = WorkerStatus(key=key(), phase=P.EXITED, pid=0, error=SHIM_LOST)
    await house.turn()
    assert house.said().phase == P.EXITED
    assert house.said().error.startswith("node fault")


# --- trespass ---------------------------------------------------------------------------------


async def test_a_gpu_process_of_no_worker_is_told_and_one_of_a_worker_is_not() -> None:
    """CUDA_VISIBLE_DEVICES isolates nobody, so a trespasser is seen and named (design 7)."""
    house = House()
    await house.run_one()
    sleeper = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        house.machine.pids[1] = sleeper.pid
        await house.turn()
        assert house.life.detail == f"trespass: process {sleeper.pid} on GPU-1"
        assert list(house.life.trespasses) == [Trespass(pid=sleeper.pid, gpu_uuid=GpuUuid("GPU-1"))]
        status = house.runner.known[key()]
        house.runner.known[key()] = msgspec.structs.replace(status, pid=sleeper.pid)
        await house.turn()
        assert house.life.detail == ""
        assert list(house.life.trespasses) == []
    finally:
        sleeper.kill()
        await sleeper.wait()


async def test_the_machine_is_asked_through_its_port() -> None:
    """Ports and kinship come from whoever stands for the machine, so a model can."""

    class Model:
        def free_port(self) -> int:
            return 4711

        def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
            return set(pids)

    house = House(world=Model())
    house.accept(R.TRAINING, replace(order(), phase=OrderPhase.RESERVE))
    await house.turn(3)
    assert (house.said().phase, house.said().endpoint) == (P.READY, "127.0.0.1:4711")
    house.machine.pids[0] = 1
    await house.turn()
    assert [found.pid for found in house.life.trespasses] == [1]


# --- commands ---------------------------------------------------------------------------------


async def test_a_command_of_the_server_runs_beside_everything_else() -> None:
    """A server takes minutes to start; reports and workers do not wait for it."""
    house = House(inference=True)
    gate = asyncio.Event()
    house.machine.gate = gate
    await house.turn(4)
    assert (house.role(), house.machine.commands) == (R.WARMING, ["start"])
    gate.set()
    await house.turn(3)
    assert house.role() == R.SERVING


async def test_leaving_ends_a_command_that_runs_and_lets_go_of_the_machine() -> None:
    """Nothing outlives its block; the next agent asks for the command again."""
    house = House(inference=True)
    house.machine.gate = asyncio.Event()
    await house.turn(2)
    await house.node.close()
    assert house.machine.commands == ["start", "cancelled", "closed"]
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("hook")] == []


async def test_a_command_is_told_its_node_service_and_gpus() -> None:
    """By its environment, because it is run without a shell."""
    house = House(inference=True)
    await house.turn(2)
    assert house.machine.variables == {
        "ARYL_NODE": "n1",
        "ARYL_SERVICE": "chat",
        "ARYL_GPU_UUIDS": "GPU-0,GPU-1",
    }


async def test_a_failed_command_is_in_the_words_of_the_node_and_tried_again() -> None:
    """Whoever looks at the node sees what the operator's command said."""
    house = House(inference=True)
    house.machine.command_errors = ["systemctl exited with 1: no such unit"]
    await house.turn()
    assert house.life.detail == f"{HookKind.START} command: systemctl exited with 1: no such unit"
    await house.turn(5)
    assert house.role() == R.SERVING


def test_a_rendezvous_port_is_one_that_nobody_listens_on() -> None:
    """Two questions in a row need not give the same one."""
    assert 0 < ThisMachine().free_port() < 65536


# --- graces on the way home -------------------------------------------------------------------


async def test_each_worker_keeps_its_own_grace_when_the_node_goes_home() -> None:
    """A short one must not shorten that of the workers after it."""
    house = House(inference=True)
    short, long = order(key(0), gpus=(0,), grace_s=2.0), order(key(1), gpus=(1,), grace_s=25.0)
    await house.lend_with(short, long)
    house.accept(R.SERVING)
    await house.turn()
    assert house.runner.stops == [
        (key(0), StopReason.PREEMPT, 2.0),
        (key(1), StopReason.PREEMPT, 25.0),
    ]


async def test_a_stop_that_is_under_way_is_shortened_when_the_node_must_go_home() -> None:
    """The service has its deadline, whatever grace the coordinator gave before; told once."""
    house = House(inference=True, vacate_grace_s=10.0)
    await house.lend_with(order(grace_s=600.0), until_s=house.clock.now_s() + 40.0)
    house.runner.is_deaf = True
    stop = StopOrder(key=key(), reason=StopReason.RELEASE, grace_s=600.0)
    house.accept(R.ON_LOAN, order(grace_s=600.0), stops=(stop,), is_lent=True)
    await house.turn(2)
    await house.turn(8, after_s=5.0)
    assert house.role() == R.VACATING
    assert house.runner.stops == [
        (key(), StopReason.RELEASE, 600.0),
        (key(), StopReason.RELEASE, 10.0),
    ]


# --- go home ----------------------------------------------------------------------------------


async def test_a_node_whose_agent_is_dead_goes_home_when_its_lease_is_over() -> None:
    """Workers end, the GPUs are seen free, the server starts, and only then it is routed."""
    house = House(inference=True)
    await house.lend_with(order(), until_s=house.clock.now_s() + 20.0)
    house.machine.commands.clear()
    await house.clock.advance(20.0)
    going = asyncio.create_task(go_home(house.node, clock=house.clock))
    await house.until(going.done)
    assert "serving again" in going.result()
    assert house.role() == R.SERVING
    assert house.machine.commands == ["start", "route"]
    assert house.runner.stops == [(key(), StopReason.PREEMPT, 30.0)]


async def test_a_valid_lease_is_left_alone_and_whoever_calls_must_call_again() -> None:
    """Success would end the last resort, and nobody would be left to bring the node home."""
    house = House(inference=True)
    await house.lend_with(until_s=house.clock.now_s() + 20.0)
    going = asyncio.create_task(go_home(house.node, clock=house.clock))
    await house.until(going.done)
    with pytest.raises(Unavailable, match="valid for another"):
        going.result()
    assert house.role() == R.ON_LOAN


async def test_a_drain_whose_lease_was_never_confirmed_comes_home_too() -> None:
    """Agent and coordinator died in the first moments of the loan."""
    house = House(inference=True)
    await house.turn(5)
    house.accept(R.ON_LOAN, is_lent=True)
    await house.turn(6)
    assert (house.role(), house.machine.is_healthy) == (R.DRAINING, False)
    await house.clock.advance(30.0)
    going = asyncio.create_task(go_home(house.node, clock=house.clock))
    await house.until(going.done)
    assert house.role() == R.SERVING
    assert house.machine.is_healthy


@pytest.mark.parametrize("inference", [True, False])
async def test_a_node_at_home_is_left_as_it_is(inference: bool) -> None:
    """The last resort of a loan that ended well finds nothing to do."""
    house = House(inference=inference)
    await house.turn(5)
    commands = list(house.machine.commands)
    assert await go_home(house.node, clock=house.clock) == ""
    assert house.machine.commands == commands


async def test_a_node_that_cannot_get_home_ends_in_quarantine_with_the_reason() -> None:
    """A service is never given a server that does not work."""
    house = House(inference=True, warm_up_timeout_s=20.0)
    await house.lend_with(until_s=house.clock.now_s() + 20.0)
    await house.clock.advance(20.0)
    house.machine.command_errors = ["start exited with 1"] * 1000
    going = asyncio.create_task(go_home(house.node, clock=house.clock))
    await house.until(going.done)
    assert house.role() == R.QUARANTINED
    assert "start exited with 1" in going.result()
