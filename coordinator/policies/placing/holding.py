"""Gangs that hold GPUs which are free now until the rest of them is: who holds what in a pass.

Gang scheduling by the Philly study (ATC'19, section 2.3). What a gang holds nobody else is given;
it lets go of all of it while it backs off (`tries`). Who holds goes on before another one of its
line begins to. Must not know whose turn it is, nor who may hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping

from msgspec import Struct, structs

from common.model import JobId, NodeName
from coordinator.policies.floor import Floor
from coordinator.policies.placing.gang_tries import Patience, Try, try_at
from coordinator.policies.placing.locality import Gang, part


class Attempted(Struct, frozen=True):
    """A job that does not fit: since when, and the GPUs that it holds, by node."""

    since_s: float
    held: dict[NodeName, int] = {}


def out_of_sight(
    before: Mapping[JobId, Attempted], unseen: Container[JobId]
) -> dict[JobId, Attempted]:
    """Of jobs that wait unseen: they age like the others, and hold nothing, as they cannot use it.

    Forgotten they would come back as gangs that never tried, at the strictest locality.
    """
    return {
        job_id: Attempted(tried.since_s) for job_id, tried in before.items() if job_id in unseen
    }


class Holding:
    """What gangs hold of a floor; it is not free there meanwhile.

    most: gangs of one line that hold at a time.
    """

    def __init__(self, floor: Floor, patience: Patience, now_s: float, most: int) -> None:
        self._floor = floor
        self._patience = patience
        self._now_s = now_s
        self._most = most
        self._holders = Counter[str]()

    def age(self, tried: Attempted) -> Try:
        """Where a gang is in its tries."""
        return try_at(self._patience, tried.since_s, self._now_s)

    def resume(self, line: str, tried: Attempted) -> Attempted:
        """A gang goes on holding what it held before, as far as it may and that is still there."""
        free, kept = self._floor.free, dict[NodeName, int]()
        if self.age(tried).may_hold:
            there = {name: min(gpus, free.get(name, 0)) for name, gpus in tried.held.items()}
            kept = {name: gpus for name, gpus in there.items() if gpus}
        self._hold(kept)
        if kept:
            self._holders[line] += 1
        return structs.replace(tried, held=kept)

    def let_go(self, tried: Attempted) -> None:
        """What a gang holds is free."""
        self._hold(tried.held, -1)

    def acquire(self, line: str, gangs: Iterable[Gang], tried: Attempted) -> dict[NodeName, int]:
        """What a gang that let go holds from now on, of what it finds on the first type that has.

        Nothing where others of its line hold already.
        """
        age = self.age(tried)
        if not tried.held and self._holders[line] >= self._most:
            return {}
        for gang in gangs:
            held = part(self._floor, gang, age.level, tried.held)
            if held:
                self._holders[line] += not tried.held
                self._hold(held)
                return held
        return {}

    def _hold(self, held: Mapping[NodeName, int], sign: int = 1) -> None:
        for name, gpus in held.items():
            self._floor.free[name] -= sign * gpus
