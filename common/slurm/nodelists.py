"""Lists of node names in Slurm's form: `gpu[01-03,7],login`."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_NODES = 100_000
"""Above any fleet; a mistyped range must not fill the memory."""
_NUMBERED = re.compile(r"(.*?)(\d+)", re.ASCII | re.DOTALL)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def compress(names: Iterable[str]) -> str:
    """Names in one text: names that differ only by their last number share a bracket.

    The first name stays first; scripts take it for the first node of their job.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for name in dict.fromkeys(names):
        found = _NUMBERED.fullmatch(name)
        if found is None:
            groups.setdefault((name, 0), [])
        else:
            groups.setdefault((found[1], len(found[2])), []).append(int(found[2]))
    return ",".join(_group(prefix, width, numbers) for (prefix, width), numbers in groups.items())


def _group(prefix: str, width: int, numbers: list[int]) -> str:
    if not width:
        return prefix
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{width}}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [
        f"{low:0{width}}" if low == high else f"{low:0{width}}-{high:0{width}}"
        for low, high in runs
    ]
    return f"{prefix}[{','.join(parts)}]"


def expand(text: str) -> list[str]:
    """The names of a list.

    Raises:
        ValueError: a bracket that is not closed, no range, or more than `MAX_NODES` names.
    """
    names: list[str] = []
    for part in _split(text):
        names += _expanded(part)
        if len(names) > MAX_NODES:
            raise ValueError(f"{text[:60]!r}: more than {MAX_NODES} nodes")
    return names


def _split(text: str) -> Iterable[str]:
    """The parts between commas that stand in no bracket."""
    part, is_inside = "", False
    for letter in text:
        if letter == "," and not is_inside:
            if part:
                yield part
            part = ""
            continue
        if letter in "[]":
            if is_inside == (letter == "["):
                raise ValueError(f"{text!r}: brackets do not match")
            is_inside = letter == "["
        part += letter
    if is_inside:
        raise ValueError(f"{text!r}: brackets do not match")
    if part:
        yield part


def _expanded(part: str) -> list[str]:
    prefix, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    tails = _expanded(after) if after else [""]
    names: list[str] = []
    for piece in inside.split(","):
        found = _RANGE.fullmatch(piece)
        if found is None:
            raise ValueError(f"{part!r}: {piece!r} is no number and no range")
        low, high = int(found[1]), int(found[2] or found[1])
        if high - low >= MAX_NODES:
            raise ValueError(f"{part!r}: more than {MAX_NODES} nodes")
        width = len(found[1])
        names += [
            f"{prefix}{number:0{width}}{tail}" for number in range(low, high + 1) for tail in tails
        ]
    return names
