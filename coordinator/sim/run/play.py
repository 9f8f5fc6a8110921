"""Play one run: a workload, a cluster, a policy and options in; its figures out.

Everything but `wall_s` and `peak_rss_bytes` follows from the arguments alone: the same arguments
give the same bytes on every machine, whatever PYTHONHASHSEED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from operator import attrgetter

from msgspec import Struct, structs

from common.clock import Clock
from common.model import JobState
from coordinator.engine.state.accounting import (
    Durations,
    Quantiles,
    deadlines,
    durations,
    quantiles,
)
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.registry import policy
from coordinator.sim.report.fairness import (
    AppFairness,
    FinishTimeFairness,
    fairness,
    of_several_jobs,
    ratios,
)
from coordinator.sim.report.fairness_input import app_of, lived, training_gpus
from coordinator.sim.report.reclaims import Toll, TollKeeper
from coordinator.sim.report.samples import Sample, ratio, samples, serving_of
from coordinator.sim.report.series import Point, Recorder
from coordinator.sim.report.waits import Waits, waits_by_size
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.fault_injection import FailureFigures
from coordinator.sim.run.process_memory import PeakMemory, collecting_rarely, let_go
from coordinator.sim.run.stall_detection import Headway, check_ended
from coordinator.workloads.records import Workload


class OnLoanJobs(Struct, frozen=True, kw_only=True):
    """The jobs that ran on a lent node, even for a while (Lyra, EuroSys'23, table 7).

    Times are None where no job did: a wait of zero seconds would be wrong there.
    """

    jobs: int = 0
    queueing_s: Durations = Durations()
    jct_s: Durations = Durations()


class RunResult(Struct, frozen=True, kw_only=True):
    """One run in numbers; seconds are simulated, but for `wall_s`.

    Ratios of GPUs are over the span of submissions; the other figures over the whole run.

    scenario, swept: what made it other than its policy says; empty where nothing did.

    jct_s: finished - submitted. queueing_s: submitted to first start and every later wait.
    training_gpu_ratio, on_loan_gpu_ratio: GPUs held over GPUs there.
    overall_gpu_ratio: those and GPUs that serve, over all GPUs.
    preemptions: of jobs that had run. preempted_jobs_ratio: jobs that had one, over all jobs.
    lost_gpu_s: GPU-seconds of computing that were thrown away.
    jct_bound_s: no schedule has a lower mean JCT of the jobs that finished: their mean running time
        alone, at most workers.
    reclaim: what taking nodes back did to jobs. on_loan_jobs: those that ran on lent nodes.
    events: facts that the engine took.
    makespan_s: from the first submission to the end of the last job.
    deadlines_met_ratio: of the jobs that have a deadline; None where none has.
    promised, promises_missed: jobs that started with their deadline promised to them; those of them
        that did not succeed in time. None where none was promised anything.
    jobs_rejected: refused as their deadline could not be promised; they count in `jobs`, among the
        missed deadlines, and in no time.
    jobs_failed: without success in the end; they count in `jobs` and in no time.
    failures: what jobs that failed by themselves cost, where a source of failures is on.
    waits: what jobs waited for by the size of their gangs, where the policy says so.
    finish_time_fairness: how much longer apps took than on a share of their own (`fairness`).
    suspensions, migrations: turns that ended, and moves of running jobs to other GPUs. suspended_s:
        how long jobs were suspended; it is in `jct_s` and not in `queueing_s`.
    apps: rho of the apps of several jobs, the worst first, `fairness.APPS_TOLD` at most.
    skipped_zero_gpus, skipped_not_run: rows of the trace that were left out, by their reason.
    gap_closed_ratio: part of the way in mean JCT from `sjf`, on the same jobs, to the bound
        (`compare.with_gaps`); None where sjf was not played beside it or is at the bound.
    """

    policy: str
    seed: int
    jobs: int
    queueing_s: Quantiles
    jct_s: Quantiles
    training_gpu_ratio: float
    overall_gpu_ratio: float
    on_loan_gpu_ratio: float
    preemptions: int
    preempted_jobs_ratio: float
    lost_gpu_s: float
    reclaims: int
    reclaims_late: int
    jct_bound_s: float
    events: int
    wall_s: float
    peak_rss_bytes: int
    reclaim: Toll = Toll()
    on_loan_jobs: OnLoanJobs = OnLoanJobs()
    makespan_s: float = 0.0
    deadlines_met_ratio: float | None = None
    promised: int | None = None
    promises_missed: int | None = None
    finish_time_fairness: FinishTimeFairness = FinishTimeFairness()
    jobs_rejected: int = 0
    jobs_failed: int = 0
    failures: FailureFigures = FailureFigures()
    waits: Waits = {}
    suspensions: int = 0
    suspended_s: Quantiles = Quantiles()
    migrations: int = 0
    apps: tuple[AppFairness, ...] = ()
    skipped_zero_gpus: int = 0
    skipped_not_run: int = 0
    gap_closed_ratio: float | None = None
    scenario: str = ""
    swept: dict[str, str] = {}


class JobRow(Struct, frozen=True, kw_only=True):
    """One job that succeeded; `gpus` are those of its base gang on the reference type.

    app: the group that it belongs to, or its own id. rho: finish-time fairness of that app.
    deadline_s: after its submission; None without one. is_promised: it was when it started.
    tenant: whose it was.
    """

    job_id: str
    submitted_at_s: float
    started_at_s: float
    finished_at_s: float
    queueing_s: float
    jct_s: float
    gpus: int
    min_workers: int
    max_workers: int
    preemptions: int
    resizes: int
    was_on_loan: bool
    suspensions: int
    suspended_s: float
    migrations: int
    app: str
    rho: float | None
    deadline_s: float | None = None
    is_promised: bool = False
    tenant: str = ""


class Run(Struct, frozen=True, kw_only=True):
    """A run with all that plots and tables need.

    fingerprint: equal for two runs if their rows are, to the millisecond; it stays where the rows
        do not. Empty where no job succeeded.
    """

    result: RunResult
    rows: tuple[JobRow, ...]
    samples: tuple[Sample, ...]
    fingerprint: str = ""


Told = Callable[[int, int], None]
"""(jobs that ended, events so far)."""


@collecting_rarely()
def play(workload: Workload, options: RunOptions, *, clock: Clock, told: Told | None = None) -> Run:
    """Play a workload to its last job.

    Raises:
        ConfigError: an unknown policy, a job that fits nowhere, or jobs that never ended.
    """
    policy(options.policy_text)
    began_s = clock.now_s()
    memory = PeakMemory()
    stage = Stage(workload, options)
    recorder = Recorder(stage.sim.engine, length_s=workload.length_s, progress=told)
    keeper = TollKeeper(stage.sim.engine)

    def watch(now_s: float) -> None:
        keeper.look()  # at what the last event left
        recorder.watch(now_s)

    stage.sim.watch, stage.sim.hear = watch, keeper.hear
    stage.sim.run_jobs(Headway(stage, options))
    recorder.finish(stage.sim.loop.now_s)
    check_ended(stage, options)
    jobs = list(lived(stage, options))
    rhos = ratios(jobs, training_gpus(stage))
    result = _result(workload, options, stage, recorder)
    rows = tuple(_rows(stage, rhos))
    run = Run(
        result=structs.replace(
            result,
            reclaim=keeper.toll(),
            finish_time_fairness=fairness(rhos),
            apps=of_several_jobs(jobs, rhos),
            wall_s=clock.now_s() - began_s,
            peak_rss_bytes=memory.peak_bytes(),
        ),
        rows=rows,
        samples=samples(stage, recorder.points),
        fingerprint=fingerprint_of(rows),
    )
    let_go(stage.sim.loop, stage.sim)
    return run


ASKED = ("deadline_s", "is_promised", "tenant")
LIFE = tuple(name for name in JobRow.__struct_fields__ if name not in ASKED)
"""The outcome of a job without its options and labels: these may differ among equal outcomes."""


def fingerprint_of(rows: Sequence[JobRow]) -> str:
    """A hash of all reported facts of each job; see `Run`."""
    if not rows:
        return ""
    digest, life = sha256(), attrgetter(*LIFE)
    for row in sorted(rows, key=lambda row: row.job_id):
        told = [f"{value:.3f} " if isinstance(value, float) else f"{value} " for value in life(row)]
        digest.update("".join(told).encode())
    return digest.hexdigest()


#   --- results ------------------------------------------------------------------------------------


def _is_done(job: JobEntry) -> bool:
    return job.state == JobState.SUCCEEDED


def _result(workload: Workload, options: RunOptions, stage: Stage, recorder: Recorder) -> RunResult:
    state = stage.sim.engine.state
    counters, jobs = state.counters, [job for job in state.jobs.values() if _is_done(job)]
    promised = [job for job in state.jobs.values() if job.is_promised]
    kept = deadlines(promised, stage.sim.loop.now_s)
    assert recorder.at_length is not None
    usage = recorder.at_length.usage
    done = {job.job_id for job in jobs}
    bounds = [job.work_s / max(job.speedup.rates) for job in stage.jobs if job.job_id in done]
    return RunResult(
        policy=options.policy,
        seed=options.seed,
        jobs=len(state.jobs),
        jobs_rejected=counters.jobs_rejected,
        jobs_failed=counters.jobs_failed,
        failures=stage.sim.failing.figures() if stage.sim.failing else FailureFigures(),
        waits=waits_by_size(state.jobs.values()),
        queueing_s=quantiles([job.wait.queueing_s for job in jobs]),
        jct_s=quantiles(_jcts(jobs)),
        training_gpu_ratio=ratio(usage.training_held_gpu_s, usage.training_gpu_s),
        overall_gpu_ratio=_overall(stage, recorder.at_length),
        on_loan_gpu_ratio=ratio(usage.on_loan_held_gpu_s, usage.on_loan_gpu_s),
        preemptions=counters.preemptions,
        preempted_jobs_ratio=ratio(
            sum(job.counts.preemptions > 0 for job in jobs), len(state.jobs)
        ),
        lost_gpu_s=stage.sim.runtime.lost_gpu_s,
        reclaims=counters.reclaims,
        reclaims_late=counters.reclaims_late,
        jct_bound_s=sum(bounds) / len(bounds) if bounds else 0.0,
        on_loan_jobs=_on_loan(jobs),
        makespan_s=_makespan_s(jobs),
        deadlines_met_ratio=_deadlines_met(state.jobs.values(), stage.sim.loop.now_s),
        promised=len(promised) or None,
        promises_missed=kept.count(False) if promised else None,
        suspensions=counters.suspensions,
        suspended_s=quantiles([job.suspension.total_s for job in jobs]),
        migrations=counters.migrations,
        skipped_zero_gpus=workload.source.skipped_zero_gpus,
        skipped_not_run=workload.source.skipped_not_run,
        events=stage.sim.events,
        wall_s=0.0,
        peak_rss_bytes=0,
    )


def _jcts(jobs: Iterable[JobEntry]) -> list[float]:
    return [(job.finished_at_s or 0.0) - job.submitted_at_s for job in jobs]


def _makespan_s(jobs: Sequence[JobEntry]) -> float:
    ended = [job.finished_at_s for job in jobs if job.finished_at_s is not None]
    return max(ended) - min(job.submitted_at_s for job in jobs) if ended else 0.0


def _deadlines_met(jobs: Iterable[JobEntry], now_s: float) -> float | None:
    """The fraction of jobs with a deadline that succeeded in time; rejected ones did not."""
    met = deadlines(jobs, now_s)
    return sum(met) / len(met) if met else None


def _on_loan(jobs: Iterable[JobEntry]) -> OnLoanJobs:
    guests = [job for job in jobs if job.was_on_loan]
    return OnLoanJobs(
        jobs=len(guests),
        queueing_s=durations([job.wait.queueing_s for job in guests]),
        jct_s=durations(_jcts(guests)),
    )


def _overall(stage: Stage, end: Point) -> float:
    """GPUs held by training anywhere, and GPUs that serve, over all GPUs."""
    gpus = sum(spec.gpus for spec in stage.specs)
    serving_gpu_s = sum(service.gpu_s(end.at_s) for service in serving_of(stage))
    held_gpu_s = end.usage.training_held_gpu_s + end.usage.on_loan_held_gpu_s
    return ratio(held_gpu_s + serving_gpu_s, gpus * end.at_s)


def _rows(stage: Stage, rhos: Mapping[str, float]) -> Iterator[JobRow]:
    for job in filter(_is_done, stage.sim.engine.state.jobs.values()):
        assert job.started_at_s is not None
        assert job.finished_at_s is not None
        name = stage.names[job.job_id]
        yield JobRow(
            job_id=name,
            submitted_at_s=job.submitted_at_s,
            started_at_s=job.started_at_s,
            finished_at_s=job.finished_at_s,
            queueing_s=job.wait.queueing_s,
            jct_s=job.finished_at_s - job.submitted_at_s,
            gpus=job.spec.base_demand_gpus,
            min_workers=job.spec.workers.min,
            max_workers=job.spec.workers.max,
            preemptions=job.counts.preemptions,
            resizes=job.counts.resizes,
            was_on_loan=job.was_on_loan,
            suspensions=job.counts.suspensions,
            suspended_s=job.suspension.total_s,
            migrations=job.counts.migrations,
            app=app_of(job, name),
            rho=rhos.get(app_of(job, job.job_id)),
            deadline_s=job.spec.deadline_s,
            is_promised=job.is_promised,
            tenant=job.tenant,
        )
