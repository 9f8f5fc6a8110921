"""`aryl plan`: what is asked, what is printed, and the exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from common.api import ApiErrorCode
from common.plans import (
    Plan,
    PlanEffect,
    PlanEnd,
    PlanKind,
    PlanMove,
    Planned,
    PlanStart,
    PlanStep,
)
from tests.cli.fake_cell import FakeCell, aryl, refusal
from tests.cli.test_submit import file
from tests.tables import each_row

START = PlanStart(
    in_s=750.0,
    gpus=16,
    nodes=("t0", "t1"),
    after=(PlanEnd(job_id="jabc", name="train", tenant="lab", in_s=740.0, source="declared"),),
    waits_for=("needs 16 GPUs",),
)
STOPPED = PlanEffect(
    job_id="jdef", name="eval", tenant="vision", what="preempted", in_s=0.0, lost_gpu_s=120.0
)
HOME = PlanMove(node="i0", service="chat", to="serving", in_s=72.0, deadline_s=300.0)


def planned(**fields: Any) -> Planned:
    """An answer; nothing changes unless said otherwise."""
    return Planned(**{"kind": PlanKind.JOB, **fields})


def answering(**fields: Any) -> FakeCell:
    """A cell with one answer to every plan."""
    return FakeCell({Plan: planned(**fields)})


def asked(cell: FakeCell) -> Plan:
    """The plan that the cell was asked for."""
    [request] = cell.asked
    return cast("Plan", request)


WORDS: dict[str, dict[str, Any]] = {
    "job 208 --horizon 2h": {
        "kind": PlanKind.JOB,
        "spec": None,
        "target": "208",
        "horizon_s": 7200.0,
    },
    "drain t0 --deadline 5m": {"kind": PlanKind.DRAIN, "target": "t0", "deadline_s": 300.0},
    "drain t0 --at now+1hour": {"kind": PlanKind.DRAIN, "target": "t0", "in_s": 3600.0},
    "drain t0": {"kind": PlanKind.DRAIN, "target": "t0", "deadline_s": None},
    "loan chat": {"kind": PlanKind.LOAN, "target": "chat"},
    "recall": {"kind": PlanKind.RECALL, "target": ""},
    "recall chat --horizon 2h": {"kind": PlanKind.RECALL, "target": "chat", "horizon_s": 7200.0},
    "tenant vision guarantee=16": {"kind": PlanKind.TENANT, "guarantee_gpus": 16},
    "queue --horizon 1h": {"kind": PlanKind.QUEUE, "target": "", "horizon_s": 3600.0},
    "policy aryl:reclaim=random": {"kind": PlanKind.POLICY, "target": "aryl:reclaim=random"},
}


@each_row("words", WORDS)
def test_a_plan_is_asked_as_it_is_typed(words: str) -> None:
    """Kind, target and lengths arrive, and the limit is half of the time for an answer."""
    cell = answering()
    run = aryl(cell, "--timeout", "8", "plan", *words.split())
    assert run.code == 0, run.err
    request = asked(cell)
    assert {name: getattr(request, name) for name in WORDS[words]} == WORDS[words]
    assert request.limit_s == 4.0


def test_a_dry_run_is_the_plan_of_the_same_job(tmp_path: Path) -> None:
    """Nothing is submitted; flags win over the file, as in a submission."""
    plan, dry = answering(start=START), answering(start=START)
    assert aryl(plan, "plan", "job", file(tmp_path)).code == 1
    run = aryl(dry, "job", "submit", file(tmp_path), "--dry-run", "--priority", "9")
    assert run.code == 1
    assert (asked(plan).kind, asked(dry).kind) == (PlanKind.JOB, PlanKind.JOB)
    first, second = asked(plan).spec, asked(dry).spec
    assert first is not None
    assert second is not None
    assert (first.priority, second.priority, second.name) == (3, 9, first.name)


CHANGES: dict[str, dict[str, Any]] = {
    "start": {"start": START},
    "now": {"now": (PlanStep(in_s=0.0, action="lend", subject="i0"),)},
    "later": {"later": (PlanStep(in_s=60.0, action="stop", subject="jabc"),)},
    "effects": {"effects": (STOPPED,)},
    "moves": {"moves": (HOME,)},
}


@each_row("what", CHANGES)
def test_any_change_is_exit_code_1(what: str) -> None:
    """Also in JSON, which says so as well."""
    run = aryl(answering(**CHANGES[what]), "plan", "recall", "-o", "json")
    assert (run.code, run.json["plan"]["has_changes"]) == (1, True)


def test_nothing_and_errors_have_codes_of_their_own() -> None:
    """0 without a change, and what other commands have for a refusal or a wrong value."""
    run = aryl(
        answering(start=PlanStart(unknown="no running job has an estimate of its end")),
        "plan",
        "recall",
    )
    assert run.code == 0
    assert "unknown: no running job has an estimate of its end" in run.out
    assert "nothing would change" in run.out
    denied = FakeCell({Plan: refusal(ApiErrorCode.DENIED)})
    assert aryl(denied, "plan", "recall").code == 5
    for words in (
        ("tenant", "a", "guarantee=x"),
        ("tenant", "a", "weight=2"),
        ("recall", "-o", "name"),
    ):
        assert aryl(answering(), "plan", *words).code == 2
    assert aryl(answering(), "plan", "recall", "--horizon", "0").code == 2


def test_a_plan_reads_like_a_sentence_with_tables(tmp_path: Path) -> None:
    """When, where, after whom, who pays, and what it rests on."""
    cell = answering(
        start=START, effects=(STOPPED,), moves=(HOME,), played_s=3600.0, assumptions=("loads stay",)
    )
    out = aryl(cell, "plan", "job", file(tmp_path)).out
    for text in (
        "starts in 12m 30s on t0, t1 (16 GPUs)",
        "after jabc (train, lab) ends in 12m 20s, by declared",
        "waits for: needs 16 GPUs",
        "played 1h ahead",
        "loads stay",
    ):
        assert text in out
    [row] = [line for line in out.splitlines() if line.startswith("jdef")]
    assert row.split() == ["jdef", "eval", "vision", "preempted", "now", "120", "-", "-"]
    [row] = [line for line in out.splitlines() if line.startswith("i0")]
    assert row.split()[:7] == ["i0", "chat", "serving", "in", "1m", "12s", "5m"]


@pytest.mark.parametrize("count", [15, 16])
def test_many_jobs_are_cut_in_a_table_only(count: int) -> None:
    """The rest is counted; -o wide and JSON have all."""
    effects = tuple(
        PlanEffect(job_id=f"j{n:02}", name="n", tenant="t", what="starts later")
        for n in range(count)
    )
    out = aryl(answering(effects=effects), "plan", "recall").out
    assert ("and 1 more" in out) == (count == 16)
    wide = aryl(answering(effects=effects), "plan", "recall", "-o", "wide").out
    assert (
        sum(line.startswith("j") and "starts later" in line for line in wide.splitlines()) == count
    )
