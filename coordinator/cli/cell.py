"""Commands for the whole cell: orders and the status at a glance; `explain`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from common.api import (
    Done,
    GetStatus,
    Jobs,
    ListJobs,
    ListLoans,
    Loans,
    Operate,
    Status,
)
from common.errors import ConfigError
from coordinator import plain_text
from coordinator.cli import describe
from coordinator.cli.complete import complete_services
from coordinator.cli.describe import hits
from coordinator.cli.operate import ReasonOption, done, order, show_hits
from coordinator.cli.output import (
    Format,
    OutputOption,
    QuietOption,
    Show,
    put,
    put_one,
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
    app.command("status")(status)
    app.command("explain")(explain)
    app.command("freeze")(freeze)
    app.command("recall")(recall)


def status(
    ctx: typer.Context, output: OutputOption = Format.TABLE, quiet: QuietOption = False
) -> None:
    """Show the state of the cell and its figures so far."""
    here = session(ctx)
    found = here.ask(GetStatus(), Status)
    if put_one(Show(output=output, is_quiet=quiet), "status", found, found.cell):
        return
    pairs = plain_text.glance(found)
    pairs += [(name, _figure(name, value)) for name, value in _flat(found.figures)]
    width = max(len(name) for name, _ in pairs)
    put(here, [f"{name:<{width}}  {value}" for name, value in pairs])


def _flat(values: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Nested figures with dotted names."""
    flat: list[tuple[str, object]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            nested: dict[str, object] = msgspec.convert(value, dict[str, object])
            flat += _flat(nested, f"{prefix}{name}.")
        else:
            flat.append((prefix + name, value))
    return flat


def _figure(name: str, value: object) -> str:
    """A figure by the unit in its name."""
    if value is None:
        return plain_text.MISSING
    if not isinstance(value, int | float):
        return plain_text.plain(str(value))
    unit = name.split(".")[0]
    if unit.endswith("_ratio"):
        return plain_text.percent(value)
    if unit.endswith("_gpu_s"):
        return f"{plain_text.number(value)} GPU-s"
    if unit.endswith("_s"):
        return plain_text.duration(value)
    return plain_text.number(value)


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
