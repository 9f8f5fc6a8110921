"""Orders: what is sent, and that nothing which stops jobs is sent by mistake."""

from __future__ import annotations

import msgspec
import pytest

from common.api import (
    ApiErrorCode,
    Describe,
    Description,
    Done,
    Jobs,
    ListJobs,
    ListLoans,
    Loans,
    NodeRow,
    Operate,
    Throttle,
)
from common.errors import ProtocolError
from common.model import JobState, NodeRole, Pool
from coordinator import plain_text
from coordinator.cli.describe import Hit, hit_line
from coordinator.engine.state.events import OperatorAction
from tests.cli.fake_cell import (
    Answer,
    FakeCell,
    aryl,
    job_row,
    loan_row,
    nobody,
    node_row,
    refusal,
)
from tests.tables import each_row

A = OperatorAction


def describe(request: Describe) -> Description:
    """A node or loan by whatever name; the loan's id is l7."""
    if request.kind == "loan":
        return Description(kind="loan", name="l7", loan=loan_row("l7", node="i0"))
    return Description(kind="node", name=request.name, node=node_row(request.name))


def cell() -> FakeCell:
    """A cell where jabc runs on i0 and t0, and jdef on t1."""
    rows = (job_row("jabc"), job_row("jdef", nodes=("t1",), state=JobState.STARTING))
    return FakeCell(
        {
            Operate: Done(detail="done as told"),
            Describe: describe,
            ListJobs: Jobs(rows=rows),
            ListLoans: Loans(rows=(loan_row("l7", node="i0"),)),
        }
    )


def orders(cell: FakeCell) -> list[Operate]:
    """What was ordered."""
    return [request for request in cell.asked if isinstance(request, Operate)]


PLAIN = [
    ("freeze", Operate(action=A.FREEZE)),
    ("freeze --off", Operate(action=A.THAW)),
    ("freeze --reason fire", Operate(action=A.FREEZE, reason="fire")),
    ("recall --all", Operate(action=A.RECALL)),
    ("recall --service chat", Operate(action=A.RECALL, target="chat")),
    ("recall --all --off", Operate(action=A.END_RECALL)),
    ("recall --service chat --off", Operate(action=A.END_RECALL, target="chat")),
    ("node cordon t0 --reason fan", Operate(action=A.CORDON, target="t0", reason="fan")),
    ("node uncordon t0", Operate(action=A.UNCORDON, target="t0")),
    ("node remove t0 --reason sold", Operate(action=A.REMOVE, target="t0", reason="sold")),
    ("service mode chat observe", Operate(action=A.SET_MODE, target="chat", value="observe")),
    ("service mode chat recommend", Operate(action=A.SET_MODE, target="chat", value="recommend")),
    ("service mode chat act", Operate(action=A.SET_MODE, target="chat", value="act")),
]

AGAINST_JOBS = [
    ("node drain t0", Operate(action=A.DRAIN, target="t0")),
    ("node drain t0 --deadline 30m", Operate(action=A.DRAIN, target="t0", deadline_s=1800.0)),
    ("node confirm-dead t0", Operate(action=A.CONFIRM_DEAD, target="t0")),
    ("loan revoke l7", Operate(action=A.REVOKE_LOAN, target="l7")),
    ("loan revoke i0", Operate(action=A.REVOKE_LOAN, target="l7")),
]


@each_row(("line", "sent"), PLAIN, ids=[line for line, _ in PLAIN])
def test_an_order_is_sent_as_it_was_given(line: str, sent: Operate) -> None:
    """One command, one order; what was done is said on stderr."""
    here = cell()
    run = aryl(here, *line.split())
    assert (run.code, run.out) == (0, "")
    assert orders(here) == [sent]
    assert f"ordered: done as told {sent.value}".strip() in run.err


def test_several_nodes_are_uncordoned_by_one_command() -> None:
    """Each gets its order; where one is refused, those before it are named."""
    here = FakeCell({Operate: lambda request: Done(detail=f"{request.action} {request.target}")})
    run = aryl(here, "node", "uncordon", "t0", "t1", "t0", "--reason", "fan")
    assert [(one.target, one.reason) for one in orders(here)] == [("t0", "fan"), ("t1", "fan")]
    assert run.err == "ordered: uncordon t0\nordered: uncordon t1\n"
    here = FakeCell({Operate: [Done(detail="uncordon t0"), refusal(ApiErrorCode.NOT_FOUND)]})
    run = aryl(here, "node", "uncordon", "t0", "x")
    assert run.code == 3
    assert "ordered before this failed: uncordon t0" in run.err


