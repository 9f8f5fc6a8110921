"""Output of one answer: table, JSON or names.

JSON is for programs: one object with `schema_version`, every field of the API's rows under its own
name, instants as seconds since 1970 (`*_at_s`), lengths in seconds (`*_s`). A field is only ever
added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar, cast

import msgspec
import typer
from rich.text import Text

from common.api import SCHEMA_VERSION
from common.terminal import escaped, visible
from coordinator.cli.render import Column, table
from coordinator.cli.session import Session

R = TypeVar("R", bound=msgspec.Struct)


class Format(StrEnum):
    """How data is printed."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    NAME = "name"


OutputOption = Annotated[
    Format, typer.Option("-o", "--output", help="How to print: table, wide, json or name.")
]
NoHeadersOption = Annotated[bool, typer.Option("--no-headers", help="Tables without headings.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print ids only.")]


class Show(msgspec.Struct, frozen=True, kw_only=True):
    """The options on output."""

    output: Format = Format.TABLE
    has_headings: bool = True
    is_quiet: bool = False

    @property
    def form(self) -> Format:
        """`--quiet` is `-o name`."""
        return Format.NAME if self.is_quiet else self.output


def fields(value: object) -> Any:
    """A struct as plain values, every field of it, defaults and None included.

    msgspec would omit defaults; a program that reads JSON wants them. A field that the wire omitted
    because it was unchanged is None.
    """
    if value is msgspec.UNSET:
        return None
    if isinstance(value, msgspec.Struct):
        return {name: fields(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        return {str(key): fields(item) for key, item in items.items()}
    if isinstance(value, tuple | list):
        return [fields(item) for item in cast("Sequence[object]", value)]
    return msgspec.to_builtins(value)


def put(session: Session, lines: Iterable[Text | str]) -> None:
    """Lines of data on standard output."""
    out = session.out
    for line in lines:
        out.print(line)


def put_json(values: Mapping[str, object]) -> None:
    """One JSON object with its schema version, on one line."""
    typer.echo(json_text(values))


def json_text(values: Mapping[str, object]) -> str:
    """One JSON object with its schema version, as text without a line's end."""
    data = msgspec.json.encode({"schema_version": SCHEMA_VERSION, **values})
    return escaped(data.decode())


def put_rows(
    session: Session,
    show: Show,
    key: str,
    rows: Sequence[R],
    columns: Sequence[Column[R]],
    name: Callable[[R], str],
) -> None:
    """Rows as `show` says; in JSON they are a list under `key`."""
    match show.form:
        case Format.JSON:
            put_json({key: [fields(row) for row in rows]})
        case Format.NAME:
            put(session, [name(row) for row in rows])
        case Format.TABLE | Format.WIDE:
            put(
                session,
                table(
                    rows,
                    columns,
                    width=session.out.width,
                    is_wide=show.form == Format.WIDE,
                    has_headings=show.has_headings,
                ),
            )


def put_one(show: Show, key: str, value: msgspec.Struct, name: str) -> bool:
    """One thing as JSON or by name; False when `show` wants it for people."""
    match show.form:
        case Format.JSON:
            put_json({key: fields(value)})
        case Format.NAME:
            typer.echo(visible(name))
        case Format.TABLE | Format.WIDE:
            return False
    return True
