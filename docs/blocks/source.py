"""What the source text says of a class and its members. Must not know which pages use it."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from enum import StrEnum
from functools import cache


@cache
def member_notes(kind: type) -> dict[str, str]:
    """What the source says of each member: the string after it, else the comment beside it."""
    lines, _ = inspect.getsourcelines(kind)
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(tree, ast.ClassDef)
    notes: dict[str, str] = {}
    for node, follower in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            target: ast.expr = node.target
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
        else:
            continue
        name = ast.unparse(target)
        if isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant):
            notes[name] = one_line(str(follower.value.value))
        else:
            _, _, comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")
            notes[name] = "" if comment.startswith("noqa") else comment.strip()
    return notes


def one_line(text: str) -> str:
    """Text as one line of a table."""
    return " ".join(text.split()).replace("|", "\\|")


_RANGE = re.compile(
    r"\b(integer|whole number|number) >= (\S+?)(?: and <= ([^\s,;)]+))?(?=[\s,;)]|$)"
)
_ABOVE = re.compile(r"\bnumber (?=> )")


def short_range(text: str) -> str:
    """The bounds of a value in fewer words: `integer 1..64`, `integer 1..`, `0..1`, `> 0`."""

    def short(found: re.Match[str]) -> str:
        kind = "" if found[1] == "number" else "integer "
        return f"{kind}{found[2]}..{found[3] or ''}"

    return _ABOVE.sub("", _RANGE.sub(short, text))


def doc_of(thing: object) -> str:
    """A docstring, its paragraphs and lists kept."""
    doc = inspect.getdoc(thing)
    assert doc, f"{thing} has no docstring"
    return doc.replace("\n    ", " ")


def enum_table(kind: type[StrEnum], *, is_noted_only: bool = False) -> str:
    """The values of an enumeration and what the source says of each; bare values as a list.

    is_noted_only: leave out the values of which the source says nothing.
    """
    notes = member_notes(kind)
    if not any(notes.get(member.name) for member in kind):
        return "One of " + ", ".join(f"`{member.value}`" for member in kind) + "."
    rows = [
        f"| `{member.value}` | {notes.get(member.name, '')} |".replace("|  |", "| |")
        for member in kind
        if notes.get(member.name) or not is_noted_only
    ]
    return "\n".join(["| value | meaning |", "|---|---|", *rows])
