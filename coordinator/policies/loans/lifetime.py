"""How long lent nodes may be held by base workers: loan lifetimes. Must not know order or value.

The paper lends by the next five minutes and preempts when the load comes back (Lyra, EuroSys'23,
sections 4 and 6). But the load of a day is known before: by quantile, so many nodes of a service
can stay away until one instant, and fewer until a later one. A base gang may go to lent nodes only
while at no instant before its end more of them are held by base workers than can stay away until
then. Which node is held does not matter, as a reclaim takes those that nobody holds. Flexible
workers go home without a preemption, and may use any. What is not known forbids nothing: until the
load's day was seen, base workers may go to any lent node, as without this rule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import inf

from common.model import JobId
from coordinator.policies.loans.loaning import nodes_for
from coordinator.policies.loans.seasonal import BIN_S, LEADS
from coordinator.policies.placement import Room
from coordinator.policies.scaling import work_on
from coordinator.policies.snapshot import ClusterSnapshot, JobView, ServiceView
from coordinator.policies.sources import late_ratio

SLACK_S = 120.0
"""A job must be over so long before its node is wanted: starts and restarts take time."""

SPANS_S = tuple(
    hours * 3600.0
    for hours in (0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 36, 48)
)
"""How far ahead it is asked how many nodes can stay away."""

MOST_S = LEADS[-1] * BIN_S
"""What lies beyond is taken to be like the days until then."""

CAUTION = 0.1
"""Where no forecast was tested yet, but the day was seen: its level and this part of the peak."""

GUESS_RATIO = 3.0
"""How many times its estimate a job may take whose estimate is a guess."""


def base_runtime_s(job: JobView, gpu_type: str, now_s: float) -> float:
    """Running time left with the base gang alone on a GPU type, in seconds."""
    return work_on(job, gpu_type, now_s) / job.workers_on(gpu_type).min


def longest_runtime_s(job: JobView, gpu_type: str, now_s: float) -> float:
    """The same, if the estimate is as far off as its source may be, and with time to start."""
    is_guess = late_ratio(job.estimate_source) is None
    ratio = GUESS_RATIO if is_guess else 1.0
    return ratio * base_runtime_s(job, gpu_type, now_s) + SLACK_S


class _Loans:
    """What one service has lent.

    held_s: per place of a usable lent node, for how long base workers hold it yet.
    away: for each of `SPANS_S` how many nodes can stay away so long; the last one also beyond.
    """

    def __init__(self, held_s: dict[int, float], away: Sequence[int], kinds: set[str]) -> None:
        self.kinds = kinds
        self._order = sorted(held_s, key=lambda place: (-held_s[place], place))
        self._ends_s = sorted(held_s.values())
        self._away = away
        self._known: dict[float, int] = {}

    def barred(self, runtime_s: float) -> int:
        """Places that a job of a running time must leave alone.

        All places stand in one order, those held longest first. A job may use the first so many
        of them: those that are held as long anyway, and of the others as many as can stay away
        beside these. To hold a node for longer takes no more nodes until its present holders end.
        The longer a job runs, the fewer it may use of this one order: jobs of one pass therefore
        need not be told of each other, since together they hold at any instant no more than those
        held anyway, or than can stay away.
        """
        if runtime_s not in self._known:
            barred = self._order[self._usable(runtime_s) :]
            self._known[runtime_s] = sum(1 << place for place in barred)
        return self._known[runtime_s]

    def is_open_for(self, runtime_s: float) -> bool:
        """Whether one more node, that nobody holds, can be held so long."""
        return self._usable(runtime_s) > len(self._ends_s) - bisect_right(self._ends_s, 0.0)

    def _usable(self, runtime_s: float) -> int:
        """How many places of the order: the least of any instant until then."""
        least, held = inf, 0
        for span_s, away in zip(SPANS_S, self._away, strict=True):
            held = len(self._ends_s) - bisect_left(self._ends_s, min(span_s, runtime_s))
            least = min(least, max(away, held))
            if span_s >= runtime_s:
                break
        return int(least)


class Lifetimes:
    """All loans of one pass.

    Args:
        q: quantile of the load that loans are to outlive.
        lend_q: quantile by which nodes are taken back, a little ahead; None: without one.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        room: Room,
        *,
        q: float,
        lend_q: float | None,
    ) -> None:
        self._snapshot = snapshot
        self._room = room
        self._q = q
        self._lend_q = lend_q
        self._made: list[_Loans] | None = None

    def barred(self, job: JobView) -> int:
        """Places on lent nodes that base workers of a job must leave alone."""
        places = 0
        for loans in self._loans():
            if any(job.accepts(kind) for kind in loans.kinds):
                places |= loans.barred(self._runtime_s(job, loans))
        return places

    def may_use_loans(self, job: JobView) -> bool:
        """Whether some service has nodes that can stay away for as long as the job runs."""
        return any(
            loans.is_open_for(self._runtime_s(job, loans))
            for loans in self._loans()
            if any(job.accepts(kind) for kind in loans.kinds)
        )

    def why(self, job: JobView) -> str:
        """That no loan outlives a job, in a sentence; empty when it is kept from no node."""
        if not self.barred(job):
            return ""
        left_s = max(
            self._runtime_s(job, loans)
            for loans in self._loans()
            if any(job.accepts(kind) for kind in loans.kinds)
        )
        return (
            f"lent nodes are expected home before the job would be over, which may take "
            f"{left_s:.0f} s"
        )

    def _runtime_s(self, job: JobView, loans: _Loans) -> float:
        now_s = self._snapshot.now_s
        return max(longest_runtime_s(job, kind, now_s) for kind in loans.kinds if job.accepts(kind))

    def _loans(self) -> list[_Loans]:
        """Worked out when first asked for: most passes place nothing on lent nodes."""
        if self._made is None:
            jobs = {job.job_id: job for job in self._snapshot.jobs if job.gpu_type is not None}
            self._made = [self._of(service, jobs) for service in self._snapshot.services]
        return self._made

    def _of(self, service: ServiceView, jobs: dict[JobId, JobView]) -> _Loans:
        now_s = self._snapshot.now_s
        held_s: dict[int, float] = {}
        kinds = {node.gpu_type for node in self._snapshot.nodes if node.service == service.name}
        for place, occupied in enumerate(self._room.index.nodes):
            if occupied is None or occupied.service != service.name:
                continue
            held_s[place] = max(
                (
                    longest_runtime_s(job, occupied.node.gpu_type, now_s)
                    for worker in occupied.node.workers
                    if not worker.is_flexible and not worker.is_leaving
                    if (job := jobs.get(worker.job_id)) is not None
                ),
                default=0.0,
            )
        return _Loans(held_s, self._away(service), kinds)

    def _margin(self, service: ServiceView) -> float:
        """How much more load than is expected a node is taken back for already.

        A reclaim does not wait for the load: it comes when the quantile that lending goes by asks
        for the node, over the horizon of a loan pass.
        """
        if self._lend_q is None:
            return 0.0
        horizon_s = (service.return_s + service.loan_period_s,)
        now_s, season = self._snapshot.now_s, service.season
        (asked,) = season.quantiles(self._lend_q, now_s=now_s, horizons_s=horizon_s)
        (outlived,) = season.quantiles(self._q, now_s=now_s, horizons_s=horizon_s)
        return 0.0 if asked is None or outlived is None else max(0.0, asked - outlived)

    def _away(self, service: ServiceView) -> list[int]:
        own = [
            node
            for node in self._snapshot.nodes
            if node.service == service.name and not node.is_drained_by_operator
        ]
        season, now_s = service.season, self._snapshot.now_s
        horizons_s = [min(span_s + service.return_s, MOST_S) for span_s in SPANS_S]
        peaks = season.quantiles(self._q, now_s=now_s, horizons_s=horizons_s)
        margin = self._margin(service)
        was_seen = season.seen_ahead(int(now_s // BIN_S)) == inf
        away: list[int] = []
        for horizon_s, quantile in zip(horizons_s, peaks, strict=True):
            peak = quantile
            if peak is None and was_seen:
                level = season.expected(now_s=now_s, horizon_s=horizon_s)
                peak = None if level is None else level + CAUTION * season.scale
            if peak is None:
                away.append(len(own))  # as without foresight: only the reclaim looks ahead
            else:
                away.append(len(own) - nodes_for(service, peak + margin, len(own)))
        return away
