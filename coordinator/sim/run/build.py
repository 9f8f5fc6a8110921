"""Build a simulation from a workload and options.

The delays here come from the literature or are ours. A run without delays also turns off the
engine's own waits (`_at_once`).
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, structs

from common.errors import ConfigError
from common.model import JobId, Mode, ServiceName
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.engine.view import views
from coordinator.policies.registry import policy
from coordinator.sim.inputs.failure_sources import FailureSource, failing, that_may_fail
from coordinator.sim.inputs.infeasible_jobs import check_fits, check_limits, check_loans
from coordinator.sim.inputs.inputs import node_names, node_specs
from coordinator.sim.inputs.loads import for_ever
from coordinator.sim.run.cluster import Delays
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.runtime import RunRules, Saves
from coordinator.sim.run.simulation import Passes, Simulation, Submission
from coordinator.sim.run.wire import WireRules
from coordinator.workloads.pools import gpu_types, inference_types, node_sizes
from coordinator.workloads.records import (
    TraceJob,
    Workload,
    WorkloadJob,
)
from coordinator.workloads.shaping import (
    Curves,
    RuntimeModel,
    ShapeOptions,
    to_workload_jobs,
)
from coordinator.workloads.sizes import worker_size


class TimesTaken(Struct, frozen=True, kw_only=True):
    """The delays of a run, in seconds; see `Delays` and `RunRules`.

    With stop, save and start, `restart_s` makes up the 63 s of a preemption that Lyra, EuroSys'23,
    section 7.5 measured; how these 63 s divide is ours.
    """

    report_s: float = 0.5
    ready_s: float = 1.0
    start_s: float = 10.0
    suspend_s: float = 0.5
    resume_s: float = 0.5
    stop_s: float = 5.0
    checkpoint_s: float = 15.0
    drain_s: float = 20.0
    device_free_s: float = 5.0
    warm_up_s: float = 60.0
    restart_s: float = 33.0
    resize_s: float = 30.0

    def delays(self) -> Delays:
        """The delays of nodes."""
        names = Delays.__struct_fields__
        return Delays(**{name: getattr(self, name) for name in names})

    @property
    def startup_s(self) -> float:
        """Time of a gang on idle GPUs from the pass that starts it to its first step, and from its
        last step until that is known; both ends are reports.
        """
        return self.ready_s + self.report_s + self.start_s + self.report_s


PROGRESS_AFTER_S = 60.0
COALESCE_S = 0.1

GRACE_S = 30.0


class RunOptions(Struct, frozen=True, kw_only=True):
    """How a workload is played.

    knobs: changed beyond those in `policy`, which stays the name in results.
    times: the delays that `has_delays` uses.
    engine, service: settings other than the default ones.
    tells_progress: whether jobs report progress.
    has_locality: gangs of known models are slower where they are spread, see `workloads.models`.
    has_delays: nodes and jobs take realistic time; without, all is at once, as in the simulators of
        the literature, and the engine's own cooldowns are off too.
    saves, save_period_s: see `RunRules`.
    speedup, curves: how elastic jobs speed up, see `ShapeOptions`.
    is_oracle: estimates are the true running times; else they are learned.
    check: check the engine's invariants after every event.
    failures: the source of job failures. restarts: a job's own budget for them, if there are any
        (three attempts; the Philly study gives no number). prerun_s: length of the pre-run that
        jobs of several GPUs then ask for; None: they ask for none.
    idle_events: after this many facts, plus some for each job, in which no job ended and the work
        done and kept did not grow, a run makes no progress (`stall_detection.Headway`).
    """

    policy: str
    seed: int = 1
    has_delays: bool = True
    loss_ratio: float = 0.0
    crashes: tuple[Crash, ...] = ()
    saves: Saves | None = None
    save_period_s: float = 1800.0
    speedup: RuntimeModel = RuntimeModel.LINEAR
    curves: Curves | None = None
    coalesce_s: float | None = None
    pass_period_s: float | None = None
    is_oracle: bool = True
    check: bool = False
    knobs: tuple[str, ...] = ()
    times: TimesTaken = TimesTaken()
    engine: dict[str, Any] = {}
    service: dict[str, Any] = {}
    tells_progress: bool = True
    has_locality: bool = False
    failures: FailureSource = FailureSource.NONE
    restarts: int = 2
    prerun_s: float | None = None
    idle_events: int = 50_000

    @property
    def policy_text(self) -> str:
        """The policy with all its knobs, as `bundles.policy` reads it."""
        return ":".join((self.policy, *self.knobs))


class Stage:
    """The simulation of a workload, before it begins."""

    def __init__(self, workload: Workload, options: RunOptions) -> None:
        self.loads = workload.loads
        self.services = tuple(ServiceName(load.name) for load in workload.loads)
        names = self.services or (ServiceName("inference"),)
        self.specs = node_specs(workload.nodes, names)
        self.nodes_of = {
            name: [spec for spec in self.specs if spec.service == name] for name in names
        }
        _check_ranges(workload)
        self.jobs, self.names = _shaped(workload, options)
        if options.failures != FailureSource.NONE:
            self.jobs = that_may_fail(
                self.jobs, restarts=options.restarts, prerun_s=options.prerun_s
            )
        check_fits(self.jobs, self.names, self.specs, workload.source)
        self.settings = self._settings(options)
        check_loans(self.jobs, self.names, self.specs, workload.source, self.settings)
        check_limits(
            self.jobs,
            self.names,
            self.specs,
            workload.source,
            views(self.settings),
            lends=bool(self.loads),
        )
        self.passes = _passes(workload, options)
        self.sim = Simulation(
            self.settings,
            self.specs,
            delays=options.times.delays() if options.has_delays else Delays(),
            rules=_rules(options),
            wire=WireRules(loss_ratio=options.loss_ratio, seed=options.seed),
            passes=self.passes,
            check=options.check,
            keep_decisions=False,
        )
        for load in self.loads:
            name = ServiceName(load.name)
            self.sim.load(name, for_ever(load, len(self.nodes_of[name])))
        self._crash(options)
        self.sim.submit(_submission(job) for job in self.jobs)
        self.sim.failing = failing(self.sim, self.jobs, options.failures, seed=options.seed)

    def _crash(self, options: RunOptions) -> None:
        for crash in options.crashes:
            if crash.node not in self.sim.nodes:
                raise ConfigError(
                    f"crash: no node {crash.node}; there are {node_names(self.specs)}"
                )
        self.sim.crash(options.crashes)

    def _settings(self, options: RunOptions) -> EngineSettings:
        """Without delays a node is home at once, and nothing has to cool down."""
        services = tuple(
            ServiceSettings(name=name, capacity_per_node=1.0, mode=Mode.ACT)
            for name in self.services
            if self.nodes_of[name]
        )
        settings = EngineSettings(
            policy=options.policy_text,
            services=services,
            finished_jobs_kept=max(1, len(self.jobs)),
        )
        if not options.has_delays:
            settings = _at_once(settings)
        changed = (structs.replace(each, **options.service) for each in settings.services)
        return structs.replace(settings, services=tuple(changed), **options.engine)


def may_lend(options: RunOptions) -> bool:
    """Whether the policy of a run lends nodes at all."""
    return policy(options.policy_text).lends


def never_lends(options: RunOptions) -> str:
    """Why no node is ever lent, whatever load and jobs are, in a sentence; empty where some may be.

    A deadline that the way home does not fit into is no mistake: a sweep shows where loans begin.
    """
    if not may_lend(options):
        return ""
    service = ServiceSettings(name=ServiceName("inference"), capacity_per_node=1.0)
    settings = EngineSettings(services=(service,))
    if not options.has_delays:
        settings = _at_once(settings)
    settings = structs.replace(settings, **options.engine)
    service = structs.replace(settings.services[0], **options.service)
    way_s, deadline_s = settings.return_s(service), service.reclaim_deadline_s
    if way_s <= deadline_s:
        return ""
    return (
        f"service.reclaim_deadline_s={deadline_s:g} lends nothing: a lent node is home within "
        f"{way_s:g} s at worst (lease_ttl_s, max_grace_s, device_free_p99_s, warm_up_p99_s)"
    )


def _at_once(settings: EngineSettings) -> EngineSettings:
    """The settings without any wait: for runs without delays."""
    services = tuple(
        structs.replace(
            service, max_grace_s=0.0, device_free_p99_s=0.0, warm_up_p99_s=0.0, hold_off_s=0.0
        )
        for service in settings.services
    )
    return structs.replace(
        settings,
        services=services,
        lease_ttl_s=1.0,
        resize_cooldown_s=0.0,
        min_runtime_s=0.0,
        start_p99_s=0.0,
        restart_p99_s=0.0,
        resize_p99_s=0.0,
    )


# --- what goes in -------------------------------------------------------------------------------


def _shaped(
    workload: Workload, options: RunOptions
) -> tuple[tuple[WorkloadJob, ...], dict[JobId, str]]:
    """Jobs of the simulator, numbered so that ids sort in order of submission; and their names.

    With an oracle every job has a name of its own: a history by name would override its declared
    runtime.
    """
    numbered = tuple(
        structs.replace(
            job,
            job_id=f"{number:07d}",
            name="" if options.is_oracle else job.name,
            has_checkpoints=_saves_when_asked(job, options),
        )
        for number, job in enumerate(workload.jobs)
    )
    shape = ShapeOptions(
        nodes=node_sizes(workload.nodes),
        training_gpus=gpu_types(workload.nodes)[0],
        inference_gpus=inference_types(workload.nodes),
        runtime=options.speedup,
        curves=options.curves,
        grace_s=GRACE_S if options.has_delays else 0.0,
        is_oracle=options.is_oracle,
        has_locality=options.has_locality,
    )
    _check_curves(workload, options)
    names = {JobId(f"{number:07d}"): job.job_id for number, job in enumerate(workload.jobs)}
    return to_workload_jobs(numbered, shape), names


def _saves_when_asked(job: TraceJob, options: RunOptions) -> bool:
    """A job behaves as it declares, also where the run declares it in its place."""
    return job.has_checkpoints if options.saves is None else options.saves == Saves.ON_REQUEST


def _check_curves(workload: Workload, options: RunOptions) -> None:
    """Raises:
    ConfigError: no elastic job has a measured curve, so that all of them would be linear.
    """
    elastic = [job for job in workload.jobs if job.is_elastic]
    if options.speedup != RuntimeModel.TABLE or not elastic:
        return
    curves = options.curves or {}
    if not any((job.model, job.batch_size or 0) in curves for job in elastic):
        first = elastic[0]
        raise ConfigError(
            f"speedup: none of the {len(elastic)} elastic jobs has a curve of its model and batch "
            f"size; the first is {first.model or 'of no known model'}, batch {first.batch_size}"
        )


def _submission(job: WorkloadJob) -> Submission:
    return Submission(
        at_s=job.at_s,
        job_id=job.job_id,
        spec=job.spec,
        work_s=job.work_s,
        speedup=job.speedup,
        tenant=job.tenant,
        user=job.user,
    )


def _rules(options: RunOptions) -> RunRules:
    if not options.has_delays:
        # Jobs report progress at once: a preemptive order then knows the remaining work exactly.
        return RunRules(
            saves=options.saves,
            save_period_s=options.save_period_s,
            progress_after_s=1.0 if options.tells_progress else None,
        )
    # An oracle is better than the pace that the engine sees, whose first report includes the
    # warm-up.
    is_silent = options.is_oracle or not options.tells_progress
    return RunRules(
        saves=options.saves,
        save_period_s=options.save_period_s,
        restart_s=options.times.restart_s,
        resize_s=options.times.resize_s,
        progress_after_s=None if is_silent else PROGRESS_AFTER_S,
        is_progress_repeated=True,
    )


def _passes(workload: Workload, options: RunOptions) -> Passes:
    coalesce_s = options.coalesce_s
    if coalesce_s is None:
        coalesce_s = COALESCE_S if options.has_delays else 0.0
    return Passes(
        coalesce_s=coalesce_s, grid_s=workload.pass_period_s, period_s=options.pass_period_s
    )


def _check_ranges(workload: Workload) -> None:
    """Raises:
    ConfigError: a job that could not have had its GPUs with a number of workers in its range. Where
        it states the size of a worker the reader has seen to it; else that size is the cluster's.
    """
    nodes = node_sizes(workload.nodes)
    for job in workload.jobs:
        if job.min_workers is None or job.max_workers is None or job.gpus_per_worker is not None:
            continue
        of_node = nodes.gpus_for(job.gpu_types, job.gpus)
        size = worker_size(job.gpus, of_node)
        if not job.min_workers <= job.gpus // size <= job.max_workers:
            raise ConfigError(
                f"{workload.source.place(job.job_id)}job {job.job_id}: {job.gpus} GPUs are "
                f"{job.gpus // size} x {size} on nodes of {of_node}, expected {job.min_workers} to "
                f"{job.max_workers} workers; gpus_per_worker sets the GPUs of one"
            )
