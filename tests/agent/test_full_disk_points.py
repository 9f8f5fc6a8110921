"""A disk that fills up at each point at which a node writes, from a loan to its return: real files
on a small disk, real shims, and the node's own driver."""

from __future__ import annotations

import asyncio
import os
from itertools import product
from pathlib import Path

import pytest
from msgspec import structs

from agent.core.node_lifecycle import Life
from agent.core.state import WorkerState, first_memory
from agent.driver import Node
from agent.storage.ledger import Ledger
from agent.telemetry.machine import ThisMachine
from agent.workers.process_marks import marked
from agent.workers.shim_runner import ShimRunner
from agent.workers.starters import DetachedStarter
from common.clock import SystemClock
from common.messages import DesiredState, WorkerOrder, WorkerPhase
from common.model import NodeRole
from tests.harness.node.full_disk import SmallDisk, small_disk
from tests.harness.node.life import lease, settings
from tests.harness.node.models import ModelMachine
from tests.harness.node.workers import make_order

R, P = NodeRole, WorkerPhase
pytestmark = pytest.mark.slow
PATIENCE_S = 30.0
"""Real time in which a node is home; one that waits for room on its disk never is."""
LOOK_S = 0.1
SCRIPT = "echo begun >> $OUT/began; sleep 600"
BEFORE_SHIM, AFTER_SHIM, LENT = "before the shim", "after the shim", "once lent"
RECORDS = 10
"""Of the ledger, as many as there are until the node is lent."""
AT_ONCE = 12
"""Of the nodes that are played: more would only wait for each other."""
POINTS = [
    *(f"{when} record {number}" for number in range(1, RECORDS + 1) for when in ("at", "after")),
    BEFORE_SHIM,
    AFTER_SHIM,
    LENT,
]


class Lent:
    """One node on a disk of its own that fills up at one point; its agent may crash there.

    is_refilled: others on the machine take each byte that the node frees.
    """

    def __init__(
        self,
        directory: Path,
        disk: SmallDisk,
        point: str,
        *,
        is_crashing: bool,
        is_refilled: bool,
    ) -> None:
        self.directory, self.disk, self.point = directory, disk, point
        self.settings = settings(state_dir=str(disk.path), vacate_grace_s=0.5, step_period_s=LOOK_S)
        self.clock = SystemClock()
        self.machine = ModelMachine(self.clock)
        self.is_full = False
        self.generation = 0
        self.is_crashing = is_crashing
        self.is_refilled = is_refilled
        self._record_count = 0
        self.start_agent()

    def start_agent(self) -> None:
        """An agent on what the disk has."""
        ledger = Ledger(self.disk.path, write=self._write, sync=self._sync)
        boot_id = self.clock.boot_id()
        memory = ledger.load() or first_memory(self.settings, boot_id)
        self.life = Life(
            self.settings, memory, boot_id=boot_id, now_s=self.clock.now_s(),
            is_behind=ledger.is_behind,
        )  # fmt: skip
        self.run_dir = self.disk.path / "workers"
        self.node = Node(
            self.settings, self.life, ledger=ledger, clock=self.clock,
            runner=ShimRunner(
                self.run_dir, clock=self.clock, starter=self, is_root_allowed=True
            ),
            sampler=self.machine, commands=self.machine, machine=ThisMachine(),
        )  # fmt: skip

    def _write(self, fd: int, data: bytes) -> int:
        self._record_count += 1
        self._pass(f"at record {self._record_count}")
        return os.write(fd, data)

    def _sync(self, fd: int) -> None:
        os.fsync(fd)
        self._pass(f"after record {self._record_count}")

    async def start(self, directory: Path, order: WorkerOrder) -> None:
        """As `ShimStarter.start`."""
        self._pass(BEFORE_SHIM)
        await DetachedStarter(self.clock).start(directory, order)
        self._pass(AFTER_SHIM)

    def _pass(self, point: str) -> None:
        if point == self.point:
            self.fill()

    def fill(self) -> None:
        """From now on the disk takes nothing."""
        self.is_full, self.point = True, ""
        self.disk.fill()

    # --- what happens -------------------------------------------------------------------------

    async def accept(self, role: NodeRole, *orders: WorkerOrder) -> None:
        """A newer desired state."""
        self.generation += 1
        desired = DesiredState(
            node="n1", epoch=1, generation=self.generation, role=role, workers=orders,
            lease=lease(ttl_s=600.0) if role == R.ON_LOAN else None,
        )  # fmt: skip
        assert self.life.accept(desired, now_s=self.clock.now_s()).is_accepted
        if self.life.memory.lease is not None:
            until_s = self.clock.now_s() + 600.0
            self.life.renewed(self.life.memory.lease.lease_id, until_s)
        await self.node.save()

    async def turn(self, count: int = 1) -> None:
        """Look and do, so often."""
        for _ in range(count):
            if self.is_full and self.is_refilled:
                self.disk.fill()
            await self.node.sample()
            await self.node.step()
            await self.clock.sleep(LOOK_S)
            if self.is_full and self.is_crashing:
                await self.crash()

    async def until_settled(self, *roles: NodeRole) -> None:
        """Go on until it has one of these roles, and its worker runs, is over or cannot begin."""
        try:
            async with self.clock.timeout(PATIENCE_S):
                while self.role not in roles or not self._is_settled():
                    await self.turn()
        except TimeoutError:
            said = [structs.asdict(held) for held in self.life.workers.held()]
            words = f"not {roles}: {self.role}: {self.life.detail}: {said}"
            raise AssertionError(words) from None

    def _is_settled(self) -> bool:
        held = self.worker()
        if held is None or held.is_over or held.is_started:
            return True
        is_coming = held.is_begun and self.node.runner.has_shim(held.order.key)
        return bool(self.life.ledger_error) and not is_coming

    @property
    def role(self) -> NodeRole:
        return self.life.memory.role

    def worker(self) -> WorkerState | None:
        """The one that it was given."""
        return next(iter(self.life.workers.held()), None)

    def free_disk(self) -> None:
        """From now on the disk takes everything again."""
        self.is_full = False
        self.disk.empty()

    def begun_count(self) -> int:
        """How often the worker began."""
        path = self.directory / "began"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def left(self) -> set[int]:
        """Processes of workers."""
        return {pid for path in self.run_dir.glob("*") for pid in marked(path, os.geteuid())}

    async def lend(self) -> None:
        """From the first start to a loan with a worker, as far as the disk lets it."""
        await self.until_settled(R.SERVING)
        await self.accept(R.ON_LOAN)
        await self.turn()
        if self.life.memory.lease is not None:
            until_s = self.clock.now_s() + 600.0
            self.life.renewed(self.life.memory.lease.lease_id, until_s)
        await self.until_settled(R.ON_LOAN, R.SERVING)
        if self.role == R.ON_LOAN:
            order = make_order("sh", "-c", SCRIPT, env={"OUT": str(self.directory)}, grace_s=0.5)
            await self.accept(R.ON_LOAN, structs.replace(order, endpoint="n1:29500"))
            await self.until_settled(R.ON_LOAN)

    async def crash(self) -> None:
        """The agent ends, whatever it was doing, and another one starts."""
        self.is_crashing = False
        await self.node.close()
        self.start_agent()

    async def close(self) -> None:
        """Leave no process."""
        self.free_disk()
        await self.accept(R.SERVING)
        await self.until_settled(R.SERVING)
        await self.node.close()


