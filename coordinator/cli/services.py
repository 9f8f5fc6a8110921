"""`aryl service`: what each service lends, and its mode."""

from __future__ import annotations

from typing import Annotated

import typer

from common.api import ListServices, Services
from common.model import Mode
from coordinator.cli import columns
from coordinator.cli.complete import complete_services
from coordinator.cli.operate import ReasonOption, order
from coordinator.cli.output import Format, OutputOption
from coordinator.cli.session import session
from coordinator.cli.shared import add_describe, add_explain, add_list
from coordinator.engine.state.events import OperatorAction

app = typer.Typer(no_args_is_help=True, help="See the services that lend nodes, and trust them.")

ServiceArgument = Annotated[
    str, typer.Argument(metavar="SERVICE", help="Its name.", autocompletion=complete_services)
]


add_list(
    app,
    "services",
    lambda here: here.ask(ListServices(), Services).rows,
    columns=columns.services,
    name=lambda row: row.service,
    about="All services: their nodes, their load, and the promise to each.",
)
add_describe(app, "service", ServiceArgument, about="One service in full.")
add_explain(app, "service", ServiceArgument, about="What a service needs, lends and wants back.")


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
