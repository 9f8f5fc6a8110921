"""Folds node reports into a few facts per pass, never raw telemetry. Pure; `now_s` is an argument.

The program that saw an event measures its age, on one clock: an agent up to its report, the folder
from there on. Clocks of two machines are never compared, and a growing age is no new fact.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from msgspec import UNSET, UnsetType, structs

from common.faults import Fault
from common.messages import NodeReport, WorkerPhase, WorkerReport
from common.model import MAX_JOB_S, JobId, LeaseId, NodeName, Progress, ServiceName
from common.node_labels import with_rack
from common.telemetry import units
from coordinator.engine.jobs.stalls import Watch
from coordinator.engine.state.events import (
    Event,
    NodeReported,
    NodeSilent,
    ProgressReported,
    ProgressStopped,
    TrespassFact,
    WorkerFact,
)
from coordinator.service.nodes.duplicate_agents import Rivals
from coordinator.service.nodes.gpu_facts import NO_CATALOGUE, Catalogue
from coordinator.service.nodes.repeated_progress import Words
from coordinator.service.nodes.service_load import Loads


class Folder:
    """Remembers the last facts of each node and emits only new ones.

    Args:
        lost_after_s: a node silent this long is reported as silent, once.
        load_period_s: one load sample per service in this many seconds.
        progress_period_s: a job's progress is emitted at most this often.
        catalogue: the meaning of GPU faults.
    """

    def __init__(
        self,
        *,
        lost_after_s: float,
        load_period_s: float,
        progress_period_s: float,
        catalogue: Catalogue = NO_CATALOGUE,
    ) -> None:
        self._catalogue = catalogue
        self.lost_after_s = lost_after_s
        self.progress_period_s = progress_period_s
        self._progress_at_s = 0.0
        self.reports: dict[NodeName, NodeReport] = {}
        self.heard_at_s: dict[NodeName, float] = {}
        self._silent_since_s: dict[NodeName, float] = {}
        """When a node reported last, later by the pauses since then."""
        self._listened_at_s: float | None = None
        self._missed = (float("-inf"), 0.0)
        """The last pause: when it ended, and how long it was."""
        self.stale_count = 0
        self.rivals = Rivals(patience_s=lost_after_s)
        self._facts: dict[NodeName, NodeReported] = {}
        self._silent: set[NodeName] = set()
        self._progress: dict[JobId, ProgressReported] = {}
        self._words = Words(lost_after_s=lost_after_s)
        self.loads = Loads(load_period_s)

    def forget_facts(self) -> None:
        """Emit everything again: a new leader must hear each node once."""
        self._facts.clear()
        self._progress.clear()

    def forget_node(self, node: NodeName) -> None:
        """Emit this node's facts again with its next report."""
        self._facts.pop(node, None)

    def forget_silence(self, node: NodeName) -> None:
        """Emit this node's silence again if it lasts, else its facts with its next report."""
        self._silent.discard(node)
        self._facts.pop(node, None)

    def forget_progress(self, job_id: JobId) -> None:
        """Emit this job's progress again."""
        self._progress.pop(job_id, None)
        self._words.forget_stop(job_id)

    def remove_node(self, node: NodeName) -> None:
        """Remove a node that has left the cell; with its next report it is a new one."""
        self._facts.pop(node, None)
        self.reports.pop(node, None)
        self.heard_at_s.pop(node, None)
        self._silent_since_s.pop(node, None)
        self.loads.remove(node)
        self._words.remove(node)
        self._silent.discard(node)

    def say_again(self, report: NodeReport, *, now_s: float) -> NodeReported:
        """The facts of a report that was folded before."""
        rival = self.rivals.told(NodeName(report.node), now_s=now_s)
        facts = facts_of(report, rival=rival, catalogue=self._catalogue)
        self._facts[facts.node] = facts
        return _dated(facts, report, late_s=now_s - self.heard_at_s[facts.node])

    def began_ago_s(self, node: NodeName, *, now_s: float) -> dict[str, float]:
        """How long ago each worker of a node began to run, by key, as its last report shows.

        A worker is left out where that is not known.
        """
        report = self.reports.get(node)
        if report is None:
            return {}
        late_s = max(0.0, now_s - self.heard_at_s[node])
        ago_s = {
            str(worker.key): worker.running_s + worker.ended_ago_s + late_s
            for worker in report.workers
            if worker.running_s > 0.0
        }
        return {key: began_s for key, began_s in ago_s.items() if began_s <= MAX_JOB_S}

    def prefer(self, node: NodeName, boot_id: str) -> None:
        """Prefer the boot that the journal names for a node; among rivals that agent speaks."""
        if self.rivals.prefer(node, boot_id):
            self.reports.pop(node, None)

    def instance(self, node: NodeName) -> str | UnsetType:
        """Which start of its agent reported last; unset where none did."""
        report = self.reports.get(node)
        return UNSET if report is None else report.instance

    def expect(self, node: NodeName, *, now_s: float) -> None:
        """Expect reports of a node from now on; silence counts from here if it never reported."""
        self.heard_at_s.setdefault(node, now_s)
        self._silent_since_s.setdefault(node, now_s)

    def silent_s(self, node: NodeName, *, now_s: float) -> float:
        """Time since a node's last report without pauses; infinite if it never reported."""
        return now_s - self._silent_since_s.get(node, float("-inf"))

    def listened(self, *, now_s: float, period_s: float) -> float:
        """Record that reports could arrive, as each `period_s`.

        Returns the seconds of a pause, usually 0. A process that was stopped, or busy, or on a
        machine that slept, has received no reports and knows nothing of that time: the pause is no
        silence of the nodes. A look that comes within twice its period is in time.
        """
        since_s, self._listened_at_s = self._listened_at_s, now_s
        missed_s = 0.0 if since_s is None else now_s - since_s - period_s
        if missed_s <= period_s:
            return 0.0
        self._missed = (now_s, missed_s)
        for node, silent_since_s in self._silent_since_s.items():
            self._silent_since_s[node] = self._later(silent_since_s)
        self.loads.missed(missed_s, now_s=now_s)
        self._words.missed(missed_s)
        return missed_s

    def _later(self, at_s: float) -> float:
        """An instant, later by the pauses since then."""
        ended_s, missed_s = self._missed
        return max(at_s, min(ended_s, at_s + missed_s))

    def fold(self, report: NodeReport, *, now_s: float) -> NodeReported | None:
        """The node's facts, if they differ from the last ones emitted.

        now_s: when the report arrived. It may have waited since then, longer than a pause of this
        coordinator: a pause is no silence of its node either.

        A report that was overtaken by a later one of the same boot is counted and dropped; an agent
        numbers its reports by its boot clock, so a restart never goes backwards. A report of a
        rival is dropped too. It proves nothing of the node: neither that it lives nor what it
        holds.
        """
        node = NodeName(report.node)
        silent_s = self.silent_s(node, now_s=now_s)
        if not self.rivals.admit(report, now_s=now_s, silent_s=silent_s):
            return None
        last = self.reports.get(node)
        if last is not None and last.boot_id == report.boot_id and report.sequence <= last.sequence:
            self.stale_count += 1
            return None
        is_move_heard = self._is_move_heard(last, report, now_s)
        self.reports[node] = report
        self.heard_at_s[node] = now_s
        since_s = self._later(now_s)
        self._silent_since_s[node] = max(since_s, self._silent_since_s.get(node, since_s))
        was_silent = node in self._silent
        self._silent.discard(node)
        self.loads.note(report, now_s=since_s)
        self._words.note(report, now_s=now_s)
        rival = self.rivals.told(node, now_s=now_s)
        facts = facts_of(report, rival=rival, catalogue=self._catalogue)
        if not was_silent and not _is_news(facts, self._facts.get(node)):
            return None
        self._facts[node] = facts
        told = _dated(facts, report, late_s=0.0)
        return structs.replace(told, is_move_heard=True) if is_move_heard else told

    def _is_move_heard(self, last: NodeReport | None, report: NodeReport, now_s: float) -> bool:
        """True if a node has just left a role.

        It goes by the clock, not by `silent_s`: during a pause this coordinator may have missed the
        change, though the node was not silent.
        """
        if last is None or last.role == report.role or last.boot_id != report.boot_id:
            return False
        return now_s - self.heard_at_s[NodeName(report.node)] <= self.lost_after_s

    def due(self, *, now_s: float, unread: Container[str] = ()) -> list[Event]:
        """Facts that come with time: loads, progress, nodes that fell silent.

        unread: nodes with a report that has arrived and is not folded yet; they are not silent.
        """
        loads = self.loads.due(
            now_s=now_s,
            is_silent=lambda node: (
                node not in unread and self.silent_s(node, now_s=now_s) > self.lost_after_s
            ),
        )
        events = [*loads, *self._silences(now_s, unread)]
        if now_s - self._progress_at_s >= self.progress_period_s:
            self._progress_at_s = now_s
            events += self._new_progress(now_s)
        return events

    def _new_progress(self, now_s: float) -> list[Event]:
        best: dict[JobId, ProgressReported] = {}
        saved_at_s: dict[JobId, float] = {}
        told_at_s: dict[JobId, float] = {}
        for node, report in self.reports.items():
            for worker in report.workers:
                if worker.progress is None and worker.checkpoint is None:
                    continue
                key = worker.key
                fact = best.get(key.job_id)
                if fact is None or _is_further(worker.progress, fact, key.attempt):
                    checkpoint = worker.checkpoint or (fact.checkpoint if fact else None)
                    best[key.job_id] = ProgressReported(
                        job_id=key.job_id,
                        attempt=key.attempt,
                        progress=worker.progress,
                        checkpoint=checkpoint,
                    )
                    told_at_s[key.job_id] = self._words.since_s(node, key, now_s)
                    if worker.checkpoint is not None:
                        saved_at_s[key.job_id] = self.heard_at_s[node] - worker.saved_ago_s
        events: list[Event] = []
        for job_id in sorted(best):
            if self._progress.get(job_id) != best[job_id]:
                self._progress[job_id] = best[job_id]
                ago_s = max(0.0, now_s - saved_at_s.get(job_id, now_s))
                told_s = max(0.0, now_s - told_at_s[job_id])
                events.append(structs.replace(best[job_id], saved_ago_s=ago_s, told_ago_s=told_s))
        for job_id in [job_id for job_id in self._progress if job_id not in best]:
            del self._progress[job_id]
        return events

    def _silences(self, now_s: float, unread: Container[str]) -> list[Event]:
        events: list[Event] = []
        for node in sorted(self._silent_since_s):
            silent_s = now_s - self._silent_since_s[node]
            if silent_s <= self.lost_after_s or node in unread:
                continue
            if node not in self._silent:
                self._silent.add(node)
                events.append(NodeSilent(node=node, silent_s=silent_s))
        return events

    def proving(
        self, awaited_s: Mapping[NodeName, float], *, since_s: float, now_s: float
    ) -> list[NodeSilent]:
        """LOST nodes whose silence is now long enough to prove something about their workers.

        awaited_s: how long, by node.
        since_s: since when reports are answered.
        """
        found: list[NodeSilent] = []
        for node, enough_s in sorted(awaited_s.items()):
            silent_s = self.silent_s(node, now_s=now_s)
            unanswered_s = min(silent_s, now_s - since_s)
            if unanswered_s >= enough_s:
                found.append(NodeSilent(node=node, silent_s=silent_s, unanswered_s=unanswered_s))
        return found

    def stopped(
        self, watched: Mapping[JobId, Watch], *, now_s: float, unread: Container[str] = ()
    ) -> list[ProgressStopped]:
        """Watched jobs that make no progress, by the reports of all nodes that they run on."""
        return self._words.stopped(watched, self.reports, self.heard_at_s, now_s, unread)


