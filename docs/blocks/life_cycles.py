"""Life cycles as diagrams, drawn from their tables. Must not know a transition itself."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from blocks.source import enum_table
from common.job_state_table import JOB_TRANSITIONS, JobEvent
from common.model import FINAL_JOB_STATES, JobState
from common.node_role_table import NODE_TRANSITIONS, NodeEvent

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT", bound=StrEnum)


def state_diagram(
    table: Mapping[StateT, Mapping[EventT, StateT]],
    *,
    first: StateT | None = None,
    last: frozenset[StateT] = frozenset(),
) -> str:
    """A life-cycle table as a Mermaid state diagram.

    An event that leads from every state but the last ones to the same state is drawn once, from
    "any", so that the arrows that matter stay visible.
    """
    live = [state for state in table if state not in last]
    common_moves = {
        event: target
        for event, target in table[live[0]].items()
        if all(table[state].get(event) == target for state in live)
    }
    arrows: dict[tuple[str, str], list[str]] = {}
    if first is not None:
        arrows["[*]", first] = []
    for state in live:
        for event, target in table[state].items():
            if event not in common_moves:
                arrows.setdefault((state, target), []).append(event)
    for event, target in common_moves.items():
        arrows.setdefault(("any", target), []).append(event)
    for state in sorted(last):
        arrows[state, "[*]"] = []
    lines = ["stateDiagram-v2"]
    if common_moves:
        lines.append('    state "any of them" as any')
    for (origin, goal), events in arrows.items():
        label = f": {', '.join(events)}" if events else ""
        lines.append(f"    {origin} --> {goal}{label}")
    return "\n".join(["```mermaid", *lines, "```"])


def node_life_cycle() -> str:
    """The roles of a node."""
    diagram = state_diagram(NODE_TRANSITIONS)
    return f"{diagram}\n\n{enum_table(NodeEvent, is_noted_only=True)}"


def job_life_cycle() -> str:
    """The states of a job."""
    diagram = state_diagram(
        JOB_TRANSITIONS,
        first=JobState.PENDING,
        last=FINAL_JOB_STATES,
    )
    return f"{diagram}\n\n{enum_table(JobEvent, is_noted_only=True)}"
