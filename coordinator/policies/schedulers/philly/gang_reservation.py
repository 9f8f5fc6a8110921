"""Gang reservations: gangs hold GPUs that are free now until they have the rest.

Gang scheduling by the Philly study (ATC'19, section 2.3). A gang holds as much as its tenant's
quota leaves, and no more than it needs. Other jobs do not get held GPUs, and they count as use of
the quota. The gang releases all of them while it backs off (`gang_tries`). A gang that reserves
keeps its GPUs only from later jobs of its own line. A gang that holds continues before another one
of its line begins to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Generator, Iterable, Mapping
from contextlib import contextmanager

from msgspec import Struct, structs

from common.model import JobId, NodeName
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.schedulers.philly.gang_tries import Patience, Try, try_at
from coordinator.policies.schedulers.philly.locality import Gang, part
from coordinator.policies.schedulers.philly.quotas import QuotasInUse


class Attempted(Struct, frozen=True):
    """A job that does not fit: since when, and the GPUs that it holds, by node."""

    since_s: float
    held: dict[NodeName, int] = {}


def out_of_sight(
    before: Mapping[JobId, Attempted], unseen: Container[JobId]
) -> dict[JobId, Attempted]:
    """Tries of hidden waiting jobs: they age like the others, and hold nothing, as they cannot use
    it.

    If they were forgotten, they would come back as gangs that never tried, at the strictest
    locality.
    """
    return {
        job_id: Attempted(tried.since_s) for job_id, tried in before.items() if job_id in unseen
    }


class Holding:
    """The GPUs that gangs hold; they are not free meanwhile.

    most: gangs of one line, the jobs of one tenant, that hold or keep GPUs at a time.
    reserves: whether a gang that backs off keeps GPUs from later jobs of its line.
    """

    def __init__(
        self, floor: FreeGpus, quotas: QuotasInUse, patience: Patience, now_s: float, most: int,
        *, reserves: bool = False,
    ) -> None:  # fmt: skip
        self._floor = floor
        self._quotas = quotas
        self._patience = patience
        self._now_s = now_s
        self._most = most
        self._reserves = reserves
        self._holders = Counter[str]()
        self._kept: dict[str, dict[JobId, Mapping[NodeName, int]]] = {}

    def age(self, tried: Attempted) -> Try:
        """Where a gang is in its tries."""
        return try_at(self._patience, tried.since_s, self._now_s)

    def resume(self, job: JobView, tried: Attempted) -> Attempted:
        """A gang goes on holding its earlier GPUs, as far as it may, as they are still there, and
        as its tenant's quota allows.
        """
        free, kept = self._floor.free, dict[NodeName, int]()
        if tried.held and self.age(tried).may_hold:
            there = {name: min(gpus, free.get(name, 0)) for name, gpus in tried.held.items()}
            held = {name: gpus for name, gpus in there.items() if gpus}
            kept = _first(held, self._quotas.room(job))  # others may have the rest before its turn
        self._count(job, kept)
        _take(free, kept)
        return structs.replace(tried, held=kept)

    def let_go(self, job: JobView, tried: Attempted) -> None:
        """A gang releases its held GPUs."""
        self._count(job, tried.held, -1)
        _take(self._floor.free, tried.held, -1)

    def acquire(self, job: JobView, gangs: Iterable[Gang], tried: Attempted) -> dict[NodeName, int]:
        """The GPUs that a gang without any holds from now on, on the first type that has some.

        The type where it last held comes before all others; otherwise a GPU elsewhere would make it
        start over. None if others of its line hold already, if its tenant's quota leaves none, or
        while it backs off; a gang that reserves then keeps the same from later ones of its line.
        """
        age, room = self.age(tried), self._quotas.room(job)
        is_idle = not (age.may_hold or self._reserves)
        if is_idle or self._holders[self._quotas.leaf(job)] >= self._most:
            return {}
        types = {self._floor.nodes[name].gpu_type for name in tried.held}
        for gang in sorted(gangs, key=lambda gang: gang.gpu_type not in types):
            held = _first(part(self._floor, gang, age.level, tried.held), room)
            if not held:
                continue
            self._count(job, held)
            if age.may_hold:
                _take(self._floor.free, held)
                return held
            self._kept.setdefault(self._quotas.leaf(job), {})[job.job_id] = held
            break
        return {}

    def keeps(self, line: str) -> bool:
        """Whether a gang of a line keeps GPUs from those that come after it there."""
        return line in self._kept

    def is_keeping(self, job: JobView) -> bool:
        """Whether a gang is one of those."""
        return job.job_id in self._kept.get(self._quotas.leaf(job), {})

    @contextmanager
    def kept_from(self, line: str) -> Generator[None]:
        """GPUs kept by gangs of a line are not free meanwhile, unless another job got them."""
        free, taken = self._floor.free, list[Mapping[NodeName, int]]()
        for kept in self._kept.get(line, {}).values():
            taken.append({name: min(gpus, free[name]) for name, gpus in kept.items()})
            _take(free, taken[-1])
        yield
        for kept in taken:
            _take(free, kept, -1)

    def told(self, job: JobView, tried: Attempted) -> tuple[int, str]:
        """How many GPUs it holds or keeps, and in words where, and for how long."""
        age = self.age(tried)
        left_s = age.until_s - self._now_s
        kept = self._kept.get(self._quotas.leaf(job), {}).get(job.job_id, {})
        nodes = ", ".join(f"{n} on {name}" for name, n in sorted((tried.held or kept).items()))
        if tried.held:
            return sum(tried.held.values()), f"; holds {nodes}, for {left_s:.0f} s more"
        if age.may_hold:
            return 0, ""
        nothing = f"; holds nothing for {left_s:.0f} s"
        if not kept:
            return 0, nothing
        return sum(kept.values()), f"{nothing}, but keeps {nodes} from later jobs of its tenant"

    def _count(self, job: JobView, held: Mapping[NodeName, int], sign: int = 1) -> None:
        """Its held GPUs count as use of its tenant's quota."""
        if held:
            self._holders[self._quotas.leaf(job)] += sign
            self._quotas.hold(job, sign * sum(held.values()))


def _take(free: dict[NodeName, int], held: Mapping[NodeName, int], sign: int = 1) -> None:
    for name, gpus in held.items():
        free[name] -= sign * gpus


def _first(held: Mapping[NodeName, int], most: int) -> dict[NodeName, int]:
    """At most a number of GPUs of these, from the first nodes."""
    found: dict[NodeName, int] = {}
    for name, gpus in held.items():
        if most > 0:
            found[name] = min(gpus, most)
            most -= found[name]
    return found
