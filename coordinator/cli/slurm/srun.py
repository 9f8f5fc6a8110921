"""`srun`: within a batch script a step, else a job of its own that is waited for."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence

from common.api import Cancel, Done, Logs
from common.errors import ArylError
from common.model import JobState
from common.slurm.options import FLAG, MAYBE, Kind, Option, OptionError, read
from common.terminal import visible_log
from coordinator.cli.slurm import cell, sbatch, script
from coordinator.cli.slurm.cell import Place, note, number_of
from coordinator.cli.slurm.sbatch_options import TABLE as OF_BATCH
from coordinator.client import Client

ONLY_BATCH = frozenset(
    {"array", "output", "error", "input", "parsable", "test-only", "wait", "wrap", "hold"}
)
_STEP = "srun runs each task in its own process"
TABLE = (
    *(option for option in OF_BATCH if option.name not in ONLY_BATCH),
    Option("label", "l", FLAG),
    Option("unbuffered", "u", FLAG, Kind.HARMLESS),
    Option("kill-on-bad-exit", "K", MAYBE, Kind.HARMLESS),
    Option("cpu-bind", "", kind=Kind.HARMLESS),
    Option("exact", "", FLAG, Kind.HARMLESS),
    Option("overlap", "", FLAG, Kind.HARMLESS),
    Option("immediate", "I", MAYBE, Kind.REFUSED, "the job waits for its turn"),
    Option("output", "o", kind=Kind.REFUSED, why="srun prints the log; use sbatch for a file"),
    Option("error", "e", kind=Kind.REFUSED, why="srun prints the log; use sbatch for a file"),
    Option("input", "i", kind=Kind.REFUSED, why="the job has no standard input"),
    Option("pty", "", MAYBE, Kind.REFUSED, "a worker has no terminal"),
    Option("jobid", "", kind=Kind.REFUSED, why="a step is started by the script of its job"),
    Option("mpi", "", kind=Kind.REFUSED, why="Aryl starts no MPI daemons"),
    Option("multi-prog", "", FLAG, Kind.REFUSED, "start one step for each program"),
)
WAITS = frozenset({JobState.PENDING, JobState.STARTING})
IN_JOB = "ARYL_BATCH_DIR"
"""A batch script has it: the directory with the `srun` of its steps."""
_EXITED = re.compile(r"^srun: error: \S+: task \d+: Exited with exit code (\d+)$", re.MULTILINE)
"""The line of a node about a task that failed (`agent.batch.step`). A job has the exit code of the
first node that failed, and another one may have a higher code.
"""
HELP = """usage: srun [OPTION...] PROGRAM [ARGUMENT...]

Run a program in a job of its own, print the logs of its nodes, and return its exit code. Within a
batch script, start the tasks of a step.

  srun --gpus=1 --time=10 python3 check.py
"""


def run(arguments: list[str], place: Place) -> int:
    """A step, or a job: its exit code."""
    within = place.environ.get(IN_JOB)
    if within is not None:
        program = os.path.join(within, "bin", "srun")  # noqa: PTH118 - it is only handed on
        os.execv(program, [program, *arguments])
    flags, command = read(arguments, TABLE)
    given = {option.name for option, _ in flags}
    if cell.is_about_itself(given, HELP):
        return 0
    if not command:
        raise OptionError("No command given to execute")
    label = "-l " if "label" in given else ""
    found = script.Script(text=f'#!/bin/sh\nexec srun {label}"$@"\n')
    asked = sbatch.asked(found, flags, place)
    asked.setdefault("job-name", os.path.basename(command[0]))  # noqa: PTH119 - no path is opened
    asked["output"] = ""
    tenant = asked.get("account") or None
    return place.run(lambda client: _run(client, place, found, command, asked), tenant=tenant)


async def _run(
    client: Client,
    place: Place,
    found: script.Script,
    command: Sequence[str],
    asked: dict[str, str],
) -> int:
    made = await sbatch.made(client, place, found, command, asked, name="srun")
    answer = await sbatch.submitted(client, made)
    row = (await cell.described(client, answer.job_id)).job
    assert row is not None, "a job's description has its row"
    number = number_of(row)
    for warning in answer.warnings:
        note("srun", f"warning: {warning}")
    note("srun", f"job {number} queued and waiting for resources")
    is_over = False
    try:
        row = await cell.until(
            client, place.clock, answer.job_id, lambda row: row.state not in WAITS
        )
        note("srun", f"job {number} has been allocated resources")
        codes = await _print_logs(client, place, answer.job_id)
        row = await cell.until_ended(client, place.clock, answer.job_id)
        is_over = True
    finally:
        if not is_over:  # Ctrl-C ends the job, as it ends a step of Slurm's
            with contextlib.suppress(ArylError):
                await client.ask(Cancel(job_id=answer.job_id), Done)
    code = sbatch.exit_code(row)
    if code and row.error:
        note("srun", f"error: job {number}: {row.error}")
    return max(code, *codes) if code and codes else code


async def _print_logs(client: Client, place: Place, job_id: str) -> list[int]:
    """Print the logs of all nodes as they grow, until the job ends; the exit codes of tasks in
    them.
    """
    codes: list[int] = []
    from coordinator.cli.follow import follow_all_logs  # only here: it loads typer

    def show(found: Logs) -> None:
        codes.extend(map(int, _EXITED.findall(found.text)))
        sys.stdout.write(visible_log(found.text))
        sys.stdout.flush()

    try:
        await follow_all_logs(client, place.clock, job_id, show=show)
    except ArylError as error:
        note("srun", f"error: the rest of the log is missing: {error}")
    return codes
