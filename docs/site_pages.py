"""Hooks of `mkdocs build`: folders in the navigation, and the pages beside docs/. Must not change
what a page says.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.utils import get_markdown_title

ROOT = Path(__file__).parents[1]
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "coordinator/demo/data/ORIGIN.md")
"""Pages that lie where their readers look for them, and that pages of docs/ link to."""
_LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s:#]+\.md)(?=[)#])")


def on_config(config: Any) -> Any:
    """An entry that ends in `/` stands for the pages of that folder that have none of their own."""
    named = set(re.findall(r"[\w./-]+\.md", str(config.nav)))
    for entry in config.nav:
        [(title, value)] = entry.items()
        if title == "Changes" and (ROOT / "CHANGELOG.md").exists():
            entry[title] = "CHANGELOG.md"
        elif isinstance(value, str) and value.endswith("/"):
            pages = sorted((ROOT / "docs" / value).glob("*.md"), key=_in_order)
            names = [f"{value}{page.name}" for page in pages]
            entry[title] = [_entry(name) for name in names if name not in named]
    return config


def on_files(files: Files, config: Any) -> Files:
    """The pages beside docs/ are pages of the site as well."""
    for name in filter(lambda name: (ROOT / name).exists(), BESIDE):
        content = _rewritten((ROOT / name).read_text(), partial(_inside, name=name))
        files.append(
            File.generated(
                config,
                Path(name).name,
                content=content,
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Links that leave docs/ lead to the pages beside it."""
    if page.file.generated_by:
        return markdown
    name = page.file.src_uri
    here = posixpath.dirname(name) or "."
    return _rewritten(
        markdown, lambda link: posixpath.relpath(_inside(link, name=f"docs/{name}"), here)
    )


def _rewritten(markdown: str, change: Callable[[str], str]) -> str:
    return _LINK.sub(lambda found: change(found["path"]), markdown)


def _inside(link: str, *, name: str) -> str:
    """Where in docs/ a link of the page `name`, both of the repository, leads to."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
    return posixpath.basename(target) if target in BESIDE else target.removeprefix("docs/")


def _in_order(page: Path) -> tuple[bool, str]:
    return page.name != "README.md", page.name


def _entry(name: str) -> str | dict[str, str]:
    """A folder's own page stands for it; any other one is named by its title."""
    title = get_markdown_title((ROOT / "docs" / name).read_text())
    return name if name.endswith("README.md") or title is None else {title: name}
