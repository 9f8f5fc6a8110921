"""Measures each stage of a node's return from a loan. Pure.

The timing is part of the node's memory, because several processes may work on one return: an agent
that is killed on the way, `--go-home` after it, and the next agent, which reports the timing.
"""

from __future__ import annotations

from agent.core.state import Facts, Memory
from common.model import NodeRole
from common.node_role_table import NodeEvent

LEAST_S = 0.01
"""A smaller difference is clock noise, and no stage."""


def forget(memory: Memory) -> None:
    """Forget the last return: there is none to report."""
    memory.stage_durations_s = {}
    memory.home_due_at_s = memory.home_at_s = None


def began(memory: Memory, *, now_s: float) -> None:
    """Begin the return: now, or at the end of the lease if that has passed.

    An agent that hung, or a machine that slept, turns late; the service has waited since the end of
    the lease.
    """
    forget(memory)
    ends_at_s = memory.lease_ends_at_s
    memory.home_due_at_s = now_s if ends_at_s is None else min(now_s, ends_at_s)


def booted(memory: Memory) -> None:
    """Begin the return after a boot, which ended the lease at zero of its clock at the latest."""
    was_away = memory.lease is not None or memory.home_due_at_s is not None
    forget(memory)
    memory.home_due_at_s = 0.0 if was_away else None


def saved_at_s(facts: Facts) -> float:
    """When the last worker had saved, or certainly would not; 0 without workers.

    A worker that reports neither counts until its end. A rendezvous store has nothing to save.
    """
    workers = [fact for fact in facts.statuses if not fact.key.is_store]
    ended = [fact.ended_at_s for fact in workers if fact.save_over_at_s is None]
    known = [fact.save_over_at_s for fact in workers]
    return max((at_s for at_s in (*known, *ended) if at_s is not None), default=0.0)


def vacated(
    memory: Memory, began_at_s: float, saved_at_s: float, emptied_at_s: float, free_at_s: float
) -> None:
    """Record the stages until the GPUs were free: save, exit of the workers, device free.

    All instants are on the boot clock. A worker that saved before the request needed no time for
    it.
    """
    over_at_s = min(max(began_at_s, saved_at_s), emptied_at_s)
    memory.stage_durations_s |= {
        "checkpoint": over_at_s - began_at_s,
        "exit": emptied_at_s - over_at_s,
        "device_free": free_at_s - emptied_at_s,
    }


def arrived(memory: Memory, *, now_s: float, server_ready_s: float) -> None:
    """Record that the node serves again.

    `unattended` is the time that no stage covers: before the return began, between two processes,
    or in quarantine. So the stages add up to all of the time since the end of the lease.
    """
    stages_s = memory.stage_durations_s
    stages_s["server_ready"] = server_ready_s
    if memory.home_due_at_s is None:
        return
    rest_s = now_s - memory.home_due_at_s - sum(stages_s.values())
    if rest_s > LEAST_S:
        stages_s["unattended"] = rest_s
    memory.home_due_at_s, memory.home_at_s = None, now_s


_WORDS = {
    NodeEvent.LEND: "leaves its service",
    NodeEvent.LOAD_ROSE: "stays in its service",
    NodeEvent.DRAINED: "is on loan",
    NodeEvent.VACATE: "goes home",
    NodeEvent.DEVICE_FREE: "starts its server",
    NodeEvent.HEALTHY: "is home again",
}


def in_words(memory: Memory, old: NodeRole, event: NodeEvent, why: str) -> str:
    """One step of a node's life as a log line; for an arrival, the duration of each stage."""
    what = _WORDS.get(event, str(event))
    said = f"node {memory.node} {what} ({old} -> {memory.role})"
    if event == NodeEvent.HEALTHY and memory.stage_durations_s:
        stages = (f"{name} {took_s:.1f} s" for name, took_s in memory.stage_durations_s.items())
        why = ", ".join(stages)
    return f"{said}: {why}" if why else said
