"""A coordinator on fakes, on virtual time, agents that speak its messages, and steps on them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from common import subjects
from common.api import (
    ApiError,
    Description,
    Done,
    EndedJobs,
    Events,
    History,
    Jobs,
    Loans,
    Logs,
    Nodes,
    Services,
    Status,
    Submit,
    Submitted,
    Tenants,
    Usage,
)
from common.errors import Unavailable
from common.messages import Message, encode
from common.model import (
    CheckpointSpec,
    JobId,
    JobSpec,
    JobState,
    Mode,
    NodeName,
    NodeRole,
    Pool,
)
from coordinator.engine.record import Record, decode_record
from coordinator.engine.state.events import LeaderStarted
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Decision
from coordinator.service.api.handlers import Api
from coordinator.service.coordinator import Coordinator
from coordinator.service.history.keeper import IndexKeeper
from coordinator.service.leadership.lease import KeyEntry
from coordinator.service.settings import CoordinatorSettings
from coordinator.sim.run.cluster import NodeSpec
from tests.harness import builders
from tests.harness.cluster.agents import CELL as CELL
from tests.harness.cluster.agents import CHAT as CHAT
from tests.harness.cluster.agents import LEASE_TTL_S as LEASE_TTL_S
from tests.harness.cluster.agents import LIMIT_S, T, meanwhile
from tests.harness.cluster.agents import Agent as Agent
from tests.harness.fakes import (
    Dropped,
    FakeBus,
    FakeClock,
    FakeNetwork,
    MemoryHistory,
    MemoryJournal,
    MemoryKey,
    MemorySnapshots,
    memory_lease,
)

Reply = (
    ApiError
    | Submitted
    | Done
    | Jobs
    | Nodes
    | Services
    | Loans
    | Events
    | Logs
    | Description
    | Status
    | Tenants
    | History
    | Usage
    | EndedJobs
)


def make_settings(
    *,
    mode: Mode = Mode.ACT,
    policy: str = "aryl",
    snapshot_records: int = 500,
    leader_ttl_s: float = 8.0,
) -> CoordinatorSettings:
    """Short periods, one service."""
    service = ServiceSettings(
        name=CHAT,
        capacity_per_node=10.0,
        mode=mode,
        min_serving=0,
        headroom_ratio=0.0,
        hold_off_s=0.0,
        unknown_load_s=20.0,
        max_grace_s=5.0,
        device_free_p99_s=1.0,
        warm_up_p99_s=3.0,
        reclaim_deadline_s=60.0,
    )
    return CoordinatorSettings(
        cell=CELL,
        nats_url="nats://127.0.0.1:4222",
        pass_period_s=10.0,
        load_period_s=2.0,
        progress_period_s=2.0,
        lost_after_s=5.0,
        snapshot_records=snapshot_records,
        leader_ttl_s=leader_ttl_s,
        engine=EngineSettings(
            policy=policy,
            services=(service,),
            lease_ttl_s=LEASE_TTL_S,
            loan_period_s=5.0,
            min_runtime_s=0.0,
            resize_cooldown_s=1.0,
            gang_ready_timeout_s=20.0,
        ),
    )


def make_spec(
    name: str = "j",
    *,
    workers: tuple[int, int] = (1, 1),
    gpus_per_worker: int = 8,
    time_limit_s: float | None = None,
) -> JobSpec:
    """A job that can be started."""
    return builders.make_spec(
        name,
        workers=workers,
        gpus_per_worker=gpus_per_worker,
        expected_runtime_s=600.0,
        checkpoint=CheckpointSpec(grace_s=5.0),
        time_limit_s=time_limit_s,
    )


async def at_once(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function in this thread: virtual time waits for no other one."""
    return function(*args, **options)


