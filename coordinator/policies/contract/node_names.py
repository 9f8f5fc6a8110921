"""Names of nodes that a job leaves alone, as one value that many jobs share. Pure.

A job that requires a label of a large fleet leaves nearly all nodes alone. Policies ask for single
nodes, compare these names in keys of like jobs, and turn them into bits: each of that costs once
for all jobs that share the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from common.model import NodeName


class NodeNames(tuple[NodeName, ...]):
    """Names in order; equal to a plain tuple of them, with a fast `in`, hash and `bits`."""

    _names: frozenset[NodeName] | None = None
    _hash: int | None = None
    _places: Mapping[NodeName, int] | None = None
    _bits: int = 0

    @property
    def names(self) -> frozenset[NodeName]:
        """The same as a set; for a look at many nodes."""
        if self._names is None:
            self._names = frozenset(self)
        return self._names

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    def bits(self, places: Mapping[NodeName, int]) -> int:
        """Their places as bits; names without a place have none.

        Kept for the same mapping, which snapshots share until a node joins or leaves.
        """
        if self._places is not places:
            self._places, self._bits = places, _bits_of(self, places)
        return self._bits


NO_NODES = NodeNames()
_ONE = ord("1")


def sorted_names(names: Iterable[NodeName]) -> NodeNames:
    """Names in order."""
    return NodeNames(sorted(names))


@lru_cache(maxsize=256)
def with_more(names: NodeNames, more: tuple[NodeName, ...]) -> NodeNames:
    """Names and a few more, in order; the same value for each job that asks for the same."""
    return sorted_names({*names, *more})


def set_of(names: Sequence[NodeName]) -> frozenset[NodeName]:
    """Names as a set; for a look at many nodes."""
    return names.names if isinstance(names, NodeNames) else frozenset(names)


def bits_of(names: Sequence[NodeName], places: Mapping[NodeName, int]) -> int:
    """The places of nodes as bits; names without a place have none."""
    return names.bits(places) if isinstance(names, NodeNames) else _bits_of(names, places)


def _bits_of(names: Iterable[NodeName], places: Mapping[NodeName, int]) -> int:
    digits = bytearray(b"0") * len(places)
    for place in map(places.get, names):
        if place is not None:
            digits[-1 - place] = _ONE
    return int(digits or b"0", 2)
