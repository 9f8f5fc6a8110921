"""Job files in each format: the same job from all of them, and nothing that is only guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from common.api import Submit, Submitted
from common.errors import ConfigError
from common.jobspec import misfit, parse
from common.model import CheckpointSpec, JobSpec, Preemptibility, RetrySpec, WorkerRange
from coordinator.cli import job_file, yaml_text
from coordinator.cli.job_file import STDIN, FileKind
from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.draws import whole
from tests.tables import each_row

GOOD = """\
name: llm
command: [python, train.py]
workers:
  min: 2
  max: 4
env:
  NCCL_DEBUG: INFO
  FLAG: "no"
"""

TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\x7f\ufeff"), max_size=12
)
WORDS = st.one_of(
    TEXT,
    st.sampled_from(
        ["no", "On", "null", "~", "012", "1:30", "2026-11-21", "1e3", "=", "- a", "# b"]
    ),
    st.from_regex(r"[-+0-9._:eExXob]{1,8}", fullmatch=True),
)
SECONDS = st.floats(min_value=0.001, max_value=1e9)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    """A job that passes every rule."""
    low = draw(whole(1, 8))
    spec = JobSpec(
        name=draw(st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True)),
        command=("train", *draw(st.lists(WORDS, max_size=3))),
        workers=WorkerRange(min=low, max=low + draw(whole(0, 8))),
        workdir="/" + draw(TEXT),
        env=draw(st.dictionaries(WORDS.filter(lambda key: key and "=" not in key), WORDS)),
        priority=draw(whole(-1_000_000, 1_000_000)),
        preemptibility=draw(st.sampled_from(Preemptibility)),
        expected_runtime_s=draw(st.none() | SECONDS),
        checkpoint=CheckpointSpec(path=draw(st.none() | WORDS.filter(bool)), grace_s=draw(SECONDS)),
        retry=RetrySpec(on_exit_codes=tuple(draw(st.lists(st.integers(-64, 255), max_size=3)))),
    )
    assert misfit(spec) is None
    return spec


def as_toml(value: object) -> str:
    """A value as TOML writes it inline; JSON's text is TOML's basic string."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, object]", value).items()
        return "{" + ", ".join(f"{as_toml(key)} = {as_toml(item)}" for key, item in pairs) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(as_toml, cast("Sequence[object]", value))) + "]"
    return json.dumps(value, ensure_ascii=False)


class Quoting(yaml.SafeDumper):
    """PyYAML's own writer, with all text in quotes."""


