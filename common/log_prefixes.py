"""Removes prefixes that terminals and launchers add to a program's log lines. Pure.

`mpirun`, `srun -l`, Ray and others put the sender before each line, terminals get color codes, and
a log driver adds the time. Some of these forms are unmistakable. "n7: " and "3: " are not, since
commands print these words too: they count as prefixes where at least half of the log's lines begin
so. Any other text that stands before a traceback's header and also before its frames is removed
from all lines that begin with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

HEADER = "Traceback (most recent call last):"
MOST_PREFIX_CHARS = 80
"""A longer text is no prefix, but a line that quotes a traceback."""

_CODES = re.compile(r"\x1b(?:\[[0-9;:?]{0,40}[A-Za-z]|\][^\x07\n]{0,200}\x07|\([A-Z0-9])")
"""Terminal codes: colors and movements, titles, character sets (ECMA-48, section 5.4)."""
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?[ \t]")
_NAMES = re.compile(
    r"\[\w*\d\]: ?"  # torchrun, and the prefix that PyTorch writes before a rank's traceback
    r"|\[\d+,\d+\](?:<\w+>)?: ?"  # mpirun --tag-output, with a space from Open MPI 5 on
    r"|\[\d+\](?:\[\d+\])?<\w+>: ?"  # horovodrun
    r"|\((?:[^()\n]{0,60} )?pid=\d+(?:, ip=[\w.:]+)?\) "  # Ray
    r"|[a-z0-9][a-z0-9_.-]{0,60}[-_]\d+ {1,40}\| "  # docker compose
)
_MAYBE_NAMES = re.compile(
    r" {0,5}\d{1,6}: "  # srun -l, which fills up with spaces
    r"|\d{1,3}(?:\.\d{1,3}){3}: "
    r"|(?![^\s:]*\.(?:sh|py|so)\b)(?=[a-z.-]*\d)[a-z][a-z0-9-]{0,62}(?:\.[a-z0-9-]{1,63}){0,8}: "
)
"""Names of hosts under pdsh, or of tasks. A digit distinguishes a host's name from a command's."""
_FRAME = '  File "'


class Line(Struct, frozen=True):
    """One line of a log: the program's text, and the speaker that a launcher names ("": none)."""

    text: str
    speaker: str = ""


def bare_lines(lines: Sequence[str]) -> list[Line]:
    """The lines as the program wrote them, each with its speaker."""
    told = [_without_names(_CODES.sub("", line)) for line in lines]
    if _are_named(told):
        told = [_without_maybe(line) for line in told]
    shared = _shared_prefixes(told)
    return [_without(line, shared) for line in told] if shared else told


def _without_names(text: str, speaker: str = "") -> Line:
    """The line without names and times, in any order; the time is no part of the speaker."""
    while True:
        if match := _NAMES.match(text):
            speaker += match[0]
        else:
            match = _TIME.match(text)
        if match is None:
            return Line(text, speaker)
        text = text[match.end() :]


def _without_maybe(line: Line) -> Line:
    """The line without one name of these and the text after it: a rank has its host's name."""
    match = _MAYBE_NAMES.match(line.text)
    if match is None:
        return line
    return _without_names(line.text[match.end() :], line.speaker + match[0])


def _are_named(lines: Sequence[Line]) -> bool:
    spoken = [line.text for line in lines if line.text.strip()]
    return sum(_MAYBE_NAMES.match(text) is not None for text in spoken) * 2 >= len(spoken)


def _shared_prefixes(lines: Sequence[Line]) -> tuple[str, ...]:
    """The prefixes before a header and, with the same speaker, before a frame; longest first."""
    before: list[set[str]] = [set(), set()]
    for line in lines:
        for mark, found in zip((HEADER, _FRAME), before, strict=True):
            at = line.text.find(mark)
            if 0 < at <= MOST_PREFIX_CHARS and line.text[:at].strip():
                found.add(line.text[:at])
    return tuple(sorted(before[0] & before[1], key=lambda prefix: (-len(prefix), prefix)))


def _without(line: Line, prefixes: tuple[str, ...]) -> Line:
    if not line.text.startswith(prefixes):
        return line
    prefix = next(prefix for prefix in prefixes if line.text.startswith(prefix))
    return Line(line.text[len(prefix) :], line.speaker + prefix)
