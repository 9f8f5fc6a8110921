"""Words in what people read: a count and what is counted. Must not know what the words are for."""

from __future__ import annotations

from fractions import Fraction


def number(count: int | Fraction) -> str:
    """`3`, or `2.7` where it is not whole."""
    return str(count) if isinstance(count, int) else f"{float(count):.1f}"


def counted(count: int | Fraction, one: str, many: str = "") -> str:
    """`1 node`, `2 nodes`, `0 nodes`.

    Args:
        one: what is counted, as one of it is called, with all that changes with the number:
            `counted(1, "node takes", "nodes take")`.
        many: the same of several; by default with an s.
    """
    return f"{number(count)} {one}" if count == 1 else f"{number(count)} {many or one + 's'}"
