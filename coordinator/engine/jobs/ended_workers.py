"""Which nodes keep the logs of ended workers, and when each worker ended."""

from __future__ import annotations

from common.messages import OrderPhase
from common.model import STORE_INDEX
from coordinator.engine.state.job_groups import EndedWorker
from coordinator.engine.state.tables import JobEntry, WorkerEntry

ENDED_WORKERS_KEPT = 64
"""For the latest attempt that ran."""
EARLIER_WORKERS_KEPT = 64
"""For all attempts before it; a saved state must not grow with time."""
HEARD_LATE_S = 15.0
"""An end that is reported this long after it happened could not be reported in time: no coordinator
led, or its node was cut off. It is also the silence after which a node is LOST. Reports with a
smaller delay are as late as usual; then the end counts from the report.
"""


def left(job: JobEntry, worker: WorkerEntry, ended_at_s: float) -> None:
    """A worker ended, at that instant; not for a store, which a gang need not wait for."""
    job.ended.at_s = max(job.ended.at_s, ended_at_s)
    remember(job, worker)


def remember(job: JobEntry, worker: WorkerEntry) -> None:
    """Keep where the log of a worker is; a worker that was never ordered to run wrote none.

    A rendezvous store has an order of its own and always wrote a log. It replaces only the store
    before it, because it may end before any worker of its attempt has run.
    """
    index, ended = worker.key.worker_index, job.ended.workers
    is_store = index == STORE_INDEX
    if worker.order != OrderPhase.RUN and not is_store:
        return
    attempt = worker.key.attempt
    stale = [i for i, other in ended.items() if other.key.attempt != attempt]
    for i in stale:
        if not is_store or i == STORE_INDEX:
            job.ended.earlier.append(ended.pop(i))
    ended[index] = EndedWorker(worker.key, worker.node)
    while len(ended) > ENDED_WORKERS_KEPT:  # an elastic job may shrink and grow for months
        del ended[next(iter(ended))]
    del job.ended.earlier[:-EARLIER_WORKERS_KEPT]


def waits_since_s(job: JobEntry, now_s: float) -> float:
    """Since when a job waits whose last worker was just reported gone after an attempt that ran:
    since that worker's end, if the report could not come earlier.
    """
    ran_at_s = now_s if job.attempt.ran_at_s is None else job.attempt.ran_at_s
    since_s = max(job.ended.at_s, ran_at_s)
    return since_s if now_s - since_s >= HEARD_LATE_S else now_s


def of_attempt(job: JobEntry, attempt: int | None) -> dict[int, EndedWorker]:
    """Where to look for logs, by worker, its rendezvous store included.

    Args:
        attempt: None is the running one; logs that it lacks come from the latest one that ran.
    """
    if attempt is None:
        found = (*job.ended.workers.values(), *_live(job))
    else:
        found = tuple(worker for worker in _all(job) if worker.key.attempt == attempt)
    return {worker.key.worker_index: worker for worker in found}


def attempts(job: JobEntry) -> list[int]:
    """Attempts of which a worker is known, in order."""
    return sorted({worker.key.attempt for worker in _all(job)})


def _all(job: JobEntry) -> tuple[EndedWorker, ...]:
    return (*job.ended.earlier, *job.ended.workers.values(), *_live(job))


def _live(job: JobEntry) -> list[EndedWorker]:
    stores = () if job.store is None else (job.store,)
    return [EndedWorker(worker.key, worker.node) for worker in (*job.workers.values(), *stores)]
