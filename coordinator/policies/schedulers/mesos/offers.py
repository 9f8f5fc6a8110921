"""Offers of Mesos: GPUs hoarded for a gang, the askers, and the filters of declined nodes.

Hoards. Mesos (NSDI'11, section 3.3) lets a framework keep resources until it has enough for a large
task, and warns of deadlock where several do. So hoards end: those that lasted too long, one at a
time and the oldest first. If all ended at once, frameworks would swap their GPUs for ever.

Askers are lines of waiting jobs without infeasible ones. Offers for an infeasible job would be kept
for ever, and the jobs behind it would wait with it. The same holds for a job that only absent nodes
could hold.

Filters (NSDI'11, section 3.2): a framework that declines an offer also says for how long it wants
no other offer of the same node.

A cell stands still while its free GPUs and waiting jobs stay the same. Offers that go round need
not end with a start, so the policy may stop them after a while without change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, KeysView, Mapping
from zlib import crc32

import msgspec
from msgspec import Struct

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.infeasible import Fleet, wish_of


class Still(Struct, frozen=True):
    """The last state of the cell in a few bits, since when it holds, and for how many further
    passes.
    """

    seen: int = 0
    since_s: float = 0.0
    passes: int = 0

    def after(self, snapshot: ClusterSnapshot) -> Still:
        """As of one more pass."""
        seen = _seen(snapshot)
        if seen != self.seen:
            return Still(seen, snapshot.now_s)
        return Still(seen, self.since_s, self.passes + 1)

    def outlasts(self, now_s: float, *, least_s: float, passes: int) -> bool:
        """Whether nothing has changed for longer than that, and for more passes than these."""
        return now_s > self.since_s + least_s and self.passes > passes


def _seen(snapshot: ClusterSnapshot) -> int:
    free = [(node.name, node.free_gpus) for node in snapshot.nodes if node.is_schedulable]
    # A job that waits again gets new offers, and after its pre-run asks for another gang.
    jobs = [
        (job.job_id, job.attempt.number) for job in snapshot.jobs if job.state == JobState.PENDING
    ]
    return crc32(msgspec.msgpack.encode((free, jobs)))


Refusal = tuple[float, int]
"""Until when it holds, and the number of the allocation in which it was made."""

Refused = dict[str, dict[NodeName, Refusal]]
"""Refusals by asker and node."""


class Refusals:
    """The refusals that hold in one allocation.

    by_asker: for the next one. number: of this allocation, counted from 1.
    refuse_s: how long one holds.
    """

    def __init__(self, *, number: int, now_s: float, refuse_s: float) -> None:
        self.by_asker: Refused = {}
        self._number = number
        self._now_s = now_s
        self._until_s = now_s + refuse_s

    def stand(
        self,
        before: Refused,
        askers: Collection[str],
        wanted: Callable[[str], Container[NodeName]],
    ) -> None:
        """Refusals of earlier allocations that have not ended, or not before some others were
        asked.

        Allocations may come later than refusals end, however long these are. If all lapsed
        together, the first asker in order would get the same useless offer again and again. So each
        holds for as many allocations as there are other askers.

        wanted: nodes that an asker would take after all; only the turns of the others count there.
        """
        others = len(askers) - 1
        for asker, nodes in before.items():
            if asker in askers:
                useful = wanted(asker)
                self.by_asker[asker] = {
                    node: (until_s, number)
                    for node, (until_s, number) in nodes.items()
                    if number + others >= self._number
                    or (until_s > self._now_s and node not in useful)
                }

    def add(self, asker: str, nodes: Iterable[NodeName]) -> None:
        """It declines these now."""
        refusal = (self._until_s, self._number)
        self.by_asker.setdefault(asker, {}).update(dict.fromkeys(sorted(nodes), refusal))

    def of(self, asker: str) -> KeysView[NodeName]:
        """The nodes that it is not asked after."""
        return self.by_asker.get(asker, {}).keys()

    @property
    def are_new(self) -> bool:
        """Whether any was made in this allocation."""
        made = (number for nodes in self.by_asker.values() for _, number in nodes.values())
        return any(number == self._number for number in made)


def ends_s(refused: Mapping[str, Mapping[NodeName, Refusal]]) -> list[float]:
    """The instants at which refusals end."""
    return [until_s for nodes in refused.values() for until_s, _ in nodes.values()]


def askers(
    waiting: Mapping[str, Iterable[JobView]], fleet: Fleet
) -> tuple[dict[str, list[JobView]], dict[JobId, tuple[str, ...]]]:
    """Lines of the jobs that could run on the present nodes, in their order, and why each of the
    others could not.

    A line without any feasible job is left out.
    """
    left: dict[str, list[JobView]] = {}
    never: dict[JobId, tuple[str, ...]] = {}
    for name, line in waiting.items():
        for job in line:
            if fleet.is_never(job):
                never[job.job_id] = fleet.why_never(wish_of(job))
            elif absent := fleet.why_absent(wish_of(job)):
                never[job.job_id] = absent
            else:
                left.setdefault(name, []).append(job)
    return left, never


class Hoards:
    """Hoards in one allocation.

    by_owner: GPUs by node. since_s: since when each lasts. gives_back: the owner whose hoard ends
        now; None: none.
    """

    def __init__(self, since_s: Mapping[str, float], *, now_s: float, hoard_s: float) -> None:
        self.by_owner: dict[str, dict[NodeName, int]] = {}
        self.since_s = dict(since_s)
        self._now_s = now_s
        ended = (owner for owner, at_s in since_s.items() if at_s + hoard_s <= now_s)
        self.gives_back = min(ended, key=self._age, default=None)

    def _age(self, owner: str) -> tuple[float, str]:
        return self.since_s[owner], owner

    def add(self, owner: str, node: NodeName, gpus: int) -> None:
        """Offer it this number of GPUs of a node, in addition to those that it has."""
        mine = self.by_owner.setdefault(owner, {})
        mine[node] = mine.get(node, 0) + gpus

    def of(self, owner: str) -> Mapping[NodeName, int]:
        """GPUs by node."""
        return self.by_owner.get(owner, {})

    def keep(self, owner: str, gpus: Mapping[NodeName, int]) -> None:
        """It goes on hoarding this part of its GPUs, or begins to."""
        self.by_owner[owner] = dict(gpus)
        self.since_s.setdefault(owner, self._now_s)

    def end(self, owner: str) -> None:
        """It hoards nothing any more."""
        self.by_owner.pop(owner, None)
        self.since_s.pop(owner, None)

    def renew(self, owner: str) -> None:
        """It got its gang: its hoard from now on is for another one."""
        self.since_s.pop(owner, None)

    def oldest(self, among: Iterable[str]) -> str | None:
        """The owner among these that has hoarded longest; None if none does."""
        hoarding = (owner for owner in among if owner in self.since_s)
        return min(hoarding, key=self._age, default=None)

    def is_kept(self, owner: str) -> bool:
        """Whether it has something, and does not give it back now."""
        return owner in self.by_owner and owner != self.gives_back


def begun(since_s: Mapping[str, float], owners: Container[str]) -> dict[str, float]:
    """Since when those that are still there hoard."""
    return {owner: at_s for owner, at_s in since_s.items() if owner in owners}
