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
from coordinator.cli import describe, render
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
from coordinator.policies.contract.text import counted


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
    pairs = glance(found)
    pairs += [(name, _figure(name, value)) for name, value in _flat(found.figures)]
    width = max(len(name) for name, _ in pairs)
    put(here, [f"{name:<{width}}  {value}" for name, value in pairs])


def glance(found: Status) -> list[tuple[str, str]]:
    """The cell in a few lines of name and value."""
    only = "decides only what services get back"
    frozen = f"; FROZEN, {only} (aryl freeze --off)" if found.is_frozen else ""
    return [
        ("cell", f"{found.cell}, up {render.duration(found.up_s)}, epoch {found.epoch}"),
        ("policy", f"{found.policy}{frozen}"),
        ("nodes", f"{found.nodes_heard} of {found.nodes} heard{_closed(found)}"),
        (
            "training",
            f"{found.training_gpus_held} of {found.training_gpus} GPUs held, "
            f"busy {render.percent(found.gpu_busy_ratio_training)}",
        ),
        (
            "inference",
            f"{found.serving_nodes} of {found.inference_nodes} nodes serving, "
            f"busy {render.percent(found.gpu_busy_ratio_inference)}{_unknown(found)}",
        ),
        (
            "on loan",
            f"{counted(found.on_loan_nodes, 'node')}, {found.on_loan_gpus_held} of "
            f"{found.on_loan_gpus} GPUs held; {counted(found.coming_home_nodes, 'node')} "
            f"coming home{_recall(found)}",
        ),
        (
            "jobs",
            f"{found.running_jobs} running{_stalled(found)}{_suspended(found)}, "
            f"{found.starting_jobs} starting, {found.pending_jobs} pending",
        ),
        *_without_room(found),
        *_gpus_out(found),
        ("bad messages", str(found.bad_messages)),
        *([("overload", _shed(found.reports_shed))] if found.reports_shed else []),
        *([("clock", found.clock_warning)] if found.clock_warning else []),
    ]


def _gpus_out(found: Status) -> list[tuple[str, str]]:
    """Shown only where faults took GPUs out; highlighted once the breaker holds further ones."""
    if not found.gpus_out:
        return []
    more = f"; BREAKER OPEN: {found.gpu_breaker}" if found.gpu_breaker else ""
    return [("faults", f"{counted(found.gpus_out, 'GPU')} out (aryl node list){more}")]


def _closed(found: Status) -> str:
    """Nodes that take nothing new by themselves, where there are any."""
    if not found.nodes_closed:
        return ""
    return f", {found.nodes_closed} CLOSED to new work (aryl node list)"


def _shed(count: int) -> str:
    """That reports are shed, and what that costs."""
    return f"{counted(count, 'report')} shed so far: only the newest of each node is read"


def _stalled(found: Status) -> str:
    """Running jobs that stopped reporting progress, if there are any."""
    return f" ({found.stalled_jobs} STALLED)" if found.stalled_jobs else ""


def _suspended(found: Status) -> str:
    """Jobs that stand still while others compute on their GPUs, where there are any."""
    return f", {found.suspended_jobs} suspended" if found.suspended_jobs else ""


def _without_room(found: Status) -> list[tuple[str, str]]:
    """Pending jobs without room in the fleet, and the reason of the first of them."""
    count = found.jobs_without_room
    if not count:
        return []
    who = counted(count, "pending job has", "pending jobs have")
    first = "" if count == 1 else "the first: "
    return [("no room", f"{who} no room in this fleet: {first}{'; '.join(found.without_room_why)}")]


def _recall(found: Status) -> str:
    """The services that lend nothing by an order; a recall that ended for each service by itself
    still holds for others.
    """
    names = [*found.recalled_services, *(["services to come"] if found.is_recalled else [])]
    return f"; RECALLED: {', '.join(names)} (aryl recall --all --off)" if names else ""


def _unknown(found: Status) -> str:
    """Services whose load is unknown, or of some of their nodes."""
    if found.loads_unknown is msgspec.UNSET:
        return ""
    return f"; LOAD UNKNOWN: {', '.join(found.loads_unknown)} (aryl service list)"


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
        return render.MISSING
    if not isinstance(value, int | float):
        return render.plain(str(value))
    unit = name.split(".")[0]
    if unit.endswith("_ratio"):
        return render.percent(value)
    if unit.endswith("_gpu_s"):
        return f"{render.number(value)} GPU-s"
    if unit.endswith("_s"):
        return render.duration(value)
    return render.number(value)


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
