"""Checks and starts that hang, stops, a reclaim and the agent's death in any order."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from agent.settings import ServerSettings
from common.clock import Clock
from common.errors import Unavailable
from common.messages import OrderPhase, StopOrder, WorkerOrder, WorkerPhase
from common.model import NodeRole, StopReason, WorkerKey
from tests.agent.bench import key, order
from tests.agent.models import ModelRunner, running
from tests.agent.node_house import House

P, R = WorkerPhase, NodeRole
LIMIT_S = 20.0
OVER = (P.EXITED, P.REFUSED)


class Shims(ModelRunner):
    """Workers whose shims are on their way until a test lets them live, whoever asked for them.

    One that holds its lock is about to run its worker and can only be told; the others find what a
    stop has left in their place, as in `agent.workers.lost`.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.on_their_way: dict[WorkerKey, bool] = {}
        """By key: whether it has its lock."""
        self.told: set[WorkerKey] = set()
        self.births: Counter[WorkerKey] = Counter()
        self._clock = clock

    async def start(self, order: WorkerOrder, *, endpoint: str) -> None:
        await self._call("start", order.key)
        if order.key not in self.known:
            self.on_their_way.setdefault(order.key, False)
        until_s = self._clock.now_s() + LIMIT_S
        while order.key not in self.known:
            if self._clock.now_s() >= until_s:
                raise Unavailable("its shim did not start")
            await self._clock.sleep(0.1)

    async def stop(self, key: WorkerKey, reason: StopReason, grace_s: float) -> None:
        has_lock = self.on_their_way.get(key)
        if has_lock:
            self.told.add(key)
        elif has_lock is not None:
            del self.on_their_way[key]
            self.end(key, reason=reason)
        elif self.is_alive(key):
            await super().stop(key, reason, grace_s)

    async def forget(self, key: WorkerKey) -> None:
        if self.on_their_way.get(key):
            raise Unavailable(f"{key}: cannot be forgotten, its shim lives")
        self.on_their_way.pop(key, None)
        await super().forget(key)

    def lock(self) -> None:
        """Those on their way are too far to be called back."""
        self.on_their_way = dict.fromkeys(self.on_their_way, True)

    def live(self) -> None:
        """Those on their way run their workers; whoever was ordered to stop does so at once."""
        for worker in self.on_their_way:
            self.births[worker] += 1
            self.known[worker] = running(worker)
            if worker in self.told:
                self.end(worker, reason=StopReason.PREEMPT)
        self.on_their_way.clear()

    def is_alive(self, key: WorkerKey) -> bool:
        """Whether it could use its GPUs."""
        return key in self.known and self.known[key].phase not in OVER


class Quiet:
    """A machine on which nobody else computes."""

    def free_port(self) -> int:
        return 4711

    def listening_ports(self) -> frozenset[int]:
        return frozenset()

    def strangers(self, pids: Iterable[int], owners: Iterable[int]) -> set[int]:
        return set()

    def beside_server(self, pids: Iterable[int], server: ServerSettings) -> set[int] | None:
        return set()

    def owner(self, pid: int) -> str:
        return ""


