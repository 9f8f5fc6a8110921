"""Explains the state of a job, from the same state that decisions use. Pure.

A waiting job gets all its blockers, a running one what it does, a stopping one its next state and
deadline, a suspended one the jobs on its GPUs. For a drain the text covers the node and the jobs on
it. A pre-run is a try on a few GPUs (`coordinator.engine.jobs.prerun`). Rows show the job as it
runs, with one worker, so the text explains to a submitter that this is not the whole gang.
"""

from __future__ import annotations

from common.messages import OrderPhase
from common.model import FINAL_JOB_STATES, JobState
from coordinator.engine.engine import Engine
from coordinator.engine.jobs import estimates, prerun_spec, rendezvous, stalls
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.jobs import retry as jobs_retry
from coordinator.engine.nodes import lost as nodes_lost
from coordinator.engine.nodes import lost_records
from coordinator.engine.state.tables import AfterVacating, JobEntry, WorkerEntry
from coordinator.policies.contract.text import counted
from coordinator.service.api import explain_windows

COMPUTING = (JobState.STARTING, JobState.RUNNING, JobState.RESIZING)
WORKERS_NAMED = 4
"""At most this many of the workers that still stop are named: those with the longest grace."""
FROZEN = "the cell is frozen: nothing is started, resized or lent (aryl freeze --off)"


def reasons(engine: Engine, entry: JobEntry, *, now_s: float | None = None) -> tuple[str, ...]:
    """All blockers of a waiting job, or what a running one is doing.

    now_s: engine time; None: of the last event.
    """
    at_s = engine.state.now_s if now_s is None else now_s
    return (*_of_state(engine, entry, at_s), *prerun_reasons(entry))


def _of_state(engine: Engine, entry: JobEntry, at_s: float) -> tuple[str, ...]:
    if ends := stopping_reasons(entry, now_s=at_s):
        if ended_by := jobs_retry.why_ended(entry, engine.settings):
            ends = (*ends, ended_by)
        return (*ends, *_unknown(engine, entry, at_s))
    match entry.state:
        case JobState.PENDING:
            return tuple(_pending(engine, entry, at_s))
        case JobState.STARTING:
            waiting = sorted(
                f"worker {i} on {_not_ready(w)}"
                for i, w in entry.workers.items()
                if not jobs_lifecycle.is_ready(w)
            )
            if entry.store is not None and not rendezvous.is_ready(entry):
                waiting.append(f"its rendezvous store on {_not_ready(entry.store)}")
            doubted = lost_records.why_no_timeout(engine.state, entry)
            waiting += [doubted] if doubted else []
            return ("its gang waits until every node is ready", *waiting, *_awaited(entry))
        case JobState.RUNNING | JobState.RESIZING:
            drained, lost = (
                drain_reasons(engine, entry, at_s),
                _unknown(engine, entry, at_s),
            )
            stalled = _stalled(entry, at_s)
            return (*stalled, *_running(engine, entry), *drained, *lost, *_awaited(entry))
        case JobState.SUSPENDED:
            said = suspension_reason(engine, entry, now_s=at_s)
            return (
                said,
                *drain_reasons(engine, entry, at_s),
                *_unknown(engine, entry, at_s),
            )
        case JobState.CANCELLED:
            return (f"cancelled by {entry.cancelled_by}",) if entry.cancelled_by else ()
        case _:
            ended_by = jobs_retry.why_ended(entry, engine.settings)
            not_again = f"it is not tried again: {ended_by}" if ended_by else ""
            return tuple(why for why in (entry.error, not_again) if why)


def _stalled(entry: JobEntry, at_s: float) -> tuple[str, ...]:
    """A running job without progress, and what will happen to it."""
    words = stalls.in_words(entry, at_s)
    if not words:
        return ()
    timeout_s = stalls.timeout_of(entry)
    if timeout_s is None:
        then = "it goes on as it is: it has no stall_timeout_s"
    else:
        left_s = max(0.0, timeout_s - (stalls.quiet_s(entry, at_s) or 0.0))
        then = f"it is started again in {left_s:.0f} s (stall_timeout_s {timeout_s:g} s)"
    return (f"STALLED: {words}", then)


def _not_ready(worker: WorkerEntry) -> str:
    """Where a worker is being prepared, its stage, and the wait that its node reports."""
    why = f": {worker.waits_for}" if worker.waits_for else ""
    return f"{worker.node} is {worker.phase or 'not yet taken'}{why}"


def _awaited(entry: JobEntry) -> list[str]:
    """Nodes that a gang rebuilt from ledgers still lacks."""
    return [
        f"it was rebuilt from ledgers, and {name}, which has other workers of it, has not reported "
        f"since: they may run. If it is dead: aryl node confirm-dead {name}"
        for name in entry.attempt.awaited_nodes
    ]


