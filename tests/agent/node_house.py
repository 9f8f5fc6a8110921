"""A node without an agent, for tests that call its driver."""

from __future__ import annotations

from common.messages import (
    DesiredState,
    StopOrder,
    WorkerOrder,
    WorkerPhase,
    WorkerReport,
)
from common.model import LeaseId, NodeRole, StopReason, WorkerKey
from tests.agent.agent_house import AgentHouse
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
