"""What no policy can do better than, on a trace: least mean queueing and mean completion time.

Must not know a policy or a run. All bounds put a pool's GPUs into one machine of their joint speed:
whatever real nodes can do in some order, it can do as well, as it splits its speed at will. They
leave out that a gang needs all its GPUs at once and whole workers on nodes, every delay, and that a
job that is stopped loses work; so the true least is higher, and by how much they do not say.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from coordinator.workloads.records import TraceJob, Workload


class Piece(Struct, frozen=True, kw_only=True):
    """One job as the machine sees it.

    work_gpu_s: GPU-seconds; linear in GPUs. shortest_s, longest_s: running time alone on the most
    and on the fewest GPUs that it may have; equal for a job of one size.
    """

    at_s: float
    work_gpu_s: float
    shortest_s: float
    longest_s: float

    @property
    def unsure_s(self) -> float:
        """How much later than its mean busy time it may end without having waited, see below."""
        return self.longest_s - self.shortest_s / 2.0


def piece_of(job: TraceJob) -> Piece:
    """A job of a trace; it speeds up in proportion to its GPUs."""
    gpus_each = job.gpus_per_worker or job.gpus
    fewest = gpus_each * (job.min_workers or 1) if job.is_elastic else job.gpus
    most = gpus_each * (job.max_workers or 1) if job.is_elastic else job.gpus
    return Piece(
        at_s=job.submit_s,
        work_gpu_s=job.gpu_s,
        shortest_s=job.gpu_s / most,
        longest_s=job.gpu_s / fewest,
    )


class _Slice(Struct, frozen=True):
    """A stretch of time in which the machine did nothing but one job."""

    place: int
    from_s: float
    until_s: float


def _slices(pieces: Sequence[Piece], gpus: int, *, by_left: bool) -> Iterator[_Slice]:
    """The machine's time, job by job: always the one with the least work, left or in all."""
    coming = sorted(range(len(pieces)), key=lambda place: (pieces[place].at_s, place))
    line: list[tuple[float, int]] = []
    left = [piece.work_gpu_s for piece in pieces]
    now_s, came = 0.0, 0
    while came < len(coming) or line:
        if not line:
            now_s = max(now_s, pieces[coming[came]].at_s)
        while came < len(coming) and pieces[coming[came]].at_s <= now_s:
            heapq.heappush(line, (left[coming[came]], coming[came]))
            came += 1
        key, place = heapq.heappop(line)
        until_s = now_s + left[place] / gpus
        if came < len(coming) and pieces[coming[came]].at_s < until_s:
            until_s = pieces[coming[came]].at_s
            left[place] -= (until_s - now_s) * gpus
            heapq.heappush(line, (left[place] if by_left else key, place))
        yield _Slice(place, now_s, until_s)
        now_s = until_s


def least_completion_s(pieces: Sequence[Piece], gpus: int) -> float:
    """No schedule on so many GPUs has a lower sum of times from submission to end, in seconds.

    The largest of three: the running times alone; the times in the system if the machine does the
    job with the least left first (Schrage, 1968); and mean busy times with half of the running
    times alone (`_busy_means`), as a job at its fastest has half of its work done half of its
    shortest running time before it ends, and never less time before.
    """
    ends_s = {each.place: each.until_s for each in _slices(pieces, gpus, by_left=True)}
    alone_s = sum(piece.shortest_s for piece in pieces)
    in_system_s = sum(ends_s[place] - piece.at_s for place, piece in enumerate(pieces))
    return max(alone_s, in_system_s, sum(_busy_means(pieces, gpus)) + alone_s / 2.0)


def least_queueing_s(pieces: Sequence[Piece], gpus: int) -> float:
    """No schedule on so many GPUs that loses no work has a lower sum of waiting times, in seconds.

    A job ends half of its shortest running time after its mean busy time, or later, and has run no
    longer than with its fewest GPUs; so it waited at least for its mean busy time, from submission
    on, less `Piece.unsure_s`. The sum of mean busy times of any set of jobs is least on the
    machine, and nobody waits less than nothing: the bound of every set holds for all jobs. Of those
    that count against it the worse half is left out, again and again, until none does.
    """
    chosen: list[Piece] = list(pieces)
    most_s = 0.0
    while chosen:
        waits_s = [
            busy_s - piece.unsure_s
            for busy_s, piece in zip(_busy_means(chosen, gpus), chosen, strict=True)
        ]
        most_s = max(most_s, sum(waits_s))
        against = [place for place, wait_s in enumerate(waits_s) if wait_s <= 0.0]
        against.sort(key=waits_s.__getitem__)
        left_out = set(against[: (len(against) + 1) // 2])
        if not left_out:
            break
        chosen = [piece for place, piece in enumerate(chosen) if place not in left_out]
    return most_s


def _busy_means(pieces: Sequence[Piece], gpus: int) -> list[float]:
    """Per job the mean of the instants at which the machine worked on it, from submission on.

    It always does the job of the least work in all, which makes their sum the least of all
    schedules (Goemans, A supermodular relaxation for scheduling with release dates, IPCO 1996).
    """
    sums = [0.0] * len(pieces)
    for each in _slices(pieces, gpus, by_left=False):
        middle_s = (each.from_s + each.until_s) / 2.0
        sums[each.place] += middle_s * (each.until_s - each.from_s) * gpus
    return [
        total / piece.work_gpu_s - piece.at_s if piece.work_gpu_s else 0.0
        for total, piece in zip(sums, pieces, strict=True)
    ]


def pools(workload: Workload) -> Iterator[tuple[list[TraceJob], int]]:
    """Jobs and the most GPUs that these can ever have between them.

    All jobs, with every node as if all inference nodes were lent for ever at full speed; and for
    each GPU type those that accept no other, with its own nodes.
    """
    yield list(workload.jobs), sum(group.count * group.gpus for group in workload.nodes)
    for kind in sorted({group.gpu_type for group in workload.nodes}):
        only = [job for job in workload.jobs if job.gpu_types == (kind,)]
        there = (group for group in workload.nodes if group.gpu_type == kind)
        yield only, sum(group.count * group.gpus for group in there)


def least_of(workload: Workload) -> tuple[float, float]:
    """(mean queueing, mean time from submission to end) that no policy is below, in seconds.

    Waits of jobs of one type alone bound all waits; of completion times the others' running times
    alone are added.
    """
    count = len(workload.jobs)
    alone_s = _alone_s(workload.jobs)
    queueing_s, jct_s = 0.0, alone_s
    for jobs, gpus in pools(workload):
        pieces = [piece_of(job) for job in jobs]
        queueing_s = max(queueing_s, least_queueing_s(pieces, gpus))
        jct_s = max(jct_s, least_completion_s(pieces, gpus) + alone_s - _alone_s(jobs))
    return queueing_s / count, jct_s / count


def _alone_s(jobs: Iterable[TraceJob]) -> float:
    return sum(piece_of(job).shortest_s for job in jobs)
