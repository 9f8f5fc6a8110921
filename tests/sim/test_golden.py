"""Numbers that others published, and a second simulator of thirty lines, against the engine.

Origins and settings of the published figures: Tiresias' simulator (SymbioticLab, scheme `count`,
whole seconds) and Alibaba's PAI simulator, both on the ITP traces of microsoft/elasticflow-traces.
Three traces, with PAI's figures of one of them, and the slice are packaged; the large ones are read
where ARYL_TRACES names their directory.

Gavel's round engine: the artefact of Shockwave (NSDI'23; uw-mad-dash/shockwave), its 120-job trace
on 32 GPUs of one type, rounds of 120 s. There a job that did not run in the round before loses
20 s, and batch sizes grow while jobs run; durations in the trace are those at the first batch size.

ElasticFlow's Figure 8(a) (pkusys/ElasticFlow): 195 jobs of the ITP trace with deadlines on 16 nodes
of 4 T4, any number of GPUs by measured scaling curves.

Golden reports are small runs whose figures are in the repository: a change of a policy or of the
engine shows here. To accept it, run `python -m tests.sim.reports` and review the difference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import Struct, structs

from common.clock import SystemClock
from coordinator.sim.inputs.inputs import read_workload
from coordinator.sim.report.statistics import estimate
from coordinator.sim.run.build import RunOptions, TimesTaken
from coordinator.sim.run.compare import play_task
from coordinator.sim.run.play import Run, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import TraceJob
from docs.research.golden_elasticflow import ROWS, task
from tests.sim.reports import DEMO_POLICIES, GOLDEN, NAMES, demo_result, report
from tests.tables import each_row

DATA = Path(__file__).parents[1] / "data" / "sim"
SLICE = DATA / "itp_slice.csv"
GPUS = 64

needs_traces = pytest.mark.skipif(
    not os.environ.get("ARYL_TRACES"), reason="ARYL_TRACES names no directory of full traces"
)


def run(trace: str, gpus: int, policy: str, *, check: bool = False) -> Run:
    """A trace on one pool of GPUs, nothing takes time, preemption is free."""
    workload = read_workload(trace, cluster=f"1x{gpus}+0x8")
    options = RunOptions(policy=policy, has_delays=False, saves=Saves.ON_REQUEST, check=check)
    return play(workload, options, clock=SystemClock())


# --- the second opinion -------------------------------------------------------------------------


class Outcome(Struct, frozen=True):
    """What the reference says of a schedule."""

    jct_s: float
    preemptions: int
    makespan_s: float


Order = Callable[[TraceJob, float], float]


def reference(
    jobs: tuple[TraceJob, ...], gpus: int, order: Order, *, preempts: bool, is_strict: bool = False
) -> Outcome:
    """One pool of GPUs, event by event: no engine, no nodes, no snapshot.

    order: least first, by a job and its seconds left; ties by submission.
    """
    coming = list(enumerate(jobs))
    left: dict[int, float] = {}
    running: set[int] = set()
    now_s = jct_s = 0.0
    preemptions = 0
    while coming or left:
        ends = [now_s + left[number] for number in running]
        next_s = min([*ends, *(job.submit_s for _, job in coming[:1])])
        for number in running:
            left[number] -= next_s - now_s
        now_s = next_s
        for number in [number for number in running if left[number] <= 0]:
            running.remove(number)
            del left[number]
            jct_s += now_s - jobs[number].submit_s
        while coming and coming[0][1].submit_s <= now_s:
            number, job = coming.pop(0)
            left[number] = job.duration_s
        kept = set() if preempts else set(running)
        free = gpus - sum(jobs[number].gpus for number in kept)
        line = sorted(left.keys() - kept, key=lambda n: (order(jobs[n], left[n]), n))
        for number in line:
            if jobs[number].gpus <= free:
                free -= jobs[number].gpus
                kept.add(number)
            elif is_strict:
                break
        preemptions += len(running - kept)
        running = kept
    return Outcome(jct_s / len(jobs), preemptions, now_s)


ORDERS: dict[str, tuple[Order, bool, bool]] = {
    "fifo": (lambda job, _: job.submit_s, False, True),
    "fifo-skip": (lambda job, _: job.submit_s, False, False),
    "sjf": (lambda job, _: job.duration_s, False, False),
    "srtf": (lambda _, left_s: left_s, True, False),
    "srsf": (lambda job, left_s: left_s * job.gpus, True, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(ORDERS))
def test_the_slice_goes_as_a_second_simulator_says(policy: str) -> None:
    """On one pool of GPUs the engine's schedule is the reference's, job by job."""
    order, preempts, is_strict = ORDERS[policy]
    jobs = read_workload(str(SLICE), cluster=f"1x{GPUS}").jobs
    expected = reference(jobs, GPUS, order, preempts=preempts, is_strict=is_strict)
    found = run(str(SLICE), GPUS, policy)
    assert found.result.jct_s.mean == pytest.approx(expected.jct_s, rel=1e-9)
    assert found.result.preemptions == expected.preemptions
    assert max(row.finished_at_s for row in found.rows) == pytest.approx(expected.makespan_s)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["yarn", "yarn-fair", "yarn-capacity", "drf"])
def test_with_one_queue_and_one_node_the_classics_are_strict_fifo(policy: str) -> None:
    """Nobody to be fair to and nowhere else to go: the order of submission, blocked by its head."""
    jct_s, preemptions, makespan_s = GOLDEN_SLICE["fifo"]
    found = run(str(SLICE), GPUS, policy)
    assert found.result.jct_s.mean == pytest.approx(jct_s, abs=0.001)
    assert found.result.preemptions == preemptions
    assert max(row.finished_at_s for row in found.rows) == pytest.approx(makespan_s)


GOLDEN_SLICE = {
    "fifo": (56317.908, 0, 1435934.0),
    "fifo-skip": (48715.108, 0, 1429495.0),
    "sjf": (35138.117, 0, 1428554.0),
    "srsf": (28517.296, 55, 1462119.0),
    "srtf": (28466.425, 61, 1461916.0),
}
"""Policy: mean JCT, preemptions, makespan; in seconds, by `reference`."""


@each_row("policy", sorted(GOLDEN_SLICE))
def test_the_reference_itself_stays_what_it_was(policy: str) -> None:
    """The reference gives the figures that it gave when it agreed with the published ones."""
    order, preempts, is_strict = ORDERS[policy]
    jobs = read_workload(str(SLICE), cluster=f"1x{GPUS}").jobs
    found = reference(jobs, GPUS, order, preempts=preempts, is_strict=is_strict)
    jct_s, preemptions, makespan_s = GOLDEN_SLICE[policy]
    assert found.jct_s == pytest.approx(jct_s, abs=0.001)
    assert (found.preemptions, found.makespan_s) == (preemptions, makespan_s)


@pytest.mark.slow
def test_the_slice_never_breaks_an_invariant() -> None:
    """The engine's invariants hold after every single event of a preemptive run."""
    jobs = read_workload(str(SLICE), cluster=f"1x{GPUS}").jobs
    options = RunOptions(policy="srsf", has_delays=False, saves=Saves.ON_REQUEST, check=True)
    workload = structs.replace(read_workload(str(SLICE), cluster=f"2x{GPUS // 2}"), jobs=jobs[:80])
    fitting = tuple(job for job in workload.jobs if job.gpus <= GPUS // 2)
    found = play(structs.replace(workload, jobs=fitting), options, clock=SystemClock())
    assert found.result.preemptions > 0
    assert found.result.jobs == len(fitting)


# --- published figures --------------------------------------------------------------------------

PUBLISHED = [
    ("cluster01", 64, "fifo", 144176.149, None, None),
    ("cluster01", 64, "srsf", 22159.126, None, None),
    ("cluster06", 128, "fifo", 81210.788, None, None),
    ("cluster06", 128, "srsf", 29251.870, None, None),
    ("cluster01", 64, "yarn", 144176.149, None, None),
    ("cluster06", 128, "yarn", 81210.788, None, None),
    ("cluster02", 128, "fifo", 174038.211, None, None),
    ("cluster02", 128, "fifo-skip", 49377.09, 26407.54, 5263038),
    ("cluster02", 128, "sjf", 35624.69, 12655.15, 5310316),
    ("cluster04", 640, "srsf", 20368.879, 386.816, 5175866),
]
"""Trace, GPUs, policy; mean JCT, mean queueing, makespan in seconds (PAI counts it from 1).

Tiresias: fifo and shortest-gpu. PAI: what it calls FIFO skips what does not fit.
"""

PREEMPTIONS = {("cluster04", "srsf"): 1429}
"""Trace and policy, where they are published."""

SMALL = [
    row
    for row in PUBLISHED
    if row[:3] in (("cluster01", 64, "srsf"), ("cluster02", 128, "fifo-skip"))
]
"""Those that every change is held to: one of each published simulator.

Of cluster02, the longest of the packaged traces, it is the policy that no other row has, with three
figures of PAI's. The slice holds `fifo` and `sjf` to a second simulator, job by job.
"""
OTHERS = [row for row in PUBLISHED if row not in SMALL]


def packaged(trace: str) -> str:
    """Where a small trace is: submission, length and GPUs of all its jobs."""
    return str(DATA / f"itp_{trace}.csv.gz")


def meets(
    file: str,
    trace: str,
    gpus: int,
    policy: str,
    jct_s: float,
    queueing_s: float | None,
    makespan_s: int | None,
) -> None:
    """Within 0.1 %, as two simulators with other rounding can be."""
    found = run(file, gpus, policy)
    assert found.result.jct_s.mean == pytest.approx(jct_s, rel=1e-3)
    if queueing_s is not None:
        assert found.result.queueing_s.mean == pytest.approx(queueing_s, rel=1e-3)
    if makespan_s is not None:
        last_s = max(row.finished_at_s for row in found.rows)
        assert last_s == pytest.approx(makespan_s, rel=1e-3)
    assert PREEMPTIONS.get((trace, policy)) in (None, found.result.preemptions)


@pytest.mark.slow
@pytest.mark.parametrize("row", SMALL, ids=lambda row: f"{row[0]}-{row[2]}")
def test_published_figures_of_small_traces_come_out(
    row: tuple[str, int, str, float, float | None, int | None],
) -> None:
    """Whoever runs the published simulators on these traces gets what we get, within 0.1 %."""
    meets(packaged(row[0]), *row)


@needs_traces
@pytest.mark.parametrize("trace", ["cluster01", "cluster02", "cluster06"])
def test_a_packaged_trace_is_the_published_one(trace: str) -> None:
    """Every job of it, in its order; only names and what no policy here reads are left out."""
    ours = read_workload(packaged(trace), cluster="1x128").jobs
    theirs = read_workload(f"elasticflow_itp/{trace}.csv.gz", cluster="1x128").jobs

    def told(jobs: tuple[TraceJob, ...]) -> list[tuple[float, float, int]]:
        return [(job.submit_s, job.duration_s, job.gpus) for job in jobs]

    assert told(ours) == told(theirs)


@needs_traces
@pytest.mark.skipif(not os.environ.get("ARYL_GOLDEN_ALL"), reason="ARYL_GOLDEN_ALL is not set")
@pytest.mark.slow
@pytest.mark.parametrize("row", OTHERS, ids=lambda row: f"{row[0]}-{row[2]}")
def test_published_figures_of_other_traces_come_out(
    row: tuple[str, int, str, float, float | None, int | None],
) -> None:
    """The same of all others; asked for by ARYL_GOLDEN_ALL."""
    meets(f"elasticflow_itp/{row[0]}.csv.gz", *row)


# --- Gavel's rounds -----------------------------------------------------------------------------


ROUNDS_TRACE = "shockwave/120_0.2_5_100_40_25_0-0.5-0.5_0.6-0.3-0.09-0.01_multigpu_dynamic.trace.gz"
NOTHING = TimesTaken(**dict.fromkeys(TimesTaken.__struct_fields__, 0.0))


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "jct_s", "makespan_s"),
    [
        ("las", 11274.117, 33207.663),
        ("themis-lp:round_s=120:spare=even", 11301.977, 31928.739),
    ],
)
def test_the_rounds_of_the_artefact_come_out(policy: str, jct_s: float, makespan_s: float) -> None:
    """Mean completion time and makespan are within 5 % of the artefact's own."""
    options = RunOptions(
        policy=policy,
        saves=Saves.ON_REQUEST,
        times=structs.replace(NOTHING, start_s=20.0),
        coalesce_s=0.0,
        engine={"min_runtime_s": 0.0, "resize_cooldown_s": 0.0},
    )
    workload = read_workload(ROUNDS_TRACE, cluster="1x32+0x8")
    found = play(workload, options, clock=SystemClock()).result
    assert found.jct_s.mean == pytest.approx(jct_s, rel=0.05)
    assert found.makespan_s == pytest.approx(makespan_s, rel=0.05)


