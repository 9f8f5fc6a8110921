"""Builds rows for people and scripts from the engine's state and the last reports. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType, structs

from common.api import (
    ClosedRow,
    JobRow,
    LoanRow,
    NodeRow,
    NodeTelemetry,
    RequestRow,
    SaveRow,
    ServiceRow,
    Status,
    StoryRow,
    TenantRow,
    UnknownLoadRow,
    WindowRow,
    WorkerRow,
)
from common.history import TOLD, AttemptRecord, HistoryLine, OrderRecord
from common.messages import CommandReport, NodeReport
from common.model import (
    Dependency,
    Gate,
    JobId,
    JobSpec,
    JobState,
    NodeName,
    NodeRole,
    Pool,
    ServiceName,
)
from coordinator.engine.engine import Engine
from coordinator.engine.jobs import (
    arrays,
    ended_workers,
    estimates,
    prerun_spec,
    stalls,
    start_gate,
)
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.jobs.gpu_sharing import keys_of
from coordinator.engine.jobs.start_gate import Gated
from coordinator.engine.loans import unknown_loads
from coordinator.engine.nodes import gpu_faults
from coordinator.engine.state import accounting, loan_outcome
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.context import Context
from coordinator.engine.state.copied_fields import copier
from coordinator.engine.state.settings import TenantSettings
from coordinator.engine.state.tables import (
    ClusterState,
    JobEntry,
    LoanEntry,
    NodeEntry,
    StoryLine,
)
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.contract.text import counted
from coordinator.policies.tenants.tenancy import Count, Tenancy, waiting_gpus
from coordinator.service.api import explain_job
from coordinator.service.api.name_lookup import ANYTHING, Subject
from coordinator.service.nodes.report_folding import Folder

N = TypeVar("N", int, float)


_copied_of_job = copier(
    JobRow,
    JobEntry,
    groups=("spec",),
    computed=("attempt", "gate", "lost_gpu_s", "array", "number", "request"),
)
_copied_of_request = copier(RequestRow, JobSpec)


def job_row(engine: Engine, job: JobEntry, *, now_s: float, in_full: bool = False) -> JobRow:
    """One job; `in_full` for a caller that asked for its number and its request."""
    return JobRow(
        **_copied_of_job(job),
        attempt=job.attempt.number,
        worker_count=job.running_workers,
        min_workers=job.spec.workers.min,
        max_workers=job.spec.workers.max,
        gpus=sum(len(worker.gpu_uuids) for worker in job.workers.values()),
        nodes=tuple(sorted({worker.node for worker in job.workers.values()})),
        queueing_s=accounting.queueing_s(job, now_s),
        preemption_count=job.counts.preemptions,
        step=job.progress.step if job.progress else None,
        total_steps=job.progress.total_steps if job.progress else None,
        failure=job.retry.failure,
        waited_s=jobs_lifecycle.spent_s(job, now_s),
        blockers=_blockers(engine, job, now_s),
        stalled_s=_set(stalls.quiet_s(job, now_s)),
        resize_cost_s=_set(job.resizes.cost_s),
        lost_gpu_s=job.lost_gpu_s or UNSET,
        gate=start_gate.kind(job) or UNSET,
        array_id=job.array_task.array_id if job.array_task else UNSET,
        array_index=job.array_task.index if job.array_task else UNSET,
        number=job.number if in_full else UNSET,
        request=_request(engine, job, now_s) if in_full else UNSET,
    )


def _request(engine: Engine, job: JobEntry, now_s: float) -> RequestRow:
    ran = [one for one in ended_workers.of_attempt(job, None).values() if not one.key.is_store]
    return RequestRow(
        **_asked(prerun_spec.submitted(job)),
        ran_on=tuple(sorted({one.node for one in ran})),
        ran_workers=len(ran),
        array_number=_array_number(engine, job),
        array_index=job.array_task.index if job.array_task else None,
        attempt_started_at_s=job.attempt.ran_at_s,
        waits_for=_waits_for(engine, job),
        most_workers=job.clock.most_workers or min(len(ran), job.spec.workers.max),
        worker_s=estimates.held_worker_s(job, now_s),
    )


def array_request(engine: Engine, array: ArrayEntry) -> RequestRow:
    """What the tasks of an array ask for."""
    return RequestRow(**_asked(array.spec), waits_for=_waits_for(engine, array))


def _waits_for(engine: Engine, one: Gated) -> tuple[Dependency, ...]:
    state = engine.state
    found = one.gate.depends_on
    return tuple(structs.replace(each, job=_number_text(state, each.job)) for each in found)


def _number_text(state: ClusterState, job_id: str) -> str:
    """`12` of a job or an array, `12_3` of a task; the id of one that is not known any more."""
    one = start_gate.gated(state, job_id)
    if one is not None and (isinstance(one, ArrayEntry) or one.array_task is None):
        return str(one.number)
    array_id, _, index = job_id.rpartition("_")
    array = state.arrays.get(JobId(array_id))
    return job_id if array is None else f"{array.number}_{index}"


def _asked(spec: JobSpec) -> dict[str, Any]:
    return {
        **_copied_of_request(spec),
        "grace_s": spec.checkpoint.grace_s,
        "gpu_types": spec.gpu.types,
        "title": spec.env.get("SLURM_JOB_NAME", ""),
        "comment": spec.env.get("SLURM_JOB_COMMENT", ""),
    }


def _array_number(engine: Engine, job: JobEntry) -> int | None:
    if job.array_task is None:
        return None
    array = engine.state.arrays.get(job.array_task.array_id)
    return None if array is None else array.number


def _set(value: N | None) -> N | UnsetType:
    return UNSET if value is None else value


def _blockers(engine: Engine, job: JobEntry, now_s: float) -> tuple[str, ...]:
    """The reasons that hold a job.

    For a waiting job: first that nothing is decided, then the result of a pass. For a suspended one
    the jobs that compute in its place, for a stalled one its last progress, for others their end.
    """
    if job.state == JobState.SUSPENDED:
        return (explain_job.suspension_reason(engine, job, now_s=now_s),)
    if job.state != JobState.PENDING:
        stalled = stalls.in_words(job, now_s)
        return (stalled,) if stalled else explain_job.stopping_reasons(job, now_s=now_s)
    found = engine.explain.blockers(job.job_id)
    return (
        (explain_job.FROZEN, *found) if engine.state.is_frozen and not job.gate.is_shut else found
    )


def worker_rows(job: JobEntry) -> tuple[WorkerRow, ...]:
    """The live workers of a job, by index."""
    return tuple(
        WorkerRow(
            worker_index=index,
            node=worker.node,
            gpus=len(worker.gpu_uuids),
            is_flexible=worker.is_flexible,
            phase=worker.phase or "ordered",
            stop_reason=worker.stop or "",
        )
        for index, worker in sorted(job.workers.items())
    )


def save_rows(job: JobEntry) -> tuple[SaveRow, ...]:
    """The latest checkpoints of a job, oldest first."""
    return tuple(
        SaveRow(at_s=save.at_s, step=save.step, is_verified=save.is_verified)
        for save in job.saves.kept
    )


def busy_ratio(reports: list[NodeReport]) -> float | None:
    """Mean NVML busy share over the GPUs of some nodes; None when no node reports it."""
    ratios = [
        gpu.gpu_busy_ratio
        for report in reports
        for gpu in report.gpus
        if gpu.gpu_busy_ratio is not None
    ]
    return fmean(ratios) if ratios else None


def telemetry(name: NodeName, folder: Folder, *, boot_now_s: float) -> NodeTelemetry | None:
    """The measurements of a node's latest report; None: none arrived here.

    boot_now_s: on the clock by which `folder` receives reports.
    """
    report = folder.reports.get(name)
    if report is None:
        return None
    return NodeTelemetry(
        reported_ago_s=max(0.0, boot_now_s - folder.heard_at_s[name]),
        is_silent=folder.silent_s(name, now_s=boot_now_s) > folder.lost_after_s,
        lease_remaining_s=report.lease_remaining_s,
        gpus=report.gpus,
        host=report.host,
        inference=report.inference,
    )


def slow_command(name: NodeName, folder: Folder, *, boot_now_s: float) -> CommandReport | None:
    """The command that a node still waits for, by its latest report; boot_now_s as of `telemetry`.

    It holds for a silent node, too: nothing else is known of the command.
    """
    report = folder.reports.get(name)
    if report is None or report.slow_command is UNSET:
        return None
    age_s = max(0.0, boot_now_s - folder.heard_at_s[name])
    told = report.slow_command
    return CommandReport(name=told.name, running_s=told.running_s + age_s)


def node_row(
    node: NodeEntry,
    folder: Folder,
    *,
    boot_now_s: float,
    drain_left_s: float | None = None,
    unknown_load: UnknownLoadRow | UnsetType = UNSET,
    closed: ClosedRow | UnsetType = UNSET,
    window: WindowRow | UnsetType = UNSET,
    in_full: bool = False,
) -> NodeRow:
    """One node; `in_full` for a caller that asked for its CPUs, memory and labels."""
    report = folder.reports.get(node.name)
    heard_at_s = folder.heard_at_s.get(node.name)
    holders = {key.job_id for slot in node.gpus for key in keys_of(slot)}
    holders |= {key.job_id for key in node.ledger.stores}
    return NodeRow(
        node=node.name,
        home_pool=node.home_pool,
        role=node.role,
        desired_role=node.desired.role,
        service=node.service or "",
        gpu_type=", ".join(node.gpu_types),
        gpus=len(node.gpus),
        gpus_held=sum(1 for slot in node.gpus if slot.holder is not None),
        gpu_busy_ratio=busy_ratio([report] if report else []),
        jobs=tuple(sorted(holders)),
        is_cordoned=node.cordon.is_cordoned,
        is_heard=node.contact.is_heard,
        heard_ago_s=None if heard_at_s is None else max(0.0, boot_now_s - heard_at_s),
        rack=node.rack,
        detail=node.detail or node.cordon.reason or (closed.why if closed else ""),
        is_draining=node.cordon.is_draining,
        drain_left_s=drain_left_s,
        is_server_down=node.role == NodeRole.SERVING and node.is_server_down,
        load_unknown=unknown_load,
        gpus_out=gpu_faults.out_count(node) or UNSET,
        closed=closed,
        cpus=node.cpus if in_full else UNSET,
        memory_bytes=node.memory_bytes if in_full else UNSET,
        labels=node.labels.now if in_full else UNSET,
        ordered_labels=node.labels.ordered if in_full else UNSET,
        window=window,
    )


def window(engine: Engine, node: NodeEntry, *, now_s: float) -> WindowRow | UnsetType:
    """When a node is to be drained; unset where no operator has ordered it."""
    found = engine.state.windows.get(node.name)
    if found is None:
        return UNSET
    return WindowRow(at_s=found.at_s, left_s=max(0.0, found.at_s - now_s), reason=found.reason)


def closed(engine: Engine, node: NodeEntry, *, now_s: float) -> ClosedRow | UnsetType:
    """Why a node takes no new work by itself; unset where it does, or is away."""
    why = node.ledger.error or node.failed_starts.closed_reason
    if not why or node.role == NodeRole.LOST:
        return UNSET
    until_s = None if node.ledger.error else engine.state.closed_until_s.get(node.name)
    return ClosedRow(why=why, left_s=None if until_s is None else max(0.0, until_s - now_s))


def unknown_load(engine: Engine, node: NodeEntry, *, now_s: float) -> UnknownLoadRow | UnsetType:
    """Why the load of a node that serves is unknown; unset where it is known."""
    found = engine.state.unknown_loads.get(node.name)
    if found is None or node.role != NodeRole.SERVING:
        return UNSET
    age_s = max(0.0, now_s - found.since_s)
    return UnknownLoadRow(unknown_s=age_s, why=found.why, last_load_per_s=found.load)


def _unknown_loads(engine: Engine, name: ServiceName, now_s: float) -> UnknownLoadRow | UnsetType:
    """The same for a service, as its loan passes see it."""
    found = unknown_loads.of_service(engine.state, name)
    if not found:
        return UNSET
    entry = engine.state.services[name]
    return UnknownLoadRow(
        unknown_s=max(0.0, now_s - min(one.since_s for one in found)),
        why=f"{found[0].node}: {found[0].why}",
        last_load_per_s=entry.load[-1].load if entry.load else None,
        nodes=tuple(one.node for one in found),
        serving=unknown_loads.serving_count(engine.state, name),
    )


def service_row(engine: Engine, folder: Folder, name: str, *, now_s: float) -> ServiceRow:
    """One service."""
    settings = next(s for s in engine.settings.services if s.name == name)
    entry = next(e for e in engine.state.services.values() if e.name == name)
    nodes = [node for node in engine.state.nodes.values() if node.service == name]
    lent = [node for node in nodes if node.lease is not None]
    serving = [node for node in nodes if node.role == NodeRole.SERVING]
    running_requests, waiting_requests = _in_flight(
        [folder.reports[n.name] for n in serving if n.name in folder.reports]
    )
    loans = [loan for loan in engine.state.loans.values() if loan.service == name]
    tally = loan_outcome.tally(loans, now_s)
    back = [loan for loan in loans if loan_outcome.reclaim_s(loan) is not None]
    last = max(back, key=lambda loan: loan.returned_at_s or 0.0, default=None)
    return ServiceRow(
        service=name,
        mode=entry.mode,
        is_recalled=entry.is_recalled,
        nodes=len(nodes),
        serving=len(serving),
        on_loan=sum(1 for node in lent if node.role == NodeRole.ON_LOAN),
        coming_home=sum(1 for n in nodes if n.lease is None and n.role != NodeRole.SERVING),
        load_per_s=entry.load[-1].load if entry.load else None,
        capacity_per_node=settings.capacity_per_node,
        min_serving=settings.min_serving,
        reclaim_deadline_s=settings.reclaim_deadline_s,
        return_s=engine.settings.return_s(settings),
        running_requests=running_requests,
        waiting_requests=waiting_requests,
        reclaims=tally.reclaims,
        reclaims_late=tally.reclaims_late,
        lapses=tally.lapses,
        lapses_late=tally.lapses_late,
        turn_backs=tally.turn_backs,
        turn_backs_late=tally.turn_backs_late,
        last_reclaim_s=None if last is None else loan_outcome.reclaim_s(last),
        last_returned_at_s=None if last is None else last.returned_at_s,
        load_unknown=_unknown_loads(engine, entry.name, now_s),
    )


def _in_flight(reports: list[NodeReport]) -> tuple[float | None, float | None]:
    """Requests that run and that wait, by the servers' own pages."""
    pages = [report.inference for report in reports if report.inference is not None]
    if not pages:
        return None, None
    return sum(page.running_count for page in pages), sum(page.waiting_count for page in pages)


