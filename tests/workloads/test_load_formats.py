"""Inference-load files become even series; holes, disorder and nothing at all are errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from coordinator.workloads.load_formats import parse_loads, read_load, read_loads
from coordinator.workloads.records import LoadSeries, LoadUnit
from tests.tables import each_row

DATA = Path(__file__).parents[1] / "data" / "traces"


def test_an_aggregate_holds_a_series_per_model() -> None:
    """The family before the colon is cut; one of several has to be named."""
    loads = read_loads(DATA / "servegen_aggregate.csv")
    assert sorted(loads) == ["m-large", "m-mid"]
    large = read_load(DATA / "servegen_aggregate.csv", name="m-large")
    assert (large.step_s, large.length_s) == (600, 1800)
    assert large.values == (212.78, 179.698333, 187.721667)
    with pytest.raises(ConfigError, match="several series, name one: m-large, m-mid"):
        read_load(DATA / "servegen_aggregate.csv")
    with pytest.raises(ConfigError, match="no load series m-small: m-large, m-mid"):
        read_load(DATA / "servegen_aggregate.csv", name="m-small")


def test_steps_in_which_a_client_asked_nothing_are_zero() -> None:
    """ServeGen leaves idle steps out; a series has every step of the file's span."""
    load = read_load(DATA / "servegen_clients.csv")
    assert load.name == "client-0"
    assert load.length_s == 338_400
    told = {index: value for index, value in enumerate(load.values) if value}
    assert told == {239: 0.0766667, 241: 0.168333, 563: 11.3267}


def test_requests_are_counted_into_steps_from_the_first_one() -> None:
    """Azure: 11 requests in 8.7 s; the step that the log ends in is left out."""
    load = read_load(DATA / "azure_llm.csv", bin_s=2.0)
    # One at 46.68; four from 50.99 to 52.57; two from 52.99 to 54.43; four more in the cut step.
    assert load.values == (0.5, 0.0, 2.0, 1.0)


def test_mooncake_counts_in_milliseconds() -> None:
    """Four requests at 0 s, one at 3 s, one at 15 s that ends the log."""
    load = read_load(DATA / "mooncake.jsonl", bin_s=1.0)
    assert len(load.values) == 15
    assert load.values[:5] == (4, 0, 0, 1, 0)


def test_our_own_series_comes_back() -> None:
    """Rates and busy ratios, with the instant they begin at."""
    for unit in LoadUnit:
        series = LoadSeries(
            name="own", step_s=300, values=(0.25, 1 / 3, 0.5), unit=unit, start_s=900
        )
        rows = [f"{at_s!r},{value!r}\n" for at_s, value in series.samples()]
        text = f"t_s,{unit.value}\n" + "".join(rows)
        assert parse_loads("own.csv", text) == {"own": series}


def test_samples_can_be_scaled_to_a_peak() -> None:
    """The highest value becomes the peak, others in proportion."""
    series = LoadSeries(name="x", step_s=60, values=(1, 4, 2), start_s=30)
    assert series.samples() == [(30, 1), (90, 4), (150, 2)]
    assert series.samples(peak=8) == [(30, 2), (90, 8), (150, 4)]


RATES = "t_s,req_per_s\n"
CLIENTS = "client,t_s,req_per_s,cv\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@each_row(
    ("text", "said"),
    [
        ("", "line 1: column 1: empty file"),
        (RATES, "line 2: column t_s: no rows, expected at least one"),
        (RATES + "0,1\n", "line 2: column t_s: load: one row is no series"),
        (RATES + "0,1\n600,1\n1300,1\n", "line 4: column t_s: 1300, expected 1200: steps must"),
        (RATES + "0,1\n0,1\n", "line 3: column t_s: 0 is not after the row above"),
        (RATES + "0,0\n600,0\n", "column req_per_s: load: all zero"),
        (RATES + "0,1\n600,-3\n", "line 3: column req_per_s: -3, expected at least 0"),
        (RATES + "0,1\n600,nan\n", "line 3: column req_per_s: 'nan' is not a number"),
        ("t_s,busy_ratio\n0,0.5\n1,1.5\n", "line 3: column busy_ratio: 1.5, expected at most 1"),
        ("t_s,rate\n0,0\n", "line 1: column req_per_s or busy_ratio: missing"),
        ("time,req_per_s\n0,0\n", "line 1: column t_s: missing"),
        (CLIENTS + "0,100,1,1\n", "line 2: column t_s: 100, expected a multiple of 600"),
        (CLIENTS + "0,600,1,1\n0,600,1,1\n", "line 3: column t_s: 600 is not after"),
        (AZURE + "soon,1,1\n", "line 2: column TIMESTAMP: 'soon' is not a date and time"),
        (
            AZURE + "2023-11-16 18:15:46.6805900,1,1\n2023-11-16 18:15:46.6705900,1,1\n",
            "line 3: column TIMESTAMP: 2023-11-16 18:15:46.6705900 is before the row above",
        ),
        (AZURE + "2023-11-16 18:15:46,1,1\n", "less than two steps of 10 s"),
        (
            '{"timestamp": 5}\n{"timestamp": 4}\n',
            "line 2: column timestamp: 4 ms is before the row above: not",
        ),
        ('{"timestamp": -5}\n', "line 1: column timestamp: -5 ms is negative"),
        ('{"timestamp": "5"}\n', "line 1: column timestamp: Expected `float`, got `str`"),
        ('{"time": 5}\n', "line 1: column timestamp: Object missing required field `timestamp`"),
    ],
)
def test_a_bad_load_file_is_named_to_the_column(tmp_path: Path, text: str, said: str) -> None:
    """One error, with file, line, column, what stood there and what was expected."""
    path = tmp_path / "load.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_loads(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)