class CutKey:
    """The lease's key as one coordinator reaches it."""

    def __init__(self, key: MemoryKey) -> None:
        self.is_cut = False
        self._key = key

    async def get(self) -> KeyEntry | None:
        """The value and its revision."""
        self._check()
        return await self._key.get()

    async def put(self, value: bytes, *, last_revision: int) -> int | None:
        """Compare-and-set."""
        self._check()
        return await self._key.put(value, last_revision=last_revision)

    def _check(self) -> None:
        if self.is_cut:
            raise Unavailable("key: cut off")


class Leader:
    """One coordinator process."""

    def __init__(
        self,
        cell: Cell,
        name: str,
        settings: CoordinatorSettings,
        journal: MemoryJournal | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.bus = FakeBus(cell.network, clock=cell.clock)
        self.journal = journal or MemoryJournal(cell.records)
        self.key = CutKey(cell.key)
        self.coordinator = Coordinator(
            settings,
            holder=name,
            clock=cell.clock,
            bus=self.bus,
            journal=self.journal,
            snapshots=cell.snapshots,
            lease=memory_lease(
                self.key,
                clock=cell.clock,
                ttl_s=settings.leader_ttl_s,
                margin_s=settings.leader_margin_s,
            ),
            progress=progress,
            history=cell.history.another(),
            index=cell.index(name),
        )
        self.task = asyncio.create_task(
            self.coordinator.run(Api(self.coordinator).serve), name=name
        )

    async def crash(self) -> None:
        """SIGKILL: nothing leaves it any more, nothing is given up in good order."""
        self.bus.cut()
        self.journal.is_down = True
        self.key.is_cut = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.bus.close()


class Cell:
    """Nodes `t*` and `i*` of 8 GPUs, and the coordinators that a test starts."""

    def __init__(self, *, training: int = 1, inference: int = 0, has_index: bool = False) -> None:
        self.clock = FakeClock()
        self._files = tempfile.TemporaryDirectory() if has_index else None
        self.network = FakeNetwork()
        self.records: list[bytes] = []
        self.snapshots = MemorySnapshots()
        self.history = MemoryHistory()
        self.key = MemoryKey()
        self.leaders: list[Leader] = []
        self.caller = FakeBus(self.network, clock=self.clock)
        names = [(f"t{n}", Pool.TRAINING) for n in range(training)]
        names += [(f"i{n}", Pool.INFERENCE) for n in range(inference)]
        self.agents = {
            name: Agent(
                self.network,
                self.clock,
                NodeSpec(
                    name=NodeName(name),
                    home_pool=pool,
                    gpu_type="H100",
                    gpus=8,
                    service=CHAT if pool == Pool.INFERENCE else None,
                ),
            )
            for name, pool in names
        }

    async def __aenter__(self) -> Cell:
        for agent in self.agents.values():
            await agent.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for leader in self.leaders:
            await leader.crash()
        for agent in self.agents.values():
            await agent.stop()
        if self._files is not None:
            self._files.cleanup()

    def index(self, name: str) -> IndexKeeper | None:
        """The index of the history of one coordinator, if this cell has any."""
        if self._files is None:
            return None
        path = Path(self._files.name) / name
        return IndexKeeper(self.history.another(), path=path, clock=self.clock, in_thread=at_once)

    def launch(
        self,
        name: str = "one",
        settings: CoordinatorSettings | None = None,
        journal: MemoryJournal | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> Leader:
        """Start a coordinator; it may have to stand by. progress: as of `Coordinator`."""
        leader = Leader(self, name, settings or make_settings(), journal, progress)
        self.leaders.append(leader)
        return leader

    async def lead(
        self,
        name: str = "one",
        settings: CoordinatorSettings | None = None,
        journal: MemoryJournal | None = None,
    ) -> Coordinator:
        """Start a coordinator and wait until it leads and has heard every agent that speaks."""
        coordinator = self.launch(name, settings, journal).coordinator

        def is_ready() -> bool:
            nodes = coordinator.engine.state.nodes
            heard = {name for name, node in nodes.items() if node.contact.is_heard}
            wanted = {a.name for a in self.agents.values() if not a.is_silent}
            return coordinator.is_leading and wanted <= heard and self.is_obeyed(coordinator)

        await self.clock.advance_until(is_ready, limit_s=LIMIT_S)
        return coordinator

    def is_obeyed(self, coordinator: Coordinator) -> bool:
        """Whether every node acts on the newest desired state."""
        nodes = coordinator.engine.state.nodes
        return all(
            agent.is_silent or agent.generation == nodes[agent.name].desired.generation
            for agent in self.agents.values()
        )

    async def meanwhile(self, awaitable: Awaitable[T]) -> T:
        """The result of a request while virtual time passes."""
        return await meanwhile(self.clock, awaitable)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let virtual time pass until something is so."""
        await self.clock.advance_until(condition, limit_s=LIMIT_S)

    def request(self, request: Message, *, tenant: str = "team") -> tuple[str, bytes]:
        """(subject, bytes) of an API request."""
        verb = str(request.__struct_config__.tag)
        return subjects.api(CELL, tenant, "ann", verb), encode(request)

    @staticmethod
    def reply(data: bytes) -> Reply:
        """Any answer of the API."""
        reply: Reply = msgspec.msgpack.decode(data, type=Reply)
        return reply

    async def ask_raw(
        self, verb: str, data: bytes, *, tenant: str = "team", user: str = "ann"
    ) -> Reply:
        """Any bytes as an API request; the answer, whatever it is."""
        subject = subjects.api(CELL, tenant, user, verb)
        answer = await self.meanwhile(self.caller.request(subject, data, timeout_s=30.0))
        return self.reply(answer)

    async def ask(self, request: Message, *, tenant: str = "team", user: str = "ann") -> Reply:
        """One API request and its answer."""
        verb = str(request.__struct_config__.tag)
        return await self.ask_raw(verb, encode(request), tenant=tenant, user=user)

    def journal(self) -> Sequence[tuple[int, Record]]:
        """All records, decoded."""
        return [
            (sequence, decode_record(data, sequence=sequence))
            for sequence, data in enumerate(self.records, start=1)
            if not isinstance(data, Dropped)
        ]


async def submit(cell: Cell, name: str = "j", **spec: object) -> JobId:
    """A job in the journal."""
    reply = await cell.ask(Submit(spec=make_spec(name, **spec), request_id=f"r-{name}"))  # type: ignore[arg-type]
    assert isinstance(reply, Submitted)
    return JobId(reply.job_id)


def job(coordinator: Coordinator, job_id: JobId) -> JobEntry:
    """A job as the engine sees it."""
    return coordinator.engine.state.jobs[job_id]


async def running(cell: Cell, coordinator: Coordinator, name: str = "j", **spec: object) -> JobId:
    """A job whose workers compute, as the engine knows too."""
    job_id = await submit(cell, name, **spec)

    def is_running() -> bool:
        found = [key for a in cell.agents.values() for key in a.running() if key.job_id == job_id]
        entry = job(coordinator, job_id)
        return entry.state == JobState.RUNNING and len(found) == len(entry.workers)

    await cell.until(is_running)
    return job_id


async def on_loan(cell: Cell, coordinator: Coordinator) -> list[JobId]:
    """One job more than there are training nodes: they run, one of them on a lent node."""
    training = [name for name in cell.agents if name.startswith("t")]
    ids = [await running(cell, coordinator, f"f{number}") for number in range(len(training) + 1)]
    nodes = coordinator.engine.state.nodes.values()
    assert NodeRole.ON_LOAN in {node.role for node in nodes}
    return ids


def decisions(cell: Cell) -> list[Decision]:
    """All that the journal holds."""
    return [decision for _, record in cell.journal() for decision in record.decisions]


def starts(cell: Cell) -> list[LeaderStarted]:
    """Every takeover that the journal holds."""
    return [
        entry.event
        for _, record in cell.journal()
        for entry in record.entries
        if isinstance(entry.event, LeaderStarted)
    ]
