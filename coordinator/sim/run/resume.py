"""A simulated cell that goes on where an engine is: its nodes, their workers, the work of its jobs.

The engine may be that of a live cell, from a copy of its state. Each simulated node begins as the
engine knows the node by its last report. Silent nodes stay silent, and loads stay as they were
measured last. A job ends when its estimate says so; a job without any estimate never ends by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from common.messages import DesiredState, WorkerOrder, WorkerPhase
from common.model import JobId, LeaseId, NodeName, NodeRole, ServiceName, WorkerKey, WorkerRange
from coordinator.engine.engine import Engine
from coordinator.engine.jobs import estimates
from coordinator.engine.state.events import GpuFact, NodeReported, TrespassFact, WorkerFact
from coordinator.engine.state.tables import JobEntry, NodeEntry, WorkerEntry
from coordinator.policies.contract.estimates import Source
from coordinator.sim.run.attempts import Saves, Truth
from coordinator.sim.run.cluster import Delays, NodeSpec
from coordinator.sim.run.runtime import RunRules
from coordinator.sim.run.simulation import Passes, Simulation
from coordinator.workloads.records import SpeedUp
from coordinator.workloads.shaping import linear

NEVER_S = 1e11
"""Work of a job whose end is unknown, in worker-seconds: beyond any horizon."""
_COMPUTING = (WorkerPhase.RUNNING, WorkerPhase.SUSPENDED)
_LIVE = (WorkerPhase.RESERVING, WorkerPhase.READY, *_COMPUTING, WorkerPhase.STOPPING)

Work = Callable[[JobEntry], float]
"""The work that a job has left, in worker-seconds of the reference GPU type."""


def estimated_left_s(job: JobEntry, now_s: float) -> tuple[float | None, str]:
    """(worker-seconds left, source) by the engine's estimate; None if only the default says it."""
    left_s, source = estimates.remaining_work(job, now_s)
    return (None if Source.DEFAULT in source else left_s), source


def resumed(
    engine: Engine,
    *,
    delays: Callable[[NodeEntry], Delays],
    left_s: Callable[[JobEntry], float | None],
    loan_pass_at_s: float,
    rules: RunRules | None = None,
    passes: Passes | None = None,
    holds_loads: bool = True,
) -> Simulation:
    """A simulation whose next event is the next one of the engine's cell.

    Args:
        engine: is changed by the run.
        delays: how long a node takes for each step.
        left_s: the work that a job has left, in worker-seconds; None: it is unknown.
        loan_pass_at_s: when the next loan pass is due without an event.
        holds_loads: the loads go on as they were measured last; else the caller measures them.
    """
    state = engine.state
    workers = _workers_by_node(engine)
    said = {node.name: _report(node, workers.get(node.name, ())) for node in state.nodes.values()}
    desired = {name: engine.desired(name) for name in state.nodes}
    simulation = Simulation(
        engine.settings,
        [_spec(node) for node in state.nodes.values()],
        rules=rules,
        passes=passes,
        keep_decisions=False,
        engine=engine,
    )
    for name, entry in state.nodes.items():
        is_up = entry.contact.is_heard and entry.role != NodeRole.LOST
        simulation.nodes[name].take_up(
            said[name], desired=desired[name], delays=delays(entry), is_up=is_up
        )
    running = _running(simulation, desired)

    def truth(job_id: JobId) -> Truth:
        job = state.jobs[job_id]
        left = left_s(job)
        return truth_of(job, NEVER_S if left is None else left, now_s=state.now_s)

    for job in state.live():
        simulation.runtime.go_on(job.job_id, truth(job.job_id), running.get(job.job_id, ()))
    simulation.runtime.truth = truth
    for name, node in simulation.nodes.items():
        node.set_off(desired[name])
    for service in state.services.values() if holds_loads else ():
        if service.load and service.unknown_since_s is None:
            period_s = engine.settings.loan_period_s
            loads = _as_before(loan_pass_at_s, period_s, service.load[-1].load)
            simulation.load(ServiceName(service.name), loads)
    simulation.go_on(loan_pass_at_s=loan_pass_at_s)
    return simulation


