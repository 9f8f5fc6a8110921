"""What agents say, checked as far as types cannot: a report that is taken can be lived with. Pure.

Must not know the engine; what is refused here is counted and dropped by whoever asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from common import oldfaults, subjects
from common.errors import ProtocolError
from common.faults import Fault
from common.messages import (
    InferenceReport,
    NodeReport,
    WorkerPhase,
    WorkerReport,
    decode,
)
from common.model import MAX_INT, STORE_INDEX, NodeRole

MAX_COUNT = float(MAX_INT)
"""Above it a counter kept as a float cannot count; a rate made of infinities is no rate."""

MAX_TRUSTED_EPOCH = MAX_INT // 2
"""No cell has had so many leaders, and above it are as many again: a wrong word uses up none."""


def node_report(data: bytes, subject: str) -> NodeReport:
    """A report from its bytes and the subject that it came on; whatever the version of its agent,
    whose fault an end is stands in `fault`.

    NATS permissions fix the subject; what a payload calls itself must be the same.

    Raises:
        ProtocolError: it does not fit; names the field.
    """
    report = decode(data, NodeReport)
    if report.node != subjects.node_of(subject):
        raise ProtocolError(f"NodeReport: field node: it is signed {report.node}")
    if report.role == NodeRole.LOST:
        raise ProtocolError("NodeReport: field role: a node cannot report itself as lost")
    _check_unique("gpus", (gpu.uuid for gpu in report.gpus))
    _check_unique("workers", (str(worker.key) for worker in report.workers))
    for worker in report.workers:
        if worker.key.attempt < 1 or worker.key.worker_index < STORE_INDEX:
            raise ProtocolError(f"NodeReport: field workers: there is no worker {worker.key}")
    if report.inference is not None:
        _check_counts(report.inference)
    if any(map(_is_in_words, report.workers)):
        workers = (_with_fault(one) if _is_in_words(one) else one for one in report.workers)
        return replace(report, workers=tuple(workers))
    return report


def _is_in_words(worker: WorkerReport) -> bool:
    """Whether the fault of an end is nowhere but in its words, if there is one: agents of an older
    version tell it so."""
    is_told = bool(worker.error) and worker.fault is _NONE
    return is_told and worker.phase in _OVER


def _with_fault(worker: WorkerReport) -> WorkerReport:
    said = oldfaults.said(worker.error, is_refused=worker.phase == WorkerPhase.REFUSED)
    return replace(worker, error=said.error, fault=said.fault, refused_for=said.refused_for)


_NONE = Fault.NONE
_OVER = frozenset({WorkerPhase.EXITED, WorkerPhase.REFUSED})
"""Members of an enum are slow to look up, and every report asks for these."""


def trusted_epoch(said: int) -> int:
    """The epoch that an agent obeys, by what it says; 0 of one that nobody can have given."""
    return said if said <= MAX_TRUSTED_EPOCH else 0


def _check_unique(field: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ProtocolError(f"NodeReport: field {field}: {name} is listed twice")
        seen.add(name)


def _check_counts(inference: InferenceReport) -> None:
    counts = {
        "running_count": inference.running_count,
        "waiting_count": inference.waiting_count,
        "success_total": inference.success_total,
    }
    for field, count in counts.items():
        if count > MAX_COUNT:
            raise ProtocolError(
                f"NodeReport: field inference.{field}: {count:g}, expected at most {MAX_COUNT:g}"
            )
