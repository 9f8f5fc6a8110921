"""Bundles of GPUs that an app bids for, and the rest of one after its payment. Pure."""

from __future__ import annotations

from msgspec import Struct, structs

from coordinator.policies.contract.decisions import Placement
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.schedulers.themis.finish_time_fairness import Held
from coordinator.policies.schedulers.themis.partial_allocation import Bid


class Share(Struct, frozen=True, kw_only=True):
    """Workers for one job.

    more: beyond those whose lease goes on. held: with them. is_grown: it keeps others.
    least: fewer of `more` are of no use.
    """

    job: JobView
    gpu_type: str
    more: tuple[Placement, ...]
    held: Held
    is_grown: bool
    least: int

    @property
    def workers(self) -> int:
        """How many."""
        return sum(placement.worker_count for placement in self.more)

    @property
    def gpus(self) -> int:
        """The GPUs of these workers."""
        return self.workers * self.job.gpus_per_worker


class Bundle(Struct, frozen=True, kw_only=True):
    """One line of a table: shares of the app's jobs, and the bid that stands for them."""

    shares: tuple[Share, ...]
    bid: Bid


def reduced(bundle: Bundle, gpus: int) -> Bundle:
    """The rest of a bundle with a number of GPUs: those go first whose loss hurts least.

    Flexible workers on the node where the job has the fewest go before the others, so that it
    spreads less; then whole gangs, the last one of the ladder first. A gang is whole or absent.
    """
    shares = list(bundle.shares)
    while sum(share.gpus for share in shares) > gpus:
        flexible = [at for at, share in enumerate(shares) if share.workers > share.least]
        if not flexible:
            shares.pop()
            continue
        at = max(flexible, key=lambda at: (shares[at].workers - shares[at].least, at))
        shares[at] = _without_one(shares[at])
    return structs.replace(bundle, shares=tuple(shares))


def _without_one(share: Share) -> Share:
    rarest = min(
        range(len(share.more)), key=lambda at: (share.more[at].worker_count, -at)
    )  # of equal ones the last: a running job's own nodes come first
    more = tuple(
        structs.replace(placement, worker_count=placement.worker_count - (at == rarest))
        for at, placement in enumerate(share.more)
    )
    held = structs.replace(share.held, workers=share.held.workers - 1)
    return structs.replace(
        share, more=tuple(placement for placement in more if placement.worker_count), held=held
    )
