"""Translates the error texts of agents from before `WorkerReport.fault`, once, when they are read.

Reports of older agents, and every journal from that time, carry the fault in the error's text. A
replay must decide each record as it was decided first, however old the record is.
"""

from __future__ import annotations

from msgspec import Struct

from common.faults import Fault

NODE_WORDS = "node fault"
SHIM_WORDS = "shim lost"
STORAGE_WORDS = "the storage did not answer"
"""The texts of those versions, letter by letter: not the texts that people see today."""


class Said(Struct, frozen=True):
    """A worker's end: whose fault it is, the refused part of its job, and the rest of the text."""

    fault: Fault
    refused_for: str
    error: str


def said(error: str, *, is_refused: bool) -> Said:
    """The meaning of an old `error` of a worker that ended, or was refused.

    A refusal that is not the node's fault begins with the part of the job that it is about.
    """
    if error.startswith(NODE_WORDS):
        rest = error.removeprefix(NODE_WORDS).removeprefix(":").lstrip()
        if rest.startswith(SHIM_WORDS):
            return Said(Fault.SHIM_LOST, "", rest)
        return Said(Fault.STORAGE if STORAGE_WORDS in rest else Fault.NODE, "", rest)
    words = error.split(maxsplit=1)
    if is_refused and words:
        return Said(Fault.JOB, words[0], error)
    return Said(Fault.NONE, "", error)
