"""Published figures of Tiresias' simulator, and a second simulator of its queues, against ours.

Origin: `dlas-gpu` of SymbioticLab's simulator (scheme `count`, whole seconds) on the ITP traces of
microsoft/elasticflow-traces. Its code has three queues, left at 3250 and at 7200 GPU-s. The two
small traces and the slice are packaged; the large ones are read where ARYL_TRACES names their
directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import pytest
from msgspec import Struct, structs

from common.clock import SystemClock
from coordinator.sim.inputs.inputs import read_workload
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import Run, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import TraceJob
from tests.tables import each_row

DATA = Path(__file__).parents[1] / "data" / "sim"
SLICE = DATA / "itp_slice.csv"
GPUS = 64
LIMITS = (3250.0, 7200.0)
KNOBS = "tiresias:limits=3250/7200"
SOME = 120
"""So many jobs of the slice wait, are demoted and are stopped in every order of the queues."""

needs_traces = pytest.mark.skipif(
    not os.environ.get("ARYL_TRACES"), reason="ARYL_TRACES names no directory of full traces"
)


def run(trace: str, gpus: int, policy: str, *, check: bool = False, jobs: int | None = None) -> Run:
    """A trace, or its first jobs, on one pool of GPUs; nothing takes time, preemption is free."""
    workload = read_workload(trace, cluster=f"1x{gpus}+0x8")
    workload = structs.replace(workload, jobs=workload.jobs[:jobs])
    options = RunOptions(policy=policy, has_delays=False, saves=Saves.ON_REQUEST, check=check)
    return play(workload, options, clock=SystemClock())


# --- the second opinion -------------------------------------------------------------------------


class Outcome(Struct, frozen=True):
    """What the reference says of a schedule."""

    jct_s: float
    queueing_s: float
    preemptions: int
    ended_at_s: float


class Job(Struct):
    """A job of the reference."""

    number: int
    trace: TraceJob
    ran_s: float = 0.0
    runs: bool = False
    first_s: float = inf


Sort = Callable[[Job], tuple[float, ...]]


class Reference:
    """Queues over one pool of GPUs, event by event: no engine, no nodes, no snapshot.

    sort: order within a queue; None keeps the order of entry and puts who runs before who waits.
    mixes_units: seconds are taken from GPU-seconds, and the next crossing is a whole second.
    """

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        gpus: int,
        *,
        limits: tuple[float, ...] = LIMITS,
        sort: Sort | None = None,
        mixes_units: bool = False,
    ) -> None:
        self._coming = [Job(number, job) for number, job in enumerate(jobs)]
        self._gpus, self._limits = gpus, limits
        self._sort, self._mixes_units = sort, mixes_units
        self._queues: list[list[Job]] = [[] for _ in range(len(limits) + 1)]
        self._now_s = self._jct_s = self._queueing_s = 0.0
        self._preemptions = 0

    def play(self) -> Outcome:
        """Run to the last job."""
        count = len(self._coming)
        while self._coming or any(self._queues):
            self._advance(min(self._next_event_s(), self._next_crossing_s()))
            self._schedule()
        return Outcome(
            self._jct_s / count, self._queueing_s / count, self._preemptions, self._now_s
        )

    def _next_event_s(self) -> float:
        ends = [
            self._now_s + job.trace.duration_s - job.ran_s
            for queue in self._queues
            for job in queue
            if job.runs
        ]
        return min([*ends, *(job.trace.submit_s for job in self._coming[:1])])

    def _next_crossing_s(self) -> float:
        return min(
            (
                self._now_s + self._left_s(job, limit)
                for queue, limit in zip(self._queues, self._limits, strict=False)
                for job in queue
                if job.runs
            ),
            default=inf,
        )

    def _left_s(self, job: Job, limit: float) -> float:
        if self._mixes_units:
            return (limit - job.ran_s) // job.trace.gpus
        return limit / job.trace.gpus - job.ran_s

    def _advance(self, next_s: float) -> None:
        for queue in self._queues:
            for job in queue:
                if job.runs:
                    job.ran_s += next_s - self._now_s
                else:
                    self._queueing_s += next_s - self._now_s
        self._now_s = next_s
        for queue in self._queues:
            ended = [job for job in queue if job.runs and job.ran_s >= job.trace.duration_s - 1e-6]
            self._jct_s += sum(next_s - job.trace.submit_s for job in ended)
            queue[:] = [job for job in queue if job not in ended]
        while self._coming and self._coming[0].trace.submit_s <= next_s:
            self._queues[0].append(self._coming.pop(0))
        demoted = [
            (job.number, place, job)
            for place, limit in enumerate(self._limits)
            for job in self._queues[place]
            if job.runs and job.ran_s * job.trace.gpus >= limit - 1e-6
        ]
        for _, place, job in sorted(demoted, key=lambda each: each[0]):
            self._queues[place].remove(job)
            self._queues[place + 1].append(job)

    def _schedule(self) -> None:
        free = self._gpus
        for queue in self._queues:
            if self._sort is not None:
                queue.sort(key=self._sort)
            for job in queue:
                fits = job.trace.gpus <= free
                free -= job.trace.gpus if fits else 0
                self._preemptions += job.runs and not fits
                job.runs = fits
                if fits:
                    job.first_s = min(job.first_s, self._now_s)
            if self._sort is None:
                queue.sort(key=lambda job: not job.runs)


def by_first_start(job: Job) -> tuple[float, ...]:
    """The paper's order."""
    return (job.first_s, job.number)


def by_running(job: Job) -> tuple[float, ...]:
    """The same, whoever runs first."""
    return (not job.runs, job.first_s, job.number)


