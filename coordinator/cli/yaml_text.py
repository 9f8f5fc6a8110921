"""YAML text -> plain values and the line of each, where every reader of YAML agrees. No files.

Must not know what the values mean. YAML 1.1 and 1.2 read the same plain word in different ways
(`no`, `012`, `1:30`, `2026-11-21`), and each program its own mixture of both: such a word is
refused by its line, never guessed. What is left is what JSON has (YAML 1.2.2, section 10.2), with
text that needs no quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import yaml
from msgspec import Struct, field

from common.errors import ConfigError

MAX_DEPTH = 16
"""Tables and lists in each other; a job needs three."""

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}
_ALMOST_NUMBER = re.compile(
    r"[-+]?(?:0[box][0-9a-f_]+|\.?[0-9][0-9_]*\.?[0-9_]*(?:e[-+]?[0-9]*)?)", re.I
)
"""What one schema or another takes for a number: `0o14`, `1_000`, `+1`, `.5`, `5.`."""
_GUESSES_11 = cast(
    "Mapping[str, Sequence[tuple[str, re.Pattern[str]]]]", yaml.SafeLoader.yaml_implicit_resolvers
)
"""What YAML 1.1 takes for something else than text, by first character."""
_BOOLEANS_11 = frozenset({"y", "n"})
"""Booleans of YAML 1.1 that PyYAML, too, reads as text."""


class YamlText(Struct, frozen=True, kw_only=True):
    """A mapping, and the line of each of its keys and entries by path: `env.A`, `command[0]`."""

    values: dict[str, Any]
    line_by_path: dict[str, int]


class _Container(Struct):
    """A table or a list that is being filled."""

    path: str
    values: dict[str, Any] | list[Any]
    key: str | None = None
    """The key whose value comes next; None where a key comes next, and in a list."""
    keys_at: dict[str, int] = field(default_factory=dict[str, int])


def read(text: str, *, source: str) -> YamlText:
    """The mapping that a YAML text is.

    Raises:
        ConfigError: no YAML, no mapping, a key twice, an anchor, an alias or a tag, a word that
            readers of YAML disagree on; names source and line.
    """
    try:
        return _Builder(source).build(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}: "
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{source} is not YAML: {place}{what}") from None
    except (yaml.YAMLError, ValueError) as error:  # a character or a number that none can have
        what = str(error).splitlines()[0]
        raise ConfigError(f"{source} is not YAML: {what}") from None


class _Builder:
    """Values from the events of PyYAML's parser.

    From events and not from its constructor: an alias is seen before it is followed, so that ten
    lines of them cannot become a gigabyte, and each value has its line.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._open: list[_Container] = []
        self._lines: dict[str, int] = {}
        self._root: dict[str, Any] | None = None
        self._document_count = 0

    def build(self, events: Iterator[yaml.Event]) -> YamlText:
        for event in events:
            self._take(event)
        if self._root is None:
            raise ConfigError(f"{self._source}: expected a table, such as `name: train`")
        return YamlText(values=self._root, line_by_path=self._lines)

    def _take(self, event: yaml.Event) -> None:
        assert event.start_mark is not None, "a parser's event has its place"
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self._document_count += 1
            if self._document_count > 1:
                raise self._refusal(line, "a second document; one file is one job")
        elif isinstance(event, yaml.NodeEvent):
            self._take_node(event, line)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._open.pop()

    def _take_node(self, event: yaml.NodeEvent, line: int) -> None:
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._refusal(
                line, f"an anchor or an alias, {event.anchor}; write the value itself"
            )
        if isinstance(event, yaml.ScalarEvent):
            self._take_scalar(event, line)
            return
        assert isinstance(event, yaml.CollectionStartEvent)
        self._no_tag(event.tag, line)
        if len(self._open) == MAX_DEPTH:
            raise self._refusal(line, f"more than {MAX_DEPTH} nested tables and lists")
        values: dict[str, Any] | list[Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
        self._open.append(_Container(self._put(values, line), values))

    def _take_scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        self._no_tag(event.tag, line)
        value = event.value if event.style is not None else self._plain(event.value, line)
        top = self._open[-1] if self._open else None
        if top is not None and isinstance(top.values, dict) and top.key is None:
            self._take_key(top, value, line)
        else:
            self._put(value, line)

    def _take_key(self, top: _Container, key: object, line: int) -> None:
        if not isinstance(key, str):
            raise self._refusal(line, f"the key {_shown(key)}, expected text; write it in quotes")
        if key in top.keys_at:
            raise self._refusal(line, f"{key} a second time; it stands in line {top.keys_at[key]}")
        top.key, top.keys_at[key] = key, line

    def _put(self, value: Any, line: int) -> str:
        """Add a value where it belongs, and return its path."""
        if not self._open:
            self._root = cast("dict[str, Any]", value) if isinstance(value, dict) else None
            return ""
        top = self._open[-1]
        if isinstance(top.values, list):
            path = f"{top.path}[{len(top.values)}]"
            top.values.append(value)
        elif top.key is None:
            raise self._refusal(line, "a table or a list as a key, expected text")
        else:
            path = f"{top.path}.{top.key}" if top.path else top.key
            top.values[top.key] = value
            line, top.key = top.keys_at[top.key], None
        self._lines[path] = line
        return path

    def _plain(self, word: str, line: int) -> object:
        """What a word without quotes means to every reader of YAML."""
        if word in _WORDS:
            return _WORDS[word]
        if _INTEGER.fullmatch(word):
            return int(word)
        if _NUMBER.fullmatch(word):
            return float(word)
        is_guess = any(guess.match(word) for _, guess in _GUESSES_11.get(word[0], ()))
        if is_guess or word.lower() in _BOOLEANS_11 or _ALMOST_NUMBER.fullmatch(word):
            raise self._refusal(
                line,
                f"{word} without quotes, which YAML parsers read differently; "
                f'write "{word}" for text, else a plain number, true or false',
            )
        return word

    def _no_tag(self, tag: str | None, line: int) -> None:
        if tag is not None:
            raise self._refusal(line, f"the tag {tag}; write the value without a tag")

    def _refusal(self, line: int, what: str) -> ConfigError:
        return ConfigError(f"{self._source}, line {line}: {what}")


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower()
