"""Whose fault it is that a worker ended or could not start.

The fault is a field of its own in a report (`WorkerReport.fault`); the text beside it is for
people.
"""

from __future__ import annotations

from enum import StrEnum

NODE_FAULT = "node fault"
"""What people are told first of the end of a worker that its node, not its job, is to blame for."""
STORAGE_SILENT = "the storage did not answer"
"""What people are told of a start, or of a look before it, that `STORAGE` is the fault of."""


class Fault(StrEnum):
    """Whose fault it is, as far as its node can know.

    `Fault.is_nodes` decides which budget pays.
    """

    NONE = "none"  # nobody's that the node knows: its exit code and its log say more
    JOB = "job"  # the job names what is not there; `refused_for` says what
    NODE = "node"  # the node could not run it, or lost it
    STORAGE = "storage"  # storage did not answer: the node's, though it may be the job's own
    SHIM_LOST = "shim_lost"  # the worker's supervisor died, and it with it

    @property
    def is_nodes(self) -> bool:
        """True if its node is at fault, which costs the job nothing."""
        return self in _NODES


_NODES = frozenset({Fault.NODE, Fault.STORAGE, Fault.SHIM_LOST})
