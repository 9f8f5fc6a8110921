"""`aryl report usage`: GPU time used, lent, lost and waited, by columns of choice."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Struct, structs
from rich.text import Text

from common.api import GetUsage, Usage, UsageRow
from common.errors import ConfigError
from common.terminal import visible
from coordinator.cli.output import NoHeadersOption, fields, json_text, put, put_json
from coordinator.cli.render import Column, table
from coordinator.cli.session import Session, say, session
from coordinator.cli.time_range import SinceOption, UntilOption, instant_of, local
from coordinator.client import Client

HOUR_S = 3600.0
MONTH = "30d"
DIMENSIONS = ("tenant", "user", "job", "service", "node", "gpu_type")


class ReportFormat(StrEnum):
    """How a report is printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


class Amount(Struct, frozen=True):
    """A column of amounts, in hours."""

    name: str
    heading: str
    of: Callable[[UsageRow], float]


AMOUNTS = (
    Amount("used_gpu_h", "USED", lambda r: (r.training_gpu_s + r.on_loan_gpu_s) / HOUR_S),
    Amount("training_gpu_h", "TRAINING", lambda r: r.training_gpu_s / HOUR_S),
    Amount("on_loan_gpu_h", "ON-LOAN", lambda r: r.on_loan_gpu_s / HOUR_S),
    Amount("lent_gpu_h", "LENT", lambda r: r.lent_gpu_s / HOUR_S),
    Amount("lost_gpu_h", "LOST", lambda r: r.lost_gpu_s / HOUR_S),
    Amount("waited_h", "WAITED", lambda r: r.waited_s / HOUR_S),
    Amount("waited_gpu_h", "WAITED-GPU", lambda r: r.waited_gpu_s / HOUR_S),
)
"""The columns after those that a report is split by."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.callback()(reports)
    app.command("usage")(usage)


def reports() -> None:
    """Reports over a span of time."""


def usage(
    ctx: typer.Context,
    by: Annotated[
        str,
        typer.Option(
            metavar="COLUMNS",
            help="What to split by: some of tenant, user, job, service, node, gpu_type.",
        ),
    ] = "tenant,user",
    since: SinceOption = MONTH,
    until: UntilOption = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Only of this tenant.")] = "",
    user: Annotated[str, typer.Option(metavar="NAME", help="Only of this person.")] = "",
    output: Annotated[
        ReportFormat,
        typer.Option("-o", "--output", help="How to print: table, csv, json or parquet."),
    ] = ReportFormat.TABLE,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to a file; parquet needs one.")
    ] = None,
    no_headers: NoHeadersOption = False,
) -> None:
    """Show GPU-hours used, lent, lost and waited, of what ended and of what still runs.

    Each interval counts with its part between --since and --until. USED is TRAINING plus ON-LOAN.
    LENT is the time of nodes on loan, held or not: it has no tenant, user or job. WAITED is time in
    the queue, in hours and times the GPUs of the smallest gang. A user sees the own tenant; tenant
    ops sees all.

    Example: aryl report usage --by tenant,gpu_type --since 2026-11-01 --until 2026-12-01 -o csv
    """
    here = session(ctx)
    if output == ReportFormat.PARQUET and to is None:
        raise ConfigError("--to: missing, expected a file for -o parquet")
    # Before the question: it may be a long one.
    write = parquet_writer() if output == ReportFormat.PARQUET else None
    now_s = here.clock.wall_s()
    since_s = instant_of(since, now_s=now_s, field="since")
    asked = GetUsage(
        by=columns_of(by),
        since_at_s=0.0 if since_s is None else since_s,
        until_at_s=instant_of(until, now_s=now_s, field="until"),
        tenant=tenant,
        user=user,
    )
    found = here.run(lambda client: whole(client, asked))
    if write is not None and to is not None:
        write(found, to)
    elif to is not None:
        to.write_text(_text(here, found, output, has_headings=not no_headers))
    elif output == ReportFormat.JSON:
        put_json(json_of(found))
    elif output == ReportFormat.CSV:
        sys.stdout.write(csv_of(found, has_headings=not no_headers))
    else:
        put(here, _table(here, found, has_headings=not no_headers))
    _tell_limits(asked, found, is_asked=since != MONTH)


def columns_of(text: str) -> tuple[str, ...]:
    """The columns of `--by`.

    Raises:
        ConfigError: an unknown one, none, or one twice.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown or not names or len(set(names)) < len(names):
        what = repr(unknown[0] if unknown else text)
        raise ConfigError(f"--by: {what}, expected some of {', '.join(DIMENSIONS)}, each once")
    return names


