"""Plans of claims in sequence, each on the GPUs that those before it leave. Pure.

Sequences that are tried one after another mostly share a beginning; it is planned once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.policies.schedulers.qos.minimum_shares import Claim, fill, is_whole, now_of
from coordinator.policies.schedulers.qos.quotas import Room
from coordinator.policies.schedulers.qos.timeline import Plan, Timeline

KEPT_EVERY = 32
"""The room before the first of this many claims of a sequence is remembered."""


class Row:
    """The row that was planned last.

    made: plans of single claims that were looked for so far.

    Args:
        room: what all of them have together.
        holding: they have their base gangs until their turn comes, and behind it if they then get
            no plan.
        stops: running claims that do not pause may do their work over instead.
    """

    def __init__(
        self, room: Room, now_s: float, holding: Sequence[Claim] = (), *, stops: bool = False
    ) -> None:
        self.holding = holding
        self._now_s = now_s
        self._stops = stops
        self._held = {claim.job_id: claim.hold(now_s) for claim in holding}
        for claim in holding:
            room.take(self._held[claim.job_id], claim)
        self._rooms = [room]
        self._done: list[tuple[Claim, Plan | None, Plan | None]] = []  # with the old plan, the plan
        self.made = 0

    def plans(
        self, claims: Sequence[Claim], kept: Mapping[str, Plan] | None = None, *, is_all: bool
    ) -> dict[str, Plan]:
        """By job, the plans of claims that have one; kept plans first, if they still hold.

        is_all: stop behind the first one without a plan.
        """
        plans: dict[str, Plan] = {}
        room: Room | None = None
        place = 0
        for olds in (kept, None) if kept else (None,):
            planned = frozenset(plans)
            for claim in claims:
                if claim.job_id in planned or (olds is not None and claim.job_id not in olds):
                    continue
                old = None if olds is None else olds[claim.job_id]
                if room is None and not self._is_done(place, claim, old):
                    room = self._room(place)
                if room is not None:
                    self._plan(room, claim, old)
                plan = self._done[place][2]
                place += 1
                if plan is not None:
                    plans[claim.job_id] = plan
                elif is_all and olds is None:
                    return plans
        return plans

    def _is_done(self, place: int, claim: Claim, old: Plan | None) -> bool:
        if place == len(self._done):
            return False
        known, before, _ = self._done[place]
        return known is claim and before is old

    def _room(self, place: int) -> Room:
        """The room at a position of the sequence, of which no later part is kept."""
        del self._done[place:], self._rooms[place // KEPT_EVERY + 1 :]
        room = self._rooms[-1].copy()
        for claim, _, plan in self._done[KEPT_EVERY * (len(self._rooms) - 1) :]:
            if plan is not None:
                room.give(self._held.get(claim.job_id, ()), claim)
                room.take(plan, claim)
        return room

    def _plan(self, room: Room, claim: Claim, old: Plan | None) -> None:
        """The next one of the row."""
        self.made += 1
        if len(self._done) == KEPT_EVERY * len(self._rooms):
            self._rooms.append(room.copy())
        hold = self._held.get(claim.job_id, ())
        room.give(hold, claim)
        line = room.line(claim)
        if old is None:
            plan = self._anew(claim, line)
        else:
            plan = old if self._still_does(claim, old, line) else None
        room.take(hold if plan is None else plan, claim)
        self._done.append((claim, old, plan))

    def _anew(self, claim: Claim, line: Timeline) -> Plan | None:
        plan = fill(line, claim, self._now_s)
        if plan is None and self._stops and claim.runs and not claim.pauses:
            return fill(line, claim.anew(), self._now_s)
        return plan

    def _still_does(self, claim: Claim, plan: Plan, line: Timeline) -> bool:
        if claim.runs and not claim.pauses and not now_of(plan, self._now_s):
            claim = claim.anew()
        return (
            plan[-1].end_s <= claim.deadline_s
            and all(piece.workers in claim.sizes for piece in plan)
            and (claim.pauses or is_whole(plan))
            and claim.done_by(plan, self._now_s) >= claim.work_s * (1.0 - 1e-6)
            and line.has_room(plan, claim.gpus_per_worker)
        )
