"""Whether a desired state is for a node to take. Pure; must not know what follows from it."""

from __future__ import annotations

from agent.state import Memory
from common.messages import DesiredState


def refusal(desired: DesiredState, memory: Memory) -> str:
    """Why a node does not take it, naming the field; empty when it does."""
    if desired.node != memory.node:
        return f"node: this is {memory.node}, not {desired.node}"
    if desired.epoch < memory.epoch:
        return f"epoch: {desired.epoch} is over, epoch {memory.epoch} leads"
    if desired.epoch == memory.epoch and desired.generation < memory.generation:
        return f"generation: {desired.generation} is older than {memory.generation}"
    return ""
