"""The command `aryl policies`: what a coordinator or simulator on this machine can run.

It loads every policy, so its module is loaded late; see `app.LATE`.
"""

from __future__ import annotations

import msgspec
import typer

from coordinator import plugins
from coordinator.cli.output import (
    Format,
    NoHeadersOption,
    OutputOption,
    QuietOption,
    Show,
    put_rows,
)
from coordinator.cli.render import Column
from coordinator.cli.session import say, session
from coordinator.policies.knob_text import Knob, knobs
from coordinator.policies.policy import Parts
from coordinator.policies.registry import every


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that this version or another distribution has.

    origin: `built-in`, or the distribution and its version.
    """

    name: str
    description: str
    origin: str
    parts: Parts
    knobs: tuple[Knob, ...]


BUILT_IN = "built-in"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("policies")(policies)


def policies(
    ctx: typer.Context,
    output: OutputOption = Format.TABLE,
    no_headers: NoHeadersOption = False,
    quiet: QuietOption = False,
) -> None:
    """List the policies that a coordinator or simulator on this machine can run; needs no cell.

    `-o wide` and `-o json` show the parts of each policy and its knobs with values and defaults.
    """
    origins = {each.name: each.origin for each in plugins.load() if not each.problem}
    rows = [
        PolicyRow(
            name=made.name,
            description=made.description,
            origin=origins.get(made.name, BUILT_IN),
            parts=made.parts,
            knobs=knobs(made),
        )
        for _, made in sorted(every().items())
    ]
    table: list[Column[PolicyRow]] = [
        Column("POLICY", lambda row: row.name),
        Column("WHAT IT DOES", lambda row: row.description, is_elastic=True),
        Column("ORIGIN", lambda row: row.origin, rank=1),
        Column("PARTS", _parts, is_wide=True),
        Column("KNOBS", _knobs, is_wide=True),
    ]
    show = Show(output=output, has_headings=not no_headers, is_quiet=quiet)
    put_rows(session(ctx), show, "policies", rows, table, lambda row: row.name)
    for problem in plugins.problems():
        say(f"aryl: {problem}")


def _parts(row: PolicyRow) -> str:
    parts = msgspec.structs.asdict(row.parts)
    return "; ".join(f"{part}: {text}" for part, text in parts.items() if text)


def _knobs(row: PolicyRow) -> str:
    return "; ".join(f"{knob.name}={knob.default} ({knob.values})" for knob in row.knobs)
