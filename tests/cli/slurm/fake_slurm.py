"""Slurm's commands against a cell that answers from a table."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Generator, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from common.api import (
    Cancel,
    Describe,
    Description,
    Done,
    JobRow,
    Jobs,
    ListJobs,
    ListNodes,
    NodeRow,
    Nodes,
    RequestRow,
    Submit,
    Submitted,
)
from common.model import JobSpec
from coordinator.cli.slurm.cell import Place
from coordinator.cli.slurm.main import main
from tests.cli.fake_cell import ENVIRON, FakeCell, QuickClock, Run, job_row, node_row

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def asked(**changes: Any) -> RequestRow:
    """What a job asked for: a batch script of an hour."""
    values: dict[str, Any] = {
        "priority": 0,
        "time_limit_s": 3600.0,
        "deadline_s": None,
        "grace_s": 30.0,
        "gpu_types": (),
        "cpus_per_worker": 4,
        "memory_bytes_per_worker": 8 << 30,
        "workdir": "/work",
        "title": "train.sh",
        "comment": "",
        "ran_on": (),
        "ran_workers": 0,
    }
    return RequestRow(**{**values, **changes})


def row(number: int = 17, **changes: Any) -> JobRow:
    """A job in full: one that runs on two nodes of eight GPUs."""
    request = changes.pop("request", None) or asked()
    found = job_row(f"j{number}", number=number, request=request, min_workers=2, **changes)
    if request.attempt_started_at_s is None:  # as in its first attempt
        request = replace(request, attempt_started_at_s=found.started_at_s)
    return replace(found, request=request)


def cell(*rows: JobRow, nodes: tuple[NodeRow, ...] = (), spec: JobSpec | None = None) -> FakeCell:
    """A cell with these jobs and nodes; it takes every job and gives it the number 17."""
    by_name = {str(each.number): each for each in rows} | {each.job_id: each for each in rows}

    def described(request: Describe) -> Description:
        found = by_name.get(request.name) or row()
        return Description(kind="job", name=found.job_id, job=found, spec=spec)

    def listed(request: ListJobs) -> Jobs:
        ended = ("succeeded", "failed", "cancelled")
        kept = [each for each in rows if not request.is_live_only or each.state not in ended]
        return Jobs(rows=tuple(kept))

    return FakeCell(
        {
            Submit: Submitted(job_id="j17"),
            Describe: described,
            ListJobs: listed,
            ListNodes: Nodes(
                rows=nodes or (node_row("t0", gpu_type=H100), node_row("t1", gpu_type=A100))
            ),
            Cancel: Done(detail="it is being cancelled"),
        }
    )


@contextlib.contextmanager
def _standard(types: str) -> Generator[tuple[io.StringIO, io.StringIO]]:
    before = sys.stdin
    sys.stdin = io.StringIO(types)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            yield out, err
    finally:
        sys.stdin = before


def slurm(
    of: FakeCell,
    command: str,
    *words: str,
    environ: Mapping[str, str] | None = None,
    types: str = "",
) -> Run:
    """Run `COMMAND WORDS`; `types` is standard input."""
    around = Place(
        command=command,
        environ={**ENVIRON, **(environ or {})},
        connect=of.connect,
        clock=QuickClock(),
    )
    with _standard(types) as (out, err):
        code = main(command, list(words), around)
    return Run(code, out.getvalue(), err.getvalue())


def sent(of: FakeCell) -> JobSpec:
    """The job that reached the cell."""
    [request] = [each for each in of.asked if isinstance(each, Submit)]
    return request.spec


def refused(of: FakeCell, *words: str, script: str = "#!/bin/sh\ntrue\n") -> str:
    """What `sbatch` says of options that it refuses: nothing is submitted."""
    found = slurm(of, "sbatch", *words, types=script)
    if found.code != 1:
        pytest.fail(f"{words} is taken: {found.err}")
    assert not [each for each in of.asked if isinstance(each, Submit)]
    return found.err
