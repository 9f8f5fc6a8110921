"""The index of the history: it answers as a scan of all lines would, whatever came when."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import Unavailable
from common.history import (
    AttemptRecord,
    Detail,
    HistoryLine,
    Interval,
    JobRecord,
    LentRecord,
    LossRecord,
    OrderRecord,
    StoryKind,
    Use,
    WaitRecord,
)
from coordinator.service.history import facts, index
from coordinator.service.history.index import Asked, HistoryIndex
from coordinator.service.history.usage_sum import DIMENSIONS, Sums
from tests.draws import pick, whole

JOBS, NODES, TENANTS, USERS = ("j1", "j2", "j3"), ("n1", "n2"), ("a", "b"), ("ann", "bob")
SCALE_S = 10_000.0
"""Spans of some days: they are added up another way than parts of a day."""


def scaled(count: int) -> float:
    return count * SCALE_S


def use(node: str, pool: str, gpus: int, began_s: int, length_s: int) -> Use:
    return Use(
        node=node,
        gpu_type="H100" if node == "n1" else "A100",
        gpus=float(gpus),
        pool=pool,
        service="chat" if pool == "loan" else "",
        began_at_s=began_s * SCALE_S,
        ended_at_s=(began_s + length_s) * SCALE_S,
    )


USES = st.builds(
    use, pick(*NODES), pick("training", "loan"), whole(1, 8), whole(0, 90), whole(1, 30)
)


@st.composite
def details(draw: st.DrawFn) -> tuple[StoryKind, str, Detail | None, tuple[str, str]]:
    """Kind, subject, record, and whose it is."""
    who = (draw(pick(*TENANTS)), draw(pick(*USERS)))
    job, node = draw(pick(*JOBS)), draw(pick(*NODES))
    named: dict[str, Any] = {"job_id": job, "tenant": who[0], "user": who[1]}
    began_s, length_s = draw(whole(0, 90)) * SCALE_S, draw(whole(1, 20)) * SCALE_S
    match draw(whole(0, 7)):
        case 0:
            order = OrderRecord(tenant=who[0], user=who[1], verb="drain", target=node)
            return StoryKind.ORDER, node, order, who
        case 1:
            uses = tuple(draw(st.lists(USES, min_size=1, max_size=3)))
            return StoryKind.ATTEMPT, job, AttemptRecord(attempt=1, uses=uses, **named), who
        case 2:
            lent = LentRecord(uses=(draw(USES),))
            return StoryKind.LENT, node, lent, ("", "")
        case 3:
            loss = LossRecord(cause=draw(pick("reclaim", "node")), gpu_s=length_s, **named)
            return StoryKind.LOSS, job, loss, who
        case 4:
            waited = WaitRecord(gpus=4, began_at_s=began_s, ended_at_s=began_s + length_s, **named)
            return StoryKind.EVENT, job, waited, who
        case 5:
            ended = JobRecord(
                name="x",
                submitted_at_s=0.0,
                ended_at_s=0.0,
                state="cancelled",
                gpus=2,
                last_wait=Interval(began_s, began_s + length_s),
                **named,
            )
            return StoryKind.JOB, job, ended, who
        case 6:
            return StoryKind.DECISION, job, None, who
        case _:
            return StoryKind.EVENT, node, None, ("", "")


@st.composite
def histories(draw: st.DrawFn) -> list[HistoryLine]:
    """Lines in the order of their numbers, which may have gaps, and of time."""
    lines: list[HistoryLine] = []
    number, at_s = 0, 0.0
    for kind, subject, detail, who in draw(st.lists(details(), max_size=40)):
        number += draw(whole(1, 3))
        at_s += draw(whole(0, 5)) * SCALE_S
        if isinstance(detail, JobRecord):
            detail = msgspec.structs.replace(detail, ended_at_s=at_s)
        lines.append(
            HistoryLine(
                number=number,
                at_s=at_s,
                subject=subject,
                what="w",
                reason="r",
                kind=kind,
                detail=detail,
                tenant=who[0],
                user=who[1],
            )
        )
    return lines


WORDS = (
    *map(facts.about, (*JOBS, *NODES, "chat", "nobody")),
    *map(facts.of_tenant, TENANTS),
    *map(facts.of_user, USERS),
)
QUESTIONS = st.builds(
    Asked,
    words=st.lists(st.sampled_from(WORDS), max_size=2, unique=True).map(tuple),
    kinds=st.frozensets(st.sampled_from(list(StoryKind)), max_size=3),
    after=whole(0, 20),
    before=st.none() | whole(1, 60),
    since_s=st.none() | whole(0, 60).map(scaled),
    until_s=st.none() | whole(0, 99).map(scaled),
    limit=whole(1, 12),
    is_newest=st.booleans(),
)


def answers(line: HistoryLine, asked: Asked) -> bool:
    """Whether a line belongs to an answer, by the words of the question."""
    return (
        set(asked.words) <= set(facts.words(line))
        and (not asked.kinds or line.kind in asked.kinds)
        and line.number > asked.after
        and (asked.before is None or line.number < asked.before)
        and (asked.since_s is None or line.at_s >= asked.since_s)
        and (asked.until_s is None or line.at_s < asked.until_s)
    )


def filled(path: Path, lines: Sequence[HistoryLine], *, step: int) -> HistoryIndex:
    """An index that read the lines in parts, some of them twice."""
    made = HistoryIndex(path)
    messages = [msgspec.msgpack.encode(line) for line in lines]
    for first in range(0, len(messages), step):
        part = messages[max(0, first - 2) : first + step]
        made.add(part, until=first + step)
    return made


def report(
    lines: Sequence[HistoryLine], by: tuple[str, ...], since_s: float, until_s: float
) -> Sums:
    """A usage report by a scan of all lines."""
    sums = Sums(by, since_s=since_s, until_s=until_s)
    sums.add_facts(fact for line in lines for fact in facts.facts(line))
    return sums


def rows(sums: Sums) -> dict[tuple[str, ...], object]:
    """The rows that are not empty, rounded as sums in another order need it."""
    found: dict[tuple[str, ...], object] = {}
    for key, row in sums.rows.items():
        values = msgspec.to_builtins(row)
        costs = values.pop("lost_by_cause_gpu_s")
        amounts = {name: round(value, 3) for name, value in (*values.items(), *costs.items())}
        if any(amounts.values()):
            found[key] = amounts
    return found


@settings(max_examples=60)
@given(
    histories(),
    st.lists(QUESTIONS, min_size=1, max_size=4),
    st.lists(st.sampled_from(DIMENSIONS), min_size=1, max_size=3, unique=True).map(tuple),
    st.tuples(whole(0, 60), whole(1, 60)),
    whole(1, 9),
    whole(0, 60),
)
def test_it_answers_as_a_scan_of_the_lines_that_are_kept(
    lines: list[HistoryLine],
    questions: list[Asked],
    by: tuple[str, ...],
    span: tuple[int, int],
    step: int,
    dropped: int,
) -> None:
    """Lines, reports and ended jobs: with all lines, and after the oldest are dropped."""
    since_s, until_s = scaled(span[0]), scaled(span[0] + span[1])
    with tempfile.TemporaryDirectory() as directory:
        made = filled(Path(directory) / "index", lines, step=step)
        for kept in (lines, [line for line in lines if line.number >= dropped]):
            for asked in questions:
                found = [line for line in kept if answers(line, asked)]
                part = found[-asked.limit :] if asked.is_newest else found[: asked.limit]
                assert made.lines(asked) == part
            sums = Sums(by, since_s=since_s, until_s=until_s)
            made.usage(sums)
            assert rows(sums) == rows(report(kept, by, since_s, until_s))
            ended = [
                line.detail
                for line in kept
                if line.kind == StoryKind.JOB and since_s <= line.at_s < until_s
            ]
            jobs = made.ended_jobs(since_s=since_s, until_s=until_s)
            assert [job for _, job in jobs] == ended
            while made.drop(dropped):
                pass
        made.close()


def line(number: int, subject: str = "j1") -> HistoryLine:
    return HistoryLine(number=number, at_s=float(number), subject=subject, what="w", reason="r")


def test_lines_are_forgotten_and_read_again(tmp_path: Path) -> None:
    """As after a server lost the newest ones and got others in their place."""
    made = filled(tmp_path / "index", [line(number) for number in range(1, 11)], step=4)
    made.go_back(6, sequence=7)
    assert [one.number for one in made.lines(Asked())] == [1, 2, 3, 4, 5, 6]
    other = [msgspec.msgpack.encode(line(8, "j2"))]
    made.add(other, until=7)
    assert [one.number for one in made.lines(Asked(words=(facts.about("j1"),)))] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert [one.number for one in made.lines(Asked(words=(facts.about("j2"),)))] == [8]
    assert made.position.sequence == 8
    made.close()


def test_a_file_is_read_on_by_the_next_process_and_shared_by_none(tmp_path: Path) -> None:
    """A second process at the same time takes a file beside it; a spoilt or older one is made
    again."""
    path = tmp_path / "index.sqlite3"
    first = filled(path, [line(1), line(2)], step=5)
    second = HistoryIndex(path)
    assert second.path != first.path == path
    assert second.position.number == 0
    first.close()
    second.close()
    again = HistoryIndex(path)
    assert (again.path, again.position.number) == (path, 2)
    again.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 999")
    db.close()
    other_form = HistoryIndex(path)
    assert other_form.position.number == 0
    other_form.close()
    path.write_bytes(b"no database" * 1000)
    spoilt = HistoryIndex(path)
    assert spoilt.lines(Asked()) == []
    spoilt.close()


def test_a_file_that_cannot_be_opened_for_a_while_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock, as a full disk, takes no line of it and leaves no second file."""
    monkeypatch.setattr(index, "QUERY_S", 0.0)
    path = tmp_path / "index.sqlite3"
    first = HistoryIndex(path)
    first.clear("stream")
    first.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(2):
            with pytest.raises(sqlite3.OperationalError):
                HistoryIndex(path)
    again = HistoryIndex(path)
    assert (again.path, again.position.identity) == (path, "stream")
    again.close()


def test_what_no_coordinator_wrote_is_passed_over(tmp_path: Path) -> None:
    """Whatever stands in the stream, the lines behind it are read."""
    made = HistoryIndex(tmp_path / "index")
    made.add([b"\xc1", b"", msgspec.msgpack.encode(line(1))], until=3)
    assert [one.number for one in made.lines(Asked())] == [1]
    made.close()


def test_a_question_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller hears that; the next question is answered."""
    made = filled(tmp_path / "index", [line(number) for number in range(1, 2000)], step=500)
    monkeypatch.setattr(index, "_STEPS", 1)
    monkeypatch.setattr(index, "QUERY_S", -1.0)
    with pytest.raises(Unavailable, match="shorter time"):
        made.lines(Asked(limit=1000))
    monkeypatch.setattr(index, "QUERY_S", 5.0)
    assert len(made.lines(Asked(limit=1000))) == 1000
    made.close()
