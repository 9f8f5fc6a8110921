"""Mesos: whole nodes are offered to the framework with the smallest share, which takes or declines.

Source: Mesos, NSDI'11, sections 3 and 4. A framework is a tenant. Every `tick_s` the allocator goes
over the nodes and offers all free GPUs of a node to the framework with the smallest dominant share
that has not refused it in the last `refuse_s`. Offered GPUs count as used (pessimistic): no other
framework sees them. The framework starts its jobs in its own order on the offer. GPUs that it
cannot use yet for its first job it hoards for `hoard_s`; then it gives them back and refuses them
for a while. GPUs without a use it declines at once.

No job is preempted: Mesos revokes beyond a guaranteed share only, and the tenants' rules do that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct, structs

from common.model import JobState, NodeName
from coordinator.policies.contract.decisions import Allocation, PendingReason
from coordinator.policies.contract.free_gpus import FreeGpus, takers
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted
from coordinator.policies.knobs import Period
from coordinator.policies.parts.dominant_share import AddedShares
from coordinator.policies.parts.grants import Grant, begin, carry_out, going_on
from coordinator.policies.parts.memory import recalled
from coordinator.policies.parts.resource_vectors import Vector, total_of
from coordinator.policies.policy import Parts, joint
from coordinator.policies.schedulers.mesos.offers import (
    Hoards,
    Refusals,
    Refused,
    Still,
    askers,
    begun,
    ends_s,
)
from coordinator.policies.tenants.infeasible import Fleet
from coordinator.policies.tenants.queues import heads, lines


class MesosKnobs(Struct, frozen=True, kw_only=True):
    """tick_s: time between two allocations (Mesos' default).

    refuse_s: time for which a refused offer is not repeated (Mesos' default).
    hoard_s: time for which accepted offers wait for the rest of a gang; ours, as Mesos has no
        gangs.
    """

    tick_s: Period = 1.0
    refuse_s: Period = 5.0
    hoard_s: Period = 120.0


ALLOCATIONS_OF_A_TURN = 4
"""It is offered nodes, hoards them, gives them back, and is passed over once."""


class Memory(Struct, frozen=True):
    """The memory between passes, all by framework.

    allocated_at_s, number: the last tick, counted from 1.
    hoards: GPUs by node. since_s: since when it hoards.
    refused: nodes that it does not want. given_back: nodes of a hoard that just ended.
    seen, same_since_s, same_count: of `still`, which defines them; stored flat.
    in_vain: whether all had their turns without a start, though the first job of one fits on the
        free GPUs.
    """

    allocated_at_s: float = -1e9
    hoards: dict[str, dict[NodeName, int]] = {}
    since_s: dict[str, float] = {}
    refused: Refused = {}
    seen: int = 0
    same_since_s: float = 0.0
    same_count: int = 0
    number: int = 0
    given_back: tuple[NodeName, ...] = ()
    in_vain: bool = False

    @property
    def still(self) -> Still:
        """Since when free GPUs and waiting jobs are the same."""
        return Still(self.seen, self.same_since_s, self.same_count)


class Offers:
    """One allocation: the offers, and each framework's answers."""

    def __init__(self, knobs: MesosKnobs, snapshot: ClusterSnapshot, before: Memory) -> None:
        self._knobs = knobs
        self._snapshot = snapshot
        self._floor = FreeGpus(snapshot)
        # An infeasible job would hoard for ever, and block those behind it.
        self._lines, self._never = askers(lines(snapshot), Fleet(snapshot, lends=False))
        self._total = total_of(self._floor.nodes.values())
        self._shares = AddedShares(snapshot, self._total)
        self._unallocated = dict(self._floor.free)
        self._idle = dict(self._floor.free)
        self._number = before.number + 1
        self._given_back: tuple[NodeName, ...] = ()
        self.grants: list[Grant] = []
        now_s = snapshot.now_s
        self._refusals = Refusals(number=self._number, now_s=now_s, refuse_s=knobs.refuse_s)
        fitting = self.fitting() if before.in_vain else None
        since_s = begun(before.since_s, self._lines) if fitting is None else {}
        self._hoards = Hoards(since_s, now_s=now_s, hoard_s=knobs.hoard_s)
        if fitting is None:
            self._keep(before.hoards)
            self._refusals.stand(before.refused, self._lines, self._wanted)
            self._offer(before.given_back)
        else:
            self._offer_all(fitting)
        for name in sorted(self._lines):
            self._answer(name)

    def memory(self, still: Still) -> Memory:
        """The memory after it."""
        return Memory(
            allocated_at_s=self._snapshot.now_s,
            hoards=self._hoards.by_owner,
            since_s=self._hoards.since_s,
            refused=self._refusals.by_asker,
            seen=still.seen,
            same_since_s=still.since_s,
            same_count=still.passes,
            number=self._number,
            given_back=self._given_back,
        )

    def is_due(self) -> bool:
        """True if the next tick has something to offer: nodes just refused to the others, or
        refused ones to a framework that hoards.
        """
        return (self._refusals.are_new and len(self._lines) > 1) or any(
            not self._refusals.of(name).isdisjoint(self._useful(name, self._unallocated))
            for name in self._hoards.by_owner
        )

    def fitting(self) -> str | None:
        """Frameworks whose first job would start on all free GPUs, hoarded or not; smallest share
        first.
        """
        waiting = heads(self._lines)
        for name in sorted(waiting, key=self._shares.turns(waiting)):
            self._floor.free = dict(self._idle)
            if begin(self._floor, self._lines[name][0], "") is not None:
                return name
        return None

    # --- the allocator --------------------------------------------------------------------------

    def _keep(self, hoards: Mapping[str, Mapping[NodeName, int]]) -> None:
        """A framework's hoard is offered to no other; GPUs that disappeared are dropped."""
        for name in sorted(hoards.keys() & self._lines):
            for node, gpus in sorted(hoards[name].items()):
                held = min(gpus, self._unallocated.get(node, 0))
                if held > 0:
                    self._unallocated[node] -= held
                    self._give(name, node, held)

    def _give(self, name: str, node: NodeName, gpus: int) -> None:
        """Its share grows by the offer, whatever it makes of it."""
        self._hoards.add(name, node, gpus)
        whole = self._floor.nodes[node]
        part = gpus / whole.gpus
        self._shares.add(name, Vector(float(gpus), whole.cpus * part, whole.memory_bytes * part))

    def _wanted(self, name: str) -> set[NodeName]:
        """A framework that hoards for a gang refuses no node that the gang can use. Otherwise nodes
        that it gave back at different times would never be its own together.
        """
        return self._useful(name, self._unallocated) if self._hoards.is_kept(name) else set()

    def _offer_all(self, name: str) -> None:
        """All give back what they hoard, and one is offered all; refusals start over.

        Turns alone need not end with a start. Frameworks with gangs can pass nodes round for as
        long as others run, and the one that needs least has the greatest share.
        """
        for node, gpus in sorted(self._unallocated.items()):
            if gpus > 0:
                self._give(name, node, gpus)

    def _offer(self, given_back: Sequence[NodeName]) -> None:
        """Offer node by node all free GPUs to the smallest share that has not refused it.

        given_back: of a hoard that lasted too long; the longest hoarder is first. If frameworks
            without a hoard got them, they would go round and no gang would have them all.
        """
        waiting = heads(self._lines)
        for node, gpus in sorted(self._unallocated.items()):
            if gpus <= 0:
                continue
            open_to = [name for name in self._lines if node not in self._refusals.of(name)]
            first = self._hoards.oldest(open_to) if node in given_back else None
            if first is None:
                turn = self._shares.turns({name: waiting[name] for name in open_to})
                first = min(open_to, key=turn, default=None)
            if first is not None:
                self._give(first, node, gpus)

    # --- the framework --------------------------------------------------------------------------

    def _answer(self, name: str) -> None:
        """Start jobs in order on its offers; hoard for the first that lacks some, decline the rest.

        A job that its offers do not hold blocks those behind it: they would use up its GPUs.
        Infeasible jobs are in no line.
        """
        mine, line = self._hoards.of(name), self._lines[name]
        self._floor.free = {node: mine.get(node, 0) for node in self._floor.nodes}
        while line and self._start(line[0]):
            line.pop(0)
        left = {node: gpus for node, gpus in self._floor.free.items() if gpus > 0}
        for node, gpus in mine.items():
            self._idle[node] -= gpus - left.get(node, 0)
        useful = self._useful(name, left)
        if useful and name != self._hoards.gives_back:
            self._hoards.keep(name, {node: gpus for node, gpus in left.items() if node in useful})
            self._refusals.add(name, left.keys() - useful)
            return
        if name == self._hoards.gives_back:
            self._given_back = tuple(sorted(left))
        self._hoards.end(name)
        self._refusals.add(name, left)

    def _useful(self, name: str, gpus: Mapping[NodeName, int]) -> set[NodeName]:
        """Nodes that can take a worker of its first job, among those with a number of GPUs."""
        line = self._lines[name]
        return takers(self._floor, line[0], gpus) if line else set()

    def _start(self, job: JobView) -> bool:
        grant = begin(self._floor, job, f"framework {job.tenant} takes offers of nodes for it")
        if grant is not None:
            self._hoards.renew(job.tenant)
            self.grants.append(grant)
        return grant is not None

    def why_held(self) -> tuple[PendingReason, ...]:
        """Why each job that waits on does."""
        held: list[PendingReason] = []
        waiting = heads(self._lines)
        for name in sorted(waiting, key=self._shares.turns(waiting)):
            line = self._lines[name]
            gpus = counted(sum(self._hoards.of(name).values()), "GPU")
            why = f"framework {name} has offers of {gpus}, too few for its gang"
            for job in line:
                held.append(PendingReason(job_id=job.job_id, blockers=(why,)))
                why = f"behind {line[0].job_id} of its framework, whose gang is not offered"
        never = (PendingReason(job_id=job_id, blockers=why) for job_id, why in self._never.items())
        return (*held, *never)


def _allocate(knobs: MesosKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    before, now_s = recalled(memory, Memory), snapshot.now_s
    next_s = before.allocated_at_s + knobs.tick_s
    if now_s < next_s:
        waits = any(job.state == JobState.PENDING for job in snapshot.jobs)
        return Allocation(decisions=(), memory=memory, wake_at_s=next_s if waits else None)
    offers = Offers(knobs, snapshot, before)
    plan = carry_out(snapshot, [*going_on(snapshot), *offers.grants])
    after = offers.memory(before.still.after(snapshot))
    wake_at_s: float | None = None
    if not _is_in_vain(knobs, after, now_s):
        wake_at_s = now_s + knobs.tick_s if offers.is_due() else _wake_at_s(knobs, after, now_s)
    elif offers.fitting() is not None:
        after, wake_at_s = structs.replace(after, in_vain=True), now_s + knobs.tick_s
    return Allocation(
        decisions=plan.decisions, memory=msgspec.msgpack.encode(after), wake_at_s=wake_at_s
    )


def _is_in_vain(knobs: MesosKnobs, after: Memory, now_s: float) -> bool:
    """Whether all have had their turns with the same free GPUs and the same jobs.

    Turns take their time, and where passes come late their number: each hoards, gives back, and is
    passed over for the others.
    """
    turns = len(after.refused) + 1
    turn_s = knobs.hoard_s + knobs.refuse_s + knobs.tick_s
    return after.still.outlasts(now_s, least_s=turn_s * turns, passes=ALLOCATIONS_OF_A_TURN * turns)


def _wake_at_s(knobs: MesosKnobs, after: Memory, now_s: float) -> float | None:
    """When a refusal or a hoard ends, on a tick: until then nothing new can be offered."""
    ends = [*ends_s(after.refused), *(at_s + knobs.hoard_s for at_s in after.since_s.values())]
    return max(now_s + knobs.tick_s, min(ends)) if ends else None


def _hold(knobs: MesosKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    return Offers(knobs, snapshot, recalled(memory, Memory)).why_held()


POLICIES = (
    joint(
        "mesos",
        "resource offers: whole nodes to the framework with the smallest dominant share",
        knobs=MesosKnobs(),
        allocate=_allocate,
        pending_reasons=_hold,
        by_weight=False,
        parts=Parts(
            order="smallest dominant share of offers, FIFO inside",
            size="base demand",
            place="best fit on the offered nodes",
        ),
    ),
)
