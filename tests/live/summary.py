"""The figures of a run that docs/reliability.md shows. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from tests.live.faults import LEADER_GONE, RULES, FaultKind
from tests.live.recording import Recording
from tests.live.verdict import Broken, Verdict


class Times(Struct, frozen=True, kw_only=True):
    """How long something took, against what was promised; in seconds."""

    count: int
    p50_s: float | None
    p99_s: float | None
    worst_s: float | None
    limit_s: float
    within: int


class KindCount(Struct, frozen=True, kw_only=True):
    """How often a fault of a kind was injected."""

    kind: str
    text: str
    count: int
    mean_s: float
    """For how long one lasted."""


class Summary(Struct, frozen=True, kw_only=True):
    """One run in figures."""

    date: str
    python: str
    cores: int
    nats_servers: int
    seed: int
    planned_s: float
    mean_pause_s: float
    duration_s: float
    faults: int
    longest_overlap: int
    """Most faults that were on at a time."""
    kinds: tuple[KindCount, ...]
    jobs_acknowledged: int
    jobs_succeeded: int
    attempts: int
    workers: int
    ends: dict[str, int]
    requests_answered: int
    requests_refused: int
    skipped: dict[str, int]
    """Faults that found no target, by kind."""
    broken: dict[str, int]
    violations: tuple[str, ...]
    late_by_stall: int
    late_by_own_word: int
    stalled_s: float
    returns: Times
    takeovers: Times
    handovers: Times

    def text(self) -> str:
        """As lines for a terminal."""
        lines = [
            f"{each.count:5d} {each.kind:20s} {each.text} ({each.mean_s:.1f} s)"
            for each in self.kinds
        ]
        lines += [
            f"{self.faults} faults in {self.duration_s:.0f} s, up to {self.longest_overlap} at a "
            f"time; seed {self.seed}; the machine lost {self.stalled_s:.1f} s",
            f"{self.jobs_acknowledged} jobs acknowledged, {self.jobs_succeeded} succeeded, "
            f"{self.attempts} attempts, {self.workers} workers; ended early: {self.ends}",
            f"without a target: {self.skipped}",
            f"requests: {self.requests_answered} answered, {self.requests_refused} refused",
            f"returns: {_line(self.returns)}; late within a stall: {self.late_by_stall}; late by "
            f"Aryl's own word: {self.late_by_own_word}",
            f"takeovers: {_line(self.takeovers)}",
            f"handovers: {_line(self.handovers)}",
            ", ".join(f"{kind}: {count}" for kind, count in self.broken.items()),
        ]
        return "\n".join(lines)


def _line(times: Times) -> str:
    def shown(value_s: float | None) -> str:
        return "-" if value_s is None else f"{value_s:.1f}"

    return (
        f"{times.count}, p50 {shown(times.p50_s)}, p99 {shown(times.p99_s)}, worst "
        f"{shown(times.worst_s)} s, {times.within} within {times.limit_s:g} s"
    )


def summary_of(
    recording: Recording, verdict: Verdict, *, date: str, python: str, cores: int
) -> Summary:
    """The figures of a judged recording."""
    limits = recording.limits
    ended = [found.took_s for found in verdict.returns if found.took_s is not None]
    killed = [each.took_s for each in verdict.takeovers if each.kind in LEADER_GONE]
    planned = [each.took_s for each in verdict.takeovers if each.kind == FaultKind.HANDOVER]
    return Summary(
        date=date,
        python=python,
        cores=cores,
        nats_servers=recording.nats_servers,
        seed=recording.seed,
        planned_s=recording.planned_s,
        mean_pause_s=recording.mean_pause_s,
        duration_s=round(recording.end_s - recording.begin_s, 1),
        faults=len(recording.faults),
        longest_overlap=most_at_a_time((f.at_s, f.end_s) for f in recording.faults),
        kinds=tuple(_kinds(recording)),
        jobs_acknowledged=len(recording.jobs),
        jobs_succeeded=sum(job.state == "succeeded" for job in recording.jobs),
        attempts=verdict.attempts,
        workers=len(recording.workers),
        ends=verdict.ends,
        requests_answered=recording.requests_answered,
        requests_refused=recording.requests_refused,
        skipped=recording.skipped,
        broken={kind.value: verdict.count(kind) for kind in Broken},
        violations=tuple(f"{v.kind}: {v.subject}: {v.text}" for v in verdict.violations),
        late_by_stall=verdict.late_by_stall,
        late_by_own_word=len(recording.said_late),
        stalled_s=round(sum(lost_s for _, lost_s in recording.stalls), 1),
        returns=_times(ended, limits.reclaim_deadline_s),
        takeovers=_times(killed, limits.takeover_s),
        handovers=_times(planned, limits.handover_s),
    )


def _kinds(recording: Recording) -> Iterable[KindCount]:
    counts = Counter(fault.kind for fault in recording.faults)
    for kind in FaultKind:
        if counts[kind]:
            lasted_s = sum(f.end_s - f.at_s for f in recording.faults if f.kind == kind)
            yield KindCount(
                kind=kind.value,
                text=RULES[kind].text,
                count=counts[kind],
                mean_s=round(lasted_s / counts[kind], 1),
            )


def most_at_a_time(spans: Iterable[tuple[float, float]]) -> int:
    """How many spans there are at the same instant, at most."""
    changes = sorted(change for begin_s, end_s in spans for change in ((begin_s, 0), (end_s, 1)))
    now = most = 0
    for _, is_end in changes:
        now += -1 if is_end else 1
        most = max(most, now)
    return most


def _times(taken_s: Sequence[float], limit_s: float) -> Times:
    ordered = sorted(taken_s)
    return Times(
        count=len(ordered),
        p50_s=_percentile(ordered, 0.5),
        p99_s=_percentile(ordered, 0.99),
        worst_s=round(ordered[-1], 2) if ordered else None,
        limit_s=limit_s,
        within=sum(took_s <= limit_s for took_s in ordered),
    )


def _percentile(ordered: Sequence[float], ratio: float) -> float | None:
    """The nearest-rank percentile of sorted values; None of none."""
    return round(ordered[max(0, math.ceil(ratio * len(ordered)) - 1)], 2) if ordered else None
