"""What a tenant keeps within its guarantee: what no job of its own would take. Knows no policy.

GPUs that a decision takes from a job for nobody would be another tenant's in some later pass. So
whoever is within its guarantee makes room for jobs of its own, of the same pass, or not at all: on
nodes, or of what a tenant that both are part of may use. What is borrowed may go in any case, and
so may workers that make their job no faster. Must not know the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

from msgspec.structs import replace

from common.model import NodeName
from coordinator.policies.decisions import Decision, Migrate, Preempt, Resize
from coordinator.policies.floor import present_workers
from coordinator.policies.snapshot import JobView
from coordinator.policies.tenants.flow import (
    Flow,
    Move,
    are_borrowed,
    job_of,
    moves_of,
    sum_by_node,
)
from coordinator.policies.tenants.tenancy import Count, Tenancy


class Keeping:
    """One list of decisions that becomes shorter; None stands for what was dropped of it.

    tenancy: uses before the pass.
    """

    def __init__(self, flow: Flow, tenancy: Tenancy, decisions: Sequence[Decision | None]) -> None:
        self._flow = flow
        self._tenancy = tenancy
        self.decisions = list(decisions)
        self._slack: dict[NodeName, int] = {}
        self._has_limits = any(
            view.borrow_limit_gpus is not None or view.lend_limit_gpus is not None
            for view in tenancy.views.values()
        )

    def keep(self) -> dict[int, str]:
        """Let tenants keep what is theirs; returns whose it is, by the place of the decision."""
        kept: dict[int, str] = {}
        for name, view in self._tenancy.views.items():
            if view.guarantee_gpus:
                kept.update(dict.fromkeys(self._keep_of(name), name))
        return kept

    def _keep_of(self, name: str) -> list[int]:
        """The last that leaves is the first that stays, as in `are_borrowed`."""
        moves = moves_of(self._flow, self.decisions)
        mine = [move for move in moves if name in self._tenancy.path(move.job)]
        used = self._tenancy.used[name]
        guarantee = self._tenancy.views[name].guarantee_gpus
        short = min(used, guarantee) - used - sum(move.net for move in mine)
        if short <= 0:
            return []
        left = sum_by_node(move.left for move in moves)
        taken = sum_by_node(move.taken for move in moves)
        free = self._flow.free
        self._slack = {node: free.get(node, 0) + left[node] - taken.get(node, 0) for node in left}
        kept: list[int] = []
        borrowed = are_borrowed((move.stop for move in mine), used, guarantee)
        for move, is_borrowed in reversed(list(zip(mine, borrowed, strict=True))):
            if short > 0 and move.gone and not is_borrowed:
                gpus = self._keep_one(move, short, name)
                short -= gpus
                if gpus:
                    kept.append(move.place)
        return kept

    def _has_room(self, name: str, place: int, instead: Decision | None) -> bool:
        """Whether all that jobs of a tenant take is still within limits with another decision at a
        place: free GPUs elsewhere are no use to who may not take them.

        One after the other, as quotas are counted.
        """
        if not self._has_limits:
            return True
        made = [*self.decisions[:place], instead, *self.decisions[place + 1 :]]
        tenancy = copy(self._tenancy)
        tenancy.used = dict(tenancy.used)
        for move in moves_of(self._flow, made):
            tenancy.leave(move.job, move.gone)
            taken = sum(move.taken.values())
            if taken and name in tenancy.path(move.job) and taken > tenancy.room(move.job):
                return False
            tenancy.take(move.job, taken)
        return True

    def _keep_one(self, move: Move, short: Count, name: str) -> int:
        """GPUs that a job keeps as nobody takes them; up to so many, and then to a whole worker."""
        decision = self.decisions[move.place]
        match decision:
            case Resize():
                return self._keep_workers(move.place, decision, short, name)
            case Preempt() | Migrate():
                gpus = -move.net
                needs = {node: left - move.taken.get(node, 0) for node, left in move.left.items()}
                if gpus <= 0 or any(self._slack.get(node, 0) < n for node, n in needs.items()):
                    return 0
                if not self._has_room(name, move.place, None):
                    return 0
                for node, count in needs.items():
                    self._slack[node] -= count
                self.decisions[move.place] = None
                return gpus
            case _:
                return 0

    def _keep_workers(self, place: int, decision: Resize, short: Count, name: str) -> int:
        """The oldest first, as the newest are given back first."""
        job = job_of(self._flow, decision)
        assert job is not None
        gone = set(decision.removed_workers)
        speed, has, kept = _speed_of(job), present_workers(job), 0
        after = has - len(gone) + sum(placement.worker_count for placement in decision.added)
        for worker in sorted(job.placed, key=lambda each: each.worker_index):
            if kept >= short or after >= has or speed(after) >= speed(has):
                break
            own = self._flow.own(worker)
            gpus, slack = own.free[worker.node], self._slack.get(worker.node, 0)
            rest = replace(decision, removed_workers=tuple(sorted(gone - {worker.worker_index})))
            if (
                worker.worker_index in gone
                and own.used
                and gpus <= slack
                and self._has_room(name, place, rest)
            ):
                gone.remove(worker.worker_index)
                self._slack[worker.node] = slack - gpus
                kept += own.used
                after += 1
        if kept:
            rest = replace(decision, removed_workers=tuple(sorted(gone)))
            self.decisions[place] = rest if gone else None  # who adds as many keeps none of them
        return kept


def _speed_of(job: JobView) -> Callable[[int], float]:
    """How fast it is with so many workers of its attempt."""
    factor = job.gpu.worker_multiplier.get(job.gpu_type or "", 1)
    return lambda workers: job.profile.rate(workers / factor, base=job.workers.min)