def tenant_rows(
    snapshot: ClusterSnapshot, settings: Sequence[TenantSettings] = ()
) -> tuple[TenantRow, ...]:
    """All tenants, each before its children. settings: what the snapshot does not have of them."""
    max_jobs = {tenant.name: tenant.user_max_jobs for tenant in settings}
    tenancy = Tenancy(snapshot)
    gpus_by_tenant = waiting_gpus(snapshot, tenancy)
    shares = tenancy.fair_shares(gpus_by_tenant)
    below = dict(gpus_by_tenant)
    for name, view in reversed(tenancy.views.items()):
        below[view.parent] = below.get(view.parent, 0) + below.get(name, 0)
    return tuple(
        TenantRow(
            tenant=name,
            parent=view.parent,
            weight=view.weight,
            guarantee_gpus=view.guarantee_gpus,
            used_gpus=_plain(tenancy.used[name]),
            borrowed_gpus=_plain(max(0, tenancy.used[name] - view.guarantee_gpus)),
            borrow_limit_gpus=view.borrow_limit_gpus,
            lend_limit_gpus=view.lend_limit_gpus,
            waiting_gpus=below.get(name, 0),
            fair_share_gpus=shares[name],
            user_max_gpus=_set(view.user_max_gpus),
            user_max_jobs=_set(max_jobs.get(name)),
        )
        for name, view in tenancy.views.items()
    )


