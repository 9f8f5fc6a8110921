"""The guard of quotas and guarantees: checks a pass's decisions, whichever policy made them.

Three rules. A job starts or grows only where its tenant has room. A tenant within its guarantee
loses no GPU to another one. Jobs of two tenants share no GPU. `reclaim` then gives tenants below
their guarantee GPUs back.

The second rule counts node by node: outsiders of a tenant take from it what they take on a node
beyond free GPUs and beyond GPUs that others leave. Stops count one after another, as in Kueue and
KAI: a stop is no loss of a guarantee while the tenant still holds more than the guarantee before
it. A tenant that stops its own jobs for its own jobs loses nothing to another.

A tenant within its guarantee must also not stop jobs without use of its own, because other tenants
would take the GPUs in a later pass. It makes room for its own jobs of the same pass, or not at all:
on nodes, or within the limit of a tenant that contains both jobs. Borrowed GPUs may be given up in
any case, and so may workers that make their job no faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.decisions import (
    Decision,
    Migrate,
    Placement,
    Preempt,
    Resize,
    Start,
    placed_count,
)
from coordinator.policies.contract.estimates import rate_on
from coordinator.policies.contract.free_gpus import present_workers
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.borrowing import why_not_borrowed
from coordinator.policies.tenants.gpu_flow import (
    Flow,
    Gpus,
    Move,
    are_borrowed,
    job_of,
    moves_of,
    sum_by_node,
)
from coordinator.policies.tenants.pointless_stops import in_vain
from coordinator.policies.tenants.tenancy import Count, Tenancy


class Keeping:
    """One list of decisions that becomes shorter; None stands for a dropped one.

    tenancy: uses before the pass.
    """

    def __init__(self, flow: Flow, tenancy: Tenancy, decisions: Sequence[Decision | None]) -> None:
        self._flow = flow
        self._tenancy = tenancy
        self.decisions = list(decisions)
        self._slack: dict[NodeName, int] = {}
        self._has_limits = any(
            view.borrow_limit_gpus is not None
            or view.lend_limit_gpus is not None
            or view.user_max_gpus is not None
            for view in tenancy.views.values()
        )

    def keep(self) -> dict[int, str]:
        """Let tenants keep their own GPUs; returns the owners, by the position of the decision."""
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
        """True if a tenant's jobs still stay within limits with another decision at a position:
        free GPUs elsewhere are of no use to a job that may not take them.

        One after another, as quotas are counted.
        """
        if not self._has_limits:
            return True
        made = [*self.decisions[:place], instead, *self.decisions[place + 1 :]]
        tenancy = self._tenancy.copied()
        for move in moves_of(self._flow, made):
            tenancy.leave(move.job, move.gone)
            taken = sum(move.taken.values())
            if taken and name in tenancy.path(move.job) and taken > tenancy.room(move.job):
                return False
            tenancy.take(move.job, taken)
        return True

    def _keep_one(self, move: Move, short: Count, name: str) -> int:
        """GPUs that a job keeps because no job takes them; up to a number, and then to a whole
        worker.
        """
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
            # a job that adds as many keeps none of them
            self.decisions[place] = rest if gone else None
        return kept


def _speed_of(job: JobView) -> Callable[[int], float]:
    """Its speed with this number of workers of its attempt."""
    factor = job.gpu.worker_multiplier.get(job.gpu_type or "", 1)
    return lambda workers: job.profile.rate(workers / factor, base=job.workers.min)


class Dropped(Struct, frozen=True, kw_only=True):
    """A decision, or the part of it, that tenants do not allow, and why.

    is_quota: its own tenant has no room.
    is_taking: it would take from another's guarantee. If it is neither, it was a stop for one that
        did, or without any use.
    """

    decision: Decision
    why: str
    is_quota: bool = False
    is_taking: bool = False


def guarded(
    snapshot: ClusterSnapshot, decisions: Sequence[Decision], *, trusts_profiles: bool = True
) -> tuple[tuple[Decision, ...], tuple[Dropped, ...]]:
    """Decisions that tenants allow, in the same order, and what was dropped of the others.

    Guarding its result again changes nothing.

    trusts_profiles: the policy takes jobs to be as fast as their profiles; else linear in their
        workers.
    """
    if not snapshot.tenants or not decisions:
        return tuple(decisions), ()
    guard = _Guard(snapshot, decisions, trusts_profiles=trusts_profiles)
    while True:
        count = len(guard.dropped)
        guard.keep_quotas()
        guard.keep_guarantees()
        if guard.dropped:
            guard.spare_in_vain()
        guard.keep_unused()
        if len(guard.dropped) == count:
            break  # otherwise a job that goes on counts against the quota again
    return tuple(d for d in guard.kept if d is not None), tuple(guard.dropped)


class _Guard:
    """One list of decisions; a dropped one leaves None in its place."""

    def __init__(
        self, snapshot: ClusterSnapshot, decisions: Sequence[Decision], *, trusts_profiles: bool
    ) -> None:
        self._snapshot = snapshot
        self._trusts_profiles = trusts_profiles
        self._flow = Flow(snapshot)
        self._tenancy = Tenancy(snapshot)
        self._before = list(decisions)
        self.kept: list[Decision | None] = list(decisions)
        self.dropped: list[Dropped] = []

    # --- quotas -----------------------------------------------------------------------------

    def keep_quotas(self) -> None:
        """A job without room in its tenant does not start; flexible workers go first."""
        tenancy = Tenancy(self._snapshot)
        lefts = self._flow.lefts(self.kept)
        for place, decision in enumerate(self.kept):
            job = None if decision is None else job_of(self._flow, decision)
            if decision is None or job is None:
                continue
            tenancy.leave(job, lefts[place].used)
            if self._is_beside_others(decision, job, tenancy):
                self.kept[place] = None
                why = "jobs of different tenants share no GPU"
                self.dropped.append(Dropped(decision=decision, why=why))
                continue
            taken = sum(self._flow.taken(decision).values())
            if isinstance(decision, Start):
                now_s = self._snapshot.now_s
                if why := why_not_borrowed(job, taken, tenancy, now_s):
                    self.kept[place] = None
                    self.dropped.append(Dropped(decision=decision, why=why, is_quota=True))
                    continue
            if not taken or taken <= tenancy.room(job):
                tenancy.take(job, taken)
                continue
            why = tenancy.why_not(job, taken)
            self.kept[place] = kept = self._within(decision, tenancy.room(job))
            self.dropped.append(Dropped(decision=decision, why=why, is_quota=True))
            if kept is not None:
                tenancy.take(job, sum(self._flow.taken(kept).values()))

    def _is_beside_others(self, decision: Decision, job: JobView, tenancy: Tenancy) -> bool:
        others = (self._flow.jobs[job_id] for job_id in self._flow.beside(decision))
        return any(tenancy.leaf(other) != tenancy.leaf(job) for other in others)

    def _within(self, decision: Decision, room: float) -> Decision | None:
        """As much of it as there is room for: the base gang whole, and flexible workers."""
        match decision:
            case Start():
                kept = list(decision.placements)
                while self._gpus(replace(decision, placements=tuple(kept))) > room:
                    more = max((i for i, p in enumerate(kept) if p.is_flexible), default=-1)
                    if more < 0:
                        return None
                    kept = _one_less(kept, more)
                return self._smaller(decision, tuple(kept))
            case Resize():
                added = list(decision.added)
                while added and self._gpus(replace(decision, added=tuple(added))) > room:
                    added = _one_less(added, len(added) - 1)
                return _without(decision, tuple(added))
            case _:
                return None

    def _smaller(self, start: Start, placements: tuple[Placement, ...]) -> Start:
        """Fewer workers take longer, by as much as the job is slower with them."""
        job = self._flow.jobs[start.job_id]
        before, after = (
            rate_on(job, start.gpu_type, count, trusts_profiles=self._trusts_profiles)
            for count in (placed_count(start.placements), placed_count(placements))
        )
        runtime_s = start.estimated_runtime_s * before / after
        return replace(start, placements=placements, estimated_runtime_s=runtime_s)

    def _gpus(self, decision: Decision) -> int:
        return sum(self._flow.taken(decision).values())

    # --- guarantees -------------------------------------------------------------------------

    def keep_guarantees(self) -> None:
        """Outsiders do not start on what a tenant within its guarantee would leave."""
        while (found := self._taker()) is not None:
            place, name = found
            decision = self.kept[place]
            assert decision is not None
            why = f"tenant {name} is within its guarantee and loses nothing to another tenant"
            self.dropped.append(Dropped(decision=decision, why=why, is_taking=True))
            is_resize = isinstance(decision, Resize)
            self.kept[place] = _without(decision, ()) if is_resize else None

    def _taker(self) -> tuple[int, str] | None:
        """The last decision that takes from a guarantee, with its owner."""
        tenancy = self._tenancy
        moves = moves_of(self._flow, self.kept)
        for name in sorted({n for move in moves if move.left for n in tenancy.path(move.job)}):
            guarantee = tenancy.views[name].guarantee_gpus
            for node in self._robbed(name, tenancy.used[name], guarantee, moves):
                for move in reversed(moves):
                    if name not in tenancy.path(move.job) and node in move.taken:
                        return move.place, name
        return None

    def _robbed(
        self, name: str, used: Count, guarantee: int, moves: Sequence[Move]
    ) -> list[NodeName]:
        """Nodes where outsiders take what a tenant may not lose."""
        mine, others = list[Move](), list[Move]()
        for move in moves:
            (mine if name in self._tenancy.path(move.job) else others).append(move)
        if used + sum(move.net for move in mine) >= min(used, guarantee):
            return []
        lost: set[NodeName] = set()
        given: list[Gpus] = [self._flow.free]
        given += [move.left for move in others]
        borrowed = are_borrowed((move.stop for move in mine), used, guarantee)
        for move, is_borrowed in zip(mine, borrowed, strict=True):
            if is_borrowed:
                given.append(move.left)
            else:
                lost.update(move.left)
        there = sum_by_node(given)
        outside = sum_by_node(move.taken for move in others)
        return sorted(node for node in lost if outside.get(node, 0) > there.get(node, 0))

    def keep_unused(self) -> None:
        """No job of a tenant within its guarantee leaves GPUs that its own jobs do not take: others
        would take them later.
        """
        keeping = Keeping(self._flow, self._tenancy, self.kept)
        for place, name in sorted(keeping.keep().items()):
            decision = self.kept[place]
            assert decision is not None
            why = f"tenant {name} is within its guarantee, and none of its jobs takes all of this"
            self.dropped.append(Dropped(decision=decision, why=why))
        self.kept = keeping.decisions

    #   --- pointless stops ------------------------------------------------------------------------

    def spare_in_vain(self) -> None:
        """No job is stopped or suspended for one that does not start: the last is spared first."""
        for place in in_vain(self._flow, self._before, self.kept):
            decision = self.kept[place]
            assert decision is not None
            self.kept[place] = None
            why = "no job starts on the GPUs it would free"
            self.dropped.append(Dropped(decision=decision, why=why))


def _one_less(placements: Sequence[Placement], place: int) -> list[Placement]:
    """One worker fewer at a place."""
    kept = list(placements)
    count = kept[place].worker_count - 1
    if count:
        kept[place] = replace(kept[place], worker_count=count)
    else:
        del kept[place]
    return kept


def _without(decision: Decision, added: tuple[Placement, ...]) -> Decision | None:
    """A resize that adds less; None where nothing is left of it."""
    assert isinstance(decision, Resize)
    if not added and not decision.removed_workers:
        return None
    return replace(decision, added=added)


def blocked(snapshot: ClusterSnapshot, tenancy: Tenancy) -> dict[JobId, str]:
    """Waiting jobs whose tenant has no room for their base gang, or that may not borrow it now;
    and why."""
    found: dict[JobId, str] = {}
    known: dict[tuple[str, int], str] = {}
    for job in snapshot.jobs:
        if job.state == JobState.PENDING:
            alike = tenancy.alike(job), fewest_gpus(job)
            if alike not in known:
                known[alike] = tenancy.why_not(job, alike[1], alone=True)
            why = known[alike] or why_not_borrowed(job, alike[1], tenancy, snapshot.now_s)
            if why:
                found[job.job_id] = why
    return found


def narrowed(
    snapshot: ClusterSnapshot, tenancy: Tenancy, room: Callable[[JobView], float]
) -> tuple[ClusterSnapshot, dict[JobId, str]]:
    """The snapshot in which waiting jobs accept only those GPU types on which their gangs are
    within the room, and why not the others.

    Where several workers of a type stand for one they may be too many, and the policy would choose
    that type again and again. A job keeps all its types if none remains. If its gang may span
    several types, the others come last.
    """
    jobs, whys = list(snapshot.jobs), dict[JobId, str]()
    for place, job in enumerate(jobs):
        if job.gpu.worker_multiplier and job.state == JobState.PENDING:
            most, types = room(job), dict.fromkeys(job.gpu.types)
            gpus = {kind: job.base_gpus_on(kind) for kind in types}
            kept = [kind for kind in types if gpus[kind] <= most]
            if kept and len(kept) < len(types):
                last = types.keys() - kept if job.gpu.heterogeneous_speed_ratio else ()
                kept += [kind for kind in types if kind in last]
                jobs[place] = replace(job, gpu=replace(job.gpu, types=tuple(kept)))
                whys[job.job_id] = tenancy.why_not(job, max(gpus.values()))
    return (replace(snapshot, jobs=tuple(jobs), index=None) if whys else snapshot), whys


def fewest_gpus(job: JobView) -> int:
    """GPUs of its base gang where it needs the fewest."""
    factors = [job.gpu.worker_multiplier.get(kind, 1) for kind in job.gpu.types] or [1]
    return job.base_gpus * min(factors)
