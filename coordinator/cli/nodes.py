"""`aryl node`: list, describe, explain, and the orders for nodes."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from common import node_labels
from common.api import ApiErrorCode, Describe, Description, ListNodes, Nodes, Operate
from common.errors import ConfigError
from coordinator.cli import columns
from coordinator.cli.complete import complete_nodes
from coordinator.cli.follow import until_vacated
from coordinator.cli.operate import ReasonOption, YesOption, done, give, order, order_against_jobs
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
from coordinator.cli.window import AtOption, Window
from coordinator.client import ApiRefused, Client
from coordinator.engine.state.events import OperatorAction
from coordinator.plain_text import duration, local_instant

app = typer.Typer(no_args_is_help=True, help="See the fleet, and take nodes out for maintenance.")

NodeArgument = Annotated[
    str, typer.Argument(metavar="NODE", help="Name of the node.", autocompletion=complete_nodes)
]
NodesArgument = Annotated[
    list[str],
    typer.Argument(metavar="NODE", help="Names of the nodes.", autocompletion=complete_nodes),
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


@app.command("uncordon")
def uncordon(
    ctx: typer.Context,
    nodes: NodesArgument,
    reason: ReasonOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Use nodes again; ends a drain, or a quarantine once its cause is gone."""
    requests = [
        Operate(action=OperatorAction.UNCORDON, target=node, reason=reason)
        for node in dict.fromkeys(nodes)
    ]
    done(session(ctx).run(partial(give, requests=requests)), output)


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


@app.command(
    "drain", epilog="Example: aryl node drain gpu-7 gpu-8 --at 2026-12-05T06:00 --reason cooling"
)
def drain(
    ctx: typer.Context,
    nodes: NodesArgument,
    at: AtOption = None,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Running jobs may continue for this long, such as 30m."),
    ] = None,
    reason: ReasonOption = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when no job has workers on the nodes.")
    ] = False,
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Cordon nodes and stop their workers, with their grace; preempted jobs queue again.

    If no job runs there, this is only a cordon and asks nothing; `uncordon` ends it.

    With --deadline flexible workers leave at once, and jobs that still run at the deadline are
    preempted. A later order replaces an earlier one.

    With --at the drain begins then. Until then only jobs whose time limit ends by then start there,
    and lent nodes are home before. `uncordon` cancels it.
    """
    limit_s, here = deadline_s(deadline), session(ctx)
    window = None if at is None else Window.at(at, now_s=here.clock.wall_s())
    within = "" if limit_s is None else f" within {duration(limit_s)}"
    begins = "" if window is None else f" at {local_instant(window.at_s, here.clock.wall_s())}"
    names = _against_jobs(
        ctx,
        OperatorAction.DRAIN if window is None else OperatorAction.DRAIN_AT,
        tuple(dict.fromkeys(nodes)),
        f"draining {', '.join(dict.fromkeys(nodes))}{begins}{within}",
        reason=reason,
        yes=yes,
        output=output,
        limit_s=limit_s,
        window=window,
    )
    for name in names if wait else ():
        if not here.run(partial(until_vacated, clock=here.clock, node=name)):
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
        (node,),
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
    nodes: tuple[str, ...],
    what: str,
    *,
    reason: str,
    yes: bool,
    output: Format,
    limit_s: float | None = None,
    window: Window | None = None,
    promise: str = "",
) -> tuple[str, ...]:
    """Give an order to nodes; returns their names, with those that were drained already."""
    drained: list[str] = []

    async def find(client: Client) -> tuple[tuple[str, ...], set[str]]:
        found = [await name_of(client, node) for node in nodes]  # all before the first order
        for name in drained:
            undo = f"aryl node uncordon {name}"
            say(f"node {name} is drained already, so it gets no window; to use it again: {undo}")
        targets = tuple(name for name in found if name not in drained)
        return targets, set(targets)

    async def name_of(client: Client, node: str) -> str:
        try:
            found = await client.ask(Describe(kind="node", name=node), Description)
        except ApiRefused as refused:
            is_missing = refused.error.code == ApiErrorCode.NOT_FOUND
            if is_missing and action == OperatorAction.CONFIRM_DEAD:
                # Gangs may wait for a node that nobody has heard of; the coordinator knows.
                say(f"node {node} never reported here: only a gang that waits for it names it")
                return node
            raise
        if window is not None and found.node is not None and found.node.is_draining:
            drained.append(found.name)
        return found.name

    targets = order_against_jobs(
        session(ctx),
        action,
        find=find,
        what=what,
        reason=reason,
        is_yes=yes,
        output=output,
        deadline_s=limit_s,
        window=window,
        promise=promise,
    )
    return (*targets, *drained)
