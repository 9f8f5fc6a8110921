"""Whether a run comes to its last job, and if not, why. Must not know figures, nor play anything.

A run of which one job never ends has no figures: a mean without that job would be a lie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from common.errors import ConfigError
from common.model import JobId, JobState
from coordinator.engine.state import JobEntry
from coordinator.engine.totals import Counters
from coordinator.policies.words import counted
from coordinator.sim.stage import RunOptions, Stage

ID = re.compile(r"\b\d{7}\b")
"""What a job is called in the engine (`stage`), wherever it stands in a text."""

IDLE_EVENTS_PER_JOB = 100
"""Facts for each job, beyond `idle_events`, without the end of one: then there is no headway."""


class UnfinishedError(ConfigError):
    """A run that does not come to its last job; another policy may."""


class Headway:
    """Ends a run in which jobs only take turns at being stopped, or one waits for ever.

    Raises:
        UnfinishedError: when it is called after too many facts without a job's end.
    """

    def __init__(self, stage: Stage, options: RunOptions) -> None:
        self._stage = stage
        self._policy = options.policy
        self._ended = self._events = self._preemptions = self._resizes = 0
        self._patience = options.idle_events + IDLE_EVENTS_PER_JOB * len(stage.jobs)

    def __call__(self) -> None:
        counters, events = self._stage.sim.engine.state.counters, self._stage.sim.events
        ended = counters.jobs_finished + counters.jobs_failed
        if ended > self._ended:
            self._ended, self._events = ended, events
            self._preemptions, self._resizes = counters.preemptions, counters.resizes
        elif events - self._events > self._patience:
            raise UnfinishedError(
                f"policy {self._policy} makes no headway: {self._ended} of "
                f"{len(self._stage.jobs)} jobs ended, then none in {self._patience} events, with "
                f"{self._since(counters)}"
            )

    def _since(self, counters: Counters) -> str:
        """What was done in that time, and why: where jobs only stopped one another it is that they
        lose their work; else it is what the first that is left waits for."""
        preemptions = counters.preemptions - self._preemptions
        resizes = counters.resizes - self._resizes
        done = f"{counted(preemptions, 'preemption')} and {counted(resizes, 'resize')}"
        return f"{done}; {self._why(is_turning=preemptions > 0 and resizes == 0)}"

    def _why(self, *, is_turning: bool) -> str:
        left = _left(self._stage)
        if is_turning or not left:
            return "jobs that keep their work (--checkpoints on-request) may help"
        return f"the first that is left is {_first(self._stage, left)}"


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
    why = job.error or "; ".join(stage.sim.engine.blockers(job.job_id))
    return f"{stage.names[job.job_id]}, {job.state}: {_as_named(why, stage.names) or 'it waits'}"


def _as_named(text: str, names: Mapping[JobId, str]) -> str:
    """A text of the engine with jobs called as in their trace."""
    return ID.sub(lambda found: names.get(JobId(found[0]), found[0]), text)
