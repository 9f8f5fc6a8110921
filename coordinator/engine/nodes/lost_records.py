"""Records lost from a damaged journal: jobs that may still run wait until all nodes have reported.

The lost records may have started, moved or ended any job. A node's report and its ledger show what
runs there, so a waiting job starts again only after all nodes of that time have reported.
"""

from __future__ import annotations

from common.model import JobId, JobState, NodeName, NodeRole
from coordinator.engine.jobs import lifecycle as jobs_lifecycle
from coordinator.engine.state.context import Context
from coordinator.engine.state.events import RecordsLost
from coordinator.engine.state.tables import ClusterState, JobEntry
from coordinator.policies.contract.text import some

NAMED = 8
"""Nodes that a line names; more are counted."""
IF_OFF = "if the node is certainly off: aryl node confirm-dead NODE"


def records_lost(ctx: Context, event: RecordsLost) -> None:
    """Tell which records are gone; doubt what the state says of jobs, unless the state is whole."""
    state = ctx.state
    if event.lines > state.stories_dropped + len(state.stories):
        # The lines here are among those; the lines of the lost records keep their numbers.
        state.stories, state.stories_dropped = [], event.lines
    what = f"journal {span(event)} lost"
    if event.is_state_whole:
        ctx.log_event(
            "cell", what, "the leader had their effect in memory: no job or order is lost"
        )
        return
    ctx.log_event(
        "cell",
        what,
        "jobs submitted and orders given in them are forgotten, unless a node's ledger has the job",
    )
    for name, node in state.nodes.items():
        if node.role != NodeRole.LOST:
            state.doubted_nodes[name] = None
    state.doubted_jobs.update(state.live_jobs)
    ctx.changed_jobs.update(state.doubted_jobs)


def span(event: RecordsLost) -> str:
    """The lost records by their numbers, in words."""
    if event.last == event.first:
        return f"record {event.first}"
    end = f"to {event.last}" if event.last > event.first else "on"
    return f"records {'' if event.last > event.first else 'from '}{event.first} {end}"


def is_held(state: ClusterState, job_id: JobId) -> bool:
    """Whether a job must not start yet, as it may run where nothing was heard from."""
    return job_id in state.doubted_jobs and state.jobs[job_id].state == JobState.PENDING


def may_run_unseen(state: ClusterState, job: JobEntry) -> bool:
    """True if a lost record may have ordered a gang to run on a node that has not reported since.

    The orders and phases of this gang in the state prove nothing.
    """
    if job.job_id not in state.doubted_jobs:
        return False
    return bool(_unheard(state, job))


def why_no_timeout(state: ClusterState, job: JobEntry) -> str:
    """In words; empty for a gang that may time out."""
    if not may_run_unseen(state, job):
        return ""
    return (
        "journal records were lost, and it may have been ordered to run in them: it does not time "
        f"out and waits for {some(_unheard(state, job), NAMED)}; {IF_OFF}"
    )


def _unheard(state: ClusterState, job: JobEntry) -> list[NodeName]:
    """Nodes of a gang that were not heard since records were lost."""
    workers = (*job.workers.values(), *(() if job.store is None else (job.store,)))
    return sorted({worker.node for worker in workers} & state.doubted_nodes.keys())


def why_held(state: ClusterState, job_id: JobId) -> str:
    """In words; empty for a job that may start."""
    if not is_held(state, job_id):
        return ""
    names = some(sorted(state.doubted_nodes), NAMED) or "a node's ledger"
    return (
        f"journal records were lost, and it may have been started in them: waits for {names}; "
        f"{IF_OFF}"
    )


def confirm_dead(state: ClusterState, name: NodeName) -> None:
    """An operator vouches that nothing runs on a node."""
    state.doubted_nodes.pop(name, None)


def settle(ctx: Context) -> None:
    """Release the jobs whose workers are known, as soon as every node has reported what it holds.

    Reservations that this job gave up meanwhile are released now, if no node can run them.
    """
    state = ctx.state
    for name in list(state.doubted_nodes):
        node = state.nodes.get(name)
        if node is None or node.contact.is_heard:
            del state.doubted_nodes[name]
    if state.doubted_nodes:
        return
    unread = {key.job_id for node in state.nodes.values() for key in node.ledger.unknown_workers}
    for job_id in [job_id for job_id in state.doubted_jobs if job_id not in unread]:
        del state.doubted_jobs[job_id]
        job = ctx.job(job_id)
        if job is not None:
            ctx.changed_jobs[job_id] = None
            jobs_lifecycle.leave_reservations(ctx, job)
        ctx.needs_pass = True