def test_an_order_is_said_in_words() -> None:
    """The verbs of the wire have underscores; a name that has one keeps it."""
    here = FakeCell({Operate: lambda request: Done(detail=f"{request.action} {request.target}")})
    run = aryl(here, "service", "mode", "my_chat", "act")
    assert run.err == "ordered: set mode my_chat act\n"
    found = aryl(here, "service", "mode", "my_chat", "act", "-o", "json").json
    assert found["detail"] == "set_mode my_chat act"


@each_row(("line", "sent"), AGAINST_JOBS, ids=[line for line, _ in AGAINST_JOBS])
def test_what_stops_jobs_is_refused_where_nobody_can_answer(line: str, sent: Operate) -> None:
    """Off a terminal without --yes: exit 2, the hit job is named, nothing is ordered."""
    here = cell()
    run = aryl(here, *line.split())
    assert (run.code, orders(here)) == (2, [])
    assert "add --yes" in run.err
    assert "jabc train of lab/ada: running, 16 GPUs" in run.err
    assert "jdef" not in run.err


@each_row(("line", "sent"), AGAINST_JOBS, ids=[line for line, _ in AGAINST_JOBS])
def test_another_tenant_is_refused_before_anything_is_shown(line: str, sent: Operate) -> None:
    """Exit 5 with the refusal alone, and nothing is asked of the cell."""
    here = cell()
    run = aryl(here, "--tenant", "vision", *line.split(), "--yes")
    assert (run.code, run.out, here.asked) == (5, "", [])
    assert "only tenant ops may do this" in run.err
    assert "hits" not in run.err


@each_row(("line", "sent"), AGAINST_JOBS, ids=[line for line, _ in AGAINST_JOBS])
def test_yes_goes_ahead_and_still_says_who_is_hit(line: str, sent: Operate) -> None:
    """--yes sends the order, by the loan's own id whatever name it was given."""
    here = cell()
    run = aryl(here, *line.split(), "--yes", "--reason", "fan")
    assert run.code == 0
    [order] = orders(here)
    assert order == msgspec.structs.replace(sent, reason="fan")
    assert "hits 1 job:" in run.err


@each_row(("answer", "code", "count"), [("y\n", 0, 1), ("n\n", 1, 0), ("\n", 1, 0)])
@each_row("line", [line for line, _ in AGAINST_JOBS])
def test_on_a_terminal_the_person_decides(line: str, answer: str, code: int, count: int) -> None:
    """Only an explicit yes sends the order; the question comes after the list of jobs."""
    here = cell()
    run = aryl(here, *line.split(), is_interactive=True, types=answer)
    assert (run.code, len(orders(here)), run.out) == (code, count, "")
    assert run.err.index("jabc") < run.err.index("[y/N]")


def test_how_long_jobs_may_go_on_is_in_the_question() -> None:
    """Whoever is asked sees what they are asked for, in the words that they gave."""
    run = aryl(cell(), "node", "drain", "t0", "--deadline", "90m", is_interactive=True, types="n\n")
    assert "draining t0 within 1h 30m hits 1 job:" in run.err
    assert "draining t0 within 1h 30m? [y/N]" in run.err


@each_row("deadline", ["soon", "-5m", "0", "0s", "1e9", "9999999d", ""])
def test_a_deadline_that_is_none_is_refused_before_anything_is_asked(deadline: str) -> None:
    """Exit 2, the option is named with what was said, and nobody is asked or told."""
    here = cell()
    run = aryl(here, "node", "drain", "t0", f"--deadline={deadline}", "--yes")
    assert (run.code, run.out, here.asked) == (2, "", [])
    assert f"--deadline: {deadline!r}, expected" in run.err


def vacating(*looks: NodeRow | Answer) -> FakeCell:
    """A cell that shows a node so, one look after the other; the first is before the order."""
    here = cell()
    here.answers[Describe] = [
        Description(kind="node", name="t0", node=look) if isinstance(look, NodeRow) else look
        for look in looks
    ]
    return here


def drained(*jobs: str) -> NodeRow:
    """A node that is drained, with what is still there."""
    return node_row(is_cordoned=True, is_draining=True, jobs=jobs)


def test_a_drain_that_is_waited_for_ends_when_nothing_is_left() -> None:
    """Who is still there is said when it changes; a coordinator that is away is outwaited."""
    both, last = drained("ja", "jb"), drained("jb")
    end = ProtocolError("it waited on")
    here = vacating(node_row(), both, both, nobody(), last, drained(), end)
    run = aryl(here, "node", "drain", "t0", "--wait", "--yes")
    assert (run.code, run.out) == (0, "")
    assert [line for line in run.err.splitlines() if line.startswith("node t0 is")] == [
        "node t0 is training (draining), with ja, jb",
        "node t0 is training (draining), with jb",
    ]
    assert len(orders(here)) == 1
    assert here.answers[Describe] == [end]


