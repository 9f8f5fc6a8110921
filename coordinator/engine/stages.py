"""Stages of a way home that was ordered, from the load that called for it to the last word of it.

Pure; must not know why a node was called back, and compares no clocks of two machines.
"""

from __future__ import annotations

from coordinator.engine.context import Context
from coordinator.engine.events import NodeReported
from coordinator.engine.loan_entries import LoanEntry


def load_age_s(ctx: Context, loan: LoanEntry) -> float:
    """How old the load of a loan's service is by which a policy decides now, in seconds."""
    service = ctx.state.services.get(loan.service)
    return ctx.now_s - service.load[-1].at_s if service is not None and service.load else 0.0


def of_reclaim(loan: LoanEntry, event: NodeReported, *, home_at_s: float) -> dict[str, float]:
    """All stages of a reclaim, in seconds and in order: beside `decide`, which is before the order,
    they add up to the time from the order to `home_at_s`, when it was heard to be over.

    The node tells how long its own stages took and how long ago they were over; what is left, on
    this clock, is how long the call took until its node acted on it. A node of an older version
    does not say how long ago, and its stages are all that is told. After a reboot on the way
    nobody knows what of the rest went before, so all of it is `unattended`.
    """
    own_s = dict(event.stage_durations_s)
    ordered_at_s, called_at_s = loan.reclaim_ordered_at_s, loan.called_home_at_s
    if event.home_ago_s is None or ordered_at_s is None:
        return own_s
    if loan.is_lapsed or loan.turned_back:
        # While the order waited: nobody called it, its own stages count from there.
        way_s = sum(own_s.values()) + event.home_ago_s
        wait_s = max(0.0, home_at_s - ordered_at_s - way_s)
        return {"decide": loan.decide_s, "wait": wait_s} | own_s | {"heard": event.home_ago_s}
    if called_at_s is None:
        return own_s
    heard_s = min(event.home_ago_s, home_at_s - called_at_s)
    # Less than nothing of a node whose lease had ended, unheard, before it was called: see
    # `agent.core.return_timing`, which counts from there.
    rest_s = max(0.0, home_at_s - called_at_s - sum(own_s.values()) - heard_s)
    stages_s = {"decide": loan.decide_s}
    if called_at_s > ordered_at_s:
        stages_s["wait"] = called_at_s - ordered_at_s
    if event.boot_id == loan.called_home_boot_id:
        stages_s["notify"] = rest_s
    else:
        own_s["unattended"] = own_s.get("unattended", 0.0) + rest_s
    return stages_s | own_s | {"heard": heard_s}
