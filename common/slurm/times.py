"""Times in Slurm's forms: limits such as `1-12:00:00`, and instants such as `now-2days`."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

_LIMIT = re.compile(
    r"(?:(?P<days>\d+)-(?P<of_day>\d+(?::\d+){0,2})|(?P<plain>\d+(?::\d+){0,2}))", re.ASCII
)
UNLIMITED = ("UNLIMITED", "INFINITE", "-1")
FORMS = "expected minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED"
_LONG_S = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400, "week": 604_800}
_UNITS_S = _LONG_S | {"sec": 1, "min": 60} | {name[0]: unit_s for name, unit_s in _LONG_S.items()}
_FROM_NOW = re.compile(r"now(?:(?P<sign>[+-])(?P<count>\d+)(?P<unit>[a-z]*))?", re.ASCII)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*([ap]m)?", re.ASCII)
_DATE = re.compile(
    r"(?:(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"
    r"|(?P<us_month>\d{1,2})[/.](?P<us_day>\d{1,2})(?:[/.](?P<us_year>\d{2}))?"
    r"|(?P<packed>\d{4}|\d{6}))",
    re.ASCII,
)
INSTANTS = "expected YYYY-MM-DD[THH:MM[:SS]], HH:MM[:SS], MM/DD[/YY], today, or now-2days"


def limit_s(text: str) -> float | None:
    """A time limit in seconds; None: no limit, which 0 means as well.

    Raises:
        ValueError: the text has none of Slurm's forms.
    """
    if text.strip().upper() in UNLIMITED:
        return None
    found = _LIMIT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r}, {FORMS}")
    if found["days"] is not None:
        hours, minutes, seconds = ([int(part) for part in found["of_day"].split(":")] + [0, 0])[:3]
        total_s = int(found["days"]) * 86_400 + hours * 3_600 + minutes * 60 + seconds
    else:
        parts = [int(part) for part in found["plain"].split(":")]
        if len(parts) == 1:
            total_s = parts[0] * 60
        elif len(parts) == 2:
            total_s = parts[0] * 60 + parts[1]
        else:
            total_s = parts[0] * 3_600 + parts[1] * 60 + parts[2]
    return float(total_s) or None


def short(seconds: float | None) -> str:
    """As `squeue` shows a length: `59`'s `0:59`, `1:00:00`, `1-00:00:00`; None: `UNLIMITED`."""
    if seconds is None:
        return "UNLIMITED"
    days, hours, minutes, rest = _parts(seconds)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def full(seconds: float | None) -> str:
    """As `sacct` and `scontrol` show a length: `00:00:59`; None: `UNLIMITED`."""
    if seconds is None:
        return "UNLIMITED"
    days, hours, minutes, rest = _parts(seconds)
    return (f"{days}-" if days else "") + f"{hours:02}:{minutes:02}:{rest:02}"


def _parts(seconds: float) -> tuple[int, int, int, int]:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return days, hours, minutes, rest


def instant(at_s: float | None, *, missing: str = "Unknown") -> str:
    """An instant (seconds since 1970) in local time, as Slurm shows it."""
    return missing if at_s is None else f"{datetime.fromtimestamp(at_s):%Y-%m-%dT%H:%M:%S}"  # noqa: DTZ006 - Slurm's form has no offset


def at_s(text: str, *, now_s: float, forms: str = INSTANTS) -> float:
    """An instant of local time in seconds since 1970.

    forms: what an error says was expected.

    Raises:
        ValueError: the text has none of Slurm's forms.
    """
    asked = text.strip().lower()
    now = datetime.fromtimestamp(now_s)  # noqa: DTZ006 - Slurm's form has no offset
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    named = {
        "today": today,
        "midnight": today,
        "noon": today.replace(hour=12),
        "tomorrow": today + timedelta(days=1),
    }
    if asked in named:
        return named[asked].timestamp()
    if (relative := _FROM_NOW.fullmatch(asked)) is not None:
        return now_s + _shift_s(relative, text, forms)
    date, _, clock = asked.partition("t") if "-" in asked else asked.partition("-")
    if _CLOCK.fullmatch(asked):
        date, clock = "", asked
    try:
        day = _day(date, today) if date else today
        return _on(day, clock).timestamp() if clock else day.timestamp()
    except ValueError:
        raise ValueError(f"{text!r}, {forms}") from None


def _shift_s(found: re.Match[str], text: str, forms: str) -> float:
    if found["sign"] is None:
        return 0.0
    unit = found["unit"].removesuffix("s") or "second"
    if unit not in _UNITS_S:
        raise ValueError(f"{text!r}: {found['unit']!r} is no unit of time, {forms}")
    shift_s = int(found["count"]) * _UNITS_S[unit]
    return float(-shift_s if found["sign"] == "-" else shift_s)


def _day(text: str, today: datetime) -> datetime:
    found = _DATE.fullmatch(text)
    if found is None:
        raise ValueError(text)
    if found["year"]:
        year, month, day = found["year"], found["month"], found["day"]
    elif found["us_month"]:
        year, month, day = found["us_year"], found["us_month"], found["us_day"]
    else:
        packed = found["packed"]
        year, month, day = packed[4:], packed[:2], packed[2:4]
    number = int(year) if year else today.year
    return today.replace(
        year=number + (2000 if number < 100 else 0), month=int(month), day=int(day)
    )


def _on(day: datetime, text: str) -> datetime:
    found = _CLOCK.fullmatch(text)
    if found is None:
        raise ValueError(text)
    hour = int(found[1])
    if found[4]:
        hour = hour % 12 + (12 if found[4] == "pm" else 0)
    return day.replace(hour=hour, minute=int(found[2]), second=int(found[3] or 0))
