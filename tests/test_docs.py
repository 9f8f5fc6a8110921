"""The documentation, held to what can be checked. Must not know what a page says in words."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from tests.live.faults import DEFAULT_KINDS
from tests.live.verdict import Broken
from tests.tables import each_row

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "coordinator/demo/data/ORIGIN.md"]
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in ELSEWHERE)])
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
SECTIONS = ["Context", "Decision", "Alternatives", "Consequences"]
MOST_WORDS = 350
"""Of a decision, but for the tables of 0006."""
FEWEST_FAULTS = 1000
"""Of the run that docs/reliability.md shows."""
CHANGE_KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
"""In the order of Keep a Changelog."""


def name(path: Path) -> str:
    """A page's path, as the name of a test."""
    return path.relative_to(ROOT).as_posix()


def rows(page: str) -> list[list[str]]:
    """The cells of each row of each table, headings left out."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    table = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [cells for cells in table if cells[0] not in {"term", "package", "kind", "number"}]


@pytest.fixture
def docs_tools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`import_module` with the documentation's own tools on the path."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module


FOLDERS = sorted(
    path.parent
    for package in ("agent", "common", "coordinator", "tests")
    for path in (ROOT / package).rglob("__init__.py")
)
NO_FILES = {"aryl_client", "connect"}
"""A distribution and a function that the docstring of a folder names."""


@each_row("folder", FOLDERS)
def test_a_folder_sends_its_reader_to_files_that_exist(folder: Path) -> None:
    """Each name in the docstring of a folder is a module or a folder in it, or a dotted one."""
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    inside = {path.stem for path in folder.rglob("*")}
    for name in set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", said)) - NO_FILES:
        path = ROOT.joinpath(*name.split("."))
        assert name in inside or path.is_dir() or path.with_suffix(".py").is_file(), name


@pytest.mark.slow
def test_generated_blocks_are_what_the_code_says() -> None:
    """Nothing generated was edited by hand or left behind by a change of the code."""
    done = subprocess.run(
        [sys.executable, DOCS / "generate.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@each_row("path", PAGES)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link of a page leads to a file, and to a heading of it where it names one."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), target
        if not anchor:
            continue  # also a picture, which has no headings
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


@each_row(
    "path",
    [path for path in PAGES if path.is_relative_to(DOCS)],
)
def test_a_page_has_the_same_lists_in_the_repository_and_on_the_site(path: Path) -> None:
    """A blank line stands before a list, and what is below an item is indented by four spaces: the
    site's Markdown takes all else for text."""
    page = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    item = r"(?:[-*]|\d+\.) "
    within = re.findall(rf"^(?!{item}|\s|$).*\n{item}.*$", page, re.MULTILINE)
    assert [lines for lines in within if not re.match(r"[#<]", lines)] == []
    assert re.findall(rf"^ {{1,3}}{item}.*$", page, re.MULTILINE) == []
    assert re.findall(r"^ {1,3}(?:```|\|).*$", page, re.MULTILINE) == []


@each_row("path", DECISIONS)
def test_a_decision_has_every_section(path: Path) -> None:
    """A decision says why, what, what else and at what price, on one screen."""
    page = path.read_text()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == SECTIONS
    for section in page.split("\n## ")[1:]:
        assert len(section.split()) > 5, section
    assert re.match(rf"# {path.name[:4]}: \S", page)
    prose = [line for line in page.splitlines() if not line.startswith("|")]
    assert len(" ".join(prose).split()) <= MOST_WORDS


def test_decisions_are_numbered_without_gaps() -> None:
    """A number names one decision for ever."""
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))


