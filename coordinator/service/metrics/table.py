"""Every metric of a coordinator; docs/monitoring.md is generated from these tables.

No label names a job or a node: the number of series grows with services, tenants and GPU types.
"""

from __future__ import annotations

from common.monitoring.families import QUEUEING_S, QUICK_S, SHARES, SLOW_S, Family

PROCESS: tuple[Family, ...] = (
    Family("aryl_build_info", "gauge", "1; the version of this coordinator", ("version",)),
    Family("aryl_leader", "gauge", "1 for the coordinator that leads, 0 for a standby"),
    Family("aryl_reports_total", "counter", "node reports heard and understood"),
    Family(
        "aryl_reports_shed_total",
        "counter",
        "node reports that a later one of the same node replaced before they were read",
    ),
    Family(
        "aryl_bad_messages_total",
        "counter",
        "invalid messages, dropped; of kind rival: reports of a second agent of one name",
        ("kind",),
    ),
    Family(
        "aryl_history_index_lag_lines",
        "gauge",
        "lines of the history that the index of this coordinator does not have yet",
    ),
    Family("aryl_bus_errors_total", "counter", "errors of the NATS connections"),
    Family("aryl_bus_reconnects_total", "counter", "times that NATS was lost"),
)
"""Of every coordinator, a standby included."""

CELL: tuple[Family, ...] = (
    Family(
        "aryl_history_pending_lines",
        "gauge",
        "lines in the journal that are not in the stream of the history yet",
    ),
    Family("aryl_leader_epoch", "gauge", "epoch of the leader; it only grows"),
    Family(
        "aryl_last_pass_age_seconds", "gauge", "time since the last scheduling pass was journaled"
    ),
    Family("aryl_frozen", "gauge", "1 while the cell is frozen"),
    Family("aryl_recalled", "gauge", "1 while every loan of the cell is recalled"),
    Family(
        "aryl_clock_warning",
        "gauge",
        "1 while the wall clock differs from the time that decisions count in",
    ),
    Family("aryl_gpu_breaker_open", "gauge", "1 while no more GPUs are taken out by their faults"),
    Family("aryl_nodes", "gauge", "nodes by home pool and present role", ("pool", "role")),
    Family(
        "aryl_nodes_heard", "gauge", "nodes that this leader heard and that are not lost", ("pool",)
    ),
    Family(
        "aryl_nodes_closed",
        "gauge",
        "nodes that take nothing new; by cordoned, refuses (its starts fail or its ledger cannot be"
        " written) and fault (of its GPUs)",
        ("reason",),
    ),
    Family(
        "aryl_gpus",
        "gauge",
        "GPUs by home pool, type and holder: job, service, free, closed (free on a node that takes"
        " nothing new), moving (on the way into or out of a loan, or in quarantine), out (after a"
        " fault) and lost (with their node)",
        ("pool", "type", "holder"),
    ),
    Family(
        "aryl_jobs",
        "gauge",
        "jobs that have not ended, by state and tenant",
        ("state", "tenant"),
    ),
    Family("aryl_jobs_stalled", "gauge", "running jobs that report no progress any more"),
    Family(
        "aryl_jobs_without_room",
        "gauge",
        "waiting jobs that the fleet can never run, of the first 500; counted once a minute",
    ),
    Family(
        "aryl_job_oldest_wait_seconds",
        "gauge",
        "longest present wait of a pending job in the queue",
        ("tenant",),
    ),
    Family("aryl_tenant_gpus", "gauge", "GPUs that workers of a tenant hold", ("tenant",)),
    Family(
        "aryl_tenant_waiting_gpus", "gauge", "base demand of pending jobs in the queue", ("tenant",)
    ),
    Family("aryl_tenant_guarantee_gpus", "gauge", "quota of a tenant", ("tenant",)),
    Family("aryl_service_nodes", "gauge", "nodes of a service by role", ("service", "role")),
    Family(
        "aryl_service_min_serving_nodes", "gauge", "nodes of a service never lent", ("service",)
    ),
    Family("aryl_service_mode", "gauge", "1 for the mode of a service", ("service", "mode")),
    Family(
        "aryl_service_load_known",
        "gauge",
        "0 while no page of the serving nodes can be read",
        ("service",),
    ),
    Family(
        "aryl_service_unknown_load_nodes",
        "gauge",
        "serving nodes whose page cannot be read",
        ("service",),
    ),
    Family(
        "aryl_service_load_requests_per_second",
        "gauge",
        "latest measured load; no sample while it is unknown",
        ("service",),
    ),
    Family(
        "aryl_service_capacity_requests_per_second",
        "gauge",
        "rated load of the serving nodes",
        ("service",),
    ),
    Family(
        "aryl_loans_open",
        "gauge",
        "loans by state: draining, on_loan, coming_home",
        ("service", "state"),
    ),
    Family(
        "aryl_loans_overdue",
        "gauge",
        "loans whose node is not home although its deadline is over",
        ("service",),
    ),
    Family("aryl_lent_gpus", "gauge", "GPUs of the nodes that are on loan", ("service",)),
    Family(
        "aryl_reclaim_deadline_seconds",
        "gauge",
        "the promise: a lent node serves again within this time",
        ("service",),
    ),
    Family(
        "aryl_reclaim_predicted_seconds",
        "gauge",
        "longest expected time of a stage by the settings; checkpoint includes exit, and notify is"
        " the lease's TTL. A node is lent only if their sum is within the deadline",
        ("service", "stage"),
    ),
    Family("aryl_jobs_submitted_total", "counter", "jobs submitted since the journal began"),
    Family(
        "aryl_jobs_ended_total",
        "counter",
        "jobs ended since the journal began: succeeded, failed, rejected",
        ("outcome",),
    ),
    Family("aryl_loans_total", "counter", "loans since the journal began"),
    Family(
        "aryl_loans_cancelled_total",
        "counter",
        "loans called back before their node had left its service, since the journal began",
    ),
    Family("aryl_resizes_total", "counter", "resizes since the journal began"),
    Family("aryl_gang_timeouts_total", "counter", "gangs that were not ready in time"),
    Family("aryl_stalls_total", "counter", "times that a job was found stalled"),
    Family(
        "aryl_lent_gpu_seconds_total",
        "counter",
        "GPU-seconds on loan since the journal began",
    ),
    Family(
        "aryl_lent_held_gpu_seconds_total",
        "counter",
        "GPU-seconds on loan that workers held, since the journal began",
    ),
    Family(
        "aryl_training_gpu_seconds_total",
        "counter",
        "GPU-seconds of the training pool since the journal began",
    ),
    Family(
        "aryl_training_held_gpu_seconds_total",
        "counter",
        "GPU-seconds of the training pool that workers held, since the journal began",
    ),
)
"""Of the leader, read from the engine's state at each scrape."""

