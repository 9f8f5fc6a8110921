"""The arbiter of Themis: leases GPUs out, auctions them, and commits.

GPUs are given on lease. Free GPUs and those whose lease is over are auctioned among the apps with
the worst finish-time fairness; f is the part of apps left out (NSDI'20, section 4). GPUs that the
auction withholds, or that got no bid, go to the apps left out, at random. The rest is auctioned
again until nothing changes. A job whose app wins its GPUs again goes on without a stop. Leases are
per job: workers that it grows by have the lease of its gang. Chance is a count of draws in its
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import floor

from common.model import JobState
from coordinator.policies.contract.cooldown import resizable_at_s
from coordinator.policies.contract.decisions import earliest
from coordinator.policies.contract.free_gpus import FreeGpus, GangShape, can_grow, gang_shape
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.parts.grants import Plan
from coordinator.policies.schedulers.themis.app_standing import (
    Standing,
    standing_of,
    starved,
)
from coordinator.policies.schedulers.themis.auction import Sale
from coordinator.policies.schedulers.themis.commit import committed
from coordinator.policies.schedulers.themis.finish_time_fairness import (
    Yardstick,
    measures,
    racks_of,
)
from coordinator.policies.schedulers.themis.knobs import ThemisKnobs
from coordinator.policies.schedulers.themis.leases import Leases, Meeting, Memory
from coordinator.policies.schedulers.themis.placement_levels import has_room
from coordinator.policies.schedulers.themis.seeded_chance import Chance


class Arbiter:
    """One pass. standings: of all apps. sale: free and returned GPUs, and their takers."""

    def __init__(self, knobs: ThemisKnobs, snapshot: ClusterSnapshot, memory: Memory) -> None:
        self._knobs = knobs
        self._now_s = snapshot.now_s
        self._snapshot = snapshot
        self.memory = memory
        self._chance = Chance(knobs.seed, memory.draws)
        self._floor = FreeGpus(snapshot)
        self.leases = Leases(snapshot, memory, knobs.lease_s, knobs.spread, self._chance)
        growing = [job for job in snapshot.jobs if can_grow(job)]
        rests_until_s = [resizable_at_s(snapshot, job) for job in growing]
        self._rested_at_s = earliest(*rests_until_s)
        # Whether any app wants GPUs that it does not hold, and could use them now.
        self._is_contested = None in rests_until_s or any(
            job.state == JobState.PENDING for job in snapshot.jobs
        )
        if self._is_contested:
            self.leases.end()
        else:
            self.leases.renew_all()
        self.sale = Sale(snapshot, self.leases, knobs, self._chance)
        self.standings = self._standings()

    def _standings(self) -> dict[str, Standing]:
        attendance, knobs = self.memory.attendance, self._knobs
        jobs = attendance.note(self._snapshot)
        yard = Yardstick(
            gpus=max(1, self._floor.total_gpus()),
            now_s=self._now_s,
            aim=knobs.aim,
            alone=knobs.alone,
        )
        found, racks = measures(attendance, yard, jobs), racks_of(self._snapshot)
        return {
            app: standing_of(app, own, attendance.apps[app], found[app], self.leases, racks)
            for app, own in jobs.items()
        }

    # --- the auctions ---------------------------------------------------------------------------

    def run(self) -> None:
        """Auctions and leftovers until nothing changes; then the rest to those that want it."""
        self._serve_starved()
        for _ in range(len(self.standings) + 1):
            wanting = self._wanting()
            if not wanting or not self._round(wanting):
                break
        self._give_rest()
        self.sale.give_idle(self._ranked(), "its GPUs would idle")

    def _ranked(self) -> list[Standing]:
        """All apps, the worst off first; ties by name, as nothing is left to chance here."""
        return sorted(
            self.standings.values(),
            key=lambda s: (-s.priority, -s.rho(self._now_s, self._knobs.lease_s), s.app),
        )

    def _serve_starved(self) -> None:
        """A gang that waited beyond the patience goes first, or leases end together to make its
        room.

        Leases that end one by one would feed small jobs for ever. No GPU idles until then: given
        GPUs have shorter leases. A gang that even the end of all leases cannot help keeps its place
        in the line and delays none behind it.
        """
        since_s = self._now_s - self._knobs.patience * self._knobs.lease_s
        # Nothing changes until a gang is helped, so a result holds for all gangs of its kind:
        # thousands may wait behind jobs that may not be stopped.
        meeting: Meeting | None = None
        fitting: dict[GangShape, bool] = {}
        for standing, job in starved(self.standings.values(), since_s):
            gang = gang_shape(job)
            if gang not in fitting:
                fits = partial(has_room, job, nodes=self._floor.nodes)
                fitting[gang] = fits(self.sale.free)
                if not fitting[gang]:
                    if meeting is None:
                        meeting = self.leases.meeting(self.sale.free)
                    if meeting.is_called(fits):
                        return
            if fitting[gang] and self.sale.give_gang(
                standing, job, "its gang has waited long enough"
            ):
                return

    def _wanting(self) -> list[Standing]:
        """Apps that would take GPUs of those that are free, the worst off first, ties by chance."""
        wanting = [each for each in self.standings.values() if self.sale.is_wanted_by(each)]
        places = {app: at for at, app in enumerate(self._chance.shuffled([s.app for s in wanting]))}
        lease_s = self._knobs.lease_s
        wanting.sort(key=lambda s: (-s.priority, -s.rho(self._now_s, lease_s), places[s.app]))
        return wanting

    def _round(self, wanting: Sequence[Standing]) -> bool:
        """One auction and its leftovers; True if any GPU was given."""
        most = max(1, floor((1.0 - self._knobs.f) * len(wanting) + 1e-9))
        has_changed = self.sale.auction(wanting[:most])
        others = {standing.app: standing for standing in wanting[most:]}
        is_giving = True
        while is_giving and any(self.sale.free.values()):
            is_giving = False
            for app in self._chance.shuffled(sorted(others)):
                is_giving |= self.sale.give_least(others[app], "left over by an auction")
            has_changed |= is_giving
        return has_changed

    def _give_rest(self) -> None:
        """GPUs that all bidders lost as a payment would idle when no app was left out.

        Each gets the least that helps in turn, the worst off first: that is no second auction.
        """
        wanting = self._wanting()
        while wanting:
            is_alone = len(wanting) == 1
            how = "no other app wants them" if is_alone else "withheld from bidders, shared in turn"
            wanting = [each for each in wanting if self.sale.give_least(each, how)]

    #   --- results ------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Decisions, in order of kept and given GPUs."""
        plan = committed(self._snapshot, self._floor, self.leases, self.sale.given)
        self.memory.draws = self._chance.draws
        return plan

    def next_lease_end_s(self) -> float | None:
        """The next end of a lease, while any app wants more."""
        return self.leases.next_end_s if self._is_contested else None

    def wake_at_s(self) -> float | None:
        """When GPUs are auctioned next: a lease ends, or the cooldown of a job that could grow."""
        return earliest(self._rested_at_s, self.next_lease_end_s())