def _plain(gpus: Count) -> float:
    """A part of GPUs for JSON; whole numbers stay integers."""
    return gpus if isinstance(gpus, int) else float(gpus)


_copied_of_loan = copier(
    LoanRow,
    LoanEntry,
    # only of a loan that ended in this way, and once it did
    computed=(
        "reclaim_reason",
        "lapse_s",
        "lapse_deadline_s",
        "turn_back_s",
        "turn_back_deadline_s",
    ),
)


def loan_row(loan: LoanEntry, *, now_s: float) -> LoanRow:
    """One loan."""
    return LoanRow(
        **_copied_of_loan(loan),
        state=_loan_state(loan),
        reclaim_s=loan_outcome.reclaim_s(loan),
        lapse_s=loan_outcome.lapse_s(loan),
        lapse_deadline_s=loan.lapse_deadline_s if loan_outcome.is_lapse(loan) else None,
        turn_back_s=loan_outcome.turn_back_s(loan),
        turn_back_deadline_s=loan.turn_back_deadline_s if loan_outcome.is_turn_back(loan) else None,
        is_late=loan_outcome.is_late(loan) or loan_outcome.overdue_s(loan, now_s) > 0,
        reclaim_reason=loan.ended_reason or loan.reclaim_reason or loan.turned_back,
    )


