"""`aryl replay`: a journal played again, as it was and under other settings."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from common import streams
from common.bus import connect_nats
from common.clock import SystemClock
from common.errors import ConfigError
from common.model import NatsAccess
from coordinator import plugins
from coordinator.cli.output import Format, OutputOption, fields, put, put_json
from coordinator.cli.render import Column, table
from coordinator.cli.session import Session, say, session
from coordinator.cli.submit import seconds
from coordinator.demo.nats_server import NatsServer
from coordinator.engine.record import Record, decode_record
from coordinator.engine.state.accounting import Durations
from coordinator.plain_text import duration, instant, number, percent
from coordinator.plan.replay import Way, replay
from coordinator.plan.story import Story, check_changes, read
from coordinator.policies.contract.text import counted
from coordinator.service.journal.journal_stream import Journal
from coordinator.service.ports import Lost

LIVE = "live"
Records = list[tuple[int, Record]]
MODELLED = (
    "Submissions, orders of people, loads and faults of nodes come at their real instants. An "
    "order that does not fit its jobs any more changes nothing, and is counted. Nodes and "
    "jobs are simulated, with measured lengths; a job has the work that it really had, and scales "
    "as its profile says. Compare `changed` with `simulated`: how far `simulated` is from "
    "`happened` is the error of the simulation."
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "replay",
        epilog="Example: aryl replay --since 1d --policy tiresias. Journals that have lost their "
        "first records (journal_kept_days) cannot be replayed.",
    )(replay_)


def replay_(
    ctx: typer.Context,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="From here: 2026-11-29T08:00:00Z, or 6h before its end."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Up to here; default: the journal's end.")
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="POLICY", help="Policy to decide by instead.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Another value of a knob, or of a setting [engine]."
        ),
    ] = None,
    journal: Annotated[
        str,
        typer.Option(
            metavar="DIR|live",
            help="Directory of a stopped or copied nats-server store, or the cell's own server.",
        ),
    ] = LIVE,
    output: OutputOption = Format.TABLE,
) -> None:
    """Play a journal again: what happened, and what would have under other settings.

    The first column is what happened. The second is the same time simulated, and says how near a
    simulation is. The third is the same simulation with --policy and --set.
    """
    if output == Format.NAME:
        raise ConfigError("-o name: a replay has no name; leave -o out for its text, or -o json")
    plugins.load()
    changes = _changes(settings or ())
    check_changes(policy, changes)
    records = _live(session(ctx)) if journal == LIVE else _stored(Path(journal), _cell(ctx))
    end_s = records[-1][1].entries[-1].now_s
    story = read(records, since_s=_at_s(since, end_s, 0.0), until_s=_at_s(until, end_s, end_s))
    found = replay(story, policy=policy, changes=changes)
    if output == Format.JSON:
        span = {"began_at_s": story.began_s, "ended_at_s": story.ended_s}
        put_json(
            {
                "replay": {
                    **span,
                    "records": story.records,
                    "differences": story.differences,
                    "columns": [fields(one) for one in found],
                }
            }
        )
        return
    put(session(ctx), _lines(story, found, session(ctx)))


def _changes(texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"--set: {text!r}, expected NAME=VALUE")
        found[name] = value
    return found


def _at_s(text: str | None, end_s: float, default_s: float) -> float:
    """An instant as Unix time; a length counts back from the journal's end."""
    if text is None:
        return default_s
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return end_s - seconds(text, flag="since")
    if found.tzinfo is None:
        raise ConfigError(f"{text!r} has no time zone; write {text}Z for UTC")
    return found.timestamp()


# --- the journal --------------------------------------------------------------------------------


def _cell(ctx: typer.Context) -> str:
    found = ctx.find_root().params.get("cell")
    return str(found) if found else ""


def _live(here: Session) -> Records:
    target = here.target()
    return asyncio.run(
        _read(target.nats_url, target.cell, access=target.access, insecure=target.insecure)
    )


