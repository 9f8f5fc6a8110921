"""The collectors of an agent, each with a deadline, so that a report is always on time.

Each collector fills its own part of a report.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import psutil
from msgspec import Struct

from agent.gpu.kernel_log import KernelLog
from agent.gpu.known_gpus import GPU_COLLECTOR
from agent.gpu.mps import without_servers
from agent.gpu.reader import GpuReader
from agent.gpu.xids import GpuXids
from agent.settings import Instance
from agent.telemetry.page_fetch import FetchPage
from agent.telemetry.pages import ServerPage, in_all
from common.clock import Clock
from common.messages import CollectorReport, CostReport, GpuReport, HostReport, InferenceReport
from common.procfs import first_bytes, stat_fields

T = TypeVar("T")

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LINES_BYTES = 512
"""The first line of /proc/stat, and the first three of /proc/meminfo, are shorter."""
MAX_ERROR_CHARS = 500
"""An error goes into each report: it must not carry a page with it."""


class Part(Struct, frozen=True, kw_only=True):
    """A collector's share of a node report; `error` where it could not measure all of it.

    is_page_whole: no value of the server's pages that makes up a load was dropped.
    """

    gpus: tuple[GpuReport, ...] | None = None
    lost_indices: tuple[int, ...] = ()
    host: HostReport | None = None
    inference: InferenceReport | None = None
    is_page_whole: bool = True
    cost: CostReport | None = None
    error: str = ""


class Collector(Protocol):
    """Measures one thing. Any exception from `collect` is a failure of this collector alone."""

    @property
    def name(self) -> str: ...

    async def collect(self) -> Part: ...


class Collected(Struct, frozen=True, kw_only=True):
    """All parts of one round, and the result of each collector."""

    gpus: tuple[GpuReport, ...] = ()
    lost_indices: tuple[int, ...] = ()
    """GPUs that are lost and that the reading cannot name."""
    host: HostReport | None = None
    inference: InferenceReport | None = None
    is_page_whole: bool = True
    """See `Part`."""
    cost: CostReport | None = None
    collectors: tuple[CollectorReport, ...] = ()


async def collect_all(
    collectors: Sequence[Collector], clock: Clock, deadline_s: float
) -> Collected:
    """Run every collector at once; takes at most `deadline_s`, whatever one of them does.

    A failure or a timeout becomes a `CollectorReport`, never an exception.
    """
    results = await asyncio.gather(
        *(_collect_one(collector, clock, deadline_s) for collector in collectors)
    )
    parts = [part for part, _ in results]
    return Collected(
        gpus=_first(part.gpus for part in parts) or (),
        lost_indices=tuple(index for part in parts for index in part.lost_indices),
        host=_first(part.host for part in parts),
        inference=_first(part.inference for part in parts),
        is_page_whole=all(part.is_page_whole for part in parts),
        cost=_first(part.cost for part in parts),
        collectors=tuple(report for _, report in results),
    )


async def _collect_one(
    collector: Collector, clock: Clock, deadline_s: float
) -> tuple[Part, CollectorReport]:
    start_s = clock.now_s()
    part = Part()
    try:
        async with clock.timeout(deadline_s):
            part = await collector.collect()
        error = part.error
    except TimeoutError:
        error = f"no answer within {deadline_s:g} s"
    except Exception as failure:  # a collector's defect is data too: the heartbeat must go on
        error = str(failure) or repr(failure)
    return part, CollectorReport(
        name=collector.name,
        is_success=not error,
        duration_s=max(0.0, clock.now_s() - start_s),
        error=error[:MAX_ERROR_CHARS],
    )


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


class GpuCollector:
    """GPUs, through the NVML child; their XIDs from the kernel log too, where it is read.

    Processes that only compute for others are left out: see `agent.gpu.mps`.
    """

    name = GPU_COLLECTOR

    def __init__(
        self, reader: GpuReader, clock: Clock, kernel_log: KernelLog | None = None
    ) -> None:
        self._reader = reader
        self._clock = clock
        self._kernel_log = kernel_log
        self._xids = GpuXids()

    async def collect(self) -> Part:
        """All GPUs; the error names what could not be read."""
        gpus = without_servers(await self._reader.sample())
        if self._kernel_log is not None:
            lines = self._kernel_log.take()
            addresses = self._reader.uuid_by_pci_address
            gpus = self._xids.add(gpus, lines, addresses, self._clock.now_s())
        reader = self._reader
        return Part(gpus=gpus, lost_indices=reader.lost_indices, error=reader.error)


class KernelLogCollector:
    """The state of the kernel log's follower; its XIDs go to the GPUs."""

    name = "kernel_log"

    def __init__(self, kernel_log: KernelLog) -> None:
        self._kernel_log = kernel_log

    async def collect(self) -> Part:
        """No measurement of its own, only an error while the log is not read."""
        self._kernel_log.start()
        return Part(error=self._kernel_log.error)


