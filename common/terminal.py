"""Makes text of jobs, nodes and files safe for a terminal: control codes become visible characters.

A name, an error or a log may hold escape sequences that move the cursor, retitle a window, or send
input as if a person typed. Line ends and tabs stay.
"""

from __future__ import annotations

import re

_KEPT = "\n\t"
_BIDI = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Marks that change the direction of text: the following text looks different from its content."""
_VISIBLE: dict[int, int] = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT}
    | {0x7F: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), *_BIDI), 0xFFFD)
)
"""Control pictures (U+2400 and on) for codes that have one, the replacement character for the
rest."""

UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_COLOR = re.compile(r"\x1b\[[0-9;:]{0,40}m")
"""Most logs have only color codes; these are left out, not shown."""


def visible(text: str) -> str:
    """`text` with a visible character for every control code."""
    return text.translate(_VISIBLE)


def visible_log(text: str) -> str:
    """The same for a log, without its colors; a progress bar's carriage return ends a line."""
    text = _COLOR.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return visible(text)


def escaped(json_text: str) -> str:
    r"""JSON in which every control code is a `\u` escape; it means the same to every reader."""
    return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text)
