"""Gavel's rounds (OSDI'20): a program gives shares of time, and priorities keep them each round.

A policy of Gavel gives the part of the time that each job should run (`time_shares`). In each round
the jobs run whose part over their received time is greatest (section 5). `las` maximises the least
attained service. `themis-lp` minimises the worst finish-time fairness; Gavel and its successors
take that for Themis. Between rounds nothing changes.

GPUs count as one pool here; `carry_out` places gangs on real nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, inf

import msgspec
from msgspec import Struct

from common.model import JobId, JobState
from coordinator.policies.contract.decisions import Allocation, PendingReason
from coordinator.policies.contract.free_gpus import (
    FreeGpus,
    barred_gpus,
    consolidated,
    is_movable,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.knobs import Period, Seconds
from coordinator.policies.parts.grants import Grant, Plan, carry_out
from coordinator.policies.parts.memory import recalled
from coordinator.policies.parts.restart_cost import keeps_gang, told
from coordinator.policies.policy import Parts, Policy, joint
from coordinator.policies.schedulers.gavel.rounds import EARLY_S, Rounds
from coordinator.policies.schedulers.gavel.time_shares import (
    Gang,
    Spare,
    least_worst_finish,
    max_min,
)

Solve = Callable[[Sequence[Gang], float, Spare], list[float]]


class RoundKnobs(Struct, frozen=True, kw_only=True):
    """Knobs of the round-based policies.

    round_s: length of a round.
    solve_s: shortest time between two solutions of the program, which is solved only when jobs
        came or left.
    spare: which of the program's optima is used.
    """

    round_s: Period = 360.0
    spare: Spare = Spare.FAIR
    solve_s: Seconds = 1000.0


class RoundPass:
    """One pass, in a round or between two.

    is_due: whether a round begins now.
    """

    def __init__(
        self, knobs: RoundKnobs, solve: Solve, snapshot: ClusterSnapshot, rounds: Rounds
    ) -> None:
        self._knobs = knobs
        self._solve = solve
        self._snapshot = snapshot
        self._now_s = snapshot.now_s
        self.rounds = rounds
        self._floor = FreeGpus(snapshot)
        self._gpus = max(1, self._floor.total_gpus())
        rounds.note(snapshot, knobs.round_s)
        self.is_due = rounds.begins(snapshot, knobs.round_s)

    # --- shares ---------------------------------------------------------------------------------

    def solve(self) -> None:
        """Solve for new shares, if jobs came or went and the last ones were kept up long enough.

        A job that was hidden whenever they were set does not wait for that: that may be so each
        time.
        """
        rounds = self.rounds
        solved_at_s = rounds.solved_at_s
        # With the tolerance of the rounds: whole ones may sum up to a bit less than `solve_s`.
        is_early = solved_at_s is not None and self._now_s < self._due_s(solved_at_s)
        if any(turn.lacks_share for turn in rounds.turns.values()):
            is_early = False
        if not rounds.is_stale or is_early:
            return
        gangs = [self._gang(job, solved_at_s) for job in self._snapshot.jobs]
        shares = self._solve(gangs, float(self._gpus), self._knobs.spare)
        for job, share in zip(self._snapshot.jobs, shares, strict=True):
            rounds.turns[job.job_id].share = share
        for turn in rounds.away.values():
            turn.settle_away(self._knobs.round_s / 2.0)
        rounds.solved_at_s, rounds.is_stale = self._now_s, False

    def _gang(self, job: JobView, solved_at_s: float | None) -> Gang:
        """Its account is closed: what it was owed, and what its work would have taken alone."""
        turn = self.rounds.turns[job.job_id]
        turn.settle(solved_at_s, self._now_s, self._knobs.round_s / 2.0)
        gpus = job.base_gpus
        left_s = job.work_left_s(self._now_s) / job.workers.min
        alone_rate = min(1.0, self._gpus / len(self._snapshot.jobs) / gpus)
        return Gang(
            gpus=gpus,
            left_s=left_s,
            passed_s=self._now_s - job.submitted_at_s,
            alone_s=turn.progress(left_s, alone_rate),
        )

    # --- a round --------------------------------------------------------------------------------

    def ranked(self) -> list[JobView]:
        """Jobs that received least of their share first; among equals those that are owed most.

        Before them stand those whose work a stop would lose; they use up their share.
        """

        def rank(job: JobView) -> tuple[float, ...]:
            turn, keeps = self.rounds.turns[job.job_id], keeps_gang(job, self._now_s)
            earned = (-turn.share / turn.received_s, -turn.owed_s, -turn.share)
            return (not keeps, -job.priority, *earned)

        return sorted(self._snapshot.jobs, key=rank)

    def chosen(self, ranked: Sequence[JobView]) -> set[JobId]:
        """The gangs of this round, in this order, skipping those that do not fit."""
        movable = {job.job_id for job in ranked if job.state == JobState.PENDING or is_movable(job)}
        held = [w for job in ranked if job.job_id in movable for w in job.placed]
        free = self._floor.free_gpus() + sum(
            w.freed_gpus for w in held if w.node in self._floor.nodes and not w.is_leaving
        )
        found: set[JobId] = set()
        for job in ranked:
            gpus = job.base_gpus - barred_gpus(job)
            if job.job_id in movable and gpus <= free:
                found.add(job.job_id)
                free -= gpus
        return found

    def plan(self) -> Plan:
        """Decisions for a round that begins now."""
        self.solve()
        ranked = self.ranked()
        chosen = self.chosen(ranked)
        # Others that wait start where chosen ones find no nodes for a whole gang.
        late = [job for job in ranked if job.job_id not in chosen and job.state == JobState.PENDING]
        first = [job for job in ranked if job.job_id in chosen]
        grants = [self._grant(job) for job in (*first, *late)]
        return carry_out(self._snapshot, grants, floor=self._floor, place=consolidated)

    def _grant(self, job: JobView) -> Grant:
        turn = self.rounds.turns[job.job_id]
        received = f", and received {turn.received_s:.0f} s since shares were set"
        reason = (
            f"round of {self._knobs.round_s:g} s: {turn.share_text}"
            f"{received if turn.has_share else ''}"
        )
        return Grant(job=job, workers=job.workers.min, reason=reason)

    def due_text(self, job: JobView) -> str:
        """As text: a job's share of time, and the part that it is owed."""
        turn = self.rounds.turns[job.job_id]
        if not turn.has_share:
            return f"{turn.share_text}, which comes in {self._next_solve_in_s():.0f} s"
        return f"{turn.share_text} and is owed {turn.owed_s:.0f} s"

    def _due_s(self, solved_at_s: float) -> float:
        return solved_at_s + self._knobs.solve_s - EARLY_S

    def _next_solve_in_s(self) -> float:
        """Until the first round that begins once the last shares were kept up long enough."""
        rounds, round_s = self.rounds, self._knobs.round_s
        solved_at_s = rounds.solved_at_s
        due_s = -inf if solved_at_s is None else self._due_s(solved_at_s)
        count = max(1, ceil((max(due_s, self._now_s) - rounds.begun_at_s) / round_s))
        return max(0.0, rounds.begun_at_s + count * round_s - self._now_s)

    def told(self, job: JobView) -> tuple[str, ...]:
        """How a job that runs stands."""
        return (self.due_text(job), *told(job, self._now_s))

    def wake_at_s(self) -> float | None:
        """The next round, while any job waits."""
        waiting = (job for job in self._snapshot.jobs if job.state == JobState.PENDING)
        self.rounds.is_awaited = any(waiting)
        if not self.rounds.is_awaited:
            return None
        return self.rounds.begun_at_s + self._knobs.round_s


