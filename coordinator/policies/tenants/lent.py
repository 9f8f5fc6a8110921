"""What tenants leave to one another of what they share. Must not know the tree, nor who uses what.

Whoever asks says what each uses: now, or by a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from coordinator.policies.snapshot import TenantView


class Claim(Struct, frozen=True, kw_only=True):
    """What a sibling has: GPUs that it uses, and idle ones of its guarantee that it does not lend,
    or those below it do not."""

    guarantee_gpus: int
    used: float
    kept: float


def left_to(guarantee_gpus: int, whole: float, others: Sequence[Claim]) -> float:
    """Of what a parent may have, what its other children leave to one.

    Beyond its guarantee that is what nobody uses or keeps. Within it, what they keep counts up to
    their own guarantees alone, as teams below one of them may have borrowed what others there keep.
    Where all others are within theirs it is at least its guarantee, if a parent's covers those of
    its children.
    """
    beyond = whole - sum(each.used + each.kept for each in others)
    claims = (max(each.used, min(each.guarantee_gpus, each.used + each.kept)) for each in others)
    return max(beyond, min(float(guarantee_gpus), whole - sum(claims)))


def unlent(view: TenantView, used: float) -> float:
    """GPUs of its guarantee that a tenant which uses so many neither uses nor lends."""
    if view.lend_limit_gpus is None:
        return 0.0
    return max(0.0, view.guarantee_gpus - used - view.lend_limit_gpus)
