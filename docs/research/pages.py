"""Pages from templates: `templates/NAME.j2` has the words, whoever calls has the figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=jinja2.StrictUndefined,
    autoescape=False,  # Markdown
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
)


def rendered(name: str, **values: object) -> str:
    """A page.

    Raises:
        jinja2.UndefinedError: the template names a value that is not there.
    """
    return _TEMPLATES.get_template(f"{name}.j2").render(values)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown, with the end of its last line."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
