"""Submitting: what a file and flags mean together, and what is refused before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from common.api import Describe, Description, Submit, Submitted
from common.messages import Message
from common.model import (
    ArraySpec,
    CheckpointSpec,
    GpuRequest,
    JobSpec,
    JobState,
    Launcher,
    WorkerRange,
)
from coordinator.cli.submit import SubmitFlags, job_spec
from tests.cli.fake_cell import Answer, FakeCell, aryl, job_row, no_answer, nobody
from tests.tables import each_row

FILE = """
name = "llm"
command = ["python", "train.py"]
workdir = "/data"
gpus_per_worker = 8
priority = 3

[workers]
min = 2
max = 4

[env]
A = "1"
B = "2"

[checkpoint]
path = "/data/ckpt"
signal = "SIGUSR1"
"""


def accepting() -> FakeCell:
    """A cell that takes every job."""
    return FakeCell({Submit: Submitted(job_id="jabc")})


def file(tmp_path: Path, text: str = FILE, name: str = "job.toml") -> str:
    """A job file with this text."""
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def sent(cell: FakeCell) -> JobSpec:
    """The job that reached the cell."""
    [request] = cell.asked
    return cast("Submit", request).spec


def test_a_file_is_submitted_as_it_is(tmp_path: Path) -> None:
    """Every field of a TOML file arrives."""
    cell = accepting()
    run = aryl(cell, "job", "submit", file(tmp_path))
    assert (run.code, run.out) == (0, "job jabc (llm) is queued\n")
    assert sent(cell) == JobSpec(
        name="llm",
        command=("python", "train.py"),
        workdir="/data",
        gpus_per_worker=8,
        priority=3,
        workers=WorkerRange(min=2, max=4),
        env={"A": "1", "B": "2"},
        checkpoint=CheckpointSpec(path="/data/ckpt", signal="SIGUSR1"),
    )


def test_json_says_the_same_as_toml(tmp_path: Path) -> None:
    """A JSON file with the same fields is the same job."""
    values = {
        "name": "llm",
        "command": ["python", "train.py"],
        "workdir": "/data",
        "gpus_per_worker": 8,
        "priority": 3,
        "workers": {"min": 2, "max": 4},
        "env": {"A": "1", "B": "2"},
        "checkpoint": {"path": "/data/ckpt", "signal": "SIGUSR1"},
    }
    one, other = accepting(), accepting()
    aryl(one, "job", "submit", file(tmp_path))
    aryl(other, "job", "submit", file(tmp_path, json.dumps(values), "job.json"))
    assert sent(one) == sent(other)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    """A flag replaces its own field; env and checkpoint are merged field by field."""
    cell = accepting()
    line = (
        "--name other --workers 1:2 --gpus-per-worker 4 --env B=3 --env C=4=5 --gpu-type H100 "
        "--gpu-type A100 --priority 9 --preemptibility semi --grace 2m --expected-runtime 1.5h "
        "--deadline 1d --time-limit 90 --launcher torchrun -- python other.py --workers 7 -- x"
    )
    run = aryl(cell, "job", "submit", file(tmp_path), *line.split())
    assert run.code == 0, run.err
    spec = sent(cell)
    assert spec == JobSpec(
        name="other",
        command=("python", "other.py", "--workers", "7", "--", "x"),
        workdir="/data",
        gpus_per_worker=4,
        workers=WorkerRange(min=1, max=2),
        env={"A": "1", "B": "3", "C": "4=5"},
        gpu=GpuRequest(types=("H100", "A100")),
        priority=9,
        preemptibility=spec.preemptibility,
        checkpoint=CheckpointSpec(path="/data/ckpt", signal="SIGUSR1", grace_s=120.0),
        expected_runtime_s=5_400.0,
        deadline_s=86_400.0,
        time_limit_s=90.0,
        launcher=Launcher.TORCHRUN,
    )
    assert spec.preemptibility == "semi"


def test_a_command_alone_is_a_job_here() -> None:
    """Without a file: one worker of one GPU, in the current directory, named by its program."""
    cell = accepting()
    aryl(cell, "job", "submit", "--", "./my.train.sh", "--fast")
    spec = sent(cell)
    assert spec.command == ("./my.train.sh", "--fast")
    assert (spec.name, spec.workdir) == ("my-train", str(Path.cwd()))
    assert spec.workers == WorkerRange(min=1, max=1)


def test_a_relative_workdir_is_made_absolute() -> None:
    """A node knows nothing of the directory that the person is in."""
    spec = job_spec(None, SubmitFlags(workdir="run1"), ["x"], here=Path("/home/ada"))
    assert spec.workdir == "/home/ada/run1"


BAD: list[tuple[str, str, list[str]]] = [
    ("unknown key", "worker = 1\n" + FILE, ["unknown field worker", "did you mean workers"]),
    ("negative count", FILE.replace("= 8", "= -8"), ["field gpus_per_worker", ">= 1"]),
    ("min over max", FILE.replace("max = 4", "max = 1"), ["field workers", "min is 2", "1"]),
    ("missing command", FILE.replace("command", "# command"), ["field command is missing"]),
    ("missing below", FILE.replace("min = 2", ""), ["field workers.min is missing"]),
    ("empty command", FILE.replace('["python", "train.py"]', "[]"), ["field command"]),
    ("wrong type", FILE.replace('"1"', "1"), ["field env", "`str`"]),
    ("unknown signal", FILE.replace("SIGUSR1", "SIGX"), ["field checkpoint.signal", "SIGTERM"]),
    (
        "unknown key below",
        FILE + "frace_s = 3\n",
        ["field checkpoint.frace_s; did you mean grace_s"],
    ),
    ("not TOML", "name = x\n", ["is not TOML", "line 1"]),
]


@each_row(("text", "said"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_file_is_refused_by_field(tmp_path: Path, text: str, said: list[str]) -> None:
    """The error names the file and the field and what was expected; nothing is sent."""
    cell = accepting()
    run = aryl(cell, "job", "submit", file(tmp_path, text))
    assert (run.code, run.out, cell.targets) == (2, "", [])
    assert all(part in run.err for part in ["job.toml", *said]), run.err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.yaml", "name: {", "is not YAML: line 1"),
        ("job.json", "{", "is not JSON"),
        ("job.json", "[]", "expected an object"),
    ],
)
def test_other_formats_are_refused_in_words(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    """A file that is not what its name says is told what it should have been."""
    cell = accepting()
    run = aryl(cell, "job", "submit", file(tmp_path, text, name))
    assert (run.code, cell.targets) == (2, [])
    assert said in run.err


@each_row(
    ("line", "said"),
    [
        ("nofile.toml", "nofile.toml: there is no such file"),
        (".", ".: expected a job file, this is a directory"),
        ("", "field command is missing"),
        ("--workers 2", "field command is missing"),
        ("--workers two -- x", "--workers: 'two', expected MIN or MIN:MAX"),
        ("--workers 4:2 -- x", "field workers: min is 4"),
        ("--workers 0 -- x", "field workers.min"),
        ("--env A -- x", "--env: 'A', expected NAME=VALUE"),
        ("--grace soon -- x", "--grace: 'soon', expected seconds"),
        ("--deadline -5 -- x", "--deadline: '-5', expected seconds"),
        ("--preemptibility never -- x", "expected one of non, semi, full"),
        ("--launcher mpi -- x", "expected one of none, torchrun"),
        ("--name a.b -- x", "field name: expected a name of 1 to 64 of A-Z a-z 0-9 _ -"),
    ],
)
def test_bad_flags_are_refused_by_name(line: str, said: str) -> None:
    """The error names the flag or field; nothing is sent."""
    cell = accepting()
    run = aryl(cell, "job", "submit", *line.split())
    assert (run.code, cell.targets) == (2, [])
    assert said in run.err


def test_ids_and_json_are_for_scripts(tmp_path: Path) -> None:
    """`--quiet` prints the id, JSON carries it with the schema version."""
    path = file(tmp_path)
    assert aryl(accepting(), "job", "submit", path, "--quiet").out == "jabc\n"
    found = aryl(accepting(), "job", "submit", path, "-o", "json").json
    assert found == {"schema_version": 1, "job_id": "jabc", "warnings": []}


def test_a_job_that_no_node_can_run_is_told_so_at_once() -> None:
    """It is queued all the same; why it waits goes to people on stderr and to scripts in JSON. A
    quota may be the reason, so the answer promises nothing from more nodes.
    """
    why = "can never run here: the 1 node of type H100 has 8 GPUs together, room for 8 workers"
    cell = FakeCell({Submit: Submitted(job_id="jabc", warnings=(why,))})
    run = aryl(cell, "job", "submit", "--workers", "9", "--", "x")
    assert (run.code, run.out) == (0, "job jabc (x) is queued\n")
    assert f"warning: {why}\n" in run.err
    assert run.err.endswith("it waits until the fleet or the settings of the cell change\n")
    quiet = aryl(cell, "job", "submit", "--workers", "9", "--quiet", "--", "x")
    assert quiet.out == "jabc\n"
    assert why in quiet.err
    script = aryl(cell, "job", "submit", "--workers", "9", "-o", "json", "--", "x")
    assert script.json["warnings"] == [why]
    assert why in script.err


def test_a_lost_answer_is_asked_for_again_as_the_same_request() -> None:
    """Two timeouts and an answer are one job: all requests carry the same id."""
    cell = FakeCell({Submit: [no_answer(), no_answer(), Submitted(job_id="jabc")]})
    run = aryl(cell, "job", "submit", "--", "x")
    assert run.code == 0
    assert len({cast("Submit", request).request_id for request in cell.asked}) == 1
    assert len(cell.asked) == 3


def test_two_submissions_are_two_jobs() -> None:
    """The same command line again is another request."""
    cell = accepting()
    for _ in range(2):
        aryl(cell, "job", "submit", "--", "x")
    assert len({cast("Submit", request).request_id for request in cell.asked}) == 2


@pytest.mark.parametrize(("error", "code", "count"), [(no_answer(), 7, 3), (nobody(), 6, 1)])
def test_an_absent_coordinator_is_not_asked_for_ever(
    error: Exception, code: int, count: int
) -> None:
    """Timeouts are tried three times, a cell without a coordinator once."""
    cell = FakeCell({Submit: error})
    run = aryl(cell, "job", "submit", "--", "x")
    assert (run.code, len(cell.asked)) == (code, count)


def waiting(*states: JobState, **last: Any) -> dict[type[Message], Answer | list[Answer]]:
    """A job that is taken and then goes through these states."""
    rows = [job_row(state=state) for state in states]
    rows[-1] = structs.replace(rows[-1], **last)
    answers: list[Answer] = [Description(kind="job", name="jabc", job=row) for row in rows]
    return {Submit: Submitted(job_id="jabc"), Describe: answers}


@each_row(
    ("state", "job_code", "code"),
    [
        (JobState.SUCCEEDED, 0, 0),
        (JobState.SUCCEEDED, None, 0),
        (JobState.FAILED, 42, 42),
        (JobState.FAILED, -9, 137),
        (JobState.FAILED, None, 1),
        (JobState.CANCELLED, None, 1),
        (JobState.CANCELLED, 0, 1),
    ],
)
def test_wait_returns_the_code_of_the_job(state: JobState, job_code: int | None, code: int) -> None:
    """Its own exit code, 128 + N after signal N, and never 0 for a job that did not succeed."""
    cell = FakeCell(waiting(JobState.PENDING, JobState.RUNNING, state, exit_code=job_code))
    run = aryl(cell, "job", "submit", "--wait", "--quiet", "--", "x")
    assert (run.code, run.out) == (code, "jabc\n")
    why = f": exit code {job_code}" if state == JobState.FAILED and job_code is not None else ""
    assert [line for line in run.err.splitlines() if line.startswith("job ")] == [
        "job jabc is pending",
        "job jabc is running",
        f"job jabc is {state}{why}",
    ]


def test_wait_says_why_the_job_failed() -> None:
    """A limit that it ran into or a program that is not there is the whole answer."""
    cell = FakeCell(waiting(JobState.FAILED, error="ran into its time_limit_s of 2 s"))
    run = aryl(cell, "job", "submit", "--wait", "--", "x")
    assert "job jabc is failed: ran into its time_limit_s of 2 s" in run.err.splitlines()


def test_wait_outlives_the_coordinator() -> None:
    """A coordinator that is away for a while is waited for, and said once."""
    answers = waiting(JobState.RUNNING, JobState.SUCCEEDED, exit_code=0)
    first, last = cast("list[Answer]", answers[Describe])
    answers[Describe] = [first, nobody(), no_answer(), nobody(), last]
    run = aryl(FakeCell(answers), "job", "submit", "--wait", "--", "x")
    assert run.code == 0
    assert run.err.count("waiting for the coordinator") == 1


def test_a_flag_makes_an_array() -> None:
    """The part behind the percent sign is its throttle; a flag that names neither is refused."""
    cell = FakeCell({Submit: Submitted(job_id="jarr")})
    run = aryl(cell, "job", "submit", "--array", "0-9:2%4", "--", "true")
    assert (run.code, run.out) == (0, "array jarr (true) is queued\n")
    [request] = cell.asked
    assert isinstance(request, Submit)
    assert request.spec.array == ArraySpec(indices="0-9:2", throttle=4)
    for text, said in (("0-9%x", "--array: '0-9%x', expected a count"),
                       ("9-0", "field array.indices: '9-0', expected FIRST-LAST")):  # fmt: skip
        run = aryl(cell, "job", "submit", "--array", text, "--", "true")
        assert (run.code, said in run.err, len(cell.asked)) == (2, True, 1)
