"""Takes one sample of the machine: every collector, and the server's health check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from agent.core.gpu_handover import are_unused
from agent.gpu.child_process import child_starter
from agent.gpu.fake.fleet import load_fleet
from agent.gpu.kernel_log import KernelLog, fake_opener, find_kernel_log
from agent.gpu.reader import GpuReader
from agent.settings import AgentSettings, Instance, KernelLogChoice
from agent.telemetry.collectors import build_collectors, collect_all
from agent.telemetry.page_fetch import (
    FetchPage,
    RefusedError,
    page_fetcher,
)
from agent.telemetry.pages import can_tell
from common.clock import Clock
from common.errors import ArylError
from common.key_file import KeyUnreadableError
from common.messages import (
    CollectorReport,
    CostReport,
    GpuReport,
    HostReport,
    InferenceReport,
)


class Sample(Struct, frozen=True, kw_only=True):
    """One sample of the machine; None where a part could not be seen."""

    began_at_s: float
    gpus: tuple[GpuReport, ...] | None = None
    lost_indices: tuple[int, ...] = ()
    """GPUs that NVML reports as lost and that the sample cannot name; the ledger may."""
    host: HostReport | None = None
    inference: InferenceReport | None = None
    is_page_whole: bool = True
    """No value of the server's pages that makes up a load was dropped."""
    is_healthy: bool = False
    cost: CostReport | None = None
    collectors: tuple[CollectorReport, ...] = ()


class Sampler(Protocol):
    """Samples the machine; never raises and always ends in time."""

    async def sample(self) -> Sample:
        """Take one sample."""
        ...

    async def close(self) -> None:
        """Release all resources."""
        ...


NO_SERVER = InferenceReport(running_count=0.0, waiting_count=0.0, success_total=0.0)
"""The load of a missing server: its port refuses, and its GPUs are empty."""


class NodeSampler:
    """`Sampler` over this machine.

    Args:
        reader, kernel_log: closed with this sampler.
        is_server_wanted: without it, an inference server that was stopped on purpose is not asked
            for its load.
        is_health_wanted: nor for its health, except where it should be gone and may not be.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        clock: Clock,
        reader: GpuReader,
        fetch: FetchPage,
        is_server_wanted: Callable[[], bool],
        is_health_wanted: Callable[[], bool] | None = None,
        kernel_log: KernelLog | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._reader = reader
        self._kernel_log = kernel_log
        self._fetch = fetch
        self._is_server_wanted = is_server_wanted
        self._is_health_wanted = is_health_wanted or is_server_wanted
        self._instances = () if settings.server is None else settings.server.all_instances()
        can_all_tell = all(map(can_tell, self._instances))
        self._collectors = build_collectors(
            reader,
            clock,
            fetch=fetch,
            kernel_log=kernel_log,
            instances=self._instances if can_all_tell else (),
            timeout_s=settings.collect_deadline_s,
            is_server_wanted=is_server_wanted,
        )

    async def sample(self) -> Sample:
        """Take one sample; takes at most the collectors' deadline.

        An unreadable page shows nothing of the server's requests, and a late health check shows no
        more. Only a server that is gone has none: a server that ends frees its port before its last
        requests, but its GPUs after them.
        """
        began_at_s = self._clock.now_s()
        deadline_s = self._settings.collect_deadline_s
        collected, (is_healthy, is_refused) = await asyncio.gather(
            collect_all(self._collectors, self._clock, deadline_s), self._health()
        )
        inference = collected.inference
        if inference is None and is_refused and self._is_server_wanted():
            ratio = self._settings.device_free_memory_ratio
            if are_unused(collected.gpus, free_memory_ratio=ratio):
                inference = NO_SERVER
        return Sample(
            began_at_s=began_at_s,
            gpus=collected.gpus or None,
            lost_indices=collected.lost_indices,
            host=collected.host,
            inference=inference,
            is_page_whole=collected.is_page_whole,
            is_healthy=is_healthy,
            cost=collected.cost,
            collectors=collected.collectors,
        )

    async def _health(self) -> tuple[bool, bool]:
        """Check that every server answers its health check, and whether each port refuses."""
        if not self._instances or not self._is_health_wanted():
            return False, False
        seen = await asyncio.gather(*map(self._health_of, self._instances))
        return all(is_healthy for is_healthy, _ in seen), all(is_refused for _, is_refused in seen)

    async def _health_of(self, instance: Instance) -> tuple[bool, bool]:
        deadline_s = self._settings.collect_deadline_s
        url = instance.health_url
        try:
            async with self._clock.timeout(deadline_s):
                try:
                    await self._fetch(url, deadline_s, instance.access)
                except KeyUnreadableError:  # a return has no credentials; most pages need none
                    await self._fetch(url, deadline_s)
        except RefusedError:
            return False, True
        except (ArylError, TimeoutError):
            return False, False
        return True, False

    async def close(self) -> None:
        """End the sampler's children."""
        if self._kernel_log is not None:
            await self._kernel_log.close()
        await self._reader.close()


def make_sampler(
    settings: AgentSettings,
    *,
    clock: Clock,
    fake_nvml: Path | None,
    is_server_wanted: Callable[[], bool],
    is_health_wanted: Callable[[], bool],
) -> NodeSampler:
    """The sampler of a real machine, or of one whose GPUs a file describes.

    Raises:
        ConfigError: the file is invalid, or the engine is unknown.
    """
    start = child_starter(settings.node, now_s=clock.now_s, fake_fleet=fake_nvml)
    reader = GpuReader(start, clock, deadline_s=settings.collect_deadline_s * 0.75)
    return NodeSampler(
        settings,
        clock=clock,
        reader=reader,
        fetch=page_fetcher(clock),
        is_server_wanted=is_server_wanted,
        is_health_wanted=is_health_wanted,
        kernel_log=_kernel_log(settings, clock, fake_nvml),
    )


def _kernel_log(settings: AgentSettings, clock: Clock, fake_nvml: Path | None) -> KernelLog | None:
    """The machine's kernel log, or that of its fake GPUs: the real one does not mention those."""
    if fake_nvml is None:
        open_log = find_kernel_log(settings.kernel_log, clock)
    elif settings.kernel_log != KernelLogChoice.OFF and load_fleet(fake_nvml).has_kernel_log:
        open_log = fake_opener(clock, fake_nvml)
    else:
        open_log = None
    return None if open_log is None else KernelLog(open_log, clock)