def _pending(engine: Engine, entry: JobEntry, now_s: float) -> list[str]:
    blockers = engine.explain.blockers(entry.job_id)
    reasons = list(blockers)
    if engine.state.is_frozen and not entry.gate.is_shut:
        reasons.insert(0, FROZEN)
    place = engine.explain.queue_place(entry.job_id)
    if place is not None:
        at, count = place
        line = f"number {at} of {count} that wait, in the order of policy {engine.policy.name}"
        all_anew = (
            f"one of {count} that wait; policy {engine.policy.name} ranks all of them at each pass"
        )
        reasons.append(f"it is {line if engine.policy.is_ordered else all_anew}")
    reasons += [
        f"lending {name} is recommended and waits for an operator (aryl loan approve {name})"
        for name in engine.explain.recommended()
        if blockers and not entry.gate.is_shut
    ]
    if not blockers and not engine.state.is_frozen:
        reasons.append("nothing: it starts in the next scheduling pass")
    said = jobs_retry.why_failed(entry)
    if said and not jobs_retry.why_waiting(entry, now_s):
        reasons.append(f"its latest try ended: {said}")
    reasons += _restarts(entry)
    if entry.counts.preemptions:
        reasons.append(f"it was preempted {counted(entry.counts.preemptions, 'time')}")
    if entry.counts.node_faults:
        times = counted(entry.counts.node_faults, "time")
        reasons.append(f"its nodes failed it {times}, which costs it no try")
    return reasons


def _restarts(entry: JobEntry) -> list[str]:
    """The used part of the retry budget of a job that has failed by its own fault."""
    used, most = jobs_retry.restarts_used(entry), entry.spec.retry.max_restarts
    return [f"{used} of {counted(most, 'restart')} used (retry.max_restarts)"] if used else []


def _running(engine: Engine, entry: JobEntry) -> tuple[str, ...]:
    flexible = sum(1 for worker in entry.workers.values() if worker.is_flexible)
    running = counted(entry.running_workers, "worker runs", "workers run")
    said = [f"{running}, {flexible} of them flexible"]
    if entry.attempt.endpoint:
        said.append(f"its rendezvous is at {entry.attempt.endpoint}")
    said += _restarts(entry)
    lent = sorted(
        {
            worker.node
            for worker in entry.workers.values()
            if engine.state.nodes[worker.node].lease is not None
        }
    )
    if lent:
        said.append(f"on lent nodes: {', '.join(lent)}; they may be taken back")
    if entry.state == JobState.RESIZING:
        said.append("a resize is under way")
        said += [
            f"worker {index} on {_not_ready(worker)}"
            for index, worker in sorted(entry.workers.items())
            if worker.order == OrderPhase.RESERVE and worker.stop is None
        ]
    return (*said, *engine.explain.standing(entry.job_id))


def _unknown(engine: Engine, entry: JobEntry, now_s: float) -> list[str]:
    """The workers of a job on LOST nodes: how and when they will count as gone."""
    said: list[str] = []
    for name in sorted({worker.node for worker in entry.workers.values()}):
        since_s = engine.state.nodes[name].contact.silent_since_s
        if since_s is None:
            continue
        end_s = nodes_lost.certain_end_s(engine.settings, entry.spec)
        if end_s is None:
            said.append(
                f"{name} is lost: its workers there count as running until it is heard or "
                f"confirmed dead (aryl node confirm-dead {name}); the job has no stop_after_s"
            )
            continue
        left_s = max(0.0, since_s + end_s - now_s)
        said.append(
            f"{name} is lost: unless it is heard, its workers there count as ended in "
            f"{left_s:.0f} s (stop_after_s, grace and margin: {end_s:.0f} s of silence)"
        )
    return said


def estimate(engine: Engine, entry: JobEntry, *, now_s: float | None = None) -> str:
    """The run-time estimate and where it comes from; now_s as of `reasons`."""
    at_s = engine.state.now_s if now_s is None else now_s
    work_s, source = estimates.remaining_work(entry, at_s)
    workers = max(entry.running_workers, entry.spec.workers.min)
    pace = estimates.pace(entry) or entry.spec.workers.min
    over_s = estimates.outlived_s(entry, at_s)
    if over_s and entry.attempt.ran_at_s is not None:
        source = (
            f"{source}; it has outlived that by {over_s / pace:.0f} s, and as much again is assumed"
        )
    return f"{work_s / pace:.0f} s left with {counted(workers, 'worker')} (source: {source})"


def suspension_reason(engine: Engine, entry: JobEntry, *, now_s: float) -> str:
    """One sentence. now_s: engine time."""
    others = sorted(
        job_id
        for job_id in {
            key.job_id
            for worker in entry.workers.values()
            for slot in engine.state.nodes[worker.node].gpus
            if slot.uuid in worker.gpu_uuids
            for key in (slot.holder, *slot.guests)
            if key is not None
        }
        if engine.state.jobs[job_id].state in COMPUTING
    )
    since_s = 0.0 if entry.suspension.since_s is None else now_s - entry.suspension.since_s
    return (
        f"it keeps its GPUs and has been suspended for {since_s:.0f} s while "
        f"{', '.join(others) or 'no job'} computes on them"
    )


