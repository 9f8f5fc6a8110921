"""Inference load from the server's own Prometheus page. Must not know loans, roles or forecasts."""

from __future__ import annotations

import asyncio
import http.client
import math
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from common.clock import Clock
from common.errors import ConfigError, ProtocolError, Unavailable
from common.messages import InferenceReport
from common.model import MAX_INT

MAX_PAGE_BYTES = 4_000_000


class Series(Struct, frozen=True):
    """A sample name, and the labels that it must have to count."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


class Quantity(Struct, frozen=True):
    """The first alias that the page has is taken; `default` if it has none, None: it must.

    A default is right only for series that the engine makes at their first event.
    is_labelled: a page that declares the family and has no sample of it means 0: the engine makes
        each label set at its first event. A page that does not even declare it is another one.
    """

    aliases: tuple[Series, ...]
    default: float | None = None
    is_labelled: bool = False


class Engine(Struct, frozen=True, kw_only=True):
    """Where an engine says what; newer names come first."""

    running: Quantity
    waiting: Quantity
    success: Quantity
    kv_cache: tuple[Series, ...] = ()


def _gauge(*names: str) -> Quantity:
    return Quantity(tuple(Series(name) for name in names))


def _lazy(*names: str) -> Quantity:
    return Quantity(tuple(Series(name) for name in names), default=0.0)


def _counter(*names: str) -> Quantity:
    return Quantity(tuple(Series(name) for name in names), is_labelled=True)


_TRT_LLM_SCHEDULED = Series("nv_trt_llm_request_metrics", (("request_type", "scheduled"),))
_TRT_LLM_KV_CACHE = Series(
    "nv_trt_llm_kv_cache_block_metrics", (("kv_cache_block_type", "fraction"),)
)

ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        running=_gauge("vllm:num_requests_running", "vllm_num_requests_running"),
        waiting=_gauge("vllm:num_requests_waiting", "vllm_num_requests_waiting"),
        success=_counter("vllm:request_success_total", "vllm_request_success_total"),
        kv_cache=(
            Series("vllm:kv_cache_usage_perc"),
            Series("vllm:gpu_cache_usage_perc"),
            Series("vllm_gpu_cache_usage_perc"),
        ),
    ),
    "sglang": Engine(
        running=_gauge("sglang:num_running_reqs", "sglang_num_running_reqs"),
        waiting=_gauge("sglang:num_queue_reqs", "sglang_num_queue_reqs"),
        success=_lazy("sglang:num_requests_total", "sglang_num_requests_total"),
        kv_cache=(Series("sglang:token_usage"), Series("sglang_token_usage")),
    ),
    # Triton itself does not say how many requests run, its LLM backends do. Without one, only the
    # success counter standing still shows that nothing runs.
    "triton": Engine(
        running=Quantity((_TRT_LLM_SCHEDULED, Series("vllm:num_requests_running")), default=0.0),
        waiting=_gauge("nv_inference_pending_request_count"),
        success=_gauge("nv_inference_request_success"),
        kv_cache=(_TRT_LLM_KV_CACHE, Series("vllm:gpu_cache_usage_perc")),
    ),
    # TGI makes its counters at the first request, its gauges when the batcher starts.
    "tgi": Engine(
        running=_gauge("tgi_batch_current_size"),
        waiting=_gauge("tgi_queue_size"),
        success=_lazy("tgi_request_success", "tgi_request_success_total"),
    ),
}
"""Names as of vLLM 0.4 to 0.11, SGLang 0.3 to 0.5, Triton 23.04 and later, TGI 1.4 to 3."""


def engine_named(name: str) -> Engine:
    """The alias table of this engine.

    Raises:
        ConfigError: there is no such engine.
    """
    try:
        return ENGINES[name]
    except KeyError:
        known = ", ".join(sorted(ENGINES))
        raise ConfigError(f"engine: {name!r} is not known, expected one of {known}") from None


def parse_metrics(text: str, engine: str) -> InferenceReport:
    """Load of an inference server from its metrics page.

    Counts are summed over all label sets (models, ranks, finish reasons). The KV cache is that
    of the fullest label set: one full engine delays its requests, whatever room the others have.

    Raises:
        ConfigError: there is no such engine.
        ProtocolError: the page is not one of this engine, names what is missing; or a value or a
            sum is no count, which the coordinator would refuse the whole report for.
    """
    table = engine_named(engine)
    values = _values_by_series(text, _all_series(table))
    for quantity in (table.running, table.waiting, table.success):
        if quantity.is_labelled and not any(series in values for series in quantity.aliases):
            values |= {series: [0.0] for series in quantity.aliases if _declares(text, series)}
    missing = [
        " or ".join(series.name for series in quantity.aliases)
        for quantity in (table.running, table.waiting, table.success)
        if quantity.default is None and not any(series in values for series in quantity.aliases)
    ]
    if missing:
        raise ProtocolError(f"metrics page of {engine}: no {', no '.join(missing)}")
    return InferenceReport(
        running_count=_sum(table.running, values),
        waiting_count=_sum(table.waiting, values),
        success_total=_sum(table.success, values),
        kv_cache_used_ratio=next(
            (max(values[series]) for series in table.kv_cache if series in values), None
        ),
    )


class RefusedError(Unavailable):
    """No process listens where the server should."""


class FetchPage(Protocol):
    """The text at a URL within a time; `fetch_page` with a clock is one."""

    async def __call__(self, url: str, timeout_s: float) -> str:
        """As `fetch_page`."""
        ...


def page_fetcher(clock: Clock) -> FetchPage:
    """What asks real servers."""

    async def fetch(url: str, timeout_s: float) -> str:
        return await fetch_page(url, timeout_s, clock=clock)

    return fetch


async def fetch_page(url: str, timeout_s: float, *, clock: Clock) -> str:
    """The text at an http or https URL; redirects and proxies are not followed.

    Takes at most `timeout_s`, and leaves nothing behind when it is cancelled before.

    Raises:
        ConfigError: no http or https URL.
        RefusedError: no process listens at it.
        Unavailable: no whole answer in time, or not a status of success.
        ProtocolError: more than `MAX_PAGE_BYTES`, or not UTF-8.
    """
    fetch = _Fetch(url, timeout_s)
    try:
        async with clock.timeout(timeout_s):
            data = await asyncio.to_thread(fetch.read)
    except TimeoutError:
        raise Unavailable(f"{url}: no whole answer within {timeout_s:g} s") from None
    finally:
        fetch.abort()
    if len(data) > MAX_PAGE_BYTES:
        raise ProtocolError(f"{url}: more than {MAX_PAGE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"{url}: not UTF-8: {error}") from error


class _Fetch:
    """One request in a thread, which `abort` ends from outside.

    A socket's timeout is of each read: a server that sends a byte a second would hold the thread
    for ever, and a few of them all threads that the agent writes its ledger with.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = checked_url(url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._url = url
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
        self._socket: socket.socket | None = None
        self._is_aborted = False

    def read(self) -> bytes:
        """The body, cut off behind `MAX_PAGE_BYTES`; blocks."""
        try:
            self._connection.connect()
            # The connection forgets its socket as soon as the server says that it will close.
            self._socket = self._connection.sock
            if self._is_aborted:
                raise ConnectionAbortedError("given up")
            self._connection.request("GET", self._target)
            reply = self._connection.getresponse()
            if not 200 <= reply.status < 300:
                raise Unavailable(f"{self._url}: status {reply.status} {reply.reason}")
            data = reply.read(MAX_PAGE_BYTES + 1)
            # http.client does not say so when a size was given, and half a page is a false load.
            if reply.length and len(data) <= MAX_PAGE_BYTES:
                raise Unavailable(f"{self._url}: broke off {reply.length} bytes before its end")
        except ConnectionRefusedError as error:
            raise RefusedError(f"{self._url}: {error}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"{self._url}: {error}") from error
        else:
            return data
        finally:
            self._connection.close()

    def abort(self) -> None:
        """Have `read` end soon; harmless after its end."""
        self._is_aborted = True
        if self._socket is not None:
            with suppress(OSError):
                # Not SSLSocket's own: that would change the object under the thread's hands.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def checked_url(url: str, field: str = "metrics_url") -> SplitResult:
    """The parts of a URL that can be fetched.

    Raises:
        ConfigError: no http or https URL; names the field.
    """
    try:
        parts = urlsplit(url)
        is_fit = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"{field}: {url!r}: {error}") from None
    if not is_fit:
        raise ConfigError(f"{field}: {url!r} is no http or https URL")
    return parts


def _all_series(table: Engine) -> tuple[Series, ...]:
    quantities = (table.running, table.waiting, table.success)
    return (*(series for quantity in quantities for series in quantity.aliases), *table.kv_cache)


def _values_by_series(text: str, wanted: tuple[Series, ...]) -> dict[Series, list[float]]:
    # Only the lines that matter are parsed: a page has thousands of histogram buckets, and the
    # agent has a hundredth of a core.
    names = tuple({series.name for series in wanted})
    lines = [line for line in text.split("\n") if line.startswith(names)]
    values: dict[Series, list[float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                for series in wanted:
                    if sample.name == series.name and _has_labels(sample.labels, series):
                        values.setdefault(series, []).append(float(sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"metrics page: {error}") from error
    for series, found in values.items():
        for value in found:
            _check_count(series, value)
    return values


def _declares(text: str, series: Series) -> bool:
    """Whether a page has the family of a series, with or without a sample of it."""
    # The text format names a counter's family as its samples, OpenMetrics without `_total`.
    families = (series.name, series.name.removesuffix("_total"))
    return any(line.startswith(f"# TYPE {name} ") for line in text.split("\n") for name in families)


def _check_count(series: Series, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= MAX_INT):
        raise ProtocolError(
            f"metrics page: {series.name}: {value:g}, expected a number from 0 to {MAX_INT:g}"
        )


def _has_labels(labels: Mapping[str, str], series: Series) -> bool:
    return all(labels.get(key) == value for key, value in series.labels)


def _sum(quantity: Quantity, values: Mapping[Series, list[float]]) -> float:
    for series in quantity.aliases:
        if series in values:
            total = sum(values[series])
            _check_count(series, total)
            return total
    assert quantity.default is not None, "checked before"
    return quantity.default
