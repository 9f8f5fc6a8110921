"""The sheets of `aryl top`: which rows each shows, in which order and columns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from common.api import ClosedRow, JobRow, Jobs, LoanRow, Loans, NodeRow, Nodes, Status
from common.model import JobState, NodeRole
from coordinator import plain_text
from coordinator.cli import columns
from coordinator.cli.render import Column

R = TypeVar("R")
Key = Callable[[R], float | str]


class View(Struct, frozen=True, kw_only=True):
    """The contents of one frame."""

    status: Status
    nodes: Nodes
    loans: Loans
    jobs: Jobs
    now_s: float


class Sheet(Struct, Generic[R], frozen=True, kw_only=True):
    """One table of the screen.

    rows: in the order that a person wants first.
    keys: the sort key by heading, where the text of a cell does not sort.
    subject: the kind and name that `explain` takes.
    """

    title: str
    rows: Callable[[View], Sequence[R]]
    columns: Callable[[float], Sequence[Column[R]]]
    subject: Callable[[R], tuple[str, str]]
    keys: Mapping[str, Key[R]]

    def chosen(
        self, view: View, *, text: str = "", heading: str = "", is_reversed: bool = False
    ) -> list[R]:
        """The rows that contain a text in any column, ordered by a column.

        heading: empty keeps the order of the sheet.
        """
        of = self.columns(view.now_s)
        found = [row for row in self.rows(view) if _has(row, of, text)]
        column = next((one for one in of if one.heading == heading), None)
        if column is not None:
            key: Key[R] = self.keys.get(heading) or (lambda row: column.value(row).casefold())
            found.sort(key=key)
        return found[::-1] if is_reversed else found

    def headings(self) -> list[str]:
        """The columns that it can be sorted by."""
        return [column.heading for column in self.columns(0.0) if not column.is_wide]


def _has(row: R, of: Sequence[Column[R]], text: str) -> bool:
    wanted = text.casefold()
    return not wanted or any(wanted in column.value(row).casefold() for column in of)


class Concern(Struct, frozen=True, kw_only=True):
    """Something that an operator wants to know first.

    what: how it is, as `coming home` or `waits`.
    since_s: how long it has been so; None: unknown.
    limit_s: how long it may be so, where that is promised.
    """

    kind: str
    name: str
    what: str
    title: str
    since_s: float | None
    limit_s: float | None
    why: str


def concerns(view: View) -> list[Concern]:
    """Nodes on their way home, then nodes in trouble, stalled jobs, and the queue."""
    found = [_coming_home(row, view.now_s) for row in view.loans.rows if _is_coming_home(row)]
    found.sort(key=lambda one: (one.limit_s or float("inf")) - (one.since_s or 0.0))
    found += [_trouble(row) for row in view.nodes.rows if _is_in_trouble(row)]
    rows = view.jobs.rows
    found += [_stalled(row) for row in rows if isinstance(row.stalled_s, float)]
    found += [_waiting(row) for row in rows if row.state == JobState.PENDING]
    return found


def _is_coming_home(row: LoanRow) -> bool:
    return row.returned_at_s is None and row.reclaim_ordered_at_s is not None


def _coming_home(row: LoanRow, now_s: float) -> Concern:
    assert row.reclaim_ordered_at_s is not None, "as `_is_coming_home` says"
    return Concern(
        kind="node",
        name=row.node,
        what="LATE home" if row.is_late else "coming home",
        title=row.service,
        since_s=now_s - row.reclaim_ordered_at_s,
        limit_s=row.reclaim_deadline_s,
        why=row.reclaim_reason,
    )


def _is_in_trouble(row: NodeRow) -> bool:
    is_closed = isinstance(row.closed, ClosedRow)
    is_gone = row.role in (NodeRole.LOST, NodeRole.QUARANTINED)
    return is_closed or is_gone or row.is_server_down or bool(row.gpus_out)


def _trouble(row: NodeRow) -> Concern:
    closed = row.closed.why if isinstance(row.closed, ClosedRow) else ""
    why = closed or row.detail or f"heard {plain_text.heard(row)}"
    role = plain_text.role(row)
    return Concern(
        kind="node", name=row.node, what=role, title=row.service, since_s=None, limit_s=None,
        why=why,
    )  # fmt: skip


def _stalled(row: JobRow) -> Concern:
    since_s = row.stalled_s if isinstance(row.stalled_s, float) else None
    return Concern(
        kind="job", name=row.job_id, what="STALLED", title=row.name, since_s=since_s, limit_s=None,
        why=plain_text.why(row),
    )  # fmt: skip


def _waiting(row: JobRow) -> Concern:
    return Concern(
        kind="job", name=row.job_id, what="waits", title=row.name, since_s=row.queueing_s,
        limit_s=None, why=plain_text.why(row),
    )  # fmt: skip


def _concern_columns(_now_s: float) -> list[Column[Concern]]:
    def since(one: Concern) -> str:
        limit = "" if one.limit_s is None else f" of {plain_text.duration(one.limit_s)}"
        return plain_text.duration(one.since_s) + limit

    return [
        Column("WHAT", lambda one: one.what, is_elastic=True),
        Column("WHO", lambda one: one.name),
        Column("FOR", since, is_number=True),
        Column("NAME", lambda one: one.title, is_elastic=True, rank=1),
        Column("WHY", lambda one: one.why, is_elastic=True),
    ]


def _unknown_last(value: float | None) -> float:
    return float("inf") if value is None else value


NOW: Sheet[Concern] = Sheet(
    title="now",
    rows=concerns,
    columns=_concern_columns,
    subject=lambda one: (one.kind, one.name),
    keys={"FOR": lambda one: _unknown_last(one.since_s)},
)
JOBS: Sheet[JobRow] = Sheet(
    title="jobs",
    rows=lambda view: view.jobs.rows,
    columns=columns.jobs,
    subject=lambda row: ("job", row.job_id),
    keys={
        "WORKERS": lambda row: row.worker_count,
        "GPUS": lambda row: row.gpus,
        "PROGRESS": lambda row: (row.step or 0) / (row.total_steps or 1),
        "QUEUED": lambda row: row.queueing_s,
        "SUBMITTED": lambda row: row.submitted_at_s,
    },
)
NODES: Sheet[NodeRow] = Sheet(
    title="nodes",
    rows=lambda view: view.nodes.rows,
    columns=lambda _now_s: columns.nodes(),
    subject=lambda row: ("node", row.node),
    keys={
        "GPUS": lambda row: row.gpus_held,
        "BUSY": lambda row: _unknown_last(row.gpu_busy_ratio),
        "HEARD": lambda row: _unknown_last(row.heard_ago_s),
    },
)
LOANS: Sheet[LoanRow] = Sheet(
    title="loans",
    rows=lambda view: view.loans.rows,
    columns=columns.loans,
    subject=lambda row: ("loan", row.lease_id),
    keys={
        "DECIDED": lambda row: row.decided_at_s,
        "TOOK": lambda row: _unknown_last(row.reclaim_s),
        "PREEMPTED": lambda row: row.realised_preemptions,
    },
)
