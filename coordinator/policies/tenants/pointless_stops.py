"""Pointless preemptions: no remaining decision uses the GPUs that they would free."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.policies.contract.decisions import Decision, Suspend
from coordinator.policies.tenants.gpu_flow import Flow, sum_by_node


class _Uses:
    """Which of some decisions others make use of; None among them was dropped."""

    def __init__(self, flow: Flow, decisions: Sequence[Decision | None]) -> None:
        self._flow = flow
        self._decisions = decisions
        self._lefts = flow.lefts(decisions)
        self._left = sum_by_node(left.free for left in self._lefts)
        self._taken = sum_by_node(flow.taken(each) for each in decisions if each is not None)

    def is_needed(self, place: int) -> bool:
        """Whether others take what a decision vacates, or compute where one is suspended."""
        mine, flow = self._decisions[place], self._flow
        if isinstance(mine, Suspend):
            there = (each for each in self._decisions if each is not None)
            return any(mine.job_id in flow.beside(each) for each in there)
        assert mine is not None
        gpus = (uuid for worker in flow.leaving(mine) for uuid in worker.gpu_uuids)
        own = self._lefts[place].free
        if any(len(flow.sharers[uuid]) > 1 for uuid in gpus):  # it may not be the last to leave
            own = flow.parts(place, self._decisions)
        return any(
            self._taken.get(node, 0) > flow.free.get(node, 0) + self._left[node] - count
            for node, count in own.items()
        )


def in_vain(
    flow: Flow, before: Sequence[Decision | None], after: Sequence[Decision | None]
) -> list[int]:
    """Places of stops and suspensions that were needed before and are not after, if all of these
    are dropped; the last is the first that is.

    before, after: None where one was dropped, and in the same places; `after` may have more.
    """
    found, rest = list[int](), list(after)
    asked, left = _Uses(flow, before), _Uses(flow, rest)
    for place in reversed(range(len(before))):
        made = rest[place]
        if made is None or not (isinstance(made, Suspend) or flow.leaving(made)):
            continue
        if asked.is_needed(place) and not left.is_needed(place):
            rest[place] = None
            found.append(place)
            left = _Uses(flow, rest)
    return found
