"""`aryl node`: list, describe, explain, and what an operator orders of nodes. Must not decide."""

from __future__ import annotations

from typing import Annotated

import typer

from common.api import Describe, Description, ListNodes, Nodes
from coordinator.cli import columns
from coordinator.cli.complete import complete_nodes
from coordinator.cli.describe import describe, explain
from coordinator.cli.operate import ReasonOption, YesOption, order, order_against_jobs
from coordinator.cli.output import (
    Format,
    NoHeadersOption,
    OutputOption,
    QuietOption,
    Show,
    put_rows,
)
from coordinator.cli.session import session
from coordinator.client import Client
from coordinator.engine.events import OperatorAction

app = typer.Typer(no_args_is_help=True, help="See the fleet, and take nodes out for maintenance.")

NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="Its name.", autocompletion=complete_nodes)
]


@app.command("list")
def list_(
    ctx: typer.Context,
    output: OutputOption = Format.TABLE,
    no_headers: NoHeadersOption = False,
    quiet: QuietOption = False,
) -> None:
    """All nodes: where they belong, what they do now, how full and how busy they are."""
    here = session(ctx)
    rows = here.ask(ListNodes(), Nodes).rows
    show = Show(output=output, has_headings=not no_headers, is_quiet=quiet)
    put_rows(here, show, "nodes", rows, columns.nodes(), lambda row: row.node)


@app.command("describe")
def describe_(
    ctx: typer.Context,
    node: NodeArgument,
    output: OutputOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """One node in full, why it is where it is, and its story."""
    describe(session(ctx), Show(output=output, is_quiet=quiet), "node", node)


@app.command("explain")
def explain_(
    ctx: typer.Context,
    node: NodeArgument,
    output: OutputOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Why a node does what it does, and its story."""
    explain(session(ctx), Show(output=output, is_quiet=quiet), "node", node)


@app.command("cordon")
def cordon(
    ctx: typer.Context,
    node: NodeArgument,
    reason: ReasonOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """No new work on a node; what runs goes on."""
    order(session(ctx), OperatorAction.CORDON, target=node, reason=reason, output=output)


@app.command("uncordon")
def uncordon(
    ctx: typer.Context,
    node: NodeArgument,
    reason: ReasonOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """A node may be used again; ends a drain and a quarantine too."""
    order(session(ctx), OperatorAction.UNCORDON, target=node, reason=reason, output=output)


@app.command("drain")
def drain(
    ctx: typer.Context,
    node: NodeArgument,
    reason: ReasonOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Cordon a node and stop its workers, with their grace; preempted jobs queue again."""
    _against_jobs(
        ctx, OperatorAction.DRAIN, node, f"draining {node}", reason=reason, yes=yes, output=output
    )


@app.command("confirm-dead")
def confirm_dead(
    ctx: typer.Context,
    node: NodeArgument,
    reason: ReasonOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Promise that a lost node is powered off, so that its jobs may start elsewhere.

    If it still runs, its workers and their successors write the same checkpoints.
    """
    _against_jobs(
        ctx,
        OperatorAction.CONFIRM_DEAD,
        node,
        f"declaring {node} dead",
        reason=reason,
        yes=yes,
        output=output,
    )


def _against_jobs(
    ctx: typer.Context,
    action: OperatorAction,
    node: str,
    what: str,
    *,
    reason: str,
    yes: bool,
    output: Format,
) -> None:
    async def find(client: Client) -> tuple[str, set[str]]:
        found = await client.ask(Describe(kind="node", name=node), Description)
        return found.name, {found.name}

    order_against_jobs(
        session(ctx), action, find=find, what=what, reason=reason, is_yes=yes, output=output
    )
