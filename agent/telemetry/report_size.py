"""Cuts a report that is too long for the coordinator, and marks it as cut. Pure.

A message has at most `MAX_MESSAGE_BYTES`; a longer one is dropped whole. Without the cut, one long
text would silence its node, and every job on the node would be lost.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import structs

from common.messages import MAX_MESSAGE_BYTES, NodeReport, WorkerReport, encode

SHORT_CHARS = 100
"""Length of a text, where all texts are too long; enough for its beginning."""


def encoded(report: NodeReport, *, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """The encoded report: whole wherever it fits, else without its least important parts.

    A worker, its phase and a GPU always stay, because a missing one counts as gone.
    """
    data = encode(report)
    size_bytes, cuts = len(data), list(_CUTS)
    while len(data) > max_bytes and cuts:
        what, cut = cuts.pop(0)
        report = cut(report)
        note = f"report of {size_bytes} bytes cut to {max_bytes} and less: without {what}"
        data = encode(structs.replace(report, detail=f"{note}; {report.detail}"))
    return data


def _short(text: str) -> str:
    return text if len(text) <= SHORT_CHARS else f"{text[:SHORT_CHARS]}..."


def _without_long_words(report: NodeReport) -> NodeReport:
    def cut(worker: WorkerReport) -> WorkerReport:
        return structs.replace(worker, error=_short(worker.error), failure=None)

    workers = tuple(cut(worker) for worker in report.workers)
    return structs.replace(report, workers=workers, detail=_short(report.detail))


def _without_processes(report: NodeReport) -> NodeReport:
    gpus = tuple(structs.replace(gpu, processes=None) for gpu in report.gpus)
    return structs.replace(report, gpus=gpus)


def _without_saves(report: NodeReport) -> NodeReport:
    workers = tuple(structs.replace(worker, checkpoint=None) for worker in report.workers)
    return structs.replace(report, workers=workers)


_CUTS: tuple[tuple[str, Callable[[NodeReport], NodeReport]], ...] = (
    ("the ends of long texts", _without_long_words),
    ("processes on GPUs", _without_processes),
    ("where workers saved", _without_saves),
)
"""The cuts in order; each adds to those before it."""
