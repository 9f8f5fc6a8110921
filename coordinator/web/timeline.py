"""Time lines as numbers: a job's states, workers and saves, and a loan's way home. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from common.api import JobRow, LoanRow, SaveRow, StoryRow
from common.model import JobState, NodeRole

T = TypeVar("T")

_CHANGE = re.compile(r"\w+ -> (\w+)")
_WORKERS = re.compile(r"workers ready: (\d+)$|(\d+) workers$")
_MARKS = (
    ("stalled", "stalled"),
    ("root cause", "fault"),
    ("flexible worker lost", "fault"),
    ("worker_failed", "fault"),
    ("preempt ", "preemption"),
    ("migrate", "preemption"),
    ("resize ", "resize"),
)
"""Beginnings of lines that a time line marks, with the kind of the mark."""
HEADROOM = 1.25
"""A way home is drawn against its deadline and this much of it."""


class Span(Struct, frozen=True, kw_only=True):
    """A stretch of time, by the wall clock. workers: of a running job."""

    name: str
    begin_s: float
    end_s: float
    workers: int = 0


class Mark(Struct, frozen=True, kw_only=True):
    """An instant worth a mark."""

    kind: str
    at_s: float
    text: str


class Line(Struct, frozen=True, kw_only=True):
    """A job's life: its states without gaps, its workers while it runs, and marks."""

    begin_s: float
    end_s: float
    states: tuple[Span, ...]
    workers: tuple[Span, ...]
    marks: tuple[Mark, ...]

    def at(self, at_s: float) -> float:
        """Where an instant is, in percent of the line."""
        length_s = max(self.end_s - self.begin_s, 1e-3)
        return round(min(100.0, max(0.0, (at_s - self.begin_s) / length_s * 100)), 2)


def of_job(
    row: JobRow, story: Sequence[StoryRow], saves: Sequence[SaveRow], *, now_s: float
) -> Line:
    """The time line of a job.

    Args:
        story: its lines, oldest first; the beginning may be missing.
        now_s: wall clock; the end of a job that has not ended.
    """
    end_s = now_s if row.finished_at_s is None else row.finished_at_s
    end_s = max(end_s, row.submitted_at_s)
    changes = [(row.submitted_at_s, str(JobState.PENDING))]
    counts: list[tuple[float, int]] = []
    marks = [
        Mark(
            kind="save",
            at_s=save.at_s,
            text=f"saved step {save.step}" + ("" if save.is_verified else ", not verified"),
        )
        for save in saves
    ]
    for line in story:
        if line.subject != row.job_id:
            continue
        if (found := _CHANGE.match(line.what)) and found[1] in JobState.__members__.values():
            changes.append((line.at_s, found[1]))
            if found[1] not in (JobState.RUNNING, JobState.RESIZING, JobState.SUSPENDED):
                counts.append((line.at_s, 0))
        if found := _WORKERS.search(line.reason):
            counts.append((line.at_s, int(found[1] or found[2])))
        for begin, kind in _MARKS:
            if line.what.startswith(begin):
                marks.append(Mark(kind=kind, at_s=line.at_s, text=f"{line.what}: {line.reason}"))
                break
    return Line(
        begin_s=row.submitted_at_s,
        end_s=end_s,
        states=tuple(_spans(changes, end_s)),
        workers=tuple(
            Span(name="workers", begin_s=begin_s, end_s=until_s, workers=count)
            for (begin_s, count), until_s in _with_ends(counts, end_s)
            if count and until_s > begin_s
        ),
        marks=tuple(marks),
    )


def _spans(changes: Sequence[tuple[float, str]], end_s: float) -> Iterable[Span]:
    for (begin_s, name), until_s in _with_ends(changes, end_s):
        if until_s > begin_s and name not in ("succeeded", "failed", "cancelled"):
            yield Span(name=name, begin_s=begin_s, end_s=until_s)


def _with_ends(
    changes: Sequence[tuple[float, T]], end_s: float
) -> Iterable[tuple[tuple[float, T], float]]:
    """Each change with the instant of the next one."""
    ends = [at_s for at_s, _ in changes[1:]]
    return zip(changes, [*ends, end_s], strict=False)


class Stage(Struct, frozen=True, kw_only=True):
    """A part of a way home. begun_at_s: of the one that is under way; None: it is over."""

    name: str
    took_s: float
    begun_at_s: float | None = None


class WayHome(Struct, frozen=True, kw_only=True):
    """A loan's way home against its deadline.

    ordered_at_s: when its return was ordered, or began by itself; None of one that is home and was
        never promised.
    deadline_s: from then; None: nothing was promised.
    """

    ordered_at_s: float | None
    deadline_s: float | None
    stages: tuple[Stage, ...]

    @property
    def took_s(self) -> float:
        """All stages together, those under way without."""
        return sum(stage.took_s for stage in self.stages if stage.begun_at_s is None)

    @property
    def scale_s(self) -> float:
        """What the full width of its bar stands for."""
        return max((self.deadline_s or 0.0) * HEADROOM, self.took_s * 1.02, 1.0)


def under_way(loan: LoanRow, roles: Sequence[tuple[float, NodeRole]], *, now_s: float) -> WayHome:
    """A loan whose node is coming home.

    Args:
        roles: since when its node has each role, oldest first, as far as events are known.
    """
    ordered_at_s = loan.reclaim_ordered_at_s
    deadline_s = loan.reclaim_deadline_s
    if ordered_at_s is None:
        return WayHome(ordered_at_s=None, deadline_s=None, stages=())
    began_s, stages = ordered_at_s, list[Stage]()
    name = "ordered"
    for at_s, role in roles:
        if at_s <= ordered_at_s:
            continue
        stages.append(Stage(name=name, took_s=at_s - began_s))
        began_s, name = at_s, str(role)
    under = Stage(name=name, took_s=max(0.0, now_s - began_s), begun_at_s=began_s)
    return WayHome(ordered_at_s=ordered_at_s, deadline_s=deadline_s, stages=(*stages, under))


def home(loan: LoanRow) -> WayHome:
    """A loan whose node is home, by the stages that the node measured."""
    if loan.turn_back_s is not None:
        deadline_s = loan.turn_back_deadline_s
    elif loan.lapse_s is not None:
        deadline_s = loan.lapse_deadline_s
    else:
        deadline_s = loan.reclaim_deadline_s
    stages = tuple(
        Stage(name=name, took_s=took_s)
        for name, took_s in loan.stage_durations_s.items()
        if name != "decide" and took_s > 0  # before the order, which is where the promise begins
    )
    return WayHome(ordered_at_s=loan.reclaim_ordered_at_s, deadline_s=deadline_s, stages=stages)


def roles_since(
    events: Iterable[StoryRow], nodes: Mapping[str, object]
) -> dict[str, list[tuple[float, NodeRole]]]:
    """When each node took each role, by the events that are known; oldest first."""
    found: dict[str, list[tuple[float, NodeRole]]] = {}
    roles = {str(role): role for role in NodeRole}
    for line in events:
        change = _CHANGE.match(line.what.removeprefix("rebooted: "))
        if change and line.subject in nodes and change[1] in roles:
            found.setdefault(line.subject, []).append((line.at_s, roles[change[1]]))
    return found
