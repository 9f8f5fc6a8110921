"""The command line as a whole: what is refused of it before any command begins, and in which words.

Arguments are as Python hands them over: bytes that are no UTF-8 are lone surrogates (PEP 383).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.api import REQUESTS
from tests.cli.fake_cell import FakeCell, aryl
from tests.tables import each_row

BYTE = os.fsdecode(b"\xff")


@each_row(
    ("args", "named"),
    [
        (("job", "submit", "--env", f"A={BYTE}", "--", "true"), "argument 4 (after --env)"),
        (("job", "submit", "--", "echo", BYTE), "argument 5"),
        (("job", "submit", f"{BYTE}.toml"), "argument 3"),
        (("job", "cancel", BYTE), "argument 3"),
        (("node", "describe", BYTE), "argument 3"),
        (("node", "cordon", "t0", "--reason", BYTE), "argument 5 (after --reason)"),
        (("freeze", f"--reason={BYTE}"), "argument 2"),
        (("--tenant", BYTE, "job", "list"), "argument 2 (after --tenant)"),
        (("simulate", "--output", BYTE), "argument 3 (after --output)"),
    ],
)
def test_an_argument_that_is_no_text_is_a_usage_error(args: tuple[str, ...], named: str) -> None:
    """It is named by its place and shown, nothing is asked, and nobody sees a traceback."""
    cell = FakeCell({})
    run = aryl(cell, *args)
    assert run.code == 2, run.err
    assert f"{named}: '" in run.err
    assert "\\udcff" in run.err
    assert "is not UTF-8" in run.err
    assert not cell.asked


@each_row(
    ("name", "text", "said"),
    [
        ("a.json", r'{"name": "\ud800"}', "a.json: field name: '\\ud800' is not UTF-8"),
        ("a.json", r'{"command": ["a", "\udfff"]}', "a.json: field command[1]: "),
        ("a.json", r'{"preemptibility": "\ud800"}', "a.json: field preemptibility: "),
        ("a.json", r'{"env": {"\ud800": "1"}}', "a.json: field env: '\\ud800' is not UTF-8"),
        ("a.json", r'{"\ud800": 1}', "a.json: '\\ud800' is not UTF-8"),
        ("a.yaml", 'name: x\ncommand:\n- a\n- "\\ud800"\n', "a.yaml, line 4: field command[1]: "),
        ("a.json", '{"name": ' + 400 * "[" + r'"\ud800"' + 400 * "]" + "}", "field name[0]"),
    ],
)
def test_a_job_file_with_what_is_no_text_is_refused_by_field(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    """JSON and YAML can name half of a character; no message can hold it."""
    (tmp_path / name).write_text(text)
    cell = FakeCell({})
    run = aryl(cell, "job", "submit", str(tmp_path / name))
    assert (run.code, run.out) == (2, "")
    assert said in run.err
    assert "is not UTF-8" in run.err
    assert not cell.asked


def test_a_directory_whose_name_is_no_text_is_no_workdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command alone runs where it was submitted, and the field that would say so is named."""
    here = tmp_path / BYTE
    here.mkdir()
    monkeypatch.chdir(here)
    run = aryl(FakeCell({}), "job", "submit", "--", "true")
    assert run.code == 2
    assert "the command line: field workdir: " in run.err
    assert "is not UTF-8" in run.err


def test_any_text_passes() -> None:
    """What is not ASCII is not refused: the cell is asked."""
    cell = FakeCell({})
    run = aryl(cell, "node", "cordon", "t0", "--reason", "Lüfter 風扇 \U0001f525")
    assert "UTF-8" not in run.err
    [request] = cell.asked
    assert type(request) in REQUESTS
    assert "Lüfter 風扇 \U0001f525" in str(request)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("job list -o xml", "'-o' / '--output': 'xml', expected one of table, wide, json, name"),
        ("explain pod x", "'KIND': 'pod', expected one of job, node, service, loan"),
        ("job submit --format ini f", "'--format': 'ini', expected one of toml, yaml, json"),
    ],
)
def test_a_word_that_is_no_choice_is_answered_with_those_that_are(line: str, said: str) -> None:
    """In the words of all our errors, not in those of the library that found it."""
    run = aryl(FakeCell({}), *line.split())
    assert run.code == 2
    assert said in run.err
    assert "Value error" not in run.err
