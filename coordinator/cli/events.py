"""`aryl events`: events with their reasons, as they are committed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated

import typer

from common.api import Events, GetEvents, StoryRow
from coordinator.cli import columns
from coordinator.cli.complete import complete_subjects
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
from coordinator.cli.reconnect import Patience
from coordinator.cli.session import Session, say, session
from coordinator.client import Client

FOLLOW_PERIOD_S = 1.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("events")(events)


def events(
    ctx: typer.Context,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new events as they happen.")
    ] = False,
    subject: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="NAME",
            help="Only events of this job, node, service or loan, by id or name; job/NAME if "
            "two share it.",
            autocompletion=complete_subjects,
        ),
    ] = "",
    after: Annotated[int, typer.Option(min=0, help="Only events with a higher number.")] = 0,
    output: OutputOption = Format.TABLE,
    no_headers: NoHeadersOption = False,
    quiet: QuietOption = False,
) -> None:
    """List events with their reasons: decisions, loans, preemptions, orders and faults.

    For a service this includes events of its nodes; for a loan, those of its node during the loan.
    With --follow and -o json each event is one object on its own line.
    """
    here = session(ctx)
    show = Show(output=output, has_headings=not no_headers, is_quiet=quiet)

    async def work(client: Client) -> None:
        request = GetEvents(after=after, subject=subject)
        if follow:
            await _follow(here, show, client, request)
            return
        found = await client.ask(request, Events)
        _put(here, show, found.rows)
        if subject and not found.rows:
            say(f"{found.subject or subject} is known, but no events of it are kept")

    with contextlib.suppress(KeyboardInterrupt) if follow else contextlib.nullcontext():
        here.run(work)


def _put(here: Session, show: Show, rows: Sequence[StoryRow]) -> None:
    table = columns.events(None)
    put_rows(here, show, "events", rows, table, lambda row: str(row.number))


async def _follow(here: Session, show: Show, client: Client, request: GetEvents) -> None:
    """Poll for events after the last number, for ever; wait for a coordinator that is away."""
    is_first, patience = True, Patience()
    while True:
        found = await patience.answer(client.ask(request, Events))
        if found is not None:
            if show.form == Format.JSON:
                for row in found.rows:
                    put_json({"event": fields(row)})
            elif found.rows or is_first:
                has_headings = show.has_headings and is_first
                _put(here, _without(show, has_headings=has_headings), found.rows)
            is_first = False
            # By its id from now on: its name may pass to another one.
            request = GetEvents(after=found.last, subject=found.subject or request.subject)
        await here.clock.sleep(FOLLOW_PERIOD_S)


def _without(show: Show, *, has_headings: bool) -> Show:
    return Show(output=show.output, is_quiet=show.is_quiet, has_headings=has_headings)
