"""The collectors: what each measures, and that none of them can stop a report."""

from __future__ import annotations

import asyncio
import os
import sys

import psutil
import pytest
from msgspec import structs

from agent.gpu.reader import GpuReader, ReaderProcess
from agent.settings import Instance, InstanceSettings
from agent.telemetry.collectors import (
    MAX_ERROR_CHARS,
    Collected,
    CostCollector,
    HostCollector,
    InferenceCollector,
    Part,
    build_collectors,
    collect_all,
)
from agent.telemetry.page_fetch import MAX_PAGE_BYTES, page_fetcher
from common.clock import SystemClock
from common.errors import ConfigError, Unavailable
from common.messages import CollectorReport, HostReport
from tests.harness.fake_clock import FakeClock
from tests.harness.node.life import SERVER
from tests.harness.node.page_server import LIMIT_S, PageServer, make_pages
from tests.tables import each_row

DEADLINE_S = 5.0
GIB = 1 << 30
FETCH = page_fetcher(SystemClock())


pages = pytest.fixture(make_pages)


class Failing:
    """A collector with a defect."""

    name = "failing"

    async def collect(self) -> Part:
        raise ZeroDivisionError("x" * 10_000)


class Stuck:
    """A collector that never answers."""

    name = "stuck"

    async def collect(self) -> Part:
        await asyncio.Event().wait()
        raise AssertionError


def instances(*urls: str, engine: str = "vllm") -> tuple[Instance, ...]:
    """A server for each page."""
    pages = tuple(InstanceSettings(health_url=url, metrics_url=url) for url in urls)
    return structs.replace(SERVER, engine=engine, instances=pages).all_instances()


async def collect_page(url: str, *, deadline_s: float = DEADLINE_S) -> Collected:
    """One round of a host and an inference collector on this page."""
    inference = InferenceCollector(
        instances(url), timeout_s=deadline_s, fetch=FETCH, clock=SystemClock()
    )
    return await collect_all((HostCollector(), inference), SystemClock(), deadline_s)


def fared(collected: Collected, name: str) -> CollectorReport:
    """How a collector did."""
    [report] = [report for report in collected.collectors if report.name == name]
    return report


# --- all together ------------------------------------------------------------------------------


async def test_one_that_fails_or_hangs_takes_nothing_from_the_others() -> None:
    """A round ends at its deadline with what there is; each failure is told in bounded words."""
    clock = FakeClock()
    round_ = asyncio.create_task(
        collect_all((Failing(), Stuck(), HostCollector()), clock, DEADLINE_S)
    )
    await clock.advance(DEADLINE_S)
    collected = await round_
    assert isinstance(collected.host, HostReport)
    assert [report.is_success for report in collected.collectors] == [False, False, True]
    assert len(fared(collected, "failing").error) == MAX_ERROR_CHARS
    assert "5 s" in fared(collected, "stuck").error
    assert fared(collected, "stuck").duration_s == DEADLINE_S


async def test_a_node_has_one_collector_per_thing_and_a_page_only_with_a_server() -> None:
    """Training nodes have no inference collector: nothing there can fail."""

    async def start() -> ReaderProcess:
        raise OSError("no child in this test")

    clock = SystemClock()
    reader = GpuReader(start, clock)
    names = [collector.name for collector in build_collectors(reader, clock, fetch=FETCH)]
    assert names == ["gpu", "host", "cost"]
    more = build_collectors(
        reader, clock, fetch=FETCH, instances=instances("http://127.0.0.1:1/metrics")
    )
    assert [collector.name for collector in more] == [*names, "inference"]


# --- the host ----------------------------------------------------------------------------------


async def test_the_host_is_this_machine() -> None:
    """CPUs and memory are the ones that the kernel tells of."""
    host = (await HostCollector().collect()).host
    assert host is not None
    assert host.cpu_count == os.cpu_count()
    assert host.memory_total_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < host.memory_used_bytes < host.memory_total_bytes
    assert 0.0 <= host.cpu_busy_ratio <= 1.0


