"""Nodes that a job leaves alone after a fault, each until an instant of its own. Must not know what
failed, nor why another place is better.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.model import JobState, NodeName
from coordinator.engine.context import Context
from coordinator.engine.marks import Avoided, RetryEntry
from coordinator.engine.state import JobEntry
from coordinator.policies.words import some

NODES_NAMED = 4
"""Of the nodes that a sentence is about."""


def leave(
    retry: RetryEntry, nodes: Iterable[NodeName], until_s: float, *, is_own_fault: bool = False
) -> None:
    """Leave nodes alone until an instant; what is known of them already is not forgotten by it."""
    for name in sorted(nodes):
        known = retry.avoided.get(name, Avoided(until_s))
        retry.avoided[name] = Avoided(
            max(known.until_s, until_s), is_own_fault=known.is_own_fault or is_own_fault
        )


def blamed(retry: RetryEntry, now_s: float) -> list[NodeName]:
    """Those that are left alone for what they did, not for what the job did there."""
    return [
        name for name, one in retry.avoided.items() if one.until_s > now_s and not one.is_own_fault
    ]


def end_s(job: JobEntry) -> float | None:
    """When the first of them may be used again; None: time alone changes nothing.

    A job that runs leaves the node of its own fault alone for good: it computes elsewhere.
    """
    return min(_ends_s(job).values(), default=None) if job.retry.avoided else None


def time_is_up(ctx: Context, job: JobEntry) -> None:
    """Forget those that it has left alone for long enough."""
    over = sorted(name for name, until_s in _ends_s(job).items() if until_s <= ctx.now_s)
    if not over:
        return
    ctx.changed_jobs[job.job_id] = None
    for name in over:
        del job.retry.avoided[name]
    if job.state == JobState.PENDING:
        what = "avoids fewer nodes" if job.retry.avoided else "avoids no node any more"
        ctx.tell(job.job_id, what, f"it has waited for others than {', '.join(over)}")


def _ends_s(job: JobEntry) -> dict[NodeName, float]:
    """When each of them may be used again, as far as time alone decides it."""
    waits = job.state == JobState.PENDING
    return {
        name: one.until_s
        for name, one in job.retry.avoided.items()
        if waits or not one.is_own_fault
    }


def told(job: JobEntry, now_s: float) -> str:
    """In words, which of them may be used again in how many seconds, those that are first first;
    empty where time alone changes nothing."""
    groups: dict[str, list[NodeName]] = {}
    for name, until_s in sorted(_ends_s(job).items(), key=lambda one: (one[1], one[0])):
        groups.setdefault(f"in {max(0.0, until_s - now_s):.0f} s", []).append(name)
    parts = [f"{named(names)} again {when}" for when, names in groups.items()]
    more = len(parts) - NODES_NAMED
    return ", ".join(parts[:NODES_NAMED]) + (f" and {more} later" if more > 0 else "")


def why_not_growing(job: JobEntry, now_s: float) -> tuple[str, ...]:
    """In words, onto which nodes a job that runs is not to grow; nothing where it may onto all."""
    if not job.spec.is_elastic:
        return ()
    ends_s = _ends_s(job)
    own = sorted(name for name in job.retry.avoided if name not in ends_s)
    said = [f"it does not grow onto {named(own)}, where it failed by its own fault"] if own else []
    if ends_s:
        said.append(f"it may grow onto {told(job, now_s)}")
    return tuple(said)


def named(nodes: list[NodeName]) -> str:
    """Nodes in words, not too many of them."""
    return some(nodes, NODES_NAMED)
