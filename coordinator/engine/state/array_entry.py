"""A job array as the engine keeps it: which of its tasks wait, live and have ended.

A task is a job of its own only from when it enters the line until it is forgotten like other jobs;
before and after that the array knows it by its place (`common.arrays`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from msgspec import Struct, field

from common import arrays
from common.arrays import Indices
from common.model import ArraySpec, JobId, JobSpec, JobState
from coordinator.engine.state.job_groups import StartGate


class ArrayTask(Struct, frozen=True, kw_only=True):
    """Which task of which array a job is. place: of its index among those of the array."""

    array_id: JobId
    index: int
    place: int


class Places(Struct, kw_only=True):
    """A set of places as spans: pairs of the first and the last place, ascending and apart."""

    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.spans)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.spans:
            yield from range(first, last + 1)

    def __contains__(self, place: int) -> bool:
        which = bisect_right(self.spans, place, key=lambda span: span[0]) - 1
        return which >= 0 and place <= self.spans[which][1]

    def add(self, first: int, last: int | None = None) -> None:
        """Add a place, or all from the first to the last."""
        last = first if last is None else last
        spans = self.spans
        low = bisect_left(spans, first - 1, key=lambda span: span[1])
        high = bisect_right(spans, last + 1, key=lambda span: span[0])
        if low < high:  # these touch it
            first, last = min(first, spans[low][0]), max(last, spans[high - 1][1])
        spans[low:high] = [(first, last)]

    def take_first(self) -> int:
        """Remove the lowest place and return it."""
        first, last = self.spans[0]
        if first == last:
            del self.spans[0]
        else:
            self.spans[0] = (first + 1, last)
        return first

    def take(self, others: Places) -> Places:
        """Remove all places of another set; returns those that were in this one."""
        taken, left = Places(), Places()
        for first, last in self.spans:
            at = first
            which = bisect_left(others.spans, first, key=lambda span: span[1])
            while which < len(others.spans) and others.spans[which][0] <= last:
                low, high = max(first, others.spans[which][0]), min(last, others.spans[which][1])
                if at < low:
                    left.spans.append((at, low - 1))
                taken.spans.append((low, high))
                at = high + 1
                which += 1
            if at <= last:
                left.spans.append((at, last))
        self.spans = left.spans
        return taken


class ArrayEntry(Struct, kw_only=True):
    """A job array.

    spec: as its user gave it; a task has its own, see `jobs.arrays.task_spec`.
    number: its number in the cell, see `jobs.numbers`; each task has one of its own.
    throttle: the most tasks at once now; None: no bound.
    waiting: places of tasks that have not entered the line.
    live: the jobs of its tasks that have not ended, each with its place, in order of entering.
    in_line: those of them that wait.
    succeeded, failed, cancelled: places of tasks by how they ended.
    unstarted: places of those cancelled tasks that were in no line then; None: an earlier version
        began this array.
    taken_back: places of tasks that left the line again, and were counted as submitted before.
    cancelled_by: the person who asked for the end of the whole array; empty: no person did.
    exit_code: of its failed tasks the code that is farthest from 0; None: no task had one.
    started_at_s: when the first of its tasks ran.
    gate: while it is shut, no task enters the line; see `jobs.start_gate`.
    gated_s: seconds behind the gate before its first task ran, up to when it was last opened.
    shut_since_s: when the gate was shut; None: it is open.
    submitted_spec: the spec before the first change; None: it was not changed.
    """

    array_id: JobId
    spec: JobSpec
    tenant: str
    user: str
    submitted_at_s: float
    number: int = 0
    throttle: int | None = None
    waiting: Places = field(default_factory=Places)
    live: dict[JobId, int] = field(default_factory=dict[JobId, int])
    in_line: dict[JobId, None] = field(default_factory=dict[JobId, None])
    succeeded: Places = field(default_factory=Places)
    failed: Places = field(default_factory=Places)
    cancelled: Places = field(default_factory=Places)
    unstarted: Places | None = None
    taken_back: Places = field(default_factory=Places)
    cancelled_by: str = ""
    exit_code: int | None = None
    started_at_s: float | None = None
    finished_at_s: float | None = None
    gate: StartGate = field(default_factory=StartGate)
    gated_s: float = 0.0
    shut_since_s: float | None = None
    submitted_spec: JobSpec | None = None

    @property
    def indices(self) -> Indices:
        """The indices of its tasks."""
        assert isinstance(self.spec.array, ArraySpec), "an array has indices"
        return arrays.indices(self.spec.array.indices)

    @property
    def is_over(self) -> bool:
        """True if all of its tasks have ended."""
        return not (self.waiting or self.live)

    @property
    def outcome(self) -> JobState | None:
        """How it ended: succeeded if all tasks did, failed if one failed; None while it lives."""
        if not self.is_over:
            return None
        if self.failed:
            return JobState.FAILED
        return JobState.CANCELLED if self.cancelled else JobState.SUCCEEDED

    @property
    def state(self) -> JobState:
        """Its state as of one job: it runs while a task of it has GPUs."""
        if (ended := self.outcome) is not None:
            return ended
        return JobState.RUNNING if len(self.live) > len(self.in_line) else JobState.PENDING

    def ended(self, state: JobState) -> Places:
        """The places of the tasks that ended in a state."""
        if state == JobState.SUCCEEDED:
            return self.succeeded
        return self.cancelled if state == JobState.CANCELLED else self.failed

    def text_of(self, places: Places) -> str:
        """The indices at some places, such as `0-9,20`; empty of none."""
        every = self.indices
        return ",".join(map(str, arrays.runs_of(every.at(place) for place in places)))

    def task_id(self, place: int) -> JobId:
        """The id of the job that the task at a place is."""
        return JobId(f"{self.array_id}_{self.indices.at(place)}")

    def place_of(self, job_id: str) -> int | None:
        """The place of the task that a job of this id is; None: it is none of this array."""
        array_id, _, index = job_id.rpartition("_")
        if array_id != self.array_id or not index.isdecimal():
            return None
        place = self.indices.place(int(index))
        return None if place is None or self.task_id(place) != job_id else place

    def queueing_s(self, now_s: float) -> float:
        """Time in the queue until its first task ran, or until an instant, in seconds; none of it
        behind the gate."""
        at_s = (self.started_at_s, self.finished_at_s, now_s)
        until_s = next(each_s for each_s in at_s if each_s is not None)
        shut_s = 0.0 if self.shut_since_s is None else max(0.0, until_s - self.shut_since_s)
        return max(0.0, until_s - self.submitted_at_s - self.gated_s - shut_s)