class Cpus:
    """Busy and total seconds of all CPUs, as the test says."""

    def __init__(self) -> None:
        self.busy_s, self.total_s = 100.0, 1000.0

    def __call__(self) -> tuple[float, float]:
        return self.busy_s, self.total_s

    def spend(self, busy_s: float, idle_s: float) -> None:
        self.busy_s += busy_s
        self.total_s += busy_s + idle_s


async def busy_ratio(collector: HostCollector) -> float:
    host = (await collector.collect()).host
    assert host is not None
    return host.cpu_busy_ratio


async def test_the_busy_share_is_since_this_collectors_own_last_look() -> None:
    """Two nodes in one process look one after the other; each has its whole period."""
    cpus = Cpus()
    first, second = HostCollector(cpus), HostCollector(cpus)
    cpus.spend(busy_s=3.0, idle_s=1.0)
    assert await busy_ratio(first) == 0.75
    cpus.spend(busy_s=0.0, idle_s=2.0)
    assert await busy_ratio(second) == 0.5
    assert await busy_ratio(first) == 0.0


async def test_two_looks_within_a_tick_say_the_same() -> None:
    """No time has passed for the kernel: the last share stands, and nothing is divided by zero."""
    cpus = Cpus()
    collector = HostCollector(cpus)
    assert await busy_ratio(collector) == 0.0
    cpus.spend(busy_s=1.0, idle_s=1.0)
    assert await busy_ratio(collector) == 0.5
    assert await busy_ratio(collector) == 0.5


async def test_counters_that_go_back_make_no_impossible_share() -> None:
    """The kernel's idle time may shrink by a little; a ratio stays one."""
    cpus = Cpus()
    collector = HostCollector(cpus)
    cpus.spend(busy_s=2.0, idle_s=-1.0)
    assert await busy_ratio(collector) == 1.0


# --- the inference server's page ---------------------------------------------------------------


async def test_the_page_of_a_server_is_its_load(pages: PageServer) -> None:
    """Fetched over HTTP, parsed, summed over label sets."""
    collected = await collect_page(f"{pages.url}/vllm")
    assert fared(collected, "inference").is_success, fared(collected, "inference").error
    assert collected.inference is not None
    assert collected.inference.running_count == 3
    assert collected.inference.waiting_count == 2
    assert collected.inference.success_total == 42


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("html", "no vllm:num_requests_running"),
        ("missing", "no vllm:num_requests_waiting"),
        ("renamed", "no vllm:num_requests_running"),
        ("denied", "status 401"),
        ("nonsense", "two"),
        ("absurd", "1e308"),
        ("binary", "UTF-8"),
        ("huge", str(MAX_PAGE_BYTES)),
        ("broken", "broke off"),
        ("error", "status 500"),
        ("garbage", "garbage"),
    ],
)
async def test_a_page_that_is_none_is_named_and_says_no_load(
    pages: PageServer, path: str, said: str
) -> None:
    """No load is better than a wrong one; the error says what is wrong, the rest is reported."""
    collected = await collect_page(f"{pages.url}/{path}")
    assert collected.inference is None
    assert said in fared(collected, "inference").error
    assert collected.host is not None
    assert fared(collected, "host").is_success


async def test_a_server_that_is_gone_is_named_by_its_address() -> None:
    """Nothing listens there: the operator reads which URL was asked."""
    collected = await collect_page("http://127.0.0.1:1/metrics")
    assert "http://127.0.0.1:1/metrics" in fared(collected, "inference").error


@pytest.mark.parametrize("path", ["silent", "drip"])
async def test_a_hanging_page_costs_its_deadline_and_leaves_nothing(
    pages: PageServer, path: str
) -> None:
    """Whether silent or a byte at a time: the round ends, and so does the connection."""
    collected = await collect_page(f"{pages.url}/{path}", deadline_s=0.3)
    assert "0.3 s" in fared(collected, "inference").error
    assert collected.host is not None
    await pages.until_alone()
    assert pages.asked == [f"/{path}"]


