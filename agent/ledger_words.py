"""How a ledger says whose fault an end is, for agents of older versions as well. Must not know
files, nor what is done about a fault.

Such an agent knows no field of its own for it, only words in front of the error. It would charge
the job of a worker for what its node did, and no newer agent has a chance to say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from agent.state import Held, Memory
from common.oldfaults import NODE_WORDS

_FIRST = f"{NODE_WORDS}: "


def written(memory: Memory) -> Memory:
    """As it goes to disk: the errors that are the node's begin with the words. `read` undoes it."""
    return _with_errors(memory, lambda held: _FIRST + held.error)


def read(memory: Memory) -> Memory:
    """As `written` was given it; what has words alone, and no field, is left as it is."""
    return _with_errors(memory, lambda held: held.error.removeprefix(_FIRST))


def _with_errors(memory: Memory, changed: Callable[[Held], str]) -> Memory:
    """The memory with other errors of those workers whose node is to blame."""
    workers = {
        name: structs.replace(held, error=changed(held)) if held.fault.is_nodes else held
        for name, held in memory.workers.items()
    }
    return structs.replace(memory, workers=workers)
