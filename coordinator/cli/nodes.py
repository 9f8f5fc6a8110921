"""`aryl node`: list, describe, explain, and the orders for nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from common import node_labels
from common.api import ApiErrorCode, Describe, Description, ListNodes, Nodes
from common.errors import ConfigError
from coordinator.cli import columns
from coordinator.cli.complete import complete_nodes
from coordinator.cli.follow import until_vacated
from coordinator.cli.operate import ReasonOption, YesOption, order, order_against_jobs
from coordinator.cli.output import (
    Format,
    NoHeadersOption,
    OutputOption,
    QuietOption,
    Show,
    put_rows,
)
from coordinator.cli.session import EXIT_ERROR, say, session
from coordinator.cli.shared import add_describe, add_explain, add_order
from coordinator.cli.submit import deadline_s
from coordinator.client import ApiRefused, Client
from coordinator.engine.state.events import OperatorAction
from coordinator.plain_text import duration

app = typer.Typer(no_args_is_help=True, help="See the fleet, and take nodes out for maintenance.")

NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="Name of the node.", autocompletion=complete_nodes)
]


@app.command("list", epilog="Example: aryl node list --label rack=r7 -o wide")
def list_(
    ctx: typer.Context,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL",
            help="Only nodes with this label, as in `aryl job submit --require`; may be repeated.",
        ),
    ] = None,
    output: OutputOption = Format.TABLE,
    no_headers: NoHeadersOption = False,
    quiet: QuietOption = False,
) -> None:
    """List all nodes with home pool, state, allocation and GPU use."""
    terms = label or []
    for term in terms:
        if why := node_labels.term_misfit(term):
            raise ConfigError(f"--label: {why}")
    here = session(ctx)
    rows = [
        row
        for row in here.ask(ListNodes(in_full=True), Nodes).rows
        if all(node_labels.holds(term, row.labels or {}) for term in terms)
    ]
    show = Show(output=output, has_headings=not no_headers, is_quiet=quiet)
    put_rows(here, show, "nodes", rows, columns.nodes(), lambda row: row.node)


add_describe(
    app,
    "node",
    NodeArgument,
    about="Show one node in full, why it is in its state, and its events.",
)
add_explain(app, "node", NodeArgument, about="Explain why a node is in its state, with its events.")
add_order(
    app,
    "cordon",
    OperatorAction.CORDON,
    NodeArgument,
    about="Start no new work on a node; running jobs continue.",
)
add_order(
    app,
    "uncordon",
    OperatorAction.UNCORDON,
    NodeArgument,
    about="Use a node again; ends a drain, or a quarantine once its cause is gone.",
)


@app.command("label", epilog="Example: aryl node label n4 rack=r7 nvlink disk-")
def label(
    ctx: typer.Context,
    node: NodeArgument,
    labels: Annotated[
        list[str] | None,
        typer.Argument(metavar="LABEL", help="key=value or key sets a label, key- removes one."),
    ] = None,
    reset: Annotated[
        bool,
        typer.Option("--reset", help="Forget all that operators set: the agent's labels count."),
    ] = False,
    reason: ReasonOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Set or remove labels of a node, by which jobs select it.

    They win over the labels in the agent's settings file. Running workers stay where they are.
    """
    if reset == bool(labels):
        raise ConfigError("expected labels, such as rack=r7, or --reset")
    value = node_labels.RESET if reset else " ".join(labels or ())
    if not reset:
        node_labels.parse_changes(labels or ())
    order(
        session(ctx), OperatorAction.LABEL, target=node, value=value, reason=reason, output=output
    )


@app.command("drain")
def drain(
    ctx: typer.Context,
    node: NodeArgument,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Running jobs may continue for this long, such as 30m."),
    ] = None,
    reason: ReasonOption = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when no job has workers on the node.")
    ] = False,
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Cordon a node and stop its workers, with their grace; preempted jobs queue again.

    If no job runs there, this is only a cordon and asks nothing; `uncordon` ends it.

    With --deadline flexible workers leave at once, and jobs that still run at the deadline are
    preempted. A later order replaces an earlier one.
    """
    limit_s = deadline_s(deadline)
    within = "" if limit_s is None else f" within {duration(limit_s)}"
    name = _against_jobs(
        ctx,
        OperatorAction.DRAIN,
        node,
        f"draining {node}{within}",
        reason=reason,
        yes=yes,
        output=output,
        limit_s=limit_s,
    )
    here = session(ctx)
    if wait and not here.run(lambda client: until_vacated(client, here.clock, name)):
        say(f"node {name} is no longer drained: an operator ended the drain")
        raise typer.Exit(EXIT_ERROR)


@app.command("confirm-dead")
def confirm_dead(
    ctx: typer.Context,
    node: NodeArgument,
    reason: ReasonOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Confirm that a lost node is powered off, so that its jobs may start elsewhere.

    If the node still runs, its workers and their successors write the same checkpoints. No other
    order undoes this one.
    """
    _against_jobs(
        ctx,
        OperatorAction.CONFIRM_DEAD,
        node,
        f"declaring {node} dead",
        reason=reason,
        yes=yes,
        output=output,
        promise=f"you promise that {node} is powered off: if it still runs, its workers and their "
        "successors write the same checkpoints",
    )


add_order(
    app,
    "remove",
    OperatorAction.REMOVE,
    NodeArgument,
    about="Take a lost node out of the cell for good; if it reports again it joins as a new node.",
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
    limit_s: float | None = None,
    promise: str = "",
) -> str:
    async def find(client: Client) -> tuple[str, set[str]]:
        try:
            found = await client.ask(Describe(kind="node", name=node), Description)
        except ApiRefused as refused:
            is_missing = refused.error.code == ApiErrorCode.NOT_FOUND
            if is_missing and action == OperatorAction.CONFIRM_DEAD:
                # Gangs may wait for a node that nobody has heard of; the coordinator knows.
                say(f"node {node} never reported here: only a gang that waits for it names it")
                return node, {node}
            raise
        return found.name, {found.name}

    return order_against_jobs(
        session(ctx),
        action,
        find=find,
        what=what,
        reason=reason,
        is_yes=yes,
        output=output,
        deadline_s=limit_s,
        promise=promise,
    )
