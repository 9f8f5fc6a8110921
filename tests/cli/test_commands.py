"""Every command that shows something: its help, its JSON, its names, its table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
from rich.cells import cell_len

from common.api import (
    ApiErrorCode,
    ArrayRow,
    Cancel,
    Describe,
    Description,
    Done,
    Events,
    GetEvents,
    GetStatus,
    JobRow,
    Jobs,
    ListJobs,
    ListLoans,
    ListNodes,
    ListServices,
    ListTenants,
    LoanRow,
    Loans,
    NodeRow,
    Nodes,
    ServiceRow,
    Services,
    Status,
    StoryRow,
    TenantRow,
    Tenants,
    WorkerRow,
)
from common.errors import ProtocolError
from common.messages import Message
from common.model import JobSpec, JobState, WorkerRange
from coordinator.cli.app import whole
from coordinator.policies.registry import POLICIES
from tests.cli.fake_cell import (
    Answer,
    FakeCell,
    aryl,
    job_row,
    loan_row,
    no_answer,
    nobody,
    node_row,
    refusal,
    service_row,
    status,
    story_row,
    tenant_row,
)
from tests.tables import each_row

SPEC = JobSpec(
    name="train",
    command=("python", "train.py", "--name", "a b"),
    workers=WorkerRange(min=2, max=4),
    env={"TOKEN": "secret"},
)


def describe(request: Describe) -> Description:
    """A full description of whatever was asked."""
    rows: dict[str, Any] = {
        "job": job_row(),
        "node": node_row(),
        "service": service_row(),
        "loan": loan_row(),
    }
    is_job = request.kind == "job"
    return Description(
        kind=request.kind,
        name=request.name,
        workers=(WorkerRow(worker_index=0, node="t0", gpus=8, is_flexible=False, phase="running"),)
        if is_job
        else (),
        why=("no node has 8 free GPUs", "3 waiting jobs were submitted before it"),
        estimate="600 s left with 2 workers (source: history)" if is_job else "",
        story=(story_row(),),
        spec=SPEC if is_job else None,
        **{request.kind: rows[request.kind]},
    )


ANSWERS: dict[type[Message], Answer | list[Answer]] = {
    ListJobs: Jobs(rows=(job_row(), job_row("jdef", state=JobState.PENDING, nodes=(), gpus=0))),
    ListNodes: Nodes(rows=(node_row(), node_row("i0", gpu_busy_ratio=None, heard_ago_s=None))),
    ListServices: Services(rows=(service_row(),)),
    ListTenants: Tenants(rows=(tenant_row(),)),
    ListLoans: Loans(rows=(loan_row(),)),
    GetStatus: status(),
    GetEvents: Events(rows=(story_row(1), story_row(2)), last=2),
    Describe: describe,
    Cancel: Done(detail="job jabc is being cancelled"),
}


@pytest.fixture
def cell() -> FakeCell:
    """A cell with two nodes, two jobs and a loan."""
    return FakeCell(ANSWERS)


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and group below one, as words."""
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


ALL = sorted(commands(whole()))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_has_help(cell: FakeCell, path: tuple[str, ...]) -> None:
    """`--help` works everywhere, says something, and asks no cell."""
    run = aryl(cell, *path, "--help")
    assert run.code == 0
    assert run.out.startswith(f"Usage: {' '.join(('aryl', *path))}")
    assert len(run.out.splitlines()[2].split()) > 2
    assert cell.targets == []


def test_the_version_is_told_without_a_cell(cell: FakeCell) -> None:
    """`aryl --version` is one line."""
    run = aryl(cell, "--version")
    assert (run.code, run.out.split()[0], cell.targets) == (0, "aryl", [])


LISTS = [
    ("job list", "jobs", JobRow, ["jabc", "jdef"]),
    ("node list", "nodes", NodeRow, ["t0", "i0"]),
    ("service list", "services", ServiceRow, ["chat"]),
    ("tenant list", "tenants", TenantRow, ["vision"]),
    ("loan list", "loans", LoanRow, ["l7"]),
    ("events", "events", StoryRow, ["1", "2"]),
]


@pytest.mark.parametrize(("line", "key", "kind", "names"), LISTS)
def test_a_list_as_json_has_every_field(
    cell: FakeCell, line: str, key: str, kind: type[msgspec.Struct], names: list[str]
) -> None:
    """One object: the schema version and the rows, each with exactly the row's own fields."""
    run = aryl(cell, *line.split(), "-o", "json")
    assert run.code == 0
    assert set(run.json) == {"schema_version", key}
    assert run.json["schema_version"] == 1
    assert len(run.json[key]) == len(names)
    assert all(set(row) == set(kind.__struct_fields__) for row in run.json[key])
    assert msgspec.convert(run.json[key], list[kind])  # type: ignore[valid-type]  # a value


