"""GPUs given away in one pass: by auction, or the least that helps the next app.

GPUs are for sale if they are free or their lease is over. Bids come from the agents of apps. The
partial-allocation auction decides (Themis, NSDI'20, section 4). Given GPUs count as held from then
on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from common.model import JobId, NodeName
from coordinator.policies.contract.cooldown import most_workers_now
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.schedulers.themis.app_standing import Standing
from coordinator.policies.schedulers.themis.bids import Agent, Offer
from coordinator.policies.schedulers.themis.bundles import Bundle
from coordinator.policies.schedulers.themis.commit import NOTHING, Given
from coordinator.policies.schedulers.themis.finish_time_fairness import Held, rho_text
from coordinator.policies.schedulers.themis.lease_terms import WORTHS, Horizon, Terms, paid
from coordinator.policies.schedulers.themis.leases import Leases
from coordinator.policies.schedulers.themis.partial_allocation import partial_allocation
from coordinator.policies.schedulers.themis.seeded_chance import Chance


class Sale:
    """One pass.

    free: GPUs by node that are not given yet. given: by job.
    outcome: of each app that bid, its last result as text.
    """

    def __init__(
        self, snapshot: ClusterSnapshot, leases: Leases, terms: Terms, chance: Chance
    ) -> None:
        self._now_s = snapshot.now_s
        self._leases = leases
        self._terms = terms
        self._chance = chance
        self._jobs = snapshot.jobs
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._most = {
            job.job_id: most_workers_now(snapshot, job, job.gpu_type)
            for job in snapshot.jobs
            if job.placed and job.gpu_type is not None
        }
        self.free = leases.offered(FreeGpus(snapshot)).free
        self.given: dict[JobId, Given] = {}
        self.outcome: dict[str, str] = {}
        self._stuck: set[str] = set()
        """Apps that found nothing: the free GPUs only become fewer."""

    def is_wanted_by(self, standing: Standing) -> bool:
        """Whether an app would take GPUs of those that are left."""
        if standing.app in self._stuck or not standing.least_gpus <= sum(self.free.values()) > 0:
            return False
        return self._agent(standing, self._offer(self.free)).wants_any

    def auction(self, bidders: Sequence[Standing]) -> bool:
        """One partial-allocation auction; True if any GPU was given."""
        names = sorted(self.free)
        offer = self._offer(self.free)
        tables = [self._table(standing, offer) for standing in bidders]
        awards = partial_allocation(
            [[bundle.bid for bundle in table] for table in tables],
            [self.free[name] for name in names],
        )
        gave = False
        for standing, table, award in zip(bidders, tables, awards, strict=True):
            if len(table) == 1:
                continue
            won = table[award.bid]
            kept = paid(won, award, self._terms.payment, self._chance, standing.app)
            price = won.bid.gpus - sum(share.gpus for share in kept.shares)
            among = counted(len(bidders), "bidder")
            self.outcome[standing.app] = f"won {counted(won.bid.gpus, 'GPU')} among {among}" + (
                f" and paid {price} of them for the harm to others" if price else ""
            )
            if kept.shares:
                gave = True
                self._give(standing, kept, self.outcome[standing.app])
        return gave

    def give_least(self, standing: Standing, how: str) -> bool:
        """The smallest bundle that makes an app better off, where it already runs if it can."""
        if standing.app in self._stuck:
            return False
        least = self._agent(standing, self._offer(self.free)).least(self._places())
        if least is None:
            self._stuck.add(standing.app)
            return False
        self._give(standing, least, how)
        return True

    def give_gang(self, standing: Standing, job: JobView, how: str) -> bool:
        """A waiting job its base gang, before other jobs of its app; not where it gains nothing."""
        agent = self._agent(standing, self._offer(self.free))
        bundle = agent.waiting_gang(self._places(), only=job)
        if bundle is None or bundle.bid.value <= agent.value * (1.0 + 1e-9):
            return False
        self._give(standing, bundle, how)
        return True

    def give_idle(self, standings: Iterable[Standing], how: str) -> None:
        """Base gangs of waiting jobs, on GPUs that would idle, even if their app gains nothing.

        A trial whose app would be done as soon without it makes no bid, nor does a job to which a
        lease brings next to nothing. They still run where no other job would.
        """
        idle = self._idle()
        for standing in standings:
            while standing.least_gpus <= sum(idle.values()):
                bundle = self._agent(standing, self._offer(idle)).waiting_gang(self._places())
                if bundle is None:
                    break
                self._give(standing, bundle, how)
                idle = self._idle()

    def _idle(self) -> dict[NodeName, int]:
        """The rest that would idle, without GPUs on which a job stays because none took them."""
        idle = dict(self.free)
        for job in self._jobs:
            if job.job_id in self._leases.back and job.job_id not in self.given:
                for worker in self._leases.returned(job):
                    if worker.node in idle:
                        idle[worker.node] = max(0, idle[worker.node] - worker.freed_gpus)
        return idle

    def _places(self) -> dict[NodeName, int]:
        return {name: at for at, name in enumerate(sorted(self.free))}

    def _table(self, standing: Standing, offer: Offer) -> list[Bundle]:
        """An app's bids, the first of them for nothing; one that has no other is out of it."""
        table = self._agent(standing, offer).table(self._places())
        if len(table) == 1:
            self._stuck.add(standing.app)
        return table

    def _offer(self, free: Mapping[NodeName, int]) -> Offer:
        back = frozenset(self._leases.back)
        return Offer(free=free, nodes=self._nodes, back=back, most=self._most)

    def _agent(self, standing: Standing, offer: Offer) -> Agent:
        measure, lease_s = standing.measure, self._terms.lease_s

        def left_s(held: Mapping[JobId, Held]) -> float:
            by_lease_s = measure.left_by_lease_s(held, lease_s)
            # GPUs far apart can be slower than the share. Held for good they would bring no more
            # than nothing does, a lease and the share; for a lease they always bring some work.
            is_for_good = self._terms.horizon == Horizon.GOOD
            return min(measure.left_s(held), by_lease_s) if is_for_good else by_lease_s

        worth_of = WORTHS[self._terms.horizon]
        return Agent(standing.jobs, measure, standing.held, offer, left_s, worth_of)

    def _give(self, standing: Standing, bundle: Bundle, how: str) -> None:
        for share in bundle.shares:
            for placement in share.more:
                gpus = placement.worker_count * share.job.gpus_per_worker
                self.free[placement.node] -= gpus
            standing.held[share.job.job_id] = share.held
        rho = standing.measure.rho(standing.measure.left_s(standing.held))
        why = f"{how}; rho of its {standing.app} {rho_text(rho)} with them"
        for share in bundle.shares:
            before = self.given.get(share.job.job_id, NOTHING).more
            self.given[share.job.job_id] = Given(
                gpu_type=share.gpu_type, more=(*before, *share.more), why=why
            )
            if not share.is_grown:
                self._leases.renew(share.job.job_id)
        standing.record.granted_at_s, standing.record.rho = self._now_s, rho
