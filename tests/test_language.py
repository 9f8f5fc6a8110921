"""What people read is plain English: settings, knobs, policies, command help, logs, errors, pages
of the documentation and docstrings.

The nouns are those of docs/glossary.md. Each unused word below has a clearer form.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.core import TyperGroup

from agent.gpu.wire import ChildSettings
from agent.settings import AgentSettings
from common.settings import describe
from coordinator.cli.app import whole
from coordinator.policies.knob_text import knobs
from coordinator.policies.registry import POLICIES
from coordinator.service.settings import CoordinatorSettings
from tests.tables import each_row

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for package in ("agent", "common", "coordinator")
    for path in (ROOT / package).rglob("*.py")
)

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])

UNUSED = (
    (r"whoever|whomever", "name the user, tenant or program"),
    (r"nobody|no one", "say which thing is missing: no job, no node, no process"),
    (r"somebody|someone|anybody|anyone|everybody|everyone", "name the role"),
    (r"anew", "again"),
    (r"told|tells", "reported, ordered or shown; by which program"),
    (r"said|unsaid", "reported or logged"),
    (r"so (many|long|often)", "this many, for this long; or the number"),
    (r"(?<!no )such(?! as\b)", "name the thing"),
    (r"what is", "a noun of the glossary"),
)
"""Words as regular expressions, and what to write instead."""
ANY = re.compile(rf"\b({'|'.join(words for words, _ in UNUSED)})\b", re.IGNORECASE)


def problems(text: str) -> list[str]:
    """The unused words in a text, each with the advice for it."""
    if not ANY.search(text):
        return []
    return [
        f"{found[0]!r}: {advice}"
        for words, advice in UNUSED
        if (found := re.search(rf"\b({words})\b", text, re.IGNORECASE))
    ]


def problems_of_prose(text: str) -> list[str]:
    """The same of running text, where a paragraph also begins with its subject."""
    paragraphs = list(prose(text))
    found = [bad for each in paragraphs for bad in problems(each)]
    return found + [each for each in paragraphs if re.match(r"Of (it|its|an?)\b", each)]


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The statements and constants of a module, read once; an expression is there by its value."""
    tree = ast.walk(ast.parse(path.read_text()))
    return tuple(node for node in tree if isinstance(node, (ast.Expr, ast.Constant)))


def commands(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """Help of a command, its options and its subcommands, each with the path that names it."""
    yield path, f"{command.help or ''} {command.short_help or ''} {command.epilog or ''}"
    for parameter in command.params:
        yield f"{path} {parameter.name}", str(getattr(parameter, "help", None) or "")
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from commands(each, f"{path} {name}")


def prose(text: str) -> Iterator[str]:
    """Paragraphs, items and rows of a text in one line each: no code, no quotes of messages, no
    links, no names of arguments before their notes."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for each in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.|(?:\w+, )*\w+:) ?)", text):
        line = re.sub(r"`[^`]*`|\]\([^)]*\)|\*[^*]+\*", "`", " ".join(each.split()))
        yield re.sub(r"^(?:\w+, )*\w+: ", "", line)


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Each docstring of a module, also those below fields and constants, with the place of it."""
    for node in nodes(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text
            case _:
                pass


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """Each text of a module that has words in it, without docstrings, with the place of it."""
    silent = {
        id(node.value)
        for node in nodes(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in nodes(path):
        if not isinstance(node, ast.Constant) or id(node) in silent:
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


@pytest.mark.parametrize("kind", [AgentSettings, ChildSettings, CoordinatorSettings])
def test_settings(kind: type[msgspec.Struct]) -> None:
    """Every setting has a description, in plain words."""
    found = {row.key: row.meaning for row in describe(kind)}
    assert [key for key, text in found.items() if not text] == []
    assert {key: bad for key, text in found.items() if (bad := problems(text))} == {}


@each_row("name", POLICIES)
def test_a_policy_and_its_knobs(name: str) -> None:
    """The line of the policies table, the parts, and the description of each knob."""
    made = POLICIES[name]
    parts = msgspec.structs.asdict(made.parts)
    found = {"description": made.description} | {key: str(text) for key, text in parts.items()}
    found |= {knob.name: knob.says for knob in knobs(made)}
    assert {key: bad for key, text in found.items() if (bad := problems(text))} == {}


def test_help_of_commands() -> None:
    """Of `aryl`, each of its commands and each option."""
    found = dict(commands(whole(), "aryl"))
    assert len(found) > 100
    assert {key: bad for key, text in found.items() if (bad := problems(text))} == {}


def test_log_lines_reasons_and_errors() -> None:
    """Every text of the sources: log lines, events, reasons of decisions, errors, tables."""
    found = [each for path in SOURCES for each in texts(path)]
    assert len(found) > 2000
    assert [(place, bad) for place, text in found if (bad := problems(text))] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages(path: Path) -> None:
    """Each page of the documentation, apart from code and quotes of messages."""
    assert problems_of_prose(path.read_text()) == []


def test_docstrings() -> None:
    """Every docstring of the sources, to its last line."""
    found = [each for path in SOURCES for each in docstrings(path)]
    assert len(found) > 5000
    assert [(place, bad) for place, text in found if (bad := problems_of_prose(text))] == []


def test_an_unused_word_is_found() -> None:
    """As a word of its own, in either case, and with advice; `such as` is fine."""
    assert problems("Nobody waits") == [
        "'Nobody': say which thing is missing: no job, no node, no process"
    ]
    assert problems("a time, such as 30s, retold") == []
    text = "such as\nthis `told`\n\nwhoever: one *told*\n- what\n  is\n\nOf a job."
    assert problems_of_prose(text) == ["'what is': a noun of the glossary", "Of a job."]
