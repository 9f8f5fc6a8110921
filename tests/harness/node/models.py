"""What an agent stands on, in memory: ledger, workers, machine, last resort. Knows no agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from agent.core.state import Memory, Refusal
from agent.gpu.known_gpus import GPU_COLLECTOR
from agent.telemetry.sample import Sample
from agent.workers.runner import WorkerStatus
from common.clock import Clock
from common.errors import ConfigError, Unavailable
from common.messages import (
    CollectorReport,
    GpuHealth,
    GpuReport,
    InferenceReport,
    WorkerOrder,
    WorkerPhase,
)
from common.model import StopReason, WorkerKey
from tests.harness.fakes import FakeClock
from tests.harness.node.life import page, two_gpus


class Stall:
    """Places at which nobody gets on: what is awaited there never ends, and nothing else waits."""

    def __init__(self) -> None:
        self._gates: dict[str, asyncio.Event] = {}

    def begin(self, place: str) -> None:
        """Whoever comes there from now on waits."""
        self._gates[place] = asyncio.Event()

    def end(self) -> None:
        """Everybody gets on."""
        for gate in self._gates.values():
            gate.set()
        self._gates.clear()

    async def at(self, place: str, job: str = "") -> None:
        """Pass this place; that of one job alone is "PLACE of JOB"."""
        for name in (place, f"{place} of {job}"):
            if name in self._gates:
                await self._gates[name].wait()


class MemoryLedger:
    """`LedgerPort` in memory: what a new agent would find on disk."""

    def __init__(self, saved: bytes = b"") -> None:
        self.saved = saved
        self.stall = Stall()
        self.is_full = False

    def load(self) -> Memory | None:
        return msgspec.msgpack.decode(self.saved, type=Memory) if self.saved else None

    async def save(self, memory: Memory) -> None:
        await self.stall.at("ledger")
        if self.is_full:
            raise Unavailable("ledger: no space left on device")
        self.saved = msgspec.msgpack.encode(memory)

    def close(self) -> None:
        pass


class ModelRunner:
    """`WorkerRunner` whose workers run until they are stopped or a test ends them."""

    def __init__(self) -> None:
        self.known: dict[WorkerKey, WorkerStatus] = {}
        self.shims: set[WorkerKey] = set()
        """Of which a shim is at work, whatever is known."""
        self.kept_logs: dict[WorkerKey, bytes] = {}
        self.calls: list[tuple[str, WorkerKey]] = []
        self.stops: list[tuple[WorkerKey, StopReason, float]] = []
        self.contacts_s: list[float] = []
        self.refusal: Refusal | None = None
        self.is_deaf = False
        """While set, workers do not end when they are told to."""
        self.watch: Callable[[str, WorkerKey], None] = lambda _name, _key: None
        """Called before each call that acts."""
        self.failures: list[Exception] = []
        """Raised by the next calls that act, one each."""
        self.stall = Stall()

    async def _call(self, name: str, key: WorkerKey) -> None:
        self.watch(name, key)
        self.calls.append((name, key))
        if self.failures:
            raise self.failures.pop(0)
        await self.stall.at(name, key.job_id)

    async def start(self, order: WorkerOrder, *, endpoint: str) -> None:
        await self._call("start", order.key)
        self.known.setdefault(order.key, running(order.key))

    async def stop(self, key: WorkerKey, reason: StopReason, grace_s: float) -> None:
        await self._call("stop", key)
        self.stops.append((key, reason, grace_s))
        if key in self.known and not self.is_deaf:
            self.end(key, exit_code=-15, reason=reason)

    async def resize(self, key: WorkerKey, worker_count: int) -> None:
        await self._call("resize", key)

    async def pause(self, key: WorkerKey, *, is_suspended: bool) -> None:
        await self._call("suspend" if is_suspended else "resume", key)
        phase = WorkerPhase.SUSPENDED if is_suspended else WorkerPhase.RUNNING
        self.known[key] = msgspec.structs.replace(self.known[key], phase=phase)

    def contacted(self, at_s: float) -> None:
        self.contacts_s.append(at_s)

    async def statuses(self, started: Collection[WorkerKey] = ()) -> tuple[WorkerStatus, ...]:
        await self.stall.at("statuses")
        return tuple(self.known[key] for key in sorted(self.known))

    async def forget(self, key: WorkerKey) -> None:
        await self._call("forget", key)
        self.known.pop(key, None)

    async def log_tail(self, key: WorkerKey, max_bytes: int) -> bytes:
        if "/" in key.job_id:
            raise ConfigError(f"key: {key}, expected a token and two counts")
        if key not in self.kept_logs:
            raise Unavailable("it never ran here")
        return self.kept_logs[key][-max_bytes:]

    def has_shim(self, key: WorkerKey) -> bool:
        return key in self.shims

    async def leaving(self, keys: Collection[WorkerKey]) -> frozenset[WorkerKey]:
        return frozenset(keys) & self.shims

    async def adopt(self) -> tuple[WorkerKey, ...]:
        return tuple(self.known)

    async def check_reserve(self, order: WorkerOrder) -> Refusal | None:
        await self._call("check", order.key)
        return self.refusal

    def end(self, key: WorkerKey, *, exit_code: int = 0, reason: StopReason | None = None) -> None:
        """A worker exits."""
        self.known[key] = WorkerStatus(
            key=key, phase=WorkerPhase.EXITED, pid=0, exit_code=exit_code, stop_reason=reason
        )


def running(key: WorkerKey, pid: int = 4000) -> WorkerStatus:
    """A worker that runs."""
    return WorkerStatus(key=key, phase=WorkerPhase.RUNNING, pid=pid)


class ModelMachine:
    """`Sampler` and `Commands`: two GPUs and an inference server that obeys its commands."""

    def __init__(self, clock: Clock) -> None:
        self.is_healthy = False
        self.health = GpuHealth.OK
        self.is_blind = False
        """While set, the GPUs do not answer."""
        self.reading_error = ""
        """What the collector of GPUs could not read."""
        self.lost_indices: tuple[int, ...] = ()
        """GPUs that NVML says are lost and cannot name."""
        self.has_no_gpus = False
        """While set, NVML answers that there are no GPUs."""
        self.pids: dict[int, int] = {}
        """GPU processes, by the index of their GPU."""
        self.xids: tuple[int, ...] = ()
        """What the next look finds at the first GPU, and no later one."""
        self.requests = 0.0
        self.commands: list[str] = []
        self.variables: dict[str, str] = {}
        """What the last command was told."""
        self.gate: asyncio.Event | None = None
        """Commands end when it is set."""
        self.left_behind = ""
        """Who does not end of a command that is ended; empty: all do."""
        self.stall = Stall()
        self.command_errors: list[str] = []
        """What the next commands say, one each; then they succeed."""
        self._clock = clock

    async def sample(self) -> Sample:
        await self.stall.at("sample")
        return Sample(
            began_at_s=self._clock.now_s(),
            gpus=None if self.is_blind or self.has_no_gpus else self.gpus(),
            lost_indices=self.lost_indices,
            inference=self._page(),
            is_healthy=self.is_healthy,
            collectors=(self._collector(),),
        )

    def _collector(self) -> CollectorReport:
        error = "NVML does not answer" if self.is_blind else self.reading_error
        return CollectorReport(
            name=GPU_COLLECTOR, is_success=not error, duration_s=0.0, error=error
        )

    def _page(self) -> InferenceReport | None:
        return page(running=self.requests) if self.is_healthy else None

    def gpus(self) -> tuple[GpuReport, ...]:
        xids, self.xids = self.xids, ()
        first, *others = two_gpus(self.pids, health=self.health)
        return (msgspec.structs.replace(first, xids=xids), *others)

    async def close(self) -> None:
        self.commands.append("closed")

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, variables: Mapping[str, str]
    ) -> str:
        self.commands.append(argv[0])
        self.variables = dict(variables)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError as ended:
            self.commands.append("cancelled")
            if self.left_behind:
                ended.add_note(self.left_behind)
            raise
        error = self.command_errors.pop(0) if self.command_errors else ""
        if not error and argv[0] in ("start", "stop"):
            self.is_healthy = argv[0] == "start"
        return error


class ModelLastResort:
    """`LastResort` that keeps when it fires; a test moves the time."""

    def __init__(self, clock: FakeClock) -> None:
        self.fires_at_s: float | None = None
        self.arm_count = 0
        self.failures: list[Exception] = []
        self.stall = Stall()
        self.fired_count = 0
        self._clock = clock

    def is_armed(self) -> bool:
        """Whether it would still fire."""
        return self.fires_at_s is not None and self._clock.now_s() < self.fires_at_s

    async def arm(self, after_s: float) -> None:
        await self.stall.at("arm")
        self.arm_count += 1
        if self.failures:
            raise self.failures.pop(0)
        self._count_if_fired()
        self.fires_at_s = self._clock.now_s() + after_s

    async def disarm(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self._count_if_fired()
        self.fires_at_s = None

    def _count_if_fired(self) -> None:
        self.fired_count += self.fires_at_s is not None and not self.is_armed()
