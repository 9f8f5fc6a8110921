"""The entry of all commands: errors as Slurm prints them, exit code 1, and no traceback.

This module imports nothing slow, and only the command that runs.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from common.errors import ArylError
from common.slurm.options import OptionError
from common.terminal import visible
from coordinator.cli.interrupt import EXIT_INTERRUPTED, importing

if TYPE_CHECKING:
    from coordinator.cli.slurm.cell import Place

EXIT_ERROR = 1
COMMANDS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "sacct", "srun")
PREFIX = "aryl-"
"""What the names of these commands begin with, before `aryl slurm link` gives them Slurm's."""


def main(command: str, words: list[str], place: Place | None = None) -> int:
    """Run a command; its exit code."""
    try:
        with importing():
            module = import_module(f"coordinator.cli.slurm.{command}")
            from coordinator.cli.slurm.cell import Place
        return int(module.run(words, place or Place.real(command)))
    except (ArylError, OptionError) as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"{command}: error: {visible(line)}\n")
        return EXIT_ERROR
    except BrokenPipeError:  # squeue | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def entry() -> None:
    """Entry point of `aryl-sbatch` and the others: the name says which."""
    name = os.path.basename(sys.argv[0]).removeprefix(PREFIX)  # noqa: PTH119 - pathlib takes longer
    sys.exit(main(name, sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
