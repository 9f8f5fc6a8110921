"""What a line of a failed program's log is worth as evidence: of its end, or said in passing. Pure.

A log is full of errors that its program got over: an optional module that is not there, a download
that was tried again. Three things tell these apart. An exception that nobody caught is printed at
the end of a traceback. A line may say itself that it was got over ("WARNING", "falling back").
And whoever goes on training after an error was not ended by it. A traceback alone is no proof: who
catches an exception may print it just so. It ended the program unless training went on for long
after it and the log tells another end. Must not know what words mean which failure.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from msgspec import Struct

GOES_ON_LINES = 10
"""After so many lines of progress an error was got over. Not fewer: of ranks that write to one log
some print a few more after another one has failed."""
OUTLIVED_LINES = 100
"""After so many lines of progress an exception with its traceback was caught, if the program had
another end. More than above, since a traceback mostly is the end: of sixteen ranks in one log each
may still print some lines before it waits for the one that died."""
LONGEST_TRACEBACK_LINES = 400
HEADER = "Traceback (most recent call last):"

_LEVEL = re.compile(
    r"(?<!NCCL )\b(?:WARN|WARNING|DEBUG)\b|Warning: |^(?:\[\w+\]: ?)*W\d{4} |: W \w+/"
)
_WORDS = re.compile(
    r"(?i:\b(?:ignoring|ignored|skipping|skipped|falling back|fall back|falls back|fallback"
    r"|retrying|will retry|will be retried|trying again|will try again"
    r"|not used|disabled|continuing|going on without|from scratch|starting over)\b)"
)
_UNHEARD = re.compile(r"^Exception ignored (?:in|on|while)\b")
_THREAD = re.compile(r"^Exception in thread ")
_PROGRESS = re.compile(
    r"(?i)\b(?:global_?step|step|epoch|iter|iteration|batch|loss)\b\W{0,3}\d"
    r"|\d ?(?:it/s|s/it)\b"
)
_FRAME = re.compile(r'^\s+File ".*", line \d+, in (\S+)')
_OUTERMOST = frozenset({"<module>", "_run_module_as_main", "_bootstrap"})
"""Where a program or a process begins, and so does the traceback of what nobody caught."""


class Sighting(Struct, frozen=True, kw_only=True):
    """Where a signature was seen.

    line: number of it in the log. order: of the signature among all; the less comes first.
    is_certain: the system said so. is_end: the program ended by it, so far as can be told.
    steps_after_cause: of its signature.
    """

    line: int
    order: int
    is_certain: bool
    is_end: bool
    is_outlived: bool
    steps_after_cause: int


def decisive(sightings: Iterable[Sighting]) -> Sighting | None:
    """The one that says most of why the program ended.

    A root cause counts more than what follows from one, unless it was only told after that and not
    as an end: a script that goes on after a failure complains of what the failure left undone.
    Among equals the system's word goes first, then an end before what was told in passing, then the
    later line, and within a line the signature that comes first. What the program outlived counts
    where nothing else was seen.
    """
    told = list(sightings)
    by_steps: dict[int, list[Sighting]] = {}
    for each in [each for each in told if not each.is_outlived] or told:
        by_steps.setdefault(each.steps_after_cause, []).append(each)
    best: Sighting | None = None
    for steps in sorted(by_steps, reverse=True):
        before = float("inf") if best is None else best.line
        found = [each for each in by_steps[steps] if each.is_end or each.line <= before]
        best = max(found, key=_weight, default=best)
    return best


def _weight(sighting: Sighting) -> tuple[bool, bool, int, int]:
    return sighting.is_certain, sighting.is_end, sighting.line, -sighting.order


class LogLines:
    """The lines of a log, as evidence.

    Args:
        text: of all of it.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        progress = [at for at, line in enumerate(self._lines) if _PROGRESS.search(line)]
        self._last_progress = progress[-1] if progress else -1
        self._goes_on_until = progress[-GOES_ON_LINES] if len(progress) >= GOES_ON_LINES else 0
        self._outlived_until = progress[-OUTLIVED_LINES] if len(progress) >= OUTLIVED_LINES else 0
        self._ends: set[int] = set()
        self._outlived: set[int] = set()
        self._unheard: set[int] = set()
        self._read_tracebacks()

    def number_at(self, offset: int) -> int:
        """Of the line in which a character stands."""
        return bisect_right(self._starts, offset) - 1

    def line(self, number: int) -> str:
        """One of them."""
        return self._lines[number]

    def is_end(self, number: int) -> bool:
        """Whether it is an exception that nobody caught."""
        return number in self._ends

    def after(self, number: int) -> str:
        """All that was told after a line."""
        return self._text[self._starts[number + 1] :]

    def is_outlived(self, number: int) -> bool:
        """Whether it is an exception that was caught, if the program had another end."""
        return number in self._outlived

    def is_got_over(self, number: int) -> bool:
        """Whether the program went on after what it says."""
        if number in self._ends:
            return False
        if number in self._unheard or number < self._goes_on_until:
            return True
        line = self._lines[number]
        return _LEVEL.search(line) is not None or _WORDS.search(line) is not None

    def _read_tracebacks(self) -> None:
        caught: set[tuple[str, ...]] = set()  # their paths
        for number, line in enumerate(self._lines):
            at = line.find(HEADER)
            if at < 0:
                continue
            end, path = self._exception_of(number, line[:at])
            before = self._lines[number - 1].removeprefix(line[:at]) if number else ""
            if end is None or _THREAD.match(before):
                continue  # a thread that ends is not the program's end
            is_told = (
                _LEVEL.search(before) and self._last_progress > end
            )  # logged, with where it was
            if is_told or _UNHEARD.match(before):
                self._unheard.add(end)
                continue
            self._ends.add(end)
            if end < self._outlived_until or path in caught:
                self._outlived.add(end)
                if len(path) > 1 and path[0] not in _OUTERMOST:
                    caught.add(path)  # a loop that goes on after each: it does so again

    def _exception_of(self, header: int, prefix: str) -> tuple[int | None, tuple[str, ...]]:
        """The line of the exception, the first one that is not set in; and how it came about.

        The latter names the calls, the outermost first, and the kind of exception. Ranks have a
        prefix each.
        """
        calls: list[str] = []
        for number in self._after(header):
            line = self._lines[number]
            if prefix and not line.startswith(prefix):
                continue  # another rank's
            body = line[len(prefix) :]
            if body and not body[0].isspace():
                return number, (*calls, body.partition(":")[0])
            if frame := _FRAME.match(body):
                calls.append(frame[1])
        return None, ()

    def _after(self, number: int) -> Iterator[int]:
        yield from range(number + 1, min(len(self._lines), number + LONGEST_TRACEBACK_LINES))
