"""The columns of tables of jobs, nodes, services, loans and events. Pure."""

from __future__ import annotations

from msgspec import UnsetType

from common.api import (
    JobRow,
    LoanRow,
    NodeRow,
    ServiceRow,
    StoryRow,
    TenantRow,
    WorkerRow,
)
from common.node_labels import labels_text
from coordinator.cli.render import Column
from coordinator.plain_text import (
    ago,
    duration,
    heard,
    instant,
    job_id,
    job_state,
    load,
    number,
    percent,
    progress,
    role,
    why,
    workers,
)


def jobs(now_s: float) -> list[Column[JobRow]]:
    """Columns that people know from squeue, in our words. `now_s`: for relative times."""
    return [
        Column("JOB", job_id),
        Column("NUMBER", lambda r: str(r.number or ""), is_wide=True, is_number=True),
        Column("NAME", lambda r: r.name, is_elastic=True),
        Column("TENANT", lambda r: r.tenant, is_wide=True),
        Column("USER", lambda r: r.user, is_wide=True),
        Column("STATE", job_state),
        Column("WORKERS", workers, is_number=True, rank=1),
        Column("GPUS", lambda r: str(r.gpus), is_number=True),
        Column("PROGRESS", progress, is_number=True, rank=3),
        Column("QUEUED", lambda r: duration(r.queueing_s), is_number=True, rank=2),
        Column("SUBMITTED", lambda r: ago(r.submitted_at_s, now_s), is_number=True, rank=4),
        Column("STARTED", lambda r: instant(r.started_at_s), is_wide=True),
        Column("FINISHED", lambda r: instant(r.finished_at_s), is_wide=True),
        Column("ATTEMPT", lambda r: str(r.attempt), is_wide=True, is_number=True),
        Column("PREEMPTIONS", lambda r: str(r.preemption_count), is_wide=True, is_number=True),
        Column("EXIT", lambda r: number(r.exit_code), is_wide=True, is_number=True),
        Column("FAILURE", lambda r: r.failure.title if r.failure else "", is_wide=True),
        Column("NODES", lambda r: ",".join(r.nodes), is_wide=True),
        Column("WHY", why, is_elastic=True, rank=5),
    ]


def nodes() -> list[Column[NodeRow]]:
    """Columns that people know from sinfo, in our words."""
    return [
        Column("NODE", lambda r: r.node),
        Column("POOL", lambda r: r.home_pool, rank=3),
        Column("ROLE", role),
        Column("WANTED", lambda r: r.desired_role, is_wide=True),
        Column("SERVICE", lambda r: r.service, is_elastic=True, rank=4),
        Column("RACK", lambda r: r.rack, is_wide=True),
        Column("LABELS", lambda r: labels_text(r.labels or {}), is_wide=True),
        Column("TYPE", lambda r: r.gpu_type, is_elastic=True, rank=2),
        Column("GPUS", lambda r: f"{r.gpus_held}/{r.gpus}", is_number=True),
        Column("BUSY", lambda r: percent(r.gpu_busy_ratio), is_number=True),
        Column("HEARD", heard, is_number=True, rank=1),
        Column("JOBS", lambda r: ",".join(r.jobs), is_elastic=True, rank=5),
        Column("DETAIL", lambda r: r.detail, is_elastic=True, is_wide=True),
    ]


def nodes_of_service() -> list[Column[NodeRow]]:
    """Nodes of one service: the present and the wanted role of each."""
    return [
        Column("NODE", lambda r: r.node),
        Column("ROLE", role),
        Column("WANTED", lambda r: r.desired_role, rank=3),
        Column("TYPE", lambda r: r.gpu_type, is_elastic=True, rank=4),
        Column("GPUS", lambda r: f"{r.gpus_held}/{r.gpus}", is_number=True),
        Column("BUSY", lambda r: percent(r.gpu_busy_ratio), is_number=True),
        Column("HEARD", heard, is_number=True, rank=1),
        Column("JOBS", lambda r: ",".join(r.jobs), is_elastic=True, rank=2),
        Column("DETAIL", lambda r: r.detail, is_elastic=True, rank=5),
    ]


def services() -> list[Column[ServiceRow]]:
    """Where a service's nodes are, and how much it needs."""
    return [
        Column("SERVICE", lambda r: r.service),
        Column("MODE", lambda r: f"{r.mode} (recalled)" if r.is_recalled else str(r.mode)),
        Column("NODES", lambda r: str(r.nodes), is_number=True, rank=2),
        Column("SERVING", lambda r: str(r.serving), is_number=True),
        Column("ON-LOAN", lambda r: str(r.on_loan), is_number=True),
        Column("COMING-HOME", lambda r: str(r.coming_home), is_number=True, rank=1),
        Column("LOAD/S", load, is_number=True),
        Column("PER-NODE/S", lambda r: number(r.capacity_per_node), is_number=True, rank=4),
        Column("MIN", lambda r: str(r.min_serving), is_number=True, rank=5),
        Column("DEADLINE", lambda r: duration(r.reclaim_deadline_s), is_number=True, rank=3),
        Column("RETURN", lambda r: duration(r.return_s), is_number=True, is_wide=True),
    ]


