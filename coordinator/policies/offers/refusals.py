"""Nodes that were offered and declined: for how long each asker is not asked after one again.

Filters of Mesos (NSDI'11, section 3.2): whoever declines an offer says for how long it wants no
other of the same node. Must not know what an asker has a use for, nor in which order all are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, KeysView, Mapping

from common.model import NodeName

Refusal = tuple[float, int]
"""Until when it holds, and the number of the allocation in which it was made."""

Refused = dict[str, dict[NodeName, Refusal]]
"""Refusals by asker and node."""


class Refusals:
    """Those that hold in one allocation.

    by_asker: for the next one. number: of this allocation, counted from 1. refuse_s: how long one
    holds.
    """

    def __init__(self, *, number: int, now_s: float, refuse_s: float) -> None:
        self.by_asker: Refused = {}
        self._number = number
        self._now_s = now_s
        self._until_s = now_s + refuse_s

    def stand(
        self,
        before: Refused,
        askers: Collection[str],
        wanted: Callable[[str], Container[NodeName]],
    ) -> None:
        """Those of earlier allocations that have not ended, or before some others were asked.

        Allocations may come later than refusals end, however long these are: were all to lapse
        together, the first in order would be offered what it has no use for again and again. So
        each holds for as many allocations as there are other askers.

        wanted: nodes that an asker would take after all; only the turns of the others count there.
        """
        others = len(askers) - 1
        for asker, nodes in before.items():
            if asker in askers:
                useful = wanted(asker)
                self.by_asker[asker] = {
                    node: (until_s, number)
                    for node, (until_s, number) in nodes.items()
                    if number + others >= self._number
                    or (until_s > self._now_s and node not in useful)
                }

    def add(self, asker: str, nodes: Iterable[NodeName]) -> None:
        """It declines these now."""
        refusal = (self._until_s, self._number)
        self.by_asker.setdefault(asker, {}).update(dict.fromkeys(sorted(nodes), refusal))

    def of(self, asker: str) -> KeysView[NodeName]:
        """The nodes that it is not asked after."""
        return self.by_asker.get(asker, {}).keys()

    @property
    def are_new(self) -> bool:
        """Whether any was made in this allocation."""
        made = (number for nodes in self.by_asker.values() for _, number in nodes.values())
        return any(number == self._number for number in made)


def ends_s(refused: Mapping[str, Mapping[NodeName, Refusal]]) -> list[float]:
    """The instants at which refusals end."""
    return [until_s for nodes in refused.values() for until_s, _ in nodes.values()]
