"""The arbiter of Themis: it leases GPUs out, auctions them, and commits. Must not know the engine.

GPUs are given on lease. Those that are free or whose lease is over are auctioned among the apps
whose finish-time fairness is worst, f being the part that is left out (NSDI'20, section 4). What
the auction withholds or nobody bid for goes to those that were left out, at random, and the rest is
auctioned again until nothing changes. A job whose app wins its GPUs again goes on without a stop.
Leases are per job: workers that it grows by have the lease of its gang. Chance is a count of draws
in its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import floor, inf

from common.model import JobId, JobState, NodeName
from coordinator.policies.apps import Held, Yardstick, measures, racks_of, rho_text
from coordinator.policies.auctions.bids import Agent, Offer
from coordinator.policies.auctions.bundles import Bundle, reduced
from coordinator.policies.auctions.chance import Chance
from coordinator.policies.auctions.committing import NOTHING, Given, committed
from coordinator.policies.auctions.leases import Leases, Memory
from coordinator.policies.auctions.partial_allocation import Award, partial_allocation
from coordinator.policies.auctions.standing import Standing, standing_of
from coordinator.policies.floor import Floor, present_workers
from coordinator.policies.granting import Plan
from coordinator.policies.snapshot import ClusterSnapshot, JobView
from coordinator.policies.systems.themis.knobs import Horizon, Payment, ThemisKnobs


class Arbiter:
    """One pass. outcome: of each app that bid, its last result in words."""

    def __init__(self, knobs: ThemisKnobs, snapshot: ClusterSnapshot, memory: Memory) -> None:
        self._knobs = knobs
        self._now_s = snapshot.now_s
        self._snapshot = snapshot
        self.memory = memory
        self._chance = Chance(knobs.seed, memory.draws)
        self._floor = Floor(snapshot)
        self._nodes = {node.name: node for node in snapshot.nodes}
        self.leases = Leases(snapshot, memory, knobs.lease_s, knobs.spread, self._chance)
        # Whether anybody wants what it does not hold.
        self._is_contested = any(
            job.state == JobState.PENDING or _can_grow(job) for job in snapshot.jobs
        )
        if self._is_contested:
            self.leases.end()
        else:
            self.leases.renew_all()
        self._free = self.leases.offered(Floor(snapshot)).free
        self.standings = self._standings()
        self.given: dict[JobId, Given] = {}
        self.outcome: dict[str, str] = {}
        self._stuck: set[str] = set()
        """Apps that found nothing: what is free only becomes less."""

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
        for standing in self._wanting():
            while self._give_least(standing, "nobody else wants them"):
                pass

    def _serve_starved(self) -> None:
        """A gang that waited out our patience goes first, or leases end together to make its room.

        Leases that end one by one would feed small jobs for ever. Nothing idles until then: what
        is given is given for less long.
        """
        found = self._starved()
        if found is None:
            return
        standing, job = found
        if self._has_room(job, self._free):
            self._give_least(standing, "its gang has waited long enough")
        elif self.memory.meets_at_s <= self._now_s:
            self.leases.meet(self._free, partial(self._has_room, job))

    def _starved(self) -> tuple[Standing, JobView] | None:
        """Of the jobs that wait too long the one that waits longest, and its app."""
        since_s = self._now_s - self._knobs.patience * self._knobs.lease_s
        waiting = (
            (-job.priority, job.waiting_since_s or job.submitted_at_s, job.job_id, standing, job)
            for standing in self.standings.values()
            for job in standing.jobs
            if job.state == JobState.PENDING
        )
        longest = min((each for each in waiting if each[1] <= since_s), default=None)
        return None if longest is None else longest[3:]

    def _has_room(self, job: JobView, room: Mapping[NodeName, int]) -> bool:
        """Whether a gang could start on this many GPUs by node."""
        for gpu_type in self._floor.gpu_types:
            workers = sum(
                gpus // job.gpus_per_worker
                for name, gpus in room.items()
                if self._nodes[name].gpu_type == gpu_type and name not in job.avoid_nodes
            )
            if job.accepts(gpu_type) and workers >= job.workers_on(gpu_type).min:
                return True
        return False

    def _agent(self, standing: Standing) -> Agent:
        offer = Offer(free=self._free, nodes=self._nodes, back=frozenset(self.leases.back))
        measure, lease_s = standing.measure, self._knobs.lease_s

        def left_s(held: Mapping[JobId, Held]) -> float:
            for_good_s = measure.left_s(held)
            if self._knobs.horizon == Horizon.GOOD and for_good_s < inf:
                return min(for_good_s, lease_s + measure.share_left_s)
            return measure.left_by_lease_s(held, lease_s)

        return Agent(standing.jobs, measure, standing.held, offer, left_s)

    def _wanting(self) -> list[Standing]:
        """Apps that would take GPUs of those that are free, the worst off first, ties by chance."""
        free = sum(self._free.values())
        wanting = [
            standing
            for app, standing in self.standings.items()
            if app not in self._stuck
            and standing.least_gpus <= free > 0
            and self._agent(standing).wants_any
        ]
        places = {app: at for at, app in enumerate(self._chance.shuffled([s.app for s in wanting]))}
        lease_s = self._knobs.lease_s
        wanting.sort(key=lambda s: (-s.priority, -s.rho(self._now_s, lease_s), places[s.app]))
        return wanting

    def _round(self, wanting: Sequence[Standing]) -> bool:
        """One auction and its leftovers; whether anybody was given anything."""
        most = max(1, floor((1.0 - self._knobs.f) * len(wanting) + 1e-9))
        has_changed = self._auction(wanting[:most])
        others = {standing.app: standing for standing in wanting[most:]}
        is_giving = True
        while is_giving and any(self._free.values()):
            is_giving = False
            for app in self._chance.shuffled(sorted(others)):
                is_giving |= self._give_least(others[app], "left over by an auction")
            has_changed |= is_giving
        return has_changed

    def _auction(self, bidders: Sequence[Standing]) -> bool:
        names = sorted(self._free)
        places = {name: at for at, name in enumerate(names)}
        tables = [self._agent(standing).table(places) for standing in bidders]
        awards = partial_allocation(
            [[bundle.bid for bundle in table] for table in tables],
            [self._free[name] for name in names],
        )
        gave = False
        for standing, table, award in zip(bidders, tables, awards, strict=True):
            if len(table) == 1:
                self._stuck.add(standing.app)
                continue
            won = table[award.bid]
            kept = self._kept(standing, won, award)
            paid = won.bid.gpus - sum(share.gpus for share in kept.shares)
            self.outcome[standing.app] = f"won {won.bid.gpus} GPUs among {len(bidders)} bidders" + (
                f" and paid {paid} of them for the harm to others" if paid else ""
            )
            if kept.shares:
                gave = True
                self._give(standing, kept, self.outcome[standing.app])
        return gave

    def _kept(self, standing: Standing, won: Bundle, award: Award) -> Bundle:
        """What is left of a bundle after its payment."""
        payment = self._knobs.payment
        if award.kept_ratio >= 1.0 or payment == Payment.NONE:
            return won
        kept = reduced(won, 0 if payment == Payment.LOTTERY else award.kept_gpus(won.bid))
        if kept.shares or payment == Payment.FLOOR:
            return kept
        return won if self._chance.ratio(standing.app) < award.kept_ratio else kept

    def _give_least(self, standing: Standing, how: str) -> bool:
        """The smallest bundle that makes an app better off, where it already runs if it can."""
        if standing.app in self._stuck:
            return False
        names = {name: at for at, name in enumerate(sorted(self._free))}
        table = self._agent(standing).table(names)
        if len(table) == 1:
            self._stuck.add(standing.app)
            return False
        self._give(standing, table[1], how)
        return True

    def _give(self, standing: Standing, bundle: Bundle, how: str) -> None:
        for share in bundle.shares:
            for placement in share.more:
                gpus = placement.worker_count * share.job.gpus_per_worker
                self._free[placement.node] -= gpus
            standing.held[share.job.job_id] = share.held
        rho = standing.measure.rho(standing.measure.left_s(standing.held))
        why = f"{how}; rho of its {standing.app} {rho_text(rho)} with them"
        for share in bundle.shares:
            before = self.given.get(share.job.job_id, NOTHING).more
            self.given[share.job.job_id] = Given(
                gpu_type=share.gpu_type, more=(*before, *share.more), why=why
            )
            if not share.is_grown:
                self.leases.renew(share.job.job_id)
        standing.record.granted_at_s, standing.record.rho = self._now_s, rho

    # --- what comes of it -----------------------------------------------------------------------

    def plan(self) -> Plan:
        """Decisions, in order of what is kept and what is given."""
        plan = committed(self._snapshot, self._floor, self.leases, self.given)
        self.memory.draws = self._chance.draws
        return plan

    def wake_at_s(self) -> float | None:
        """The next end of a lease, while anybody wants more."""
        return self.leases.next_end_s if self._is_contested else None


def _can_grow(job: JobView) -> bool:
    gpu_type = job.gpu_type if job.is_resizable else None
    return gpu_type is not None and present_workers(job) < job.workers_on(gpu_type).max
