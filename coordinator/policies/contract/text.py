"""Text helpers: a count with its noun."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def number(count: int | Fraction) -> str:
    """`3`, or `2.7` where it is not whole."""
    return str(count) if isinstance(count, int) else f"{float(count):.1f}"


def counted(count: int | Fraction, one: str, many: str = "") -> str:
    """`1 node`, `2 nodes`, `0 nodes`.

    Args:
        one: the noun in the singular, with all that changes with the number: `counted(1, "node
            takes", "nodes take")`.
        many: the plural; by default with an s.
    """
    return f"{number(count)} {one}" if count == 1 else f"{number(count)} {many or one + 's'}"


def some(names: Sequence[str], most: int) -> str:
    """`a`, `a, b`, `a, b and 2 more` with at most a number of names; empty without names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


MOST_NAMES = 3
"""The most names in one sentence."""


def listed(names: Sequence[str], one: str, many: str) -> str:
    """`a takes`, `a and b take`, `a, b, c and 2 others take`, `no job takes`.

    Args:
        one, many: the verb for one name, and for several.
    """
    if len(names) < 2:
        return f"{names[0] if names else 'no job'} {one}"
    said, others = list(names[:MOST_NAMES]), len(names) - MOST_NAMES
    if others > 0:
        said.append(counted(others, "other"))
    return f"{', '.join(said[:-1])} and {said[-1]} {many}"


def unsaved(gpu_s: float) -> str:
    """For a job that is to stop: the work that its next start lacks unless it saves it now.

    It is not called lost: a job that saves when it is asked to loses none of it.

    Args:
        gpu_s: since its last checkpoint, in GPU-seconds.
    """
    whole = round(gpu_s)
    if not whole:
        return "all of its work is saved"
    return f"{counted(whole, 'GPU-s of its work is', 'GPU-s of its work are')} not saved yet"