Quoting.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def said(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without None: TOML has no word for it."""
    return {
        key: said(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }


@given(specs(), st.booleans())
def test_a_job_is_the_same_in_toml_and_in_yaml(spec: JobSpec, is_flow: bool) -> None:
    """Written out in both, every field of it arrives the same, in block style and in flow style."""
    values = said(msgspec.to_builtins(spec))
    toml = "".join(f"{key} = {as_toml(value)}\n" for key, value in values.items())
    text = yaml.dump(values, Dumper=Quoting, default_flow_style=is_flow)
    found = msgspec.toml.decode(toml)
    read = yaml_text.read(text, source="job.yaml")
    assert parse(found, source="job.toml") == spec
    assert parse(read.values, source="job.yaml") == spec


@given(WORDS)
def test_a_word_without_quotes_is_that_text_or_no_job(word: str) -> None:
    """No spelling of YAML becomes another text than what stands there: at worst it is refused."""
    text = f"name: j\ncommand: [x]\nworkers: {{min: 1, max: 1}}\nenv:\n  A: {word}\n"
    try:
        read = yaml_text.read(text, source="job.yaml")
        spec = parse(read.values, source="job.yaml")
    except ConfigError:
        return
    # What YAML itself defines: quotes and comments are no part of the text.
    [*_, last] = [
        event
        for event in yaml.parse(text, Loader=yaml.SafeLoader)
        if isinstance(event, yaml.ScalarEvent)
    ]
    assert spec.env == {"A": last.value}


def submit(tmp_path: Path, text: str, *flags: str, name: str = "job.yaml") -> tuple[Run, FakeCell]:
    """`aryl job submit` of a file with this text."""
    path = tmp_path / name
    path.write_text(text)
    cell = FakeCell({Submit: Submitted(job_id="jabc")})
    return aryl(cell, "job", "submit", str(path), *flags), cell


@pytest.mark.parametrize("name", ["job.yaml", "job.yml"])
def test_a_yaml_file_is_submitted(tmp_path: Path, name: str) -> None:
    """Known by its name; quotes make text of a word that is not."""
    run, cell = submit(tmp_path, GOOD, name=name)
    assert run.code == 0, run.err
    [request] = cell.asked
    spec = cast("Submit", request).spec
    assert (spec.name, spec.workers) == ("llm", WorkerRange(min=2, max=4))
    assert spec.env == {"NCCL_DEBUG": "INFO", "FLAG": "no"}


REFUSED: dict[str, tuple[str, list[str]]] = {
    "a key twice": (GOOD + "name: other\n", ["line 9", "name a second time", "line 1"]),
    "a key twice below": (GOOD + "  FLAG: a\n", ["line 9", "FLAG a second time", "line 8"]),
    "norway": (GOOD.replace('"no"', "no"), ["line 8", 'write "no" for text']),
    "old boolean": (GOOD.replace('"no"', "y"), ["line 8", 'write "y" for text']),
    "shouting": (GOOD.replace('"no"', "TRUE"), ["line 8", 'write "TRUE"']),
    "octal": (GOOD.replace("min: 2", "min: 012"), ["line 4", "012 without quotes"]),
    "new octal": (GOOD.replace("min: 2", "min: 0o2"), ["line 4", "0o2 without quotes"]),
    "hex": (GOOD.replace("min: 2", "min: 0x2"), ["line 4", "0x2 without quotes"]),
    "underscores": (GOOD.replace("max: 4", "max: 1_0"), ["line 5", "1_0 without quotes"]),
    "sexagesimal": (GOOD + "deadline_s: 1:30\n", ["line 9", "1:30 without quotes"]),
    "timestamp": (GOOD.replace('"no"', "2026-11-21"), ["line 8", "2026-11-21 without"]),
    "a key that is no text": (GOOD + "  on: x\n", ["line 9", "on without quotes"]),
    "a number as a key": (GOOD + "  1: x\n", ["line 9", "the key 1, expected text"]),
    "a table as a key": (GOOD + "{a: b}: c\n", ["line 9", "a table or a list as a key"]),
    "anchor": (GOOD.replace("[python", "&a [python"), ["line 2", "an anchor or an alias, a"]),
    "alias": (GOOD + "workdir: *a\n", ["line 9", "an anchor or an alias, a"]),
    "merge": (GOOD + "<<: {min: 1}\n", ["line 9", "<< without quotes"]),
    "tag": (GOOD.replace("llm", "!!python/name:os.system"), ["line 1", "the tag"]),
    "two documents": (GOOD + "---\n" + GOOD, ["line 9", "one file is one job"]),
    "no table": ("- a\n", ["expected a table"]),
    "nothing": ("# later\n", ["expected a table"]),
    "a nest": ("name: " + "[" * 5_000, ["line 1", "more than 16 nested tables"]),
    "half": (GOOD + "gpu: {types: [H100\n", ["is not YAML: line 10"]),
    "control character": (GOOD + "app: \x07\n", ["is not YAML"]),
    "endless number": (GOOD + f"priority: {'9' * 5_000}\n", ["is not YAML"]),
    "wrong type": (GOOD.replace('"no"', "1"), ["line 8", "field env.FLAG", "`str`"]),
    "wrong type in a list": (GOOD.replace("train.py", "8"), ["line 2", "field command[1]"]),
    "null": (GOOD.replace("max: 4", "max:"), ["line 5", "field workers.max", "null"]),
    "out of range": (GOOD.replace("min: 2", "min: 0"), ["line 4", "field workers.min", ">= 1"]),
    "min over max": (GOOD.replace("max: 4", "max: 1"), ["line 3", "field workers", "min is 2"]),
    "unknown field": (GOOD + "worker: 1\n", ["line 9", "unknown field worker", "workers?"]),
    "unknown below": (GOOD.replace("max", "most"), ["line 5", "unknown field workers.most"]),
    "missing below": (GOOD.replace("  max: 4\n", ""), ["line 3", "workers.max is missing"]),
    "missing": (GOOD.replace("name: llm\n", ""), ["field name is missing"]),
    "unknown choice": (GOOD + "launcher: mpi\n", ["line 9", "expected one of none, torchrun"]),
}


@each_row("why", REFUSED)
def test_what_yaml_would_guess_is_refused_by_its_line(tmp_path: Path, why: str) -> None:
    """The error names the file, the line and the field where known; nothing is sent."""
    text, words = REFUSED[why]
    run, cell = submit(tmp_path, text)
    assert (run.code, run.out, cell.targets) == (2, "", [])
    assert all(word in run.err for word in ["job.yaml", *words]), run.err
    assert run.err.count("\n") == 1


def test_a_bomb_of_aliases_costs_nothing(tmp_path: Path) -> None:
    """Nine lines that would be a billion words end at the first of them."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    run, _ = submit(tmp_path, "\n".join(lines))
    assert run.code == 2
    assert "line 1: an anchor or an alias, a0" in run.err


def test_a_flag_is_not_blamed_on_a_line_of_the_file(tmp_path: Path) -> None:
    """What a flag gave has no line; what the file gave still has its own."""
    run, _ = submit(tmp_path, GOOD, "--workers", "4:2")
    assert "job.yaml and the command line: field workers: min is 4" in run.err
    run, _ = submit(tmp_path, GOOD.replace("[python, train.py]", "[]"), "--name", "other")
    assert "job.yaml, line 2: field command" in run.err


@each_row(
    ("kind", "text"),
    [
        ("yaml", GOOD),
        ("toml", 'name = "llm"\ncommand = ["x"]\nworkers = {min = 2, max = 4}\n'),
        ("json", '{"name": "llm", "command": ["x"], "workers": {"min": 2, "max": 4}}'),
        ("", 'name = "llm"\ncommand = ["x"]\nworkers = {min = 2, max = 4}\n'),
    ],
)
def test_standard_input_is_read_as_it_is_said(kind: str, text: str) -> None:
    """`-` with --format; TOML where nothing says otherwise."""
    cell = FakeCell({Submit: Submitted(job_id="jabc")})
    flags = ["--format", kind] if kind else []
    run = aryl(cell, "job", "submit", "-", *flags, types=text)
    assert run.code == 0, run.err
    [request] = cell.asked
    assert cast("Submit", request).spec.workers == WorkerRange(min=2, max=4)


def test_an_error_on_standard_input_names_it() -> None:
    """There is no file's name to show."""
    run = aryl(FakeCell({}), "job", "submit", "-", "--format", "yaml", types="name: no\n")
    assert run.code == 2
    assert "standard input, line 1: no without quotes" in run.err


def test_the_format_that_is_said_wins_over_the_name(tmp_path: Path) -> None:
    """A file of another name is read all the same."""
    run, _ = submit(tmp_path, GOOD, "--format", "yaml", name="job.toml")
    assert run.code == 0, run.err


@each_row(
    ("kind", "text", "words"),
    [
        (FileKind.JSON, '{"name": "a", "name": "b"}', "name is given twice"),
        (FileKind.JSON, '{"a": {"b": 1, "b": 2}}', "b is given twice"),
        (FileKind.JSON, "[" * 100_000, "nested"),
        (FileKind.JSON, '{"priority": ' + "9" * 5_000 + "}", "is not JSON"),
        (FileKind.TOML, "name = " + "[" * 100_000, "nested"),
        (FileKind.TOML, "priority = " + "9" * 5_000, "is not TOML"),
        (FileKind.TOML, 'name = "a"\nname = "b"', "is not TOML"),
    ],
)
def test_no_text_is_too_odd_for_an_error_in_words(
    tmp_path: Path, kind: FileKind, text: str, words: str
) -> None:
    """Two of a key, endless numbers and endless nests are errors that name the file."""
    path = tmp_path / "job"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words), path.open("rb") as nothing:
        job_file.read(path, kind=kind, stdin=nothing)


def test_what_is_no_text_is_said_so(tmp_path: Path) -> None:
    """Bytes of another kind of file are refused before any format."""
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with path.open("rb") as stdin, pytest.raises(ConfigError, match="standard input is not text"):
        job_file.read(STDIN, kind=None, stdin=stdin)
