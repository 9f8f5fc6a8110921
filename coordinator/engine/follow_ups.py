"""Follow-ups: the fixed rules that are applied after every event, beyond what its handler did.

`FOLLOW_UPS` is the whole list, in order. A rule sees what the event and the rules above it changed;
none runs twice. Most events make none of them due, so a condition is a look at a table, not a scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from coordinator.engine.jobs import arrays, gpu_sharing, migration
from coordinator.engine.loans import delayed_reclaim, idle_return, recall
from coordinator.engine.nodes import lost_records, maintenance, start_failures, windows
from coordinator.engine.state.context import Context


class FollowUp(NamedTuple):
    """One rule: whether it may have anything to do, and what it does."""

    is_due: Callable[[Context], bool]
    apply: Callable[[Context], None]


def _in_doubt(ctx: Context) -> bool:
    return bool(ctx.state.doubted_jobs or ctx.state.doubted_nodes)


def _awaited(ctx: Context) -> bool:
    return bool(ctx.state.awaited)


def _drains(ctx: Context) -> bool:
    return bool(ctx.state.drains)


def _windows(ctx: Context) -> bool:
    return bool(ctx.state.windows) and windows.is_due(ctx)


def _closed(ctx: Context) -> bool:
    return bool(ctx.state.closed_until_s)


def _migrates(ctx: Context) -> bool:
    return bool(ctx.state.migrating_jobs)


def _shares(ctx: Context) -> bool:
    return bool(ctx.state.shared_nodes or ctx.state.suspended_jobs)


def _closed_changed(ctx: Context) -> bool:
    return bool(ctx.state.closed_until_s and ctx.changed_nodes)


def _has_arrays(ctx: Context) -> bool:
    return bool(ctx.state.live_arrays and (ctx.changed_jobs or ctx.changed_arrays))


def _counts_idle(ctx: Context) -> bool:
    return ctx.settings.idle_return_s is not None and bool(ctx.changed_nodes)


FOLLOW_UPS = (
    # First, the jobs that lost records left in doubt: once they are known, GPUs are released, and
    # all later rules ask for the holders of GPUs.
    FollowUp(_in_doubt, lost_records.settle),
    # Time limits of nodes: they stop workers, or let a node take new ones, ...
    FollowUp(_awaited, delayed_reclaim.settle),
    FollowUp(_windows, windows.settle),
    FollowUp(_drains, maintenance.settle),
    FollowUp(_closed, start_failures.settle),
    # ... and a migration arrives only where its node takes workers after that.
    FollowUp(_migrates, migration.settle),
    # Shares of GPUs, after the last rule that starts or stops workers on shared ones.
    FollowUp(_shares, gpu_sharing.settle),
    # Nodes on which nothing is left to run: a closed one goes home at once, ...
    FollowUp(_closed_changed, recall.settle),
    # ... and an idle one counts its idle time, unless it was just called home.
    FollowUp(_counts_idle, idle_return.note_idle),
    # Tasks of arrays, which only wait: after all that changes how many of them do.
    FollowUp(_has_arrays, arrays.settle),
)


def settle(ctx: Context) -> None:
    """Apply the follow-ups of an event."""
    for is_due, apply in FOLLOW_UPS:
        if is_due(ctx):
            apply(ctx)