MODES: dict[str, tuple[Sort | None, bool]] = {
    ":line=entry:mixes_units=true": (None, True),
    ":line=entry": (None, False),
    ":line=first-start": (by_first_start, False),
    ":line=running": (by_running, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", sorted(MODES))
def test_the_slice_goes_as_a_second_simulator_says(mode: str) -> None:
    """On one pool of GPUs every order of the queues gives the reference's schedule."""
    sort, mixes_units = MODES[mode]
    jobs = read_workload(str(SLICE), cluster=f"1x{GPUS}").jobs[:SOME]
    expected = Reference(jobs, GPUS, sort=sort, mixes_units=mixes_units).play()
    found = run(str(SLICE), GPUS, KNOBS + mode, jobs=SOME)
    assert found.result.jct_s.mean == pytest.approx(expected.jct_s, rel=1e-9)
    assert found.result.queueing_s.mean == pytest.approx(expected.queueing_s, rel=1e-9)
    assert found.result.preemptions == expected.preemptions
    ended_at_s = max(row.finished_at_s for row in found.rows)
    assert ended_at_s == pytest.approx(expected.ended_at_s, rel=1e-9)


GOLDEN_SLICE = {
    ":line=entry:mixes_units=true": (61576.692, 182, 1456458.0),
    ":line=entry": (61239.274, 194, 1426419.0),
    ":line=first-start": (37381.458, 220, 1431779.0),
    ":line=running": (42785.599, 112, 1438646.0),
}
"""Knobs: mean JCT, preemptions, the last end; in seconds, by `Reference`."""


@each_row("mode", sorted(MODES))
def test_the_reference_itself_stays_what_it_was(mode: str) -> None:
    """The reference gives the figures that it gave when it agreed with the published ones."""
    sort, mixes_units = MODES[mode]
    jobs = read_workload(str(SLICE), cluster=f"1x{GPUS}").jobs
    found = Reference(jobs, GPUS, sort=sort, mixes_units=mixes_units).play()
    jct_s, preemptions, ended_at_s = GOLDEN_SLICE[mode]
    assert found.jct_s == pytest.approx(jct_s, abs=0.001)
    assert found.preemptions == preemptions
    assert found.ended_at_s == pytest.approx(ended_at_s, abs=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tiresias", "tiresias-gittins"])
def test_the_slice_never_breaks_an_invariant(policy: str) -> None:
    """The engine's invariants hold after every single event, on one pool and with promotions."""
    found = run(str(SLICE), GPUS, f"{policy}:promote=2", check=True, jobs=140)
    assert found.result.preemptions > 0
    assert found.result.jobs == len(found.rows) == 140


# --- published figures --------------------------------------------------------------------------

PUBLISHED = {
    ("cluster01", 64): (29812.344, None, None),
    ("cluster06", 128): (38548.362, None, None),
    ("cluster02", 128): (26896.731, None, None),
    ("cluster04", 640): (21363.479, 1381.416, 6712),
}
"""Trace, GPUs: mean JCT and mean queueing in seconds, preemptions."""

SMALL = [("cluster01", 64), ("cluster06", 128)]
LARGE = [row for row in PUBLISHED if row not in SMALL]
QUICK = ("cluster06", 128)
"""The one that our own simulator plays in less time."""
SLOW = [row for row in PUBLISHED if row != QUICK]


def packaged(trace: str) -> str:
    """Where a small trace is."""
    return str(DATA / f"itp_{trace}.csv.gz")


def reference_meets(file: str, row: tuple[str, int]) -> None:
    """To the last digit printed."""
    jobs = read_workload(file, cluster=f"1x{row[1]}").jobs
    found = Reference(jobs, row[1], mixes_units=True).play()
    jct_s, queueing_s, preemptions = PUBLISHED[row]
    assert found.jct_s == pytest.approx(jct_s, abs=0.001)
    assert queueing_s is None or found.queueing_s == pytest.approx(queueing_s, abs=0.001)
    assert preemptions in (None, found.preemptions)


@pytest.mark.parametrize("row", SMALL, ids=lambda row: str(row[0]))
def test_the_reference_meets_published_figures(row: tuple[str, int]) -> None:
    """The second simulator with the published one's faults prints its figures."""
    reference_meets(packaged(row[0]), row)


@needs_traces
@pytest.mark.parametrize("row", LARGE, ids=lambda row: str(row[0]))
def test_the_reference_meets_published_figures_of_large_traces(row: tuple[str, int]) -> None:
    """The same of the traces that are not packaged."""
    reference_meets(f"elasticflow_itp/{row[0]}.csv.gz", row)


def meets(file: str, trace: str, gpus: int) -> None:
    """To the last digit printed, preemptions too where they are published."""
    found = run(file, gpus, f"{KNOBS}:line=entry:mixes_units=true")
    jct_s, queueing_s, preemptions = PUBLISHED[trace, gpus]
    assert found.result.jct_s.mean == pytest.approx(jct_s, abs=0.001)
    assert queueing_s is None or found.result.queueing_s.mean == pytest.approx(
        queueing_s, abs=0.001
    )
    assert preemptions in (None, found.result.preemptions)


@pytest.mark.slow
def test_the_published_figures_of_a_small_trace_come_out() -> None:
    """Whoever runs the published simulator on this trace gets what we get."""
    meets(packaged(QUICK[0]), *QUICK)


@needs_traces
@pytest.mark.skipif(not os.environ.get("ARYL_GOLDEN_ALL"), reason="ARYL_GOLDEN_ALL is not set")
@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW, ids=lambda row: str(row[0]))
def test_published_figures_of_other_traces_come_out(row: tuple[str, int]) -> None:
    """The same of the traces that take longer; asked for by ARYL_GOLDEN_ALL."""
    meets(f"elasticflow_itp/{row[0]}.csv.gz", *row)