def test_a_drain_that_somebody_ended_is_not_waited_for() -> None:
    """The node is in use again: whoever waits must not switch it off. Exit 1, and why."""
    here = vacating(node_row(), drained("ja"), node_row(), ProtocolError("it waited on"))
    run = aryl(here, "node", "drain", "t0", "--wait", "-y")
    assert run.code == 1
    assert "node t0 is no longer drained" in run.err


@each_row(
    ("row", "said"),
    [
        (drained("ja"), "training (draining)"),
        (drained(), "training (drained)"),
        (node_row(is_cordoned=True), "training (cordoned)"),
        (node_row(role=NodeRole.SERVING, is_server_down=True), "serving (server down)"),
        (
            node_row(role=NodeRole.SERVING, is_server_down=True, is_cordoned=True),
            "serving (server down, cordoned)",
        ),
        (node_row(), "training"),
    ],
)
def test_the_list_of_nodes_tells_a_drain_from_a_cordon(row: NodeRow, said: str) -> None:
    """And whether anything is left there."""
    assert plain_text.role(row) == said


@each_row("is_interactive", [False, True])
@each_row("line", ["node drain t9", "loan revoke l8"])
def test_an_order_that_hits_no_job_is_not_asked_about(line: str, is_interactive: bool) -> None:
    """It says that nobody is hit, and is given: with or without a terminal, and without --yes."""
    here = cell()
    here.answers[Describe] = lambda request: Description(
        kind=request.kind, name=request.name, node=node_row("t9"), loan=loan_row("l8", node="t9")
    )
    run = aryl(here, *line.split(), is_interactive=is_interactive)
    assert (run.code, len(orders(here))) == (0, 1), run.err
    assert "no job runs there" in run.err
    assert "[y/N]" not in run.err


def test_a_loan_that_is_home_is_not_said_to_be_revoked() -> None:
    """Nothing is sent, and the refusal is the only word."""
    here = cell()
    here.answers[Describe] = lambda request: Description(
        kind=request.kind, name=request.name, loan=loan_row("l7", node="i0", returned_at_s=1.0)
    )
    run = aryl(here, "loan", "revoke", "l7")
    assert run.code != 0
    assert orders(here) == []
    assert "came home already" in run.err
    assert "revoking" not in run.err


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("l7", "loan l7 came home already: there is no loan of i0, which is serving"),
        ("i0", "there is no loan of i0, which is serving"),
    ],
)
def test_of_a_node_that_is_not_lent_it_is_said_what_it_does(named: str, said: str) -> None:
    """Nobody who names a node asks for a loan of last week."""
    here = cell()

    def answer(request: Describe) -> Description:
        if request.kind == "node":
            serves = node_row("i0", role=NodeRole.SERVING, home_pool=Pool.INFERENCE)
            return Description(kind="node", name="i0", node=serves)
        row = loan_row("l7", node="i0", returned_at_s=1.0)
        return Description(kind="loan", name="l7", loan=row)

    here.answers[Describe] = answer
    run = aryl(here, "loan", "revoke", named)
    assert (run.code, orders(here)) == (4, [])
    assert said in run.err
    assert ("came home" in run.err) == (named == "l7")


@pytest.mark.parametrize(("answer", "code", "count"), [("y\n", 0, 1), ("n\n", 1, 0)])
def test_a_death_is_asked_about_whoever_it_hits(answer: str, code: int, count: int) -> None:
    """Nobody but the operator knows that the machine is off: what they promise is said first."""
    here = cell()
    run = aryl(here, "node", "confirm-dead", "t9", is_interactive=True, types=answer)
    assert (run.code, len(orders(here))) == (code, count)
    said = ["no job runs there", "you promise that t9 is powered off", "[y/N]"]
    assert [run.err.index(text) for text in said] == sorted(run.err.index(text) for text in said)
    here = cell()
    run = aryl(here, "node", "confirm-dead", "t9")
    assert (run.code, orders(here)) == (2, [])
    assert "declaring t9 dead: cannot ask for confirmation here; add --yes to confirm" in run.err


def test_an_unknown_node_is_not_found_before_anything_is_asked() -> None:
    """Exit 3 and no order, even with --yes."""
    here = cell()
    here.answers[Describe] = refusal(ApiErrorCode.NOT_FOUND, "no node 'x'", "node")
    run = aryl(here, "node", "drain", "x", "--yes")
    assert (run.code, orders(here)) == (3, [])
    assert "next: aryl node list" in run.err


