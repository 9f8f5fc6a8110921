"""Queues of waiting jobs, one per tenant, and which queue is served next down the tree.

Within a queue jobs go by priority, then submission.

Between queues the order is that of Hadoop's schedulers and of Mesos' allocator: at each level of
the tree the tenant that has least, among those with a job to serve. Weights compare siblings: a
tenant's use is compared with that of its siblings, and only within it are its own parts compared.
So teams get their part of their organisation's share, however many teams there are, and GPUs that
one of them leaves go to its siblings first.

Among equals the tenant whose job was submitted first is next. By name alone, a tenant whose part is
less than one job would stand behind the same siblings each time GPUs come free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import inf

from common.model import JobId, JobState
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.tree import NOBODY, grown

First = Callable[[Collection[str]], str]
"""(lines with a job to serve) -> the one that is served next."""

Waiting = Mapping[str, float]
"""When the head of each line was submitted, seconds of the cell's clock."""

Turn = tuple[tuple[float, float, str], ...]
"""Keys, submissions and names from the outermost level inwards: the tenant with the least is next.
"""

NO_LINES: Waiting = {}


class Tree:
    """Parents and weights of tenants.

    weights, children: by name; those of `WHOLE` have no parent. depth: levels below it.
    """

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        tree = grown(snapshot.tenants, frozenset(job.tenant or NOBODY for job in snapshot.jobs))
        self.weights = {name: view.weight for name, view in tree.views.items()}
        self.children = tree.children
        self.depth = max(map(len, tree.paths.values()), default=0)
        self._paths, self._leaves = tree.paths, tree.leaves

    def path(self, tenant: str) -> tuple[str, ...]:
        """Where jobs of a tenant are counted first, what that is part of, and so on.

        tenant: as jobs name it, or as `Tenancy.leaf` does.
        """
        return self._paths[self._leaves[tenant or NOBODY]]

    def turn(self, tenant: str, key: Callable[[str], float], since_s: Waiting = NO_LINES) -> Turn:
        """The turn of a tenant among all tenants; ties go by submission and name at each level.

        The least of several turns is the one that a walk down the tree reaches, which takes at each
        level the least key of those with one of them below.

        key: of a tenant at any level.
        since_s: of `since`; a tenant without an entry has no waiting job.
        """
        leaf, *outer = self.path(tenant)
        return (
            *((key(name), since_s.get(name, inf), name) for name in reversed(outer)),
            (key(leaf), since_s.get(leaf, inf), tenant),
        )

    def since(self, heads: Waiting) -> dict[str, float]:
        """The first submission of the heads of lines at or below a tenant of any level."""
        found: dict[str, float] = {}
        for tenant, submitted_at_s in heads.items():
            for name in self.path(tenant):
                found[name] = min(submitted_at_s, found.get(name, inf))
        return found

    def first(self, heads: Waiting, key: Callable[[str], float]) -> str:
        """The line with the least turn."""
        since_s = self.since(heads)
        return min(heads, key=lambda tenant: self.turn(tenant, key, since_s))

    def parting(self, tenant: str, other: str) -> tuple[str, str]:
        """The siblings of which the two are part, or which they are: there weights tell them apart.

        Of two different tenants.
        """
        pair = zip(reversed(self.path(tenant)), reversed(self.path(other)), strict=False)
        return next((mine, theirs) for mine, theirs in pair if mine != theirs)


def submission(job: JobView) -> tuple[float, float, str]:
    """Key of the order in a line."""
    return (-job.priority, job.submitted_at_s, job.job_id)


def by_tenant(job: JobView) -> str:
    """The tenant of a job."""
    return job.tenant


def line(snapshot: ClusterSnapshot) -> list[JobView]:
    """All in one."""
    return sorted((j for j in snapshot.jobs if j.state == JobState.PENDING), key=submission)


def lines(
    snapshot: ClusterSnapshot, whose: Callable[[JobView], str] = by_tenant
) -> dict[str, list[JobView]]:
    """One line for each tenant, or for each other unit that jobs are counted for."""
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
        """A job of a line finds no room on these types, each of which may host it some day: an
        infeasible one blocks none.
        """
        self._firsts.setdefault(name, {}).update(dict.fromkeys(kinds, job.job_id))

    def look(self, name: str, kinds: Sequence[str]) -> tuple[list[str], JobId | None]:
        """The types for which no job of the line waits, and behind whom a job for these types
        stands on the first of the others; None if there are none.
        """
        firsts = self._firsts.get(name, {})
        left = [kind for kind in kinds if kind not in firsts]
        return left, next((firsts[kind] for kind in kinds if kind in firsts), None)


def partly_behind(kinds: Iterable[str], first: JobId | None) -> str:
    """For a job that finds no room on these types and may not try its others: which and why, as
    text; empty if it tried all.
    """
    return "" if first is None else f" on {' or '.join(kinds)}; elsewhere it is behind {first}"


def in_turn(
    waiting: Mapping[str, Sequence[JobView]],
    first: Callable[[Waiting], str],
    served: Callable[[], int],
) -> Iterator[JobView]:
    """Jobs of several lines, each time of the next line, until all were looked at.

    first: of the remaining lines, by when their heads were submitted; called again after each
        served job.
    served: the number of served jobs so far. A line whose job is not served stays in front.
    """
    queues = {name: deque(jobs) for name, jobs in waiting.items()}
    while queues:
        name = first(heads(queues))
        before = served()
        while queues[name] and served() == before:
            yield queues[name].popleft()
        if not queues[name]:
            del queues[name]
