"""Policies that played a workload identically, job by job, and the likely reason.

Rows of a comparison are often equal: policies that differ in tenants, deadlines, elastic jobs or
loans decide the same where there are none. The reader of a table should not have to guess whether
that is so or a mistake.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.sim.run.compare import KNOB, label
from coordinator.sim.run.play import Run, RunResult
from coordinator.workloads.records import TraceJob, Workload


def alike(runs: Sequence[Run]) -> tuple[tuple[str, ...], ...]:
    """Labels of runs whose jobs all went the same way under each seed, in the order of the runs.

    Two or more in each group; a run without an equal is in none.
    """
    lives: dict[str, list[tuple[int, str]]] = {}
    for run in runs:
        lives.setdefault(label(run.result), []).append((run.result.seed, run.fingerprint))
    groups: dict[tuple[tuple[int, str], ...], list[str]] = {}
    for name, found in lives.items():
        if all(fingerprint for _, fingerprint in found):
            groups.setdefault(tuple(sorted(found)), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def is_seedless(runs: Sequence[Run]) -> bool:
    """Whether there is more than one seed, and nothing that was played differs by it."""
    lives: dict[str, set[str]] = {}
    for run in runs:
        lives.setdefault(label(run.result), set()).add(run.fingerprint)
    several = len({run.result.seed for run in runs}) > 1
    return several and all(len(found) == 1 and "" not in found for found in lives.values())


def alike_text(groups: Sequence[Sequence[str]], lacks: Sequence[str]) -> str:
    """The equal policies in one line, and what the workload lacks; empty without any."""
    if not groups:
        return ""
    equal = "; ".join(" = ".join(names) for names in groups)
    why = f" (the workload has {', '.join(lacks)})" if lacks else ""
    return f"the same for every job: {equal}{why}"


def lacks(workload: Workload, results: Sequence[RunResult]) -> tuple[str, ...]:
    """What the workload lacks that policies differ by; empty if runs had different workloads.

    workload: of the first run.
    """
    if len({_of_workload(result) for result in results}) > 1:
        return ()
    jobs = workload.jobs
    found = {
        "one tenant": len({job.tenant for job in jobs}) == 1,
        "one priority": len({job.priority for job in jobs}) == 1,
        "no deadlines": all(job.deadline_s is None for job in jobs),
        "no elastic jobs": not any(map(_is_elastic, jobs)),
        "nothing to lend": not workload.loads,
    }
    return tuple(name for name, is_so in found.items() if is_so)


def _of_workload(result: RunResult) -> tuple[object, ...]:
    """The options that shaped its workload, seeds aside."""
    swept = ((key, value) for key, value in result.swept.items() if not key.startswith(KNOB))
    return (result.scenario, *swept)


def _is_elastic(job: TraceJob) -> bool:
    return job.max_workers is not None and job.max_workers > (job.min_workers or 1)