def test_a_node_that_nobody_has_heard_may_be_declared_dead_and_is_told_to_be_unknown() -> None:
    """A gang that was rebuilt from ledgers may wait for it; a misspelt name is noticed."""
    here = cell()
    here.answers[Describe] = refusal(ApiErrorCode.NOT_FOUND, "no node 'x'", "node")
    run = aryl(here, "node", "confirm-dead", "x")
    assert (run.code, orders(here)) == (2, [])
    assert "node x never reported here" in run.err
    run = aryl(here, "node", "confirm-dead", "x", "--yes")
    assert (run.code, orders(here)) == (0, [Operate(action=A.CONFIRM_DEAD, target="x")])


def test_a_recall_says_who_is_hit_and_does_not_ask() -> None:
    """An emergency order works off a terminal; the jobs on lent nodes are named."""
    here = cell()
    run = aryl(here, "recall", "--all")
    assert run.code == 0
    assert "jabc" in run.err
    assert "jdef" not in run.err


@pytest.mark.parametrize("line", ["recall", "recall --all --service chat", "recall --off"])
def test_a_recall_must_say_of_what(line: str) -> None:
    """Neither and both are usage errors; nothing is ordered."""
    here = cell()
    run = aryl(here, *line.split())
    assert (run.code, here.targets) == (2, [])
    assert "--service" in run.err


def test_an_unknown_mode_lists_the_modes() -> None:
    """Exit 2, nothing is ordered."""
    here = cell()
    run = aryl(here, "service", "mode", "chat", "on")
    assert (run.code, here.targets) == (2, [])
    assert "recommend" in run.err


def test_a_denied_order_names_the_tenant() -> None:
    """Who may not operate the cell is told so, exit 5."""
    here = cell()
    here.answers[Operate] = refusal(ApiErrorCode.DENIED, "only tenant ops may do this", "tenant")
    run = aryl(here, "--tenant", "lab", "freeze")
    assert run.code == 5
    assert "only tenant ops may do this" in run.err


def test_an_order_as_json_has_its_detail() -> None:
    """A script reads what was done from stdout."""
    assert aryl(cell(), "freeze", "-o", "json").json == {
        "schema_version": 1,
        "detail": "done as told",
    }


@pytest.mark.parametrize(("gpus", "said"), [(1, "running, 1 GPU, on t0"), (2, "2 GPUs, on t0")])
def test_a_hit_is_counted_in_words(gpus: int, said: str) -> None:
    """One GPU is one GPU."""
    assert said in hit_line(Hit(row=job_row(gpus=gpus, nodes=("t0",)), nodes=("t0",)))


@pytest.mark.parametrize(
    ("nodes", "said"),
    [(("t0",), "on t0"), (("t0", "t1"), "on t0 (and on 1 other node)"),
     (("t0", "t1", "t2"), "on t0 (and on 2 other nodes)")],
)  # fmt: skip
def test_what_a_hit_job_has_elsewhere_is_counted(nodes: tuple[str, ...], said: str) -> None:
    """Whoever drains one node knows how much of a gang ends with it."""
    assert hit_line(Hit(row=job_row(nodes=nodes), nodes=("t0",))).endswith(said)


def test_a_recommended_loan_is_approved_by_its_node() -> None:
    """One order, with the reason that a person gave."""
    asked: list[Operate] = []

    def answer(request: Operate) -> Done:
        asked.append(request)
        return Done(detail="approve_loan i0")

    run = aryl(FakeCell({Operate: answer}), "loan", "approve", "i0", "--reason", "night")
    assert run.code == 0
    assert [(one.action, one.target, one.reason) for one in asked] == [
        ("approve_loan", "i0", "night")
    ]


@pytest.mark.parametrize(("text", "most"), [("7", 7), ("none", None)])
def test_a_throttle_is_a_count_or_none(text: str, most: int | None) -> None:
    """Anything else is refused before it is sent."""
    cell = FakeCell({Throttle: Done(detail="done")})
    assert aryl(cell, "job", "throttle", "jarr", text).code == 0
    assert cell.asked == [Throttle(job_id="jarr", throttle=most)]
    for bad in ("0", "-", "10001", "1.5"):
        run = aryl(cell, "job", "throttle", "jarr", bad)
        assert (run.code, "expected a count from 1 to 10000, or none" in run.err) == (2, True)
    assert len(cell.asked) == 1