@pytest.mark.parametrize(("line", "key", "kind", "names"), LISTS)
def test_quiet_prints_ids_only(
    cell: FakeCell, line: str, key: str, kind: type[msgspec.Struct], names: list[str]
) -> None:
    """`--quiet` and `-o name` give one id per line and nothing else."""
    assert aryl(cell, *line.split(), "--quiet").out.split() == names
    assert aryl(cell, *line.split(), "-o", "name").out.splitlines() == names


@pytest.mark.parametrize(("line", "key", "kind", "names"), LISTS)
@pytest.mark.parametrize("width", [40, 80, 132])
def test_a_table_fits_its_width(
    cell: FakeCell, line: str, key: str, kind: type[msgspec.Struct], names: list[str], width: int
) -> None:
    """No line is longer than the terminal, and the id is never cut."""
    run = aryl(cell, *line.split(), environ={"COLUMNS": str(width)})
    lines = run.out.splitlines()
    assert len(lines) == len(names) + 1
    assert max(cell_len(text) for text in lines) <= width
    if line != "events":
        assert [text.split()[0] for text in lines[1:]] == names


@pytest.mark.parametrize(("line", "key", "kind", "names"), LISTS)
def test_headings_can_be_left_out(
    cell: FakeCell, line: str, key: str, kind: type[msgspec.Struct], names: list[str]
) -> None:
    """`--no-headers` leaves only rows, for scripts that count lines."""
    run = aryl(cell, *line.split(), "--no-headers")
    assert len(run.out.splitlines()) == len(names)


def test_wide_shows_more(cell: FakeCell) -> None:
    """`-o wide` has columns that a table has not."""
    assert "TENANT" not in aryl(cell, "job", "list").out
    assert "TENANT" in aryl(cell, "job", "list", "-o", "wide").out


def test_no_color_off_a_terminal(cell: FakeCell) -> None:
    """What is piped has no escape sequences."""
    for line in ("job list", "status", "job describe jabc", "top --once"):
        assert "\x1b" not in aryl(cell, *line.split()).out


def test_ended_jobs_and_loans_are_asked_for_on_request(cell: FakeCell) -> None:
    """`--all` reaches the coordinator; without it only the live ones are asked."""
    for words in (["job", "list"], ["job", "list", "--all"], ["loan", "list", "--all"]):
        aryl(cell, *words)
    assert cell.asked == [
        ListJobs(is_live_only=True, in_full=True),
        ListJobs(is_live_only=False, in_full=True),
        ListLoans(is_live_only=False),
    ]


@pytest.mark.parametrize("kind", ["job", "node", "service", "loan"])
def test_a_description_as_json_has_every_field(cell: FakeCell, kind: str) -> None:
    """All fields of `Description` are there, empty ones included."""
    run = aryl(cell, kind, "describe", "x", "-o", "json")
    found = run.json["description"]
    assert set(found) == set(Description.__struct_fields__)
    assert found["kind"] == kind
    others = {"job", "node", "service", "loan"} - {kind}
    assert all(found[other] is None for other in others)
    assert cell.asked == [Describe(kind=kind, name="x", in_full=kind in ("job", "node"))]


@pytest.mark.parametrize("kind", ["job", "node", "service", "loan"])
def test_a_description_says_why(cell: FakeCell, kind: str) -> None:
    """Every reason and the story are there, within the width."""
    run = aryl(cell, kind, "describe", "x", environ={"COLUMNS": "80"})
    for reason in ("no node has 8 free GPUs", "3 waiting jobs were submitted before it"):
        assert f"- {reason}\n" in run.out
    assert "head of the line" in run.out


def test_a_job_description_keeps_the_environment_to_itself(cell: FakeCell) -> None:
    """The environment may hold secrets: it is shown only in wide output; the command is quoted."""
    assert "secret" not in aryl(cell, "job", "describe", "jabc").out
    assert "secret" in aryl(cell, "job", "describe", "jabc", "-o", "wide").out
    assert "python train.py --name 'a b'" in aryl(cell, "job", "describe", "jabc").out


@pytest.mark.parametrize("words", ["explain job jabc", "job explain jabc"])
def test_an_explanation_has_all_blockers_and_the_estimate(cell: FakeCell, words: str) -> None:
    """Both spellings say every blocker, the estimate with its source, and the story."""
    out = aryl(cell, *words.split()).out
    assert out.splitlines()[:4] == [
        "job jabc is running",
        "- no node has 8 free GPUs",
        "- 3 waiting jobs were submitted before it",
        "- estimate: 600 s left with 2 workers (source: history)",
    ]
    assert "head of the line" in out
    explanation = aryl(cell, *words.split(), "-o", "json").json["explanation"]
    assert set(explanation) == {"kind", "name", "why", "waited_s", "estimate", "story"}
    assert len(explanation["why"]) == 2


