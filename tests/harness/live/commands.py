"""The commands `aryl` and Slurm's, called in this process for a test of a live cell.

A command as a process costs half a second of CPU, nearly all of it imports, and a test gives dozens
of commands. Commands are processes where the process is the subject: `test_up.py`, `test_entry.py`,
and those that jobs and submitit call.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Mapping
from typing import NamedTuple

from typer.testing import CliRunner

from common.clock import SystemClock
from coordinator.cli.app import app
from coordinator.cli.session import Surroundings
from coordinator.cli.slurm import main as slurm
from coordinator.cli.slurm.cell import Place
from coordinator.client.target import over_nats
from coordinator.demo.plan import CELL


class Said(NamedTuple):
    """The exit code of a command, and what it wrote."""

    code: int
    out: str
    err: str


def environ_of(
    nats_url: str, *, cell: str = CELL, tenant: str = "ops", user: str = "test"
) -> dict[str, str]:
    """What names a live cell and a caller; no configuration file of this machine is read."""
    return {
        "ARYL_NATS_URL": nats_url,
        "ARYL_CELL": cell,
        "ARYL_TENANT": tenant,
        "ARYL_USER": user,
        "XDG_CONFIG_HOME": "/nonexistent",
    }


def given(environ: Mapping[str, str], *words: str) -> Said:
    """Give `aryl WORDS` where no loop runs; an exception of its own rises here."""
    around = Surroundings(
        environ=environ, connect=over_nats, clock=SystemClock(), is_interactive=lambda: False
    )
    done = CliRunner().invoke(app, list(words), obj=around, prog_name="aryl")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Said(done.exit_code, done.stdout, done.stderr)


async def aryl(environ: Mapping[str, str], *words: str) -> Said:
    """Give `aryl WORDS` on a thread, beside the test's loop."""
    return await asyncio.to_thread(given, environ, *words)


async def slurm_command(environ: Mapping[str, str], *words: str, types: str = "") -> Said:
    """Give a command of Slurm's, as `aryl`; `environ["PWD"]` is where it is given."""
    name, *others = words
    place = Place(command=name, environ=environ, connect=over_nats, clock=SystemClock())

    def call() -> Said:
        out, err, before = io.StringIO(), io.StringIO(), sys.stdin
        sys.stdin = io.StringIO(types)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = slurm.main(name, others, place)
        finally:
            sys.stdin = before
        return Said(code, out.getvalue(), err.getvalue())

    return await asyncio.to_thread(call)