def allocate(
    solve: Solve, knobs: RoundKnobs, snapshot: ClusterSnapshot, memory: bytes
) -> Allocation:
    """One pass: nothing, or a round."""
    turn = RoundPass(knobs, solve, snapshot, recalled(memory, Rounds))
    decisions = turn.plan().decisions if turn.is_due else ()
    wake_at_s = turn.wake_at_s()
    return Allocation(
        decisions=decisions, memory=msgspec.msgpack.encode(turn.rounds), wake_at_s=wake_at_s
    )


def hold(
    solve: Solve, knobs: RoundKnobs, snapshot: ClusterSnapshot, memory: bytes
) -> tuple[PendingReason, ...]:
    """Why each job that waits is not among those of the present round."""
    turn = RoundPass(knobs, solve, snapshot, recalled(memory, Rounds))
    if turn.is_due:
        return turn.plan().holds
    at_s = turn.rounds.begun_at_s + knobs.round_s
    return tuple(
        PendingReason(
            job_id=job.job_id,
            blockers=(
                f"the next round begins in {max(0.0, at_s - snapshot.now_s):.0f} s; "
                f"{turn.due_text(job)}",
            ),
        )
        for job in turn.ranked()
        if job.state == JobState.PENDING
    )


def tell(
    solve: Solve, knobs: RoundKnobs, snapshot: ClusterSnapshot, memory: bytes, job_id: JobId
) -> tuple[str, ...]:
    """The part of the time that a job should run, and its distance from that."""
    turn = RoundPass(knobs, solve, snapshot, recalled(memory, Rounds))
    return next((turn.told(job) for job in snapshot.jobs if job.job_id == job_id), ())


def _rounds(name: str, description: str, solve: Solve, order: str) -> Policy:
    return joint(
        name,
        description,
        knobs=RoundKnobs(round_s=120.0) if name == "las" else RoundKnobs(),
        allocate=partial(allocate, solve),
        pending_reasons=partial(hold, solve),
        standing=partial(tell, solve),
        parts=Parts(order=order, size="base demand", place="fewest nodes"),
    )


POLICIES: tuple[Policy, ...] = (
    _rounds(
        "las",
        "max-min fairness of GPU time in rounds (Gavel's least attained service)",
        max_min,
        "time share over time received",
    ),
    _rounds(
        "themis-lp",
        "best finish-time fairness for the worst-off job, by shares of time, in rounds",
        least_worst_finish,
        "time share over time received",
    ),
)
