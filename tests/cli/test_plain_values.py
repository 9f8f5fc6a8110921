"""Values of options that need no conversion: taken as typer takes them, without its validator."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from enum import StrEnum
from functools import cache
from typing import Annotated, Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from coordinator.cli import plain_values
from tests.draws import pick

LOADED = """
import sys
from coordinator.cli.app import app
try:
    app(["status", "-o", "json"], prog_name="aryl")
except SystemExit as end:
    print(end.code)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"pydantic", "numpy", "scipy"}))
print(*sorted(name for name in sys.modules if name.startswith("coordinator.engine")))
"""


def test_status_loads_neither_the_validator_nor_the_engine() -> None:
    """People and monitors call it often; with a choice of an output too."""
    environ = {"ARYL_HOME": "/nonexistent/aryl", "XDG_CONFIG_HOME": "/nonexistent"}
    found = subprocess.run(
        [sys.executable, "-c", LOADED], env=environ, capture_output=True, text=True, check=True
    )
    assert found.stdout == "2\n\n\n", found
    assert "no cell is named" in found.stderr


class Shade(StrEnum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


@cache
def made(is_spared: bool) -> Any:
    """A command with options of all forms, which prints what it got."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command()
    def take(  # pyright: ignore[reportUnusedFunction]
        name: Annotated[str, typer.Argument()],
        text: Annotated[str | None, typer.Option()] = None,
        count: Annotated[int, typer.Option(min=1)] = 3,
        seconds: Annotated[float, typer.Option(min=0.5)] = 2.0,
        shade: Annotated[Shade, typer.Option()] = Shade.RED,
        shades: Annotated[list[Shade] | None, typer.Option()] = None,
        words: Annotated[list[str] | None, typer.Option()] = None,
        is_so: Annotated[bool, typer.Option("--so/--not-so")] = False,
    ) -> None:
        typer.echo(repr((name, text, count, seconds, shade, shades, words, is_so)))

    command = typer.main.get_command(app)
    if is_spared:
        plain_values.spare(command)
    return command


def outcome(command: Any, words: list[str]) -> tuple[object, str, str]:
    """Exit code and text of a command line."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as end,
    ):
        command.main(words, prog_name="take")
    return end.value.code, out.getvalue(), err.getvalue()


WORDS = st.lists(
    pick(
        "a", "--text=x", "--text=", "--count=2", "--count=0", "--count=x", "--seconds=1",
        "--seconds=0.1", "--seconds=nan", "--shade=blue", "--shade=BLUE", "--shade=",
        "--shades=red", "--shades=green", "--words=b", "--words=", "--so",
        "--not-so", "--help", "--nosuch",
    ),
    max_size=5,
)  # fmt: skip


@given(WORDS)
def test_a_line_means_and_fails_as_it_does_in_typer(words: list[str]) -> None:
    """The same values of the same types, the same errors and the same exit codes."""
    spared, whole = (outcome(made(is_spared), words) for is_spared in (True, False))
    assert spared == whole
