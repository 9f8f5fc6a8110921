"""Measures what the sentences of docs/results.md say beyond its tables, on the same jobs.

    .venv/bin/python docs/research/results_sentences.py  measure what is not there yet
    .venv/bin/python docs/research/results_sentences.py --runs basic --again

Writes docs/results/paper-sentences-1.json, run by run. Must not know a sentence or the paper's
figures: `results_figures.py` gives names to what sentences use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from common.model import JobState, NodeName
from coordinator.engine.engine import Engine
from coordinator.engine.state.accounting import quantile
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Decision, Reclaim
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.compare import Task
from coordinator.sim.run.process_memory import collecting_rarely
from coordinator.workloads.paper import INFERENCE_GPU, RARE_GPU
from coordinator.workloads.records import TraceJob, Workload
from docs.research.kept import RESULTS
from docs.research.play_results import rounded, scenario_task

SEED = 1
PAGE_FILE = RESULTS / f"paper-sentences-{SEED}.json"

SHORT_S = 800.0
LONG_S = 20_000.0
"""Running times that sentences divide the jobs at; the generator's two modes lie on either side."""


class Measured(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one run, or the trace itself, has for sentences.

    run: its name here. workload: the named trace. policy: empty for the trace itself.
    events: facts that the engine took, as `RunResult.events`. figures: by name; SI units.
    """

    run: str
    workload: str
    policy: str = ""
    events: int = 0
    figures: dict[str, float]


class Asked(Struct, frozen=True, kw_only=True):
    """One run that sentences need.

    row: of `play_results.ROWS`, or a scenario. trace: it is played on.
    prefers_loan: inelastic fungible jobs try lent nodes first, as the elastic ones do.
    """

    row: str
    trace: str = f"paper-{SEED}"
    prefers_loan: bool = False


RUNS = {
    "basic": Asked(row="basic"),
    "baseline": Asked(row="baseline"),
    "fifo-skip": Asked(row="fifo-skip"),
    "loan-aryl": Asked(row="loan-aryl"),
    "guests-first": Asked(row="loan-aryl", prefers_loan=True),
    "checkpoint-100": Asked(row="checkpoint-100"),
    "overload": Asked(row="basic", trace="paper-overload"),
}
"""By name, in the order in which they are played; those of the same name are rows of the page."""

TRACE = "trace"
"""The jobs themselves, which no run changes."""


# --- the jobs -----------------------------------------------------------------------------------


def trace_figures(workload: Workload) -> dict[str, float]:
    """What the jobs are, whoever schedules them; parts are of all jobs unless named otherwise.

    elastic_part_s: of the mean running time. longest: the twentieth of the jobs that runs longest,
    and of it the part that is elastic. fungible_short_ratio: of the fungible jobs.
    """
    jobs = workload.jobs
    times_s = [job.duration_s for job in jobs]
    elastic = [job for job in jobs if job.is_elastic]
    fungible = [job for job in jobs if INFERENCE_GPU in job.gpu_types]
    longest_s = quantile(times_s, 0.95)
    longest = [job for job in jobs if job.duration_s >= longest_s]
    rare = [job for job in jobs if is_rare(job)]
    return {
        "jobs": float(len(jobs)),
        "pass_s": workload.pass_period_s or 0.0,
        "rare_jobs": float(len(rare)),
        "rare_ratio": len(rare) / len(jobs),
        "elastic_ratio": len(elastic) / len(jobs),
        "elastic_s": _mean(job.duration_s for job in elastic),
        "elastic_part_s": sum(job.duration_s for job in elastic) / len(jobs),
        "short_s": SHORT_S,
        "short_ratio": _share(jobs, lambda job: job.duration_s < SHORT_S),
        "long_s": LONG_S,
        "long_ratio": _share(jobs, lambda job: job.duration_s >= LONG_S),
        "longest_s": longest_s,
        "longest_elastic_ratio": _share(longest, lambda job: job.is_elastic),
        "fungible_jobs": float(len(fungible)),
        "fungible_short_ratio": _share(fungible, lambda job: job.duration_s < SHORT_S),
    }


def is_rare(job: TraceJob) -> bool:
    """Whether a job insists on the rare GPU type."""
    return job.gpu_types == (RARE_GPU,)


def _share(jobs: Sequence[TraceJob], is_one: Callable[[TraceJob], bool]) -> float:
    return sum(map(is_one, jobs)) / len(jobs) if jobs else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


# --- the runs -----------------------------------------------------------------------------------


class ReclaimKeeper:
    """Counts the nodes that go home, and what they hold then.

    `hear` must be called right after the event that made the decisions, see `sim.reclaims`.
    """

    def __init__(self, engine: Engine) -> None:
        self._state = engine.state
        self.nodes = self.idle = self.flexible_alone = 0

    def hear(self, decisions: Iterable[Decision]) -> None:
        """Look at each node that is taken back, once."""
        for name in {each.node for each in decisions if isinstance(each, Reclaim)}:
            are_flexible = self._workers(name)
            self.nodes += 1
            self.idle += not are_flexible
            self.flexible_alone += bool(are_flexible) and all(are_flexible)

    def _workers(self, name: NodeName) -> list[bool]:
        """Of each worker that holds GPUs of a node and is still its job's: is it flexible?"""
        holders = {slot.holder for slot in self._state.nodes[name].gpus if slot.holder is not None}
        found = [self._state.jobs[key.job_id].workers.get(key.worker_index) for key in holders]
        return [worker.is_flexible for worker in found if worker is not None]


def run_figures(stage: Stage, jobs: Sequence[TraceJob], keeper: ReclaimKeeper) -> dict[str, float]:
    """What one run did, jobs in the order of the trace.

    rare_*: of those that insist on the rare type; rare_part_s: what they add to the mean queueing.
    others_queueing_s: mean of all others. beyond_pass_ratio: jobs that wait for longer than a pass.
    idle_ratio, flexible_alone_ratio: of the nodes that went home.
    """
    entries = list(stage.sim.engine.state.jobs.values())
    by_name = {stage.names[entry.job_id]: entry for entry in entries}
    rare = [by_name[job.job_id] for job in jobs if is_rare(job)]
    others = [by_name[job.job_id] for job in jobs if not is_rare(job)]
    guests = [job for job in jobs if by_name[job.job_id].was_on_loan]
    preemptions = sum(entry.counts.preemptions for entry in entries)
    found = {
        "queueing_s": _mean(entry.wait.queueing_s for entry in entries),
        "jct_s": _mean(map(_jct_s, entries)),
        "preemptions": float(preemptions),
        "preemption_ratio": preemptions / len(entries),
        "rare_queueing_s": _mean(entry.wait.queueing_s for entry in rare),
        "rare_part_s": sum(entry.wait.queueing_s for entry in rare) / len(entries),
        "others_queueing_s": _mean(entry.wait.queueing_s for entry in others),
        "guests": float(len(guests)),
        "guests_elastic": float(sum(job.is_elastic for job in guests)),
        "reclaims": float(keeper.nodes),
    }
    if keeper.nodes:
        found["idle_ratio"] = keeper.idle / keeper.nodes
        found["flexible_alone_ratio"] = keeper.flexible_alone / keeper.nodes
    return found


def _jct_s(entry: JobEntry) -> float:
    """Submission to end, in seconds.

    Raises:
        ValueError: it never ended.
    """
    if entry.state != JobState.SUCCEEDED or entry.finished_at_s is None:
        raise ValueError(f"job {entry.job_id} did not succeed: {entry.state}")
    return entry.finished_at_s - entry.submitted_at_s


def task_of(asked: Asked) -> Task:
    """How a run is played: a row of the page as the page plays it, else by its scenario."""
    return structs.replace(scenario_task(asked.row, SEED), workload=asked.trace)


def trying_loans_first(jobs: Iterable[TraceJob]) -> tuple[TraceJob, ...]:
    """Fungible jobs with the type of lent nodes first; the engine tries types in their order."""
    return tuple(
        structs.replace(job, gpu_types=tuple(sorted(job.gpu_types, key=INFERENCE_GPU.__ne__)))
        for job in jobs
    )


@collecting_rarely()
def look(workload: Workload, options: RunOptions) -> tuple[dict[str, float], int]:
    """Play a workload to its end; `run_figures` of it, and the facts that the engine took.

    Raises:
        ConfigError: a job that fits nowhere.
        ValueError: a job that never ended.
    """
    stage = Stage(workload, options)
    keeper = ReclaimKeeper(stage.sim.engine)
    stage.sim.hear = keeper.hear
    stage.sim.run_jobs()
    return run_figures(stage, workload.jobs, keeper), stage.sim.events


def measured(run: str, asked: Asked) -> Measured:
    """Play one run and look at its jobs.

    Raises:
        ConfigError, ValueError: as `Task.read` and `look`.
    """
    task = task_of(asked)
    workload = task.read()
    if asked.prefers_loan:
        workload = structs.replace(workload, jobs=trying_loans_first(workload.jobs))
    figures, events = look(workload, task.options)
    return Measured(
        run=run,
        workload=asked.trace,
        policy=task.options.policy,
        events=events,
        figures=figures,
    )


def measured_trace() -> Measured:
    """Look at the jobs themselves."""
    asked = RUNS["basic"]
    return Measured(run=TRACE, workload=asked.trace, figures=trace_figures(task_of(asked).read()))


# --- the file -----------------------------------------------------------------------------------


def read_measured(path: Path = PAGE_FILE) -> dict[str, Measured]:
    """What was measured, by run; nothing where no file is."""
    if not path.exists():
        return {}
    found = msgspec.json.decode(path.read_bytes(), type=list[Measured])
    return {each.run: each for each in found}


def keep_measured(found: Mapping[str, Measured], path: Path = PAGE_FILE) -> None:
    """Write them all, in the order of `RUNS`."""
    every = [found[run] for run in (TRACE, *RUNS) if run in found]
    text = msgspec.json.encode(rounded(msgspec.to_builtins(every)))
    path.write_bytes(msgspec.json.format(text, indent=1) + b"\n")


def main() -> None:
    """Read options and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", help="some of: " + ", ".join((TRACE, *RUNS)))
    parser.add_argument("--again", action="store_true", help="also what is there already")
    asked = parser.parse_args()
    found = read_measured()
    for run in asked.runs.split(",") if asked.runs else (TRACE, *RUNS):
        if run in found and not asked.again:
            continue
        found[run] = measured_trace() if run == TRACE else measured(run, RUNS[run])
        keep_measured(found)
        sys.stdout.write(f"{run}: {found[run].events} events\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
