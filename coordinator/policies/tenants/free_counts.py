"""Free GPUs and tenants' use while a pass is put together.

The guard (`quota_guard`) looks at a pass as a whole. It leaves a tenant alone that ends the pass
with no less than it had, up to its guarantee. For any other tenant it counts the stops one after
another, without its starts. Giving back is counted here in the same way; otherwise the guard would
refuse it.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.model import NodeRole
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.giveback import Source
from coordinator.policies.tenants.gpu_flow import Flow, Gpus, are_borrowed
from coordinator.policies.tenants.tenancy import Count, Tenancy


class Counts:
    """The room and the uses after the decisions so far.

    free: GPUs by training node. tenancy: uses after all of them.
    """

    def __init__(self, snapshot: ClusterSnapshot, flow: Flow) -> None:
        self.tenancy = Tenancy(snapshot)
        self._before: Mapping[str, Count] = dict(self.tenancy.used)
        self._stops: dict[str, list[tuple[Count, bool]]] = {}
        self.free: Gpus = {
            name: gpus
            for name, gpus in flow.free.items()
            if flow.nodes[name].role == NodeRole.TRAINING
        }

    def take(self, job: JobView, gpus: Gpus, *, sign: int = 1) -> None:
        """A job gets GPUs (or, with sign -1, does without after all)."""
        self.tenancy.take(job, sum(gpus.values()) * sign)
        self._come(gpus, -sign)

    def stop(self, job: JobView, gpus: Gpus, used: Count, *, is_whole: bool, sign: int = 1) -> None:
        """Workers leave, and a job has this number of GPUs less (with sign -1 they stay after all).

        gpus: that come free. is_whole: all of the job's.
        """
        self.tenancy.leave(job, used * sign)
        self._come(gpus, sign)
        for name in self.tenancy.path(job):
            stops = self._stops.setdefault(name, [])
            if sign > 0:
                stops.append((used, is_whole))
            else:
                at = stops[::-1].index((used, is_whole))  # the last equal one
                del stops[len(stops) - 1 - at]

    def _come(self, gpus: Gpus, sign: int) -> None:
        for node, count in gpus.items():
            if node in self.free:
                self.free[node] += count * sign

    def give(self, source: Source, *, sign: int = 1) -> None:
        """The source's GPUs come free, or are taken again."""
        if source.decision is not None:
            self.take(source.job, source.gpus, sign=-sign)
        else:
            is_whole = source.seat is not None
            self.stop(source.job, source.gpus, source.used, is_whole=is_whole, sign=sign)

    def has_more(self, name: str) -> bool:
        """Whether a tenant has more than its guarantee."""
        return self.tenancy.used[name] > self.tenancy.views[name].guarantee_gpus

    def lost(self) -> dict[str, Count]:
        """GPUs that tenants have less than their guarantee, or than before the pass where that was
        less, by name."""
        views, used, before = self.tenancy.views, self.tenancy.used, self._before
        short = {
            name: min(before[name], view.guarantee_gpus) - used[name]
            for name, view in views.items()
            if view.guarantee_gpus
        }
        return {name: gpus for name, gpus in short.items() if gpus > 0}

    def borrows(self, source: Source, job: JobView) -> bool:
        """True if the holder has more than its guarantee, at each level below the common parent
        with the job.
        """
        return all(
            self.has_more(name) and self._may_lose(name, source)
            for name in self.tenancy.below_top(source.job, job)
        )

    def _may_lose(self, name: str, source: Source) -> bool:
        """Whether a tenant keeps its guarantee without the source, but for part of a whole job."""
        guarantee = self.tenancy.views[name].guarantee_gpus
        rest = self.tenancy.used[name] - source.used
        if source.decision is None and source.seat is None:
            return rest >= guarantee
        if rest >= min(self._before[name], guarantee):
            return True
        if source.decision is not None:  # stops may have counted on its start
            stops = self._stops.get(name, ())
            return all(are_borrowed(stops, self._before[name], guarantee))
        return self._before[name] - sum(gone for gone, _ in self._stops.get(name, ())) > guarantee
