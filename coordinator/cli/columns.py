"""The columns of tables of jobs, nodes, services, loans and events. Pure."""

from __future__ import annotations

from common.api import (
    ClosedRow,
    JobRow,
    LoanRow,
    NodeRow,
    ServiceRow,
    StoryRow,
    TenantRow,
    UnknownLoadRow,
    WorkerRow,
)
from common.model import FINAL_JOB_STATES, JobState
from coordinator.cli.render import Column, ago, duration, instant, number, percent
from coordinator.policies.contract.text import counted


def jobs(now_s: float) -> list[Column[JobRow]]:
    """Columns that people know from squeue, in our words. `now_s`: for relative times."""
    return [
        Column("JOB", lambda r: r.job_id),
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


def job_state(row: JobRow) -> str:
    """The state; `STALLED` of one that runs and reports no progress any more."""
    return "STALLED" if isinstance(row.stalled_s, float) else str(row.state)


def workers(row: JobRow) -> str:
    """`3 of 2:4`: how many run of how many it can use."""
    bounds = f"{row.min_workers}:{row.max_workers}"
    wanted = bounds if row.max_workers > row.min_workers else str(row.min_workers)
    return wanted if row.state in FINAL_JOB_STATES else f"{row.worker_count} of {wanted}"


def progress(row: JobRow) -> str:
    """Share of the steps where both are known, else the step."""
    if row.step is not None and row.total_steps:
        return percent(row.step / row.total_steps)
    return number(row.step)


def why(row: JobRow) -> str:
    """What blocks a job now, or how it ended. For a waiting job: the latest fault, which is why it
    stopped, and its first blocker, which is why it does not start. The class of a failure stands
    before its exit code: a narrow table cuts off the end.
    """
    blocker = row.blockers[0] if row.blockers else ""
    if said := row.error if row.state in FINAL_JOB_STATES else blocker or row.error:
        return said
    if row.state != JobState.FAILED or row.exit_code is None:
        return ""
    code = f"exit code {row.exit_code}"
    return f"{row.failure.title} ({code})" if row.failure else code


def nodes() -> list[Column[NodeRow]]:
    """Columns that people know from sinfo, in our words."""
    return [
        Column("NODE", lambda r: r.node),
        Column("POOL", lambda r: r.home_pool, rank=3),
        Column("ROLE", role),
        Column("WANTED", lambda r: r.desired_role, is_wide=True),
        Column("SERVICE", lambda r: r.service, is_elastic=True, rank=4),
        Column("RACK", lambda r: r.rack, is_wide=True),
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


def role(row: NodeRow) -> str:
    """The role, whether its server is down, whether it is closed by an order or because it can take
    no work, and whether running work has to leave or has left.
    """
    said = ["server down"] if row.is_server_down else []
    if isinstance(row.load_unknown, UnknownLoadRow):
        said.append("load unknown")
    if row.gpus_out:
        said.append(f"{counted(row.gpus_out, 'GPU')} out")
    if row.is_cordoned:
        drained = "draining" if row.jobs else "drained"
        said.append(drained if row.is_draining else "cordoned")
    if isinstance(row.closed, ClosedRow):
        said.append("closed")
    return f"{row.role} ({', '.join(said)})" if said else str(row.role)


def heard(row: NodeRow) -> str:
    """How long ago this coordinator heard it."""
    return "never" if row.heard_ago_s is None else ago(0.0, row.heard_ago_s)


def load(row: ServiceRow) -> str:
    """Its load, and for how many of its nodes that is only the last known one."""
    found = row.load_unknown
    if not isinstance(found, UnknownLoadRow):
        return number(row.load_per_s)
    if len(found.nodes) == found.serving:
        return f"{number(row.load_per_s)} (unknown)"
    return f"{number(row.load_per_s)} ({len(found.nodes)} of {found.serving} unknown)"


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

    def limit(gpus: int | None) -> str:
        return "" if gpus is None else str(gpus)

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
