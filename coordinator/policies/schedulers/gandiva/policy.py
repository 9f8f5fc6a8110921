"""Gandiva: turns on shared GPUs, measured packing, migration, growing and shrinking.

Gandiva (OSDI'18). It aims at early feedback for every job rather than short completion times: a job
that arrives computes at once where it can, on free GPUs or in turns with a gang of its size.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from common.model import JobId, JobState, PositiveInt, Ratio
from coordinator.policies.contract.decisions import (
    Allocation,
    PendingReason,
    Resume,
    Start,
    earliest,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.knobs import Idle, KnobSet, Period, Seconds
from coordinator.policies.parts.memory import recalled
from coordinator.policies.policy import Parts, joint
from coordinator.policies.schedulers.gandiva.board import Board
from coordinator.policies.schedulers.gandiva.growing import grow_all
from coordinator.policies.schedulers.gandiva.migration import Moves
from coordinator.policies.schedulers.gandiva.packing import Mark, Packing, Pair, measured
from coordinator.policies.schedulers.gandiva.placement import start_in_turns, start_on_free
from coordinator.policies.schedulers.gandiva.time_slices import Slices, tick


class Knobs(KnobSet, frozen=True, kw_only=True):
    """slice_s: length of a turn (section 3.1: a minute, at most 2 % of overhead).

    jobs_per_gpu: most gangs that take turns on one GPU, as the state of each stays on the machine;
        1: no turns.
    packs: try two jobs on one GPU while other jobs are suspended.
    migrates: move jobs to freed GPUs, to fewer nodes, and away from almost empty nodes.
    grows: give elastic jobs idle GPUs of their node.
    rest_s: an attempt that has run for less than this is not moved.
    defrag_free_ratio: empty a node in use when this share of its GPUs is free (section 4.2: 3 of
        4).
    grow_after_s: time that GPUs must be idle before jobs grow.
    """

    slice_s: Period = 60.0
    jobs_per_gpu: PositiveInt = 4
    packs: bool = True
    migrates: bool = True
    grows: bool = True
    rest_s: Seconds = 600.0
    defrag_free_ratio: Ratio = 0.75
    grow_after_s: Seconds = 60.0

    def idle(self) -> Idle:
        """Those of moves and of growth, without them.

        `packs` does not need jobs_per_gpu above 1: that is for newcomers, and those that have turns
        when it is set to 1 go on with them, packed or not.
        """
        moving = dict.fromkeys(("rest_s", "defrag_free_ratio"), ("migrates",))
        growing = {"grow_after_s": ("grows",)}
        return ({} if self.migrates else moving) | ({} if self.grows else growing)


class Memory(Struct, frozen=True, kw_only=True):
    """began_s: when turns began. idle_since_s: since when GPUs were free without a waiting job."""

    began_s: dict[JobId, float] = {}
    marks: dict[JobId, Mark] = {}
    pairs: dict[str, Pair] = {}
    idle_since_s: float | None = None
    looked_at: int = -1
    """Slice of the last look at what could be better."""


def _pass(
    knobs: Knobs, snapshot: ClusterSnapshot, blob: bytes
) -> tuple[Allocation, list[PendingReason]]:
    memory = recalled(blob, Memory)
    board = Board(snapshot)
    marks = measured(board, memory.marks)
    packing = Packing(board, marks, memory.pairs)
    turns = Slices(
        board,
        knobs.slice_s,
        began_s=memory.began_s,
        goes_with=packing.goes_with,
        keeps=packing.on_trial(),
    )
    now_slice = tick(snapshot.now_s, knobs.slice_s)
    packing.judge(turns, knobs.slice_s)
    start_on_free(board)
    moves = Moves(board, rest_s=knobs.rest_s) if knobs.migrates else None
    if has_looked := now_slice != memory.looked_at:
        _look(knobs, board, packing, moves)  # before the turns: they leave no job to move or pack
    turns.take_idle()
    # A newcomer has its first turn where one is over now. After those that are suspended it would
    # have none while two take turns: one of them has always just begun.
    holds = start_in_turns(board, turns, jobs_per_gpu=knobs.jobs_per_gpu)
    turns.take()
    idle_since_s = _idle_since(board, holds, memory.idle_since_s)
    grows_at_s = None if idle_since_s is None else idle_since_s + knobs.grow_after_s
    if knobs.grows and grows_at_s is not None and grows_at_s <= snapshot.now_s:
        grows_at_s = grow_all(board)
    began_s = {job_id: at_s for job_id, at_s in memory.began_s.items() if job_id in board.gpus}
    began_s |= {
        made.job_id: snapshot.now_s for made in board.decisions if isinstance(made, Start | Resume)
    }
    after = Memory(
        began_s=began_s,
        marks=marks,
        pairs=packing.pairs,
        idle_since_s=idle_since_s,
        looked_at=now_slice,
    )
    made = Allocation(
        decisions=tuple(board.decisions),
        memory=msgspec.msgpack.encode(after),
        wake_at_s=earliest(
            _wake_at_s(knobs, board, grows_at_s, holds),
            None if moves is None else _looks_at_s(knobs, board, moves, has_looked=has_looked),
        ),
    )
    return made, list(holds)


def _look(knobs: Knobs, board: Board, packing: Packing, moves: Moves | None) -> None:
    """The introspective mode (section 4.2), once a slice."""
    if moves is not None:
        moves.spread_out()
    if knobs.packs:
        packing.offer(rest_s=knobs.rest_s if knobs.migrates else float("inf"))
    if moves is not None:
        moves.closer()
        moves.tidy(knobs.defrag_free_ratio)


def _idle_since(
    board: Board, holds: tuple[PendingReason, ...], before_s: float | None
) -> float | None:
    """Since when GPUs are free while no job waits or takes turns; None if that is not so."""
    takes_turns = any(job.state == JobState.SUSPENDED for job in board.snapshot.jobs)
    if holds or takes_turns or board.floor.free_gpus() <= 0:
        return None
    return board.now_s if before_s is None else before_s


def _wake_at_s(
    knobs: Knobs, board: Board, grows_at_s: float | None, holds: tuple[PendingReason, ...]
) -> float | None:
    """The next slice while any job takes turns, waits or is tried; when jobs may grow."""
    is_shared = any(len(jobs) > 1 for jobs in board.has.values())
    if is_shared or (holds and (board.gpus or board.decisions)):
        return _next_slice_s(knobs, board)
    can_grow = knobs.grows and any(job.is_elastic for job in board.snapshot.jobs)
    return grows_at_s if can_grow else None


def _looks_at_s(knobs: Knobs, board: Board, moves: Moves, *, has_looked: bool) -> float | None:
    """When a gang that stands on several nodes may be brought together, whatever happens until
    then: it has rested, and its slice is not one that was looked at before."""
    if has_looked:
        return min((at_s for at_s in moves.rested_s() if at_s > board.now_s), default=None)
    return _next_slice_s(knobs, board) if moves.rested_s() else None


def _next_slice_s(knobs: Knobs, board: Board) -> float:
    return (tick(board.now_s, knobs.slice_s) + 1) * knobs.slice_s


def allocate(knobs: Knobs, snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
    """One scheduling pass."""
    return _pass(knobs, snapshot, memory)[0]


def hold(knobs: Knobs, snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
    """Why each job that waits would not start in a pass now."""
    return tuple(_pass(knobs, snapshot, memory)[1])


POLICIES = (
    joint(
        "gandiva",
        "all jobs run at once, in turns on shared GPUs; packs, migrates and grows jobs "
        "where it pays",
        knobs=Knobs(),
        allocate=allocate,
        pending_reasons=hold,
        shares_gpus=True,
        parts=Parts(
            order="submission, then turns",
            size="base demand; elastic jobs take idle GPUs of their node",
            place="nodes of its gang size, empty nodes, any node; else turns",
        ),
    ),
)
