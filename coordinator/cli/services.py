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

app = typer.Typer(
    no_args_is_help=True, help="List the services that lend nodes, and set their modes."
)

ServiceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SERVICE", help="Name of the service.", autocompletion=complete_services
    ),
]


add_list(
    app,
    "services",
    lambda here: here.ask(ListServices(), Services).rows,
    columns=columns.services,
    name=lambda row: row.service,
    about="List all services with their nodes, load and reclaim deadline.",
)
add_describe(app, "service", ServiceArgument, about="Show one service in full.")
add_explain(
    app, "service", ServiceArgument, about="Explain what a service needs, lends and reclaims."
)


@app.command("mode")
def mode(
    ctx: typer.Context,
    service: ServiceArgument,
    mode: Annotated[
        Mode, typer.Argument(metavar="MODE", help="What Aryl may do with the nodes of the service.")
    ],
    reason: ReasonOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Set what Aryl may do with the nodes of a service.

    observe: Aryl lends nothing and records the loans it would make. recommend: an operator
    approves each loan. act: Aryl lends and takes back.
    """
    here = session(ctx)
    action = OperatorAction.SET_MODE
    order(here, action, target=service, value=mode, reason=reason, output=output)
