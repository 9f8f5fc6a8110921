"""Errors that decoders raise for damaged or hostile bytes, and a TOML reader with limits.

msgspec reports bad text as `UnicodeDecodeError` and depth as `RecursionError`; tomllib and json
report a number of too many digits as `ValueError`. A decoder of ours catches `UNREADABLE` and
raises its own error.
"""

from __future__ import annotations

import tomllib
from typing import Any, cast

UNREADABLE = (ValueError, RecursionError)
"""Every error that msgspec, json or tomllib raise for bad bytes; `msgspec.DecodeError`,
`TOMLDecodeError` and `UnicodeDecodeError` are `ValueError`s."""

MAX_TOML_DEPTH = 32
"""Depth of nested tables and lists; no file of ours needs five."""
_INT64 = range(-(2**63), 2**63)
"""The integers that TOML 1.0 requires of every reader; Python's tomllib takes longer ones."""


def parse_toml(text: str) -> dict[str, Any]:
    """The table that a TOML text is.

    Raises:
        ValueError: not TOML, nested deeper than `MAX_TOML_DEPTH`, or an integer beyond 64 bits;
            the text says which.
    """
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level: list[object] = [table]
    for _ in range(MAX_TOML_DEPTH):
        level = [item for value in level for item in _items(value)]
        if not level:
            return table
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"more than {MAX_TOML_DEPTH} nested tables and lists"


def _items(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    if isinstance(value, list):
        return cast("list[object]", value)
    if isinstance(value, int) and value not in _INT64:
        raise ValueError("an integer beyond 64 bits")
    return []
