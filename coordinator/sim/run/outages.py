"""Outages of simulated nodes: crash, silence, boot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from common.model import NodeName
from coordinator.engine.state.events import NodeReported, NodeSilent
from coordinator.sim.run.cluster import PretendNode
from coordinator.sim.run.loop import Loop

LOST_AFTER_S = 15.0
"""A node that is silent this long is LOST, as by default in the live coordinator."""


class Crash(Struct, frozen=True, kw_only=True):
    """A node loses power at an instant and boots again `down_s` later."""

    node: NodeName
    at_s: float
    down_s: float


class Outages:
    """Every node that is down, and since when.

    Args:
        tell: receives its silence, first when the node is LOST.
        awaited_s: the silence of a LOST node that would matter next, as `Engine.awaited_silence_s`.
    """

    def __init__(
        self,
        loop: Loop,
        nodes: Mapping[NodeName, PretendNode],
        *,
        tell: Callable[[NodeSilent], None],
        awaited_s: Callable[[], Mapping[NodeName, float]],
    ) -> None:
        self._loop = loop
        self._nodes = nodes
        self._tell = tell
        self._awaited_s = awaited_s
        self._since_s: dict[NodeName, float] = {}
        self._heard: dict[NodeName, NodeReported] = {}

    def heard(self, report: NodeReported) -> NodeReported:
        """A report as it enters: a node that is up is heard all the time, though it says nothing
        new, so that a role that it left in one boot was its own until now."""
        last = self._heard.get(report.node)
        self._heard[report.node] = report
        if last is None or last.role == report.role or last.boot_id != report.boot_id:
            return report
        return replace(report, is_move_heard=True)

    def begin(self, crash: Crash) -> None:
        """The node loses power now."""
        node = self._nodes[crash.node]
        if not node.is_up:
            return
        node.crash()
        self._since_s[crash.node] = self._loop.now_s
        self._loop.after(crash.down_s, node.boot)
        if crash.down_s > LOST_AFTER_S:
            self._say_at(crash.node, self._loop.now_s, LOST_AFTER_S)

    def _say_at(self, name: NodeName, since_s: float, silent_s: float) -> None:
        at_s = max(self._loop.now_s, since_s + silent_s)
        self._loop.at(at_s, partial(self._say, name, since_s, silent_s))

    def _say(self, name: NodeName, since_s: float, silent_s: float) -> None:
        """Report how long it has been down without an answered report."""
        if self._nodes[name].is_up or self._since_s[name] != since_s:
            return
        self._tell(NodeSilent(node=name, silent_s=silent_s, unanswered_s=silent_s))
        awaited_s = self._awaited_s().get(name)
        if awaited_s is not None:
            self._say_at(name, since_s, awaited_s)