async def whole(client: Client, asked: GetUsage) -> Usage:
    """A report with all its rows; errors as `Client.ask`."""
    found = await client.ask(asked, Usage)
    rows = [*found.rows]
    while found.has_more and found.rows:
        found = await client.ask(structs.replace(asked, after=rows[-1].key), Usage)
        rows += found.rows
    return structs.replace(found, rows=tuple(rows), has_more=False)


def _text(here: Session, found: Usage, output: ReportFormat, *, has_headings: bool) -> str:
    """A report as the text of a file."""
    match output:
        case ReportFormat.CSV:
            return csv_of(found, has_headings=has_headings)
        case ReportFormat.JSON:
            return json_text(json_of(found)) + "\n"
        case _:
            lines = _table(here, found, has_headings=has_headings)
            return "".join(f"{visible(str(line))}\n" for line in lines)


def csv_of(found: Usage, *, has_headings: bool = True) -> str:
    """A report as CSV, with a heading; numbers in full."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if has_headings:
        writer.writerow([*found.by, *(amount.name for amount in AMOUNTS)])
    for row in found.rows:
        writer.writerow([*row.key, *(repr(amount.of(row)) for amount in AMOUNTS)])
    return out.getvalue()


def json_of(found: Usage) -> dict[str, object]:
    """A report as plain values: amounts in seconds, and the span as local times, too."""
    rows: list[dict[str, object]] = []
    for row in found.rows:
        values: dict[str, object] = fields(row)
        del values["key"]
        rows.append({**dict(zip(found.by, row.key, strict=True)), **values})
    return {
        "usage": rows,
        "since_at_s": found.since_at_s,
        "until_at_s": found.until_at_s,
        "since": local(found.since_at_s),
        "until": local(found.until_at_s),
    }


def parquet_writer() -> Callable[[Usage, Path], None]:
    """A function that writes a report as Parquet.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        pa: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f"-o parquet needs pyarrow ({error}): pip install 'aryl[parquet]', or use -o csv"
        ) from error

    def write(found: Usage, to: Path) -> None:
        columns = {
            name: pa.array([row.key[place] for row in found.rows], pa.string())
            for place, name in enumerate(found.by)
        }
        columns |= {
            amount.name: pa.array([amount.of(row) for row in found.rows], pa.float64())
            for amount in AMOUNTS
        }
        span = {"since": local(found.since_at_s), "until": local(found.until_at_s)}
        parquet.write_table(pa.table(columns).replace_schema_metadata(span), to)

    return write


def _table(here: Session, found: Usage, *, has_headings: bool) -> Sequence[Text]:
    columns = [
        Column(name.upper().replace("_", "-"), _part(place)) for place, name in enumerate(found.by)
    ]
    columns += [Column(each.heading, _hours(each.of), is_number=True) for each in AMOUNTS]
    lines = table(found.rows, columns, width=here.out.width, has_headings=has_headings)
    return list(lines)


def _part(place: int) -> Callable[[UsageRow], str]:
    return lambda row: row.key[place]


def _hours(amount: Callable[[UsageRow], float]) -> Callable[[UsageRow], str]:
    def text(row: UsageRow) -> str:
        hours = amount(row)
        return f"{hours:.1f}" if abs(hours) >= 100 else f"{hours:.3g}"

    return text


def _tell_limits(asked: GetUsage, found: Usage, *, is_asked: bool) -> None:
    """Say on stderr what the report cannot have; `is_asked`: a person chose its begin."""
    if found.missing_lines:
        say(
            f"{found.missing_lines} lines are not in this coordinator's index yet, and missing "
            "here; ask again"
        )
    kept_s = found.kept_since_at_s
    if kept_s is not None and is_asked and asked.since_at_s < kept_s:
        say(f"the history begins at {local(kept_s)}: nothing is known from before")
