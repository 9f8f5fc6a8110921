"""`aryl status`: the cell at a glance, with its figures.

People and monitors call it often, so it stands alone and loads little.
"""

from __future__ import annotations

import msgspec
import typer

from common.api import GetStatus, Status
from coordinator import plain_text
from coordinator.cli.output import Format, OutputOption, QuietOption, Show, put, put_one
from coordinator.cli.session import session


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(status)


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
