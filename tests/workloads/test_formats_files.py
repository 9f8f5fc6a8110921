"""What is no table, and loads, nodes and curves that cannot be: each is one clear error."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError
from coordinator.workloads.formats import (
    read_curves,
    read_jobs,
    read_nodes,
    read_throughputs,
)
from coordinator.workloads.load_formats import parse_loads, read_loads
from tests.tables import each_row
from tests.workloads.damaged import (
    DATA,
    NO_NUMBER,
    OWN,
    error_of,
    jobs,
    place,
)

# --- what is no table at all --------------------------------------------------------------------

READERS: dict[str, Callable[[Path], object]] = {
    "jobs": jobs,
    "loads": read_loads,
    "nodes": read_nodes,
    "curves": lambda path: read_curves(path, gpu_type="T4"),
    "throughputs": read_throughputs,
}

TABLES = [name for name in READERS if name != "throughputs"]


@each_row("name", TABLES)
@each_row("text", ["", "\n", " \n0,1,1\n", ",,\n"])
def test_an_empty_file_is_one_error(tmp_path: Path, name: str, text: str) -> None:
    """Nothing, or a first line of nothing."""
    said = error_of(place(tmp_path, text), READERS[name])
    assert said == "line 1: column 1: empty file; expected a header"


@each_row(
    ("name", "header"),
    [
        ("jobs", "submit_s,duration_s,gpus"),
        ("loads", "t_s,req_per_s"),
        ("loads", "client,t_s,req_per_s,cv"),
        ("nodes", "sn,gpu,model"),
        ("curves", "global_batch_size,1,2"),
    ],
)
@each_row("end", ["", "\n", "\n\n , \n"])
def test_a_header_alone_is_one_error(tmp_path: Path, name: str, header: str, end: str) -> None:
    """It names the line where a row should be, and what was expected there."""
    said = error_of(place(tmp_path, header + end), READERS[name])
    first = header.partition(",")[0]
    assert said == f"line 2: column {first}: no rows, expected at least one"


@each_row("name", READERS)
def test_binary_data_are_named_by_their_first_byte_that_is_no_text(
    tmp_path: Path, name: str
) -> None:
    """Also where every byte happens to be UTF-8, and without writing any of them to a terminal."""
    noise = random.Random(1).randbytes(4_000)
    assert " (bytes): not UTF-8 text: " in error_of(place(tmp_path, noise), READERS[name])
    said = error_of(place(tmp_path, b"a,b\nc\x00\x1b[2J" + bytes(4_000)), READERS[name])
    assert said == "line 2: column 2 (characters): '\\x00': no text, expected a table"


@each_row("name", READERS)
def test_compressed_data_that_are_cut_off_or_damaged_are_named(tmp_path: Path, name: str) -> None:
    """Wherever the cut is: in the head, in the data, before the checksum, or behind all of it."""
    packed = gzip.compress(OWN.encode() * 50, mtime=0)
    for damaged in (packed[:5], packed[: len(packed) // 2], packed[:-4], packed + b"more"):
        said = error_of(place(tmp_path, damaged), READERS[name])
        assert said.startswith("line ")
        assert " (bytes): compressed data end or are damaged here" in said


def test_a_header_that_is_no_header_does_not_fill_the_screen(tmp_path: Path) -> None:
    """One line of a million characters is told in short."""
    for text in ("x" * 10**6, ",".join(map(str, range(10**5))), "submit_s," + "y" * 10**6):
        assert error_of(place(tmp_path, f"{text}\n1\n"), jobs).startswith("line 1: column ")


# --- loads --------------------------------------------------------------------------------------

SERIES = {
    "req_per_s": ("t_s,req_per_s\n{},{}\n{},{}\n", "t_s", "req_per_s", 300),
    "busy_ratio": ("t_s,busy_ratio\n{},{}\n{},{}\n", "t_s", "busy_ratio", 300),
    "servegen": ("model,t_s,req_per_s\nm:a,{},{}\nm:a,{},{}\n", "t_s", "req_per_s", 600),
    "clients": ("client,t_s,req_per_s,cv\n0,{},{},1\n0,{},{},1\n", "t_s", "req_per_s", 600),
}


@each_row("name", SERIES)
@each_row("value", [*NO_NUMBER, "-1", "1e300"])
def test_a_load_that_cannot_be_is_named(name: str, value: str) -> None:
    """Of the instant as of the load."""
    shape, clock, load, step_s = SERIES[name]
    assert len(parse_loads("load", shape.format(0, 0.5, step_s, 0.5))) == 1
    with pytest.raises(ConfigError) as caught:
        parse_loads("load", shape.format(0, 0.5, value, 0.5))
    assert str(caught.value).startswith(f"load: line 3: column {clock}: ")
    with pytest.raises(ConfigError) as caught:
        parse_loads("load", shape.format(0, 0.5, step_s, value))
    assert str(caught.value).startswith(f"load: line 3: column {load}: ")
    with pytest.raises(ConfigError) as caught:
        parse_loads("load", shape.format(step_s, 0.5, 0, 0.5))
    assert str(caught.value).startswith(f"load: line 3: column {clock}: 0 is not after")


@each_row(
    ("text", "said"),
    [
        (
            "t_s,req_per_s\n0,1\n1e-300,1\n",
            "line 3: column t_s: 1e-300, expected a step of at least",
        ),
        ("t_s,req_per_s\n0,1\n0.5,1\n", "line 3: column t_s: 0.5, expected a step of at least 1 s"),
        ("model,t_s,req_per_s\n,0,1\n,600,1\n", "line 2: column model: empty, expected a name"),
        ('{"timestamp": 0}\n{"timestamp": 1e300}\n', "line 2: column timestamp: 1e+300 ms is more"),
        ('{"timestamp": 0}\n{"timestamp": 1e400}\n', "line 2: column timestamp: "),
        ('{"timestamp": 0}\n{"timestamp": NaN}\n', "line 2: column timestamp: "),
        ('{"timestamp": 0}\n{"timestamp"', "line 2: column timestamp: "),
        (
            "TIMESTAMP\n2023-11-16\n2024-11-17\n",
            "line 3: column TIMESTAMP: 2024-11-17 is more than",
        ),
        ("TIMESTAMP\n1969-11-16\n", "line 2: column TIMESTAMP: 1969-11-16, expected 1970 or later"),
    ],
)
def test_a_load_that_would_never_end_is_an_error(text: str, said: str) -> None:
    """Steps of nothing, and logs over years, of which every step would have a value."""
    with pytest.raises(ConfigError) as caught:
        parse_loads("load", text)
    assert str(caught.value).startswith(f"load: {said}")


def test_the_zone_of_an_instant_counts_behind_any_fraction() -> None:
    """Seven digits of a second are cut to six, and what follows is read."""
    rows = "".join(f"2023-11-16 18:15:{second:02}.1234567+01:00\n" for second in range(0, 60, 5))
    same = "".join(f"2023-11-16 17:15:{second:02}.123456\n" for second in range(0, 60, 5))
    later = "2023-11-16 17:16:30\n"
    [load] = parse_loads("load", f"TIMESTAMP\n{rows}{later}").values()
    [plain] = parse_loads("load", f"TIMESTAMP\n{same}{later}").values()
    assert load == plain


# --- what goes with jobs ------------------------------------------------------------------------


@each_row(
    ("name", "text", "said"),
    [
        ("nodes", "sn,gpu,model\na,-1,T4\n", "line 2: column gpu: -1, expected at least 0"),
        ("nodes", "sn,gpu,model\na,nan,T4\n", "line 2: column gpu: 'nan' is not a whole number"),
        ("nodes", "sn,gpu,model\na,100001,T4\n", "line 2: column gpu: 100001, expected at most 1"),
        ("nodes", "sn,model\na,T4\n", "line 1: column gpu: missing; there are: sn, model"),
        ("nodes", "sn,gpu,model,cpu_milli\na,1,T4,-5\n", "line 2: column cpu_milli: -5, expected"),
        ("curves", "global_batch_size,0\n64,1\n", "line 1: column 0: expected a number of GPUs"),
        ("curves", "global_batch_size,\u0661\n64,1\n", "line 1: column \u0661: expected a number"),
        ("curves", "global_batch_size,1\n64,inf\n", "line 2: column 1: 'inf' is not a number"),
        ("curves", "global_batch_size,1\n64,1\n64,2\n", "line 3: column global_batch_size: 64 is"),
        ("throughputs", "", "line 1: column v100: Input data was truncated"),
        ("throughputs", "{", "line 1: column v100: Input data was truncated"),
        ("throughputs", "[]", "line 1: column v100: Expected `object`, got `array`"),
        ("throughputs", "{}", "line 1: column v100: missing; there are: "),
        (
            "throughputs",
            """{"v100": {"('a', 0)": {"null": 1.0}}}""",
            "line 1: column v100: ('a', 0): no throughput of the job alone",
        ),
        (
            "throughputs",
            """{"v100": {"('a', 1)": {"null": -1.0}}}""",
            "line 1: column v100: ('a', 1): no throughput of the job alone",
        ),
    ],
)
def test_what_goes_with_jobs_is_named_as_exactly(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    """Nodes, history, curves and throughputs."""
    assert error_of(place(tmp_path, text), READERS[name]).startswith(said)


def test_steps_that_take_longer_than_a_job_may_are_an_error(tmp_path: Path) -> None:
    """A throughput of almost nothing makes seconds without end of a few steps."""
    path = place(tmp_path, (DATA / "gavel.trace").read_text())
    slow = {("ResNet-18 (batch size 128)", 4): 1e-300, ("ResNet-18", 4): 1e-300}

    def read(path: Path) -> object:
        return read_jobs(path, throughputs=slow)

    assert error_of(path, read).startswith("line 1: column ")
