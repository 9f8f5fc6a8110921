"""`aryl history`: what happened, by job, node, tenant, person, service, kind and time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import typer
from msgspec import structs

from common.api import GetHistory, History
from common.history import ORDERS, HistoryLine, OrderRecord, StoryKind
from coordinator.cli.output import (
    Format,
    NoHeadersOption,
    OutputOption,
    QuietOption,
    Show,
    fields,
    put_json,
    put_rows,
)
from coordinator.cli.render import Column
from coordinator.cli.session import Session, say, session
from coordinator.cli.time_range import SinceOption, UntilOption, instant_of, local
from coordinator.client import Client

PAGE_LINES = 1000

LimitOption = Annotated[
    int, typer.Option(min=0, metavar="N", help="The newest N lines; 0: all, as they come.")
]
TenantOption = Annotated[
    str, typer.Option("--tenant", metavar="NAME", help="Only of this tenant's jobs and orders.")
]
UserOption = Annotated[
    str, typer.Option("--user", metavar="NAME", help="Only of this person's jobs and orders.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("history")(history)


def history(
    ctx: typer.Context,
    job: Annotated[str, typer.Option(metavar="JOB", help="Only of this job.")] = "",
    node: Annotated[str, typer.Option(metavar="NAME", help="Only of this node.")] = "",
    service: Annotated[str, typer.Option(metavar="NAME", help="Only of this service.")] = "",
    tenant: TenantOption = "",
    user: UserOption = "",
    kind: Annotated[
        list[StoryKind] | None,
        typer.Option(help="Only lines of this kind; may be repeated."),
    ] = None,
    since: SinceOption = "",
    until: UntilOption = "",
    limit: LimitOption = 100,
    output: OutputOption = Format.TABLE,
    no_headers: NoHeadersOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what happened, newest last: orders, decisions, loans, attempts and accounts of jobs.

    A user sees the lines of the own tenant; tenant ops sees all. With --limit 0 and -o json each
    line is one object on its own line.

    Example: aryl history --node train-7 --since 2026-11-28 --until 2026-11-29
    """
    here = session(ctx)
    now_s = here.clock.wall_s()
    asked = GetHistory(
        names=tuple(name for name in (job, node, service) if name),
        tenant=tenant,
        user=user,
        kinds=tuple(kind or ()),
        since_at_s=instant_of(since, now_s=now_s, field="since"),
        until_at_s=instant_of(until, now_s=now_s, field="until"),
    )
    show = Show(output=output, has_headings=not no_headers, is_quiet=quiet)
    show_lines(here, show, asked, limit=limit, columns=line_columns())


def show_lines(
    here: Session,
    show: Show,
    asked: GetHistory,
    *,
    limit: int,
    columns: Sequence[Column[HistoryLine]],
) -> None:
    """Print the lines of a question: the newest, or with limit 0 all of them page by page."""

    async def work(client: Client) -> None:
        if limit:
            rows, last = await newest(client, asked, limit)
            put_lines(here, show, rows, columns)
        else:
            last = None
            with_headings = show
            async for last in every(client, asked):
                put_lines(here, with_headings, last.rows, columns, is_stream=True)
                with_headings = structs.replace(show, has_headings=False)
        if last is not None:
            _tell_limits(asked, last)

    with contextlib.suppress(KeyboardInterrupt):
        here.run(work)


async def newest(
    client: Client, asked: GetHistory, limit: int
) -> tuple[list[HistoryLine], History]:
    """The newest lines, in order, and the last answer; errors as `Client.ask`."""
    rows: list[HistoryLine] = []
    while True:
        part = min(PAGE_LINES, limit - len(rows))
        found = await client.ask(structs.replace(asked, limit=part, is_newest=True), History)
        rows = [*found.rows, *rows]
        if not found.has_more or len(rows) >= limit or not found.rows:
            return rows, found
        asked = structs.replace(asked, before=found.rows[0].number)


async def every(client: Client, asked: GetHistory) -> AsyncIterator[History]:
    """All lines, page by page, oldest first; errors as `Client.ask`."""
    while True:
        request = structs.replace(asked, limit=PAGE_LINES, is_newest=False)
        found = await client.ask(request, History)
        yield found
        if not found.has_more or not found.rows:
            return
        asked = structs.replace(asked, after=found.rows[-1].number)


def put_lines(
    here: Session,
    show: Show,
    rows: Sequence[HistoryLine],
    columns: Sequence[Column[HistoryLine]],
    *,
    is_stream: bool = False,
) -> None:
    """Print lines; in JSON each has its time in the local zone beside `at_s`.

    is_stream: in JSON each line is one object, for lines that come page by page.
    """
    if show.form != Format.JSON:
        put_rows(here, show, "lines", rows, columns, lambda row: str(row.number))
        return
    found = [{**fields(row), "at": local(row.at_s)} for row in rows]
    if not is_stream:
        put_json({"lines": found})
        return
    for line in found:
        put_json({"line": line})


def _tell_limits(asked: GetHistory, last: History) -> None:
    """Say on stderr what the answer cannot have."""
    if last.missing_lines:
        say(
            f"{last.missing_lines} newer lines are not in this coordinator's index yet; ask again "
            "(aryl events has the newest)"
        )
    kept_s = last.kept_since_at_s
    if kept_s is not None and asked.since_at_s is not None and asked.since_at_s < kept_s:
        say(f"the history begins at {local(kept_s)} (history_kept_days)")


def line_columns() -> list[Column[HistoryLine]]:
    """Columns of lines."""
    return [
        Column("NUMBER", lambda r: str(r.number), is_wide=True, is_number=True),
        Column("WHEN", lambda r: local(r.at_s)),
        Column("KIND", lambda r: str(r.kind)),
        Column("TENANT", lambda r: r.tenant, is_wide=True),
        Column("USER", lambda r: r.user, rank=3),
        Column("SUBJECT", lambda r: r.subject),
        Column("WHAT", lambda r: r.what, is_elastic=True),
        Column("WHY", lambda r: r.reason, is_elastic=True, rank=1),
    ]


def order_columns() -> list[Column[HistoryLine]]:
    """Columns of orders."""
    return [
        Column("NUMBER", lambda r: str(r.number), is_wide=True, is_number=True),
        Column("WHEN", lambda r: local(r.at_s)),
        Column("WHO", lambda r: f"{_order(r).tenant}/{_order(r).user}"),
        Column("ORDER", lambda r: _order(r).verb),
        Column("TARGET", lambda r: _order(r).target, is_elastic=True),
        Column("VALUES", _values, is_elastic=True, rank=3),
        Column("REASON", lambda r: _order(r).reason, is_elastic=True, rank=4),
        Column("OUTCOME", _outcome, is_elastic=True, rank=1),
        Column("FROM", lambda r: _order(r).client, is_elastic=True, rank=2),
    ]


def _order(row: HistoryLine) -> OrderRecord:
    """The order of a line; of an earlier version, as far as its words say."""
    if isinstance(row.detail, OrderRecord):
        return row.detail
    return OrderRecord(tenant=row.tenant, user=row.user, verb=row.what, target=row.subject)


def _values(row: HistoryLine) -> str:
    return " ".join(f"{name}={value}" for name, value in _order(row).values.items())


def _outcome(row: HistoryLine) -> str:
    found = _order(row)
    if not found.refused:
        return "accepted"
    more = f" ({found.unrecorded} more refused orders before)" if found.unrecorded else ""
    return f"refused: {found.refused}{more}"


AUDIT_KINDS = tuple(sorted(ORDERS))
