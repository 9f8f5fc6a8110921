"""The commands that jobs, nodes, services and loans share: list, describe, explain, one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer
from msgspec import Struct

from coordinator.cli.describe import describe, explain
from coordinator.cli.operate import ReasonOption, order
from coordinator.cli.output import (
    Format,
    NoHeadersOption,
    OutputOption,
    QuietOption,
    Show,
    put_rows,
)
from coordinator.cli.render import Column
from coordinator.cli.session import Session, session
from coordinator.engine.state.events import OperatorAction

R = TypeVar("R", bound=Struct)


def add_list(
    app: typer.Typer,
    key: str,
    rows: Callable[[Session], Sequence[R]],
    *,
    columns: Callable[[], Sequence[Column[R]]],
    name: Callable[[R], str],
    about: str,
) -> None:
    """Add `list`; its rows stand under `key` in JSON."""

    def command(
        ctx: typer.Context,
        output: OutputOption = Format.TABLE,
        no_headers: NoHeadersOption = False,
        quiet: QuietOption = False,
    ) -> None:
        here = session(ctx)
        found = rows(here)
        show = Show(output=output, has_headings=not no_headers, is_quiet=quiet)
        put_rows(here, show, key, found, columns(), name)

    app.command("list", help=about)(command)


def add_describe(app: typer.Typer, kind: str, argument: object, *, about: str) -> None:
    """Add `describe`; `argument` is the annotation of the one that names the thing."""
    _add_view(app, "describe", describe, kind, argument, about)


def add_explain(app: typer.Typer, kind: str, argument: object, *, about: str) -> None:
    """Add `explain`; `argument` as for `describe`."""
    _add_view(app, "explain", explain, kind, argument, about)


def _add_view(
    app: typer.Typer,
    verb: str,
    view: Callable[[Session, Show, str, str], None],
    kind: str,
    argument: object,
    about: str,
) -> None:
    def command(
        ctx: typer.Context,
        name: str,
        output: OutputOption = Format.TABLE,
        quiet: QuietOption = False,
    ) -> None:
        view(session(ctx), Show(output=output, is_quiet=quiet), kind, name)

    app.command(verb, help=about)(_naming(command, argument))


def add_order(
    app: typer.Typer, verb: str, action: OperatorAction, argument: object, *, about: str
) -> None:
    """Add an order for one thing that costs no job anything, so no confirmation is needed."""

    def command(
        ctx: typer.Context,
        name: str,
        reason: ReasonOption = "",
        output: OutputOption = Format.TABLE,
    ) -> None:
        order(session(ctx), action, target=name, reason=reason, output=output)

    app.command(verb, help=about)(_naming(command, argument))


def _naming(command: Callable[..., Any], argument: object) -> Callable[..., Any]:
    """The command with this annotation of its `name`: typer reads there how it is shown."""
    command.__annotations__["name"] = argument
    return command
