"""Validation of node reports beyond their types. Pure.

The caller counts and drops the reports that are refused here.
"""

from __future__ import annotations

from collections.abc import Iterable

from common import subjects
from common.errors import ProtocolError
from common.messages import (
    InferenceReport,
    NodeReport,
    decode,
)
from common.model import MAX_INT, STORE_INDEX, NodeRole

MAX_COUNT = float(MAX_INT)
"""Above it a counter kept as a float cannot count; a rate made of infinities is no rate."""

MAX_TRUSTED_EPOCH = MAX_INT // 2
"""Far above any real epoch; higher values are ignored, so that one corrupt report cannot exhaust
the counter."""


def node_report(data: bytes, subject: str) -> NodeReport:
    """A report from its bytes and the subject that it came on.

    The fault of an end is in `fault`, whatever the version of its agent. NATS permissions fix the
    subject; the payload must name the same node.

    Raises:
        ProtocolError: it is invalid; names the field.
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
    return report


def trusted_epoch(said: int) -> int:
    """The epoch that an agent reports it obeys; 0 for one that no coordinator can have given."""
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
