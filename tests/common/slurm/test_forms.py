"""Slurm's forms of options, times, node lists and file names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.slurm import nodelists, patterns, times
from common.slurm.options import FLAG, MAYBE, Option, OptionError, read
from tests.tables import each_row

NOON_S = times.at_s("2026-11-29T12:00", now_s=0.0)
TABLE = (Option("ntasks", "n"), Option("nodes", "N"), Option("label", "l", FLAG),
         Option("exclusive", "", MAYBE), Option("ntasks-per-node"))  # fmt: skip


def named(words: list[str], *, mixed: bool = False) -> tuple[list[tuple[str, str]], list[str]]:
    """What is read, options by name."""
    found, others = read(words, TABLE, mixed=mixed)
    return [(option.name, value) for option, value in found], others


@each_row(
    "line, options, others",
    [
        ("--ntasks=4 prog -n 2", [("ntasks", "4")], ["prog", "-n", "2"]),
        ("--ntasks 4", [("ntasks", "4")], []),
        ("-n4 -lN 2", [("ntasks", "4"), ("label", ""), ("nodes", "2")], []),
        ("--no 2", [("nodes", "2")], []),
        ("--exclusive prog", [("exclusive", "")], ["prog"]),
        ("--exclusive=user", [("exclusive", "user")], []),
        ("-l -- -n 3", [("label", "")], ["-n", "3"]),
        ("-n -1 -", [("ntasks", "-1")], ["-"]),
    ],
)
def test_options_are_read_as_getopt_long_reads_them(
    line: str, options: list[tuple[str, str]], others: list[str]
) -> None:
    """Values behind `=` or a blank, short options together, prefixes, and `--` as the end."""
    assert named(line.split()) == (options, others)


def test_options_may_stand_behind_other_words_where_a_command_allows_it() -> None:
    """`scancel 17 --quiet` is `scancel --quiet 17`."""
    assert named(["17", "-l", "18"], mixed=True) == ([("label", "")], ["17", "18"])


@pytest.mark.parametrize(
    "line", ["--nosuch", "-z", "-n", "--ntasks", "--label=1", "--n 2"], ids=lambda line: line
)
def test_an_option_that_is_none_is_refused_by_its_name(line: str) -> None:
    """A mistyped option must not be taken for a program, or passed over."""
    with pytest.raises(OptionError, match=r"option"):
        named(line.split())


@each_row(
    "text, limit_s",
    [
        ("90", 5400.0),
        ("1:30", 90.0),
        ("2:00:05", 7205.0),
        ("1-2", 93_600.0),
        ("1-2:3", 93_780.0),
        ("1-2:3:4", 93_784.0),
        ("0", None),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_a_time_limit_has_six_forms(text: str, limit_s: float | None) -> None:
    """sbatch(1), --time."""
    assert times.limit_s(text) == limit_s


@given(st.integers(1, 10**8))
def test_a_length_that_is_shown_reads_back_as_the_same(seconds: int) -> None:
    """`full` and `limit_s` are inverse: a script may hand on what it read."""
    assert times.limit_s(times.full(seconds)) == seconds


@given(st.integers(86_400, 10**8) | st.integers(60, 3599))
def test_the_short_form_reads_back_as_well(seconds: int) -> None:
    """Below an hour it is MM:SS, which is a form of a limit, too."""
    assert times.limit_s(times.short(seconds)) == seconds


@given(st.text(max_size=12))
def test_any_text_is_a_time_limit_or_is_refused(text: str) -> None:
    """No text ends the command with a traceback."""
    try:
        found = times.limit_s(text)
    except ValueError:
        return
    assert found is None or found > 0


@each_row(
    "text, from_noon_s",
    [
        ("2026-11-28", -129_600.0),
        ("2026-11-28T13:00", -82_800.0),
        ("now", 0.0),
        ("now-2days", -172_800.0),
        ("now+90", 90.0),
        ("now-1hour", -3_600.0),
        ("today", -43_200.0),
        ("noon", 0.0),
        ("11:30", -1_800.0),
        ("1:00pm", 3_600.0),
        ("11/28", -129_600.0),
        ("11/28/26", -129_600.0),
        ("1128", -129_600.0),
        ("112826", -129_600.0),
    ],
)
def test_instants_have_the_forms_of_sacct(text: str, from_noon_s: float) -> None:
    """Dates, clocks and distances from now, in local time."""
    assert times.at_s(text, now_s=NOON_S) - NOON_S == from_noon_s


@given(st.text(max_size=12) | st.from_regex(r"[0-9T:/-]{1,16}", fullmatch=True))
def test_any_text_is_an_instant_or_is_refused(text: str) -> None:
    """No text ends the command with a traceback."""
    try:
        times.at_s(text, now_s=NOON_S)
    except (ValueError, OverflowError) as error:
        assert isinstance(error, ValueError)


@given(st.lists(st.from_regex(r"[a-z_-]{0,3}[0-9]{0,3}", fullmatch=True).filter(bool)))
def test_a_node_list_expands_to_the_nodes_it_was_made_of(names: list[str]) -> None:
    """No node is lost or added, and the first one stays the first."""
    found = nodelists.expand(nodelists.compress(names))
    assert sorted(found) == sorted(set(names))
    assert found[:1] == names[:1]


@each_row(
    "names, text",
    [
        (["n1", "n2", "n3", "n5"], "n[1-3,5]"),
        (["gpu-08", "gpu-09", "gpu-10"], "gpu-[08-10]"),
        (["a", "b1"], "a,b1"),
        (["n2", "n1"], "n[2,1]"),
        ([], ""),
    ],
)
def test_node_lists_are_as_short_as_slurm_s(names: list[str], text: str) -> None:
    """Neighbors share a bracket, and zeros in front are kept."""
    assert nodelists.compress(names) == text


@pytest.mark.parametrize("text", ["a[1-", "a]", "a[x]", "a[1-9999999]", "a[[1]]"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    """A range without an end, and one that would fill the memory."""
    with pytest.raises(ValueError, match=r"brackets|no number|more than"):
        nodelists.expand(text)


def test_file_names_have_slurm_s_letters() -> None:
    """Numbers may be filled up with zeros; other letters are named at submission."""
    values = {"j": "17", "x": "a.b", "t": "0"}
    assert patterns.filled("/o/%x-%5j_%t.%%", values) == "/o/a.b-00017_0.%"
    assert patterns.misfit("/o/%x-%j.out") == ""
    assert patterns.misfit("/o/%Q.out") == "%Q"
