"""What is alike to a placement: groups of nodes, and jobs of one shape. Values only.

Must not know a snapshot, nor which nodes and jobs there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from msgspec import Struct

from common.model import NodeName, Preemptibility, ServiceName, WorkerRange


class Tag(IntEnum):
    """What is on a node: base workers (or any, on a training node), only flexible ones, nothing."""

    BASE = 0
    FLEXIBLE = 1
    EMPTY = 2


class Group(Struct, frozen=True, cache_hash=True):
    """Nodes that are alike to a placement, free GPUs aside. `service` is None in training."""

    gpu_type: str
    service: ServiceName | None
    tag: Tag


Masks = list[int]
"""By number of free GPUs: a set of places of nodes, as the bits of an integer."""


_WINDOW = 960
_WINDOW_MASK = (1 << _WINDOW) - 1


def bits(mask: int) -> Iterator[int]:
    """The members of a set of places, lowest first.

    An operation on an integer takes as long as the integer is wide, so that it is walked window by
    window: a member of a set of 10,000 places costs as much as one of a set of 1,000.
    """
    base = 0
    while mask:
        skipped = (mask & -mask).bit_length() - 1
        mask >>= skipped
        base += skipped
        window = mask & _WINDOW_MASK
        while window:
            low = window & -window
            yield base + low.bit_length() - 1
            window ^= low
        mask >>= _WINDOW
        base += _WINDOW


def add_bit(masks: Masks, free: int, place: int) -> None:
    """Add a place to the set of a number of free GPUs."""
    if free >= len(masks):
        masks += [0] * (free + 1 - len(masks))
    masks[free] |= 1 << place


def trimmed(masks: Masks) -> Masks:
    """A copy without the empty sets at its end."""
    last = len(masks)
    while last and not masks[last - 1]:
        last -= 1
    return masks[:last]


class Behind(Struct, frozen=True, kw_only=True):
    """The gang that a job is after its pre-run. work_s: worker-seconds of it, by the estimate."""

    workers: WorkerRange
    gpus_per_worker: int
    work_s: float
    estimate_source: str


class JobShape(Struct, frozen=True, cache_hash=True):
    """All that decides whether a base gang fits; jobs of equal shape fit or fail together."""

    gpus_per_worker: int
    min_workers: int
    is_elastic: bool
    gpu_types: tuple[str, ...]
    multipliers: tuple[tuple[str, int], ...]
    preemptibility: Preemptibility
    grace_s: float
    spans_types: bool = False
    was_preempted: bool = False
    avoid_nodes: tuple[NodeName, ...] = ()
    wants_no_loan: bool = False