async def scenario(tmp_path: Path, point: str, *, is_crashing: bool, is_refilled: bool) -> None:
    """One loan with a disk that fills up at a point."""
    directory = tmp_path / f"{point}-{is_refilled}".replace(" ", "-")
    directory.mkdir()
    with small_disk(directory / "disk", size_bytes=1 << 20) as disk:
        lent = Lent(directory, disk, point, is_crashing=is_crashing, is_refilled=is_refilled)
        await lent.lend()
        if not lent.is_full:
            lent.fill()
        await lent.turn()
        await lent.accept(R.SERVING)
        await lent.until_settled(R.SERVING)
        assert not lent.left()
        began = lent.begun_count()
        assert began <= 1
        worker = lent.worker()
        assert worker is None or worker.is_over
        lent.free_disk()
        await lent.turn(2)
        assert lent.life.ledger_error == ""
        await lent.crash()
        await lent.turn(3)
        await lent.until_settled(R.SERVING)
        assert lent.life.memory.lease is None
        assert lent.begun_count() == began
        assert not lent.left()
        await lent.close()


@pytest.mark.parametrize("is_crashing", [False, True], ids=["same agent", "after a crash"])
async def test_a_node_comes_home_wherever_its_disk_fills_up(
    tmp_path: Path, *, is_crashing: bool
) -> None:
    """No write on the way is waited for, no worker begins twice, and the ledger is true again as
    soon as there is room."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def play(point: str, *, is_refilled: bool) -> None:
        async with turn:
            await scenario(tmp_path, point, is_crashing=is_crashing, is_refilled=is_refilled)

    async with asyncio.TaskGroup() as group:
        for point, is_refilled in product(POINTS, (False, True)):
            group.create_task(play(point, is_refilled=is_refilled), name=point)
