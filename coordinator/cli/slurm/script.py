"""The batch script as Slurm reads it: its text, and the options of its `#SBATCH` lines. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from msgspec import Struct

from common.errors import ConfigError

DIRECTIVE = "#SBATCH"


class Script(Struct, frozen=True, kw_only=True):
    """A batch script. lines: the words of each `#SBATCH` line, with its number."""

    text: str
    lines: tuple[tuple[int, tuple[str, ...]], ...] = ()


def parsed(text: str) -> Script:
    """A script with its directives: they end at the first line that is no comment.

    Raises:
        ConfigError: the first line names no interpreter, or a directive has quotes that do not end.
    """
    if not text.strip():
        raise ConfigError("Batch script is empty!")
    if not text.startswith("#!"):
        raise ConfigError(
            "This does not look like a batch script.  The first line must start with #! followed "
            "by the path to an interpreter. For instance: #!/bin/sh"
        )
    if "\r\n" in text:
        raise ConfigError(
            "Batch script contains DOS line breaks (\\r\\n) instead of UNIX ones (\\n)"
        )
    return Script(text=text, lines=tuple(_directives(text)))


def wrapped(command: str) -> Script:
    """The script of `--wrap`."""
    return Script(text=f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{command}\n")


def _directives(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            return
        if not line.startswith(DIRECTIVE) or not line[len(DIRECTIVE) :][:1].isspace():
            continue
        try:
            words = shlex.split(line[len(DIRECTIVE) :], comments=True)
        except ValueError as error:
            raise ConfigError(f"line {number} of the script: {DIRECTIVE}: {error}") from None
        yield number, tuple(words)
