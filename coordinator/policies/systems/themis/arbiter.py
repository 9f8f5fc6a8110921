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
from hashlib import sha256
from math import floor, inf

import msgspec
from msgspec import Struct, field

from common.model import JobId, JobState, NodeName
from coordinator.policies.apps import (
    AppRecord,
    Attendance,
    Held,
    Measure,
    Yardstick,
    held_by,
    measures,
    racks_of,
    rho_text,
)
from coordinator.policies.decisions import Placement
from coordinator.policies.floor import Floor, is_movable, present_workers
from coordinator.policies.granting import Grant, Plan, carry_out
from coordinator.policies.placement import merge
from coordinator.policies.snapshot import ClusterSnapshot, JobView
from coordinator.policies.systems.themis.auction import Award, partial_allocation
from coordinator.policies.systems.themis.bids import Agent, Bundle, Offer, reduced
from coordinator.policies.systems.themis.knobs import Horizon, Payment, ThemisKnobs


class Memory(Struct):
    """What the arbiter remembers. draws: how often it has left something to chance.

    meets_at_s: all leases end at this instant at the latest, for a gang that needs many of them.
    """

    attendance: Attendance = field(default_factory=Attendance)
    leases: dict[JobId, float] = field(default_factory=dict[JobId, float])
    draws: int = 0
    meets_at_s: float = 0.0


def read(memory: bytes) -> Memory:
    """From bytes; those of another policy are none of ours."""
    try:
        return msgspec.msgpack.decode(memory, type=Memory)
    except msgspec.MsgspecError:
        return Memory()


class Chance:
    """Draws that follow from a seed and how many there were."""

    def __init__(self, seed: int, draws: int) -> None:
        self._seed = seed
        self.draws = draws

    def shuffled(self, names: Sequence[str]) -> list[str]:
        """In an order that looks like chance."""
        self.draws += 1
        return sorted(names, key=lambda name: self._digest(name))

    def ratio(self, name: str) -> float:
        """From 0 to 1."""
        self.draws += 1
        return int.from_bytes(self._digest(name)[:6]) / float(1 << 48)

    def _digest(self, name: str) -> bytes:
        return sha256(f"{self._seed} {self.draws} {name}".encode()).digest()


class Standing(Struct, kw_only=True):
    """One app in a pass.

    held: what its jobs hold and keep, or were given in this pass. back: what they held until now,
    though its lease is over. least_gpus: with fewer of those that are given away it can do nothing.
    """

    app: str
    jobs: list[JobView]
    record: AppRecord
    measure: Measure
    held: dict[JobId, Held]
    back: dict[JobId, Held]
    priority: int
    least_gpus: int

    def rho(self, now_s: float, lease_s: float) -> float:
        """By which apps are chosen: infinite before its first GPUs; without any it grows.

        That is the long-term compensation: by one of what it was, for each lease that it waits.
        """
        left_s = self.measure.left_s({**self.back, **self.held})
        if left_s < inf:
            return self.measure.rho(left_s)
        if self.record.granted_at_s is None:
            return inf
        return self.record.rho * (1.0 + max(0.0, now_s - self.record.granted_at_s) / lease_s)


