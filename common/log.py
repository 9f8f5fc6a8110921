"""Sets up logging: one line per record to stderr, `key=value` for journald or JSON.

An edge: the only place that touches handlers.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from common.clock import Clock
from common.errors import ConfigError
from common.terminal import UNSAFE, escaped

LEVELS = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}
_PLAIN_VALUE = re.compile(r"[^\s\"=\\]+")
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_JOURNALD_PRIORITY = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}
# asyncio logs this about every TLS connection that nats-py closes; nothing is wrong.
_HARMLESS = ("returning true from eof_received()", "APPLICATION_DATA_AFTER_CLOSE_NOTIFY")


def set_up(
    *,
    level: str = "INFO",
    style: str = "plain",
    has_time: bool | None = None,
    stream: TextIO | None = None,
) -> None:
    """Send every log record to `stream` (stderr), replacing any earlier set-up.

    Args:
        level: DEBUG, INFO, WARNING, ERROR or CRITICAL, in any case.
        style: `plain` is `level=info logger=x msg="..." key=value`, `json` one object a line.
        has_time: whether lines carry a time; by default only where journald does not add one.

    Raises:
        ConfigError: the level or style is unknown.
    """
    name = level.upper()
    if name not in LEVELS:
        raise ConfigError(f"log level: {level!r} is not one of {', '.join(LEVELS)}")
    if style not in ("plain", "json"):
        raise ConfigError(f"log style: {style!r} is neither 'plain' nor 'json'")
    is_journald = stream is None and "JOURNAL_STREAM" in os.environ
    timed = not is_journald if has_time is None else has_time
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        JsonFormatter(has_time=timed)
        if style == "json"
        else PlainFormatter(has_time=timed, has_priority=is_journald)
    )
    handler.addFilter(_is_worth_a_line)
    logging.basicConfig(level=name, handlers=[handler], force=True)
    # nats-py at DEBUG logs the CONNECT payload, credentials included.
    logging.getLogger("nats").setLevel(max(logging.INFO, LEVELS[name]))


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that a call passed as `extra=`, in that order."""
    return {k: v for k, v in vars(record).items() if k not in _STANDARD_FIELDS}


REPEAT_PERIOD_S = 30.0
"""A lasting error is logged this often: some 3,000 lines a day, each with a count."""


class Throttle:
    """Lets one line of each text through per period, so that an outage does not fill a disk."""

    def __init__(self, clock: Clock, period_s: float = REPEAT_PERIOD_S) -> None:
        self._clock = clock
        self._period_s = period_s
        self._quiet_until_s: dict[str, float] = {}

    def is_due(self, text: str) -> bool:
        """True if this text may be logged now; it is then quiet for the next period."""
        now_s = self._clock.now_s()
        if now_s < self._quiet_until_s.get(text, now_s):
            return False
        self._quiet_until_s.pop(text, None)
        while self._quiet_until_s and next(iter(self._quiet_until_s.values())) <= now_s:
            del self._quiet_until_s[next(iter(self._quiet_until_s))]
        self._quiet_until_s[text] = now_s + self._period_s
        return True


class PlainFormatter(logging.Formatter):
    """`key=value` on one line; values with blanks or quotes are JSON strings.

    Args:
        has_priority: put journald's `<n>` in front, so that `journalctl -p` works.
    """

    def __init__(self, *, has_time: bool, has_priority: bool = False) -> None:
        super().__init__()
        self._has_time = has_time
        self._has_priority = has_priority

    def format(self, record: logging.LogRecord) -> str:
        """One line, even for a message with line breaks.

        A newline in it cannot forge a second one.
        """
        pairs = [f"{key}={_plain(value)}" for key, value in _pairs(record, self._has_time)]
        prefix = f"<{_JOURNALD_PRIORITY.get(record.levelno, 6)}>" if self._has_priority else ""
        return prefix + " ".join(pairs)


class JsonFormatter(logging.Formatter):
    """One JSON object on one line; values that JSON cannot hold become text."""

    def __init__(self, *, has_time: bool) -> None:
        super().__init__()
        self._has_time = has_time

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        pairs = dict(_pairs(record, self._has_time))
        return escaped(json.dumps(pairs, default=str, ensure_ascii=False))


def _pairs(record: logging.LogRecord, has_time: bool) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    if has_time:
        time = datetime.fromtimestamp(record.created, tz=UTC)
        pairs.append(("time", time.isoformat(timespec="milliseconds")))
    pairs += [
        ("level", record.levelname.lower()),
        ("logger", record.name),
        ("msg", record.getMessage()),
        *fields_of(record).items(),
    ]
    if record.exc_info:
        pairs.append(("error", logging.Formatter().formatException(record.exc_info)))
    return pairs


def _plain(value: object) -> str:
    text = str(value)
    if _PLAIN_VALUE.fullmatch(text) and not UNSAFE.search(text):
        return text
    return escaped(json.dumps(text, ensure_ascii=False))


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    if not record.name.startswith("asyncio"):
        return True
    text = record.getMessage() + (str(record.exc_info[1]) if record.exc_info else "")
    return not any(harmless in text for harmless in _HARMLESS)