def _loan_state(loan: LoanEntry) -> str:
    if loan.ended_reason:
        return "ended"
    if loan.returned_at_s is not None:
        if loan_outcome.is_turn_back(loan):
            return "turned back"
        return "lapsed" if loan_outcome.is_lapse(loan) else "returned"
    if loan.reclaim_ordered_at_s is not None or loan.is_lapsed or loan.turned_back:
        return "coming home"
    return "draining" if loan.begun_at_s is None else "on loan"


def history_lines(
    state: ClusterState, stories: Sequence[StoryLine], before: int
) -> tuple[HistoryLine, ...]:
    """Lines as the history keeps them, with the person whose job or order each is of.

    before: number of the line before the first one.
    """
    return tuple(
        _history_line(state, line, number) for number, line in enumerate(stories, start=before + 1)
    )


def _history_line(state: ClusterState, line: StoryLine, number: int) -> HistoryLine:
    job = state.jobs.get(JobId(line.subject))
    whose: tuple[str, str] = ("", "") if job is None else (job.tenant, job.user)
    if isinstance(line.detail, OrderRecord | AttemptRecord):
        whose = (line.detail.tenant, line.detail.user)
    return HistoryLine(
        number=number,
        at_s=line.at_s,
        subject=line.subject,
        what=line.what,
        reason=line.reason,
        kind=line.kind,
        detail=line.detail,
        tenant=whose[0],
        user=whose[1],
    )


