"""Explains maintenance windows: what an order does, and what it means to nodes and jobs. Pure."""

from __future__ import annotations

from math import inf

from common.model import NodeName, NodeRole
from coordinator.engine.engine import Engine
from coordinator.engine.nodes import windows
from coordinator.engine.state.context import Context
from coordinator.engine.state.tables import JobEntry, NodeEntry, WindowEntry
from coordinator.policies.aryl.lending.balance import balance
from coordinator.policies.contract.text import counted

_COMES = (NodeRole.VACATING, NodeRole.WARMING)
_AWAY = (NodeRole.LOST, NodeRole.QUARANTINED)
NAMED = 6
"""Jobs that one answer names; more are counted."""


def ordered(engine: Engine, target: str) -> str:
    """What the order of a window just did: when it begins, the jobs that will still be there by
    their time limits, the loan that ends for it, and a service that has too few nodes then.
    """
    node = engine.state.nodes.get(NodeName(target))
    window = None if node is None else engine.state.windows.get(node.name)
    if node is None or window is None:
        why = "" if node is None else windows.why_not(node)
        return f"drain_at {target}: {why or 'it has begun already'}"
    now_s = engine.state.now_s
    within = "" if window.deadline_s is None else f" within {window.deadline_s:.0f} s"
    said = [f"drain_at {target} in {window.at_s - now_s:.0f} s{within}"]
    return "; ".join([*said, *_brings(engine, node, window, now_s, staying="still there then")])


def _brings(
    engine: Engine, node: NodeEntry, window: WindowEntry, now_s: float, *, staying: str
) -> list[str]:
    """The loan that a window ends, the jobs that it finds, and what its service lacks then.

    staying: what the jobs are called.
    """
    still = still_there(engine, node, window)
    found = (
        _home(engine, node, window, now_s),
        f"{staying}: {still}" if still else "",
        too_few(engine, node, window),
    )
    return [each for each in found if each]


def too_few(engine: Engine, node: NodeEntry, window: WindowEntry) -> str:
    """A warning that the service of a node has fewer nodes than it needs when the window begins,
    because there is none to call home, or none that is home by then; empty without that.
    """
    snapshot = engine.snapshot()
    service = next((one for one in snapshot.services if one.name == node.service), None)
    if service is None:
        return ""
    lent, serving = 0, 0
    for one in engine.state.nodes.values():
        if one.service == node.service and _is_open_at(engine, one, window.at_s):
            lent += one.lease is not None
            serves = one.serving_since_s is not None or one.role in _COMES
            serving += one.lease is None and serves
    needed = balance(snapshot, service).needed
    if lent + serving < needed:
        have, rest = lent + serving, "no lent node can replace it"
    elif serving < needed and window.home_from_s < engine.state.now_s:
        have, rest = serving, "lent nodes that are called home now may come after that"
    else:
        return ""
    return f"warning: {service.name} needs {needed} and has {counted(have, 'node')} then: {rest}"


def _is_open_at(engine: Engine, node: NodeEntry, at_s: float) -> bool:
    window = engine.state.windows.get(node.name)
    is_there = not node.cordon.is_cordoned and node.role not in _AWAY
    return is_there and (window is None or window.at_s > at_s + windows.TOGETHER_S)


def still_there(engine: Engine, node: NodeEntry, window: WindowEntry) -> str:
    """The jobs that the window will find on a node, each with when its time limit would end it and
    whether it only shrinks.
    """
    ctx = Context(engine.state, engine.settings, engine.state.now_s)
    found = [
        f"{job_id} ({_ends(still)})"
        for job_id, still in sorted(windows.still_there(ctx, node, window).items())
    ]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


def _ends(still: windows.Still) -> str:
    if not still.is_preempted:
        return "its flexible workers are released, and it runs on"
    after_s = still.over_s
    return "no time limit" if after_s == inf else f"its time limit ends {after_s:.0f} s later"


def _home(engine: Engine, node: NodeEntry, window: WindowEntry, now_s: float) -> str:
    """When the loan of a node ends for its window; empty for one that is not lent."""
    if node.lease is None:
        return ""
    lease = node.lease.lease_id
    if window.home_from_s <= now_s:
        return f"loan {lease} is called home now, and may come home after that"
    return f"loan {lease} is called home in {window.home_from_s - now_s:.0f} s"


def of_node(engine: Engine, entry: NodeEntry, now_s: float) -> list[str]:
    """What the window of a node means; empty without one. now_s: engine time."""
    window = engine.state.windows.get(entry.name)
    if window is None:
        return []
    until = "only a job whose time limit ends by then starts there"
    if entry.service is not None:
        until = "it is lent no more" if entry.cordon.is_closing else _lent_for(window, now_s)
    left_s = max(0.0, window.at_s - now_s)
    said = [f"it closes in {left_s:.0f} s, ordered {window.reason}: {until}"]
    staying = "by their time limits these jobs are still there then"
    return [*said, *_brings(engine, entry, window, now_s, staying=staying)]


def _lent_for(window: WindowEntry, now_s: float) -> str:
    return f"it may be lent for {max(0.0, window.lent_until_s - now_s):.0f} s more"


def of_job(engine: Engine, entry: JobEntry, now_s: float) -> list[str]:
    """When a job has to leave nodes that close before its time limit ends it, and whether it is
    preempted or runs on; now_s as above.
    """
    ctx = Context(engine.state, engine.settings, now_s)
    held = (*entry.workers.values(), *((entry.store,) if entry.store else ()))
    said: list[str] = []
    for name in sorted({worker.node for worker in held}):
        window, node = engine.state.windows.get(name), engine.state.nodes.get(name)
        if window is None or node is None:
            continue
        still = windows.still_there(ctx, node, window).get(entry.job_id)
        if still is not None:
            said.append(_leaves(node, window, now_s, is_preempted=still.is_preempted))
    return said


def _leaves(node: NodeEntry, window: WindowEntry, now_s: float, *, is_preempted: bool) -> str:
    left_s = max(0.0, windows.clears_at_s(node, window) - now_s)
    is_lent = node.lease is not None
    what = f"{node.name} closes, ordered {window.reason}"
    if is_lent:
        what += f", and its loan ends in {left_s:.0f} s"
    if not is_preempted:
        return f"{what}: its flexible workers there are released in {left_s:.0f} s, and it runs on"
    if not is_lent:  # a recall waits for no deadline of a drain
        left_s += window.deadline_s or 0.0
    return f"{what}: unless it ends in {left_s:.0f} s, it is preempted and waits again"