def stopping_reasons(job: JobEntry, *, now_s: float) -> tuple[str, ...]:
    """The next state after the last worker's end, and the grace of the remaining workers.

    Empty for a job that is not ending. now_s: engine time.
    """
    if job.after_vacating is None or job.state in FINAL_JOB_STATES:
        return ()
    left = sorted(
        (worker for worker in job.workers.values() if worker.stop is not None),
        key=lambda worker: (-_left_s(worker, now_s), worker.key),
    )
    nodes = ", ".join(sorted({worker.node for worker in job.workers.values()}))
    return (
        f"{_what(job)} when its workers have left {nodes}",
        *(_of_worker(worker, now_s) for worker in left[:WORKERS_NAMED]),
    )


def _what(job: JobEntry) -> str:
    match job.after_vacating:
        case AfterVacating.CANCEL:
            return f"cancelled by {job.cancelled_by or 'an unknown user'}: it ends"
        case AfterVacating.FAIL:
            why = job.error or f"exit code {job.exit_code}"
            return f"it failed ({why}) and is not tried again: it ends"
        case AfterVacating.SUCCEED:
            return "its work is done: it ends"
        case _ if job.migration is not None:
            nodes = ", ".join(sorted({name for name, _ in job.migration.gpus}))
            return f"it starts again on {nodes}"
        case _:
            return "it waits again"


def _of_worker(worker: WorkerEntry, now_s: float) -> str:
    since_s, left_s = now_s - worker.stop_ordered_at_s, _left_s(worker, now_s)
    grace = (
        f"has {left_s:.0f} s of its grace of {worker.stop_grace_s:g} s left"
        if left_s > 0
        else f"is past its grace of {worker.stop_grace_s:g} s, at whose end its node kills it"
    )
    told = (
        f"worker {worker.key.worker_index} on {worker.node} was ordered to stop {since_s:.0f} s ago"
    )
    return f"{told} and {grace}"


def _left_s(worker: WorkerEntry, now_s: float) -> float:
    return max(0.0, worker.stop_ordered_at_s + worker.stop_grace_s - now_s)


def drain_reasons(engine: Engine, entry: JobEntry, now_s: float) -> list[str]:
    """When a job has to leave nodes that are drained, or will be. now_s: engine time."""
    held = (*entry.workers.values(), *((entry.store,) if entry.store else ()))
    said: list[str] = []
    for name in sorted({worker.node for worker in held}):
        drain = engine.state.drains.get(name)
        if drain is not None:
            left_s = max(0.0, drain.until_s - now_s)
            said.append(
                f"{drain.reason}: unless it ends in {left_s:.0f} s, it is preempted and waits again"
            )
    return said + explain_windows.of_job(engine, entry, now_s)


def prerun_reasons(job: JobEntry) -> tuple[str, ...]:
    """Sentences about a pre-run: that it is one, its GPUs, and the next state of its gang.

    Empty for any other job, and for one that is a gang by now.
    """
    if not prerun_spec.is_on(job):
        return ()
    gpus = counted(job.spec.gpus_per_worker, "GPU")
    match job.state:
        case _ if _is_final(job):
            return (_ended(job, gpus),)
        case JobState.PENDING:
            return (_waits(job, gpus),)
        case _ if job.retry.is_prerun_over:
            return (f"its pre-run on {gpus} succeeded: {_gang(job)} waits next",)
        case _:
            until = f"after {job.spec.prerun.time_s:g} s or a checkpoint"
            return (f"this is its pre-run, on {gpus}: {_gang(job)} waits for its turn {until}",)


def _is_final(job: JobEntry) -> bool:
    """True if it has ended, or will when its worker has left."""
    again = (None, AfterVacating.REQUEUE)
    return job.state in FINAL_JOB_STATES or job.after_vacating not in again


def _waits(job: JobEntry, gpus: str) -> str:
    gang = _gang(job)
    if jobs_retry.why_failed(job):
        return f"its latest pre-run, on {gpus}, ended without a result: it is retried before {gang}"
    return f"it waits for its pre-run, on {gpus}: {gang} comes after that"


def _ended(job: JobEntry, gpus: str) -> str:
    tries = counted(job.attempt.number, "try", "tries")
    what = "it failed in its pre-run" if _has_failed(job) else "it ended in its pre-run"
    if not job.attempt.number:
        return f"it ended before its pre-run, on {gpus}: {_gang(job)} never started"
    took = f"{job.clock.attained_gpu_s:.0f} GPU-s of computing in {tries}"
    return f"{what}, on {gpus} ({took}): {_gang(job)} never started"


def _has_failed(job: JobEntry) -> bool:
    return job.state == JobState.FAILED or job.after_vacating == AfterVacating.FAIL


def _gang(job: JobEntry) -> str:
    """The user's gang, by its minimum size."""
    spec = prerun_spec.submitted(job)
    workers = counted(spec.workers.min, "worker")
    return f"its gang of {workers} with {counted(spec.base_demand_gpus, 'GPU')}"
