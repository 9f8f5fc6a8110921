"""The input of `fairness` from a finished run: the time of each job, shared and alone.

The true work comes from the trace, never from an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import ceil

from common.model import JobSpec, JobState, Pool
from coordinator.engine.state.tables import JobEntry
from coordinator.sim.report.fairness import Lived
from coordinator.sim.run.build import RunOptions, Stage, TimesTaken
from coordinator.sim.run.simulation import Passes
from coordinator.workloads.records import SpeedUp

NO_TIMES = TimesTaken(**dict.fromkeys(TimesTaken.__struct_fields__, 0.0))
"""For a run without delays."""


def lived(stage: Stage, options: RunOptions) -> Iterator[Lived]:
    """The private time and the shared time of each job that succeeded.

    By itself it waits for the next pass and starts once, as on any idle cluster with these delays.
    A job that is there before any node has reported also waits for that.
    """
    entries = stage.sim.engine.state.jobs
    times = options.times if options.has_delays else NO_TIMES
    for job in stage.jobs:
        entry = entries[job.job_id]
        if entry.state != JobState.SUCCEEDED or entry.finished_at_s is None:
            continue
        spec, submitted_at_s = job.spec, entry.submitted_at_s
        heard_at_s = max(submitted_at_s, times.report_s)
        passed_at_s = heard_at_s + until_pass_s(stage.passes, heard_at_s)
        # A gang of k workers computes work / rate(k) seconds, on k workers' GPUs.
        base_s = job.work_s / job.speedup.rates[0]
        yield Lived(
            app=app_of(entry, job.job_id),
            submitted_at_s=submitted_at_s,
            finished_at_s=entry.finished_at_s,
            alone_gpu_s=base_s * spec.base_demand_gpus,
            gpus=spec.workers.max * spec.gpus_per_worker,
            startup_s=passed_at_s - submitted_at_s + times.startup_s,
            worth=_worth(spec, job.speedup),
        )


def _worth(spec: JobSpec, speedup: SpeedUp) -> tuple[tuple[int, float], ...]:
    """The worth of GPUs to a job that does not speed up in proportion; see `Lived`.

    Its best time on a share is that of the best worker count that fits there, as in the bound on
    completion times, which is that on all its workers at once.
    """
    rates = speedup.rates
    base = rates[0]
    if all(rate == base + extra for extra, rate in enumerate(rates)) and base == spec.workers.min:
        return ()
    best = accumulate(rates, max)
    gpus, fewest = spec.gpus_per_worker, spec.workers.min
    return tuple(
        ((fewest + extra) * gpus, rate / base * spec.base_demand_gpus)
        for extra, rate in enumerate(best)
    )


def app_of(entry: JobEntry, name: str) -> str:
    """The app of a job, as `TENANT/APP`: the word is its tenant's own. One without has its name."""
    app = entry.spec.app
    return f"{entry.tenant}/{app}" if app else name


def until_pass_s(passes: Passes, at_s: float) -> float:
    """From an instant to the pass that sees what happened then, where nothing else happens."""
    when_s = at_s + passes.coalesce_s
    if passes.grid_s is not None:
        when_s = ceil(when_s / passes.grid_s) * passes.grid_s
    return when_s - at_s


def training_gpus(stage: Stage) -> int:
    """GPUs of which every app has its share; lent ones are extra."""
    return sum(spec.gpus for spec in stage.specs if spec.home_pool == Pool.TRAINING)
