"""Plays the runs behind docs/foresight.md, one by one, and keeps their figures.

    .venv/bin/python docs/research/play_foresight.py --list
    .venv/bin/python docs/research/play_foresight.py --match paper-1/
    ARYL_TRACES=... .venv/bin/python docs/research/play_foresight.py --match itp

Delays are on, and one message of a hundred is lost. A run that is there already is left alone
unless `--again` is given. Must not judge: `foresight_page.py` puts the runs side by side.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct, structs

from coordinator.sim.inputs.inputs import Shares
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.compare import Task, play_task
from coordinator.sim.run.play import JobRow, Run, RunResult
from coordinator.workloads.paper import RARE_GPU
from coordinator.workloads.records import Workload
from docs.research import kept as kept_runs

KEPT = kept_runs.RESULTS / "foresight.jsonl"

LOSS_RATIO = 0.01
SHARES = Shares(elastic=0.2, fungible=0.3)
"""Of real traces, which tell neither who is elastic nor who accepts the other GPU type."""

LOAD = "servegen/aggregate_rate_10min.csv.gz:m-small"
REAL = {
    "itp-cluster02": ("elasticflow_itp/cluster02.csv.gz", "13x8+13x8"),
    "itp-cluster03": ("elasticflow_itp/cluster03.csv.gz", "20x8+20x8"),
    "itp-cluster06": ("elasticflow_itp/cluster06.csv.gz", "13x8+13x8"),
}
"""Files and clusters: training nodes for the mean demand of the trace at 80 to 90 % use."""

ABLATED = "itp-cluster06"
"""Of the real traces the one whose parts are switched off one by one."""

FIXED = "foresight:lifetime_odds=false"
"""With two fixed quantiles in place of odds by the job; parts are switched off beside these."""

WITHOUT = {
    "whole-nodes": f"{FIXED}:separates_at_home=false",
    "claims": f"{FIXED}:claim_ratio=0",
    "lifetimes": f"{FIXED}:lifetime_quantile=null",
    "caution-beside-claims": f"{FIXED}:near_quantile=null",
    "quantile-lending": f"{FIXED}:lend_quantile=null",
    "waiting-for-finish": f"{FIXED}:waits_for_finish=false",
    "resize-cost": f"{FIXED}:resize_cost_s=0",
}
"""Parts of it, one by one switched off."""

WITH = {"the-line's-wait": f"{FIXED}:queue_weight=1"}
"""What it can do and does not unless it is asked to."""

CURVE = tuple(f"{FIXED}:lifetime_quantile={q}" for q in (0.1, 0.5, 0.75, 0.9))
"""Beside the quantile that it is shipped with, and none."""

SAVING = structs.replace(SHARES, checkpoint=0.5)
"""The same with half of the jobs saving when they are asked to stop."""

SAVES = f"{FIXED}:lifetime_saves=true"


class Wanted(Struct, frozen=True, kw_only=True):
    """One run: a workload as this page names it, a policy, and the task."""

    workload: str
    policy: str
    task: Task

    @property
    def name(self) -> str:
        """What it is kept under."""
        return f"{self.workload}/{self.policy}"


class Body(Struct, frozen=True, kw_only=True):
    """Jobs but those of the rare GPU type, whose line no order helps (docs/workload-paper.md).

    largest_wait_s: the longest that one of them waited in all.
    """

    jobs: int
    queueing_s: float
    jct_s: float
    largest_wait_s: float


class Kept(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run as it is kept."""

    workload: str
    policy: str
    result: RunResult
    body: Body
    cpu_s: float


def _wanted() -> Iterator[Wanted]:
    paper = [(f"paper-{seed}", f"paper-{seed}") for seed in range(1, 6)]
    overload = [("paper-overload-1", "paper-overload")]
    overload += [(f"paper-overload-{seed}", f"paper-overload-{seed}") for seed in range(2, 6)]
    for name, workload in (*paper, *overload):
        for policy in ("sjf", "aryl", "foresight", FIXED):
            yield Wanted(workload=name, policy=policy, task=_task(workload, policy, seed=None))
    for policy in (*WITHOUT.values(), *WITH.values(), *CURVE):
        task = _task("paper-overload", policy, seed=None)
        yield Wanted(workload="paper-overload-1", policy=policy, task=task)
    yield from _wanted_real()


def _wanted_real() -> Iterator[Wanted]:
    for name in REAL:
        parts = (*WITHOUT.values(), *WITH.values())
        also = parts if name == ABLATED else (WITHOUT["lifetimes"],)
        for seed in range(1, 6):
            for policy in ("sjf", "aryl", "foresight", FIXED, *also, *CURVE):
                yield _real(name, policy, seed=seed)
    for seed in range(1, 6):
        for policy in ("aryl", FIXED, SAVES):
            yield _real(ABLATED, policy, seed=seed, is_saving=True)


def _real(name: str, policy: str, *, seed: int, is_saving: bool = False) -> Wanted:
    file, cluster = REAL[name]
    shares = SAVING if is_saving else SHARES
    task = structs.replace(
        _task(file, policy, seed=seed), cluster=cluster, load=LOAD, shares=shares
    )
    told = f"{name}-saving-{seed}" if is_saving else f"{name}-{seed}"
    return Wanted(workload=told, policy=policy, task=task)


def _task(workload: str, policy: str, *, seed: int | None) -> Task:
    options = RunOptions(policy=policy, seed=seed or 1, loss_ratio=LOSS_RATIO)
    return Task(workload=workload, seed=seed, options=options, keeps_jobs=True)


def workload_of(name: str) -> Workload:
    """What the runs of a real trace play, by its name here.

    Raises:
        ConfigError: the trace is not there.
    """
    return next(wanted.task.read() for wanted in _wanted() if wanted.workload == name)


def _play(wanted: Wanted) -> Kept:
    began_s = time.process_time()
    run = play_task(wanted.task)
    return Kept(
        workload=wanted.workload,
        policy=wanted.policy,
        result=structs.replace(run.result, wall_s=0.0, peak_rss_bytes=0),
        body=_body(wanted.task, run),
        cpu_s=round(time.process_time() - began_s, 1),
    )


def _body(task: Task, run: Run) -> Body:
    rare = {job.job_id for job in task.read().jobs if RARE_GPU in job.gpu_types}
    rows: Sequence[JobRow] = [row for row in run.rows if row.job_id not in rare]
    return Body(
        jobs=len(rows),
        queueing_s=sum(row.queueing_s for row in rows) / len(rows),
        jct_s=sum(row.jct_s for row in rows) / len(rows),
        largest_wait_s=max(row.queueing_s for row in rows),
    )


def read_kept() -> Iterable[Kept]:
    """Every run that is kept, in order of name."""
    return kept_runs.read(KEPT, Kept).values()


def main(arguments: Sequence[str]) -> int:
    """Play what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--match", default="", help="runs whose name WORKLOAD/POLICY has this")
    parser.add_argument("--policies", default="", help="only these, by comma")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--list", action="store_true", help="only name them")
    asked = parser.parse_args(arguments)
    there = kept_runs.read(KEPT, Kept)
    only = {str(name) for name in asked.policies.split(",") if name}
    for wanted in _wanted():
        if asked.match not in wanted.name or (only and wanted.policy not in only):
            continue
        if asked.list or (wanted.name in there and not asked.again):
            sys.stdout.write(f"{wanted.name} {'kept' if wanted.name in there else 'missing'}\n")
            continue
        kept = _play(wanted)
        kept_runs.keep(KEPT, Kept, wanted.name, kept)
        sys.stdout.write(f"{wanted.name} {kept.cpu_s:.0f} s\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
