"""Mesos: nodes are offered whole to the framework with the smallest share, which takes or declines.

Source: Mesos, NSDI'11, sections 3 and 4. A framework is a tenant. Every `tick_s` the allocator goes
over the nodes; all that is free of one is offered to the framework with the smallest dominant share
that has not refused it in the last `refuse_s`. Offered GPUs count as used (pessimistic): nobody
else sees them. The framework starts its jobs in its own order on what it was offered; what it
cannot use yet for its first job it hoards for `hoard_s` and then gives back, refusing it for a
while. What it has no use for it declines at once. Must not know the engine.

Nobody is stopped: Mesos revokes beyond a guaranteed share only, and that is the rule of tenants.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

import msgspec
from msgspec import Struct, structs

from common.model import JobState, NodeName
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import Allocation
from coordinator.policies.floor import Floor
from coordinator.policies.granting import Grant, begin, carry_out, going_on
from coordinator.policies.knob_types import Period
from coordinator.policies.never import Fleet, wish_of
from coordinator.policies.placing.vectors import (
    Vector,
    dominant,
    shares,
    weights_of,
)
from coordinator.policies.policy import Parts, joint
from coordinator.policies.recall import recalled
from coordinator.policies.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.lines import lines
from coordinator.policies.words import counted


class MesosKnobs(Struct, frozen=True, kw_only=True):
    """tick_s: between two allocations. refuse_s: how long a refusal holds (both Mesos' defaults).

    hoard_s: how long accepted offers wait for the rest of a gang; ours, as Mesos has no gangs.
    """

    tick_s: Period = 1.0
    refuse_s: Period = 5.0
    hoard_s: Period = 120.0


ALLOCATIONS_OF_A_TURN = 4
"""It is offered nodes, hoards them, gives them back, and is passed over once."""

Refusal = tuple[float, int]
"""Until when it holds, and the number of the allocation in which it was made."""


class Memory(Struct, frozen=True):
    """What is remembered between passes, all by framework.

    allocated_at_s, number: the last tick, counted from 1. hoards: GPUs by node. since_s: since when
    it hoards. refused: nodes that it does not want. given_back: nodes of a hoard that just ended.
    seen: free GPUs and waiting jobs in a few bits; same_since_s: since when they are these, and
    same_count: for how many allocations after the one that saw them first. in_vain: whether all
    have had their turns in vain, though the first job of one fits on what is free.
    """

    allocated_at_s: float = -1e9
    hoards: dict[str, dict[NodeName, int]] = {}
    since_s: dict[str, float] = {}
    refused: dict[str, dict[NodeName, Refusal]] = {}
    seen: int = 0
    same_since_s: float = 0.0
    same_count: int = 0
    number: int = 0
    given_back: tuple[NodeName, ...] = ()
    in_vain: bool = False


class Offers:
    """One allocation: what is offered to whom, and what each makes of it."""

    def __init__(self, knobs: MesosKnobs, snapshot: ClusterSnapshot, before: Memory) -> None:
        self._knobs = knobs
        self._snapshot = snapshot
        self._floor = Floor(snapshot)
        fleet = Fleet(snapshot)
        self._lines: dict[str, list[JobView]] = {}
        self._never: list[Hold] = []
        for name, line in lines(snapshot).items():
            for job in line:
                if fleet.is_never(job):  # it would hoard for ever, and block those behind it
                    never = fleet.why_never(wish_of(job))
                    self._never.append(Hold(job_id=job.job_id, blockers=never))
                else:
                    self._lines.setdefault(name, []).append(job)
        self._weights = weights_of(snapshot)
        nodes = self._floor.nodes.values()
        self._total = Vector(
            float(sum(node.gpus for node in nodes)),
            float(sum(node.cpus for node in nodes)),
            float(sum(node.memory_bytes for node in nodes)),
        )
        self._shares = shares(snapshot, self._total, self._weights)
        now_s = snapshot.now_s
        self.number = before.number + 1
        self.since_s = {k: at_s for k, at_s in before.since_s.items() if k in self._lines}
        self.hoards: dict[str, dict[NodeName, int]] = {}
        self.grants: list[Grant] = []
        ended = [k for k, at_s in self.since_s.items() if at_s + knobs.hoard_s <= now_s]
        # One gives back at a time: if all did, they would swap what they have for ever.
        self._gives_back = min(ended, key=lambda k: (self.since_s[k], k), default=None)
        self._unallocated = dict(self._floor.free)
        self._idle = dict(self._floor.free)
        self.refused: dict[str, dict[NodeName, Refusal]] = {}
        self.given_back: tuple[NodeName, ...] = ()
        fitting = self.fitting() if before.in_vain else None
        if fitting is not None:
            self._offer_all(fitting)
        else:
            for name in sorted(before.hoards):
                if name in self._lines:
                    self._keep(name, before.hoards[name])
            self.refused = self._standing(before)
            self._offer(before.given_back)
        for name in sorted(self._lines):
            self._answer(name)

    def _keep(self, name: str, hoard: dict[NodeName, int]) -> None:
        """What a framework hoards is offered to nobody else; what is gone is gone."""
        for node, gpus in sorted(hoard.items()):
            held = min(gpus, self._unallocated.get(node, 0))
            if held > 0:
                self._unallocated[node] -= held
                self._hold(name, node, held)

    def _hold(self, name: str, node: NodeName, gpus: int) -> None:
        hoard = self.hoards.setdefault(name, {})
        hoard[node] = hoard.get(node, 0) + gpus
        whole = self._floor.nodes[node]
        part = gpus / whole.gpus
        more = Vector(float(gpus), whole.cpus * part, whole.memory_bytes * part)
        share = dominant(more, self._total, self._weights.get(name, 1.0))
        self._shares[name] = self._shares.get(name, 0.0) + share

    def _standing(self, before: Memory) -> dict[str, dict[NodeName, Refusal]]:
        """Refusals that have not ended, or that some of the others were not asked after yet.

        Passes may come later than refusals end, whatever `refuse_s` is: were all to lapse together,
        the smallest share would be offered what it has no use for again and again. So each holds
        for as many allocations as there are others. Who hoards for a gang refuses nothing that the
        gang can use: nodes that it gave back at different times would else never be its own
        together.
        """
        turns = len(self._lines) - 1
        standing: dict[str, dict[NodeName, Refusal]] = {}
        for name, nodes in before.refused.items():
            if name in self._lines:
                is_hoarding = name in self.hoards and name != self._gives_back
                free = self._unallocated if is_hoarding else {}
                useful = self._useful(self._lines[name][0], free)
                standing[name] = {
                    node: refusal
                    for node, refusal in nodes.items()
                    if refusal[1] + turns >= self.number
                    or (refusal[0] > self._snapshot.now_s and node not in useful)
                }
        return standing

    def is_due(self) -> bool:
        """Whether the next tick has something to offer: what one refused just now to the others,
        or to whoever hoards what it refused before."""
        just_now = any(
            number == self.number for nodes in self.refused.values() for _, number in nodes.values()
        )
        return (just_now and len(self._lines) > 1) or any(
            not self.refused.get(name, {})
            .keys()
            .isdisjoint(self._useful(self._lines[name][0], self._unallocated))
            for name in self.hoards
            if self._lines[name]
        )

    def fitting(self) -> str | None:
        """Whose first job would start on all that is free, hoarded or not; smallest share first."""
        for name in sorted(self._lines, key=lambda name: (self._shares.get(name, 0.0), name)):
            self._floor.free = dict(self._idle)
            line = self._lines[name]
            if line and begin(self._floor, line[0], "") is not None:
                return name
        return None

    def _offer_all(self, name: str) -> None:
        """All give back what they hoard, and one is offered all; refusals start anew.

        Turns alone need not end with a start: frameworks with gangs can pass nodes round for as
        long as others run, and the one in need of the least has the greatest share.
        """
        self.since_s, self._gives_back = {}, None
        for node, gpus in sorted(self._unallocated.items()):
            if gpus > 0:
                self._hold(name, node, gpus)

    def _offer(self, given_back: Sequence[NodeName]) -> None:
        """Node by node, all that is free, to the smallest share that has not refused it.

        given_back: of a hoard that lasted too long; whoever hoards for longest is first: were they
            offered to whoever has none yet, they would go round and no gang would have them all.
        """
        for node, gpus in sorted(self._unallocated.items()):
            open_to = [
                name for name in self._lines if gpus > 0 and node not in self.refused.get(name, {})
            ]
            if node in given_back:
                hoarding = [name for name in open_to if name in self.since_s]
                open_to = sorted(hoarding, key=lambda k: (self.since_s[k], k))[:1] or open_to
            if open_to:
                first = min(open_to, key=lambda name: (self._shares.get(name, 0.0), name))
                self._hold(first, node, gpus)

    # --- the framework --------------------------------------------------------------------------

    def _answer(self, name: str) -> None:
        """Start jobs in order on its offers; hoard for the first that lacks some, decline the rest.

        A job that its offers do not hold blocks those behind it: they would eat what it waits for.
        Those that could not run in the fleet as it is are in no line.
        """
        mine = self.hoards.get(name, {})
        line = self._lines[name]
        self._floor.free = {node: mine.get(node, 0) for node in self._floor.nodes}
        while line and self._start(line[0]):
            line.pop(0)
        left = {node: gpus for node, gpus in self._floor.free.items() if gpus > 0}
        for node, gpus in mine.items():
            self._idle[node] -= gpus - left.get(node, 0)
        useful = self._useful(line[0], left) if line else set[NodeName]()
        now_s = self._snapshot.now_s
        since_s = self.since_s.get(name, now_s)
        if line and useful and name != self._gives_back:
            self.since_s[name] = since_s
            self.hoards[name] = {node: gpus for node, gpus in left.items() if node in useful}
            self._refuse(name, left.keys() - useful)
        else:
            self.since_s.pop(name, None)
            self.hoards.pop(name, None)
            self._refuse(name, left)
            if name == self._gives_back:
                self.given_back = tuple(sorted(left))

    def _useful(self, job: JobView, left: dict[NodeName, int]) -> set[NodeName]:
        """Nodes that can take a worker of a job."""
        kinds = job.gpu.types or self._floor.gpu_types
        return {
            node
            for node, gpus in left.items()
            if gpus >= job.gpus_per_worker
            and self._floor.nodes[node].gpu_type in kinds
            and node not in job.avoid_nodes
        }

    def _refuse(self, name: str, nodes: Iterable[NodeName]) -> None:
        refusal = (self._snapshot.now_s + self._knobs.refuse_s, self.number)
        self.refused.setdefault(name, {}).update(dict.fromkeys(sorted(nodes), refusal))

    def _start(self, job: JobView) -> bool:
        grant = begin(self._floor, job, f"framework {job.tenant} takes offers of nodes for it")
        if grant is not None:
            self.since_s.pop(job.tenant, None)
            self.grants.append(grant)
        return grant is not None

    def why_held(self) -> tuple[Hold, ...]:
        """Why each job that waits on does."""
        held: list[Hold] = []
        for name, line in sorted(self._lines.items()):
            for place, job in enumerate(line):
                gpus = sum(self.hoards.get(name, {}).values())
                first = (
                    f"framework {name} has offers of {counted(gpus, 'GPU')}, too few for its gang"
                )
                behind = f"behind {line[0].job_id} of its framework, whose gang is not offered"
                held.append(Hold(job_id=job.job_id, blockers=(behind if place else first,)))
        return (*held, *self._never)


def _allocate(knobs: MesosKnobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    before, now_s = recalled(memory, Memory), snapshot.now_s
    next_s = before.allocated_at_s + knobs.tick_s
    waits = any(job.state == JobState.PENDING for job in snapshot.jobs)
    if now_s < next_s:
        return Allocation(decisions=(), memory=memory, wake_at_s=next_s if waits else None)
    offers = Offers(knobs, snapshot, before)
    plan = carry_out(snapshot, [*going_on(snapshot), *offers.grants])
    seen = _seen(snapshot)
    after = Memory(
        seen=seen,
        same_since_s=before.same_since_s if seen == before.seen else now_s,
        same_count=before.same_count + 1 if seen == before.seen else 0,
        allocated_at_s=now_s,
        hoards=offers.hoards,
        since_s=offers.since_s,
        refused=offers.refused,
        number=offers.number,
        given_back=offers.given_back,
    )
    wake_at_s: float | None = None
    in_vain = _is_in_vain(knobs, after, now_s)
    if in_vain and offers.fitting() is not None:
        after, wake_at_s = structs.replace(after, in_vain=True), now_s + knobs.tick_s
    elif not in_vain:
        wake_at_s = now_s + knobs.tick_s if offers.is_due() else _wake_at_s(knobs, after, now_s)
    return Allocation(
        decisions=plan.decisions, memory=msgspec.msgpack.encode(after), wake_at_s=wake_at_s
    )


def _seen(snapshot: ClusterSnapshot) -> int:
    free = [(node.name, node.free_gpus) for node in snapshot.nodes if node.is_schedulable]
    # Who waits again is offered anew, and after its pre-run asks for another gang.
    jobs = [(job.job_id, job.attempt) for job in snapshot.jobs if job.state == JobState.PENDING]
    return crc32(msgspec.msgpack.encode((free, jobs)))


def _is_in_vain(knobs: MesosKnobs, after: Memory, now_s: float) -> bool:
    """Whether all have had their turns with the same free GPUs and the same jobs.

    Turns take their time, and where passes come late their number: each hoards, gives back, and is
    passed over for the others.
    """
    turns = len(after.refused) + 1
    turns_s = (knobs.hoard_s + knobs.refuse_s + knobs.tick_s) * turns
    is_late = now_s > after.same_since_s + turns_s
    return is_late and after.same_count > ALLOCATIONS_OF_A_TURN * turns


def _wake_at_s(knobs: MesosKnobs, after: Memory, now_s: float) -> float | None:
    """When a refusal or a hoard ends, on a tick: until then nothing new can be offered."""
    ends = [at_s for nodes in after.refused.values() for at_s, _ in nodes.values()]
    ends += [at_s + knobs.hoard_s for at_s in after.since_s.values()]
    return max(now_s + knobs.tick_s, min(ends)) if ends else None


def _hold(knobs: MesosKnobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[Hold, ...]:
    return Offers(knobs, snapshot, recalled(memory, Memory)).why_held()


POLICIES = (
    joint(
        "mesos",
        "resource offers: whole nodes to the framework with the smallest dominant share",
        knobs=MesosKnobs(),
        allocate=_allocate,
        hold=_hold,
        by_weight=False,
        parts=Parts(
            order="smallest dominant share of offers, FIFO inside",
            size="base demand",
            place="best fit on what was offered",
        ),
    ),
)
