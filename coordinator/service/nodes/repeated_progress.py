"""Tracks since when a worker's reports show the same progress. Pure; `now_s` is an argument.

Only reports count. A silent node reports nothing of its workers, so neither its silence nor a pause
of this coordinator makes a job look stuck. A report that shows the same step as one of ten minutes
before proves ten minutes without a step, even if reports in between were lost.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from common.messages import NodeReport, WorkerPhase
from common.model import Checkpoint, JobId, NodeName, Progress, WorkerKey
from coordinator.engine.jobs.stalls import Watch
from coordinator.engine.state.events import ProgressStopped


class _Word(NamedTuple):
    """A worker's last progress and phase, and when that was first reported."""

    progress: Progress | None
    checkpoint: Checkpoint | None
    phase: WorkerPhase
    since_s: float


class Words:
    """The last progress of every worker in the reports.

    Args:
        lost_after_s: a node that is silent for longer reports nothing of its workers.
    """

    def __init__(self, *, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._of: dict[NodeName, dict[WorkerKey, _Word]] = {}
        self._said: dict[JobId, tuple[int, float]] = {}

    def note(self, report: NodeReport, *, now_s: float) -> None:
        """Take a node's report at an instant: which of its workers showed new progress."""
        name = NodeName(report.node)
        before = self._of.pop(name, None)
        if not report.workers:
            return
        found: dict[WorkerKey, _Word] = {}
        for worker in report.workers:
            known = None if before is None else before.get(worker.key)
            if (
                known is None
                or known.progress != worker.progress
                or known.checkpoint != worker.checkpoint
                or known.phase is not worker.phase
            ):
                known = _Word(worker.progress, worker.checkpoint, worker.phase, now_s)
            found[worker.key] = known
        self._of[name] = found

    def missed(self, missed_s: float) -> None:
        """Record a pause of this coordinator, maybe as the machine slept: that is no silence."""
        for words in self._of.values():
            for key, word in words.items():
                words[key] = word._replace(since_s=word.since_s + missed_s)

    def remove(self, node: NodeName) -> None:
        """Remove a node that has left the cell."""
        self._of.pop(node, None)

    def forget_stop(self, job_id: JobId) -> None:
        """Report again that a job makes no progress, if that lasts."""
        self._said.pop(job_id, None)

    def since_s(self, node: NodeName, key: WorkerKey, default_s: float) -> float:
        """When a worker's last progress was first reported."""
        word = self._of.get(node, {}).get(key)
        return default_s if word is None else word.since_s

    def stopped(
        self,
        watched: Mapping[JobId, Watch],
        reports: Mapping[NodeName, NodeReport],
        heard_at_s: Mapping[NodeName, float],
        now_s: float,
        unread: Container[str],
    ) -> list[ProgressStopped]:
        """Watched jobs without progress for as long as their watch; each once.

        unread: nodes with a report that has arrived and is not folded yet.
        """
        for job_id in [job_id for job_id in self._said if job_id not in watched]:
            del self._said[job_id]
        found: list[ProgressStopped] = []
        for job_id, watch in sorted(watched.items()):
            said = (watch.attempt, watch.after_s)
            if self._said.get(job_id) == said:
                continue
            quiet_s = self._quiet_s(watch, reports, heard_at_s, now_s, unread)
            if quiet_s >= watch.after_s:
                self._said[job_id] = said
                event = ProgressStopped(job_id=job_id, attempt=watch.attempt, quiet_s=quiet_s)
                found.append(event)
        return found

    def _quiet_s(
        self,
        watch: Watch,
        reports: Mapping[NodeName, NodeReport],
        heard_at_s: Mapping[NodeName, float],
        now_s: float,
        unread: Container[str],
    ) -> float:
        """How long none of the workers made progress; 0 if that is unknown for one of them."""
        quiet_s: list[float] = []
        tellers_s: list[float] = []
        for key, node in watch.workers:
            report, word = reports.get(node), self._of.get(node, {}).get(key)
            heard_s = heard_at_s.get(node, float("-inf"))
            if report is None or word is None or word.phase != WorkerPhase.RUNNING:
                return 0.0
            if node in unread or now_s - heard_s > self._lost_after_s or report.ledger_error:
                return 0.0  # a full disk also keeps the shims' progress from it
            quiet_s.append(heard_s - word.since_s)
            if word.progress is not None:
                tellers_s.append(quiet_s[-1])
        return min(tellers_s or quiet_s, default=0.0)
