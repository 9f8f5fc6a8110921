"""Whose fault it is that a worker ended or could not start.

The fault is a field of its own in a report (`WorkerReport.fault`); the text beside it is for
people.
"""

from __future__ import annotations

from enum import StrEnum

NODE_FAULT = "node fault"
"""The start of the text for people about an end that the node, not its job, is at fault for."""
STORAGE_SILENT = "the storage did not answer"
"""The text for people about a start, or a check before it, that failed by `STORAGE`."""


class Fault(StrEnum):
    """Whose fault it is, as far as its node can know.

    `Fault.is_nodes` decides which budget pays.
    """

    NONE = "none"  # unknown to the node: its exit code and its log show more
    JOB = "job"  # the job names a missing path or command; `refused_for` names it
    NODE = "node"  # the node could not run it, or lost it
    STORAGE = "storage"  # storage did not answer: the node's, though it may be the job's own
    SHIM_LOST = "shim_lost"  # the worker's supervisor died, and it with it

    @property
    def is_nodes(self) -> bool:
        """True if its node is at fault, which costs the job nothing."""
        return self in _NODES


_NODES = frozenset({Fault.NODE, Fault.STORAGE, Fault.SHIM_LOST})
