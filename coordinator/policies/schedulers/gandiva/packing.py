"""Packing by trial: two jobs try one GPU, are measured, and part if turns were better. Pure.

Gandiva (OSDI'18), sections 3.3 and 4.2. Both jobs were measured alone first. The comparison is
progress per charged GPU-second: alone a job has the whole GPU in its turns, packed it has half of
it all the time. Turns and packing therefore cost the same, and the better one makes more steps. A
profile only suggests which pair to try first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from msgspec import Struct, structs

from common.model import JobId, JobState
from coordinator.policies.contract.decisions import Migrate, Resume
from coordinator.policies.contract.free_gpus import GangShape, gang_shape
from coordinator.policies.contract.snapshot import JobView
from coordinator.policies.schedulers.gandiva.board import Board, is_willing
from coordinator.policies.schedulers.gandiva.migration import loses_nothing
from coordinator.policies.schedulers.gandiva.time_slices import Slices

LEAST_GPU_S = 1.0
"""Attained between two words of a job from which its pace is taken."""


class Mark(Struct, frozen=True, kw_only=True):
    """The measurements of a job. Rates are steps per GPU-second charged; 0: not yet known.

    step, gpu_s: its first report of the present measurement. is_packed: what that measures.
    """

    attempt: int
    step: int
    gpu_s: float
    is_packed: bool
    alone_rate: float = 0.0
    packed_rate: float = 0.0


class Pair(Struct, frozen=True, kw_only=True):
    """Two jobs that were packed. gain: what both make over turns; None: it is being tried."""

    since_s: float
    gain: float | None = None

    @property
    def is_kept(self) -> bool:
        """Whether both together make more than in turns."""
        return self.gain is not None and self.gain > 1.0


Marks = dict[JobId, Mark]
Pairs = dict[str, Pair]


def pair_key(one: JobId, other: JobId) -> str:
    """The same for both orders."""
    return "|".join(sorted((one, other)))


def measured(board: Board, marks: Marks) -> Marks:
    """The measurements from progress reports since the last pass; ended jobs are dropped."""
    found: Marks = {}
    for job in board.snapshot.jobs:
        if job.state in (JobState.RUNNING, JobState.SUSPENDED) and job.progress.step is not None:
            found[job.job_id] = _measure(board, job, job.progress.step, marks.get(job.job_id))
    return found


def _measure(board: Board, job: JobView, step: int, mark: Mark | None) -> Mark:
    is_packed = len(board.rivals(board.seat(job))) > 1 and job.state == JobState.RUNNING
    if mark is None or mark.attempt != job.attempt.number:
        alone_rate = 0.0 if mark is None else mark.alone_rate
        return Mark(
            attempt=job.attempt.number,
            step=step,
            gpu_s=job.progress.step_gpu_s,
            is_packed=is_packed,
            alone_rate=alone_rate,
        )
    if mark.is_packed != is_packed:
        # As a job speaks often, its last word is about of now: the new span begins with it.
        return structs.replace(
            mark,
            step=step,
            gpu_s=job.progress.step_gpu_s,
            is_packed=is_packed,
            packed_rate=0.0 if is_packed else mark.packed_rate,
        )
    gpu_s = job.progress.step_gpu_s - mark.gpu_s
    if gpu_s < LEAST_GPU_S or step <= mark.step:
        return mark
    rate = (step - mark.step) / gpu_s
    if is_packed:
        return structs.replace(mark, packed_rate=rate)
    return structs.replace(mark, alone_rate=rate)


class Packing:
    """One pass: the pairs that part, that stay, and that are tried."""

    def __init__(self, board: Board, marks: Marks, pairs: Pairs) -> None:
        self._board = board
        self._marks = marks
        there = board.gpus
        self.pairs: Pairs = {
            key: pair
            for key, pair in pairs.items()
            if all(JobId(name) in there for name in key.split("|"))
        }

    def goes_with(self, one: JobId, other: JobId) -> bool:
        """Whether two were measured to do better side by side."""
        pair = self.pairs.get(pair_key(one, other))
        return pair is not None and pair.is_kept

    def on_trial(self) -> set[JobId]:
        """Jobs that are being tried."""
        tried = [key for key, pair in self.pairs.items() if pair.gain is None]
        return {JobId(name) for key in tried for name in key.split("|")}

    def judge(self, turns: Slices, trial_s: float) -> None:
        """Look at the trials that have lasted long enough; part those that do not pay."""
        for key, pair in sorted(self.pairs.items()):
            if pair.gain is not None or self._board.now_s < pair.since_s + trial_s:
                continue
            one, other = (self._board.jobs[JobId(name)] for name in key.split("|"))
            gain = self._gain(one, other)
            is_starting = JobState.STARTING in (one.state, other.state)
            if gain is None and (is_starting or self._board.now_s < pair.since_s + 3 * trial_s):
                # a starting job cannot be parted yet; or one of them has reported nothing yet
                continue
            self.pairs[key] = Pair(since_s=pair.since_s, gain=gain or 0.0)
            is_together = self._board.rivals(self._board.seat(one)) >= {one.job_id, other.job_id}
            if not self.pairs[key].is_kept and is_together:
                guest = one if one.attempt.is_packed else other
                turns.put_aside(
                    guest,
                    f"packed with {(other if guest is one else one).job_id} both make "
                    f"{gain or 0.0:.2f} of what they make in turns",
                )

    def _gain(self, one: JobView, other: JobView) -> float | None:
        """The progress of both packed over that in turns: the mean of their ratios."""
        ratios: list[float] = []
        for job in (one, other):
            mark = self._marks.get(job.job_id)
            if mark is None or not (mark.alone_rate and mark.packed_rate):
                return None
            ratios.append(mark.packed_rate / mark.alone_rate)
        return sum(ratios) / len(ratios)

    def offer(self, *, rest_s: float) -> None:
        """Try one more pair on each GPU: the least busy job that waits with the least busy one.

        Only under overload, that is while any job is suspended.
        """
        waiting = [job for job in self._board.of(JobState.SUSPENDED) if self._is_known(job)]
        if not waiting:
            return
        hosts = self._hosts()
        tried: dict[JobId, set[JobId]] = {}
        for one, other in (map(JobId, key.split("|")) for key in self.pairs):
            tried.setdefault(one, set()).add(other)
            tried.setdefault(other, set()).add(one)
        for guest in sorted(waiting, key=_busy_key):
            known = tried.get(guest.job_id, set[JobId]())
            for host in hosts.of(guest, may_move=self._may_move(guest, rest_s)):
                if host.job_id not in known:
                    self._try(guest, host)
                    hosts.leave(host)
                    break

    def _hosts(self) -> Hosts:
        """All that have their GPUs to themselves and may be tried, the least busy first."""
        board = self._board
        running = [job for job in board.of(JobState.RUNNING) if self._is_known(job)]
        alone = [
            job
            for job in sorted(running, key=_busy_key)
            if not job.attempt.is_packed and len(board.rivals(board.seat(job))) == 1
        ]
        return Hosts(board, alone)

    def _may_move(self, guest: JobView, rest_s: float) -> bool:
        """To a host elsewhere. A trial that ends after a minute may cost a minute, no more."""
        began_s, now_s = guest.attempt.started_at_s, self._board.now_s
        is_rested = began_s is not None and now_s >= began_s + rest_s
        return is_rested and loses_nothing(guest, now_s)

    def _is_known(self, job: JobView) -> bool:
        mark = self._marks.get(job.job_id)
        is_measured = mark is not None and mark.alone_rate > 0
        return is_measured and job.profile.gpu_busy_ratio is not None and is_willing(job)

    def _try(self, guest: JobView, host: JobView) -> None:
        board, seat = self._board, self._board.seat(host)
        why = (
            f"on trial beside {host.job_id}: they keep their GPUs "
            f"{guest.profile.gpu_busy_ratio or 0:.0%} and {host.profile.gpu_busy_ratio or 0:.0%} "
            "busy alone"
        )
        place = None if board.seat(guest) == seat else board.on_seat(guest, host)
        if place is None:
            board.decide(guest, Resume(job_id=guest.job_id, is_packed=True, reason=why))
        else:
            board.decide(
                guest,
                Migrate(
                    job_id=guest.job_id,
                    placements=place[1],
                    predicted_cost_gpu_s=guest.lost_gpu_s(board.now_s),
                    is_packed=True,
                    reason=why,
                ),
            )
        board.computing(guest, seat)
        self.pairs[pair_key(guest.job_id, host.job_id)] = Pair(since_s=board.now_s)


class Hosts:
    """With whom jobs may be tried, in the order of `hosts`; what jobs of one shape ask of the GPUs
    of each is looked up once for all of them.

    hosts: each computes on its GPUs alone.
    """

    def __init__(self, board: Board, hosts: Sequence[JobView]) -> None:
        self._board = board
        self._hosts = {host.job_id: host for host in hosts}
        self._on_seat = {board.seat(host): host for host in hosts}
        self._fits: dict[GangShape, dict[JobId, JobView]] = {}
        self._left_bytes = {host.job_id: self._memory_left(host) for host in hosts}

    def of(self, guest: JobView, *, may_move: bool) -> Iterator[JobView]:
        """Where one may be tried as far as GPUs and their memory go."""
        needed = guest.profile.gpu_memory_bytes
        bytes_ = inf if needed is None else needed
        for host in self._reached(guest, may_move=may_move):
            if bytes_ <= self._left_bytes[host.job_id]:
                yield host

    def leave(self, host: JobView) -> None:
        """The job is tried with one partner, and with no other in this pass."""
        del self._hosts[host.job_id]
        del self._on_seat[self._board.seat(host)]
        for fits in self._fits.values():
            fits.pop(host.job_id, None)

    def _reached(self, guest: JobView, *, may_move: bool) -> Iterable[JobView]:
        """Partners for a guest; one that may not move has only the job that computes on its own
        GPUs.
        """
        board = self._board
        if not may_move:
            host = self._on_seat.get(board.seat(guest))
            return () if host is None or board.on_seat(guest, host) is None else (host,)
        shape = (*gang_shape(guest), guest.tenant if board.snapshot.tenants else None)
        fits = self._fits.get(shape)
        if fits is None:
            fits = self._fits[shape] = {
                name: host for name, host in self._hosts.items() if board.on_seat(guest, host)
            }
        return fits.values()

    def _memory_left(self, host: JobView) -> float:
        """On the GPU of its nodes with the least memory left; unknown memory never blocks."""
        nodes = self._board.floor.nodes
        there = (nodes[name] for name in self._board.gpus[host.job_id] if name in nodes)
        has = min((node.gpu_memory_bytes for node in there if node.gpu_memory_bytes), default=0)
        if not has:
            return inf
        needed = host.profile.gpu_memory_bytes
        return -inf if needed is None else has - needed


def _busy_key(job: JobView) -> tuple[float, str]:
    return (job.profile.gpu_busy_ratio or 1.0, job.job_id)
