"""Retry of a job after a fault: whether, when, and on which nodes.

The job's own retry budget is the user's. Within it the class of the failure decides, by the retry
classes of the Philly study (ATC'19, section 5): never, on another node, or after a delay. Exit
codes that a user listed are always retried; the class then only decides where and when
(docs/decisions/0015-failure-classes.md). A fault of the node costs the job nothing. For that very
reason it is never retried at once on the same node.

A path or a command that one node does not find may be a failed mount there, or a mistake in the
job. It counts as the node's fault until a second node reports the same, or where the job fits on no
other node.

A job avoids a node after a fault until an instant of its own for each node.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from msgspec import UNSET
from msgspec.structs import replace

from common.failures import Failure, RetryClass, is_more_telling
from common.model import JobState, NodeName, StopReason
from coordinator.engine.jobs import ended_workers
from coordinator.engine.state.context import Context
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import (
    AfterVacating,
    Avoided,
    Ending,
    JobEntry,
    NodeEntry,
    RetryEntry,
    WorkerEntry,
)
from coordinator.policies.contract.text import counted, some

NODES_NAMED = 4
"""The most node names in a sentence."""


def leave(
    retry: RetryEntry, nodes: Iterable[NodeName], until_s: float, *, is_own_fault: bool = False
) -> None:
    """Avoid nodes until an instant; earlier entries for them stay."""
    for name in sorted(nodes):
        known = retry.avoided.get(name, Avoided(until_s))
        retry.avoided[name] = Avoided(
            max(known.until_s, until_s), is_own_fault=known.is_own_fault or is_own_fault
        )


def blamed(retry: RetryEntry, now_s: float) -> list[NodeName]:
    """Nodes that are avoided for their own fault, not for a fault of the job there."""
    return [
        name for name, one in retry.avoided.items() if one.until_s > now_s and not one.is_own_fault
    ]


def avoids_until_s(job: JobEntry) -> float | None:
    """When the first of them may be used again; None: time alone changes nothing.

    A running job avoids the node of its own fault for good, because it computes elsewhere.
    """
    return min(_ends_s(job).values(), default=None) if job.retry.avoided else None


def stop_avoiding(ctx: Context, job: JobEntry) -> None:
    """Forget nodes that were avoided for long enough."""
    over = sorted(name for name, until_s in _ends_s(job).items() if until_s <= ctx.now_s)
    if not over:
        return
    ctx.changed_jobs[job.job_id] = None
    for name in over:
        del job.retry.avoided[name]
    if job.state == JobState.PENDING:
        what = "avoids fewer nodes" if job.retry.avoided else "avoids no node any more"
        ctx.log_event(job.job_id, what, f"it has waited for others than {', '.join(over)}")


def _ends_s(job: JobEntry) -> dict[NodeName, float]:
    """When each of them may be used again, as far as time alone decides it."""
    waits = job.state == JobState.PENDING
    return {
        name: one.until_s
        for name, one in job.retry.avoided.items()
        if waits or not one.is_own_fault
    }


def told(job: JobEntry, now_s: float) -> str:
    """As text: which of them may be used again in how many seconds, the first ones first. Empty if
    time alone changes nothing.
    """
    groups: dict[str, list[NodeName]] = {}
    for name, until_s in sorted(_ends_s(job).items(), key=lambda one: (one[1], one[0])):
        groups.setdefault(f"in {max(0.0, until_s - now_s):.0f} s", []).append(name)
    parts = [f"{named(names)} again {when}" for when, names in groups.items()]
    more = len(parts) - NODES_NAMED
    return ", ".join(parts[:NODES_NAMED]) + (f" and {more} later" if more > 0 else "")


def why_not_growing(job: JobEntry, now_s: float) -> tuple[str, ...]:
    """In words, onto which nodes a job that runs is not to grow; nothing where it may onto all."""
    if not job.spec.is_elastic:
        return ()
    ends_s = _ends_s(job)
    own = sorted(name for name in job.retry.avoided if name not in ends_s)
    said = [f"it does not grow onto {named(own)}, where it failed by its own fault"] if own else []
    if ends_s:
        said.append(f"it may grow onto {told(job, now_s)}")
    return tuple(said)


def named(nodes: list[NodeName]) -> str:
    """Names of nodes as text, shortened if there are many."""
    return some(nodes, NODES_NAMED)


STALLED = "stalled"
"""The reason of an attempt that was ended because it stopped reporting progress; see `stalls`."""

REVISABLE = frozenset({AfterVacating.REQUEUE, AfterVacating.FAIL})


def own_fault(
    ctx: Context,
    job: JobEntry,
    node: NodeName,
    ending: Ending,
) -> bool:
    """Count a fault of the job's own, on a node; whether the job is tried again."""
    retry, uses_class, failure = job.retry, ctx.settings.retry_by_failure_class, ending.failure
    retry.failure, retry.attempt = failure, job.attempt.number
    retry.at_s, retry.avoided, retry.node_faults = None, {}, 0
    retry.failed_on = [node]
    # Only a word of the log makes a fault free: any program can end by a signal of its own.
    is_free = bool(uses_class and failure and failure.is_free and failure.is_explicit)
    retry.is_charged = not (is_free or _follows_a_peer(ctx, job))
    ran_s, reset_after_s = _ran_s(ctx, job), job.spec.retry.reset_after_s
    if ran_s >= ctx.settings.retry_reset_s:
        retry.in_a_row = 0
    if reset_after_s is not UNSET and ran_s >= reset_after_s:
        retry.forgiven = job.counts.own_faults
    job.counts.own_faults += retry.is_charged
    retry.in_a_row += 1
    if failure is not None:
        retry.counts[failure.reason] = retry.counts.get(failure.reason, 0) + 1
        _suspect(ctx, job, node, failure)
    if _why_no_more(job, ctx.settings, ending.exit_code):
        return False
    _prepare(ctx, job, node, failure if uses_class else None)
    return True


