"""Loan lifetimes: how long base workers may hold lent nodes.

The paper lends by the next five minutes and preempts when the load comes back (Lyra, EuroSys'23,
sections 4 and 6). But the load of a day is known before. By quantile, a certain number of a
service's nodes can stay away until one instant, and fewer until a later one. A base gang may go to
lent nodes only if at every instant before its end base workers hold no more of them than can stay
away until then. Which node is held does not matter, because a reclaim takes nodes without base
workers. Flexible workers leave without a preemption and may use any node. Unknown load forbids
nothing: until a day of the service's load was seen, base workers may go to any lent node.

The required probability that a loan outlives a job depends on the alternatives. Where training is
full and the job would wait for long, a low one will do. A job may have room at home except for
flexible workers or a claim (`aged_claims`). It waits for less than its own length, because a claim
admits jobs that end before it is ready. Its loan must surely outlive it. `odds` gives the
probability for each job; until a day was seen, nothing is sure.

A job that saves loses little by a stop. Where saves count, it need not end before the load comes
back: the loan must only last many times as long as a stop would cost the job.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil, inf

from msgspec import Struct

from common.model import JobId
from coordinator.policies.aryl.lending.odds import Odds
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.aryl.reclaim.preemption_cost import RESTART_S
from coordinator.policies.contract.estimates import base_runtime_s, late_ratio
from coordinator.policies.contract.seasonal_load import BIN_S, LEADS
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, ServiceView, nodes_for
from coordinator.policies.parts.restart_cost import is_resumed

SLACK_S = 120.0
"""A job must end this long before its node is needed: starts and restarts take time."""

SPANS_S = tuple(
    hours * 3600.0
    for hours in (0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 36, 48)
)
"""How far ahead it is asked how many nodes can stay away."""

MOST_S = LEADS[-1] * BIN_S
"""Days beyond are taken to be like the days until then."""

CAUTION = 0.1
"""Where no forecast was tested yet, but the day was seen: its level and this part of the peak."""

GUESS_RATIO = 3.0
"""How many times its estimate a job may take whose estimate is a guess."""

ODDS_MOST = 0.9
"""However sure a loan should be, no higher quantile is asked for: of rarer errors too few were
seen."""

STAY_RATIO = 10.0
"""A loan is long enough for a job that saves if it lasts this many times the cost of a stop: a
preemption then takes at most a tenth of the job's time there.
"""


def longest_runtime_s(job: JobView, gpu_type: str, now_s: float) -> float:
    """Running time left with the base gang alone on a GPU type, in seconds, with time to start, and
    if the estimate is as far off as its source may be."""
    is_guess = late_ratio(job.estimate.source) is None
    ratio = GUESS_RATIO if is_guess else 1.0
    return ratio * base_runtime_s(job, gpu_type, now_s) + SLACK_S


def stop_cost_s(job: JobView, now_s: float) -> float | None:
    """Expected cost of a later stop, in seconds of its base gang, its restart included; None: all
    its work, as far as is known.

    A job that continues where it was loses only the restart. When another job saves is its own
    matter. It is known to save once a stop left it some work; the average loss of its stops so far
    gives the age of its saves.
    """
    if is_resumed(job, now_s):
        return RESTART_S
    if job.preemptions.count and job.preemptions.wasted_gpu_s < job.attained_service_gpu_s(now_s):
        gpus = job.base_gpus
        return RESTART_S + job.preemptions.wasted_gpu_s / job.preemptions.count / gpus
    return None


class _Lent(Struct, frozen=True, kw_only=True):
    """The loans of one service.

    kinds: GPU types of all its nodes.
    held_s: per place of a usable lent node, how long base workers will still hold it.
    """

    service: ServiceView
    kinds: frozenset[str]
    held_s: Mapping[int, float]


class _Loans:
    """The loans of one service, and their lifetime by one quantile of its load.

    away: for each of `SPANS_S` the number of nodes that can stay away that long; the last one also
        beyond.
    """

    def __init__(self, held_s: Mapping[int, float], away: Sequence[int]) -> None:
        self._order = sorted(held_s, key=lambda place: (-held_s[place], place))
        self._ends_s = sorted(held_s.values())
        self._away = away
        self._known: dict[float, int] = {}

    def barred(self, runtime_s: float) -> int:
        """Places that are barred to a job of a running time.

        All places stand in one order, those held longest first. A job may use a first part of it:
        places that are held as long anyway, and of the others as many as can stay away in addition.
        Holding a node for longer takes no more nodes until its present holders end. The longer a
        job runs, the fewer places of this one order it may use. The jobs of one pass therefore need
        not know each other: together they hold at any instant no more than the places held anyway,
        or than can stay away.
        """
        if runtime_s not in self._known:
            barred = self._order[self._usable(runtime_s) :]
            self._known[runtime_s] = sum(1 << place for place in barred)
        return self._known[runtime_s]

    def is_open_for(self, runtime_s: float) -> bool:
        """True if one more node without holder can be held that long."""
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
        weighs_odds: they are to outlive a higher one where that pays (`odds`), and a job that has
            room at home takes none of which nothing is known.
        near_q: quantile for a job which has room at home but for a claim or flexible workers; None:
            as for all.
        lend_q: quantile by which nodes are taken back, a little ahead; None: without one.
        counts_saves: a job that saves need not be over before the load comes back.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        room: PlacementState,
        *,
        q: float,
        weighs_odds: bool = False,
        near_q: float | None = None,
        lend_q: float | None = None,
        counts_saves: bool = False,
    ) -> None:
        self._snapshot = snapshot
        self._room = room
        self._q = q
        self._near_q = near_q
        self._lend_q = lend_q
        self._counts_saves = counts_saves
        self._odds = Odds(snapshot, room) if weighs_odds else None
        self._made: dict[tuple[str, float, bool], _Loans] = {}

    def barred(self, job: JobView) -> int:
        """Places on lent nodes that base workers of a job must leave alone."""
        places = 0
        for runtime_s, loans in self._open_to(job):
            places |= loans.barred(runtime_s)
        return places

    def barred_flexible(self, job: JobView) -> int:
        """Flexible workers go home with their node without a preemption, so nothing is barred to
        them.
        """
        return 0

    def may_use_loans(self, job: JobView) -> bool:
        """Whether some service has nodes that can stay away for as long as the job runs."""
        return any(loans.is_open_for(runtime_s) for runtime_s, loans in self._open_to(job))

    def why(self, job: JobView) -> str:
        """That no loan outlives a job, in a sentence; empty when it is kept from no node."""
        if not self.barred(job):
            return ""
        stays_s = max(runtime_s for runtime_s, _ in self._open_to(job))
        if not any(self._was_seen(lent.service) for lent in self._lent):
            return (
                "the length of loans is unknown until the load was measured for a day, and "
                "training nodes have room once flexible workers or a claim release it"
            )
        if stays_s < self._longest_s(job):
            return (
                f"lent nodes are expected to return within {stays_s:.0f} s, too soon for the cost "
                f"of a stop of the job, though it saves checkpoints"
            )
        return (
            f"lent nodes are expected to return before the job ends, which may take {stays_s:.0f} s"
        )

    def _longest_s(self, job: JobView) -> float:
        now_s = self._snapshot.now_s
        kinds = {kind for lent in self._lent for kind in lent.kinds if job.accepts(kind)}
        return max(longest_runtime_s(job, kind, now_s) for kind in kinds)

    def _open_to(self, job: JobView) -> list[tuple[float, _Loans]]:
        """Loans of GPU types that a job accepts, and for how long it needs them, in seconds."""
        needs = [
            (lent, max(self._stays_s(job, kind) for kind in kinds))
            for lent in self._lent
            if (kinds := [kind for kind in lent.kinds if job.accepts(kind)])
        ]
        if not needs:
            return []
        q, is_shy = self._caution(job, max(stays_s for _, stays_s in needs))
        return [(stays_s, self._at(lent, q, is_shy=is_shy)) for lent, stays_s in needs]

    def _caution(self, job: JobView, stays_s: float) -> tuple[float, bool]:
        """The quantile that a job goes by, and whether unknown load keeps it away."""
        if self._near_q is None and self._odds is None:
            return self._q, False
        is_near = self._is_near_home(job)
        is_shy = is_near and self._odds is not None
        if is_near and self._near_q is not None:
            return self._near_q, is_shy
        if self._odds is None:
            return self._q, False
        needed = ceil(10.0 * self._odds.needed(job, stays_s)) / 10.0
        return max(self._q, min(needed, ODDS_MOST)), is_shy

    def _is_near_home(self, job: JobView) -> bool:
        """Whether training nodes have room for a job: flexible workers make it, or it is kept."""
        room, lent = self._room, self._lent_places
        return any(
            room.has_places(job, kind, job.workers_on(kind).min, if_unbarred=True, but=lent)
            for kind in room.home_types
            if job.accepts(kind)
        )

    @cached_property
    def _lent_places(self) -> int:
        return sum(1 << place for lent in self._lent for place in lent.held_s)

    def _stays_s(self, job: JobView, gpu_type: str) -> float:
        """For how long a job needs a node that it holds with base workers."""
        now_s = self._snapshot.now_s
        longest_s = longest_runtime_s(job, gpu_type, now_s)
        cost_s = stop_cost_s(job, now_s) if self._counts_saves else None
        return longest_s if cost_s is None else min(longest_s, STAY_RATIO * cost_s)

    def _at(self, lent: _Lent, q: float, *, is_shy: bool) -> _Loans:
        """Worked out when first asked for: most passes place nothing on lent nodes."""
        key = (lent.service.name, q, is_shy)
        if key not in self._made:
            self._made[key] = _Loans(lent.held_s, self._away(lent.service, q, is_shy=is_shy))
        return self._made[key]

    @cached_property
    def _lent(self) -> list[_Lent]:
        jobs = {job.job_id: job for job in self._snapshot.jobs if job.gpu_type is not None}
        return [self._of(service, jobs) for service in self._snapshot.services]

    def _of(self, service: ServiceView, jobs: dict[JobId, JobView]) -> _Lent:
        held_s: dict[int, float] = {}
        kinds = {node.gpu_type for node in self._snapshot.nodes if node.service == service.name}
        for place, occupied in enumerate(self._room.index.nodes):
            if occupied is None or occupied.service != service.name:
                continue
            held_s[place] = max(
                (
                    self._stays_s(job, occupied.node.gpu_type)
                    for worker in occupied.node.workers
                    if not worker.is_flexible and not worker.is_leaving
                    if (job := jobs.get(worker.job_id)) is not None
                ),
                default=0.0,
            )
        return _Lent(service=service, kinds=frozenset(kinds), held_s=held_s)

    def _was_seen(self, service: ServiceView) -> bool:
        """Whether its load was watched for a day."""
        return service.season.seen_ahead(int(self._snapshot.now_s // BIN_S)) == inf

    def _margin(self, service: ServiceView, q: float) -> float:
        """How much more load than is expected a node is taken back for already.

        A reclaim does not wait for the load: it comes when the quantile that lending goes by asks
        for the node, over the horizon of a loan pass.
        """
        if self._lend_q is None:
            return 0.0
        horizon_s = (service.return_s + service.loan_period_s,)
        now_s, season = self._snapshot.now_s, service.season
        (asked,) = season.quantiles(self._lend_q, now_s=now_s, horizons_s=horizon_s)
        (outlived,) = season.quantiles(q, now_s=now_s, horizons_s=horizon_s)
        return 0.0 if asked is None or outlived is None else max(0.0, asked - outlived)

    def _away(self, service: ServiceView, q: float, *, is_shy: bool) -> list[int]:
        """For each of `SPANS_S` the number of nodes that can stay away that long.

        With unknown load all nodes, as without foresight: only the reclaim looks ahead then. None
        for jobs to which waiting costs little.
        """
        own = [
            node
            for node in self._snapshot.nodes
            if node.service == service.name and not (node.is_drained_by_operator or node.is_closing)
        ]
        season, now_s = service.season, self._snapshot.now_s
        horizons_s = [min(span_s + service.return_s, MOST_S) for span_s in SPANS_S]
        peaks = season.quantiles(q, now_s=now_s, horizons_s=horizons_s)
        margin = self._margin(service, q)
        was_seen = self._was_seen(service)
        away: list[int] = []
        for horizon_s, quantile in zip(horizons_s, peaks, strict=True):
            peak = quantile
            if peak is None and was_seen:
                level = season.expected(now_s=now_s, horizon_s=horizon_s)
                peak = None if level is None else level + CAUTION * season.scale
            if peak is None:
                away.append(0 if is_shy else len(own))
            else:
                away.append(len(own) - nodes_for(service, peak + margin, len(own)))
        return away
