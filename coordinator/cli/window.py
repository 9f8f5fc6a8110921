"""The instant of `--at`: when a maintenance window begins, and which jobs it finds."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from msgspec import Struct

from common.api import MAX_WINDOW_S, JobRow
from common.apirows import RequestRow
from common.errors import ConfigError
from common.slurm import times
from coordinator.plain_text import duration, local_instant

FORMS = "expected a time to come: now+2hours, HH:MM, tomorrow or YYYY-MM-DDTHH:MM"
AtOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Drain at this time instead of now: 2026-12-05T06:00, with an offset such as +01:00 "
        "or in local time; HH:MM for today, tomorrow, or now+2hours.",
    ),
]


class Window(Struct, frozen=True):
    """An instant to come, by the clock of this machine."""

    at_s: float
    """Seconds since 1970."""

    @classmethod
    def at(cls, text: str, *, now_s: float) -> Window:
        """The instant that a text names.

        Raises:
            ConfigError: the text is no instant, or one that is past or too far ahead; names `--at`.
        """
        try:
            at_s = _at_s(text, now_s)
        except ValueError as error:
            raise ConfigError(f"--at: {error}") from None
        if at_s <= now_s:
            ago = duration(now_s - at_s)
            raise ConfigError(f"--at: {text!r} was {ago} ago, {FORMS}")
        if at_s - now_s > MAX_WINDOW_S:
            raise ConfigError(
                f"--at: {text!r} is {local_instant(at_s, now_s)}, expected at most "
                f"{duration(MAX_WINDOW_S)} from now"
            )
        return cls(at_s)

    def in_s(self, now_s: float) -> float:
        """Seconds until then: what an order carries, as clocks of two machines are not compared."""
        return max(0.001, self.at_s - now_s)

    def hits(self, row: JobRow) -> bool:
        """Whether a job with workers on a node may be there until then, by its time limit.

        On a lent node as well, where the loan ends before.
        """
        asked = row.request
        if not isinstance(asked, RequestRow) or asked.time_limit_s is None:
            return True
        ran_at_s = asked.attempt_started_at_s
        return ran_at_s is None or ran_at_s + asked.time_limit_s + asked.grace_s > self.at_s


def _at_s(text: str, now_s: float) -> float:
    """ISO 8601, without an offset in local time, or a form of Slurm; ValueError for others."""
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        return times.at_s(text, now_s=now_s, forms=FORMS)