def _ran_s(ctx: Context, job: JobEntry) -> float:
    """How long the attempt that fails now ran."""
    ran_at_s = job.attempt.ran_at_s
    return 0.0 if ran_at_s is None else ended_workers.waits_since_s(job, ctx.now_s) - ran_at_s


def peer_left(job: JobEntry, worker: WorkerEntry, ended_at_s: float) -> None:
    """A worker has ended; of a flexible one its gang is smaller from then on and meets again."""
    if worker.is_flexible and job.after_vacating is None:
        job.retry.peer_left_at_s = ended_at_s


def _follows_a_peer(ctx: Context, job: JobEntry) -> bool:
    """Whether it only saw a connection break, while or just after a flexible worker left the gang.

    A broken connection alone proves nothing: a peer that fails by itself breaks it as well.
    """
    retry, ran_at_s = job.retry, job.attempt.ran_at_s
    if retry.failure is None or retry.failure.retry != RetryClass.BACK_OFF or ran_at_s is None:
        return False
    if any(worker.stop == StopReason.RELEASE for worker in job.workers.values()):
        return True
    left_at_s = retry.peer_left_at_s
    if left_at_s is None or left_at_s < ran_at_s:
        return False
    return ended_workers.waits_since_s(job, ctx.now_s) - left_at_s <= ctx.settings.resize_p99_s


def restarts_used(job: JobEntry) -> int:
    """How many of its `retry.max_restarts` are spent; its latest fault is one more than it has when
    that ended it."""
    return job.counts.own_faults - job.retry.forgiven


def why_ended(job: JobEntry, settings: EngineSettings) -> str:
    """In words, the rule by which a job's own fault was its last, and the way out; empty for a job
    that another thing ended, or that is tried again."""
    failed = job.state == JobState.FAILED or job.after_vacating == AfterVacating.FAIL
    if not failed or job.retry.attempt != job.attempt.number or job.retry.node_faults:
        return ""
    return _why_no_more(job, settings, job.exit_code)