class Arbiter:
    """One pass. outcome: of each app that bid, its last result in words."""

    def __init__(self, knobs: ThemisKnobs, snapshot: ClusterSnapshot, memory: Memory) -> None:
        self._knobs = knobs
        self._now_s = snapshot.now_s
        self._snapshot = snapshot
        self.memory = memory
        self._chance = Chance(knobs.seed, memory.draws)
        self._jobs = memory.attendance.note(snapshot)
        self._floor = Floor(snapshot)
        self._nodes = {node.name: node for node in snapshot.nodes}
        yard = Yardstick(
            gpus=max(1, self._floor.total_gpus()),
            now_s=self._now_s,
            aim=knobs.aim,
            alone=knobs.alone,
        )
        self._lease_out()
        self._back = {
            job.job_id
            for job in snapshot.jobs
            if is_movable(job) and memory.leases.get(job.job_id, inf) <= self._now_s
        }
        self._free = dict(self._floor.free)
        for job in snapshot.jobs:
            if job.job_id in self._back:
                self._add(job, 1)
        found = measures(memory.attendance, yard, self._jobs)
        racks = racks_of(snapshot)
        self.standings = {
            app: Standing(
                app=app,
                jobs=jobs,
                record=memory.attendance.apps[app],
                measure=found[app],
                held=held_by((job for job in jobs if job.job_id not in self._back), racks),
                back=held_by((job for job in jobs if job.job_id in self._back), racks),
                priority=max(job.priority for job in jobs),
                least_gpus=min(_least_gpus(job) for job in jobs),
            )
            for app, jobs in self._jobs.items()
        }
        self.given: dict[JobId, tuple[str, tuple[Placement, ...], str]] = {}
        self.outcome: dict[str, str] = {}
        self._stuck: set[str] = set()
        """Apps that found nothing: what is free only becomes less."""

    def _lease_out(self) -> None:
        """Leases of jobs that hold GPUs; of those that another policy started, from their start."""
        leases = self.memory.leases
        self.memory.leases = {
            job.job_id: leases.get(
                job.job_id, (job.started_at_s or self._now_s) + self._knobs.lease_s
            )
            for job in self._snapshot.jobs
            if job.placed
        }

    def _add(self, job: JobView, sign: int) -> None:
        for worker in job.placed:
            if worker.node in self._free and not worker.is_leaving:
                self._free[worker.node] += sign * worker.gpus

    # --- the auctions ---------------------------------------------------------------------------

    def run(self) -> None:
        """Auctions and leftovers until nothing changes; then the rest to those that want it."""
        if not self._is_contested():
            self._keep_all()
        self._meet()
        for _ in range(len(self.standings) + 1):
            wanting = self._wanting()
            if not wanting or not self._round(wanting):
                break
        for standing in self._wanting():
            while self._give_least(standing, "nobody else wants them"):
                pass
        self.memory.draws = self._chance.draws

    def _is_contested(self) -> bool:
        """Whether anybody wants what it does not hold."""
        return any(job.state == JobState.PENDING or _can_grow(job) for job in self._snapshot.jobs)

    def _meet(self) -> None:
        """Let all leases end together if the worst off waits for a gang with too little on offer.

        Leases that end one by one would feed small jobs for ever. Nothing idles until then: what
        is given is given for less long.
        """
        now_s, lease_s = self._now_s, self._knobs.lease_s
        patience_s = self._knobs.patience * lease_s
        free, gpus = sum(self._free.values()), self._floor.total_gpus()
        if not self.standings or self.memory.meets_at_s > now_s:
            return
        worst = max(self.standings.values(), key=lambda s: (s.priority, s.rho(now_s, lease_s)))
        is_starved = any(
            job.state == JobState.PENDING
            and free < job.workers.min * job.gpus_per_worker <= gpus
            and now_s - (job.waiting_since_s or job.submitted_at_s) >= patience_s
            for job in worst.jobs
        )
        if is_starved:
            ends = (end_s for job, end_s in self.memory.leases.items() if job not in self._back)
            self.memory.meets_at_s = max(ends, default=now_s)

    def _lease_end_s(self) -> float:
        end_s = self._now_s + self._knobs.lease_s
        meets_at_s = self.memory.meets_at_s
        return min(end_s, meets_at_s) if meets_at_s > self._now_s else end_s

    def _keep_all(self) -> None:
        """Nobody else bids: everybody has its GPUs for another lease."""
        for job_id in self._back:
            self.memory.leases[job_id] = self._lease_end_s()
        self._back.clear()

    def _agent(self, standing: Standing) -> Agent:
        offer = Offer(free=self._free, nodes=self._nodes, back=frozenset(self._back))
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
            before = self.given.get(share.job.job_id, ("", (), ""))[1]
            self.given[share.job.job_id] = (share.gpu_type, (*before, *share.more), why)
            if not share.is_grown:
                self.memory.leases[share.job.job_id] = self._lease_end_s()
        standing.record.granted_at_s, standing.record.rho = self._now_s, rho

    # --- what comes of it -----------------------------------------------------------------------

    def plan(self) -> Plan:
        """Decisions, in order of what is kept and what is given."""
        grants = [grant for job in self._snapshot.jobs if (grant := self._grant(job)) is not None]
        plan = carry_out(self._snapshot, grants, floor=self._floor, place=self._place)
        for job_id in self._back - self.given.keys():
            # Whoever is stopped has no lease; whoever is spared has its GPUs for another one.
            self.memory.leases[job_id] = self._lease_end_s()
        return plan

    def _grant(self, job: JobView) -> Grant | None:
        is_kept = job.state != JobState.PENDING and job.job_id not in self._back
        if not is_kept and job.job_id not in self.given:
            return None
        gpu_type, more, why = self.given.get(job.job_id, ("", (), "its lease goes on"))
        workers = sum(placement.worker_count for placement in more)
        if job.state == JobState.PENDING:
            return Grant(
                job=job,
                workers=workers,
                reason=why,
                gpu_type=gpu_type,
                placements=merge(list(more)),
            )
        kept = present_workers(job) if is_kept else 0
        return Grant(job=job, workers=kept + workers, reason=why)

    def _place(
        self, floor: Floor, job: JobView, gpu_type: str, count: int
    ) -> tuple[Placement, ...]:
        """Where a running job grows: as was decided, beyond what it holds there."""
        _, more, _ = self.given.get(job.job_id, ("", (), ""))
        own: dict[NodeName, int] = {}
        if job.job_id in self._back:
            for worker in job.placed:
                if not worker.is_leaving:
                    own[worker.node] = own.get(worker.node, 0) + 1
        found: list[Placement] = []
        for placement in more:
            stays = min(own.get(placement.node, 0), placement.worker_count)
            own[placement.node] = own.get(placement.node, 0) - stays
            room = floor.free.get(placement.node, 0) // job.gpus_per_worker
            here = min(placement.worker_count - stays, room, count)
            if here > 0:
                count -= here
                found.append(Placement(node=placement.node, worker_count=here))
        return tuple(found)

    def wake_at_s(self) -> float | None:
        """The next end of a lease, while anybody wants more."""
        if not self._is_contested():
            return None
        ends = [end_s for end_s in self.memory.leases.values() if end_s > self._now_s]
        return min(ends, default=None)


def _can_grow(job: JobView) -> bool:
    gpu_type = job.gpu_type if job.is_resizable else None
    return gpu_type is not None and present_workers(job) < job.workers_on(gpu_type).max


def _least_gpus(job: JobView) -> int:
    return job.gpus_per_worker * (1 if job.is_elastic else job.workers.min)
