"""Stall detection: whether a run reaches the end of its last job, and if not, why.

A run with a job that never ends has no figures: a mean without that job would be a lie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from common.errors import ConfigError
from common.model import JobId, JobState
from coordinator.engine.state.tables import Counters, JobEntry
from coordinator.policies.contract.text import counted
from coordinator.sim.run.attempts import Saves
from coordinator.sim.run.build import RunOptions, Stage

ID = re.compile(r"\b\d{7}\b")
"""What a job is called in the engine (`sim.run.build`), wherever it stands in a text."""

IDLE_EVENTS_PER_JOB = 100
"""Facts for each job, beyond `idle_events`, in which nothing grows: then there is no headway."""
LEAST_GAIN_RATIO = 1e-6
"""As a fraction of all work of a run: a smaller gain counts as none, be it rounding, or the luck of
sampling slices that are thrown away later. It is so small that a run which gains less in all of
its patience would not end in 10^10 facts, and so large that few gains by luck come before there
is none.
"""


class UnfinishedError(ConfigError):
    """A run that does not come to its last job; another policy may."""


class Headway:
    """Ends a run in which jobs only take turns at being stopped, or one waits for ever.

    There is headway when a job ends, and when the work that is done and not lost, of all jobs that
    live, is more than it ever was since: long jobs in short turns get on, though none ends for
    millions of facts. Jobs that begin again after each turn do not, as much as they compute. A run
    that lost work has as many facts to make up for it as it had needed to do it, if that is more
    than its patience.

    Raises:
        UnfinishedError: when it is called after too many facts without headway.
    """

    def __init__(self, stage: Stage, options: RunOptions) -> None:
        self._stage = stage
        self._options = options
        self._ended = self._events = self._preemptions = self._resizes = 0
        self._most_s, self._has_lost = 0.0, False
        self._least_gain_s = LEAST_GAIN_RATIO * sum(job.work_s for job in stage.jobs)
        self._patience = options.idle_events + IDLE_EVENTS_PER_JOB * len(stage.jobs)

    def __call__(self) -> None:
        sim = self._stage.sim
        counters, live = sim.engine.state.counters, sim.engine.state.live_jobs
        ended = counters.jobs_finished + counters.jobs_failed
        done_s = sim.runtime.done_s(live)
        if ended > self._ended or done_s > self._most_s + self._least_gain_s or not live:
            self._ended, self._events = ended, sim.events
            self._preemptions, self._resizes = counters.preemptions, counters.resizes
            self._most_s, self._has_lost = done_s, False
            return
        self._has_lost = self._has_lost or done_s < self._most_s - self._least_gain_s
        patience = max(self._patience, self._events) if self._has_lost else self._patience
        if sim.events - self._events > patience:
            raise UnfinishedError(
                f"policy {self._options.policy} makes no headway: {self._ended} of "
                f"{len(self._stage.jobs)} jobs ended, then none in {patience} events, nor did the "
                f"work that is done and kept grow, with {self._since(counters)}"
            )

    def _since(self, counters: Counters) -> str:
        """The work done in that time, and the cause: where jobs only stopped one another, they lose
        their work; else what the first remaining job waits for.
        """
        preemptions = counters.preemptions - self._preemptions
        resizes = counters.resizes - self._resizes
        done = f"{counted(preemptions, 'preemption')} and {counted(resizes, 'resize')}"
        return f"{done}; {self._why(is_turning=preemptions > 0 and resizes == 0)}"

    def _why(self, *, is_turning: bool) -> str:
        left = _left(self._stage)
        if is_turning and not all(self._saves_when_asked(job) for job in left):
            return "jobs that keep their work (--checkpoints on-request) may help"
        first = f"the first that is left is {_first(self._stage, left)}"
        if is_turning:
            return f"jobs keep their work, but turns may be too short to do any; {first}"
        return first

    def _saves_when_asked(self, job: JobEntry) -> bool:
        """As `Runtime.add` has it: a run says it for all jobs, or each for itself."""
        if self._options.saves is None:
            return job.spec.checkpoint.path is not None
        return self._options.saves == Saves.ON_REQUEST


def check_ended(stage: Stage, options: RunOptions) -> None:
    """Look at each job when nothing happens any more.

    Raises:
        UnfinishedError: one that neither succeeded nor was let go; with what the first waits for.
    """
    left = _left(stage)
    if left:
        raise UnfinishedError(
            f"policy {options.policy}: {len(left)} of {len(stage.jobs)} jobs never ended on this "
            f"cluster; the first is {_first(stage, left)}"
        )


def _left(stage: Stage) -> list[JobEntry]:
    """Jobs that came and have no end, in order of submission."""
    ends = {JobState.SUCCEEDED}
    if stage.sim.failing is not None:
        ends.add(JobState.FAILED)
    jobs = stage.sim.engine.state.jobs.values()
    return [job for job in jobs if job.state not in ends and not job.is_rejected]


def _first(stage: Stage, left: Sequence[JobEntry]) -> str:
    """The first of them as its trace calls it, and why it has no end."""
    job = left[0]
    why = job.error or "; ".join(stage.sim.engine.explain.blockers(job.job_id))
    return f"{stage.names[job.job_id]}, {job.state}: {_as_named(why, stage.names) or 'it waits'}"


def _as_named(text: str, names: Mapping[JobId, str]) -> str:
    """A text of the engine with jobs called as in their trace."""
    return ID.sub(lambda found: names.get(JobId(found[0]), found[0]), text)
