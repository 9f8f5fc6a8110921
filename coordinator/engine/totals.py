"""Totals of a cell since its journal began. Must not know what they are used for."""

from __future__ import annotations

from msgspec import Struct, field


class Counters(Struct, kw_only=True):
    """Totals since the journal began; see `accounting` for their meaning."""

    jobs_submitted: int = 0
    jobs_finished: int = 0
    jobs_failed: int = 0
    jobs_rejected: int = 0
    jobs_finished_on_loan: int = 0
    preemptions: int = 0
    preemption_cost_gpu_s: float = 0.0
    loans: int = 0
    loans_cancelled: int = 0
    reclaims: int = 0
    reclaims_late: int = 0
    leases_lapsed: int = 0
    lapses_late: int = 0
    turn_backs: int = 0
    turn_backs_late: int = 0
    resizes: int = 0
    resize_cost_gpu_s: float = 0.0
    """GPU-seconds without new work around resizes, of jobs that tell their progress."""
    stalls: int = 0
    """Times that a job was found STALLED."""
    suspensions: int = 0
    migrations: int = 0
    migration_cost_gpu_s: float = 0.0
    """GPU-seconds of work that migrations lost; those of preemptions are not among them."""
    flexible_workers_released: int = 0
    gang_timeouts: int = 0
    decisions_refused: int = 0
    passes: int = 0
    reclaim_s: list[float] = field(default_factory=list[float])
    lapse_s: list[float] = field(default_factory=list[float])
    turn_back_s: list[float] = field(default_factory=list[float])
    training_held_gpu_s: float = 0.0
    training_gpu_s: float = 0.0
    on_loan_held_gpu_s: float = 0.0
    on_loan_gpu_s: float = 0.0
    integrated_at_s: float | None = None
