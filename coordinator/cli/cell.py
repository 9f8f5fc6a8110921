"""Commands for the whole cell: its orders, and `explain`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from common.api import (
    Done,
    Jobs,
    ListJobs,
    ListLoans,
    Loans,
    Operate,
)
from common.errors import ConfigError
from coordinator.cli import describe
from coordinator.cli.complete import complete_services
from coordinator.cli.describe import hits
from coordinator.cli.operate import ReasonOption, done, order, show_hits
from coordinator.cli.output import (
    Format,
    OutputOption,
    QuietOption,
    Show,
)
from coordinator.cli.session import session
from coordinator.client import Client
from coordinator.engine.state.events import OperatorAction


class Kind(StrEnum):
    """What can be explained."""

    JOB = "job"
    NODE = "node"
    SERVICE = "service"
    LOAN = "loan"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("explain")(explain)
    app.command("freeze")(freeze)
    app.command("recall")(recall)


def explain(
    ctx: typer.Context,
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="job, node, service or loan.")],
    name: Annotated[str, typer.Argument(metavar="ID", help="Id or name.")],
    output: OutputOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Explain why something is in its state: blockers, estimates with sources, events."""
    describe.explain(session(ctx), Show(output=output, is_quiet=quiet), kind, name)


def freeze(
    ctx: typer.Context,
    off: Annotated[bool, typer.Option("--off", help="Resume decisions.")] = False,
    reason: ReasonOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Stop all decisions but one: services still get back the nodes that their load needs.

    Aryl starts, resizes and lends nothing. Jobs continue, leases are renewed, and orders of an
    operator are carried out: recall, revoke, drain.
    """
    action = OperatorAction.THAW if off else OperatorAction.FREEZE
    order(session(ctx), action, reason=reason, output=output)


def recall(
    ctx: typer.Context,
    service: Annotated[
        str,
        typer.Option(
            "--service", "-s", help="Only this service.", autocompletion=complete_services
        ),
    ] = "",
    is_all: Annotated[bool, typer.Option("--all", help="Every service.")] = False,
    off: Annotated[bool, typer.Option("--off", help="Allow loans again.")] = False,
    reason: ReasonOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Return every lent node to its service and lend none until --off.

    This is for an emergency, so it shows the affected jobs but does not ask for confirmation.
    """
    if bool(service) == is_all:
        raise ConfigError("recall: give either --service SERVICE or --all")
    here = session(ctx)
    if off:
        order(here, OperatorAction.END_RECALL, target=service, reason=reason, output=output)
        return
    request = Operate(action=OperatorAction.RECALL, target=service, reason=reason)

    async def work(client: Client) -> Done:
        loans = (await client.ask(ListLoans(is_live_only=True), Loans)).rows
        jobs = (await client.ask(ListJobs(is_live_only=True), Jobs)).rows
        answer = await client.ask(request, Done)
        nodes = {loan.node for loan in loans if service in ("", loan.service)}
        show_hits(hits(jobs, nodes), "the recall")
        return answer

    done(here.run(work), output)
