"""Reads the engine's state into samples, at each scrape. The only metrics module that knows it."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from common.messages import GpuHealth
from common.model import JobState, Mode, NodeName, NodeRole, Pool, ServiceName
from common.monitoring.families import Scrape
from coordinator.engine.engine import Engine
from coordinator.engine.loans import unknown_loads
from coordinator.engine.state import loan_outcome
from coordinator.engine.state.settings import ServiceSettings
from coordinator.engine.state.tables import ClusterState, LoanEntry, NodeEntry

LIVE_STATES = (
    JobState.PENDING, JobState.STARTING, JobState.RUNNING, JobState.RESIZING, JobState.PREEMPTING,
    JobState.SUSPENDED,
)  # fmt: skip
TENANTS_MAX = 200
"""Tenants with series of their own: those of the settings first, then by name."""
OTHERS = "(others)"
"""The tenants beyond that, together."""
WITHOUT_ROOM_MAX = 500
"""Waiting jobs that are asked whether they could ever run: one costs some 10 us and more."""

_MOVING = (NodeRole.DRAINING, NodeRole.VACATING, NodeRole.WARMING, NodeRole.QUARANTINED)
_SERVING, _ON_LOAN, _LOST = NodeRole.SERVING, NodeRole.ON_LOAN, NodeRole.LOST
_OK = GpuHealth.OK


def put_cell(scrape: Scrape, engine: Engine, now_s: float) -> None:
    """All samples of the engine's state at an instant, but the jobs without room."""
    state = engine.state
    scrape.put("aryl_leader_epoch", state.epoch)
    scrape.put("aryl_frozen", float(state.is_frozen))
    scrape.put("aryl_recalled", float(state.is_recalled))
    scrape.put("aryl_gpu_breaker_open", float(state.breaker_since_s is not None))
    _nodes(scrape, state)
    _jobs(scrape, engine, now_s)
    _services(scrape, engine, now_s)
    _totals(scrape, state)


def without_room(engine: Engine) -> int:
    """Waiting jobs that the fleet can never run, of the first ones."""
    pending = (job for job in engine.state.live() if job.state == JobState.PENDING)
    return sum(
        bool(engine.explain.why_never(job.job_id)) for job in islice(pending, WITHOUT_ROOM_MAX)
    )


def _nodes(scrape: Scrape, state: ClusterState) -> None:
    roles: Counter[tuple[str, str]] = Counter()
    heard: Counter[str] = Counter()
    closed: Counter[str] = Counter()
    gpus: Counter[tuple[str, str, str]] = Counter()
    for node in state.nodes.values():
        roles[node.home_pool, node.role] += 1
        heard[node.home_pool] += node.contact.is_heard and node.role != _LOST
        reason = _closed(node)
        closed[reason] += 1
        _count_gpus(node, gpus, is_closed=bool(reason))
    for pool in Pool:
        scrape.put("aryl_nodes_heard", heard[pool], pool)
        for role in NodeRole:
            scrape.put("aryl_nodes", roles[pool, role], pool, role)
    for reason in ("cordoned", "refuses", "fault"):
        scrape.put("aryl_nodes_closed", closed[reason], reason)
    for labels, count in gpus.items():
        scrape.put("aryl_gpus", count, *labels)


def _closed(node: NodeEntry) -> str:
    """Why a node takes nothing new; empty where it does."""
    if node.cordon.is_cordoned:
        return "cordoned"
    if node.ledger.error or node.failed_starts.closed_reason:
        return "refuses"
    return "fault" if node.is_out else ""


def _count_gpus(node: NodeEntry, gpus: Counter[tuple[str, str, str]], *, is_closed: bool) -> None:
    pool, role = node.home_pool, node.role
    if role == _LOST:
        idle = "lost"
    elif role == _SERVING:
        idle = "service"
    elif role in _MOVING:
        idle = "moving"
    else:
        idle = "closed" if is_closed else "free"
    out = node.out_uuids if node.gpu_conditions else ()
    for slot in node.gpus:
        holder = idle
        if role != _LOST:
            if slot.holder is not None or slot.guests:
                holder = "job"
            elif slot.health != _OK or slot.is_gone or slot.uuid in out:
                holder = "out"
        gpus[pool, slot.gpu_type, holder] += 1


def _jobs(scrape: Scrape, engine: Engine, now_s: float) -> None:
    state = engine.state
    live = state.live()
    quotas = {one.name: one.guarantee_gpus for one in engine.settings.tenants}
    own = list(dict.fromkeys([*quotas, *sorted({job.tenant for job in live})]))[:TENANTS_MAX]
    shown = {name: name for name in own}
    states: Counter[tuple[str, str]] = Counter()
    held: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    oldest_s: dict[str, float] = {}
    stalled = 0
    for array_id in state.live_arrays:  # of which tasks are not in the line yet
        array = state.arrays[array_id]
        states[JobState.PENDING, shown.get(array.tenant, OTHERS)] += len(array.waiting)
    for job in live:
        tenant = shown.get(job.tenant, OTHERS)
        states[job.state, tenant] += 1
        held[tenant] += sum([len(worker.gpu_uuids) for worker in job.workers.values()])
        stalled += job.gaps.stalled_since_s is not None
        if job.state == JobState.PENDING and not job.gate.is_shut:
            waiting[tenant] += job.spec.workers.min * job.spec.gpus_per_worker
            waited_s = now_s - job.wait.pending_since_s
            oldest_s[tenant] = max(oldest_s.get(tenant, 0.0), waited_s)
    for tenant in (*own, *([OTHERS] if held[OTHERS] or waiting[OTHERS] else ())):
        for job_state in LIVE_STATES:
            scrape.put("aryl_jobs", states[job_state, tenant], job_state, tenant)
        scrape.put("aryl_tenant_gpus", held[tenant], tenant)
        scrape.put("aryl_tenant_waiting_gpus", waiting[tenant], tenant)
        scrape.put("aryl_tenant_guarantee_gpus", quotas.get(tenant, 0), tenant)
        scrape.put("aryl_job_oldest_wait_seconds", oldest_s.get(tenant, 0.0), tenant)
    scrape.put("aryl_jobs_stalled", stalled)


