"""Plays the runs behind docs/results.md, one by one, and keeps their figures.

    .venv/bin/python docs/research/play_results.py --rows baseline,basic --seeds 1
    ARYL_TRACES=... .venv/bin/python docs/research/play_results.py --golden

A run that is there already is left alone unless `--again` is given. Must not know the paper's
figures: `results.py` puts them side by side.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct, structs

from coordinator.engine.state.accounting import Quantiles, quantile, quantiles
from coordinator.sim.inputs.inputs import parse_seeds
from coordinator.sim.run.build import RunOptions, TimesTaken
from coordinator.sim.run.compare import Task, play_task
from coordinator.sim.run.play import JobRow, Run, RunResult
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.paper_runs import find_scene
from docs.research import golden_elasticflow
from docs.research import kept as kept_runs

ELASTICFLOW = "elasticflow-8a"
"""The rows of that figure, kept in a file of their own."""

KEPT = kept_runs.RESULTS / "paper.jsonl"


class Guests(Struct, frozen=True, kw_only=True):
    """How the jobs that ran on lent nodes fared in another run: the Baseline of Table 7."""

    queueing_s: Quantiles
    jct_s: Quantiles


class Kept(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run as it is kept.

    row: its name here. cpu_s: of one core, reading the workload included. makespan_s: its last end
    after its first submission. guests_before: None where nothing was lent. queueing_tail_s,
    jct_tail_s: 75th and 99th percentile of both; None in runs that were kept before.
    """

    row: str
    workload: str
    result: RunResult
    makespan_s: float
    cpu_s: float
    guests_before: Guests | None = None
    queueing_tail_s: tuple[float, float] | None = None
    jct_tail_s: tuple[float, float] | None = None


class Wanted(Struct, frozen=True, kw_only=True):
    """One row: a scenario, under a policy other than its own where one is named."""

    scenario: str
    policy: str | None = None


def _scenes(*names: str) -> dict[str, Wanted]:
    return {name: Wanted(scenario=name) for name in names}


ROWS: dict[str, Wanted] = {
    **_scenes("baseline", "basic"),
    "fifo-skip": Wanted(scenario="baseline", policy="fifo-skip"),
    "sjf": Wanted(scenario="baseline", policy="sjf"),
    **_scenes("loan-aryl", "elastic-aryl", "loan-random", "loan-scf", "loan-opportunistic"),
    **_scenes("elastic-gandiva", "elastic-afs", "elastic-pollux", "elastic-tuned"),
    "aryl-default": Wanted(scenario="basic", policy="aryl"),
    **_scenes("basic-random", "basic-scf", "wrong-20", "wrong-40", "wrong-60", "naive-basic"),
    **_scenes("advanced", "heterogeneous", "naive-advanced", "ideal", "naive-ideal"),
    **{
        f"sjf-{scenario}": Wanted(scenario=scenario, policy="sjf")
        for scenario in (
            *("advanced", "heterogeneous", "ideal", "elastic-tuned"),
            *("wrong-20", "wrong-40", "wrong-60"),
        )
    },
}
"""Rows of the paper's tables, and those that it lacks, in the order in which they are played.

`sjf` and `sjf-SCENARIO` are what the gap to the bound is measured from, each on the jobs of its own
scenario.
"""

DRAWS = range(5)
DRAWN_DAYS = {
    f"{prefix}{scenario}": Wanted(scenario=scenario, policy=policy)
    for prefix, policy, rows in (
        ("", None, ("baseline", "basic", "ideal")),
        ("sjf-", "sjf", ("basic", "ideal")),
    )
    for scenario in (f"bootstrap-{row}-{number}" for number in DRAWS for row in rows)
}
"""Figure 12: ten days drawn from those of a trace, by the number of the draw."""


class Golden(Struct, frozen=True, kw_only=True):
    """A public trace on one pool of GPUs.

    start_s: what every start takes, in a simulator that counts it.
    """

    trace: str
    gpus: int
    policy: str
    start_s: float = 0.0


TIRESIAS = {
    "tiresias": "tiresias:limits=3250/7200:line=entry:mixes_units=true",
    "tiresias-exact": "tiresias:limits=3250/7200:line=entry",
}
"""As its public simulator has it, with that one's late crossings and without."""

GOLDEN = {
    f"golden-{trace}-{policy}": Golden(trace=trace, gpus=gpus, policy=policy)
    for trace, gpus, policies in (
        ("cluster01", 64, ("fifo", "srsf", "yarn", "sjf")),
        ("cluster06", 128, ("fifo", "srsf", "yarn", "sjf")),
        ("cluster02", 128, ("fifo", "fifo-skip", "sjf")),
        ("cluster04", 640, ("srsf", "sjf")),
    )
    for policy in policies
} | {
    f"golden-{trace}-{name}": Golden(trace=trace, gpus=gpus, policy=policy)
    for trace, gpus in (
        ("cluster01", 64),
        ("cluster06", 128),
        ("cluster02", 128),
        ("cluster04", 640),
    )
    for name, policy in TIRESIAS.items()
}
"""Rows by name: `--golden` plays them all, `--golden --rows` some of them.

Those of `sjf` are also what the gap to the bound is measured from; most are published by nobody.
"""

ROUNDS = {
    "las": "las",
    "themis-lp": "themis-lp:round_s=120:spare=even",
}
SHOCKWAVE = "120_0.2_5_100_40_25_0-0.5-0.5_0.6-0.3-0.09-0.01_multigpu_dynamic"
GOLDEN |= {
    f"golden-shockwave120-{name}": Golden(trace=SHOCKWAVE, gpus=32, policy=policy, start_s=20.0)
    for name, policy in {**ROUNDS, "sjf": "sjf"}.items()
}
"""Shockwave's artefact: Gavel's rounds, in which whoever did not run before loses 20 s, as under
`sjf` does whoever starts."""