class Play:
    """A lent node, what its coordinator wants, and the moves that change either."""

    def __init__(self) -> None:
        self.house = House(inference=True, world=Quiet())
        self.shims = Shims(self.house.clock)
        self.house.runner = self.house.node.runner = self.shims
        self.shims.stall = self.house.stall
        self.orders: dict[WorkerKey, WorkerOrder] = {}
        self.stops: dict[WorkerKey, StopOrder] = {}
        self.role = R.ON_LOAN
        self.is_hanging = self.has_died = False

    async def move(self, name: str) -> None:
        """One of `MOVES`, then time for a step."""
        await getattr(self, f"_{name}")()
        self.house.machine.pids = {
            int(gpu.removeprefix("GPU-")): 4000
            for worker, one in self.orders.items()
            if self.shims.is_alive(worker)
            for gpu in one.gpu_uuids
        }
        await self.house.turn(after_s=0.25)
        self.check()

    def _tell(self) -> None:
        self.house.accept(
            self.role,
            *(one for one in self.orders.values() if self.role == R.ON_LOAN),
            stops=tuple(self.stops.values()),
            is_lent=self.role == R.ON_LOAN,
        )

    async def _reserve(self) -> None:
        self._order(OrderPhase.RESERVE)

    async def _order_one(self) -> None:
        self._order(OrderPhase.RUN)

    def _order(self, phase: OrderPhase) -> None:
        index = len(self.orders)
        worker = key(job=f"j{index}")
        self.orders[worker] = order(worker, gpus=(index % 2,), phase=phase)
        self._tell()

    async def _run(self) -> None:
        for worker, one in self.orders.items():
            self.orders[worker] = structs.replace(one, phase=OrderPhase.RUN)
        self._tell()

    async def _stop(self) -> None:
        for worker in self.orders:
            if worker not in self.stops:
                self.stops[worker] = StopOrder(key=worker, reason=StopReason.CANCEL, grace_s=1.0)
                break
        self._tell()

    async def _reclaim(self) -> None:
        self.role = R.SERVING
        self._tell()

    async def _hang(self) -> None:
        self.is_hanging = not self.is_hanging
        if self.is_hanging:
            self.house.stall.begin("check")
        else:
            self.house.stall.end()

    async def _lock(self) -> None:
        self.shims.lock()

    async def _live(self) -> None:
        self.shims.live()

    async def _wait(self) -> None:
        await self.house.turn()

    async def _die(self) -> None:
        before, self.has_died = self.house, True
        await before.node.close()
        self.house = House(inference=True, world=Quiet(), before=before)
        if self.is_hanging:
            self.house.stall.begin("check")

    def check(self) -> None:
        """What holds after every step."""
        shims, node = self.shims, self.house
        assert max(shims.births.values(), default=0) <= 1
        alive = [worker for worker in self.orders if shims.is_alive(worker)]
        if self.role == R.SERVING:
            assert node.role() != R.ON_LOAN
        if self.has_died:  # what a dead agent began may show itself a step late
            return
        used = Counter(gpu for worker in alive for gpu in self.orders[worker].gpu_uuids)
        assert max(used.values(), default=0) <= 1
        over = {said.key for said in node.life.workers.reports() if said.phase in OVER}
        assert not over & {*alive, *shims.on_their_way}
        if node.role() in (R.WARMING, R.SERVING):
            assert not (alive or shims.on_their_way)

    async def finish(self) -> None:
        """Everything gets on, and everything that was ordered is stopped."""
        if self.is_hanging:
            await self._hang()
        self.shims.lock()
        await self._live()
        for worker in self.orders:
            self.stops.setdefault(
                worker, StopOrder(key=worker, reason=StopReason.CANCEL, grace_s=1.0)
            )
        self._tell()
        for _ in range(4):
            await self.move("live")
        for _ in range(4):
            await self.move("wait")
        assert not [worker for worker in self.orders if self.shims.is_alive(worker)]
        said = {one.key: one.phase for one in self.house.life.workers.reports()}
        assert all(said.get(worker, P.EXITED) in OVER for worker in self.orders)
        assert self.house.role() == (R.SERVING if self.role == R.SERVING else R.ON_LOAN)
        await self.house.node.close()


OFTEN = ("order_one", "order_one", "order_one", "stop", "stop", "lock", "live", "wait", "wait")
MOVES = ("reserve", "run", "reclaim", "hang", "die", *OFTEN)


@settings(max_examples=400, deadline=None)
@given(moves=st.lists(st.sampled_from(MOVES), min_size=6, max_size=24))
def test_no_order_of_events_leaves_a_worker_that_nobody_holds(moves: list[str]) -> None:
    """At most one process per worker, one worker per GPU, none where a server is, none forgotten,
    and a node that is wanted back has turned home with its next step."""

    async def play() -> None:
        played = Play()
        await played.house.lend_with()
        for name in moves:
            await played.move(name)
        await played.finish()

    asyncio.run(play())
