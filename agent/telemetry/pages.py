"""The metrics page of each server on a node: how to fetch it, and the load of all servers."""

from __future__ import annotations

from collections.abc import Sequence

from agent.settings import Instance
from agent.telemetry.engine_page_parser import PageReader, Reading
from agent.telemetry.metrics_command import output_of
from agent.telemetry.page_fetch import FetchPage, shown
from common.clock import Clock
from common.errors import ProtocolError
from common.messages import InferenceReport


class ServerPage:
    """One server's own page, over HTTP or from a command."""

    def __init__(self, instance: Instance, *, fetch: FetchPage, clock: Clock) -> None:
        """Make the page.

        Raises:
            ConfigError: the engine is unknown.
        """
        metrics = instance.metrics
        self._reader = PageReader.of(instance.engine, metrics)
        self._instance = instance
        self._command = () if metrics is None else metrics.command
        self._fetch = fetch
        self._clock = clock
        self.where = self._command[0] if self._command else shown(instance.metrics_url)
        """The target without any secret: for a command its program, as its arguments may hold
        one."""

    async def text(self, timeout_s: float) -> str:
        """The text of the page.

        Raises:
            ArylError: nothing in time, or nothing readable.
        """
        if self._command:
            return await output_of(self._command, clock=self._clock, timeout_s=timeout_s)
        instance = self._instance
        return await self._fetch(instance.metrics_url, timeout_s, instance.access)

    def understood(self, text: str) -> Reading:
        """The content of a text.

        Raises:
            ProtocolError: it is no page.
        """
        return self._reader.read(text)

    async def read(self, timeout_s: float) -> Reading:
        """Read a page that gives a load.

        Raises:
            ArylError: it cannot be fetched, or gives no load; names the server.
        """
        text = await self.text(timeout_s)
        try:
            reading = self.understood(text)
            reading.load()
        except ProtocolError as error:
            raise ProtocolError(f"{self.where}: {error}") from None
        return reading


def can_tell(instance: Instance) -> bool:
    """True if this server has a page or command that reports a load."""
    return bool(instance.metrics_url or (instance.metrics and instance.metrics.command))


def in_all(loads: Sequence[InferenceReport]) -> InferenceReport:
    """The load of all servers together; the KV cache ratio is that of the fullest."""
    if len(loads) == 1:
        return loads[0]
    caches = [one.kv_cache_used_ratio for one in loads if one.kv_cache_used_ratio is not None]
    return InferenceReport(
        running_count=sum(one.running_count for one in loads),
        waiting_count=sum(one.waiting_count for one in loads),
        success_total=sum(one.success_total for one in loads),
        kv_cache_used_ratio=max(caches, default=None),
    )