def _cpu_s() -> tuple[float, float]:
    """Busy and total seconds of all CPUs together, by the first line of /proc/stat (proc(5)).

    psutil reads and parses the line of each CPU, and all of /proc/meminfo, each second.
    """
    words = first_bytes("/proc/stat", LINES_BYTES).partition(b"\n")[0].split()
    # The eight from `user` to `steal`: Linux counts the time of guests in that of users as well.
    ticks = [int(word) for word in words[1:9]]
    total_s = sum(ticks) / TICKS_PER_S
    return total_s - sum(ticks[3:5]) / TICKS_PER_S, total_s


def _memory_bytes() -> tuple[int, int]:
    """Memory of the machine, and what of it is in use, by the first lines of /proc/meminfo."""
    words = first_bytes("/proc/meminfo", LINES_BYTES).split()
    if words[0:7:6] == [b"MemTotal:", b"MemAvailable:"]:
        total, available = 1024 * int(words[1]), 1024 * int(words[7])
        if available <= total:
            return total, total - available
    memory = psutil.virtual_memory()  # an old kernel, or a container that shows another's values
    return memory.total, memory.total - memory.available


class HostCollector:
    """CPU and memory of the machine.

    psutil's own percentage counts from any caller's last question in this process. Several nodes in
    one process would shorten each other's interval to nothing, so this collector keeps its own.

    Args:
        busy_and_total_s: seconds that all CPUs together were busy, and the total of their time.
    """

    name = "host"

    def __init__(self, busy_and_total_s: Callable[[], tuple[float, float]] = _cpu_s) -> None:
        self._cpu_count = psutil.cpu_count() or 1
        self._busy_and_total_s = busy_and_total_s
        self._last_s = busy_and_total_s()
        self._busy_ratio = 0.0

    async def collect(self) -> Part:
        """CPU busy share since this collector's last call."""
        busy_s, total_s = self._busy_and_total_s()
        last_busy_s, last_total_s = self._last_s
        if total_s > last_total_s:  # two samples within one kernel tick show nothing new
            ratio = (busy_s - last_busy_s) / (total_s - last_total_s)
            self._busy_ratio = min(1.0, max(0.0, ratio))
            self._last_s = busy_s, total_s
        total_bytes, used_bytes = _memory_bytes()
        return Part(
            host=HostReport(
                cpu_count=self._cpu_count,
                cpu_busy_ratio=self._busy_ratio,
                memory_total_bytes=total_bytes,
                memory_used_bytes=used_bytes,
            )
        )


