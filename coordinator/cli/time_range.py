"""Times as people type and read them: `2h`, `2026-11-28`, `2026-11-28T14:00`; in the local zone."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

import typer

from common.errors import ConfigError

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_FORMS = "such as 2h, 30m, 7d, 2026-11-28, 2026-11-28T14:00 or 2026-11-28T14:00+01:00"

SinceOption = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="From then on: 2h, 7d (ago), 2026-11-28 or 2026-11-28T14:00, in local time.",
    ),
]
UntilOption = Annotated[
    str, typer.Option(metavar="TIME", help="Up to then, excluded. Default: now.")
]


def instant_of(text: str, *, now_s: float, field: str) -> float | None:
    """Seconds since 1970 of a time that a person typed; None for an empty text.

    Raises:
        ConfigError: it is no time; names the field and the forms that are understood.
    """
    if not text:
        return None
    ago = re.fullmatch(_AGO, text.strip())
    if ago is not None:
        return now_s - float(ago[1]) * UNITS_S[ago[2]]
    try:
        found = datetime.fromisoformat(text.strip())
        # Without an offset it is local, by the offset of that day.
        return found.astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(f"--{field}: {text!r} is no time, expected one {_FORMS}") from None


def local(at_s: float) -> str:
    """An instant as RFC 3339 in the local zone, to the second."""
    return datetime.fromtimestamp(at_s, UTC).astimezone().isoformat(timespec="seconds")
