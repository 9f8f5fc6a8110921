"""`aryl history`, `aryl audit` and `aryl report usage`: what is asked, and what is printed."""

from __future__ import annotations

import csv
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from common.api import GetHistory, GetUsage, History, Usage, UsageRow
from common.history import HistoryLine, OrderRecord, StoryKind
from coordinator.cli.time_range import instant_of, local
from tests.cli.fake_cell import NOW_S, FakeCell, aryl
from tests.tables import each_row

ORDER = OrderRecord(
    tenant="ops", user="ada", verb="drain", target="t0", reason="fans", client="host-7, aryl 1.0",
    refused="node t0 is lost", unrecorded=3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A zone that is not UTC, and has a summer time."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def line(number: int, **changes: Any) -> HistoryLine:
    values: dict[str, Any] = {"subject": "t0", "what": "drain", "reason": "by ops/ada", **changes}
    return HistoryLine(number=number, at_s=NOW_S, **values)


@each_row(
    ("text", "at_s"),
    [
        ("", None),
        ("2h", NOW_S - 7200.0),
        ("1.5d", NOW_S - 129_600.0),
        ("2023-11-14", 1_699_916_400.0),  # 00:00 +01:00
        ("2023-07-01T12:00", 1_688_205_600.0),  # 12:00 +02:00
        ("2023-11-14T12:00:30+00:00", 1_699_963_230.0),
    ],
)
def test_a_time_is_of_the_local_zone_unless_it_has_an_offset(text: str, at_s: float | None) -> None:
    """By the offset of that day; what is shown is understood again."""
    found = instant_of(text, now_s=NOW_S, field="since")
    assert found == at_s
    if at_s is not None:
        assert instant_of(local(at_s), now_s=0.0, field="since") == at_s


def test_what_is_no_time_is_refused_by_its_option() -> None:
    """Nothing is asked; the error shows the forms."""
    run = aryl(FakeCell({}), "history", "--until", "yesterday")
    assert run.code == 2
    assert "--until: 'yesterday' is no time, expected one such as 2h" in run.err


def test_the_newest_lines_come_from_as_many_pages_as_they_need() -> None:
    """Newest last, with local times; a question has all conditions."""
    pages = [
        History(rows=(line(3), line(4)), has_more=True),
        History(rows=(line(1), line(2)), has_more=True),
    ]
    asked: list[GetHistory] = []

    def answer(request: GetHistory) -> History:
        asked.append(request)
        return pages[len(asked) - 1]

    words = ("--node", "t0", "--user", "ada", "--kind", "order", "--since", "2h", "--limit", "3")
    run = aryl(FakeCell({GetHistory: answer}), "history", *words, "-q")
    assert run.out.split() == ["1", "2", "3", "4"]
    first, second = asked
    assert (first.names, first.user, first.kinds) == (("t0",), "ada", (StoryKind.ORDER,))
    assert (first.since_at_s, first.limit, second.limit) == (NOW_S - 7200.0, 3, 1)
    assert second.before == 3


def test_all_lines_come_page_by_page_as_objects() -> None:
    """A program reads them as they come."""
    pages = [History(rows=(line(1), line(2)), has_more=True), History(rows=(line(3),))]
    cell = FakeCell({GetHistory: [*pages]})
    run = aryl(cell, "history", "--limit", "0", "-o", "json")
    found = run.out.splitlines()
    assert len(found) == 3
    assert '"at":"2023-11-14T23:13:20+01:00"' in found[0]


def test_what_an_answer_cannot_have_is_said() -> None:
    """Lines that are not in the index yet, and times before the oldest line."""
    found = History(rows=(), missing_lines=7, kept_since_at_s=NOW_S)
    run = aryl(FakeCell({GetHistory: found}), "history", "--since", "9d")
    assert "7 newer lines are not in this coordinator's index yet" in run.err
    assert "the history begins at 2023-11-14T23:13:20+01:00" in run.err


def test_the_audit_shows_who_what_and_from_where() -> None:
    """A refused order with its reason, and how many were not recorded before it."""
    found = History(rows=(line(1, kind=StoryKind.REFUSED, detail=ORDER, tenant="ops", user="ada"),))
    [_, row] = aryl(FakeCell({GetHistory: found}), "audit", "--target", "t0").out.splitlines()
    cells = [cell.strip() for cell in row.split("  ") if cell.strip()]
    assert cells == [
        "2023-11-14T23:13:20+01:00",
        "ops/ada",
        "drain",
        "t0",
        "-",
        "fans",
        "refused: node t0 is lost (3 more refused orders before)",
        "host-7, aryl 1.0",
    ]


ROW = UsageRow(
    key=("a", "H100"), training_gpu_s=7200.0, on_loan_gpu_s=3600.0, lost_gpu_s=360.0, waited_s=60.0
)
REPORT = Usage(by=("tenant", "gpu_type"), rows=(ROW,), since_at_s=0.0, until_at_s=NOW_S)
WORDS = ("report", "usage", "--by", "tenant,gpu_type")


def test_a_report_is_read_in_pages_and_printed_in_hours() -> None:
    """Each page begins behind the last row of the one before."""
    asked: list[GetUsage] = []

    def answer(request: GetUsage) -> Usage:
        asked.append(request)
        key = ("b", "H100") if request.after else ROW.key
        return replace(REPORT, rows=(replace(ROW, key=key),), has_more=not request.after)

    run = aryl(FakeCell({GetUsage: answer}), *WORDS, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(run.out)))
    assert [row["tenant"] for row in rows] == ["a", "b"]
    assert (rows[0]["used_gpu_h"], rows[0]["lost_gpu_h"]) == ("3.0", "0.1")
    assert asked[1].after == ROW.key
    assert "3" in aryl(FakeCell({GetUsage: REPORT}), *WORDS).out
    found = aryl(FakeCell({GetUsage: REPORT}), *WORDS, "-o", "json").json
    assert found["usage"][0] | {"tenant": "a", "gpu_type": "H100"} == found["usage"][0]
    assert found["until"] == "2023-11-14T23:13:20+01:00"


def test_a_report_is_written_as_parquet(tmp_path: Path) -> None:
    """With the same columns as in CSV, and the span as metadata."""
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "usage.parquet"
    run = aryl(FakeCell({GetUsage: REPORT}), *WORDS, "-o", "parquet", "--to", str(path))
    assert (run.code, run.out) == (0, "")
    found = parquet.read_table(path)
    [row] = found.to_pylist()
    assert (row["tenant"], row["used_gpu_h"], row["waited_h"]) == ("a", 3.0, 60.0 / 3600.0)
    assert found.schema.metadata[b"until"] == b"2023-11-14T23:13:20+01:00"


def test_parquet_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is asked."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    run = aryl(FakeCell({}), *WORDS, "-o", "parquet", "--to", "x")
    assert run.code == 2
    assert "pip install 'aryl[parquet]'" in run.err
    run = aryl(FakeCell({}), *WORDS, "-o", "parquet")
    assert "--to: missing" in run.err


@each_row(("by", "what"), [("", "''"), ("tenant,shoe", "'shoe'"), ("user,user", "'user,user'")])
def test_columns_that_a_report_does_not_have_are_refused(by: str, what: str) -> None:
    """The error lists those that there are."""
    run = aryl(FakeCell({}), "report", "usage", "--by", by)
    assert run.code == 2
    assert f"--by: {what}, expected some of tenant, user, job" in run.err
