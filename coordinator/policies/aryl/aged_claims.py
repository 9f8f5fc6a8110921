"""Aged claims: nodes kept for jobs that waited too long, so that no job starves.

Shortest job first with skipping starts every job that fits, and a large gang may never find room:
smaller jobs take the GPUs that come free. A job that has aged claims the nodes on which it could
start soonest, by the estimated remaining time of the jobs there, if that is soon enough for its
wait so far. A longer wait may keep nodes for longer. Until then these nodes take only base work
that ends by that instant, and flexible workers, which leave at once. This is EASY backfilling
(Lifka, JSSPP'95) with patience: a job that arrived just now keeps no node idle for days.

The bound: let R be the longest remaining time of any running job on its base gang alone, and T the
shortest running time of a job that is the oldest to have aged. The job claims at the latest when it
has waited for the larger of R / ratio and stretch x T (ten times that with one worker). While
estimates hold, the claim never moves back, so the job starts within R more. A younger job, or one
that has not aged, waits for its turn first.

With ratio 0.5 and stretch 30 the bound is the larger of 2 R and 30 T, plus R. With one worker of
any GPU count it is the larger of 2 R and 300 T, plus R. It is never below `AGED_S`. The bound is
proportional to the job's length: it protects wide short jobs from starving, and does not promise
that long ones start soon.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from common.model import NodeName
from coordinator.policies.aryl.gpu_types import types_in_order
from coordinator.policies.aryl.openings import Openings
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.estimates import base_runtime_s, best_rate
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView

SLACK_S = 60.0
"""A job on claimed nodes must end this long before the claim needs them: a start takes time."""


AGED_S = 600.0
"""A job that has waited for less has not aged, and takes its turn by the order alone."""

NARROW = 10.0
"""A job of one worker waits for shorter jobs, never for room in many places at once: it ages this
many times more slowly.
"""


class Claim(Struct, frozen=True, kw_only=True):
    """Nodes that are kept for a job, and from when on it could run on them."""

    job: JobView
    gpu_type: str
    nodes: tuple[NodeName, ...]
    places: int
    """The nodes as bits of the room's index."""
    ready_at_s: float

    def bars(self, job: JobView, *, now_s: float) -> bool:
        """Whether base workers of a job must stay away; more important jobs need not."""
        if job.job_id == self.job.job_id or job.priority > self.job.priority:
            return False
        return now_s + base_runtime_s(job, self.gpu_type, now_s) + SLACK_S > self.ready_at_s


class Claims:
    """The claims of one pass, oldest job first.

    Args:
        ratio: nodes are kept for this fraction of the time that the job has waited.
        stretch: a job claims once it has waited this many times its shortest running time.
        most: the number of jobs that claim nodes of a GPU type at a time.
        trusts_profiles: jobs are as fast as their profiles state; else linear in their workers.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        *,
        ratio: float,
        stretch: float,
        most: int,
        trusts_profiles: bool = True,
    ) -> None:
        self._now_s = snapshot.now_s
        self._ratio = ratio
        self._stretch = stretch
        self._most = most
        self._trusts_profiles = trusts_profiles
        self._openings = Openings(snapshot, trusts_profiles=trusts_profiles)
        self.made: list[Claim] = []

    def aged(self, room: PlacementState) -> Iterator[JobView]:
        """Jobs that may claim now, the most important and oldest first.

        While they are taken, those are left out whose GPU types have all their claims.
        """
        old = [
            job
            for line in room.index.lines
            for job in line
            if self._now_s - job.submitted_at_s >= self._ages_after_s(job)
        ]
        for job in sorted(old, key=lambda job: (-job.priority, job.submitted_at_s, job.job_id)):
            if any(self._is_open(kind) for kind in types_in_order(room, job)):
                yield job

    def _ages_after_s(self, job: JobView) -> float:
        """Short jobs sooner than long ones: where all wait long, age would undo the order."""
        stretch = self._stretch * (1.0 if job.workers.min > 1 else NARROW)
        rate = best_rate(job, trusts_profiles=self._trusts_profiles)
        return max(AGED_S, stretch * job.estimate.remaining_work_s / rate)

    def _is_open(self, gpu_type: str) -> bool:
        return sum(claim.gpu_type == gpu_type for claim in self.made) < self._most

    def claim(self, room: PlacementState, job: JobView) -> None:
        """Keep nodes for a job that does not fit now; none where it never would."""
        found = [
            claim
            for gpu_type in types_in_order(room, job)
            if gpu_type in room.home_types
            if self._is_open(gpu_type)
            if (claim := self._on(room, job, gpu_type)) is not None
        ]
        best = min(found, key=lambda claim: claim.ready_at_s, default=None)
        waited_s = self._now_s - job.submitted_at_s
        if best is not None and best.ready_at_s - self._now_s <= self._ratio * waited_s:
            self.made.append(best)

    def may_use_loans(self, job: JobView) -> bool:
        """Further lent nodes are claimed by no job."""
        return True

    def why(self, job: JobView) -> str:
        """The jobs whose claims keep a job away, as a sentence; empty if there are none."""
        return "; ".join(
            f"{len(claim.nodes)} nodes of type {claim.gpu_type} are kept for {claim.job.job_id}, "
            f"which has waited {self._now_s - claim.job.submitted_at_s:.0f} s and can have them "
            f"in {claim.ready_at_s - self._now_s:.0f} s; this job would not be over by then"
            for claim in self.made
            if claim.bars(job, now_s=self._now_s) and job.accepts(claim.gpu_type)
        )

    def barred(self, job: JobView) -> int:
        """Places that base workers of a job must leave alone."""
        places = 0
        for claim in self.made:
            if claim.bars(job, now_s=self._now_s):
                places |= claim.places
        return places

    def barred_flexible(self, job: JobView) -> int:
        """Flexible workers leave at once when they are asked to, so no node is barred to them."""
        return 0

    def _on(self, room: PlacementState, job: JobView, gpu_type: str) -> Claim | None:
        """The nodes of a type that come free soonest; those of earlier claims after these jobs."""
        taken = self._openings.soonest(room, job, gpu_type, not_before_s=self._not_before_s)
        if not taken:
            return None
        places = sorted({place for _, place in taken})
        return Claim(
            job=job,
            gpu_type=gpu_type,
            nodes=tuple(room.index.names[place] for place in places),
            places=sum(1 << place for place in places),
            ready_at_s=taken[-1][0],
        )

    def _not_before_s(self, place: int) -> float:
        """When the last of the earlier claims on a node is over."""
        return max(
            (
                claim.ready_at_s + base_runtime_s(claim.job, claim.gpu_type, self._now_s)
                for claim in self.made
                if claim.places >> place & 1
            ),
            default=self._now_s,
        )
