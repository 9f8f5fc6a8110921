"""YAML text -> plain values and the line of each, in the subset on which YAML readers agree.

YAML 1.1 and 1.2 read the same plain word in different ways (`no`, `012`, `1:30`, `2026-11-21`), and
programs mix both. That word is refused with its line, never guessed. The rest is what JSON has
(YAML 1.2.2, section 10.2), with text that needs no quotes.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

import yaml
from msgspec import Struct
from yaml.resolver import Resolver

from common.errors import ConfigError

MAX_DEPTH = 16
"""Tables and lists in each other; a job needs three."""

_TEXT = "tag:yaml.org,2002:str"
_YAML_11 = Resolver()
_ALMOST_11 = re.compile(
    r"[yn]|[-+]?(?:0[box][0-9a-f_]+|\.?[0-9][0-9_]*\.?[0-9_]*(?:e[-+]?[0-9]*)?)", re.I
)
"""What one schema or another takes for a boolean or a number, and PyYAML for text: `0o14`, `5.`."""


class YamlText(Struct, frozen=True, kw_only=True):
    """A mapping, and the line of each of its keys and entries by path: `env.A`, `command[0]`."""

    values: dict[str, Any]
    line_by_path: dict[str, int]


def read(text: str, *, source: str) -> YamlText:
    """The mapping that a YAML text is.

    Raises:
        ConfigError: no YAML, no mapping, a key twice, an anchor, an alias or a tag, a word that
            readers of YAML disagree on; names source and line.
    """
    lines: dict[str, int] = {}
    try:
        node = _Loader(text).only_document()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{source}: expected a table, such as `name: train`")
        return YamlText(values=_table(node, "", lines), line_by_path=lines)
    except _RefusedError as error:
        raise ConfigError(f"{source}, {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}: "
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{source} is not YAML: {place}{what}") from None
    except (yaml.YAMLError, ValueError) as error:  # a character or a number that none can have
        what = str(error).splitlines()[0]
        raise ConfigError(f"{source} is not YAML: {what}") from None


class _RefusedError(Exception):
    """What stands in a line, and why it is not taken."""

    def __init__(self, at: yaml.Event | yaml.Node, what: str) -> None:
        super().__init__(f"line {_line(at)}: {what}")


class _Loader(yaml.BaseLoader):
    """PyYAML's loader that takes every value for text, less what a job file must not have."""

    _depth = 0

    def only_document(self) -> yaml.Node | None:
        node = self.get_node() if self.check_node() else None
        if self.check_node():
            raise _RefusedError(self._next(), "a second document; one file is one job")
        return node

    def _next(self) -> yaml.Event:
        return cast("yaml.Event", self.peek_event())  # type: ignore[no-untyped-call]  # in its stubs

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """An alias is refused before it is followed: no ten lines become a gigabyte."""
        event = self._next()
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            alias = f"an anchor or an alias, {event.anchor}; write the value itself"
            raise _RefusedError(event, alias)
        is_nest = isinstance(event, yaml.CollectionStartEvent)
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:
            raise _RefusedError(event, f"the tag {event.tag}; a value says itself what it is")
        self._depth += is_nest
        if self._depth > MAX_DEPTH:
            raise _RefusedError(event, f"more than {MAX_DEPTH} nested tables and lists")
        node = super().compose_node(parent, index)
        self._depth -= is_nest
        return node


def _table(node: yaml.MappingNode, path: str, lines: dict[str, int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for named, item in node.value:
        if not isinstance(named, yaml.ScalarNode):
            raise _RefusedError(named, "a table or a list as a key, expected text")
        key = _value(named, path, lines)
        if not isinstance(key, str):
            what = f"the key {json.dumps(key)}, expected text; write it in quotes"
            raise _RefusedError(named, what)
        at = f"{path}.{key}" if path else key
        if key in values:
            raise _RefusedError(named, f"{key} a second time; it stands in line {lines[at]}")
        lines[at] = _line(named)
        values[key] = _value(item, at, lines)
    return values


def _value(node: yaml.Node, path: str, lines: dict[str, int]) -> object:
    if isinstance(node, yaml.MappingNode):
        return _table(node, path, lines)
    if isinstance(node, yaml.ScalarNode):
        return _plain(node) if node.style is None else node.value
    lines.update({f"{path}[{index}]": _line(entry) for index, entry in enumerate(node.value)})
    return [_value(entry, f"{path}[{index}]", lines) for index, entry in enumerate(node.value)]


def _plain(node: yaml.ScalarNode) -> object:
    """What a word without quotes means to every reader of YAML."""
    word = node.value
    if word in {"", "~"}:
        return None
    try:
        return json.loads(word, parse_constant=str)  # to YAML `NaN` is text
    except json.JSONDecodeError:
        pass
    is_text = _tag_11(word) == _TEXT
    if is_text and not _ALMOST_11.fullmatch(word):
        return word
    raise _RefusedError(
        node,
        f"{word} without quotes, which YAML parsers read differently; "
        f'write "{word}" for text, else a plain number, true or false',
    )


def _tag_11(word: str) -> str:
    tag = _YAML_11.resolve(yaml.ScalarNode, word, (True, False))  # type: ignore[no-untyped-call]  # in its stubs
    return cast("str", tag)


def _line(at: yaml.Event | yaml.Node) -> int:
    assert at.start_mark is not None, "what was read has its place"
    return at.start_mark.line + 1
