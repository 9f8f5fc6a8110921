"""Why a worker failed, and the retry class that follows: data only. Pure.

Reasons and retry classes are those of the Philly study (ATC'19, table 7 and section 5).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

MAX_LINE_CHARS = 300
"""A failure goes into a report and into the journal: it must not carry a page with it."""

Reason = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-z0-9_]+\Z")]
Title = Annotated[str, Meta(min_length=1, max_length=100)]
Line = Annotated[str, Meta(max_length=MAX_LINE_CHARS)]
Times = Annotated[int, Meta(ge=0, le=1_000_000)]


class RetryClass(StrEnum):
    """The retry class of a failure.

    `never`: it would fail again on every node. `elsewhere`: another node may run it. `back_off`: a
    while later it may run anywhere.
    """

    NEVER = "never"
    ELSEWHERE = "elsewhere"
    BACK_OFF = "back_off"


class Origin(StrEnum):
    """The people who have to look at a failure (table 7: IF, AE, U).

    `engine`: those who maintain the framework that the job runs in.
    """

    INFRASTRUCTURE = "infrastructure"
    ENGINE = "engine"
    USER = "user"


class Failure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Why one worker failed, as its node read it in the worker's log.

    most_retries: the number of further tries after this reason; None: the job's own budget applies.
    is_free: it is not the job's fault and does not count on its budget.
    suspects_node: the node's hardware is at fault.
    is_explicit: the log names the root cause; else only its outcome was seen.
    line: the line of the log that shows it.
    origins: the people who have to look at it; empty where its rule names none.
    """

    reason: Reason
    title: Title
    retry: RetryClass
    most_retries: Times | None = None
    is_free: bool = False
    suspects_node: bool = False
    is_explicit: bool = True
    line: Line = ""
    origins: tuple[Origin, ...] = ()

    def __str__(self) -> str:
        return f"{self.title} ({self.line})" if self.line else self.title


def is_more_telling(failure: Failure, other: Failure | None) -> bool:
    """True if, of two workers of a gang, the first one explains the gang's failure better.

    A root cause explains more than an outcome. When one worker dies its peers see a connection
    break, which only means to back off, so any other reason explains more than that.
    """
    return other is None or _rank(failure) > _rank(other)


def _rank(failure: Failure) -> tuple[bool, bool]:
    return failure.is_explicit, failure.retry != RetryClass.BACK_OFF