KEPT: tuple[Family, ...] = (
    Family(
        "aryl_job_queueing_seconds",
        "histogram",
        "time from submission, or from the end of the attempt before, to the start of an attempt",
        ("tenant",),
        QUEUEING_S,
    ),
    Family(
        "aryl_pass_duration_seconds",
        "histogram",
        "time of one pass of the policy, by kind: schedule, loan",
        ("kind",),
        QUICK_S,
    ),
    Family("aryl_decisions_total", "counter", "decisions carried out, by kind", ("kind",)),
    Family(
        "aryl_decisions_refused_total",
        "counter",
        "decisions that no longer fitted when they were carried out, by kind",
        ("kind",),
    ),
    Family(
        "aryl_returns_total",
        "counter",
        "nodes that had left their service for a loan that is over, by kind: reclaim (ordered),"
        " lapse (its lease ended by its TTL), turn_back (given up before it began); and by outcome:"
        " in_time, late, gone (its loan ended without a return)",
        ("service", "kind", "outcome"),
    ),
    Family(
        "aryl_reclaim_duration_seconds",
        "histogram",
        "time from a reclaim order to serving again",
        ("service",),
        SLOW_S,
    ),
    Family(
        "aryl_reclaim_stage_seconds",
        "histogram",
        "time of one stage of a reclaim",
        ("service", "stage"),
        SLOW_S,
    ),
    Family(
        "aryl_reclaim_deadline_used_ratio",
        "histogram",
        "part of its deadline that a reclaim took",
        ("service",),
        SHARES,
    ),
    Family(
        "aryl_reclaim_predicted_lost_gpu_seconds_total",
        "counter",
        "work that the finished reclaims were expected to lose, in GPU-seconds",
        ("service",),
    ),
    Family(
        "aryl_reclaim_realised_lost_gpu_seconds_total",
        "counter",
        "work that the finished reclaims did lose, in GPU-seconds",
        ("service",),
    ),
    Family(
        "aryl_preemptions_total",
        "counter",
        "preemptions by cause: reclaim (its node goes home), policy, order (a requeue), and node (a"
        " drain or a node that stopped it)",
        ("cause",),
    ),
    Family(
        "aryl_lost_gpu_seconds_total",
        "counter",
        "work lost, in GPU-seconds: by preemptions of each cause, and by resize and migration",
        ("cause",),
    ),
    Family("aryl_journal_records_total", "counter", "records that this leader appended"),
    Family("aryl_journal_bytes_total", "counter", "size of these records"),
    Family(
        "aryl_journal_append_duration_seconds",
        "histogram",
        "time until a record was acknowledged, retries included",
        (),
        QUICK_S,
    ),
    Family("aryl_snapshots_total", "counter", "snapshots saved"),
)
"""Counted as it passes by, since this process began to lead."""

FAMILIES = (*PROCESS, *CELL, *KEPT)
