"""Tenancy: what each tenant is guaranteed, uses and may take, over one tree of tenants.

A guarantee is the quota of a tenant and of all tenants below it. GPUs outside all guarantees, and
GPUs that idle guarantees leave over, may be borrowed. A tenant may bound what it borrows and what
it lends. Fair shares follow KAI-Scheduler's documented rule: guarantees first, the rest by weight.
GPUs are counted whatever their type. The use of each tenant is an argument: now, or by a plan.

A tenant may also bound what one user's jobs use at once. That is one more limit of those jobs: it
gives their user nothing, and takes nothing from others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from fractions import Fraction
from math import inf
from typing import TypeVar

from msgspec import Struct

from common.model import GpuUuid, JobState
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.contract.text import counted, number
from coordinator.policies.tenants.tree import ITSELF, NOBODY, WHOLE, grown


class Claim(Struct, frozen=True, kw_only=True):
    """What a sibling has: GPUs that it uses, and idle ones of its guarantee that it, or tenants
    below it, do not lend.
    """

    guarantee_gpus: int
    used: float
    kept: float


def left_to(guarantee_gpus: int, whole: float, others: Sequence[Claim]) -> float:
    """The part of a parent's limit that its other children leave to one.

    Beyond its guarantee that is what no sibling uses or keeps. Within it, what they keep counts up
    to their own guarantees alone, because teams below one of them may have borrowed what others
    there keep. Where all others are within theirs it is at least its guarantee, if a parent's
    covers those of its children.
    """
    beyond = whole - sum(each.used + each.kept for each in others)
    claims = (max(each.used, min(each.guarantee_gpus, each.used + each.kept)) for each in others)
    return max(beyond, min(float(guarantee_gpus), whole - sum(claims)))


def unlent(view: TenantView, used: float) -> float:
    """GPUs of its guarantee that a tenant with this use neither uses nor lends."""
    if view.lend_limit_gpus is None:
        return 0.0
    return max(0.0, view.guarantee_gpus - used - view.lend_limit_gpus)


Count = int | Fraction
"""GPUs in use: a whole number, but where tenants came to share GPUs; exact then, too."""


Owner = TypeVar("Owner", bound=Hashable)


def _used_gpus(snapshot: ClusterSnapshot, owner: Callable[[JobView], Owner]) -> dict[Owner, Count]:
    """GPUs by tenant, or by another owner, that its jobs have and were not ordered to give back.

    A migrating job has those of its destination. Each job that shares a GPU, computing or not, has
    an equal part, so that all parts sum to the GPUs in use. That is the long-run share of jobs that
    take turns, and the present share of jobs that compute together.
    """
    found: dict[Owner, Count] = {}
    first: dict[GpuUuid, Owner] = {}
    shared: dict[GpuUuid, Counter[Owner]] = {}
    for job in snapshot.jobs:
        if not (job.placed or job.held):
            continue
        name = owner(job)
        has = (*job.placed, *job.held) if job.held else job.placed
        there = [worker for worker in has if not worker.is_leaving]
        own = {uuid for worker in there for uuid in worker.gpu_uuids}
        unnamed = sum([worker.gpus - len(worker.gpu_uuids) for worker in there])
        others = [uuid for uuid in own if uuid in first]
        found[name] = found.get(name, 0) + unnamed + len(own) - len(others)
        for uuid in others:
            shared.setdefault(uuid, Counter((first[uuid],)))[name] += 1
            own.remove(uuid)
        first.update(dict.fromkeys(own, name))
    for uuid, parts in shared.items():
        found[first[uuid]] -= 1
        for name, jobs in parts.items():
            found[name] += Fraction(jobs, parts.total())
    return {name: _whole(gpus) for name, gpus in found.items()} if shared else found


def _whole(gpus: Count) -> Count:
    """The same as an integer where it is one, as nearly always."""
    if isinstance(gpus, int):
        return gpus
    return int(gpus) if gpus == int(gpus) else gpus


class Tenancy:
    """Tenants, and the GPUs that each uses with all below it; `take` and `leave` change them.

    views: by name, parents first. used: GPUs by name; `WHOLE` is all of them.
    capacity: GPUs that jobs have or could be given.
    """

    def __init__(self, snapshot: ClusterSnapshot, named: Iterable[str] = ()) -> None:
        """named: tenants of jobs to come, in addition to those of the snapshot; `NOBODY` is one."""
        here = {job.tenant or NOBODY for job in snapshot.jobs}
        tree = grown(snapshot.tenants, frozenset(here.union(named)))
        self.views, self.children = tree.views, tree.children
        self._paths, self._leaves, self._keepers = tree.paths, tree.leaves, tree.keepers
        self._below = tree.below
        self.used: dict[str, Count] = dict.fromkeys((*self.views, WHOLE), 0)
        for name, gpus in _used_gpus(snapshot, self.leaf).items():
            for each in (*self._paths[name], WHOLE):
                self.used[each] = _whole(self.used[each] + gpus)
        free = sum([node.free_gpus for node in snapshot.nodes if node.is_schedulable])
        self.capacity = int(self.used[WHOLE]) + free
        self._user_limits = {
            view.name: view.user_max_gpus
            for view in snapshot.tenants
            if view.user_max_gpus is not None
        }
        self._user_used: dict[tuple[str, str], Count] = {}
        if self._user_limits:
            self._user_used = _used_gpus(snapshot, _user_of)

    def copied(self) -> Tenancy:
        """The same, with uses of its own."""
        found = copy(self)
        found.used, found._user_used = dict(self.used), dict(self._user_used)
        return found

    def leaf(self, job: JobView) -> str:
        """Where its GPUs are counted first."""
        name = job.tenant or NOBODY
        return self._leaves.get(name, name)

    def path(self, job: JobView) -> tuple[str, ...]:
        """Its tenant, that one's parent, and so on."""
        return self._paths[self.leaf(job)]

    def path_of(self, name: str) -> tuple[str, ...]:
        """The same of a tenant."""
        return self._paths[name]

    def take(self, job: JobView, gpus: Count) -> None:
        """The job gets GPUs."""
        self.used[WHOLE] += gpus
        for name in self.path(job):
            self.used[name] += gpus
        if self._user_limits:
            user = _user_of(job)
            self._user_used[user] = self._user_used.get(user, 0) + gpus

    def leave(self, job: JobView, gpus: Count) -> None:
        """The opposite of `take`."""
        self.take(job, -gpus)

    def below_top(self, job: JobView, other: JobView) -> tuple[str, ...]:
        """The job's tenants that the other job is no part of, the own one first."""
        pair = self.leaf(job), self.leaf(other)
        if pair not in self._below:
            theirs = self._paths[pair[1]]
            self._below[pair] = tuple(name for name in self._paths[pair[0]] if name not in theirs)
        return self._below[pair]

    #   --- limits -----------------------------------------------------------------------------

    def limit_gpus(self, name: str) -> float:
        """The maximum use of a tenant: its guarantee and what it may borrow."""
        view = self.views[name]
        return inf if view.borrow_limit_gpus is None else _limit(view)

    def most(self, job: JobView) -> float:
        """The maximum use of its tenant and of each above that one."""
        return min(map(self.limit_gpus, self.path(job)))

    def room(self, job: JobView) -> float:
        """GPUs that its tenant may still take, whether or not they are free.

        Of the whole always its guarantee; beyond it, what no other tenant uses or keeps. Of a
        parent's limit no more than its other children leave, see `left_to`: those beyond their
        guarantees give back first. No more than its user may use.
        """
        room = self._room(self.path(job))
        return min(room, self._user_room(job)) if self._user_limits else room

    def _user_room(self, job: JobView) -> float:
        most = self._user_limits.get(job.tenant)
        return inf if most is None else float(most - self._user_used.get(_user_of(job), 0))

    def alike(self, job: JobView) -> str:
        """Jobs for which it is the same have the same room."""
        if job.tenant in self._user_limits:
            return f"{self.leaf(job)} {job.user}"
        return self.leaf(job)

    def _room(self, path: Sequence[str]) -> float:
        if not self._keepers:  # nodes decide the remaining room
            return min(float(self.limit_gpus(name) - self.used[name]) for name in path)
        return self._most(path[0]) - float(self.used[path[0]])

    def _most(self, name: str) -> float:
        """GPUs that a tenant may use now, given the use and the unlent guarantees of others."""
        view = self.views[name]
        others = [
            Claim(
                guarantee_gpus=self.views[other].guarantee_gpus,
                used=float(self.used[other]),
                kept=self._kept(other),
            )
            for other in self.children[view.parent]
            if other != name
        ]
        if view.parent == WHOLE:
            rest = float(self.capacity) - sum(each.used + each.kept for each in others)
            most = max(float(view.guarantee_gpus), rest)
        else:
            most = left_to(view.guarantee_gpus, self._most(view.parent), others)
        return min(self.limit_gpus(name), most)

    def _room_alone(self, path: Sequence[str], gpus: int) -> float:
        """The same as if all other tenants had stopped their jobs.

        Siblings' use still counts where a parent may use no more, because no job stops for a
        borrower. But siblings beyond their guarantees stop for a job that a guarantee next to them
        covers. Then the limits above that one never delay it.
        """
        limits = [self._most_alone(path[0]) - float(self.used[path[0]])]
        for name in path:
            if self.used[name] + gpus <= self.views[name].guarantee_gpus:
                break
            limits.append(float(self.limit_gpus(name) - self.used[name]))
        return min(limits)

    def _most_alone(self, name: str) -> float:
        """GPUs that a tenant may use at most, never less than its guarantee."""
        view = self.views[name]
        most = inf
        if self._keepers:
            is_top = view.parent == WHOLE
            most = float(self.capacity) if is_top else self._most_alone(view.parent)
            others = (other for other in self.children[view.parent] if other != name)
            most = max(float(view.guarantee_gpus), most - sum(map(self._kept, others)))
        return min(self.limit_gpus(name), most)

    def _kept(self, name: str) -> float:
        """GPUs of its idle guarantee that a tenant does not lend, or those below it do not."""
        below = sum(self._kept(child) for child in self.children[name])
        return max(unlent(self.views[name], float(self.used[name])), below)

    def why_not(self, job: JobView, gpus: int, *, alone: bool = False) -> str:
        """Why its tenant, or its user, may not take further GPUs; empty if they may."""
        if self._user_limits and gpus > self._user_room(job):
            mine = number(self._user_used.get(_user_of(job), 0))
            which = counted(gpus, "GPU on top of", "GPUs on top of")
            return (
                f"user {job.user} of {_who(job.tenant)}: {which} the {mine} that its jobs use "
                f"{'exceeds' if gpus == 1 else 'exceed'} {self._user_limits[job.tenant]} "
                "(user_max_gpus)"
            )
        room = self._room_alone(self.path(job), gpus) if alone else self.room(job)
        if gpus <= room:
            return ""
        for name in self.path(job):
            view, used = self.views[name], self.used[name]
            if used + gpus <= view.guarantee_gpus and not alone:
                if gpus <= self._room(self._paths[name]):
                    break
                return (
                    f"{_who(name)} is due {counted(gpus, 'GPU')} within its guarantee of "
                    f"{view.guarantee_gpus}, but others of tenant {view.parent} borrow what that "
                    f"one may use, and have not given it back"
                )
            if used + gpus > self.limit_gpus(name):
                return (
                    f"{_exceeds(name, gpus, used)} its guarantee of {view.guarantee_gpus} and its "
                    f"borrow limit of {view.borrow_limit_gpus}"
                )
        name, own = self.leaf(job), self.path(job)
        guarantee = self.views[name].guarantee_gpus
        keepers = [
            other
            for other in self._keepers
            if other not in own and unlent(self.views[other], float(self.used[other])) > 0
        ]
        lend = "lends no more of its own" if len(keepers) == 1 else "lend no more of theirs"
        return (
            f"{_exceeds(name, gpus, self.used[name])} its guarantee of {guarantee}, and it may "
            f"take {max(0, int(room))}" + (f": {', '.join(keepers)} {lend}" if keepers else "")
        )

    def why_never(self, tenant: str, gpus: int) -> str:
        """Why a tenant may not have this number of GPUs even while no tenant uses any, see `idle`;
        empty if it may, or if neither settings nor jobs name it.
        """
        if (leaf := self._leaves.get(tenant or NOBODY)) is None:
            return ""
        of_user = self._user_limits.get(tenant)
        if of_user is not None and gpus > of_user:
            return (
                f"can never run here: needs {counted(gpus, 'GPU')} at one time, and a user of "
                f"{_who(tenant)} may use {of_user} (user_max_gpus)"
            )
        room = min(self._most_alone(leaf), *map(self.limit_gpus, self._paths[leaf]))
        if gpus <= room:
            return ""
        needs = f"can never run here: needs {counted(gpus, 'GPU')} at one time, and"
        for name in self._paths[leaf]:
            view, most = self.views[name], self.limit_gpus(name)
            if gpus > most:
                return (
                    f"{needs} {_who(name)} may use {number(int(most))}: its guarantee of "
                    f"{view.guarantee_gpus} and its borrow limit of {view.borrow_limit_gpus}"
                )
        others = (name for name in self._keepers if name not in self._paths[leaf])
        keepers = ", ".join(name for name in others if self._kept(name))
        return (
            f"{needs} {_who(leaf)} may use {int(room)} of the {self.capacity} in this fleet: the "
            f"lend limits of {keepers} keep the others idle"
        )

    def idle(self, whole: int) -> Tenancy:
        """The same tenants without any use. whole: all GPUs there are."""
        found = copy(self)
        found.used, found._user_used = dict.fromkeys(self.used, 0), {}
        found.capacity = whole
        return found

    # --- fair shares ------------------------------------------------------------------------

    def fair_shares(self, waiting_gpus: Mapping[str, int]) -> dict[str, float]:
        """Each tenant's fair share of the GPUs, by its use and its waiting jobs.

        waiting_gpus: by the tenant of `leaf`. A tenant's demand is its use plus its waiting GPUs.
        """
        asked: dict[str, float] = {}
        kept_below: dict[str, float] = {}
        for name in reversed(self.views):
            own = [asked[child] for child in self.children[name]]
            wanted = sum(own) if own else self.used[name] + waiting_gpus.get(name, 0)
            asked[name] = min(float(wanted), self.limit_gpus(name))
            kept_below[name] = sum(
                max(unlent(self.views[child], asked[child]), kept_below[child])
                for child in self.children[name]
            )
        shares: dict[str, float] = {}
        for parent in (WHOLE, *self.views):
            views = [self.views[name] for name in self.children[parent]]
            whole = float(self.capacity)
            if parent != WHOLE:  # the idle part kept below it belongs to what it has to divide
                whole = shares[parent] + kept_below[parent]
            shares |= fair_split(whole, views, asked, kept_below)
        return shares


