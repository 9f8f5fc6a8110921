"""Plans of claims one after another, each on what those before it leave. Pure.

Rows that are tried one after the other mostly begin alike: what two of them begin with is planned
once. Must not know who is promised what, nor why a row is tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.policies.deadlines.quotas import Room
from coordinator.policies.deadlines.shares import Claim, fill
from coordinator.policies.deadlines.timeline import Plan

KEPT_EVERY = 32
"""Of so many claims of a row the room before the first one is remembered."""


class Row:
    """The row that was planned last.

    Args:
        room: what all of them have together.
    """

    def __init__(self, room: Room, now_s: float) -> None:
        self._now_s = now_s
        self._rooms = [room]
        self._done: list[tuple[Claim, Plan | None]] = []

    def plans(self, claims: Sequence[Claim], *, is_all: bool) -> dict[str, Plan]:
        """By job, those of the claims that have one.

        is_all: it is no use to go on behind the first one that has none.
        """
        self._keep(claims)
        room = self._room()
        for claim in claims[len(self._done) :]:
            if is_all and self._done and self._done[-1][1] is None:
                break
            if len(self._done) == KEPT_EVERY * len(self._rooms):
                self._rooms.append(room.copy())
            plan = fill(room.line(claim), claim, self._now_s)
            room.take(plan or (), claim)
            self._done.append((claim, plan))
        return {claim.job_id: plan for claim, plan in self._done if plan is not None}

    def _keep(self, claims: Sequence[Claim]) -> None:
        """What this row begins with as well."""
        pairs = enumerate(zip(self._done, claims, strict=False))
        alike = min(len(self._done), len(claims))
        same = next((at for at, ((known, _), claim) in pairs if known is not claim), alike)
        del self._done[same:], self._rooms[same // KEPT_EVERY + 1 :]

    def _room(self) -> Room:
        """What these leave."""
        room = self._rooms[-1].copy()
        for claim, plan in self._done[KEPT_EVERY * (len(self._rooms) - 1) :]:
            room.take(plan or (), claim)
        return room