def test_every_dependency_has_its_reason() -> None:
    """The packages of pyproject.toml and those of the decision are the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["coordinator"],
        *project["project"]["optional-dependencies"]["nkeys"],
        *project["dependency-groups"]["dev"],
        *project["dependency-groups"]["docs"],
        *project["dependency-groups"]["fuzz"],
    ]
    packages = sorted({re.split(r"[\[=<>~! ]", requirement)[0] for requirement in required})
    [page] = [path for path in DECISIONS if path.name.startswith("0006")]
    reasons = {cells[0].strip("`"): cells[1] for cells in rows(page.read_text())}
    assert sorted(reasons) == packages
    assert all(len(reason.split()) > 1 for reason in reasons.values())


def test_the_glossary_names_things_that_exist() -> None:
    """Each identifier of the glossary is a word of the code."""
    sources = [
        path.read_text()
        for package in ("agent", "common", "coordinator")
        for path in (ROOT / package).rglob("*.py")
    ]
    words = set(re.findall(r"\w+", "\n".join(sources)))
    glossary = rows((DOCS / "glossary.md").read_text())
    named = [code for cells in glossary for code in re.findall(r"`([\w.]+)`", cells[2])]
    assert named
    assert [code for code in named if not set(code.split(".")) <= words] == []


def test_the_glossary_defines_a_term_once() -> None:
    """A term has one meaning, and no term is forbidden by another."""
    terms = [cells[0] for cells in rows((DOCS / "glossary.md").read_text())]
    assert len(terms) == len(set(terms))


def test_a_change_is_one_line_of_a_kind() -> None:
    """The changelog is headings and one-line entries, which each version groups by kind."""
    _, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0].startswith("Unreleased\n")
    for version in versions:
        kinds = re.findall(r"^### (.+)$", version, flags=re.MULTILINE)
        assert kinds == [kind for kind in CHANGE_KINDS if kind in kinds]
        lines = [line for line in version.splitlines()[1:] if line]
        assert [line for line in lines if not re.match(r"#{3,4} \S|- \S.*\.$", line)] == []


class Light(StrEnum):
    """A life cycle for tests."""

    RED = "red"
    GREEN = "green"
    BROKEN = "broken"


class Turn(StrEnum):
    """What happens to a light."""

    GO = "go"  # the road is clear
    STOP = "stop"
    FALL = "fall"
    """Somebody drove into it."""


def test_a_diagram_shows_every_transition_once(docs_tools: Any) -> None:
    """What every state has in common is drawn from `any`; the rest is drawn as it is."""
    table = {
        Light.RED: {Turn.GO: Light.GREEN, Turn.FALL: Light.BROKEN},
        Light.GREEN: {Turn.STOP: Light.RED, Turn.FALL: Light.BROKEN},
        Light.BROKEN: {},
    }
    diagram = docs_tools("blocks.life_cycles").state_diagram(
        table, first=Light.RED, last=frozenset({Light.BROKEN})
    )
    assert diagram.splitlines() == [
        "```mermaid",
        "stateDiagram-v2",
        '    state "any of them" as any',
        "    [*] --> red",
        "    red --> green: go",
        "    green --> red: stop",
        "    any --> broken: fall",
        "    broken --> [*]",
        "```",
    ]


def test_notes_come_from_the_source(docs_tools: Any) -> None:
    """A member's note is the string below it or the comment beside it."""
    notes = docs_tools("blocks.source").member_notes(Turn)
    assert notes == {"GO": "the road is clear", "STOP": "", "FALL": "Somebody drove into it."}


def test_a_marker_without_a_block_is_refused(docs_tools: Any) -> None:
    """A misspelled marker is an error, not an empty place."""
    page = "<!-- generated: figures -->\nold\n<!-- end -->\n"
    generate = docs_tools("generate")
    with pytest.raises(ValueError, match="no block 'figures'"):
        generate.fill(page, {})
    filled, names = generate.fill(page, {"figures": lambda: "new"})
    assert names == ["figures"]
    assert filled == "<!-- generated: figures -->\n\nnew\n\n<!-- end -->\n"
    assert generate.fill(filled, {"figures": lambda: "new"})[0] == filled


def test_the_recorded_run_of_faults_broke_no_promise(docs_tools: Any) -> None:
    """The run that docs/reliability.md shows tried every kind of fault, and kept every promise."""
    reliability = docs_tools("blocks.reliability")
    found = reliability.results()
    assert found["faults"] >= FEWEST_FAULTS
    tried = {row["kind"] for row in found["kinds"]} | set(found["skipped"])
    assert tried >= {kind.value for kind in DEFAULT_KINDS}
    assert set(found["broken"]) == {kind for kind, _ in reliability.PROMISES} == set(Broken)
    assert found["broken"] == dict.fromkeys(found["broken"], 0)


def test_own_lines_of_policies_are_lines_with_code(docs_tools: Any) -> None:
    """A statement over two lines counts twice; blanks, comments and docstrings do not count."""
    text = '''"""A module
of two lines."""

# a comment
VALUE = """text
of three
lines"""
"""What it is."""


def both(one: int,
         other: int) -> int:
    """Say it."""
    return one + other  # the sum
'''
    assert docs_tools("blocks.policy_code").code_lines_in(text) == 6
