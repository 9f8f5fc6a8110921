"""What a table of states can lead to."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


def reachable(table: Mapping[State, Mapping[Event, State]], start: State) -> set[State]:
    """Every state that some sequence of events leads to."""
    found = {start}
    edge = [start]
    while edge:
        for state in table[edge.pop()].values():
            if state not in found:
                found.add(state)
                edge.append(state)
    return found