def _services(scrape: Scrape, engine: Engine, now_s: float) -> None:
    state = engine.state
    nodes: dict[str, list[NodeEntry]] = {}
    for node in state.nodes.values():
        nodes.setdefault(node.service or "", []).append(node)
    loans: dict[str, list[LoanEntry]] = {}
    for loan in state.loans.values():
        if loan.returned_at_s is None:
            loans.setdefault(loan.service, []).append(loan)
    for settings in engine.settings.services:
        name = settings.name
        _service(scrape, engine, settings, nodes.get(name, []))
        _loans(scrape, state, name, loans.get(name, []), now_s)
        scrape.put("aryl_reclaim_deadline_seconds", settings.reclaim_deadline_s, name)
        for stage, expected_s in {
            "notify": engine.settings.lease_ttl_s,
            "checkpoint": settings.max_grace_s,
            "device_free": settings.device_free_p99_s,
            "server_ready": settings.warm_up_p99_s,
        }.items():
            scrape.put("aryl_reclaim_predicted_seconds", expected_s, name, stage)


def _service(
    scrape: Scrape, engine: Engine, settings: ServiceSettings, nodes: list[NodeEntry]
) -> None:
    name = settings.name
    entry = engine.state.services.get(ServiceName(name))
    if entry is None:  # of new settings, before their leader has begun
        return
    roles = Counter(node.role for node in nodes)
    for role in NodeRole:
        scrape.put("aryl_service_nodes", roles[role], name, role)
    scrape.put("aryl_service_min_serving_nodes", settings.min_serving, name)
    scrape.states("aryl_service_mode", Mode, entry.mode, name)
    capacity_per_s = roles[_SERVING] * settings.capacity_per_node
    scrape.put("aryl_service_capacity_requests_per_second", capacity_per_s, name)
    unknown = len(unknown_loads.of_service(engine.state, entry.name))
    scrape.put("aryl_service_unknown_load_nodes", unknown, name)
    is_known = bool(entry.load) and entry.unknown_since_s is None
    scrape.put("aryl_service_load_known", float(is_known), name)
    load_per_s = entry.load[-1].load if is_known else None
    scrape.put("aryl_service_load_requests_per_second", load_per_s, name)


def _loans(
    scrape: Scrape, state: ClusterState, service: str, loans: list[LoanEntry], now_s: float
) -> None:
    states = Counter(map(_loan_state, loans))
    for one in ("draining", "on_loan", "coming_home"):
        scrape.put("aryl_loans_open", states[one], service, one)
    overdue = sum(loan_outcome.overdue_s(loan, now_s) > 0 for loan in loans)
    scrape.put("aryl_loans_overdue", overdue, service)
    lent = [state.nodes.get(NodeName(loan.node)) for loan in loans]
    gpus = sum(len(node.gpus) for node in lent if node is not None and node.role == _ON_LOAN)
    scrape.put("aryl_lent_gpus", gpus, service)


def _loan_state(loan: LoanEntry) -> str:
    if loan.reclaim_ordered_at_s is not None or loan.is_lapsed or loan.turned_back:
        return "coming_home"
    return "draining" if loan.begun_at_s is None else "on_loan"


def _totals(scrape: Scrape, state: ClusterState) -> None:
    """Totals since the journal began, which a new leader continues."""
    counters = state.counters
    scrape.put("aryl_jobs_submitted_total", counters.jobs_submitted)
    scrape.put("aryl_jobs_ended_total", counters.jobs_finished, "succeeded")
    scrape.put("aryl_jobs_ended_total", counters.jobs_failed, "failed")
    scrape.put("aryl_jobs_ended_total", counters.jobs_rejected, "rejected")
    scrape.put("aryl_loans_total", counters.loans)
    scrape.put("aryl_loans_cancelled_total", counters.loans_cancelled)
    scrape.put("aryl_resizes_total", counters.resizes)
    scrape.put("aryl_gang_timeouts_total", counters.gang_timeouts)
    scrape.put("aryl_stalls_total", counters.stalls)
    scrape.put("aryl_lent_gpu_seconds_total", counters.on_loan_gpu_s)
    scrape.put("aryl_lent_held_gpu_seconds_total", counters.on_loan_held_gpu_s)
    scrape.put("aryl_training_gpu_seconds_total", counters.training_gpu_s)
    scrape.put("aryl_training_held_gpu_seconds_total", counters.training_held_gpu_s)
