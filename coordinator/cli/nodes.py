"""`aryl node`: list, describe, explain, and what an operator orders of nodes. Must not decide."""

from __future__ import annotations

from typing import Annotated

import typer

from common.api import ApiErrorCode, Describe, Description, ListNodes, Nodes
from coordinator.cli import columns
from coordinator.cli.complete import complete_nodes
from coordinator.cli.operate import ReasonOption, YesOption, order_against_jobs
from coordinator.cli.output import Format, OutputOption
from coordinator.cli.session import say, session
from coordinator.cli.shared import add_describe, add_explain, add_list, add_order
from coordinator.client import ApiRefused, Client
from coordinator.engine.events import OperatorAction

app = typer.Typer(no_args_is_help=True, help="See the fleet, and take nodes out for maintenance.")

NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="Its name.", autocompletion=complete_nodes)
]


add_list(
    app,
    "nodes",
    lambda here: here.ask(ListNodes(), Nodes).rows,
    columns=columns.nodes,
    name=lambda row: row.node,
    about="All nodes: where they belong, what they do now, how full and how busy they are.",
)
add_describe(
    app, "node", NodeArgument, about="One node in full, why it is where it is, and its story."
)
add_explain(app, "node", NodeArgument, about="Why a node does what it does, and its story.")
add_order(
    app,
    "cordon",
    OperatorAction.CORDON,
    NodeArgument,
    about="No new work on a node; what runs goes on.",
)
add_order(
    app,
    "uncordon",
    OperatorAction.UNCORDON,
    NodeArgument,
    about="A node may be used again; ends a drain and a quarantine too.",
)


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
        try:
            found = await client.ask(Describe(kind="node", name=node), Description)
        except ApiRefused as refused:
            is_missing = refused.error.code == ApiErrorCode.NOT_FOUND
            if is_missing and action == OperatorAction.CONFIRM_DEAD:
                # Gangs may wait for a node that nobody has heard of; the coordinator knows.
                say(f"node {node} was never heard here: only a gang that waits for it knows it")
                return node, {node}
            raise
        return found.name, {found.name}

    order_against_jobs(
        session(ctx), action, find=find, what=what, reason=reason, is_yes=yes, output=output
    )