async def test_pages_that_hang_never_take_the_threads_of_the_ledger(pages: PageServer) -> None:
    """Many rounds on a server that drips: asyncio's few threads, which the agent's disk writes
    share, are free again after each."""
    for _ in range(3):
        hanging = [FETCH(f"{pages.url}/drip", 0.2) for _ in range(20)]
        async with asyncio.timeout(LIMIT_S):
            said = await asyncio.gather(*hanging, return_exceptions=True)
        assert all(isinstance(error, Unavailable) for error in said), said
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.to_thread(lambda: "free") == "free"


async def test_a_server_that_should_not_be_up_is_not_asked(pages: PageServer) -> None:
    """On a lent node its absence is no failure, and no news either."""
    collector = InferenceCollector(
        instances(f"{pages.url}/vllm"),
        timeout_s=DEADLINE_S,
        fetch=FETCH,
        clock=SystemClock(),
        is_wanted=lambda: False,
    )
    assert await collector.collect() == Part()
    assert pages.asked == []


@each_row("url", ["http:///metrics", "http://node:port/metrics", "http://node:0/", "http://[::1/"])
async def test_a_url_that_names_no_server_is_the_operators_mistake(url: str) -> None:
    """The error names the field and what stands there."""
    with pytest.raises(ConfigError, match="metrics_url"):
        await FETCH(url, DEADLINE_S)


def test_an_unknown_engine_is_refused_before_anything_runs() -> None:
    """A typing error in the settings shows at the start, not once a second for ever."""
    with pytest.raises(ConfigError, match="vlm"):
        InferenceCollector(
            instances("http://127.0.0.1:1/metrics", engine="vlm"),
            timeout_s=1.0,
            fetch=FETCH,
            clock=SystemClock(),
        )


# --- own cost ----------------------------------------------------------------------------------


BURN = (
    "import sys, time\n"
    "while time.process_time() < 0.2: pass\n"
    "print('burnt', flush=True)\n"
    "sys.stdin.read()\n"
)


class Child:
    """A real process that stands for the NVML child: it has used 0.2 s of a CPU, and waits."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid

    @classmethod
    async def start(cls) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", "-c", BURN),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        await process.stdout.readline()
        return cls(process)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


async def test_own_cost_is_the_agent_and_its_child() -> None:
    """Both counted, in seconds of CPU and resident bytes; the child's share can be told apart."""
    child = await Child.start()
    try:
        collector = CostCollector(lambda: child.pid)
        cost = (await collector.collect()).cost
        assert cost is not None
        times = psutil.Process().cpu_times()
        assert collector.child_cost.cpu_s >= 0.15
        own_s = cost.cpu_s - collector.child_cost.cpu_s
        assert 0.0 < own_s <= times.user + times.system + 1e-6  # a sum of floats
        assert cost.rss_bytes > collector.child_cost.rss_bytes > 1 << 20
        assert cost.rss_bytes < GIB
    finally:
        await child.end()


async def test_own_cost_never_goes_back() -> None:
    """A child that ended keeps what it cost, and the next one's comes on top of it."""
    pids: list[int | None] = []
    collector = CostCollector(lambda: pids[-1])
    pids.append(None)
    await collector.collect()
    assert collector.child_cost.cpu_s == 0.0
    first = await Child.start()
    pids.append(first.pid)
    try:
        await collector.collect()
        cpu_s = collector.child_cost.cpu_s
    finally:
        await first.end()
    for pid in (first.pid, None):
        pids.append(pid)
        await collector.collect()
        assert collector.child_cost.cpu_s == cpu_s
        assert collector.child_cost.rss_bytes == 0
    second = await Child.start()
    pids.append(second.pid)
    try:
        await collector.collect()
        assert collector.child_cost.cpu_s >= cpu_s + 0.15
    finally:
        await second.end()
