"""`aryl plan`: what a job, a drain, a loan, a recall, a guarantee or a policy would lead to, and
when the jobs that wait start.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from msgspec import UNSET

from common.errors import ConfigError
from common.model import JobSpec
from common.plans import (
    Plan,
    PlanEffect,
    PlanKind,
    PlanMove,
    Planned,
    PlanStart,
    PlanStep,
    PlanTurn,
)
from coordinator.cli.complete import complete_nodes, complete_services
from coordinator.cli.job_file import STDIN, FileKind
from coordinator.cli.output import Format, OutputOption, fields, put, put_json
from coordinator.cli.render import Column, table
from coordinator.cli.session import Session, session
from coordinator.cli.submit import SubmitFlags, deadline_s, job_spec, seconds
from coordinator.cli.window import AtOption, Window
from coordinator.plain_text import duration, local_instant, number
from coordinator.policies.contract.text import counted

EXIT_CHANGES = 1
"""Something would change; 0: nothing would. Errors have codes from 2 on."""
EXIT_CODES = (
    "Exit codes: 0 nothing would change, 1 something would; errors have the codes from 2 on."
)

HorizonOption = Annotated[
    str, typer.Option("--horizon", metavar="TIME", help="How far ahead to play, such as 8h.")
]
DAY = "1d"
EFFECTS_SHOWN = 15


def register(app: typer.Typer) -> None:
    """Add the command and its parts."""
    app.callback(no_args_is_help=True)(_group)
    app.command("job", epilog=f"Example: aryl plan job train.toml. {EXIT_CODES}")(job)
    app.command("drain", epilog=f"Example: aryl plan drain gpu-7. {EXIT_CODES}")(drain)
    app.command("loan", epilog=f"Example: aryl plan loan chat. {EXIT_CODES}")(loan)
    app.command("recall", epilog=f"Example: aryl plan recall chat. {EXIT_CODES}")(recall)
    app.command("tenant", epilog=f"Example: aryl plan tenant vision guarantee=16. {EXIT_CODES}")(
        tenant
    )
    app.command("queue", epilog=f"Example: aryl plan queue. {EXIT_CODES}")(queue)
    app.command("policy", epilog=f"Example: aryl plan policy tiresias. {EXIT_CODES}")(policy)


def _group() -> None:
    """Show what a change would lead to, now and later. Nothing changes.

    The coordinator plays a copy of its state ahead, with the change and without it, and answers
    with the difference. `aryl --timeout S plan` also says how long it may play: half of S.
    """


# --- commands -----------------------------------------------------------------------------------


def job(
    ctx: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|JOB",
            help="Job file in TOML, YAML or JSON, or - for stdin. Or a job that waits, by its id, "
            "number or name.",
        ),
    ],
    kind: Annotated[
        FileKind | None,
        typer.Option("--format", help="Format of the job file; default: by its name, else toml."),
    ] = None,
    horizon: HorizonOption = DAY,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show when a job would start, on which nodes, and which jobs would pay for it.

    `aryl job submit --dry-run` is the same with all options of a submission. Of a job that waits
    already, show when it starts; that changes nothing.
    """
    if kind is None and _is_job(file):
        request = Plan(kind=PlanKind.JOB, target=str(file), horizon_s=_horizon_s(horizon))
        _show(ctx, request, f"start of {file}", output)
        return
    spec = job_spec(file, SubmitFlags(), (), here=Path.cwd(), kind=kind)
    finish(plan_job(session(ctx), spec, horizon=horizon), spec.name, output, session(ctx))


def _is_job(file: Path) -> bool:
    """True if an argument names a job: no file has this name, and it does not look like a path."""
    is_plain = file.name == str(file) and not file.suffix
    return is_plain and file != STDIN and not file.exists()


