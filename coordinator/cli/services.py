"""`aryl service`: what the lenders of nodes lend, and how far each trusts Aryl. Must not decide."""

from __future__ import annotations

from typing import Annotated

import typer

from common.api import ListServices, Services
from common.model import Mode
from coordinator.cli import columns
from coordinator.cli.complete import complete_services
from coordinator.cli.describe import describe
from coordinator.cli.operate import ReasonOption, order
from coordinator.cli.output import (
    Format,
    NoHeadersOption,
    OutputOption,
    QuietOption,
    Show,
    put_rows,
)
from coordinator.cli.session import session
from coordinator.engine.events import OperatorAction

app = typer.Typer(no_args_is_help=True, help="See the services that lend nodes, and trust them.")

ServiceArgument = Annotated[
    str, typer.Argument(metavar="SERVICE", help="Its name.", autocompletion=complete_services)
]


@app.command("list")
def list_(
    ctx: typer.Context,
    output: OutputOption = Format.TABLE,
    no_headers: NoHeadersOption = False,
    quiet: QuietOption = False,
) -> None:
    """All services: their nodes, their load, and the promise to each."""
    here = session(ctx)
    rows = here.ask(ListServices(), Services).rows
    show = Show(output=output, has_headings=not no_headers, is_quiet=quiet)
    put_rows(here, show, "services", rows, columns.services(), lambda row: row.service)


@app.command("describe")
def describe_(
    ctx: typer.Context,
    service: ServiceArgument,
    output: OutputOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """One service in full."""
    describe(session(ctx), Show(output=output, is_quiet=quiet), "service", service)


@app.command("mode")
def mode(
    ctx: typer.Context,
    service: ServiceArgument,
    mode: Annotated[
        Mode, typer.Argument(metavar="MODE", help="How far it trusts Aryl with its nodes.")
    ],
    reason: ReasonOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Set how far a service trusts Aryl.

    observe: nothing changes; what would have been lent is recorded. recommend: a person decides.
    act: Aryl lends and takes back.
    """
    here = session(ctx)
    action = OperatorAction.SET_MODE
    order(here, action, target=service, value=mode, reason=reason, output=output)