def _why_no_more(job: JobEntry, settings: EngineSettings, exit_code: int | None) -> str:
    """The same of a fault that was just counted; empty if another try follows it.

    What the user listed goes before the failure class; nothing goes before the budget.
    """
    spec, retry = job.spec.retry, job.retry
    used, most, codes = restarts_used(job), spec.max_restarts, spec.on_exit_codes
    # An attempt that was ended for its silence has no exit code that a user could list.
    is_stalled = retry.failure is not None and retry.failure.reason == STALLED
    if retry.is_charged and codes and exit_code not in codes and not is_stalled:
        listed = ", ".join(str(code) for code in codes)
        is_told = exit_code is not None
        own = f"exit code {exit_code} is" if is_told else "an end without exit code is"
        out = f": list {exit_code} there to retry the job" if is_told else ""
        return f"{own} not among retry.on_exit_codes ({listed}){out}"
    if retry.is_charged and used > most:
        if not most:
            return "retry.max_restarts is 0: set it to retry a job after its own faults"
        return (
            f"{counted(most, 'restart')} of retry.max_restarts used, none is left: submit it "
            "again, with more restarts to retry it longer"
        )
    failure = retry.failure
    if failure is None or not settings.retry_by_failure_class or codes:
        return ""
    if failure.retry == RetryClass.NEVER:
        why = "it would fail again on every node (failure class never)"
    elif _is_spent(failure, retry.counts):
        times = counted(failure.most_retries or 0, "time")
        why = f"this failure is retried {times} at most (most_retries of its rule)"
    else:
        return ""
    left = max(0, most - used + retry.is_charged)
    out = "" if exit_code is None else f": list {exit_code} in retry.on_exit_codes to use them"
    unused = f"; {left} of {counted(most, 'restart')} left unused{out}" if left else ""
    return f"{failure.title}: {why}{unused}"


def _is_spent(failure: Failure, counts: Mapping[str, int]) -> bool:
    """Whether its rule allows no more tries after that reason; the packaged ones set no limit."""
    most = failure.most_retries
    return most is not None and counts.get(failure.reason, 0) > most


def _prepare(ctx: Context, job: JobEntry, node: NodeName, failure: Failure | None) -> None:
    """Where and when the next try is made.

    After the first fault of a row it may be at once, because most transient failures are of one
    node. After more of them there is a pause whatever the class. Otherwise a job that fails in a
    second would take its GPUs from others sixty times a minute.
    """
    retry, settings = job.retry, ctx.settings
    is_passing = failure is not None and failure.retry == RetryClass.BACK_OFF
    pauses = retry.in_a_row if is_passing else retry.in_a_row - 1
    if (
        failure is not None
        and failure.retry == RetryClass.ELSEWHERE
        and _fits_without(ctx, job, [node])
    ):
        leave(retry, [node], ctx.now_s + settings.retry_avoid_s, is_own_fault=True)
    retry.at_s = ctx.now_s + _back_off_s(settings, pauses) if pauses else None


def node_fault(ctx: Context, job: JobEntry, node: NodeName, *, is_in_vain: bool = False) -> None:
    """After a fault of a node, retry elsewhere or later.

    Nothing else keeps a node that starts no worker from taking the same job again and again. The
    node is avoided for the back-off, which grows with each node fault in a row, and not for
    `retry_avoid_s`: it may soon be well again, for example after a reboot, and may be the only free
    one. A gang that fits nowhere else, or only where it was refused before, waits that long only if
    it ran for less. So no cycle is faster than that; otherwise others would take the nodes that a
    large gang needs together.

    is_in_vain: the node could not start the worker. The cause may be the job's own storage, which
        follows the job: during the back-off no further node is lent for it.
    """
    ran_s = 0.0 if job.attempt.ran_at_s is None else ctx.now_s - job.attempt.ran_at_s
    if ran_s > ctx.settings.retry_backoff_max_s:
        job.retry.node_faults = 0  # it was well there for long: this is another matter
    _go_elsewhere(ctx, job, [node], took_s=ran_s, is_in_vain=is_in_vain)


