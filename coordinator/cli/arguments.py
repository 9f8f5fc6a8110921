"""The command line before any command sees it, and its error messages."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import typer

from common.jobspec import utf8_misfit

_NO_CHOICE = re.compile(r"Value error, (?P<value>.+) is not one of (?P<choices>.+)\.")


def check_text(ctx: typer.Context, args: Sequence[str]) -> None:
    """Refuse text that no message and no file of ours could hold.

    Raises:
        typer.BadParameter: an argument is not UTF-8; names it by its position and the argument
            before it.
    """
    for place, argument in enumerate(args, start=1):
        what = utf8_misfit(argument)
        if what:
            before = args[place - 2] if place > 1 else ""
            after = f" (after {before})" if before.startswith("-") else ""
            raise typer.BadParameter(what, ctx=ctx, param_hint=f"argument {place}{after}")


@contextmanager
def in_our_words() -> Generator[None, None, None]:
    """List the choices of an option for a value that is none of them, as all our errors do.

    typer has these errors from its validator, whose text is about Python values.
    """
    try:
        yield
    except typer.BadParameter as error:
        found = _NO_CHOICE.fullmatch(error.message)
        if found is not None:
            choices = found["choices"].replace("'", "")
            error.message = f"{found['value']}, expected one of {choices}"
        raise