def drain(
    ctx: typer.Context,
    node: Annotated[
        str, typer.Argument(metavar="NODE", autocompletion=complete_nodes, help="Name of the node.")
    ],
    deadline: Annotated[
        str | None,
        typer.Option("--deadline", metavar="TIME", help="As in `aryl node drain`, such as 30m."),
    ] = None,
    at: AtOption = None,
    horizon: HorizonOption = DAY,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show which jobs a drain of a node would stop or shrink, and when the node would be empty."""
    now_s = session(ctx).clock.wall_s()
    window = None if at is None else Window.at(at, now_s=now_s)
    request = Plan(
        kind=PlanKind.DRAIN,
        target=node,
        deadline_s=deadline_s(deadline),
        in_s=UNSET if window is None else window.in_s(now_s),
        horizon_s=_horizon_s(horizon) + (0.0 if window is None else window.in_s(now_s)),
    )
    begins = "" if window is None else f" at {local_instant(window.at_s, now_s)}"
    _show(ctx, request, f"drain of {node}{begins}", output)


def loan(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="SERVICE|NODE",
            autocompletion=complete_services,
            help="A service: all that it can spare now, in mode act. A node: this node.",
        ),
    ],
    horizon: HorizonOption = DAY,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show which nodes would be lent, and which jobs would use them."""
    request = Plan(kind=PlanKind.LOAN, target=target, horizon_s=_horizon_s(horizon))
    _show(ctx, request, f"loan of {target}", output)


def recall(
    ctx: typer.Context,
    service: Annotated[
        str,
        typer.Argument(
            metavar="[SERVICE]",
            autocompletion=complete_services,
            help="Name of the service; default: all services.",
        ),
    ] = "",
    horizon: HorizonOption = DAY,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show how long a recall would take, by stage, and which jobs it would stop."""
    request = Plan(kind=PlanKind.RECALL, target=service, horizon_s=_horizon_s(horizon))
    _show(ctx, request, f"recall of {service or 'all services'}", output)


def tenant(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="TENANT", help="Name of the tenant.")],
    setting: Annotated[
        str, typer.Argument(metavar="guarantee=N", help="Its guarantee in GPUs from now on.")
    ],
    horizon: HorizonOption = DAY,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show what another guarantee of a tenant would start and stop."""
    key, _, value = setting.partition("=")
    if key != "guarantee" or not value.isdecimal():
        raise ConfigError(f"{setting!r}, expected guarantee=N, such as guarantee=16")
    request = Plan(
        kind=PlanKind.TENANT,
        target=name,
        guarantee_gpus=int(value),
        horizon_s=_horizon_s(horizon),
    )
    _show(ctx, request, f"guarantee of {value} GPUs for {name}", output)


def policy(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="POLICY", help="Its name, with knobs as in the settings.")
    ],
    horizon: HorizonOption = DAY,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show what another policy would decide now, and how starts would move."""
    request = Plan(kind=PlanKind.POLICY, target=name, horizon_s=_horizon_s(horizon))
    _show(ctx, request, f"policy {name}", output)


def queue(
    ctx: typer.Context, horizon: HorizonOption = DAY, output: OutputOption = Format.TABLE
) -> None:
    """Show when and where the jobs that wait are expected to start, without any change."""
    request = Plan(kind=PlanKind.QUEUE, horizon_s=_horizon_s(horizon))
    _show(ctx, request, "the queue as it is", output)


def plan_job(here: Session, spec: JobSpec, *, horizon: str = DAY) -> Planned:
    """What the submission of a job would lead to; errors as `Client.ask`."""
    return _asked(here, Plan(kind=PlanKind.JOB, spec=spec, horizon_s=_horizon_s(horizon)))


def _show(ctx: typer.Context, request: Plan, what: str, output: Format) -> None:
    here = session(ctx)
    finish(_asked(here, request), what, output, here)


def _asked(here: Session, request: Plan) -> Planned:
    return here.run(lambda client: client.plan(request))


def _horizon_s(text: str) -> float:
    found_s = seconds(text, flag="horizon")
    if found_s <= 0:
        raise ConfigError(f"--horizon: {text!r}, expected more than 0 seconds")
    return found_s


# --- output -------------------------------------------------------------------------------------


def finish(found: Planned, what: str, output: Format, here: Session) -> None:
    """Print a plan and exit with 0 or 1.

    Raises:
        ConfigError: `-o name`, as a plan has no name.
        typer.Exit: always, unless nothing would change.
    """
    if output == Format.NAME:
        raise ConfigError("-o name: a plan has no name; leave -o out for its text, or -o json")
    if output == Format.JSON:
        put_json({"plan": {**fields(found), "has_changes": found.has_changes}})
    else:
        put(here, _lines(found, what, here, is_wide=output == Format.WIDE))
    if found.has_changes:
        raise typer.Exit(EXIT_CHANGES)


def _lines(found: Planned, what: str, here: Session, *, is_wide: bool) -> Iterator[str]:
    yield f"plan: {what}"
    if found.refused:
        yield f"refused: {found.refused}"
        return
    if found.start is not None:
        yield from _start_lines(found.start)
    for warning in found.warnings:
        yield f"warning: {warning}"
    width = here.out.width
    if found.kind == PlanKind.QUEUE:
        yield from _turn_lines(found, width)
    else:
        yield from _difference_lines(found, width, is_wide=is_wide)
    ahead, took = duration(found.played_s), duration(found.took_s)
    yield f"\nplayed {ahead} ahead in {took}; {'; '.join(found.assumptions)}"


def _difference_lines(found: Planned, width: int, *, is_wide: bool) -> Iterator[str]:
    for heading, rows in (("now", found.now), ("later", found.later)):
        if rows:
            yield f"\n{heading}:"
            yield from map(str, table(rows, _STEPS, width=width, is_wide=is_wide))
    if found.effects:
        yield "\njobs affected:"
        shown = found.effects if is_wide else found.effects[:EFFECTS_SHOWN]
        yield from map(str, table(shown, _EFFECTS, width=width, is_wide=is_wide))
        if len(shown) < len(found.effects):
            yield f"and {len(found.effects) - len(shown)} more (-o wide)"
    if found.moves:
        yield "\nnodes:"
        yield from map(str, table(found.moves, _MOVES, width=width, is_wide=is_wide))
    if not found.has_changes and not (found.kind == PlanKind.JOB and found.target):
        yield "nothing would change"


def _turn_lines(found: Planned, width: int) -> Iterator[str]:
    if not found.turns:
        yield "no job that waits is expected to start in this time"
        return
    yield "\nexpected starts:"
    yield from map(str, table(found.turns, _TURNS, width=width, is_wide=False))
    if found.turns_cut:
        yield f"and {found.turns_cut} more"


def _start_lines(start: PlanStart) -> Iterator[str]:
    where = f" on {', '.join(start.nodes)} ({counted(start.gpus, 'GPU')})"
    if start.in_s is None:
        why = (
            f"unknown: {start.unknown}" if start.unknown else "not within the time that was played"
        )
        yield f"starts: {why}"
    else:
        yield f"starts {_when(start.in_s)}{where}"
    for end in start.after:
        by = f"by {end.source}"
        yield f"  after {end.job_id} ({end.name}, {end.tenant}) ends {_when(end.in_s)}, {by}"
    for why in start.waits_for:
        yield f"  waits for: {why}"


def _when(in_s: float | None) -> str:
    if in_s is None:
        return "-"
    return "now" if in_s < 1 else f"in {duration(in_s)}"


def _stages(row: PlanMove) -> str:
    return ", ".join(f"{name} {number(took_s)} s" for name, took_s in row.stages_s.items())


def _moves_by(row: PlanEffect) -> str:
    return duration(row.later_s) if row.later_s else "-"


_STEPS = (
    Column[PlanStep]("WHEN", lambda row: _when(row.in_s)),
    Column[PlanStep]("ACTION", lambda row: row.action),
    Column[PlanStep]("SUBJECT", lambda row: row.subject),
    Column[PlanStep]("OF", lambda row: row.whose, is_elastic=True, rank=1),
    Column[PlanStep]("WHAT", lambda row: row.what, is_elastic=True),
    Column[PlanStep]("WHY", lambda row: row.reason, is_elastic=True, rank=2),
)
_EFFECTS = (
    Column[PlanEffect]("JOB", lambda row: row.job_id),
    Column[PlanEffect]("NAME", lambda row: row.name, is_elastic=True),
    Column[PlanEffect]("TENANT", lambda row: row.tenant),
    Column[PlanEffect]("WHAT", lambda row: row.what),
    Column[PlanEffect]("WHEN", lambda row: _when(row.in_s), is_number=True),
    Column[PlanEffect]("LOSES GPU-S", lambda row: number(row.lost_gpu_s), is_number=True),
    Column[PlanEffect]("LATER BY", _moves_by, is_number=True),
    Column[PlanEffect]("AGAIN", lambda row: _when(row.again_in_s), is_number=True),
)
_TURNS = (
    Column[PlanTurn]("JOB", lambda row: row.job_id),
    Column[PlanTurn]("NAME", lambda row: row.name, is_elastic=True),
    Column[PlanTurn]("TENANT", lambda row: row.tenant),
    Column[PlanTurn]("WHEN", lambda row: _when(row.in_s), is_number=True),
    Column[PlanTurn]("GPUS", lambda row: str(row.gpus), is_number=True),
    Column[PlanTurn]("NODES", lambda row: ", ".join(row.nodes), is_elastic=True),
)
_MOVES = (
    Column[PlanMove]("NODE", lambda row: row.node),
    Column[PlanMove]("SERVICE", lambda row: row.service),
    Column[PlanMove]("IS", lambda row: row.to),
    Column[PlanMove]("WHEN", lambda row: _when(row.in_s), is_number=True),
    Column[PlanMove]("PROMISED", lambda row: duration(row.deadline_s), is_number=True),
    Column[PlanMove]("STAGES", _stages, is_elastic=True),
    Column[PlanMove]("BY", lambda row: row.source, is_elastic=True, rank=1),
)
