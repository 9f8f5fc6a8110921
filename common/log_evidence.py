"""Weighs a line of a failed program's log: did this error end the program, or did it go on? Pure.

A log is full of errors that its program survived: an optional module that is missing, a download
that succeeded on a retry, a failed command of the start script. Four signs tell these apart. An
uncaught exception stands at the end of a traceback. A line may itself state that the program goes
on ("WARNING", "falling back"). A shell reports an error and goes on to the next command. And a
program that goes on training after an error was not ended by it.

A traceback alone is no proof, because code that catches an exception may print one. A traceback
ended the program unless training went on for long after it and the log shows another end.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import accumulate

from msgspec import Struct

from common.log_prefixes import HEADER, Line

GOES_ON_LINES = 10
"""After this many lines of progress the program survived the error. Not fewer: in one log of many
ranks, some print a few more lines after another one has failed."""
OUTLIVED_LINES = 100
"""After this many lines of progress an exception with its traceback was caught, if the program had
another end. More than above, since a traceback mostly is the end: of sixteen ranks in one log each
may still print some lines before it waits for the one that died."""
FAR_LINES = 10
"""With this many lines of other output between them two errors are far from each other."""
LONGEST_TRACEBACK_LINES = 400

_LEVEL = re.compile(r"(?<!NCCL )\b(?:WARN|WARNING|DEBUG)\b|Warning: |^W\d{4} |: W \w+/")
_WORDS = re.compile(
    r"(?i:\b(?:ignoring|ignored|skipping|skipped|falling back|fall back|falls back|fallback"
    r"|retrying|will retry|will be retried|trying again|will try again"
    r"|not used|disabled|continuing|going on without|from scratch|starting over)\b)"
)
_UNHEARD = re.compile(r"^Exception ignored (?:in|on|while)\b|^Error in atexit\._run_exitfuncs:")
_THREAD = re.compile(r"^Exception in thread ")
_PROGRESS = re.compile(
    r"(?i)\b(?:global_?step|step|epoch|iter|iteration|batch|loss)\b\W{0,3}\d"
    r"|\d ?(?:it/s|s/it)\b"
)
_COMMAND = re.compile(
    r"^(?!error:)-?(?:[a-z]|\.{0,2}/)[\w./+-]*: "
    r".*(?:(?::|command) not found|: (?:No such file or directory|Permission denied|Is a directory"
    r"|Not a directory|Operation not permitted|cannot modify limit))$"
)
"""The form of errors of a shell and its commands: the speaker first, and the system's error text
last, after a colon. Python puts a number between these and may add more at the end."""
_DETAIL = re.compile(r"\s|$|(?:frame )?#\d")
"""A blank line, or a detail of an earlier line, such as a frame."""
_LAUNCHERS = re.compile(r"\b(?:ChildFailedError|CalledProcessError|SystemExit)\b")
"""Exceptions of launchers when one of their processes has failed: they give no cause."""
_FRAME = re.compile(r'^\s+File ".*", line \d+, in (\S+)')
_OUTERMOST = frozenset({"<module>", "_run_module_as_main", "_bootstrap"})
"""The outermost frame of a program or process, where the traceback of an uncaught exception
begins."""


class Sighting(Struct, frozen=True, kw_only=True):
    """Where a signature was seen.

    line: number of it in the log.
    order: of the signature among all; the smaller comes first.
    is_certain: the system reported it.
    is_end: the program ended by it, as far as the log shows.
    is_aside: a shell or a command of its reported it, not the program.
    steps_after_cause: of its signature.
    """

    line: int
    order: int
    is_certain: bool
    is_end: bool
    is_outlived: bool
    is_aside: bool
    steps_after_cause: int


def decisive(sightings: Iterable[Sighting], lines: LogLines) -> Sighting | None:
    """The sighting that best explains why the program ended.

    A root cause counts more than its effects, unless it comes only after them and not as an end: a
    script that goes on after a failure complains of the things that the failure left undone. A root
    cause in passing does not count either if two of three facts speak against it: an uncaught
    exception came later, a shell or a command of its reported it, or much other output lies before
    the later one. Against a root cause that exception needs no signature.

    Among equals the system's report comes first, then an end before a report in passing, then the
    later line, and within a line the signature that comes first. An error that the program survived
    counts only where nothing else was seen.
    """
    seen = list(sightings)
    told = [each for each in seen if not each.is_outlived] or seen
    by_steps: dict[int, list[Sighting]] = {}
    for each in told:
        by_steps.setdefault(each.steps_after_cause, []).append(each)
    numbers = {each.line for each in told}
    output = lines.output_up_to(numbers) if any(not each.is_end for each in told) else []
    ends: list[int] = []  # lines of those with more steps
    best: Sighting | None = None
    for steps in sorted(by_steps, reverse=True):
        if steps == 0:
            ends = sorted({*ends, *(lines.ends_without(numbers) if output else ())})
        found = [
            each
            for each in by_steps[steps]
            if each.is_end or not _is_in_passing(each, best, ends, output)
        ]
        best = max(found, key=_weight, default=best)
        ends = sorted([*ends, *(each.line for each in by_steps[steps] if each.is_end)])
    return best


def telling_of_a_kill(seen: Sequence[Sighting], lines: LogLines) -> list[Sighting]:
    """The sightings that may explain why SIGKILL or SIGTERM ended the program.

    A root cause does not count if a shell or a command reported it, or if other output follows it:
    the program was still running when it was killed. Effects of other processes' ends stay, and so
    do an uncaught exception and the system's report.
    """
    after = lines.output_after(each.line for each in seen)
    return [
        each
        for each in seen
        if each.is_end
        or each.steps_after_cause > 0
        or not (each.is_aside or after[each.line] >= FAR_LINES)
    ]


def _is_in_passing(
    each: Sighting, best: Sighting | None, ends: Sequence[int], output: Sequence[int]
) -> bool:
    """True if a sighting that is no end yields to one with more steps."""
    if best is not None and each.line > best.line:
        return True
    at = bisect_right(ends, each.line)
    if at == len(ends) and best is None:
        return False
    until = ends[at] if at < len(ends) else best.line if best is not None else each.line
    is_far = output[until] - output[each.line] >= FAR_LINES
    return (at < len(ends)) + each.is_aside + is_far >= 2


def _weight(sighting: Sighting) -> tuple[bool, bool, int, int]:
    return sighting.is_certain, sighting.is_end, sighting.line, -sighting.order


class LogLines:
    """The lines of a log, as evidence.

    Args:
        lines: all of them, without the prefixes of launchers.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = [line.text for line in lines]
        self._speakers = [line.speaker for line in lines]
        self._text = "\n".join(self._lines)
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
        self._in_tracebacks: set[int] = set()
        self._read_tracebacks()

    def number_at(self, offset: int) -> int:
        """The number of the line that contains a character position."""
        return bisect_right(self._starts, offset) - 1

    def line(self, number: int) -> str:
        """The text of one line."""
        return self._lines[number]

    def is_end(self, number: int) -> bool:
        """True if it is an uncaught exception."""
        return number in self._ends

    def after(self, number: int) -> str:
        """All lines after a line."""
        return self._text[self._starts[number + 1] :]

    def is_outlived(self, number: int) -> bool:
        """True if it is a caught exception, provided that the program had another end."""
        return number in self._outlived

    def is_aside(self, number: int) -> bool:
        """True if a shell or a command that it ran reports it."""
        return _COMMAND.search(self._lines[number]) is not None

    def ends_without(self, numbers: Set[int]) -> set[int]:
        """The uncaught exceptions on other lines than these, except those of launchers."""
        return {
            number
            for number in self._ends - self._outlived - numbers
            if not _LAUNCHERS.search(self._lines[number])
        }

    def last_exception(self) -> str:
        """The last uncaught exception, of launchers only if there is no other; or ""."""
        ends = self.ends_without(set()) or self._ends
        return self._lines[max(ends)].strip() if ends else ""

    def output_up_to(self, numbers: Set[int]) -> list[int]:
        """For each line how many up to it are output: none of these, of tracebacks, or details."""
        apart = numbers | self._in_tracebacks
        return list(
            accumulate(
                number not in apart and not _DETAIL.match(line)
                for number, line in enumerate(self._lines)
            )
        )

    def output_after(self, numbers: Iterable[int]) -> dict[int, int]:
        """For each of these lines, the number of output lines after it."""
        told = set(numbers)
        output = self.output_up_to(told)
        return {number: output[-1] - output[number] for number in told}

    def is_got_over(self, number: int) -> bool:
        """True if the program went on after this line."""
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
            before = self._lines[number - 1] if number else ""
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
                    caught.add(path)  # a loop that goes on after each: it logs again

    def _exception_of(self, header: int, prefix: str) -> tuple[int | None, tuple[str, ...]]:
        """The line of the exception, the first one that is not indented, and its calls.

        The latter name the calls, the outermost first, and the kind of exception. For ranks with a
        name before each line, only lines of the same rank belong to it.
        """
        calls: list[str] = []
        speaker = self._speakers[header]
        self._in_tracebacks.add(header)
        for number in self._after(header):
            line = self._lines[number]
            if not line.startswith(prefix) or (speaker and self._speakers[number] != speaker):
                continue  # another rank's
            self._in_tracebacks.add(number)
            body = line[len(prefix) :]
            if body and not body[0].isspace():
                return number, (*calls, body.partition(":")[0])
            if frame := _FRAME.match(body):
                calls.append(frame[1])
        return None, ()

    def _after(self, number: int) -> Iterator[int]:
        yield from range(number + 1, min(len(self._lines), number + LONGEST_TRACEBACK_LINES))
