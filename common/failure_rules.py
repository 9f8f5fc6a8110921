"""Rules that map words in a log to failures: the packaged ones and those of a site.

Explicit root causes come before outcomes such as a traceback or an exit code, as in the classifier
of the Philly study (ATC'19, section 2.4). A site's own rules come first, unconditionally, in their
order. Among the packaged explicit rules the line that ended the program decides; `log_evidence`
separates it from errors that the program survived and from errors that followed. Among outcomes the
order of the rules decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from common.decoding import parse_toml
from common.errors import ConfigError
from common.failures import MAX_LINE_CHARS, Failure, Origin, Reason, RetryClass, Times, Title
from common.log_evidence import LogLines, Sighting, decisive, telling_of_a_kill
from common.log_prefixes import HEADER, Line, bare_lines

TAIL_BYTES = 64 * 1024
"""Only the last bytes of a log are read."""
MAX_CHARS_OF_LINE = 2000
"""A longer line is read up to here: this bounds the time of the packaged patterns. A site's own may
take for ever on far shorter ones; the process that matches them must be killable."""
NO_SIGNATURE = "no_signature"
UNLIKE_LINES = ("aaaaaa", "000000", "------")
"""Lines with nothing in common: a pattern that matches all of them identifies no failure. They are
short, so that no pattern takes long on them."""
ORDINARY_LINES = ("step 17 2.31", "Info: 3/90 s", "lr=1e-4 ok 8")
"""Lines of healthy runs: a pattern that matches each of them is in every log. As short as possible,
like the above, but longer than most repetitions of one character class."""
ENDED_FROM_OUTSIDE = frozenset({-9, 137, -15, 143})
"""SIGKILL and SIGTERM, as `wait` and as a shell report them: other processes send them."""
MOST_EXIT_CODE = 255
MOST_SIGNALS = 64
"""Signal numbers are no greater (signal(7))."""

_MEETING_AGAIN = re.compile(rb"^aryl-launcher: .*: meeting again$", re.MULTILINE)
_AFTER_ANOTHER = re.compile(rb"^aryl-launcher: .* after worker \d+ had failed$", re.MULTILINE)
"""A broken connection in the log of this kind of worker is no root cause: another worker's log
counts more."""

Steps = Annotated[int, Meta(ge=0, le=3)]


class ReasonRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reason, and its retry class; fields as in `Failure`."""

    name: Reason
    title: Title
    origins: tuple[Origin, ...] = ()
    retry: RetryClass
    most_retries: Times | None = None
    is_free: bool = False
    suspects_node: bool = False