def _is_further(progress: Progress | None, fact: ProgressReported, attempt: int) -> bool:
    if attempt != fact.attempt:
        return attempt > fact.attempt
    step = progress.step if progress else -1
    return step > (fact.progress.step if fact.progress else -1)


def facts_of(
    report: NodeReport, *, rival: str = "", catalogue: Catalogue = NO_CATALOGUE
) -> NodeReported:
    """A scheduler's facts in a report, without ages; see `_dated`.

    rival: text that another agent reports as this node.
    """
    return NodeReported(
        node=NodeName(report.node),
        boot_id=report.boot_id,
        home_pool=report.home_pool,
        role=report.role,
        epoch=report.epoch,
        generation=report.generation,
        gpus=tuple(map(catalogue.fact, units(report.gpus))),
        service=ServiceName(report.service) if report.service else None,
        rack=report.rack,
        labels=with_rack(report.labels or {}, report.rack),
        cpus=report.host.cpu_count if report.host else 0,
        memory_bytes=report.host.memory_total_bytes if report.host else 0,
        lease_id=LeaseId(report.lease.lease_id) if report.lease else None,
        workers=tuple(
            WorkerFact(
                key=worker.key,
                phase=worker.phase,
                endpoint=worker.endpoint,
                exit_code=worker.exit_code,
                stop_reason=worker.stop_reason,
                error=worker.error if worker.phase in _TELLING else "",
                progress=worker.progress if worker.phase in _ENDED else None,
                checkpoint=worker.checkpoint if worker.phase in _ENDED else None,
                failure=worker.failure if worker.phase in _ENDED else None,
                fault=worker.fault if worker.phase in _ENDED else _NO_FAULT,
                refused_for=worker.refused_for,
            )
            for worker in report.workers
        ),
        trespasses=tuple(
            sorted(
                TrespassFact(found.pid, found.gpu_uuid, found.owner) for found in report.trespasses
            )
        ),
        detail="; ".join(said for said in (rival, report.detail) if said),
        rival=rival,
        is_server_down=report.is_server_down,
        ledger_error=report.ledger_error,
        stage_durations_s=report.stage_durations_s,
        turned_back=report.turned_back,
    )