def test_the_status_is_told_in_words_and_as_json(cell: FakeCell) -> None:
    """The glance names what is frozen; JSON has every field and the figures as they are."""
    assert "queueing_s.p95" in aryl(cell, "status").out
    assert re.search(r"^jct_s\.mean +-$", aryl(cell, "status").out, re.MULTILINE)
    frozen = FakeCell({GetStatus: status(is_frozen=True)})
    assert "FROZEN" in aryl(frozen, "status").out
    recalled = FakeCell({GetStatus: status(recalled_services=("chat", "code"))})
    assert "RECALLED: chat, code (aryl recall --all --off)" in aryl(recalled, "status").out
    yet = FakeCell({GetStatus: status(is_recalled=True)})
    assert "RECALLED: services to come (aryl recall --all --off)" in aryl(yet, "status").out
    assert aryl(yet, "status", "-o", "json").json["status"]["is_recalled"] is True
    found = aryl(cell, "status", "-o", "json").json["status"]
    assert set(found) == set(Status.__struct_fields__)
    assert found["is_recalled"] is None
    assert found["figures"]["queueing_s"] == {"mean": 20.0, "p50": 20.0, "p95": 20.0}


def test_policies_are_those_of_this_version(cell: FakeCell) -> None:
    """Every policy of the table is listed with its description, and no cell is asked."""
    found = aryl(cell, "policies", "-o", "json").json["policies"]
    assert {row["name"]: row["description"] for row in found} == {
        name: policy.description for name, policy in POLICIES.items()
    }
    assert cell.targets == []


def test_a_control_character_does_not_reach_the_terminal() -> None:
    """A job's name and error are text of a stranger: no escapes, no extra lines."""
    row = job_row(state=JobState.FAILED, error="\x1b[2Jboom\nsecond\r")
    out = aryl(FakeCell({ListJobs: Jobs(rows=(row,))}), "job", "list").out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2
    assert "boom second" in out


def test_the_caller_is_who_the_flags_say(cell: FakeCell) -> None:
    """Flags before the command reach the subject, where the server sees them."""
    aryl(cell, "--tenant", "lab", "--user", "bob", "--cell", "prod", "job", "list")
    assert (cell.callers, cell.cells) == ({("lab", "bob")}, {"prod"})
    assert cell.is_closed


@each_row(
    ("answer", "code", "said", "advice"),
    [
        (refusal(ApiErrorCode.USAGE, "bad"), 2, "bad", ""),
        (refusal(ApiErrorCode.NOT_FOUND, "no job 'x'", "job"), 3, "no job 'x'", "aryl job list"),
        (refusal(ApiErrorCode.CONFLICT, "it is over", "job_id"), 4, "it is over", "aryl job list"),
        (refusal(ApiErrorCode.DENIED, "not yours", "tenant"), 5, "not yours", "--tenant"),
        (refusal(ApiErrorCode.UNAVAILABLE, "node away"), 6, "node away", "aryl status"),
        (nobody(), 6, "no coordinator of cell lab answers", "`systemctl status aryl-coordinator`"),
        (no_answer(), 7, "no answer in 10 s", "aryl status"),
        (ProtocolError("cannot read it"), 1, "cannot read it", "aryl --version"),
    ],
)
def test_an_error_has_its_exit_code(answer: Answer, code: int, said: str, advice: str) -> None:
    """Each class of error has one exit code, says why and what to run next, on stderr only."""
    run = aryl(FakeCell({Cancel: answer}), "job", "cancel", "x")
    assert (run.code, run.out) == (code, "")
    assert said in run.err
    assert "Traceback" not in run.err
    assert (f"next: {advice}" in run.err or advice in run.err) if advice else "next" not in run.err


def test_events_of_somebody_unknown_are_an_error_and_nothing_is_printed() -> None:
    """An empty table looks like peace; a misspelled name must not, in no format."""
    for form in ("table", "json", "name"):
        cell = FakeCell({GetEvents: refusal(ApiErrorCode.NOT_FOUND, "no 'x'", "subject")})
        run = aryl(cell, "events", "--for", "x", "-o", form)
        assert (run.code, run.out) == (3, "")
        assert "no 'x'" in run.err
        assert "aryl node list" in run.err


def test_no_event_of_somebody_known_is_said_in_words() -> None:
    """Its lines may be forgotten; without --for an empty table needs no word."""
    nothing = FakeCell({GetEvents: Events(rows=(), last=7, subject="job/jabc")})
    run = aryl(nothing, "events", "--for", "train")
    assert (run.code, run.err) == (0, "job/jabc is known, but no events of it are kept\n")
    assert aryl(nothing, "events").err == ""


