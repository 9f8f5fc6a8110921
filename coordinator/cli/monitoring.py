"""`aryl monitoring export`: the packaged boards, alerts and scrape configuration as files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from common.errors import ConfigError
from coordinator.cli.session import say
from coordinator.policies.contract.text import counted

PACKAGED = Path(__file__).parent / "monitoring_files"
"""In a wheel: a copy of docs/monitoring, made when it is built."""
IN_A_CHECKOUT = Path(__file__).parents[2] / "docs" / "monitoring"
_LINK = re.compile(r"(?<=runbook_url: )(?=\w+\.html#)")

app = typer.Typer(no_args_is_help=True, help="Boards and alerts for Prometheus and Grafana.")


@app.command("export")
def export(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory to write to; made if missing.")
    ],
    docs_url: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Where the site of `make docs` is served, for the alerts' links."
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace files that differ.")] = False,
) -> None:
    """Write the Grafana boards, alert rules and an example of a scrape configuration to DIR."""
    texts = {path.name: _linked(path.read_text(), docs_url) for path in _files()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        changed = [name for name, text in texts.items() if _differs(directory / name, text)]
        if changed and not force:
            raise ConfigError(
                f"{directory}: {', '.join(changed)} would be replaced; expected another directory,"
                " or --force"
            )
        for name, text in texts.items():
            (directory / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from None
    say(f"wrote {counted(len(texts), 'file')} to {directory}: {', '.join(texts)}")


def _files() -> list[Path]:
    """The files, as they are packaged or in the checkout that runs."""
    found = PACKAGED if PACKAGED.is_dir() else IN_A_CHECKOUT
    return sorted([*found.glob("*.json"), *found.glob("*.yml")])


def _linked(text: str, docs_url: str) -> str:
    """A text whose links to the runbook lead to the site at a URL; empty: as they are."""
    base = f"{docs_url.rstrip('/')}/" if docs_url else ""
    return _LINK.sub(lambda _: base, text)


def _differs(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() != text