def _stored(directory: Path, cell: str) -> Records:
    """The journal in a nats-server's directory, which stays as it is: a copy of it is served.

    Raises:
        ConfigError: there is no journal, or there are several and --cell names none.
    """
    prefix = streams.journal("x")[:-1]
    stores = sorted(directory.rglob(f"{prefix}*"))
    names = {path.name.removeprefix(prefix) for path in stores}
    if cell:
        names &= {cell}
    if len(names) != 1:
        known = ", ".join(sorted(names)) or "none"
        raise ConfigError(f"{directory}: expected the journal of one cell, found {known}")
    [name] = names
    store = next(path for path in stores if path.name == prefix + name)
    while store.name != "jetstream":
        if store == store.parent:
            raise ConfigError(f"{directory}: {prefix}{name} lies in no directory `jetstream`")
        store = store.parent
    with tempfile.TemporaryDirectory(prefix="aryl-replay-") as copy:
        shutil.copytree(store, Path(copy) / "jetstream" / store.name)
        return asyncio.run(_served(Path(copy), name))


async def _served(directory: Path, cell: str) -> Records:
    server = NatsServer(directory, clock=SystemClock())
    url = await server.start()
    try:
        return await _read(url, cell)
    finally:
        await server.stop()


async def _read(
    url: str, cell: str, *, access: NatsAccess | None = None, insecure: bool = False
) -> Records:
    """All records; nothing is written, and no stream is made.

    Raises:
        ConfigError: there is no record.
        Unavailable: the server does not answer, or does not let this user read the stream.
    """
    clock = SystemClock()
    bus = await connect_nats(
        url, identity="replay", clock=clock, access=access or NatsAccess(), insecure=insecure
    )
    try:
        found: Records = []
        async for one in Journal(bus, cell=cell, writer="replay", clock=clock).read(1):
            if isinstance(one, Lost):
                say(f"journal: records {one.first} to {one.last} are lost")
                continue
            sequence, data = one
            record = decode_record(data, sequence=sequence)
            if record.entries:
                found.append((sequence, record))
    finally:
        await bus.close()
    if not found:
        raise ConfigError(f"cell {cell}: its journal has no record")
    return found


# --- output -------------------------------------------------------------------------------------


def _lines(story: Story, found: Sequence[Way], here: Session) -> Iterator[str]:
    span = duration(story.ended_s - story.began_s)
    yield (
        f"{instant(story.began_s)} to {instant(story.ended_s)} ({span}): "
        f"{counted(story.records, 'record')}, {story.differences} decided otherwise by this version"
    )
    names = [way.name for way in found]
    rows = [(label, [value(way) for way in found]) for label, value in ROWS]
    columns = [
        Column[tuple[str, list[str]]]("", lambda row: row[0]),
        *(
            Column[tuple[str, list[str]]](name.upper(), _at(place), is_number=True)
            for place, name in enumerate(names)
        ),
    ]
    yield from map(str, table(rows, columns, width=here.out.width))
    yield ""
    yield MODELLED


def _at(place: int) -> Callable[[tuple[str, list[str]]], str]:
    return lambda row: row[1][place]


def _of(found: Durations) -> str:
    return f"{duration(found.mean)} / {duration(found.p50)} / {duration(found.p95)}"


ROWS: tuple[tuple[str, Callable[[Way], str]], ...] = (
    ("jobs finished", lambda way: str(way.jobs_finished)),
    ("jobs failed", lambda way: str(way.jobs_failed)),
    ("jobs finished in all", lambda way: str(way.jobs_compared)),
    ("their JCT mean / p50 / p95", lambda way: _of(way.jct_s)),
    ("queueing mean / p50 / p95", lambda way: _of(way.queueing_s)),
    ("preemptions", lambda way: str(way.preemptions)),
    ("lost GPU-seconds", lambda way: number(way.lost_gpu_s)),
    ("loans", lambda way: str(way.loans)),
    ("reclaims", lambda way: str(way.reclaims)),
    ("reclaims late", lambda way: str(way.reclaims_late)),
    ("GPU-hours lent", lambda way: f"{way.lent_gpu_h:.2f}"),
    ("GPU-hours used on loan", lambda way: f"{way.on_loan_held_gpu_h:.2f}"),
    ("orders that did not fit", lambda way: str(way.orders_unfit)),
    ("training GPUs held", lambda way: percent(way.training_gpu_ratio)),
)