def not_ready(ctx: Context, job: JobEntry, nodes: Collection[NodeName]) -> None:
    """A gang was not ready in time because of these nodes: the next try avoids them as after a node
    fault.

    The cause is unknown, so no fault is counted and no node is closed for it: the job's own storage
    may hang.
    """
    took_s = ctx.settings.gang_ready_timeout_s
    _go_elsewhere(ctx, job, sorted(nodes), took_s=took_s, is_in_vain=True)


def _go_elsewhere(
    ctx: Context, job: JobEntry, nodes: list[NodeName], *, took_s: float, is_in_vain: bool
) -> None:
    """took_s: how long the attempt has lasted that these nodes ended, in seconds."""
    retry = job.retry
    before = blamed(retry, ctx.now_s)
    retry.node_faults += 1
    wait_s = _back_off_s(ctx.settings, retry.node_faults)
    until_s = ctx.now_s + wait_s
    retry.no_loan_until_s = until_s if is_in_vain else None
    retry.at_s, retry.failed_on, known, retry.avoided = None, nodes, retry.avoided, {}
    for kept in (list(known), before, []):
        if _fits_without(ctx, job, {*kept, *nodes}):
            retry.avoided = {name: known[name] for name in kept}
            leave(retry, nodes, until_s)
            break
    if not retry.avoided.keys() >= {*before, *nodes} and took_s < wait_s:
        retry.at_s = until_s


def asks_for_more(ctx: Context, job: JobEntry) -> None:
    """A job is a gang now and needs more than its pre-run did: it leaves a node alone still only
    where the others would take the gang; of two nodes the one that was to be left for longer.
    """
    retry, known = job.retry, job.retry.avoided
    retry.avoided = {}
    for name in sorted(known, key=lambda name: (-known[name].until_s, name)):
        if _fits_without(ctx, job, {*retry.avoided, name}):
            retry.avoided[name] = known[name]
    if gone := sorted(known.keys() - retry.avoided.keys()):
        what = "avoids fewer nodes" if retry.avoided else "avoids no node any more"
        ctx.log_event(job.job_id, what, f"its gang does not fit without {named(gone)}")


def judged(ctx: Context, job: JobEntry, node: NodeName, ending: Ending) -> Ending:
    """How a worker ended, with a refusal taken for its node's fault or for the job's own."""
    if not ending.refused or ending.is_node_fault:
        return ending
    retry = job.retry
    first = retry.refused_by.setdefault(ending.refused, node)
    if first != node:
        return replace(ending, error=_both(ending.error, first, node))
    if not _fits_without(ctx, job, set(retry.refused_by.values())):
        return replace(ending, error=f"{ending.error} ({node}; the job fits nowhere else)")
    retry.refused_attempt = job.attempt.number
    return replace(ending, error=f"{ending.error} ({node})", is_node_fault=True)


def _both(error: str, first: NodeName, second: NodeName) -> str:
    return f"{error} ({first}, {second})"


def left_alone(ctx: Context, job: JobEntry, node: NodeName) -> None:
    """A running job was refused one more worker on a node. It computes elsewhere, so this counts as
    the node's fault, and the job grows on others; for a while on none that was lent for it.
    """
    leave(job.retry, [node], ctx.now_s + ctx.settings.retry_avoid_s)
    job.retry.no_loan_until_s = ctx.now_s + ctx.settings.retry_backoff_max_s


def left_for_now(ctx: Context, job: JobEntry, nodes: Collection[NodeName]) -> None:
    """A running job could not grow onto these nodes in time: it tries others, and these again when
    they may be ready.
    """
    retry = job.retry
    retry.node_faults += 1
    retry.no_loan_until_s = ctx.now_s + _back_off_s(ctx.settings, retry.node_faults)
    leave(retry, nodes, retry.no_loan_until_s)


