"""`aryl top`: the cell, live. It leaves the terminal as it found it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from common.api import (
    Describe,
    Description,
    GetStatus,
    Jobs,
    ListJobs,
    ListLoans,
    ListNodes,
    Loans,
    NodeRow,
    Nodes,
    Status,
)
from common.errors import ConfigError
from common.model import JobState
from coordinator import plain_text
from coordinator.cli import columns, render
from coordinator.cli.output import Format, OutputOption, fields, put, put_json
from coordinator.cli.reconnect import Patience
from coordinator.cli.render import STYLES, Column
from coordinator.cli.session import Session, session
from coordinator.cli.top_sheets import View as View
from coordinator.client import Client

REFRESH_S = 1.0
_BAR_WIDTH = 10


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("top")(top)


def top(
    ctx: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show the cell live: what waits and comes home, jobs, nodes and loans. `q` or Ctrl-C exits.

    Tab turns to the next sheet, `/` filters, `s` sorts, Enter explains a row.

    With -o json each frame is one object on its own line, one a second.
    """
    if output == Format.NAME:
        raise ConfigError("-o name: a frame has several names; aryl node list -o name, or -o json")
    here = session(ctx)

    async def work(client: Client) -> None:
        if output == Format.JSON:
            await _frames(here, client, is_one=once)
        elif once or not here.out.is_terminal:
            view = await look(client, here.clock.wall_s())
            out = here.out
            put(here, frame(view, width=out.width, is_ascii=is_ascii(out)))
        else:
            await _live(here, client)

    with contextlib.suppress(KeyboardInterrupt):
        here.run(work)


async def look(client: Client, now_s: float) -> View:
    """Ask for everything that a frame shows; errors as `Client.ask`."""
    return View(
        status=await client.ask(GetStatus(), Status),
        nodes=await client.ask(ListNodes(), Nodes),
        loans=await client.ask(ListLoans(is_live_only=True), Loans),
        jobs=await client.ask(ListJobs(is_live_only=True), Jobs),
        now_s=now_s,
    )


async def _frames(here: Session, client: Client, *, is_one: bool) -> None:
    """Frames for programs until the end; a coordinator that went away is waited for."""
    patience = Patience()
    while True:
        view = await patience.answer(look(client, here.clock.wall_s()))
        if view is not None:
            put_json(
                {
                    "at_s": view.now_s,
                    "status": fields(view.status),
                    "nodes": fields(view.nodes.rows),
                    "loans": fields(view.loans.rows),
                    "jobs": fields(view.jobs.rows),
                }
            )
            if is_one:
                return
        await here.clock.sleep(REFRESH_S)


def is_ascii(out: Console) -> bool:
    """Whether the terminal cannot show block characters."""
    return not out.encoding.lower().startswith("utf")


def frame(
    view: View, *, width: int, height: int | None = None, is_ascii: bool = False
) -> list[Text]:
    """One frame in lines.

    Args:
        width: none is longer, in cells.
        height: no more lines than this; None shows every row.
    """
    heads = [_pair(name, value, width) for name, value in plain_text.glance(view.status)[:7]]
    rows = plain_text.in_order(plain_text.without_tasks(view.jobs.rows, waiting_only=True))
    running = [row for row in rows if row.state != JobState.PENDING]
    waiting = [row for row in rows if row.state == JobState.PENDING]
    jobs = columns.jobs(view.now_s)
    loans = columns.loans(view.now_s)
    sections = [
        list(render.table(view.nodes.rows, nodes(is_ascii=is_ascii), width=width)),
        list(render.table(view.loans.rows, loans, width=width)),
        list(render.table(running, jobs, width=width)),
        list(render.table(waiting, jobs, width=width)),
    ]
    titles = ["nodes", "loans", "running", "queue"]
    room = None if height is None else height - len(heads) - 2 * len(sections)
    limits = shares([len(section) for section in sections], room)
    lines = list(heads)
    for title, section, limit in zip(titles, sections, limits, strict=True):
        lines += [Text(), Text(f"{title} ({len(section) - 1})", style="bold cyan")]
        lines += _cut(section, limit)
    return lines if height is None else lines[:height]


def nodes(*, is_ascii: bool) -> list[Column[NodeRow]]:
    """A node's GPUs as bars: how many jobs hold, and how busy they all are."""
    return [
        Column("NODE", lambda r: r.node),
        Column("ROLE", plain_text.role),
        Column("HELD", lambda r: _bar(r.gpus_held / r.gpus if r.gpus else None, is_ascii)),
        Column("GPUS", lambda r: f"{r.gpus_held}/{r.gpus}", is_number=True),
        Column("BUSY", lambda r: _bar(r.gpu_busy_ratio, is_ascii)),
        Column("%", lambda r: plain_text.percent(r.gpu_busy_ratio), is_number=True),
        Column("HEARD", plain_text.heard, is_number=True, rank=1),
        Column("JOBS", lambda r: ",".join(r.jobs), is_elastic=True, rank=2),
    ]


def shares(wanted: list[int], room: int | None) -> list[int]:
    """Lines for each section: small ones whole, the large ones share the rest."""
    if room is None or sum(wanted) <= room:
        return wanted
    limits = [0] * len(wanted)
    left = max(room, 0)
    smallest_first = sorted(enumerate(wanted), key=lambda item: (item[1], item[0]))
    for sharers, (place, section) in zip(range(len(wanted), 0, -1), smallest_first, strict=True):
        limits[place] = min(section, left // sharers)
        left -= limits[place]
    return limits


def _cut(section: list[Text], limit: int) -> Iterable[Text]:
    if len(section) <= limit:
        return section
    kept = section[: max(0, limit - 1)]
    return [*kept, Text(f"... {len(section) - len(kept)} more", style="dim")] if limit else []


def _bar(ratio: float | None, is_ascii: bool) -> str:
    return render.bar(ratio, _BAR_WIDTH, is_ascii=is_ascii)


def _pair(name: str, value: str, width: int) -> Text:
    line = Text(f"{name:<10}", style="bold")
    line.append(value, style=STYLES["failed"] if "FROZEN" in value else "not bold")
    line.truncate(width, overflow="ellipsis")
    return line


async def _live(here: Session, client: Client) -> None:
    """The screen until `q`."""
    from coordinator.cli.top_screen import Top  # only here: textual takes long to import

    async def ask() -> View:
        return await look(client, here.clock.wall_s())

    async def explain(kind: str, name: str) -> Description:
        return await client.ask(Describe(kind=kind, name=name), Description)

    await Top(ask, explain, clock=here.clock).run_async()