def told_row(line: HistoryLine) -> StoryRow:
    """A line of the history as an event line."""
    return StoryRow(
        number=line.number, at_s=line.at_s, subject=line.subject, what=line.what, reason=line.reason
    )


def story_rows(
    stories: list[StoryLine], dropped: int, *, after: int = 0, about: Subject = ANYTHING
) -> tuple[StoryRow, ...]:
    """Event lines after a number, of one subject or of all; without those that are accounts."""
    return tuple(
        StoryRow(
            number=number,
            at_s=line.at_s,
            subject=line.subject,
            what=line.what,
            reason=line.reason,
        )
        for number, line in enumerate(stories, start=dropped + 1)
        if number > after and line.kind in TOLD and about.covers(line)
    )


def status(
    engine: Engine,
    folder: Folder,
    *,
    cell: str,
    bad_messages: int,
    up_s: float,
    now_s: float,
    clock_warning: str,
    reports_shed: int = 0,
) -> Status:
    """The cell at a glance."""
    state = engine.state
    nodes = list(state.nodes.values())
    training = [node for node in nodes if node.home_pool == Pool.TRAINING]
    inference = [node for node in nodes if node.home_pool == Pool.INFERENCE]
    on_loan = [node for node in inference if node.role == NodeRole.ON_LOAN]
    live = state.live()
    without_room = [why for job in live if (why := engine.explain.why_never(job.job_id))]
    gates = Counter(map(start_gate.kind, live))
    for array in (state.arrays[array_id] for array_id in state.live_arrays):
        gates[start_gate.kind(array)] += len(array.waiting)
    known = accounting.figures(state, now_s=now_s)
    known = accounting.with_overdue(known, state, now_s)
    return Status(
        cell=cell,
        epoch=state.epoch,
        policy=engine.settings.policy,
        is_frozen=state.is_frozen,
        nodes=len(nodes),
        nodes_heard=sum(
            1 for node in nodes if node.contact.is_heard and node.role != NodeRole.LOST
        ),
        training_gpus=_gpus(training),
        training_gpus_held=_held(training),
        on_loan_nodes=len(on_loan),
        on_loan_gpus=_gpus(on_loan),
        on_loan_gpus_held=_held(on_loan),
        coming_home_nodes=sum(
            1 for n in inference if n.lease is None and n.role != NodeRole.SERVING
        ),
        inference_nodes=len(inference),
        serving_nodes=sum(1 for node in inference if node.role == NodeRole.SERVING),
        pending_jobs=sum(1 for job in live if job.state == JobState.PENDING)
        + arrays.waiting_tasks(state),
        running_jobs=sum(
            1
            for job in live
            if job.attempt.ran_at_s is not None and job.state != JobState.SUSPENDED
        ),
        suspended_jobs=sum(1 for job in live if job.state == JobState.SUSPENDED),
        starting_jobs=sum(
            1 for job in live if job.state != JobState.PENDING and job.attempt.ran_at_s is None
        ),
        gpu_busy_ratio_training=_busy(folder, training),
        gpu_busy_ratio_inference=_busy(folder, inference),
        figures=accounting.plain(known),
        bad_messages=bad_messages,
        up_s=up_s,
        recalled_services=tuple(sorted(n for n, s in state.services.items() if s.is_recalled)),
        clock_warning=clock_warning,
        jobs_without_room=len(without_room),
        without_room_why=next(iter(without_room), ()),
        is_recalled=state.is_recalled or UNSET,
        reports_shed=reports_shed or UNSET,
        loads_unknown=_of_unknown_load(engine) or UNSET,
        gpus_out=gpu_faults.shares(state)[1] or UNSET,
        gpu_breaker=_breaker(engine) or UNSET,
        nodes_closed=sum(1 for node in nodes if closed(engine, node, now_s=now_s)) or UNSET,
        stalled_jobs=sum(1 for job in live if job.gaps.stalled_since_s is not None) or UNSET,
        held_jobs=gates[Gate.HELD] or UNSET,
        dependent_jobs=gates[Gate.DEPENDENCY] + gates[Gate.NEVER] or UNSET,
        never_jobs=gates[Gate.NEVER] or UNSET,
    )


def _breaker(engine: Engine) -> str:
    """Why no more GPUs are taken out automatically; empty while they are."""
    if engine.state.breaker_since_s is None:
        return ""
    return gpu_faults.why_open(Context(engine.state, engine.settings, engine.state.now_s))


def _of_unknown_load(engine: Engine) -> tuple[str, ...]:
    """Services with nodes of an unknown load, and the number of those nodes."""
    said: list[str] = []
    for name in sorted(engine.state.services) if engine.state.unknown_loads else ():
        if found := unknown_loads.of_service(engine.state, name):
            serving = unknown_loads.serving_count(engine.state, name)
            said.append(f"{name} ({len(found)} of {counted(serving, 'node')})")
    return tuple(said)


def _gpus(nodes: list[NodeEntry]) -> int:
    return sum(len(node.gpus) for node in nodes)


def _held(nodes: list[NodeEntry]) -> int:
    return sum(1 for node in nodes for slot in node.gpus if slot.holder is not None)


def _busy(folder: Folder, nodes: list[NodeEntry]) -> float | None:
    reports = [folder.reports[NodeName(n.name)] for n in nodes if n.name in folder.reports]
    return busy_ratio(reports)