def tenants() -> list[Column[TenantRow]]:
    """Tenants: guarantee, use and entitlement of each."""

    def limit(most: int | UnsetType | None) -> str:
        return str(most) if isinstance(most, int) else ""

    def parts(gpus: float) -> str:
        return f"{gpus:.0f}" if gpus == int(gpus) else f"{gpus:.1f}"

    return [
        Column("TENANT", lambda r: r.tenant),
        Column("PARENT", lambda r: r.parent, rank=4),
        Column("WEIGHT", lambda r: number(r.weight), is_number=True, rank=4),
        Column("GUARANTEE", lambda r: str(r.guarantee_gpus), is_number=True),
        Column("USED", lambda r: parts(r.used_gpus), is_number=True),
        Column("BORROWED", lambda r: parts(r.borrowed_gpus), is_number=True, rank=1),
        Column("FAIR-SHARE", lambda r: f"{r.fair_share_gpus:.1f}", is_number=True),
        Column("WAITING", lambda r: str(r.waiting_gpus), is_number=True, rank=2),
        Column("MAY-BORROW", lambda r: limit(r.borrow_limit_gpus), is_number=True, rank=3),
        Column("LENDS", lambda r: limit(r.lend_limit_gpus), is_number=True, rank=5),
        Column("USER-GPUS", lambda r: limit(r.user_max_gpus), is_number=True, rank=6),
        Column("USER-JOBS", lambda r: limit(r.user_max_jobs), is_number=True, rank=6),
    ]


def loans(now_s: float) -> list[Column[LoanRow]]:
    """Loans: their nodes, ages, and reclaim costs."""
    return [
        Column("LOAN", lambda r: r.lease_id),
        Column("NODE", lambda r: r.node),
        Column("SERVICE", lambda r: r.service, is_elastic=True, rank=2),
        Column("STATE", lambda r: f"{r.state} LATE" if r.is_late else r.state),
        Column("DECIDED", lambda r: ago(r.decided_at_s, now_s), is_number=True, rank=1),
        Column("BEGUN", lambda r: instant(r.begun_at_s), is_wide=True),
        Column("RECLAIMED", lambda r: instant(r.reclaim_ordered_at_s), is_wide=True),
        Column("RETURNED", lambda r: instant(r.returned_at_s), is_wide=True),
        Column("DEADLINE", lambda r: duration(_promise_s(r)), is_wide=True, is_number=True),
        Column(
            "TOOK",
            lambda r: duration(_took_s(r)),
            is_number=True,
            rank=3,
        ),
        Column("PREEMPTED", lambda r: str(r.realised_preemptions), is_number=True, rank=4),
        Column("LOST-GPU-S", lambda r: number(r.realised_cost_gpu_s), is_wide=True, is_number=True),
        Column("WHY", lambda r: r.reclaim_reason or r.reason, is_elastic=True, rank=5),
    ]


def _promise_s(row: LoanRow) -> float | None:
    """Within what `TOOK` had to be."""
    if row.turn_back_s is not None:
        return row.turn_back_deadline_s
    return row.reclaim_deadline_s if row.lapse_s is None else row.lapse_deadline_s


def _took_s(row: LoanRow) -> float | None:
    """How long its way home was, however it began."""
    if row.turn_back_s is not None:
        return row.turn_back_s
    return row.reclaim_s if row.lapse_s is None else row.lapse_s


def events(now_s: float | None) -> list[Column[StoryRow]]:
    """Events. `now_s` None shows instants, which stay true as lines scroll by."""
    return [
        Column("NUMBER", lambda r: str(r.number), is_wide=True, is_number=True),
        Column("WHEN", lambda r: instant(r.at_s) if now_s is None else ago(r.at_s, now_s)),
        Column("SUBJECT", lambda r: r.subject),
        Column("WHAT", lambda r: r.what, is_elastic=True),
        Column("WHY", lambda r: r.reason, is_elastic=True, rank=1),
    ]


def worker_rows() -> list[Column[WorkerRow]]:
    """The workers of one job."""
    return [
        Column("WORKER", lambda r: str(r.worker_index), is_number=True),
        Column("NODE", lambda r: r.node),
        Column("GPUS", lambda r: str(r.gpus), is_number=True),
        Column("KIND", lambda r: "flexible" if r.is_flexible else "base"),
        Column("PHASE", lambda r: r.phase),
        Column("STOPPING", lambda r: r.stop_reason),
    ]
