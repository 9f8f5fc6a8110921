"""Jobs that wait, one line for each tenant: priority first, then submission. Knows no policy.

Must not know what decides which line is served next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from common.model import JobId, JobState
from coordinator.policies.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.descent import Waiting


def submission(job: JobView) -> tuple[float, float, str]:
    """Key of the order in a line."""
    return (-job.priority, job.submitted_at_s, job.job_id)


def by_tenant(job: JobView) -> str:
    """Whose job it is."""
    return job.tenant


def line(snapshot: ClusterSnapshot) -> list[JobView]:
    """All in one."""
    return sorted((j for j in snapshot.jobs if j.state == JobState.PENDING), key=submission)


def lines(
    snapshot: ClusterSnapshot, whose: Callable[[JobView], str] = by_tenant
) -> dict[str, list[JobView]]:
    """One by tenant, or by whoever else a job is counted for."""
    found: dict[str, list[JobView]] = {}
    for job in line(snapshot):
        found.setdefault(whose(job), []).append(job)
    return found


def heads(waiting: Mapping[str, Sequence[JobView]]) -> dict[str, float]:
    """When the first job of each line that has one was submitted."""
    return {name: jobs[0].submitted_at_s for name, jobs in waiting.items() if jobs}


class Blocked:
    """GPU types for which the first of a line waits: those behind it do not pass it there."""

    def __init__(self) -> None:
        self._firsts: dict[str, dict[str, JobId]] = {}

    def block(self, name: str, job: JobView, kinds: Iterable[str]) -> None:
        """A job of a line finds no room on these types, any of which may host it some day: where it
        could never run it keeps nobody waiting."""
        self._firsts.setdefault(name, {}).update(dict.fromkeys(kinds, job.job_id))

    def look(self, name: str, kinds: Sequence[str]) -> tuple[list[str], JobId | None]:
        """Those of the types on which nobody of the line waits, and behind whom a job for these
        types stands on the first of the others; None where there are none."""
        firsts = self._firsts.get(name, {})
        left = [kind for kind in kinds if kind not in firsts]
        return left, next((firsts[kind] for kind in kinds if kind in firsts), None)


def partly_behind(kinds: Iterable[str], first: JobId | None) -> str:
    """Of a job that finds no room on these types and may not look at its others, which and why in
    words; empty where it looked at all."""
    return "" if first is None else f" on {' or '.join(kinds)}; elsewhere it is behind {first}"


def in_turn(
    waiting: Mapping[str, Sequence[JobView]],
    first: Callable[[Waiting], str],
    served: Callable[[], int],
) -> Iterator[JobView]:
    """Jobs of several lines, each time of the one that is next, until all were looked at.

    first: of the lines that are left, by when their heads were submitted; asked again whenever
        somebody was served.
    served: how many jobs were so far. A line whose job is not stays in front.
    """
    queues = {name: deque(jobs) for name, jobs in waiting.items()}
    while queues:
        name = first(heads(queues))
        before = served()
        while queues[name] and served() == before:
            yield queues[name].popleft()
        if not queues[name]:
            del queues[name]
