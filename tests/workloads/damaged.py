"""Slices of every published job format, to be damaged; and what a reader says of a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from common.errors import ConfigError
from coordinator.workloads.formats import (
    read_jobs,
    read_throughputs,
)
from coordinator.workloads.job_formats import GAVEL, SHOCKWAVE

DATA = Path(__file__).parents[1] / "data" / "traces"


class Format(NamedTuple):
    """A published format: a slice of it, and which columns say when, how long and how wide."""

    file: str
    submit: str
    duration: str
    gpus: str
    columns: tuple[str, ...] = ()


JOBS = {
    "aryl": Format("own", "submit_s", "duration_s", "gpus"),
    "elasticflow-traces": Format(
        "elasticflow_traces.csv", "submission_time", "duration", "num_gpu"
    ),
    "elasticflow": Format("elasticflow.csv", "submit_time", "duration", "num_gpu"),
    "philly": Format("philly.csv", "timestamp", "duration", "num_gpus"),
    "tiresias": Format("tiresias.csv", "submit_time", "duration", "num_gpu"),
    "chronus": Format("chronus.csv", "submit_time", "duration", "num_gpu"),
    "helios": Format("helios.csv", "submit_time", "duration", "gpu_num"),
    "openb": Format("openb_pods.csv", "creation_time", "deletion_time", "num_gpu"),
    "shockwave": Format("shockwave.trace", "arrival", "duration", "GPUs", SHOCKWAVE.columns),
    "gavel": Format("gavel.trace", "arrival", "total steps", "GPUs", GAVEL.columns),
}

OWN = "submit_s,duration_s,gpus\n0,10,1\n5,10,2\n9,10,4\n"

NO_NUMBER = ("nan", "inf", "-inf", "1e999", "", "x", "1_0", "\u0663")


def rows(name: str) -> tuple[list[str], list[list[str]], str]:
    """The columns and the rows with a GPU of a slice, and what stands between two values."""
    known = JOBS[name]
    text = OWN if name == "aryl" else (DATA / known.file).read_text()
    separator = "\t" if known.columns else ","
    lines = [line.split(separator) for line in text.splitlines()]
    columns = list(known.columns) or lines.pop(0)
    gpus = columns.index(known.gpus)
    return columns, [line for line in lines if line[gpus] != "0"], separator


def written(name: str, columns: list[str], lines: list[list[str]], separator: str) -> str:
    """The text of a file of a format."""
    has_header = not JOBS[name].columns
    return "".join(
        separator.join(line) + "\n" for line in ([columns] if has_header else []) + lines
    )


def line_of(name: str, row: int) -> int:
    """Where a row stands, both from 1 on."""
    return row if JOBS[name].columns else row + 1


def error_of(path: Path, read: Callable[[Path], object]) -> str:
    """What a reader says of a file, behind the file's name."""
    with pytest.raises(ConfigError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < 1_000 + len(str(path))
    return text.removeprefix(f"{path}: ")


def jobs(path: Path) -> object:
    """The jobs of a file; a Gavel trace finds its throughputs."""
    return read_jobs(path, throughputs=read_throughputs(DATA / "simulation_throughputs.json"))


def place(tmp_path: Path, data: str | bytes) -> Path:
    """A file that holds just that."""
    path = tmp_path / "input.csv"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path