def scenario_task(row: str, seed: int) -> Task:
    """A row, or a scenario that is none, on `paper-SEED`.

    Raises:
        ConfigError: neither a row nor a scenario.
    """
    wanted = {**ROWS, **DRAWN_DAYS}.get(row) or Wanted(scenario=row)
    scene = find_scene(wanted.scenario)
    return Task(
        workload=f"paper-{seed}",
        seed=None,
        scenario=scene.name,
        keeps_jobs=True,
        options=RunOptions(
            policy=wanted.policy or scene.policy,
            seed=seed,
            has_delays=False,
            tells_progress=scene.tells_progress,
            speedup=scene.speedup,
        ),
    )


def golden_task(row: str) -> Task:
    """A public trace, nothing but a start takes time, preemption is free: as its simulator has it.

    The engine's own patience with jobs that were just preempted is off, as that one has none.
    """
    golden = GOLDEN[row]
    options = RunOptions(policy=golden.policy, has_delays=False, saves=Saves.ON_REQUEST)
    if golden.start_s:
        nothing = TimesTaken(**dict.fromkeys(TimesTaken.__struct_fields__, 0.0))
        options = structs.replace(
            options,
            has_delays=True,
            times=structs.replace(nothing, start_s=golden.start_s),
            coalesce_s=0.0,
            engine={"min_runtime_s": 0.0, "resize_cooldown_s": 0.0},
        )
    directory, end = ("shockwave", "trace") if golden.start_s else ("elasticflow_itp", "csv")
    return Task(
        workload=f"{directory}/{golden.trace}.{end}.gz",
        cluster=f"1x{golden.gpus}+0x8",
        keeps_jobs=True,
        options=options,
    )


def guests_before(jobs: Iterable[JobRow], before: Mapping[str, JobRow]) -> Guests | None:
    """The jobs of a run that were on lent nodes, as another run had them; None of no such job."""
    rows = [before[job.job_id] for job in jobs if job.was_on_loan]
    if not rows:
        return None
    return Guests(
        queueing_s=quantiles([row.queueing_s for row in rows]),
        jct_s=quantiles([row.jct_s for row in rows]),
    )


def played(row: str, task: Task, before: Mapping[str, JobRow] | None = None) -> tuple[Kept, Run]:
    """Play one run."""
    began_s = time.process_time()
    run = play_task(task)
    cpu_s = time.process_time() - began_s
    first_s = min(job.submitted_at_s for job in run.rows)
    kept = Kept(
        row=row,
        workload=task.workload,
        result=run.result,
        makespan_s=max(job.finished_at_s for job in run.rows) - first_s,
        cpu_s=round(cpu_s, 2),
        guests_before=None if before is None else guests_before(run.rows, before),
        queueing_tail_s=_tail([job.queueing_s for job in run.rows]),
        jct_tail_s=_tail([job.jct_s for job in run.rows]),
    )
    return kept, run


def _tail(values: Sequence[float]) -> tuple[float, float]:
    return quantile(values, 0.75), quantile(values, 0.99)


def keep(kept: Kept, name: str) -> None:
    """Add one run to the file."""
    short = msgspec.convert(rounded(msgspec.to_builtins(kept)), Kept)
    kept_runs.keep(KEPT, Kept, name, short)


def rounded(value: Any) -> Any:
    """Plain values with ten digits in each float: the rest is noise in a diff."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [rounded(item) for item in cast("Sequence[Any]", value)]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def read_kept() -> dict[str, Kept]:
    """Every kept run by name."""
    return kept_runs.read(KEPT, Kept)


def play_rows(rows: Sequence[str], seed: int, *, again: bool) -> None:
    """Play rows on one seed, the Baseline first as others compare with its jobs.

    Drawn days have jobs of their own, and are compared with none.
    """
    there = {} if again else read_kept()
    wanted = [row for row in rows if f"{row}-{seed}" not in there]
    baseline: Kept | None = None
    before: dict[str, JobRow] = {}
    if any(row not in DRAWN_DAYS for row in wanted):
        baseline, run = played("baseline", scenario_task("baseline", seed))
        before = {job.job_id: job for job in run.rows}
    for row in wanted:
        if row == "baseline" and baseline is not None:
            kept = baseline
        else:
            of_same_jobs = None if row in DRAWN_DAYS else before
            kept, _ = played(row, scenario_task(row, seed), of_same_jobs)
        keep(kept, f"{row}-{seed}")
        _say(f"{row}-{seed}: {kept.cpu_s:.1f} s")


def _play_elasticflow() -> None:
    rows = [golden_elasticflow.play(row) for row in golden_elasticflow.ROWS]
    golden_elasticflow.keep(rows)
    for row in rows:
        _say(f"{ELASTICFLOW} {row.row}: {row.deadlines_met_ratio} in time, {row.cpu_s:.1f} s")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Read options and play."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", help="all of its kind where none is named")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--golden", action="store_true", help="public traces, below ARYL_TRACES")
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    if asked.golden:
        for row in asked.rows.split(",") if asked.rows else (*GOLDEN, ELASTICFLOW):
            if row == ELASTICFLOW:
                _play_elasticflow()
                continue
            kept, _ = played(row, golden_task(row))
            keep(structs.replace(kept, workload=GOLDEN[row].trace), row)
            _say(f"{row}: {kept.cpu_s:.1f} s")
        return
    for seed in parse_seeds(asked.seeds):
        rows = asked.rows.split(",") if asked.rows else [*ROWS, *DRAWN_DAYS]
        play_rows(rows, seed, again=asked.again)


if __name__ == "__main__":
    main()
