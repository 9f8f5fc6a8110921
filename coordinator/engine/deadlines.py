"""When time alone changes something about a job: a heap of instants. Must not know what changes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf

from common.model import JobId
from coordinator.engine.state import ClusterState, JobEntry
from coordinator.engine.timeouts import deadline_s


class Deadlines:
    """The next deadline of every live job; derived from the state, never saved.

    An instant that no longer is its job's deadline is dropped when it comes to the top, as is one
    that a pass has seen.
    """

    def __init__(self, state: ClusterState) -> None:
        self._heap: list[tuple[float, JobId]] = []
        self._known_s: dict[JobId, float] = {}
        self._seen_s = -inf
        self.note(state, state.live_jobs)

    def note(self, state: ClusterState, changed: Iterable[JobId]) -> None:
        """Learn which jobs an event changed."""
        for job_id in changed:
            job = state.jobs.get(job_id)
            at_s = None if job is None or job_id not in state.live_jobs else deadline_s(job)
            if at_s is None:
                self._known_s.pop(job_id, None)
            elif self._known_s.get(job_id) != at_s:
                self._known_s[job_id] = at_s
                heapq.heappush(self._heap, (at_s, job_id))

    def seen(self, now_s: float) -> None:
        """A pass of this instant looked at all that was due.

        What is due still it could do nothing about: each later pass looks again, but nobody is
        woken for it, else it would hide all later instants.
        """
        self._seen_s = now_s

    def next_s(self) -> float | None:
        """The earliest instant that no pass has seen; None when time changes nothing."""
        heap, known_s = self._heap, self._known_s
        while heap:
            at_s, job_id = heap[0]
            if at_s > self._seen_s and known_s.get(job_id) == at_s:
                return at_s
            heapq.heappop(heap)
        return None

    def due(self, state: ClusterState, now_s: float) -> list[JobEntry]:
        """Jobs whose deadline is over, by job id."""
        over = sorted(job_id for job_id, at_s in self._known_s.items() if at_s <= now_s)
        return [state.jobs[job_id] for job_id in over]