_NO_FAULT = Fault.NONE
_ENDED = frozenset({WorkerPhase.EXITED, WorkerPhase.REFUSED})
_TELLING = _ENDED | {WorkerPhase.RESERVING}
"""Phases whose error gives the reason of a worker's end, or of its node's wait."""


def _is_news(facts: NodeReported, last: NodeReported | None) -> bool:
    """True if facts differ from the last ones emitted.

    The used memory of a GPU that is awaited, and its process, change with each report and decide
    nothing.
    """
    if last is None:
        return True
    if facts == last:
        return False
    if all(worker.phase != WorkerPhase.RESERVING for worker in facts.workers):
        return True
    return _gist(facts) != _gist(last)


def _gist(facts: NodeReported) -> NodeReported:
    return structs.replace(facts, workers=tuple(map(_gist_of, facts.workers)))


def _gist_of(fact: WorkerFact) -> WorkerFact:
    if fact.phase != WorkerPhase.RESERVING:
        return fact
    return structs.replace(fact, error=_NUMBER.sub("0", fact.error))


_NUMBER = re.compile(r"\b\d+\b")


def _dated(facts: NodeReported, report: NodeReport, *, late_s: float) -> NodeReported:
    """The facts of a report with its ages, which grew by `late_s` since it arrived."""
    if report.home_ago_s is not None:
        facts = structs.replace(facts, home_ago_s=max(0.0, report.home_ago_s) + late_s)
    if all(worker.phase not in _ENDED for worker in report.workers):
        return facts
    pairs = zip(facts.workers, report.workers, strict=True)
    return structs.replace(
        facts, workers=tuple(_dated_worker(fact, worker, late_s) for fact, worker in pairs)
    )


def _dated_worker(fact: WorkerFact, worker: WorkerReport, late_s: float) -> WorkerFact:
    if worker.phase not in _ENDED:
        return fact
    return structs.replace(
        fact, ended_ago_s=worker.ended_ago_s + late_s, saved_ago_s=worker.saved_ago_s + late_s
    )
