"""Turns a report's GPUs into facts for the engine: their faults by a catalogue. Pure."""

from __future__ import annotations

from msgspec import Struct

from common.messages import GpuReport
from coordinator.engine.state.events import FaultClass, GpuFact, GpuFaultFact

ECC = "uncorrected ECC errors"


class Entry(Struct, frozen=True, kw_only=True):
    """One fault: its effect, its meaning and who acts next; as in `GpuFaultFact`."""

    kind: FaultClass = FaultClass.INFO
    meaning: str = ""
    owner: str = "operator"
    next_step: str = ""
    needs_repair: bool = False


class Catalogue(Struct, frozen=True, kw_only=True):
    """Entries by XID, and that of uncorrected ECC errors.

    An XID without an entry changes nothing, because its meaning is unknown.
    """

    by_xid: dict[int, Entry]
    ecc: Entry

    def fact(self, gpu: GpuReport) -> GpuFact:
        """What matters of a GPU to a scheduler, its faults by this catalogue."""
        faults = [
            _fault(self.by_xid.get(one.code, UNKNOWN), f"XID {one.code}", one.count)
            for one in gpu.xid_counts
        ]
        if gpu.ecc_uncorrected_count:
            faults.append(_fault(self.ecc, ECC, gpu.ecc_uncorrected_count))
        return GpuFact(
            gpu.uuid,
            gpu.gpu_type,
            gpu.health,
            gpu.memory_total_bytes,
            tuple(faults),
            gpu.recovery_action,
        )


UNKNOWN = Entry(meaning="in no catalogue of this cell")


def _fault(entry: Entry, what: str, count: int) -> GpuFaultFact:
    return GpuFaultFact(
        what=what,
        count=count,
        kind=entry.kind,
        meaning=entry.meaning,
        owner=entry.owner,
        next_step=entry.next_step,
        needs_repair=entry.needs_repair,
    )


NO_CATALOGUE = Catalogue(by_xid={}, ecc=UNKNOWN)
"""A catalogue by which every fault is reported and none has a consequence."""