def _back_off_s(settings: EngineSettings, count: int) -> float:
    """Seconds to wait after a number of faults in a row: doubled each time, up to the maximum."""
    wait_s = settings.retry_backoff_s
    for _ in range(1, count):
        wait_s = min(2.0 * wait_s, settings.retry_backoff_max_s)
    return min(wait_s, settings.retry_backoff_max_s)


def _fits_without(ctx: Context, job: JobEntry, avoided: Collection[NodeName]) -> bool:
    """True if the base gang would fit on the other nodes if they were empty."""
    size, least = job.spec.gpus_per_worker, job.spec.workers.min
    factors = job.spec.gpu.worker_multiplier
    missing: dict[str, int] = {}
    for node in ctx.state.nodes.values():
        if node.name in avoided or not _may_take(node):
            continue
        for kind in filter(job.spec.accepts, node.gpu_types):
            if kind not in missing:
                missing[kind] = least * factors.get(kind, 1)
            missing[kind] -= node.count_of(kind) // size
            if missing[kind] <= 0:
                return True  # mostly after a few nodes: a rack that dies asks this of many jobs
    return False


def _may_take(node: NodeEntry) -> bool:
    is_training = node.role == node.home_role and node.service is None
    is_open = not (
        node.cordon.is_cordoned
        or node.ledger.error
        or node.failed_starts.closed_reason
        or node.is_out
    )
    return is_training and is_open


def _suspect(ctx: Context, job: JobEntry, name: NodeName, failure: Failure) -> None:
    """Close faulty hardware to other jobs, where the operator wants that."""
    node = ctx.state.nodes.get(name)
    if node is None or not failure.suspects_node or node.cordon.is_cordoned:
        return
    why = f"{failure.title} in job {job.job_id}"
    if not ctx.settings.cordon_suspect_nodes:
        ctx.log_event(node.name, "cordon recommended", why)
        return
    node.cordon.is_cordoned, node.cordon.reason = True, why
    ctx.log_event(node.name, "cordoned", why)
    ctx.touch(node.name)


def learned(ctx: Context, job: JobEntry, node: NodeName, ending: Ending) -> None:
    """Another worker of an ending gang reports why it failed: the root cause counts.

    The first report may be of a peer that only saw the connection break.
    """
    retry, failure = job.retry, ending.failure
    if ending.refused:
        _refused_too(ctx, job, node, ending)
    elif ending.is_node_fault:
        _node_was_gone(ctx, job, node, ending)
    if (
        failure is None
        or retry.attempt != job.attempt.number
        or job.after_vacating not in REVISABLE
    ):
        return
    first = retry.failure
    if not is_more_telling(failure, first):
        return
    job.counts.own_faults -= retry.is_charged
    retry.in_a_row -= 1
    if first is not None:
        retry.counts[first.reason] -= 1  # it is counted as this one
    may_retry = own_fault(ctx, job, node, Ending(exit_code=job.exit_code, failure=failure))
    job.after_vacating = AfterVacating.REQUEUE if may_retry else AfterVacating.FAIL
    ctx.log_event(job.job_id, "root cause", f"{node}: {failure}")


def _node_was_gone(ctx: Context, job: JobEntry, node: NodeName, ending: Ending) -> None:
    """A node of an ending gang was lost. Then that is why the others' connections broke; they
    reported first, because a node is LOST only after a timeout.
    """
    retry, first = job.retry, job.retry.failure
    is_its_own = retry.attempt == job.attempt.number and retry.is_charged and not retry.node_faults
    if not is_its_own or job.after_vacating not in REVISABLE:
        return
    if first is None or first.retry != RetryClass.BACK_OFF:
        return
    job.counts.own_faults -= 1
    retry.in_a_row -= 1
    retry.counts[first.reason] = max(0, retry.counts.get(first.reason, 0) - 1)
    retry.is_charged = False
    job.counts.node_faults += 1
    job.error = ending.in_words
    node_fault(ctx, job, node)
    job.after_vacating = AfterVacating.REQUEUE
    ctx.log_event(job.job_id, "root cause", f"{node}: {ending.in_words}")


