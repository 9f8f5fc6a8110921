"""File names of output with `%j` and its like (sbatch(1), "filename pattern")."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PART = re.compile(r"%(\d*)([A-Za-z%])", re.ASCII)
LETTERS = "AaJjNnstux%"
MAX_WIDTH = 10
NO_TASK = "4294967294"
"""What `%a` stands for in a job that is no task of an array."""


def misfit(pattern: str) -> str:
    """The first part that means nothing here; empty where all parts do."""
    unknown = (found[0] for found in _PART.finditer(pattern) if found[2] not in LETTERS)
    return next(unknown, "")


def filled(pattern: str, values: Mapping[str, str]) -> str:
    """The file name of a pattern.

    Args:
        values: by letter; a number before the letter fills a decimal value up with zeros.
    """

    def value(found: re.Match[str]) -> str:
        if found[2] == "%":
            return "%"
        text = values.get(found[2], "")
        width = min(int(found[1] or 0), MAX_WIDTH)
        return text.zfill(width) if text.isdecimal() else text

    return _PART.sub(value, pattern)
