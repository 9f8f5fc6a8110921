"""Backfill reservations: GPUs set aside for a gang that waited long enough, to bound its wait.

Shortest job first with skipping starts every job that fits. A gang that needs many GPUs at one time
may never find them: other jobs take what comes free. Once a gang has waited `after_s` without room,
the training nodes on which it can start soonest are *reserved* for it, by the estimated remaining
time of the jobs there. This is EASY backfilling (Lifka, JSSPP'95; Mu'alem and Feitelson, IEEE TPDS
12(6), 2001). Until the instant of the reservation, its shadow time, base work may use the reserved
GPUs if it ends by then. Longer base work may use the GPUs of these nodes that the gang leaves over.

Unlike in EASY, a reservation is remembered from pass to pass:

- it keeps its nodes, and moves only to nodes that are free sooner, before its instant;
- its instant never moves back. After it, no other work begins on the reserved GPUs.

So the wait is bounded however wrong the estimates are. From its instant on, the gang waits only for
the work that already runs on the reserved GPUs. With R the longest real remaining time of that
work, the gang starts at the latest R after the instant. The instant is no further away than the
estimates gave when the reservation was made.

One gang of each GPU type has a reservation at a time: the most important, then one that already has
a reservation, then the longest waiting. A gang waits for those before it as well, which are limited
in number. A job gets no reservation if no other job that runs on its GPU type or waits for it is
narrower. Any GPUs that come free would do for it, and only the order (shorter jobs first) keeps it
waiting, as intended. A reservation is on training nodes, because lent ones may go home before. It
ends when its nodes close or the job is to avoid them, and is made again elsewhere. It is on no node
with a maintenance window that the gang would overrun from the instant on.

Flexible workers leave when they are asked to, but not again within the cooldown of a resize. So
none is added on the reserved GPUs from that long before the instant. More important jobs pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from weakref import proxy

import msgspec
from msgspec import Struct

from common.model import JobId, NodeName
from coordinator.policies.aryl.gpu_types import types_in_order
from coordinator.policies.aryl.openings import Opening, Openings, is_over_in_time
from coordinator.policies.aryl.placement import PlacementState
from coordinator.policies.contract.estimates import base_runtime_s
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.contract.text import counted

SLACK_S = 60.0
"""Work on reserved GPUs must end this long before the instant: a start takes time. A reservation
moves only to nodes that are free sooner by as much.
"""


class Reservation(Struct, frozen=True, kw_only=True):
    """The reservation of one job; remembered from pass to pass.

    nodes: the reserved nodes, with the number of GPUs on each.
    since_s: when the job first had a reservation in this wait.
    ready_at_s: the shadow time: when it can start by the estimates, never moved back.
    """

    job_id: JobId
    gpu_type: str
    nodes: tuple[tuple[NodeName, int], ...]
    since_s: float
    ready_at_s: float


_Memory = tuple[Reservation, ...]
_NOTHING: _Memory = ()


def remembered(memory: bytes) -> _Memory:
    """The reservations of the last pass; none if the memory cannot be read."""
    if not memory:
        return _NOTHING
    try:
        return msgspec.msgpack.decode(memory, type=_Memory)
    except msgspec.MsgspecError:
        return _NOTHING


class _Held(Struct, kw_only=True):
    """A reservation in a pass.

    tight: places of it that have no GPU to spare, as bits. spare: of the others, how many GPUs the
    gang leaves over at its instant, and how many base work could have had as the pass began.
    """

    made: Reservation
    job: JobView
    tight: int
    spare: dict[int, tuple[int, int]]


class Reservations:
    """The reservations of one pass.

    Args:
        after_s: a gang has one once it has waited this long.
        memory: as the pass before returned it, see `memory`.
        trusts_profiles: jobs are as fast as their profiles state; else linear in their workers.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        room: PlacementState,
        *,
        after_s: float,
        memory: bytes = b"",
        trusts_profiles: bool = True,
    ) -> None:
        self._now_s = snapshot.now_s
        self._cooldown_s = snapshot.resize_cooldown_s
        self._after_s = after_s
        self._room: PlacementState = proxy(room)  # which knows its bars: none is to keep the other
        self._openings = Openings(snapshot, trusts_profiles=trusts_profiles)
        self._old = [
            job
            for job in chain.from_iterable(room.index.lines)
            if self._now_s - waits_since_s(job) >= after_s
        ]
        self._jobs = snapshot.jobs
        self._narrowest: dict[str, int] = {}
        self._before = {each.job_id: each for each in remembered(memory)}
        self._kept = [self._before[job] for job in sorted(self._before.keys() & snapshot.unseen)]
        """Reservations of hidden jobs: they keep nothing from others."""
        self._held: dict[str, _Held] = {}
        """By GPU type."""
        for job in self._in_turn():
            before = self._before.get(job.job_id)
            if before is None or before.gpu_type in self._held or not self._holds(before, job):
                continue
            self._held[before.gpu_type] = self._in_pass(before, job)

    @property
    def made(self) -> tuple[Reservation, ...]:
        """All that is set aside now, in order of GPU type."""
        return tuple(self._held[gpu_type].made for gpu_type in sorted(self._held))

    @property
    def memory(self) -> bytes:
        """The memory for the next pass."""
        found = {each.job_id: each for each in (*self._kept, *self.made)}
        return msgspec.msgpack.encode(tuple(found.values())) if found else b""

    def due(self) -> Iterator[JobView]:
        """Gangs that may have a reservation now, in turn.

        While they are taken, those are left out whose GPU types all have one.
        """
        for job in self._in_turn():
            is_had = job.job_id in self._before
            if any(
                self._is_open(job, gpu_type) and (is_had or self._is_wide(job, gpu_type))
                for gpu_type in self._types(job)
            ):
                yield job

    def starts(self, job: JobView) -> None:
        """The job has room, so its reservation ends. If its start is refused, the next pass uses
        the old one.
        """
        held = self._of(job)
        if held is not None:
            del self._held[held.made.gpu_type]
            self._kept.append(held.made)

    def reserve(self, job: JobView) -> None:
        """Set GPUs aside for a job that does not fit now; none where it never would."""
        held = self._of(job)
        found = [
            made
            for gpu_type in self._types(job)
            if self._is_open(job, gpu_type)
            if held is not None or self._is_wide(job, gpu_type)
            if (made := self._soonest(job, gpu_type)) is not None
        ]
        best = min(found, key=lambda made: made.ready_at_s, default=None)
        if best is None:
            return
        if held is not None:
            before_s = held.made.ready_at_s
            if self._now_s >= before_s or best.ready_at_s >= before_s - SLACK_S:
                return
            del self._held[held.made.gpu_type]
        self._held[best.gpu_type] = self._in_pass(best, job)

    # --- as a bar -------------------------------------------------------------------------------

    def barred(self, job: JobView) -> int:
        """Places that base workers of a job must leave alone."""
        places = 0
        for held in self._held.values():
            if not self._keeps_away(held, job):
                continue
            size, count = job.gpus_per_worker, job.workers_on(held.made.gpu_type).min
            places |= held.tight
            for place in held.spare:
                open_gpus, spare = self._spare(held, place)
                if size * min(count, open_gpus // size) > spare:
                    places |= 1 << place
        return places

    def barred_flexible(self, job: JobView) -> int:
        """Places where no flexible worker may be added any more."""
        places = 0
        for held in self._held.values():
            if self._now_s + self._cooldown_s + SLACK_S < held.made.ready_at_s:
                continue
            places |= held.tight
            for place in held.spare:
                open_gpus, spare = self._spare(held, place)
                if open_gpus // job.gpus_per_worker * job.gpus_per_worker > spare:
                    places |= 1 << place
        return places

    def may_use_loans(self, job: JobView) -> bool:
        """Further lent nodes are in no reservation."""
        return True

    def why(self, job: JobView) -> str:
        """The job's own reservation, or the jobs for which its barred GPUs are reserved; as a
        sentence.
        """
        mine = self._of(job)
        if mine is not None:
            return self._of_its_own(mine.made)
        return "; ".join(
            f"{counted(_gpus(held.made), 'GPU')} of type {held.made.gpu_type} are reserved for "
            f"{held.made.job_id}, which has waited {self._now_s - waits_since_s(held.job):.0f} s "
            f"and can have them {self._when(held.made)}; this job would not be over by then"
            for held in self._held.values()
            if self._keeps_away(held, job)
        )

    def _of_its_own(self, made: Reservation) -> str:
        names = ", ".join(name for name, _ in made.nodes)
        return (
            f"{counted(_gpus(made), 'GPU')} of type {made.gpu_type} on "
            f"{counted(len(made.nodes), 'node')} ({names}) reserved for it for "
            f"{self._now_s - made.since_s:.0f} s, as it had waited {self._after_s:g} s "
            f"(reservation_after_s); by what runs there it can start {self._when(made)}"
        )

    def _when(self, made: Reservation) -> str:
        left_s = made.ready_at_s - self._now_s
        if left_s > 0.0:
            return f"in {left_s:.0f} s"
        return "once what runs there is over, which is late by its estimates"

    def _keeps_away(self, held: _Held, job: JobView) -> bool:
        """Whether base workers of a job must leave the reserved GPUs alone."""
        made = held.made
        if job.job_id == made.job_id or job.priority > held.job.priority:
            return False
        if not job.accepts(made.gpu_type):
            return False
        runtime_s = base_runtime_s(job, made.gpu_type, self._now_s)
        return self._now_s + runtime_s + SLACK_S > made.ready_at_s

    #   --- making reservations --------------------------------------------------------------------

    def _in_turn(self) -> list[JobView]:
        return sorted(
            self._old,
            key=lambda job: (
                -job.priority,
                job.job_id not in self._before,
                waits_since_s(job),
                job.job_id,
            ),
        )

    def _types(self, job: JobView) -> list[str]:
        room = self._room
        return [name for name in types_in_order(room, job) if name in room.home_types]

    def _is_open(self, job: JobView, gpu_type: str) -> bool:
        """True if the reservation of a type may be this job's: free, its own, or a lesser job's."""
        held = self._held.get(gpu_type)
        return held is None or held.job.job_id == job.job_id or job.priority > held.job.priority

    def _is_wide(self, job: JobView, gpu_type: str) -> bool:
        """True if a job that runs on a GPU type or waits for it has a smaller gang, so that GPUs
        that come free there may be fewer than this job needs.
        """
        if gpu_type not in self._narrowest:
            waits = (line[0] for line in self._room.index.lines if line[0].accepts(gpu_type))
            runs = (job for job in self._jobs if job.gpu_type == gpu_type)
            gangs = (other.base_gpus_on(gpu_type) for other in chain(waits, runs))
            self._narrowest[gpu_type] = min(gangs, default=0)
        return job.base_gpus_on(gpu_type) > self._narrowest[gpu_type]

    def _of(self, job: JobView) -> _Held | None:
        found = (held for held in self._held.values() if held.made.job_id == job.job_id)
        return next(found, None)

    def _holds(self, made: Reservation, job: JobView) -> bool:
        """Whether a reservation is still good: its nodes are open to the job and large enough."""
        index, avoided = self._room.index, self._room.avoided(job)
        for name, gpus in made.nodes:
            place = index.place(name)
            occupied = None if place is None else index.nodes[place]
            if place is None or occupied is None or occupied.service is not None:
                return False
            node = occupied.node
            if node.gpu_type != made.gpu_type or node.gpus - node.barred_gpus < gpus:
                return False
            if avoided >> place & 1:
                return False
            if not is_over_in_time(job, occupied, max(made.ready_at_s, self._now_s)):
                return False
        return True

    def _soonest(self, job: JobView, gpu_type: str) -> Reservation | None:
        taken: list[Opening] = self._openings.soonest(
            self._room, job, gpu_type, not_before_s=lambda _: self._now_s
        )
        if not taken:
            return None
        gpus: dict[NodeName, int] = {}
        for _, place in taken:
            name = self._room.index.names[place]
            gpus[name] = gpus.get(name, 0) + job.gpus_per_worker
        before = self._before.get(job.job_id)
        return Reservation(
            job_id=job.job_id,
            gpu_type=gpu_type,
            nodes=tuple(sorted(gpus.items())),
            since_s=self._now_s if before is None else before.since_s,
            ready_at_s=taken[-1][0],
        )

    def _in_pass(self, made: Reservation, job: JobView) -> _Held:
        """GPUs of its nodes that others could use for longer, by the estimates."""
        index, tight, spare = self._room.index, 0, dict[int, tuple[int, int]]()
        for name, gpus in made.nodes:
            place = index.places[name]
            occupied = index.nodes[place]
            assert occupied is not None, f"{name} takes no workers"
            open_gpus = self._room.available(name)
            ending = [g for at_s, g in self._openings.leaving(occupied) if at_s <= made.ready_at_s]
            left = open_gpus + sum(ending) - gpus
            if left > 0:
                spare[place] = (left, open_gpus)
            else:
                tight |= 1 << place
        return _Held(made=made, job=job, tight=tight, spare=spare)

    def _spare(self, held: _Held, place: int) -> tuple[int, int]:
        """GPUs of a node that base work could have now, and how many of them for long."""
        left, open_before = held.spare[place]
        open_gpus = self._room.available(self._room.index.names[place])
        return open_gpus, left - (open_before - open_gpus)


def waits_since_s(job: JobView) -> float:
    """Since when a job that waits does so."""
    return job.submitted_at_s if job.waiting_since_s is None else job.waiting_since_s


def _gpus(made: Reservation) -> int:
    return sum(gpus for _, gpus in made.nodes)


def kept(memory: bytes, snapshot: ClusterSnapshot) -> bytes:
    """The memory where no visible job waits: only the reservations of hidden jobs."""
    found = [each for each in remembered(memory) if each.job_id in snapshot.unseen]
    return msgspec.msgpack.encode(tuple(found)) if found else b""
