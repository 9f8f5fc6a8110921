"""Sets of nodes by gang size, and the jobs that take turns in each.

A set is the fewest nodes that hold a gang of its class. As many of its jobs as fit compute, and the
others wait for their turn behind them. Affinity of nodes to one gang size is Gandiva's (OSDI'18,
section 4.1).

A job that may not start now, for reasons outside the sets, is unseen: it keeps its place in the
line and counts for nothing else. If it were forgotten it would come back last each time, and a job
that comes back only while others compute would never have a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf

from msgspec import Struct

from common.model import JobId, NodeName


class Class(Struct, frozen=True, order=True, array_like=True):
    """Gangs of one size and shape on one GPU type."""

    gpus: int
    gpu_type: str
    gpus_per_worker: int

    @property
    def workers(self) -> int:
        """Workers of a gang."""
        return self.gpus // self.gpus_per_worker


class NodeSet(Struct, array_like=True):
    """Nodes, and the jobs that compute on them in turns; the first ones do now."""

    kind: Class
    nodes: tuple[NodeName, ...]
    jobs: list[JobId]


class Division:
    """All sets at one instant.

    gpus: GPUs of each node that can be shared out; types: the type of each.
    unseen: jobs that are not gone, and that no turn is given.
    """

    def __init__(
        self,
        sets: Iterable[NodeSet],
        *,
        gpus: Mapping[NodeName, int],
        types: Mapping[NodeName, str],
        unseen: AbstractSet[JobId] = frozenset(),
    ) -> None:
        self.sets = [each for each in sets if all(name in gpus for name in each.nodes)]
        self._gpus = gpus
        self._types = types
        self._unseen = unseen

    #   --- the present state ------------------------------------------------------------------

    def room(self, each: NodeSet) -> int:
        """Gangs that compute side by side in a set."""
        return self._workers(each.kind, each.nodes) // each.kind.workers

    def load(self, each: NodeSet) -> tuple[float, tuple[NodeName, ...]]:
        """Jobs for each place of a set; ties go by name."""
        return len(self.seen(each)) / max(1, self.room(each)), each.nodes

    def seen(self, each: NodeSet) -> list[JobId]:
        """The jobs of a set that may have a turn, in line."""
        if not self._unseen:
            return each.jobs  # as in most passes, and it is asked for often
        return [job_id for job_id in each.jobs if job_id not in self._unseen]

    def computing(self, each: NodeSet) -> list[JobId]:
        """The jobs whose turn it is in a set."""
        return self.seen(each)[: self.room(each)]

    def of(self, kind: Class, avoided: Iterable[NodeName] = ()) -> list[NodeSet]:
        """The sets of a class without these nodes, the least loaded first."""
        bad = set(avoided)
        found = [each for each in self.sets if each.kind == kind and bad.isdisjoint(each.nodes)]
        return sorted(found, key=self.load)

    def set_of(self) -> dict[JobId, NodeSet]:
        """Where each job stands."""
        return {job_id: each for each in self.sets for job_id in each.jobs}

    def loose(self) -> list[NodeName]:
        """Nodes in no set, by name."""
        taken = {name for each in self.sets for name in each.nodes}
        return [name for name in sorted(self._gpus) if name not in taken]

    @property
    def is_shared(self) -> bool:
        """True if any job in a set waits for a turn."""
        return any(len(self.seen(each)) > self.room(each) for each in self.sets)

    def _workers(self, kind: Class, nodes: Iterable[NodeName]) -> int:
        return sum(self._gpus[name] // kind.gpus_per_worker for name in nodes)

    # --- jobs come and go ---------------------------------------------------------------------

    def keep(self, jobs: Iterable[JobId]) -> None:
        """Keep only these jobs and the unseen ones; a set without any of these is dissolved.

        Nodes are not kept for unseen jobs alone; a job that stood in one of them is a newcomer
        later.
        """
        there = set(jobs)
        for each in self.sets:
            each.jobs = [
                job_id for job_id in each.jobs if job_id in there or job_id in self._unseen
            ]
        self._dissolve()

    def _dissolve(self) -> None:
        self.sets = [each for each in self.sets if self.seen(each)]

    def leave(self, stands: Callable[[JobId, NodeSet], bool]) -> None:
        """Jobs that do not stand in their set any more leave it; it stays."""
        for each in self.sets:
            each.jobs = [
                job_id for job_id in each.jobs if job_id in self._unseen or stands(job_id, each)
            ]

    def adopt(self, job_id: JobId, kind: Class, nodes: tuple[NodeName, ...]) -> bool:
        """A running job stays where it is, if its nodes are in no set or in one of its class."""
        for each in self.of(kind):
            if set(nodes) <= set(each.nodes):
                each.jobs.append(job_id)
                return True
        if nodes and set(nodes) <= set(self.loose()):
            self.sets.append(NodeSet(kind, nodes, [job_id]))
            return True
        return False

    def place(self, job_id: JobId, kinds: Sequence[Class], avoided: Iterable[NodeName]) -> bool:
        """A newcomer: a set with room, else a new one, of the first of these classes that has one;
        else turns with the least loaded set."""
        if (found := self._open_set(kinds, avoided)) is None:
            shared = [each for kind in kinds for each in self.of(kind, avoided)[:1]]
            found = min(shared, key=self.load, default=None)
        if found is not None:
            found.jobs.append(job_id)
        return found is not None

    def move_on(
        self, job_id: JobId, mine: NodeSet, kinds: Sequence[Class], avoided: Iterable[NodeName]
    ) -> bool:
        """A job that waits for its turn moves to a set of another class with room; False if there
        is none, which holds for all alike.
        """
        if job_id in self.computing(mine):
            return True
        found = self._open_set([kind for kind in kinds if kind != mine.kind], avoided)
        if found is not None:
            mine.jobs.remove(job_id)
            found.jobs.append(job_id)
        return found is not None

    def _open_set(self, kinds: Sequence[Class], avoided: Iterable[NodeName]) -> NodeSet | None:
        """A set without a waiting job and with room, else a new one."""
        for kind in kinds:
            sets = self.of(kind, avoided)
            has_room = bool(sets) and len(self.seen(sets[0])) < self.room(sets[0])
            found = sets[0] if has_room else self._new_set(kind, avoided)
            if found is not None:
                return found
        return None

    def _new_set(self, kind: Class, avoided: Iterable[NodeName] = ()) -> NodeSet | None:
        """The fewest loose nodes for a gang; None: they do not hold one."""
        bad, nodes = set(avoided), list[NodeName]()
        fits = (
            name
            for name in self.loose()
            if self._types[name] == kind.gpu_type
            and name not in bad
            and self._gpus[name] >= kind.gpus_per_worker
        )
        # A node that is used up to its last GPU by others is not fit: big nodes go first.
        for name in sorted(fits, key=lambda name: (-self._gpus[name], name)):
            nodes.append(name)
            if self._workers(kind, nodes) >= kind.workers:
                self.sets.append(NodeSet(kind, tuple(nodes), []))
                return self.sets[-1]
        return None

    # --- turns and shares ---------------------------------------------------------------------

    def rotate(self, stays: Iterable[JobId]) -> None:
        """Round robin: jobs that computed go behind jobs that waited, but for those that stay."""
        fixed = set(stays)
        for each in self.sets:
            now = self.computing(each)
            if len(now) < len(self.seen(each)):
                goes = [job_id for job_id in now if job_id not in fixed]
                rest = [job_id for job_id in each.jobs if job_id not in goes]
                each.jobs = rest + goes

    def first(self, ranks: Mapping[JobId, tuple[bool, float]]) -> None:
        """Lower ranks stand before higher ones in each set; otherwise the order is kept.

        A job that left since the last look, and still has a place, stands before all others. Unseen
        jobs stay where they are among those that wait: a job that comes back ends no turn.
        """
        for each in self.sets:
            line = sorted(self.seen(each), key=lambda job_id: ranks.get(job_id, (False, -inf)))
            ranked = iter(line)
            jobs = [job_id if job_id in self._unseen else next(ranked) for job_id in each.jobs]
            now = line[: self.room(each)]
            each.jobs = now + [job_id for job_id in jobs if job_id not in now]

    def divide(self, *, counts_by_gang: bool) -> None:
        """Nodes again in proportion to what each class asks for, type by type."""
        for gpu_type in sorted(set(self._types.values())):
            self._divide(gpu_type, counts_by_gang=counts_by_gang)

    def _divide(self, gpu_type: str, *, counts_by_gang: bool) -> None:
        total = sum(gpus for name, gpus in self._gpus.items() if self._types[name] == gpu_type)
        asked = dict(self._asked(gpu_type))
        everything = sum(asked.values())
        for kind in sorted(asked):
            sets = self.of(kind)
            share = min(asked[kind], total * asked[kind] // everything)
            held = sum(self._gpus[name] for each in sets for name in each.nodes)
            whole = held // len(sets)
            size = kind.gpus if counts_by_gang else max(1, whole)
            if share > held:
                self._grow(kind, -((held - share) // size))
            elif share < held:
                over = -((share - held) // size) if counts_by_gang else (held - share) // size
                self._shrink(kind, min(over, len(sets) - 1))

    def _asked(self, gpu_type: str) -> Iterator[tuple[Class, int]]:
        jobs: dict[Class, int] = {}
        for each in self.sets:
            if each.kind.gpu_type == gpu_type:
                jobs[each.kind] = jobs.get(each.kind, 0) + len(self.seen(each))
        return ((kind, count * kind.gpus) for kind, count in jobs.items())

    def _grow(self, kind: Class, count: int) -> None:
        made = [each for _ in range(count) if (each := self._new_set(kind))]
        if made:
            self._balance(kind)

    def _shrink(self, kind: Class, count: int) -> None:
        gone = self.of(kind)[:count]
        self.sets = [each for each in self.sets if each not in gone]
        for job_id in [job_id for each in gone for job_id in each.jobs]:
            self.of(kind)[0].jobs.append(job_id)

    def _balance(self, kind: Class) -> None:
        """The last in line of the fullest sets go to the emptiest ones, until no move helps."""
        while True:
            sets = self.of(kind)
            low, high = sets[0], sets[-1]
            after = (len(self.seen(low)) + 1) / max(1, self.room(low))
            if after >= self.load(high)[0]:
                self._dissolve()
                return
            last = self.seen(high)[-1]
            high.jobs.remove(last)
            low.jobs.append(last)
