"""Optional dependencies: a GPU node has only its agent's packages, but all commands.

This module imports nothing that a GPU node's install lacks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator

EXIT_LACKING = 2
"""The usage status of `aryl`: the command is called where it cannot run."""
_OURS = frozenset({"agent", "common", "coordinator"})


@contextlib.contextmanager
def needing_extras(program: str) -> Generator[None]:
    """A block around a program's imports: a missing package ends it with one line that names it.

    A module of our own that is missing is a broken install or a bug, and shows its traceback.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in _OURS:
            raise
        sys.stderr.write(
            f"{program}: module {missing} is not installed. A GPU node needs only aryl-agent; "
            f"where {program} is to run: pip install 'aryl[coordinator]'\n"
        )
        raise SystemExit(EXIT_LACKING) from None
