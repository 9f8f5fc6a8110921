"""Workers shared out one by one in pairwise comparisons: the rules of AFS, and Lyra's form. Pure.

Hwang et al., NSDI'21, "Elastic Resource Sharing for Distributed Deep Learning", section 4; the
rules follow its author's simulator. A greedy rule relies too much on getting back what it gives
away, so two jobs are compared as if it never came back. The unit is one worker, the first share a
whole base gang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from msgspec import Struct

from coordinator.policies.contract.snapshot import JobView


class Share(Struct):
    """A job and the workers that it has been given so far."""

    job: JobView
    left_s: float
    """Worker-seconds left."""
    workers: int = 0
    factor: int = 1
    """Workers of the type that is shared out that stand for one of its range."""

    @property
    def gpus_each(self) -> int:
        """GPUs of one worker of its range."""
        return self.job.gpus_per_worker * self.factor

    @property
    def rate(self) -> float:
        """Speed at its present share."""
        return self.job.rate(self.workers) if self.workers else 0.0

    @property
    def gain(self) -> float:
        """Speed that one worker more adds."""
        return self.job.rate(self.workers + 1) - self.rate

    @property
    def remaining_s(self) -> float:
        """Running time left at its present share."""
        return self.left_s / self.rate

    def may_grow(self, gpus: int) -> bool:
        """True if one more worker fits its range and the remaining GPUs, and makes it faster."""
        job = self.job
        return self.workers < job.workers.max and self.gpus_each <= gpus and self.gain > 0


def _one(_: JobView) -> int:
    return 1


Wins = Callable[[Share, Share], bool]
"""Whether the second one takes the place of the first as candidate for the next worker."""


def beats_by_length(candidate: Share, other: Share) -> bool:
    """AFS-L: the shorter one takes it if its relative gain now exceeds what the longer one's is.

    With l the one with less running time left at its present share, h the other:
    (p_l(n+1) - p_l(n)) / p_l(n) > (p_h(n+1) - p_h(n)) / p_h(n+1).
    """
    is_shorter = (other.remaining_s, other.job.job_id) < (
        candidate.remaining_s,
        candidate.job.job_id,
    )
    low, high = (other, candidate) if is_shorter else (candidate, other)
    low_wins = low.gain / low.rate > high.gain / (high.rate + high.gain)
    return low_wins == is_shorter


def beats_by_gain(toss: Wins) -> Wins:
    """AFS-P: the one that would win even if it were the longer one; `toss` if neither would."""

    def beats(candidate: Share, other: Share) -> bool:
        if (other.rate + other.gain) / other.gain <= candidate.rate / candidate.gain:
            return True
        if (candidate.rate + candidate.gain) / candidate.gain <= other.rate / other.gain:
            return False
        return toss(candidate, other)

    return beats


def base_shares(
    jobs: Sequence[JobView], gpus: int, now_s: float, *, factor: Callable[[JobView], int] = _one
) -> tuple[list[Share], int]:
    """A base gang each, in this order, skipping what does not fit; and the GPUs left.

    factor: workers of the type that is shared out that stand for one of a job's range.
    """
    shares: list[Share] = []
    for job in jobs:
        base = job.workers.min
        share = Share(job=job, left_s=job.work_left_s(now_s), workers=base, factor=factor(job))
        if base * share.gpus_each <= gpus:
            gpus -= base * share.gpus_each
            shares.append(share)
    return shares, gpus


def share_out(shares: Sequence[Share], gpus: int, wins: Wins) -> None:
    """Give one worker after another to the winner of all pairwise comparisons."""
    while True:
        growing = [share for share in shares if share.may_grow(gpus)]
        if not growing:
            return
        candidate = growing[0]
        for other in growing[1:]:
            if wins(candidate, other):
                candidate = other
        candidate.workers += 1
        gpus -= candidate.gpus_each


def share_by_throughput(shares: Sequence[Share], gpus: int) -> None:
    """Lyra's cut-down AFS (EuroSys'23, section 7.4): always the most throughput per GPU."""

    def value(share: Share) -> float:
        # Relative to its base gang, so that the units of profiles do not matter.
        return share.gain / (share.job.workers.min * share.gpus_each)

    queue = [(-value(share), place) for place, share in enumerate(shares) if share.may_grow(gpus)]
    heapify(queue)
    while queue:
        _, place = heappop(queue)
        share = shares[place]
        if not share.may_grow(gpus):
            continue
        share.workers += 1
        gpus -= share.gpus_each
        if share.may_grow(gpus):
            heappush(queue, (-value(share), place))
