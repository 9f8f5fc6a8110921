"""Lists of the pages themselves, by title. Must not know what they are about."""

from __future__ import annotations

import re
from pathlib import Path

DOCS_DIR = Path(__file__).parents[1]
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def title_of(page: str) -> str:
    """The first heading of a page."""
    found = _TITLE.search(page)
    assert found, "a page begins with a heading"
    return found[1]


def page_list() -> str:
    """Every page of the documentation but the index, and the folders that have one of their own."""
    paths = [path for path in DOCS_DIR.glob("*.md") if path.name != "index.md"]
    paths += DOCS_DIR.glob("*/README.md")
    links = [
        f"[{title_of(path.read_text())}]({path.relative_to(DOCS_DIR).as_posix()})"
        for path in sorted(paths)
    ]
    return ", ".join(links) + "."


def decision_list() -> str:
    """Every decision, in order of its number."""
    return "\n".join(
        f"- [{title_of(path.read_text())}]({path.name})"
        for path in sorted((DOCS_DIR / "decisions").glob("[0-9]*.md"))
    )
