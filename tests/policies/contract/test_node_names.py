"""Names of nodes that many jobs share: a tuple of them in every respect, and fast."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from common.model import NodeName
from coordinator.policies.contract.node_names import NodeNames, bits_of

NAMES = st.lists(st.sampled_from([NodeName(f"n{number}") for number in range(6)]), unique=True)


@given(some=NAMES, others=NAMES, there=NAMES)
def test_they_are_a_tuple_of_names(
    some: list[NodeName], others: list[NodeName], there: list[NodeName]
) -> None:
    """Equality, hash, membership and encoding are those of a tuple; so are the places as bits."""
    names, plain = NodeNames(some), tuple(some)
    assert (names == plain, plain == names, hash(names)) == (True, True, hash(plain))
    assert (names == NodeNames(others), names != tuple(others)) == (some == others, some != others)
    assert all((name in names) == (name in plain) for name in others)
    assert msgspec.msgpack.encode(names) == msgspec.msgpack.encode(plain)
    for order in (there, there[::-1]):  # other places: the bits are made again
        places = {name: place for place, name in enumerate(order)}
        expected = sum(1 << places[name] for name in some if name in places)
        assert names.bits(places) == bits_of(plain, places) == expected