class InferenceCollector:
    """Load of this node's inference server, or of all of them together."""

    name = "inference"

    def __init__(
        self,
        instances: Sequence[Instance],
        *,
        timeout_s: float,
        fetch: FetchPage,
        clock: Clock,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make a collector.

        is_wanted: whether the server should be up: a stopped server is no failure.

        Raises:
            ConfigError: the engine is unknown.
        """
        self._pages = [ServerPage(one, fetch=fetch, clock=clock) for one in instances]
        self._timeout_s = timeout_s
        self._is_wanted = is_wanted

    async def collect(self) -> Part:
        """The servers' own numbers, or nothing while they should not be up.

        One unreadable page makes the load of all unknown: a sum without it is too low.
        """
        if not self._is_wanted():
            return Part()
        readings = await asyncio.gather(*(page.read(self._timeout_s) for page in self._pages))
        warnings = [reading.warning() for reading in readings]
        return Part(
            inference=in_all([reading.load() for reading in readings]),
            is_page_whole=not any(warnings),
            error="; ".join(filter(None, warnings)),
        )


class CostCollector:
    """Aryl's own cost on the node: the agent and its children, by their kind."""

    name = "cost"

    def __init__(self, *child_pids: Callable[[], int | None]) -> None:
        self._pid = os.getpid()
        self._children = [_ChildCost(child_pid) for child_pid in child_pids]

    @property
    def child_cost(self) -> CostReport:
        """The share of the children, ended ones included, as of the last `collect`."""
        return _sum(child.cost for child in self._children)

    async def collect(self) -> Part:
        """All of them together since the start of the agent."""
        for child in self._children:
            child.look()
        own = _cost_of(self._pid)
        return Part(cost=None if own is None else _sum((own, self.child_cost)))


class _ChildCost:
    """The cost of one kind of child, ended children included."""

    def __init__(self, child_pid: Callable[[], int | None]) -> None:
        self.cost = CostReport(cpu_s=0.0, rss_bytes=0)
        self._child_pid = child_pid
        self._pid: int | None = None
        self._ended_children_cpu_s = 0.0

    def look(self) -> None:
        """Read the cost so far."""
        self.cost = self._measure()

    def _measure(self) -> CostReport:
        pid = self._child_pid()
        if self._pid != pid:
            # The last sample of a child that has ended is its total: a counter must not go back.
            self._ended_children_cpu_s = self.cost.cpu_s
            self._pid = pid
        cost = None if pid is None else _cost_of(pid)
        if cost is None:
            return CostReport(cpu_s=self.cost.cpu_s, rss_bytes=0)
        return CostReport(cpu_s=self._ended_children_cpu_s + cost.cpu_s, rss_bytes=cost.rss_bytes)


def _sum(costs: Iterable[CostReport]) -> CostReport:
    known = tuple(costs)
    return CostReport(
        cpu_s=sum(cost.cpu_s for cost in known), rss_bytes=sum(cost.rss_bytes for cost in known)
    )


def _cost_of(pid: int) -> CostReport | None:
    """The cost of a process so far, by one line (proc(5)); None when it is gone."""
    fields = stat_fields(pid)
    if not fields:
        return None
    user_ticks, system_ticks, rss_pages = int(fields[11]), int(fields[12]), int(fields[21])
    return CostReport(
        cpu_s=(user_ticks + system_ticks) / TICKS_PER_S, rss_bytes=rss_pages * PAGE_BYTES
    )


def build_collectors(
    reader: GpuReader,
    clock: Clock,
    *,
    fetch: FetchPage,
    kernel_log: KernelLog | None = None,
    instances: Sequence[Instance] = (),
    timeout_s: float = 1.0,
    is_server_wanted: Callable[[], bool] = lambda: True,
) -> tuple[Collector, ...]:
    """Every collector of a node.

    The inference server's only where a server reports its load, the kernel log's where it is read.

    Raises:
        ConfigError: the engine is unknown.
    """
    collectors: list[Collector] = [
        GpuCollector(reader, clock, kernel_log),
        HostCollector(),
        CostCollector(
            lambda: reader.child_pid, lambda: None if kernel_log is None else kernel_log.child_pid
        ),
    ]
    if kernel_log is not None:
        collectors.append(KernelLogCollector(kernel_log))
    if instances:
        collectors.append(
            InferenceCollector(
                instances,
                timeout_s=timeout_s,
                fetch=fetch,
                clock=clock,
                is_wanted=is_server_wanted,
            )
        )
    return tuple(collectors)