class Signature(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a reason is recognized.

    texts: the log contains any of them literally.
    patterns: any regular expression matches within one line of the log.
    exit_codes: the main process ended so; negative is a signal.
    is_implicit: this is only the outcome of something; explicit signatures come first.
    is_certain: the system reports it, never a program in passing: wherever it stands, it is the
        end.
    steps_after_cause: 0 names a root cause; 1 is its effect on a GPU, such as a CUDA error; 2 is
        the effect of a dead process on others, such as a broken collective; 3 an abort after that.
    """

    reason: Reason
    texts: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    exit_codes: tuple[int, ...] = ()
    is_implicit: bool = False
    is_certain: bool = False
    steps_after_cause: Steps = 0


class RuleFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a file of rules."""

    reason: tuple[ReasonRule, ...] = ()
    signature: tuple[Signature, ...] = ()


class _Compiled(Struct, frozen=True):
    rule: Signature
    patterns: tuple[re.Pattern[str], ...]


class FailureRules:
    """Rules that are ready to be looked up.

    Args:
        files: the packaged file last; if several files define a reason, the first one counts.
        site_file: named in the error about a mistake in the other files.

    Raises:
        ConfigError: a reason that one file defines twice; a signature of an undefined reason, or
            one that no failure or every log can show; an invalid pattern.
    """

    def __init__(self, *files: RuleFile, site_file: str = "") -> None:
        self.files = files
        of = [f"{site_file}: " if site_file else ""] * (len(files) - 1) + [""]
        self.reasons: dict[str, ReasonRule] = {}
        for which, file in zip(of, files, strict=False):  # without files there is one `of`
            names = [reason.name for reason in file.reason]
            for at, reason in enumerate(file.reason):
                if reason.name in names[:at]:
                    where = f"failure rules: {which}reason[{at}]"
                    raise ConfigError(f"{where}: name: {reason.name!r} is defined twice")
                self.reasons.setdefault(reason.name, reason)
        if NO_SIGNATURE not in self.reasons:
            raise ConfigError(f"failure rules: reason {NO_SIGNATURE} is not defined")
        compiled = [
            [
                self._compile(rule, f"{which}signature[{at}]")
                for at, rule in enumerate(file.signature)
            ]
            for which, file in zip(of, files, strict=True)
        ]
        self.has_site_patterns = any(
            rule.patterns for file in files[:-1] for rule in file.signature
        )
        """Whether the time of a match is unknown: `re` is not linear for every pattern."""
        explicit = [[each for each in own if not each.rule.is_implicit] for own in compiled]
        self._sites = [each for own in explicit[:-1] for each in own]
        self._weighed = explicit[-1]
        self._outcomes = [each for own in compiled for each in own if each.rule.is_implicit]

    def _compile(self, rule: Signature, where: str) -> _Compiled:
        of = f"failure rules: {where}: "
        if rule.reason not in self.reasons:
            known = ", ".join(sorted(self.reasons))
            raise ConfigError(f"{of}reason {rule.reason!r} is not one of {known}")
        for field, texts in (("texts", rule.texts), ("patterns", rule.patterns)):
            if not all(text.strip() for text in texts):
                raise ConfigError(f"{of}{rule.reason}: {field}: an empty text is in every log")
        for code in rule.exit_codes:
            if not (0 < code <= MOST_EXIT_CODE or -MOST_SIGNALS <= code < 0):
                raise ConfigError(
                    f"{of}{rule.reason}: exit_codes: no failure ends with {code}: expected 1 to "
                    f"{MOST_EXIT_CODE}, or -1 to -{MOST_SIGNALS} for a signal"
                )
        if not (rule.texts or rule.patterns or rule.exit_codes):
            raise ConfigError(
                f"{of}{rule.reason}: no failure can show it: expected texts, patterns or exit_codes"
            )
        try:
            patterns = tuple(re.compile(pattern, re.MULTILINE) for pattern in rule.patterns)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{of}{rule.reason}: patterns: {error}") from None
        for pattern in patterns:
            if pattern.search("") or any(
                all(pattern.search(line) for line in lines)
                for lines in (UNLIKE_LINES, ORDINARY_LINES)
            ):
                raise ConfigError(
                    f"{of}{rule.reason}: patterns: {pattern.pattern!r} matches every line, or an "
                    "empty one"
                )
        return _Compiled(rule, patterns)

    def failure(self, reason: str, *, line: str = "", is_explicit: bool = True) -> Failure:
        """A failure of a known reason.

        Raises:
            KeyError: the reason is undefined.
        """
        rule = self.reasons[reason]
        return Failure(
            reason=rule.name,
            title=rule.title,
            retry=rule.retry,
            most_retries=rule.most_retries,
            is_free=rule.is_free,
            suspects_node=rule.suspects_node,
            is_explicit=is_explicit,
            line=line[:MAX_LINE_CHARS],
            origins=rule.origins,
        )

    def classify(self, log: bytes, *, exit_code: int | None, error: str = "") -> Failure:
        """Why a worker failed, by the end of its log; of a longer log only the last 64 KiB count.

        Args:
            error: its supervisor's text.
        """
        log = since_last_meeting(log[-TAIL_BYTES:])
        found = self._classify(log, exit_code, error)
        if found.retry == RetryClass.BACK_OFF and _AFTER_ANOTHER.search(log):
            found = msgspec.structs.replace(found, is_explicit=False)
        return found

    def _classify(self, log: bytes, exit_code: int | None, error: str) -> Failure:
        told = _readable(log, error)
        text = "\n".join([line.text for line in told])
        for each in self._sites:
            found = _seen(each, text, exit_code)
            if found is not None:
                return self.failure(each.rule.reason, line=found)
        seen = {order: at for order, at in self._offsets(text) if at}
        lines = LogLines(told if seen else ())
        sightings = list(self._sightings(seen, lines))
        if exit_code in ENDED_FROM_OUTSIDE:
            sightings = telling_of_a_kill(sightings, lines)
        best = decisive(sightings, lines)
        if best is None:
            return self._outcome(told, text, exit_code)
        if best.is_outlived:
            other = self._outcome(told, lines.after(best.line), exit_code)
            if other.reason != NO_SIGNATURE or _is_signal(exit_code):
                return other
        line = lines.line(best.line).strip()
        return self.failure(self._weighed[best.order].rule.reason, line=line)

    def _outcome(self, told: Sequence[Line], text: str, exit_code: int | None) -> Failure:
        """The outcome of an end without a known cause; for a traceback its exception is shown."""
        for each in self._weighed:
            if exit_code is not None and exit_code in each.rule.exit_codes:
                return self.failure(each.rule.reason, line=f"exit code {exit_code}")
        for each in self._outcomes:
            found = _seen(each, text, exit_code)
            if found is not None:
                line = (LogLines(told).last_exception() or found) if HEADER in found else found
                return self.failure(each.rule.reason, line=line, is_explicit=False)
        return self.failure(NO_SIGNATURE, is_explicit=False)

    def _offsets(self, text: str) -> Iterator[tuple[int, list[int]]]:
        """Where each packaged explicit signature stands."""
        for order, each in enumerate(self._weighed):
            yield order, list(_offsets(each, text))

    def _sightings(self, seen: Mapping[int, Sequence[int]], lines: LogLines) -> Iterator[Sighting]:
        """The matches of all packaged explicit signatures, except survived errors."""
        for order, offsets in seen.items():
            rule = self._weighed[order].rule
            for number in sorted({lines.number_at(at) for at in offsets}):
                if rule.is_certain or not lines.is_got_over(number):
                    yield Sighting(
                        line=number,
                        order=order,
                        is_certain=rule.is_certain,
                        is_end=rule.is_certain or lines.is_end(number),
                        is_outlived=not rule.is_certain and lines.is_outlived(number),
                        is_aside=lines.is_aside(number),
                        steps_after_cause=rule.steps_after_cause,
                    )


def since_last_meeting(log: bytes) -> bytes:
    """The part of a log since the gang last met again, by a line of Aryl's launcher of torchrun.

    Everything before it is about failures that a change of membership explains, and that the gang
    survived.
    """
    ends = [match.end() for match in _MEETING_AGAIN.finditer(log)]
    return log[ends[-1] :] if ends else log


def _is_signal(exit_code: int | None) -> bool:
    """True if it was ended from outside: an uncaught exception gives another code.

    A shell shows the signal as 128 plus its number.
    """
    return exit_code is not None and (exit_code < 0 or 128 < exit_code <= 128 + MOST_SIGNALS)


def _readable(log: bytes, error: str) -> list[Line]:
    """The program's and its supervisor's output, without prefixes and control codes."""
    lines = log.decode(errors="replace").replace("\r", "\n").split("\n")
    return bare_lines([line[:MAX_CHARS_OF_LINE] for line in (*lines, *error.split("\n"))])


def _seen(each: _Compiled, text: str, exit_code: int | None) -> str | None:
    """The line that matches; None when none does."""
    for wanted in each.rule.texts:
        at = text.rfind(wanted)
        if at >= 0:
            return _line_at(text, at)
    for pattern in each.patterns:
        match = pattern.search(text)
        if match is not None:
            return _line_at(text, match.start())
    if exit_code is not None and exit_code in each.rule.exit_codes:
        return f"exit code {exit_code}"
    return None


def _offsets(each: _Compiled, text: str) -> Iterator[int]:
    """Where its texts and patterns stand."""
    for wanted in each.rule.texts:
        at = text.rfind(wanted)  # three times as fast as `find` where there is none
        while at >= 0:
            yield at
            at = text.rfind(wanted, 0, at)
    for pattern in each.patterns:
        yield from (match.start() for match in pattern.finditer(text))


def _line_at(text: str, at: int) -> str:
    begin, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    return text[begin : end if end >= 0 else len(text)].strip()[:MAX_LINE_CHARS]


# --- files of rules -----------------------------------------------------------------------------


def read_rules(site_file: str = "") -> FailureRules:
    """The packaged rules, and before them those of a site's own file.

    Raises:
        ConfigError: the site's file is missing, or is no file of rules.
    """
    packaged = resources.files("common").joinpath("data/failures.toml").read_text()
    own = RuleFile() if not site_file else read_file(site_file)
    return FailureRules(own, _parse(packaged, "failures.toml"), site_file=site_file)


def read_file(path: str) -> RuleFile:
    """The rules of a site's file.

    Raises:
        ConfigError: the file is missing, or is no file of rules.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"failure rules: {path}: {error}") from None
    return _parse(text, path)


def _parse(text: str, name: str) -> RuleFile:
    try:
        return msgspec.convert(parse_toml(text), RuleFile)
    except ValueError as error:
        raise ConfigError(f"failure rules: {name}: {error}") from None