def truth_of(job: JobEntry, left_s: float, *, now_s: float) -> Truth:
    """The work of a job as a simulated one has it: done, saved and left, in worker-seconds."""
    unsaved_gpu_s = estimates.lost_if_preempted(job, now_s)
    unsaved_s = unsaved_gpu_s / job.spec.gpus_per_worker
    done_s = max(unsaved_s, estimates.attempt_worker_s(job, now_s))
    path = job.spec.checkpoint.path
    return Truth(
        work_s=done_s + left_s,
        speedup=_speed_up(job),
        gpus_per_worker=job.spec.gpus_per_worker,
        saves=Saves.NEVER if path is None else Saves.ON_REQUEST,
        path=path or f"/checkpoints/{job.job_id}",
        done_s=done_s,
        saved_s=done_s - unsaved_s,
        saved_at_s=now_s,
        unsaved_gpu_s=unsaved_gpu_s,
    )


def _speed_up(job: JobEntry) -> SpeedUp:
    """As `estimates.pace`: by its profile, else in proportion to its workers."""
    span: WorkerRange = job.spec.workers
    if not job.spec.profile.speedup:
        return linear(span)
    counts = range(span.min, span.max + 1)
    rates = tuple(job.spec.profile.rate(workers, base=span.min) for workers in counts)
    return SpeedUp(min_workers=span.min, rates=rates)


def _as_before(first_s: float, period_s: float, load: float) -> Iterator[tuple[float, float]]:
    """The same load for ever, measured just before each loan pass."""
    return ((first_s + turn * period_s, load) for turn in count())


def _workers_by_node(engine: Engine) -> dict[NodeName, tuple[WorkerEntry, ...]]:
    found: dict[NodeName, list[WorkerEntry]] = {}
    for job in engine.state.live():
        stores = () if job.store is None else (job.store,)
        for worker in (*job.workers.values(), *stores):
            found.setdefault(worker.node, []).append(worker)
    return {name: tuple(workers) for name, workers in found.items()}


def _running(
    simulation: Simulation, desired: dict[NodeName, DesiredState]
) -> dict[JobId, list[tuple[NodeName, WorkerOrder]]]:
    """The workers that compute or are suspended on nodes that are up, by job."""
    found: dict[JobId, list[tuple[NodeName, WorkerOrder]]] = {}
    for name, node in simulation.nodes.items():
        keys: set[WorkerKey] = set(node.keys(*_COMPUTING))
        for order in desired[name].workers if keys else ():
            if order.key in keys and not order.key.is_store and order.spec.prerun.gang is None:
                found.setdefault(order.key.job_id, []).append((name, order))
    return found


def _spec(node: NodeEntry) -> NodeSpec:
    return NodeSpec(
        name=node.name,
        home_pool=node.home_pool,
        gpu_type=node.gpu_type,
        gpus=len(node.gpus),
        service=node.service,
        rack=node.rack,
        labels=node.labels.reported,
        cpus=node.cpus,
        memory_bytes=node.memory_bytes,
    )


def _lease_id(node: NodeEntry) -> LeaseId | None:
    """The lease that a node holds, as far as its role shows it."""
    if node.lease is not None:
        return LeaseId(node.lease.lease_id)
    is_out = node.role in (NodeRole.ON_LOAN, NodeRole.VACATING)
    return node.homecoming.lease_id if is_out else None


def _report(node: NodeEntry, workers: tuple[WorkerEntry, ...]) -> NodeReported:
    """The facts that its last report must have had, by what the engine knows of the node."""
    return NodeReported(
        node=node.name,
        boot_id=node.boot_id,
        home_pool=node.home_pool,
        role=node.role,
        epoch=node.contact.epoch,
        generation=node.contact.generation,
        gpus=tuple(
            GpuFact(slot.uuid, slot.gpu_type, slot.health, slot.memory_bytes)
            for slot in node.gpus
            if not slot.is_gone
        ),
        service=node.service,
        rack=node.rack,
        labels=node.labels.reported,
        cpus=node.cpus,
        memory_bytes=node.memory_bytes,
        lease_id=_lease_id(node),
        workers=tuple(
            WorkerFact(key=worker.key, phase=worker.phase, endpoint=worker.endpoint)
            for worker in sorted(workers, key=lambda worker: worker.key)
            if worker.phase is not None and worker.phase in _LIVE
        ),
        trespasses=tuple(
            TrespassFact(pid, gpu_uuid) for gpu_uuid, pid in sorted(node.trespassed.items())
        ),
        detail=node.detail,
        is_server_down=node.is_server_down,
        ledger_error=node.ledger.error,
    )
