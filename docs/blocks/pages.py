"""Lists of the pages themselves: title and first sentence. Must not know what they are about."""

from __future__ import annotations

import re
from pathlib import Path

DOCS_DIR = Path(__file__).parents[1]
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_FIRST_SENTENCE = re.compile(
    r"^# .+\n+(?P<sentence>[^\n](?:.|\n(?!\n))*?[.?!])(?=\s)", re.MULTILINE
)
_LINK = re.compile(r"\[([^]]+)\]\([^)]*\)")


def title_of(page: str) -> str:
    """The first heading of a page."""
    found = _TITLE.search(page)
    assert found, "a page begins with a heading"
    return found[1]


def summary_of(page: str) -> str:
    """The first sentence below the title, links as plain text."""
    found = _FIRST_SENTENCE.search(page)
    assert found, f"{title_of(page)!r} has no first sentence"
    return " ".join(_LINK.sub(r"\1", found["sentence"]).split())


def page_list() -> str:
    """Every page of the documentation but the index, and the folders that have one of their own."""
    paths = [path for path in DOCS_DIR.glob("*.md") if path.name != "index.md"]
    paths += DOCS_DIR.glob("*/README.md")
    lines: list[str] = []
    for path in sorted(paths):
        page = path.read_text()
        lines.append(
            f"- [{title_of(page)}]({path.relative_to(DOCS_DIR).as_posix()}): {summary_of(page)}"
        )
    return "\n".join(lines)


def decision_list() -> str:
    """Every decision, in order of its number."""
    return "\n".join(
        f"- [{title_of(path.read_text())}]({path.name})"
        for path in sorted((DOCS_DIR / "decisions").glob("[0-9]*.md"))
    )
