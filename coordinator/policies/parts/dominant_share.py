"""Dominant shares of tenants over their tree: the largest of a tenant's shares of each resource.

Sources: DRF (Ghodsi et al., NSDI'11, section 4.1) for one level; H-DRF (Bhattacharya et al.,
*Hierarchical Scheduling for Diverse Datacenter Workloads*, SoCC'13) for what parts count for their
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from coordinator.policies.contract.free_gpus import present_workers
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.resource_vectors import SLACK, Vector, wanted
from coordinator.policies.tenants.queues import Tree, Turn, Waiting


def dominant(used: Vector, total: Vector, weight: float = 1.0) -> float:
    """The largest part of a whole, over a weight (DRF, NSDI'11, 4.1)."""
    return max(used.over(total)) / weight


class Sibling(Struct, frozen=True):
    """One of several parts: its use, its weight, and whether it could use more."""

    used: Vector
    weight: float = 1.0
    is_hungry: bool = True


def together(siblings: Iterable[Sibling], total: Vector) -> Vector:
    """What siblings have, as it counts for the tenant that contains them (H-DRF, SoCC'13).

    Where the hungry siblings have different dominant resources, each counts as scaled down to the
    least dominant share over weight among them. Otherwise a sibling that has much of a resource
    that the others do not want would make their parent look rich, and they would starve. A sibling
    that could use no more (it has no waiting job, or none that fits) counts with all that it has
    and is no measure for the others. Otherwise its siblings would get all the rest for it.

    Where they have a dominant resource in common the plain sum is exact, and is taken. Scaled down,
    a parent with many parts would be ahead by a whole gang of each.

    The paper also leaves out resources of which nothing is free. Here every job wants some of each
    resource, so no sibling could use more then.
    """
    found, open_ = Vector(), list[tuple[Sibling, Vector]]()
    for each in siblings:
        if each.is_hungry:
            open_.append((each, each.used.over(total)))
        else:
            found = found.plus(each.used)
    parts = [part for _, part in open_]
    if any(
        all(part[resource] >= max(part) - SLACK for part in parts)
        for resource in range(len(Vector._fields))
    ):
        for each, _ in open_:
            found = found.plus(each.used)
        return found
    least = min(max(part) / each.weight for each, part in open_)
    for each, part in open_:
        if max(part) > 0:
            found = found.plus(each.used, least * each.weight / max(part))
    return found


class _Uses:
    """The use of tenants, at each level of their tree."""

    def __init__(self, snapshot: ClusterSnapshot, total: Vector) -> None:
        self.tree = Tree(snapshot)
        self.total = total
        self.used: dict[str, Vector] = {}
        for job in snapshot.jobs:
            self.count(job, present_workers(job))

    def count(self, job: JobView, workers: int) -> None:
        """Add this number of workers of a job, or remove them if the number is negative."""
        for name in self.tree.path(job.tenant):
            before = self.used.get(name, Vector())
            self.used[name] = before.plus(wanted(job, self.total), workers)

    def of(self, name: str) -> Vector:
        """The use of one tenant."""
        return self.used.get(name, Vector())

    def share(self, name: str, used: Vector) -> float:
        """That over its weight."""
        return dominant(used, self.total, self.tree.weights[name])


class AddedShares:
    """Dominant share of each tenant over its weight, plus that of each addition of a pass.

    At least the dominant share of all together, and exactly that where one resource dominates
    everywhere. It is cheaper, and on the safe side for the tenant that is served last. At each
    level it is that of all below, as in Mesos' sorter of roles.
    """

    def __init__(self, snapshot: ClusterSnapshot, total: Vector) -> None:
        self._uses = _Uses(snapshot, total)
        self._tree = self._uses.tree
        self._shares = {name: self._uses.share(name, has) for name, has in self._uses.used.items()}

    def of(self, tenant: str) -> float:
        """As things stand, among its siblings."""
        return self._at(self._tree.path(tenant)[0])

    def turn(self, tenant: str) -> Turn:
        """The key of a tenant; the least is served first."""
        return self._tree.turn(tenant, self._at)

    def turns(self, heads: Waiting) -> Callable[[str], Turn]:
        """The order in which waiting tenants are served."""
        since_s = self._tree.since(heads)
        return lambda tenant: self._tree.turn(tenant, self._at, since_s)

    def worst_off(self, tenant: str) -> tuple[float, ...]:
        """The shares alone, from the outermost level inwards: those who have as much are equal."""
        return tuple(self._at(name) for name in reversed(self._tree.path(tenant)))

    def add(self, tenant: str, more: Vector) -> None:
        """It is given this."""
        for name in self._tree.path(tenant):
            self._shares[name] = self._at(name) + self._uses.share(name, more)

    def _at(self, name: str) -> float:
        return self._shares.get(name, 0.0)


class DominantShares:
    """What each tenant has in a pass, and its dominant share by that over its weight.

    Running jobs are counted at first. `count` adds jobs that the pass starts, and removes those it
    stops.
    """

    def __init__(self, snapshot: ClusterSnapshot, total: Vector) -> None:
        self._uses = _Uses(snapshot, total)
        self._tree = self._uses.tree
        self._hungry: frozenset[str] = frozenset()
        self._on_the_way: frozenset[str] = frozenset()  # those, and all that they are part of
        self._counted: dict[str, Vector] = {}  # what parts count for their whole, while that holds

    def count(self, job: JobView, workers: int) -> None:
        """Add this number of workers of a job, or remove them if the number is negative."""
        self._uses.count(job, workers)
        self._forget(job.tenant)

    def _forget(self, tenant: str) -> None:
        for name in self._tree.path(tenant):
            self._counted.pop(name, None)

    def among(self, tenant: str) -> str:
        """Among whom its share is the smallest when it is served, in words; empty: among all."""
        return " at its level of the tree" if len(self._tree.path(tenant)) > 1 else ""

    def of(self, tenant: str) -> float:
        """As things stand, among its siblings."""
        name = self._tree.path(tenant)[0]
        return self._uses.share(name, self._uses.of(name))

    # --- whose turn it is -----------------------------------------------------------------------

    def first_of(self, heads: Waiting) -> str:
        """The tenant that progressive filling serves next, among those with a job that may still
        fit or could have one more worker.
        """
        if self._tree.depth > 1:
            hungry = frozenset(heads)
            for each in hungry ^ self._hungry:
                self._forget(each)
            if hungry != self._hungry:
                self._hungry = hungry
                self._on_the_way = frozenset(n for each in hungry for n in self._tree.path(each))
        return self._tree.first(heads, self._counted_share)

    def _counted_share(self, name: str) -> float:
        return self._uses.share(name, self._counted_of(name))

    def _counted_of(self, name: str) -> Vector:
        parts = self._tree.children[name]
        if not parts:
            return self._uses.of(name)
        if name not in self._counted:
            siblings = (
                Sibling(self._counted_of(each), self._tree.weights[each], each in self._on_the_way)
                for each in parts
            )
            self._counted[name] = together(siblings, self._uses.total)
        return self._counted[name]

    #   --- losses between tenants -----------------------------------------------------------------

    def beside(self, other: JobView, job: JobView) -> float:
        """The use of the other's side of two tenants: its own, or that of the ancestor at which the
        two part.
        """
        _, theirs = self._tree.parting(job.tenant, other.tenant)
        return self._uses.share(theirs, self._uses.of(theirs))

    def keeps_more(self, other: JobView, gone: int, job: JobView, come: int) -> bool:
        """True if the other's side still has more after it loses workers than the job's side after
        it gains them.

        Both count in full, nothing scaled down. Scaling depends on the waiting jobs, which change
        with a stop, and stops would alternate.
        """
        mine, theirs = self._tree.parting(job.tenant, other.tenant)
        return self._with(theirs, other, -gone) > self._with(mine, job, come)

    def _with(self, name: str, job: JobView, workers: int) -> float:
        more = Vector().plus(wanted(job, self._uses.total), workers)
        return self._uses.share(name, self._uses.of(name).plus(more))
