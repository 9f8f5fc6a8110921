"""Which nodes have the logs of workers that are gone. Must not know why they ended."""

from __future__ import annotations

from common.messages import OrderPhase
from common.model import STORE_INDEX
from coordinator.engine.state import EndedWorker, JobEntry, WorkerEntry

ENDED_WORKERS_KEPT = 64
"""Of the latest attempt that ran."""
EARLIER_WORKERS_KEPT = 64
"""Of all attempts before it; a state that is saved must not grow with time."""


def remember(job: JobEntry, worker: WorkerEntry) -> None:
    """Keep where the log of a worker is; one that was never ordered to run wrote none.

    A rendezvous store has an order of its own and always wrote one. It takes the place of the
    store before it alone: it may end before any worker of its attempt has run.
    """
    index, ended = worker.key.worker_index, job.ended_workers
    is_store = index == STORE_INDEX
    if worker.order != OrderPhase.RUN and not is_store:
        return
    attempt = worker.key.attempt
    stale = [i for i, other in ended.items() if other.key.attempt != attempt]
    for i in stale:
        if not is_store or i == STORE_INDEX:
            job.earlier_workers.append(ended.pop(i))
    ended[index] = EndedWorker(worker.key, worker.node)
    while len(ended) > ENDED_WORKERS_KEPT:  # an elastic job may shrink and grow for months
        del ended[next(iter(ended))]
    del job.earlier_workers[:-EARLIER_WORKERS_KEPT]


def of_attempt(job: JobEntry, attempt: int | None) -> dict[int, EndedWorker]:
    """Where to look for logs, by worker; its rendezvous store is among them.

    Args:
        attempt: None is the one that runs now, and what is missing of it is taken from the latest
            one that ran.
    """
    if attempt is None:
        found = (*job.ended_workers.values(), *_live(job))
    else:
        found = tuple(worker for worker in _all(job) if worker.key.attempt == attempt)
    return {worker.key.worker_index: worker for worker in found}


def attempts(job: JobEntry) -> list[int]:
    """Attempts of which a worker is known, in order."""
    return sorted({worker.key.attempt for worker in _all(job)})


def _all(job: JobEntry) -> tuple[EndedWorker, ...]:
    return (*job.earlier_workers, *job.ended_workers.values(), *_live(job))


def _live(job: JobEntry) -> list[EndedWorker]:
    stores = () if job.store is None else (job.store,)
    return [EndedWorker(worker.key, worker.node) for worker in (*job.workers.values(), *stores)]
