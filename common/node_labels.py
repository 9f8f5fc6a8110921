"""Labels of nodes, and the terms by which jobs select nodes. Pure.

A label is a name with a value; a label without one, such as `nvlink`, has the empty value. A term
is one or more alternatives joined by `|`. An alternative is `key`, `key=value` or
`key=value,value`, and holds on a node that has the label with any value, or with one of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated

from msgspec import Meta

from common.errors import ConfigError

KEY_PATTERN = r"^(?=[A-Za-z0-9])[A-Za-z0-9_./-]{0,62}[A-Za-z0-9]\Z"
VALUE_PATTERN = r"^(?:(?=[A-Za-z0-9])[A-Za-z0-9_.:/-]{0,62}[A-Za-z0-9])?\Z"
KEY_WORDS = "expected 1 to 63 of A-Z a-z 0-9 _ . / -, a letter or digit first and last"
VALUE_WORDS = "expected up to 63 of A-Z a-z 0-9 _ . : / -, a letter or digit first and last"
MAX_LABELS = 64
"""Labels of one node, those of its agent and those of an operator each."""
MAX_TERM_CHARACTERS = 1000
LabelKey = Annotated[str, Meta(pattern=KEY_PATTERN)]
LabelValue = Annotated[str, Meta(pattern=VALUE_PATTERN)]
Labels = Annotated[dict[LabelKey, LabelValue], Meta(max_length=MAX_LABELS)]

RESET = "--reset"
"""The order that ends all that an operator set on a node."""

_KEY, _VALUE = re.compile(KEY_PATTERN), re.compile(VALUE_PATTERN)


def key_misfit(key: str) -> str:
    """Why a text is no name of a label; empty if it is one."""
    return "" if _KEY.match(key) else f"{key!r} is no name of a label: {KEY_WORDS}"


def value_misfit(key: str, value: str) -> str:
    """Why a text is no value of a label; empty if it is one."""
    return "" if _VALUE.match(value) else f"{value!r} is no value of label {key}: {VALUE_WORDS}"


def misfit(labels: Mapping[str, str]) -> str:
    """The first error of a table of labels; empty without one."""
    if len(labels) > MAX_LABELS:
        return f"it has {len(labels)} labels, expected at most {MAX_LABELS}"
    for key, value in labels.items():
        if why := key_misfit(key) or value_misfit(key, value):
            return why
    return ""


def with_rack(labels: Mapping[str, str], rack: str) -> dict[str, str]:
    """Labels of an agent and its rack, which is the label `rack` unless it has one, or cannot be
    one."""
    is_label = rack and not value_misfit("rack", rack)
    return ({"rack": rack} if is_label else {}) | dict(labels)


def label_text(key: str, value: str) -> str:
    """One label as people write it."""
    return f"{key}={value}" if value else key


def labels_text(labels: Mapping[str, str]) -> str:
    """Labels by name, as people write them."""
    return " ".join(label_text(key, labels[key]) for key in sorted(labels))


def parse_changes(words: Iterable[str]) -> dict[str, str | None]:
    """`rack=r7 nvlink disk-` as new labels; None takes one away.

    Raises:
        ConfigError: names the word and what was expected.
    """
    found: dict[str, str | None] = {}
    for word in words:
        key, equals, value = word.partition("=")
        is_end = not equals and key.endswith("-")
        key = key.removesuffix("-") if is_end else key
        if equals and not value:
            raise ConfigError(f"{word!r}: expected key=value, key or key-")
        if why := key_misfit(key) or value_misfit(key, value):
            raise ConfigError(f"{word!r}: {why}")
        if key in found:
            raise ConfigError(f"{word!r}: label {key} is named twice")
        found[key] = None if is_end else value
    if not found:
        raise ConfigError("no label is named: expected key=value, key or key-")
    if len(found) > MAX_LABELS:
        raise ConfigError(f"{len(found)} labels, expected at most {MAX_LABELS}")
    return found


Alternative = tuple[str, frozenset[str]]
"""A label by name, and its values; none: any value."""


@lru_cache(maxsize=4096)
def parse_term(term: str) -> tuple[Alternative, ...]:
    """The alternatives of a term.

    Raises:
        ConfigError: the text is no term.
    """
    if len(term) > MAX_TERM_CHARACTERS:
        raise ConfigError(f"{len(term)} characters, expected at most {MAX_TERM_CHARACTERS}")
    found: list[Alternative] = []
    for part in term.split("|"):
        key, equals, text = part.strip().partition("=")
        values = text.split(",") if equals else []
        if why := key_misfit(key):
            raise ConfigError(f"{term!r}: {why}")
        for value in values:
            if why := "" if value else f"{part.strip()!r} has an empty value":
                raise ConfigError(f"{term!r}: {why}; expected key, key=value or key=value,value")
            if why := value_misfit(key, value):
                raise ConfigError(f"{term!r}: {why}")
        found.append((key, frozenset(values)))
    return tuple(found)


def term_misfit(term: str) -> str:
    """Why a text is no term; empty if it is one."""
    try:
        parse_term(term)
    except ConfigError as error:
        return str(error)
    return ""


def holds(term: str, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels fits a term."""
    for key, values in parse_term(term):
        value = labels.get(key)
        if value is not None and (not values or value in values):
            return True
    return False
