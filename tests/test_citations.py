"""What code and glossary refer to, held to what is there. Must not know what is said of it."""

from __future__ import annotations

import re
from pathlib import Path

from common.api import Status
from coordinator.demo.workload import Run
from coordinator.engine.state.accounting import Figures
from tests.tables import each_row

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for package in ("agent", "common", "coordinator", "tests")
    for path in (ROOT / package).rglob("*.py")
)
FIGURES_OF_A_RUN = (
    (ROOT / "docs" / "glossary.md").read_text().partition("### Figures of a run\n")[2]
).partition("\n## ")[0]


@each_row("package", ["agent", "common", "coordinator", "tests"])
def test_code_cites_only_pages_that_are_here(package: str) -> None:
    """A reader can open what a comment sends them to: pages by their path, none by a number."""
    texts = {path: path.read_text() for path in SOURCES if path.is_relative_to(ROOT / package)}
    numbered = r"\bdesign,?\s+(?:section\s+|promise\s+)?\d"
    by_number = [path.name for path, text in texts.items() if re.search(numbered, text)]
    named = {page for text in texts.values() for page in re.findall(r"docs/[\w/.-]+\.md", text)}
    assert by_number == []
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_figures_of_the_glossary_are_figures_of_a_run_or_a_cell() -> None:
    """What the table names in JSON is a name that `aryl up` or `aryl status` prints."""
    rows = [line.split("|") for line in FIGURES_OF_A_RUN.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[3])}
    known = {*Run.__struct_fields__, *Figures.__struct_fields__}
    assert named
    assert sorted(named - known) == []


def test_what_status_has_beside_the_figures_is_named_as_there() -> None:
    """The page's first words on `aryl status` name its own fields, and none that are figures."""
    told = FIGURES_OF_A_RUN.partition("A cell counts")[0]
    named = set(re.findall(r"`(\w+)`", told.partition("stands beside")[2]))
    assert named
    assert sorted(named - {*Status.__struct_fields__}) == []
    assert sorted(named & {*Figures.__struct_fields__}) == []