def _user_of(job: JobView) -> tuple[str, str]:
    """Users of two tenants are two, whatever their names."""
    return job.tenant, job.user


def _exceeds(name: str, gpus: int, used: Count) -> str:
    which = counted(gpus, "GPU on top of", "GPUs on top of")
    exceeds = "exceeds" if gpus == 1 else "exceed"
    return f"{_who(name)}: {which} the {number(used)} that it uses {exceeds}"


def _who(name: str) -> str:
    """A tenant of `leaf` in a sentence."""
    if name == NOBODY:
        return "jobs without a tenant"
    if name.endswith(ITSELF):
        return f"tenant {name.removesuffix(ITSELF)} by its own jobs"
    return f"tenant {name}"


def _limit(view: TenantView) -> int:
    return view.guarantee_gpus + (view.borrow_limit_gpus or 0)


def fair_split(
    whole: float,
    views: Sequence[TenantView],
    asked: Mapping[str, float],
    kept_below: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Shares of siblings: guarantees first, the rest by weight, none more than its demand.

    KAI-Scheduler's rule ("deserved" quota, then over-quota by weight). Where guarantees exceed the
    whole, all get the same part of theirs. The part of an idle guarantee that a tenant does not
    lend belongs to no share.

    kept_below: by name, what those below it do not lend of theirs: of its guarantee as well, and no
        part of its share.
    """
    below = {view.name: (kept_below or {}).get(view.name, 0.0) for view in views}
    wanted = {name: asked[name] + kept for name, kept in below.items()}
    due = {view.name: min(wanted[view.name], view.guarantee_gpus) for view in views}
    first = water_fill(whole, {v.name: (float(v.guarantee_gpus), due[v.name]) for v in views})
    kept = sum(max(0.0, unlent(view, asked[view.name]) - below[view.name]) for view in views)
    over = max(0.0, whole - sum(first.values()) - kept)
    more = water_fill(
        over, {view.name: (view.weight, wanted[view.name] - first[view.name]) for view in views}
    )
    return {name: max(0.0, first[name] + more[name] - below[name]) for name in first}


def water_fill(whole: float, parts: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Split by weight, none beyond its cap; the rest of capped ones goes to the others by weight.

    parts: weight and cap by name. Nothing is left over while any is below its cap.
    """
    got = dict.fromkeys(parts, 0.0)
    open_parts = {name: part for name, part in parts.items() if part[0] > 0 and part[1] > 0}
    # The one that is full at the lowest level is full first: one walk in that order is exact.
    order = sorted(open_parts, key=lambda name: (open_parts[name][1] / open_parts[name][0], name))
    left = whole
    for place, name in enumerate(order):
        weight, cap = open_parts[name]
        weights = sum(open_parts[other][0] for other in order[place:])
        if cap * weights > left * weight:
            for other in order[place:]:
                got[other] = left * open_parts[other][0] / weights
            return got
        got[name] = cap
        left -= cap
    return got


def waiting_gpus(snapshot: ClusterSnapshot, tenancy: Tenancy) -> dict[str, int]:
    """Base demand of the jobs that wait, by the tenant of `Tenancy.leaf`."""
    found: dict[str, int] = {}
    for job in snapshot.jobs:
        if job.state == JobState.PENDING:
            name = tenancy.leaf(job)
            found[name] = found.get(name, 0) + job.base_gpus
    return found
