"""Rounds of one length: when one begins, and how long each job ran since shares were set. Pure.

A policy that decides in rounds remembers this between passes (Gavel, OSDI'20, section 5: time
received since the shares were computed last).
"""

from __future__ import annotations

from msgspec import Struct, field

from common.model import JobId
from coordinator.policies.contract.snapshot import ClusterSnapshot

EARLY_S = 1e-6
"""A round is over so much before its end: sums of instants are not exact."""


class Turn(Struct, array_like=True):
    """One job in the memory of rounds.

    share: part of the time that it should run; 0 until the next solving.
    received_s: time that it ran since the last one, and half a round. owed_s: by earlier ones.
    alone_s: time alone on its part of the GPUs that the work done until `left_s` would have taken.
    left_s: running time left when the program was solved last; alone_rate: its speed alone then.
    gpus: of its gang when it was seen last; 0: it was not.
    since_s: its account counts from then, or the last solving, as if it had been seen all the time:
        what it was out of sight moves it on; 0: it never was.
    open_s: of one out of sight, for how long its account had counted; nothing is added meanwhile.
    """

    share: float = 0.0
    received_s: float = 0.0
    owed_s: float = 0.0
    alone_s: float = 0.0
    left_s: float | None = None
    alone_rate: float = 1.0
    gpus: int = 0
    since_s: float = 0.0
    open_s: float = 0.0

    @property
    def has_share(self) -> bool:
        """True if shares were set since it came: a newcomer's share is unknown, not 0."""
        return self.left_s is not None

    @property
    def share_text(self) -> str:
        """Its share as text."""
        if not self.has_share:
            return "it waits for its share of the time"
        return f"it should run {self.share:.0%} of the time"

    def settle(self, solved_at_s: float | None, now_s: float, half_s: float) -> None:
        """Close the account since shares were set: what it did not receive of its share is owed.

        half_s: half a round, from which the next account begins.
        """
        self.hide(solved_at_s, now_s)
        self.settle_away(half_s)

    def settle_away(self, half_s: float) -> None:
        """Close the account of one out of sight, as it was when it was seen last."""
        self.owed_s += self.share * self.open_s - (self.received_s - half_s)
        self.received_s, self.open_s = half_s, 0.0

    def hide(self, solved_at_s: float | None, now_s: float) -> None:
        """Stop its account; what it received counts when it is seen again."""
        self.open_s = 0.0 if solved_at_s is None else now_s - max(solved_at_s, self.since_s)

    def come_back(self, now_s: float) -> None:
        """Let its account go on where it stood."""
        self.since_s, self.open_s = now_s - self.open_s, 0.0

    @property
    def lacks_share(self) -> bool:
        """Whether it came back into sight, and shares were set only while it was out of it."""
        return self.since_s > 0.0 and not self.has_share

    def progress(self, left_s: float, alone_rate: float) -> float:
        """Note the remaining work; returns the time that all its work takes alone, in seconds."""
        if self.left_s is not None:
            self.alone_s += max(0.0, self.left_s - left_s) / self.alone_rate
        self.left_s, self.alone_rate = left_s, alone_rate
        return self.alone_s + left_s / alone_rate


class Rounds(Struct):
    """The memory. begun_at_s: of the present round. noted_at_s: of the last pass.

    is_awaited: a job waits for the next round, which begins however late the pass for it comes.
    away: of hidden waiting jobs. Their accounts stand still: they are owed what they did not
        receive while rounds could have given it, and nothing for the time since.
    """

    begun_at_s: float = 0.0
    noted_at_s: float = 0.0
    solved_at_s: float | None = None
    is_stale: bool = True
    is_awaited: bool = False
    turns: dict[JobId, Turn] = field(default_factory=dict[JobId, Turn])
    away: dict[JobId, Turn] = field(default_factory=dict[JobId, Turn])

    def note(self, snapshot: ClusterSnapshot, round_s: float) -> None:
        """Note arrivals and ends; jobs that ran have received time.

        A job that comes as a gang after its pre-run has the share of the pre-run until shares are
        set again.
        """
        noted_at_s, self.noted_at_s = self.noted_at_s, snapshot.now_s
        before = self.turns
        known = before | self._come_back(snapshot)
        self.turns = {
            job.job_id: known.get(job.job_id, Turn(received_s=round_s / 2.0))
            for job in snapshot.jobs
        }
        self.is_stale |= self.turns.keys() != before.keys()
        for job in snapshot.jobs:
            turn, gpus = self.turns[job.job_id], job.base_gpus
            self.is_stale |= turn.gpus not in (0, gpus)
            turn.gpus = gpus
        for job in snapshot.jobs:
            if job.placed and job.attempt.started_at_s is not None:
                since_s = max(noted_at_s, job.attempt.started_at_s)
                self.turns[job.job_id].received_s += max(0.0, snapshot.now_s - since_s)

    def _come_back(self, snapshot: ClusterSnapshot) -> dict[JobId, Turn]:
        """Jobs that are no longer seen are put away; returns those that are seen again."""
        seen = {job.job_id for job in snapshot.jobs}
        back = {job_id: turn for job_id, turn in self.away.items() if job_id in seen}
        for turn in back.values():
            turn.come_back(snapshot.now_s)
        hidden = {job_id: turn for job_id, turn in self.turns.items() if job_id in snapshot.unseen}
        for turn in hidden.values():
            turn.hide(self.solved_at_s, snapshot.now_s)
        stay = {job_id: turn for job_id, turn in self.away.items() if job_id in snapshot.unseen}
        self.away = stay | hidden
        return back

    def begins(self, snapshot: ClusterSnapshot, round_s: float) -> bool:
        """True if a round begins now: one follows another; while no job runs one begins at once."""
        is_idle = not any(job.placed for job in snapshot.jobs)
        if is_idle:
            self.begun_at_s = snapshot.now_s
            return True
        count = int((snapshot.now_s - self.begun_at_s + EARLY_S) // round_s)
        if count == 0:
            return False
        self.begun_at_s += count * round_s
        # A pass within a round that was not requested at its begin leaves that round alone.
        return snapshot.now_s - self.begun_at_s <= EARLY_S or self.is_awaited