# --- ElasticFlow's Figure 8(a) ------------------------------------------------------------------


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("row", [name for name, each in ROWS.items() if each.is_comparable])
def test_the_published_shares_of_jobs_in_time_come_out(row: str) -> None:
    """Whoever plays the figure with our engine meets as many deadlines, within 0.02."""
    found = play_task(task(row)).result.deadlines_met_ratio
    assert found == pytest.approx(ROWS[row].published, abs=0.02)


# --- reports of small runs ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_report_is_what_it_was(name: str) -> None:
    """Every figure to the last digit that is written."""
    assert report(name) == json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.mark.slow
def test_foresight_is_no_worse_than_aryl_where_nothing_is_known_yet() -> None:
    """On a day of load that nobody has seen before, jobs wait and take no longer than with `aryl`
    by more than its interval, and as many lent GPUs are used."""
    runs = {
        policy: [demo_result(policy, seed=seed) for seed in (1, 2, 3)] for policy in DEMO_POLICIES
    }
    for figure in ("queueing_s", "jct_s"):
        aryl, ours = (
            estimate([getattr(run, figure).mean for run in runs[policy]])
            for policy in DEMO_POLICIES
        )
        assert aryl.half_width is not None
        assert ours.mean <= aryl.mean + aryl.half_width
    lent = {policy: min(run.on_loan_gpu_ratio for run in each) for policy, each in runs.items()}
    assert lent["foresight"] >= 0.9 * lent["aryl"]
