"""Every job format: what it cannot take is named by file, line and column."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model import MAX_JOB_S, MAX_WORKERS
from coordinator.workloads.formats import (
    parse_jobs,
    read_jobs,
    read_throughputs,
)
from tests.tables import each_row
from tests.workloads.damaged import (
    DATA,
    JOBS,
    NO_NUMBER,
    error_of,
    jobs,
    line_of,
    place,
    rows,
    written,
)

# --- jobs: every format -------------------------------------------------------------------------


@each_row("name", JOBS)
def test_the_slice_of_each_format_is_good(tmp_path: Path, name: str) -> None:
    """What is damaged below is read as it stands."""
    path = place(tmp_path, written(name, *rows(name)))
    throughputs = read_throughputs(DATA / "simulation_throughputs.json")
    assert read_jobs(path, throughputs=throughputs).format == name


BAD_CELLS = (
    *product(("submit", "duration"), (*NO_NUMBER, "-1", "1e300", "9007199255")),
    *product(("gpus",), (*NO_NUMBER, "-1", "0", "1.5", "1e3", "9" * 5_000, str(MAX_WORKERS + 1))),
)


@each_row("name", JOBS)
@each_row(("role", "value"), BAD_CELLS)
def test_a_value_that_cannot_be_is_named(tmp_path: Path, name: str, role: str, value: str) -> None:
    """No number, negative, endless, longer than a job may be, later than a clock can tell."""
    columns, lines, separator = rows(name)
    column = getattr(JOBS[name], role)
    if name == "gavel" and role == "duration" and value == "9007199255":
        value = str(2**53)  # steps, of which many are made in a second
    lines[0][columns.index(column)] = value
    path = place(tmp_path, written(name, columns, lines, separator))
    assert error_of(path, jobs).startswith(f"line {line_of(name, 1)}: column {column}: ")


@each_row("name", JOBS)
def test_rows_out_of_order_are_put_in_order_and_counted(tmp_path: Path, name: str) -> None:
    """Of the published formats only Chronus is not in order of submission: there it is no news."""
    columns, lines, separator = rows(name)
    at = columns.index(JOBS[name].submit)
    if lines[0][at] == lines[1][at]:
        lines[0][at] = f"{int(lines[1][at]) + 5}"
    else:
        lines = [lines[1], lines[0]]
    throughputs = read_throughputs(DATA / "simulation_throughputs.json")
    path = place(tmp_path, written(name, columns, lines, separator))
    trace = read_jobs(path, throughputs=throughputs)
    assert [job.submit_s for job in trace.jobs] == sorted(job.submit_s for job in trace.jobs)
    assert bool(trace.put_in_order) == (name != "chronus")


@each_row("name", [name for name in JOBS if not JOBS[name].columns])
def test_a_column_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    """Never is a trace that lacks a column taken for one of another format."""
    columns, lines, separator = rows(name)
    needed = {JOBS[name].submit, JOBS[name].duration, JOBS[name].gpus}
    needed |= {"user", "expect_time_list", "job_type"} & set(columns)
    for column in sorted(needed):
        at = columns.index(column)
        cut = [line[:at] + line[at + 1 :] for line in lines]
        path = place(tmp_path, written(name, columns[:at] + columns[at + 1 :], cut, separator))
        assert (
            error_of(path, jobs)
            == f"line 1: column {column}: missing from a trace in {name} format"
        )


@each_row("name", JOBS)
def test_a_row_that_ends_too_early_or_too_late_is_named(tmp_path: Path, name: str) -> None:
    """The first column that is not there, or the first value that has none."""
    columns, lines, separator = rows(name)
    row = len(lines) - 1
    short = [*lines[:row], lines[row][:1]]
    path = place(tmp_path, written(name, columns, short, separator))
    said = error_of(path, jobs)
    assert said.startswith(f"line {line_of(name, row + 1)}: column ")
    assert said.endswith("missing: the row ends before it")
    long = [*lines[:row], [*lines[row], "1", "2"]]
    path = place(tmp_path, written(name, columns, long, separator))
    width = len(columns)
    assert error_of(path, jobs) == (
        f"line {line_of(name, row + 1)}: column {width + 1}: {width + 2} values, expected {width}"
    )


@each_row("name", JOBS)
@each_row("is_last", [False, True])
def test_a_quote_that_stays_open_is_named_where_it_is_opened(
    tmp_path: Path, name: str, is_last: bool
) -> None:
    """Not where the file ends, nor where another quote happens to close it."""
    columns, lines, separator = rows(name)
    row = len(lines) - 1 if is_last else 1
    lines[row][1] = f'"{lines[row][1]}'
    if not is_last:
        lines[-1][0] = 'x"y'
    path = place(tmp_path, written(name, columns, lines, separator))
    expected = (
        f"line {line_of(name, row + 1)}: column {columns[1]}: no CSV, are its quotes closed? "
    )
    assert error_of(path, jobs).startswith(expected)


# --- rows of our own that contradict themselves -------------------------------------------------

WIDTHS = "submit_s,duration_s,gpus,gpus_per_worker,min_workers,max_workers\n"


@each_row(
    ("row", "said"),
    [
        ("4,3,,", "column gpus_per_worker: 3, expected a divisor of gpus, 4"),
        ("4,8,,", "column gpus_per_worker: 8, expected a divisor of gpus, 4"),
        ("8,2,1,2", "column max_workers: 2, expected at least what it had: 8 GPUs, which are 4 w"),
        ("8,2,5,9", "column min_workers: 5, expected at most what it had: 8 GPUs, which are 4 w"),
        ("8,,9,9", "column min_workers: 9, expected at most what it had: 8 GPUs"),
        ("8,2,,4", "column max_workers: min_workers and max_workers must be given together"),
        ("8,2,0,4", "column min_workers: 0, expected at least 1"),
        ("8,2,4,100001", "column max_workers: 100001, expected at most 100000"),
        ("8,0,,", "column gpus_per_worker: 0, expected at least 1"),
    ],
)
def test_sizes_that_contradict_each_other_are_an_error(row: str, said: str) -> None:
    """A job had its GPUs with some number of its workers that its range allows."""
    with pytest.raises(ConfigError) as caught:
        parse_jobs("own", f"{WIDTHS}0,9,1,1,1,1\n5,9,{row}\n")
    assert str(caught.value).startswith(f"own: line 3: {said}")


@each_row("row", ["4,2,,", "8,2,4,4", "8,2,1,4", "8,2,4,9", "8,,1,2", "8,,8,8"])
def test_sizes_that_agree_are_taken(row: str) -> None:
    """Its own width is at either end of the range, or between."""
    [job] = parse_jobs("own", f"{WIDTHS}5,9,{row}\n").jobs
    assert (job.submit_s, job.gpus) == (5, int(row[0]))


@each_row(
    ("column", "value", "said"),
    [
        ("deadline_s", "1e10", "expected at most 1e+09"),
        ("estimate_s", "-1", "expected at least 0"),
        ("iterations", "1e300", "expected at most"),
        ("batch_size", "0", "expected at least 1"),
        ("heterogeneous_speed_ratio", "1.1", "expected at most 1"),
        ("gpu_share", "nan", "is not a number"),
        ("priority", "9" * 400, "expected at most"),
        ("priority", "-" + "9" * 400, "expected at least"),
        ("cpus", "9" * 400, "expected at most"),
        ("memory_bytes", "-1", "expected at least 0"),
        ("has_checkpoints", "True", "expected true or false"),
    ],
)
def test_every_other_column_has_its_bounds_too(column: str, value: str, said: str) -> None:
    """What is told at all is what a job can have."""
    with pytest.raises(ConfigError) as caught:
        parse_jobs("own", f"submit_s,duration_s,gpus,{column}\n0,1,1,{value}\n")
    assert str(caught.value).startswith(f"own: line 2: column {column}: ")
    assert said in str(caught.value)


def test_the_longest_job_is_taken() -> None:
    """The bound is that of what a user may ask for, and itself allowed."""
    [job] = parse_jobs("own", f"submit_s,duration_s,gpus\n0,{MAX_JOB_S:.0f},1\n").jobs
    assert job.duration_s == MAX_JOB_S


def test_a_row_over_several_lines_is_named_by_its_first() -> None:
    """A quoted name may hold the end of a line; the rows below are where they stand."""
    text = 'submit_s,duration_s,gpus,name\n0,1,1,"a\nb"\n1,1,1,c\n2,1,x,"d\ne"\n'
    with pytest.raises(ConfigError, match=r"own: line 5: column gpus: 'x'"):
        parse_jobs("own", text)


# --- published columns of their own -------------------------------------------------------------


@each_row(
    ("name", "column", "value"),
    [
        ("elasticflow-traces", "deadline", "1e300"),
        ("elasticflow-traces", "deadline", "1"),
        ("elasticflow", "ddl", "nan"),
        ("elasticflow", "batch_size", "0"),
        ("elasticflow", "iteration", "inf"),
        ("tiresias", "job_id", ""),
        ("philly", "timestamp", "1969-12-31 23:59:59"),
        ("philly", "timestamp", "2017-09-04 10:30:41.000000 or so"),
        ("chronus", "expect_time_list", "9" * 5_000),
        ("chronus", "expect_time_list", "99999999"),
        ("chronus", "job_type", "hard"),
        ("openb", "name", ""),
        ("openb", "scheduled_time", "-1"),
        ("openb", "gpu_milli", "1001"),
        ("openb", "memory_mib", "1e300"),
        ("shockwave", "SLO", "nan"),
        ("shockwave", "SLO", "1e300"),
        ("gavel", "job type", "nothing"),
        ("gavel", "SLO", "1e300"),
    ],
)
def test_a_column_of_one_format_is_checked_as_well(
    tmp_path: Path, name: str, column: str, value: str
) -> None:
    """Deadlines, sizes and names of the published formats have bounds like all others."""
    columns, lines, separator = rows(name)
    lines[0][columns.index(column)] = value
    path = place(tmp_path, written(name, columns, lines, separator))
    assert error_of(path, jobs).startswith(f"line {line_of(name, 1)}: column {column}: ")


def test_a_pod_cannot_run_before_it_is_there(tmp_path: Path) -> None:
    """Created, scheduled, deleted, in this order."""
    header = "name,num_gpu,gpu_milli,gpu_spec,qos,creation_time,deletion_time,scheduled_time\n"
    path = place(tmp_path, f"{header}a,1,1000,,LS,50,90,40\n")
    assert error_of(path, jobs) == "line 2: column scheduled_time: 40, expected at least 50"
    path = place(tmp_path, f"{header}a,1,1000,,LS,50,40,60\n")
    assert error_of(path, jobs) == "line 2: column deletion_time: 40, expected at least 60"
