"""Why a worker cannot have its GPUs now: who has them, and what the devices say. Pure; must not
know roles, leases or what is done about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent import handover
from agent.state import Held
from common.messages import GpuHealth, GpuReport, WorkerOrder, WorkerPhase
from common.model import GpuUuid

P = WorkerPhase


def who_holds(held: Held, live: Iterable[Held]) -> str:
    """Which other worker has its GPUs and must leave them first; empty when none must.

    On shared GPUs only those must that are leaving, or are to be suspended and are not yet.
    """
    wanted, is_sharing = set(held.order.gpu_uuids), held.order.is_sharing
    for other in live:
        holds = other.is_begun or other.phase in (P.READY, P.RUNNING, P.SUSPENDED, P.STOPPING)
        is_going = other.phase == P.RUNNING and other.order.is_suspended
        may_stay = is_sharing and not is_going and other.phase != P.STOPPING
        is_near = other is not held and wanted & set(other.order.gpu_uuids)
        if is_near and holds and not may_stay:
            return f"waits for worker {other.order.key} to leave"
    return ""


def why_not_free(
    order: WorkerOrder,
    known: Mapping[GpuUuid, GpuReport],
    *,
    sampled_at_s: float,
    left_at_s: float,
    free_memory_ratio: float,
) -> str:
    """Why its GPUs are not free by what the devices say; empty when they are.

    known: all GPUs of the node by a sample begun at `sampled_at_s`. left_at_s: when the last worker
    left one of those wanted; an older sample proves nothing.
    """
    wanted = sorted(set(order.gpu_uuids))
    if order.is_sharing:  # what the others have there is no sign of anything
        bad = [uuid for uuid in wanted if known[uuid].health != GpuHealth.OK]
    elif sampled_at_s <= left_at_s:
        return "waits for a GPU sample after the last worker left"
    else:
        bad = wanted
    found = (handover.busy(known[uuid], free_memory_ratio=free_memory_ratio) for uuid in bad)
    return next((why for why in found if why), "")
