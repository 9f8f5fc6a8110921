"""What policies remember: their own words come back, and anything else is forgotten."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from common.model import JobId
from coordinator.policies.parts.memory import recalled
from tests.tables import each_row


class Memory(Struct, frozen=True):
    """As a policy has one."""

    turns: dict[JobId, int] = {}


def test_what_was_written_comes_back() -> None:
    """The same value, of a struct and of a plain mapping."""
    memory = Memory({JobId("j"): 3})
    assert recalled(msgspec.msgpack.encode(memory), Memory) == memory
    assert recalled(msgspec.msgpack.encode({"j": 3}), dict[JobId, int]) == {"j": 3}


@each_row(
    "memory",
    [b"", b"\xc1", msgspec.msgpack.encode({"turns": "three"}), msgspec.msgpack.encode([1])],
)
def test_nothing_and_what_another_release_wrote_are_nothing(memory: bytes) -> None:
    """A pass begins afresh rather than fail."""
    assert recalled(memory, Memory) == Memory()
