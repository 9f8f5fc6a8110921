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
    """What a worker told last, in which phase, and when that was first reported."""

    progress: Progress | None
    checkpoint: Checkpoint | None
    phase: WorkerPhase
    since_s: float


class Words:
    """The last word of every worker that is reported.

    Args:
        lost_after_s: a node that is not heard for longer says nothing of its workers.
    """

    def __init__(self, *, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._of: dict[NodeName, dict[WorkerKey, _Word]] = {}
        self._said: dict[JobId, tuple[int, float]] = {}

    def note(self, report: NodeReport, *, now_s: float) -> None:
        """A node reported at an instant: which of its workers told something new."""
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
        """This coordinator did not listen for a while, maybe as the machine slept: no silence."""
        for words in self._of.values():
            for key, word in words.items():
                words[key] = word._replace(since_s=word.since_s + missed_s)

    def remove(self, node: NodeName) -> None:
        """It is no node of the cell any more."""
        self._of.pop(node, None)

    def forget_stop(self, job_id: JobId) -> None:
        """Say again that a job tells no progress, if that lasts."""
        self._said.pop(job_id, None)

    def since_s(self, node: NodeName, key: WorkerKey, default_s: float) -> float:
        """When what a worker told last was first reported."""
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
        """Watched jobs whose workers told nothing for as long as is watched for; each once.

        unread: nodes of which a report has arrived and is not folded yet.
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
        """How long none of the workers told anything; 0 where that is not known of one of them."""
        quiet_s: list[float] = []
        tellers_s: list[float] = []
        for key, node in watch.workers:
            report, word = reports.get(node), self._of.get(node, {}).get(key)
            heard_s = heard_at_s.get(node, float("-inf"))
            if report is None or word is None or word.phase != WorkerPhase.RUNNING:
                return 0.0
            if node in unread or now_s - heard_s > self._lost_after_s or report.ledger_error:
                return 0.0  # a full disk keeps the words of shims as well
            quiet_s.append(heard_s - word.since_s)
            if word.progress is not None:
                tellers_s.append(quiet_s[-1])
        return min(tellers_s or quiet_s, default=0.0)
