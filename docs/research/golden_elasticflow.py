"""The rows of ElasticFlow's Figure 8(a): how each is played, and what was published.

`play_results.py --golden` plays and keeps them.
Must not know how a figure comes about.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from coordinator.sim.run.build import RunOptions, TimesTaken
from coordinator.sim.run.compare import Task, play_task
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.shaping import RuntimeModel
from docs.research.kept import RESULTS

TRACE = "elasticflow_itp/elasticVpollux_e_195job.csv.gz"
CURVES = "elasticflow_scaling/throughputs_T4"
KEPT = RESULTS / "elasticflow-8a.json"


class Row(Struct, frozen=True, kw_only=True):
    """One bar of the figure.

    published: share of jobs in time by the authors' simulator. published_cpu_s: its CPU time, on
        the machine on which ours was measured.
    policy: with its knobs. change_s: how long a job stands still at each change of its workers.
    cluster: nodes x GPUs, training + inference. start_s: how long its first start takes.
    is_rigid: each job has the GPUs of the trace, else any number that was measured.
    is_comparable: the setting is the authors'; others show what it does.
    idle_events: see `RunOptions`; its jobs run for days and change each minute.
    """

    published: float
    published_cpu_s: float
    policy: str
    change_s: float = 0.0
    start_s: float = 0.0
    cluster: str = "16x4+0x8"
    is_rigid: bool = False
    is_comparable: bool = True
    idle_events: int = 50_000


POOL = "1x64+0x8"
"""The artefact's Tiresias counts GPUs and looks at no nodes."""
ROUNDS = "round_s=60:admits_together=true"
STEPS = "quiet_s=10800"
"""Longer than the trace ever goes without a submission (10,069 s) before the last one."""

ROWS = {
    "edf": Row(published=0.1179, published_cpu_s=0.75, policy="qos-edf:largest=true"),
    "edf, the most that helps": Row(
        published=0.1179, published_cpu_s=0.75, policy="qos-edf", is_comparable=False
    ),
    "Tiresias": Row(
        published=0.2872,
        published_cpu_s=1.1,
        policy="tiresias-dlas",
        change_s=8.0,
        start_s=8.0,
        cluster=POOL,
        is_rigid=True,
    ),
    "Tiresias as it is here by default": Row(
        published=0.2872,
        published_cpu_s=1.1,
        policy="tiresias:limits=3250/7200",
        is_rigid=True,
        is_comparable=False,
    ),
    "Gandiva": Row(
        published=0.0923,
        published_cpu_s=7.6,
        policy=f"gandiva-sets:{STEPS}:counts_by_gang=true",
        is_rigid=True,
        idle_events=2_000_000,
    ),
    "Gandiva, sets counted by their room": Row(
        published=0.0923,
        published_cpu_s=7.6,
        policy=f"gandiva-sets:{STEPS}",
        is_rigid=True,
        is_comparable=False,
    ),
    "Gandiva in sets, without both faults": Row(
        published=0.0923,
        published_cpu_s=7.6,
        policy="gandiva-sets",
        is_rigid=True,
        is_comparable=False,
    ),
    "Gandiva by its paper": Row(
        published=0.0923,
        published_cpu_s=7.6,
        policy="gandiva",
        is_rigid=True,
        is_comparable=False,
    ),
    "ElasticFlow": Row(
        published=0.7282,
        published_cpu_s=12.4,
        policy=f"qos-elasticflow:margin=1.01:{ROUNDS}",
        change_s=8.0,
    ),
    "ElasticFlow, without the margin": Row(
        published=0.7282,
        published_cpu_s=12.4,
        policy=f"qos-elasticflow:margin=1:{ROUNDS}",
        change_s=8.0,
        is_comparable=False,
    ),
    "ElasticFlow, a margin of 2 %": Row(
        published=0.7282,
        published_cpu_s=12.4,
        policy=f"qos-elasticflow:margin=1.02:{ROUNDS}",
        change_s=8.0,
        is_comparable=False,
    ),
    "ElasticFlow, free changes": Row(
        published=0.7282,
        published_cpu_s=12.4,
        policy=f"qos-elasticflow:margin=1:{ROUNDS}",
        is_comparable=False,
    ),
    "ElasticFlow, at once": Row(
        published=0.7282,
        published_cpu_s=12.4,
        policy="qos-elasticflow:margin=1",
        is_comparable=False,
    ),
}


UNTOLD = ("resize_cooldown_s", "min_runtime_s", "start_p99_s", "restart_p99_s", "resize_p99_s")
"""What is not held there, and what plans are not told of there."""


def _times(row: Row) -> TimesTaken:
    """Nothing takes time but a start and a change of workers."""
    none = dict.fromkeys(TimesTaken.__struct_fields__, 0.0)
    takes = {"start_s": row.start_s, "restart_s": row.change_s, "resize_s": row.change_s}
    return TimesTaken(**{**none, **takes})


def task(name: str) -> Task:
    """A row, ready to be played."""
    row = ROWS[name]
    has_delays = row.change_s > 0
    options = RunOptions(
        policy=row.policy,
        saves=Saves.ON_REQUEST,
        has_delays=has_delays,
        times=_times(row),
        tells_progress=False,
        coalesce_s=0.0,
        idle_events=row.idle_events,
        engine=dict.fromkeys(UNTOLD, 0.0) if has_delays else {},
        speedup=RuntimeModel.LINEAR if row.is_rigid else RuntimeModel.TABLE,
    )
    return Task(
        workload=TRACE,
        cluster=row.cluster,
        scenario=None if row.is_rigid else "elasticflow-8a",
        curves=None if row.is_rigid else str(Path(os.environ.get("ARYL_TRACES", ""), CURVES)),
        keeps_jobs=True,
        options=options,
    )


class Kept(Struct, frozen=True, kw_only=True):
    """One row as it was measured; seconds of mean JCT are over the jobs that ran."""

    row: str
    policy: str
    deadlines_met_ratio: float
    published: float
    jobs: int
    jobs_rejected: int
    jct_s: float
    preemptions: int
    cpu_s: float
    published_cpu_s: float


def play(name: str) -> Kept:
    """Play one row."""
    began_s = time.process_time()
    found = play_task(task(name)).result
    row = ROWS[name]
    return Kept(
        row=name,
        policy=row.policy,
        deadlines_met_ratio=round(found.deadlines_met_ratio or 0.0, 4),
        published=row.published,
        jobs=found.jobs,
        jobs_rejected=found.jobs_rejected,
        jct_s=round(found.jct_s.mean or 0.0, 2),
        preemptions=found.preemptions,
        cpu_s=round(time.process_time() - began_s, 2),
        published_cpu_s=row.published_cpu_s,
    )


def keep(rows: list[Kept]) -> None:
    """Write all rows to their file."""
    KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
