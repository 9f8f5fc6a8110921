"""What a drain means for a node and for the jobs on it, in sentences. Pure; must not decide."""

from __future__ import annotations

from coordinator.engine.engine import Engine
from coordinator.engine.state.tables import JobEntry, NodeEntry


def closed_reasons(engine: Engine, entry: NodeEntry, now_s: float) -> list[str]:
    """That no new work comes to a node, by whose order, and until when what runs may go on.

    now_s: engine time.
    """
    if not entry.is_cordoned:
        return []
    if not entry.is_draining:
        return [f"cordoned {entry.cordon_reason}"]
    drain = engine.state.drains.get(entry.name)
    if drain is None:
        return [f"drained {entry.cordon_reason}"]
    left_s = max(0.0, drain.until_s - now_s)
    return [
        f"drained {entry.cordon_reason}; what runs there may go on for {left_s:.0f} s, and is "
        "preempted then"
    ]


def drain_reasons(engine: Engine, entry: JobEntry, now_s: float) -> list[str]:
    """When a job has to leave nodes that are drained. now_s: engine time."""
    held = (*entry.workers.values(), *((entry.store,) if entry.store else ()))
    said: list[str] = []
    for name in sorted({worker.node for worker in held}):
        drain = engine.state.drains.get(name)
        if drain is not None:
            left_s = max(0.0, drain.until_s - now_s)
            said.append(
                f"{drain.reason}: unless it ends in {left_s:.0f} s, it is preempted and waits again"
            )
    return said
