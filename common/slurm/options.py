"""Command lines as Slurm's programs read them (getopt_long): a table of options, and one reader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

FLAG, VALUE, MAYBE = "flag", "value", "maybe"
"""Whether an option takes a value: never, always, or only behind `=`."""


class OptionError(Exception):
    """An option that does not exist, lacks its value, or has one too many."""


class Kind(Enum):
    """What becomes of an option: it is followed, passed over because it changes nothing here, or
    refused."""

    USED = "used"
    HARMLESS = "harmless"
    REFUSED = "refused"


@dataclass(frozen=True)
class Option:
    """One option. `why`: why it is refused, or why it may be passed over."""

    name: str
    short: str = ""
    takes: str = VALUE
    kind: Kind = Kind.USED
    why: str = ""


def read(
    words: Sequence[str], table: Iterable[Option], *, mixed: bool = False
) -> tuple[list[tuple[Option, str]], list[str]]:
    """The options of a command line in their order, and the words behind them.

    Args:
        mixed: options may follow other words; else the first other word ends the options.

    Raises:
        OptionError: the text names the option.
    """
    by_name = {option.name: option for option in table}
    by_short = {option.short: option for option in by_name.values() if option.short}
    found: list[tuple[Option, str]] = []
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return found, [*others, *rest]
        if word.startswith("--"):
            found.append(_long(word[2:], by_name, rest))
        elif word.startswith("-") and word != "-":
            found += _short(word[1:], by_short, rest)
        elif mixed:
            others.append(word)
        else:
            return found, [word, *rest]
    return found, others


def _long(word: str, by_name: dict[str, Option], rest: list[str]) -> tuple[Option, str]:
    name, equals, value = word.partition("=")
    option = by_name.get(name)
    if option is None:
        meant = [other for other in by_name if name and other.startswith(name)]
        if len(meant) > 1:
            raise OptionError(f"option '--{name}' is ambiguous: --{', --'.join(sorted(meant))}")
        if not meant:
            raise OptionError(f"unrecognized option '--{name}'")
        option = by_name[meant[0]]
    if option.takes == FLAG and equals:
        raise OptionError(f"option '--{option.name}' doesn't allow an argument")
    if option.takes == VALUE and not equals:
        if not rest:
            raise OptionError(f"option '--{option.name}' requires an argument")
        value = rest.pop(0)
    return option, value


def _short(letters: str, by_short: dict[str, Option], rest: list[str]) -> list[tuple[Option, str]]:
    found: list[tuple[Option, str]] = []
    while letters:
        letter, letters = letters[0], letters[1:]
        option = by_short.get(letter)
        if option is None:
            raise OptionError(f"invalid option -- '{letter}'")
        if option.takes == FLAG:
            found.append((option, ""))
            continue
        if option.takes == VALUE and not letters:
            if not rest:
                raise OptionError(f"option requires an argument -- '{letter}'")
            letters = rest.pop(0)
        return [*found, (option, letters)]
    return found
