"""`aryl-agent --check --probe`: fetches every metrics page of a node once and shows the result."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from agent.settings import AgentSettings
from agent.telemetry.engine_page_parser import Count, Reading
from agent.telemetry.page_fetch import page_fetcher
from agent.telemetry.pages import ServerPage
from common.clock import Clock
from common.errors import ArylError

MAX_SERIES_SHOWN = 20
"""Series of one count in the text; JSON has them all."""


class ProbedCount(Struct, frozen=True, kw_only=True):
    """A series or path, the samples of the page that match, and their result.

    None: the page has none.

    dropped: matching samples that are no count.
    """

    series: str
    value: float | None
    matched: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


class ProbedPage(Struct, frozen=True, kw_only=True):
    """One server's page.

    page: its URL without query, or the program that was run.
    status: `read`, or why it was not.
    engine: the engine whose names it uses.
    problem: why it gives no load; empty where it does.
    rate: requests a second; None, as one look at a counter gives no rate.
    """

    node: str
    page: str
    status: str
    is_understood: bool
    engine: str = ""
    problem: str = ""
    running: float | None = None
    waiting: float | None = None
    succeeded: float | None = None
    kv_cache_used_ratio: float | None = None
    rate: float | None = None
    counts: dict[str, tuple[ProbedCount, ...]] = {}


async def probe(settings: Iterable[AgentSettings], clock: Clock) -> list[ProbedPage]:
    """Probe every page of these nodes; a failing page is part of the result, and no error."""
    fetch = page_fetcher(clock)
    asked = [
        _probe_one(one.node, ServerPage(instance, fetch=fetch, clock=clock), one.collect_deadline_s)
        for one in settings
        if one.server is not None
        for instance in one.server.all_instances()
    ]
    return list(await asyncio.gather(*asked))


async def _probe_one(node: str, page: ServerPage, timeout_s: float) -> ProbedPage:
    try:
        text = await page.text(timeout_s)
    except ArylError as error:
        return ProbedPage(node=node, page=page.where, status=str(error), is_understood=False)
    try:
        reading = page.understood(text)
    except ArylError as error:
        return ProbedPage(
            node=node, page=page.where, status="read", is_understood=False, problem=str(error)
        )
    problem = reading.problem()
    return ProbedPage(
        node=node,
        page=page.where,
        status="read",
        is_understood=not problem,
        engine=reading.dialect,
        problem=problem,
        running=reading.running.value,
        waiting=reading.waiting.value,
        succeeded=reading.succeeded.value,
        kv_cache_used_ratio=reading.kv_cache.value,
        counts=_counts(reading),
    )


def _counts(reading: Reading) -> dict[str, tuple[ProbedCount, ...]]:
    quantities = (*reading.quantities, reading.kv_cache)
    return {one.name: tuple(map(_count, one.counts)) for one in quantities}


def _count(count: Count) -> ProbedCount:
    bad = {id(sample) for sample in count.dropped}
    return ProbedCount(
        series=count.name,
        value=count.value,
        matched=tuple(sample.text for sample in count.samples if id(sample) not in bad),
        dropped=tuple(sample.text for sample in count.dropped),
    )


def as_json(pages: Sequence[ProbedPage]) -> str:
    """A list with an object a page."""
    return msgspec.json.format(msgspec.json.encode(pages), indent=2).decode()


def as_text(pages: Sequence[ProbedPage]) -> str:
    """For people: each page with its series, their values and their result."""
    if not pages:
        return "no page to probe: no inference server in these settings"
    return "\n".join(line for page in pages for line in _lines(page))


def _lines(page: ProbedPage) -> Iterable[str]:
    yield f"{page.node}: {page.page}"
    yield f"  status     {page.status}"
    if page.engine:
        yield f"  names of   {page.engine}"
    for name, counts in page.counts.items():
        for count in counts:
            if not count.matched and not count.dropped and count.value is not None:
                continue  # nothing on the page, and nothing missing
            value = "not on the page" if count.value is None else f"{count.value:g}"
            yield f"  {name:<10} {count.series} = {value if not count.dropped else _partly(count)}"
            yield from (f"    counted  {text}" for text in count.matched[:MAX_SERIES_SHOWN])
            if len(count.matched) > MAX_SERIES_SHOWN:
                yield f"    and {len(count.matched) - MAX_SERIES_SHOWN} more"
            yield from (f"    dropped  {text}: is no count" for text in count.dropped)
    if page.is_understood:
        yield (
            f"  load       {page.running:g} running, {page.waiting:g} waiting,"
            f" {page.succeeded:g} succeeded; requests per second unknown after a single reading"
        )
    else:
        yield f"  load       unknown{f': {page.problem}' if page.problem else ''}"


def _partly(count: ProbedCount) -> str:
    return "unknown" if count.value is None else f"{count.value:g} without the dropped values"
