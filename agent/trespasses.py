"""GPU processes of no granted worker, as a report tells them. Pure; must not know nodes."""

from __future__ import annotations

from collections.abc import Sequence

from common.messages import Trespass
from common.model import GpuUuid

MAX_TRESPASSES = 32
"""A report names no more of them: one is enough to send somebody there."""


def told(found: Sequence[tuple[int, GpuUuid]]) -> tuple[Trespass, ...]:
    """(pid, GPU) pairs as a report has them."""
    return tuple(Trespass(pid=pid, gpu_uuid=gpu) for pid, gpu in found[:MAX_TRESPASSES])


def in_words(trespasses: Sequence[Trespass]) -> str:
    """The first of them and how many more; empty without any."""
    if not trespasses:
        return ""
    first, more = trespasses[0], len(trespasses) - 1
    others = f" and {more} more" if more else ""
    return f"trespass: process {first.pid} on {first.gpu_uuid}{others}"