def test_a_failed_job_says_with_which_code() -> None:
    """Its row tells why it failed even where nothing but the exit code is known."""
    failed = job_row(state=JobState.FAILED, exit_code=7, blockers=())
    done = job_row(state=JobState.SUCCEEDED, exit_code=0, blockers=())
    run = aryl(FakeCell({ListJobs: Jobs(rows=(failed, done))}), "job", "list", "--all")
    assert run.out.count("exit code") == run.out.count("exit code 7") == 1


@pytest.mark.parametrize(
    ("reclaim_s", "deadline_s", "said"),
    [(None, None, "-"), (None, 20.0, "- of 20s"), (3.6, 20.0, "3.6s of 20s")],
)
def test_a_loan_tells_what_a_reclaim_took_of_its_deadline(
    reclaim_s: float | None, deadline_s: float | None, said: str
) -> None:
    """Before a reclaim there is no deadline to measure it by."""
    row = loan_row(reclaim_s=reclaim_s, reclaim_deadline_s=deadline_s)
    answer = Description(kind="loan", name="l7", loan=row)
    run = aryl(FakeCell({Describe: answer}), "loan", "describe", "l7")
    assert re.findall(r"^took +(.+)$", run.out, re.MULTILINE) == [said]


def test_a_loan_that_was_called_back_before_its_node_had_left_took_nothing() -> None:
    """The node is there again and no time is told: there was no way home."""
    row = loan_row(reclaim_s=None, reclaim_deadline_s=20.0, returned_at_s=9.0)
    answer = Description(kind="loan", name="l7", loan=row)
    run = aryl(FakeCell({Describe: answer}), "loan", "describe", "l7")
    assert re.search(r"^took +- .called back before its node had left.$", run.out, re.MULTILINE)


@pytest.mark.parametrize(
    "words", ["job list --nonsense", "nonsense", "node describe", "job list -o nonsense"]
)
def test_a_bad_command_line_is_a_usage_error(cell: FakeCell, words: str) -> None:
    """Exit 2, and no cell is asked."""
    run = aryl(cell, *words.split())
    assert (run.code, run.out, cell.targets) == (2, "", [])
    assert run.err


def test_no_cell_is_a_usage_error_with_a_way_out(cell: FakeCell) -> None:
    """Without a cell anywhere the message names `aryl up`."""
    run = aryl(cell, "job", "list", environ={"ARYL_NATS_URL": "", "ARYL_CELL": ""})
    assert run.code == 2
    assert "aryl up" in run.err


def test_cancel_says_what_was_ordered(cell: FakeCell) -> None:
    """The person reads it on stderr; a script gets JSON."""
    run = aryl(cell, "job", "cancel", "jabc")
    assert (run.out, run.err) == ("", "job jabc is being cancelled\n")
    found = aryl(cell, "job", "cancel", "jabc", "-o", "json").json
    assert found == {"schema_version": 1, "detail": "job jabc is being cancelled"}
    assert cast("Cancel", cell.asked[0]).job_id == "jabc"


def test_the_glance_says_that_services_still_get_back_what_is_theirs() -> None:
    """Whoever looks at a frozen cell must not think that nodes stay lent."""
    frozen = FakeCell({GetStatus: status(is_frozen=True)})
    assert "FROZEN, decides only what services get back" in aryl(frozen, "status").out
    assert "FROZEN" not in aryl(FakeCell({GetStatus: status()}), "status").out


def test_the_help_of_freeze_says_what_goes_on() -> None:
    """Before it is ordered, not only after."""
    said = " ".join(aryl(FakeCell({}), "freeze", "--help").out.split())
    assert "services still get back the nodes that their load needs" in said
    assert "leases are renewed" in said


ARRAY_COUNTS = ArrayRow(
    indices="0-99", throttle=5, tasks=100, waiting=80, running=5, succeeded=15, failed=0,
    cancelled=0,
)  # fmt: skip
ARRAY_ROWS = (
    job_row("jarr", submitted_at_s=10.0, array=ARRAY_COUNTS, nodes=()),
    job_row("jold", submitted_at_s=5.0),
    job_row("jnew", submitted_at_s=20.0),
    job_row("jarr_16", submitted_at_s=9.9, array_id="jarr", array_index=16),
    job_row("jarr_7", submitted_at_s=9.8, array_id="jarr", array_index=7, state=JobState.PENDING),
)


def test_a_list_has_one_line_for_an_array_and_its_tasks_on_demand() -> None:
    """In order of submission, and tasks by their indices."""
    cell = FakeCell({ListJobs: Jobs(rows=ARRAY_ROWS)})
    lines = aryl(cell, "job", "list").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["jold", "jarr_[0-99%5]", "jnew"]
    assert "80 waiting, 5 running, 15 done" in lines[2]
    names = aryl(cell, "job", "list", "--tasks", "--quiet").out.split()
    assert names == ["jold", "jarr", "jarr_7", "jarr_16", "jnew"]