def _refused_too(ctx: Context, job: JobEntry, node: NodeName, ending: Ending) -> None:
    """A second node of a gang that is ending refused it for the same: it is no node's fault."""
    retry = job.retry
    first = retry.refused_by.setdefault(ending.refused, node)
    is_ending_for_it = retry.refused_attempt == job.attempt.number
    if first == node or not is_ending_for_it or job.after_vacating != AfterVacating.REQUEUE:
        return
    retry.refused_attempt = 0
    job.counts.node_faults -= 1
    job.error = _both(ending.error, first, node)
    may_retry = own_fault(ctx, job, node, Ending(error=job.error))
    job.after_vacating = AfterVacating.REQUEUE if may_retry else AfterVacating.FAIL
    ctx.log_event(job.job_id, "root cause", job.error)


# --- time passes --------------------------------------------------------------------------------


def rests(job: JobEntry) -> bool:
    """Whether it waits for its next try, and no policy is to see it."""
    return job.state == JobState.PENDING and job.retry.at_s is not None


def deadline_s(job: JobEntry) -> float | None:
    """When time alone changes where or when a job may have workers again."""
    if rests(job):
        return job.retry.at_s
    loan_s, avoids_s = job.retry.no_loan_until_s, avoids_until_s(job)
    if loan_s is None or avoids_s is None:
        return avoids_s if loan_s is None else loan_s
    return min(loan_s, avoids_s)


def time_is_up(ctx: Context, job: JobEntry) -> None:
    """It has waited long enough, or avoided a node for long enough."""
    retry = job.retry
    if rests(job):
        if retry.at_s is not None and retry.at_s <= ctx.now_s:
            ctx.changed_jobs[job.job_id], retry.at_s = None, None
        return
    stop_avoiding(ctx, job)
    if retry.no_loan_until_s is not None and retry.no_loan_until_s <= ctx.now_s:
        ctx.changed_jobs[job.job_id], retry.no_loan_until_s = None, None
        ctx.needs_loan_pass = True


def why_waiting(job: JobEntry, now_s: float) -> str:
    """As text: why the job may not start now, or not where its latest try failed, with the end of
    that and the error. Empty for a job that may start anywhere.
    """
    retry, what = job.retry, _what_failed(job)
    if rests(job) and retry.at_s is not None:
        which = _which_restart(job)
        return f"tries again in {max(0.0, retry.at_s - now_s):.0f} s{which}: {_placed(what, job)}"
    if not (said := told(job, now_s)):
        return ""
    return f"tries {said}, others at once: {_placed(what, job)}"


def _which_restart(job: JobEntry) -> str:
    """As text: which restart of how many follows, if the job waits for its own fault."""
    retry = job.retry
    if retry.node_faults or not retry.is_charged:
        return ""
    return f" (restart {restarts_used(job)} of {job.spec.retry.max_restarts})"


def why_not_lent(job: JobEntry, now_s: float) -> tuple[str, ...]:
    """In words, that no node is lent for it, and for how long; nothing where one may be."""
    if job.retry.no_loan_until_s is None:
        return ()
    return (f"no node is lent for it for {max(0.0, job.retry.no_loan_until_s - now_s):.0f} s",)


def why_failed(job: JobEntry) -> str:
    """In words, what ended the latest try of a job that waits, and where; empty if nothing did."""
    return _placed(_what_failed(job), job) if job.error or job.retry.failed_on else ""


def _what_failed(job: JobEntry) -> str:
    retry = job.retry
    if retry.failure is not None and not retry.node_faults:
        return str(retry.failure)
    if job.error:
        return job.error
    return f"exit code {job.exit_code}" if job.exit_code is not None else "a try failed"


def _placed(what: str, job: JobEntry) -> str:
    """The error with the nodes at fault, where the text does not name them all."""
    told = set(re.findall(r"[\w.-]*\w", what))
    missing = [name for name in job.retry.failed_on if name not in told]
    return f"{what} ({named(missing)})" if missing else what
