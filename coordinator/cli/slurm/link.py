"""`aryl slurm link DIR`: Slurm's own names for these commands, for programs that call `sbatch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from common.errors import ConfigError
from coordinator.cli.session import say
from coordinator.cli.slurm.main import COMMANDS, PREFIX

EXAMPLE = 'Example: aryl slurm link ~/slurm && export PATH="$HOME/slurm:$PATH"'


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.callback(no_args_is_help=True)(_group)
    app.command("link", epilog=EXAMPLE)(link)


def _group() -> None:
    """Slurm's commands under Slurm's names."""


def link(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory for the links; it is made.")
    ],
) -> None:
    """Link sbatch, squeue and the others to Aryl's commands, in a directory for your PATH.

    A file of that name that is no link of Aryl's stays, and nothing is linked.
    """
    programs = {name: _program(name) for name in COMMANDS}
    for name in programs:
        path = directory / name
        if path.is_symlink() and path.readlink().name == PREFIX + name:
            continue
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path} exists and is no link of Aryl's: choose another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, program in programs.items():
            path = directory / name
            path.unlink(missing_ok=True)
            path.symlink_to(program)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    say(f'linked {", ".join(programs)}: export PATH="{directory.absolute()}:$PATH"')


def _program(name: str) -> Path:
    """The command beside this Python, as pip installs it.

    Raises:
        ConfigError: it is not there, as in a checkout that is not installed.
    """
    path = Path(sys.executable).absolute().parent / (PREFIX + name)
    if not path.exists():
        raise ConfigError(f"{path} is missing: install Aryl with pip first")
    return path
