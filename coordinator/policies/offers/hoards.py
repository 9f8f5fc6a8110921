"""Offers that are kept until the rest of a gang is offered too: whose they are, and for how long.

Mesos (NSDI'11, section 3.3) lets a framework keep resources until it has enough for a large task,
and warns of deadlock where several do. So hoards end: those that lasted too long, one at a time and
the oldest first. If all gave back at once, they would swap what they have for ever. Must not know
gangs, nor to whom what is given back is offered.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from common.model import NodeName


class Hoards:
    """Hoards in one allocation.

    by_owner: GPUs by node. since_s: since when each lasts. gives_back: whose ends now; None:
    nobody's.
    """

    def __init__(self, since_s: Mapping[str, float], *, now_s: float, hoard_s: float) -> None:
        self.by_owner: dict[str, dict[NodeName, int]] = {}
        self.since_s = dict(since_s)
        self._now_s = now_s
        ended = (owner for owner, at_s in since_s.items() if at_s + hoard_s <= now_s)
        self.gives_back = min(ended, key=self._age, default=None)

    def _age(self, owner: str) -> tuple[float, str]:
        return self.since_s[owner], owner

    def add(self, owner: str, node: NodeName, gpus: int) -> None:
        """It is offered so many GPUs of a node, beside those that it has."""
        mine = self.by_owner.setdefault(owner, {})
        mine[node] = mine.get(node, 0) + gpus

    def of(self, owner: str) -> Mapping[NodeName, int]:
        """GPUs by node."""
        return self.by_owner.get(owner, {})

    def keep(self, owner: str, gpus: Mapping[NodeName, int]) -> None:
        """Of what it has it goes on hoarding this; it begins to now where it did not."""
        self.by_owner[owner] = dict(gpus)
        self.since_s.setdefault(owner, self._now_s)

    def end(self, owner: str) -> None:
        """It hoards nothing any more."""
        self.by_owner.pop(owner, None)
        self.since_s.pop(owner, None)

    def renew(self, owner: str) -> None:
        """It got what it waited for: what it hoards from now on is for another gang."""
        self.since_s.pop(owner, None)

    def oldest(self, among: Iterable[str]) -> str | None:
        """Of these, whoever has hoarded for longest; None where none of them does."""
        hoarding = (owner for owner in among if owner in self.since_s)
        return min(hoarding, key=self._age, default=None)

    def is_kept(self, owner: str) -> bool:
        """Whether it has something, and does not give it back now."""
        return owner in self.by_owner and owner != self.gives_back


def begun(since_s: Mapping[str, float], owners: Container[str]) -> dict[str, float]:
    """Since when those that are still there hoard."""
    return {owner: at_s for owner, at_s in since_s.items() if owner in owners}
