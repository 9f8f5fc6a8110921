"""The context of one engine call: the state, the instant, and the results so far.

Handlers change the state through it.

It also bounds the state, because a cell lives for years. The oldest ended entries go first; live
ones stay. A trim leaves room for as many entries again, so that most ends cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from common.history import Detail, OrderRecord, StoryKind
from common.messages import GpuHealth
from common.model import GpuUuid, JobId, NodeName, WorkerKey
from coordinator.engine.state.commands import Refused
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.engine.state.tables import (
    ClusterState,
    GpuSlot,
    JobEntry,
    LoanEntry,
    NodeEntry,
    StoryLine,
    WorkerEntry,
)
from coordinator.policies.contract.decisions import Decision


def forget_jobs(ctx: Context) -> None:
    """Keep the newest ended jobs only."""
    kept = ctx.settings.finished_jobs_kept
    if len(ctx.state.jobs) <= 2 * kept:
        return
    ended = [job for job in ctx.state.jobs.values() if job.finished_at_s is not None]
    for job in ended[: max(0, len(ended) - kept)]:
        del ctx.state.jobs[job.job_id]


def forget_arrays(ctx: Context) -> None:
    """Keep as many of the newest ended arrays as ended jobs."""
    kept = ctx.settings.finished_jobs_kept
    if len(ctx.state.arrays) <= 2 * kept:
        return
    ended = [array_id for array_id in ctx.state.arrays if array_id not in ctx.state.live_arrays]
    for array_id in ended[: max(0, len(ended) - kept)]:
        del ctx.state.arrays[array_id]


def forget_loans(ctx: Context) -> None:
    """Keep the newest of the loans that came home only."""
    kept = ctx.settings.ended_loans_kept
    if len(ctx.state.loans) <= 2 * kept:
        return
    ended = [loan for loan in ctx.state.loans.values() if loan.returned_at_s is not None]
    for loan in ended[: max(0, len(ended) - kept)]:
        del ctx.state.loans[loan.lease_id]


NONE_BARRED = frozenset[GpuUuid]()


class Context:
    """The scratch pad of one event.

    changed_nodes: their state or their workers changed.
    dirty_nodes: their desired state changed.
    changed_jobs: any field of them changed.
    changed_arrays: tasks of them may enter the line, or have ended.
    ended_jobs: they are over since this event.
    order: the person's order that this event is; its first line has it as its record.
    is_deciding: a decision of the policy is carried out.

    A handler that changes a table marks it here: views, tallies and deadlines are rebuilt only for
    marked entries.
    """

    __slots__ = (
        "ask_ledgers",
        "changed_arrays",
        "changed_jobs",
        "changed_nodes",
        "decisions",
        "dirty_nodes",
        "ended_jobs",
        "is_deciding",
        "needs_loan_pass",
        "needs_pass",
        "now_s",
        "order",
        "refused",
        "settings",
        "state",
    )

    def __init__(self, state: ClusterState, settings: EngineSettings, now_s: float) -> None:
        self.state = state
        self.settings = settings
        self.now_s = now_s
        self.dirty_nodes: dict[NodeName, None] = {}
        self.changed_nodes: dict[NodeName, None] = {}
        self.changed_jobs: dict[JobId, None] = {}
        self.changed_arrays: dict[JobId, None] = {}
        self.ask_ledgers: dict[NodeName, None] = {}
        self.decisions: list[Decision] = []
        self.refused: list[Refused] = []
        self.ended_jobs: list[JobId] = []
        self.order: OrderRecord | None = None
        self.is_deciding = False
        self.needs_pass = False
        self.needs_loan_pass = False

    def ago(self, seconds: float) -> float:
        """The instant a number of seconds ago, as the reporter counted them."""
        return self.now_s - max(0.0, seconds)

    def touch(self, node: NodeName) -> None:
        """The node's desired state changes; it gets a new generation when the event is done."""
        self.dirty_nodes[node] = None

    def log_event(
        self,
        subject: str,
        what: str,
        reason: str = "",
        *,
        kind: StoryKind | None = None,
        detail: Detail | None = None,
    ) -> None:
        """One line for `explain`, `events` and `history`.

        kind: by default what this event is: an order, a decision, or a fact.
        detail: its record for accounting.
        """
        if kind is None:
            kind = StoryKind.DECISION if self.is_deciding else StoryKind.EVENT
            if self.order is not None and detail is None:
                kind, detail, self.order = StoryKind.ORDER, self.order, None
        self.state.stories.append(StoryLine(self.now_s, subject, what, reason, kind, detail))
        kept = self.settings.story_lines_kept
        if len(self.state.stories) > kept:
            dropped = len(self.state.stories) - kept + kept // 10
            del self.state.stories[:dropped]
            self.state.stories_dropped += dropped

    def service_settings(self, name: str | None) -> ServiceSettings | None:
        """Settings of a service by name."""
        return next((s for s in self.settings.services if s.name == name), None)

    def job(self, job_id: JobId) -> JobEntry | None:
        """A job by id."""
        return self.state.jobs.get(job_id)

    def worker(self, key: WorkerKey) -> WorkerEntry | None:
        """The worker of a key, if it is of its job's present attempt; a store is no worker."""
        job = self.state.jobs.get(key.job_id)
        if job is None or job.attempt.number != key.attempt:
            return None
        return job.workers.get(key.worker_index)

    def loan_of(self, name: NodeName | None) -> LoanEntry | None:
        """The loan that a node is under or was promised to; None if it is not lent."""
        node = None if name is None else self.state.nodes.get(name)
        if node is None or node.lease is None:
            return None
        return self.state.loans[node.lease.lease_id]


def is_leaving(ctx: Context, node: NodeEntry, key: WorkerKey) -> bool:
    """True if the worker was ordered to stop, so that its GPUs come free by themselves."""
    worker = ctx.worker(key)
    if worker is not None:
        return worker.stop is not None
    return any(left.key == key for left in node.ledger.left_reservations)


def keys_on(node: NodeEntry) -> set[WorkerKey]:
    """Keys of the workers that hold GPUs of a node or were promised them."""
    keys: set[WorkerKey] = set()
    last: WorkerKey | None = None
    for slot in node.gpus:
        holder = slot.holder
        if holder is not last and holder is not None:  # a worker's GPUs stand in a row
            keys.add(holder)
            last = holder
        if slot.nominee is not None:
            keys.add(slot.nominee)
        if slot.guests:
            keys.update(slot.guests)
    return keys


def slots_of(node: NodeEntry, key: WorkerKey) -> list[GpuSlot]:
    """GPUs of a node that one worker holds, shares or was promised."""
    return [
        slot
        for slot in node.gpus
        if (slot.holder is not None and slot.holder == key)
        or (slot.nominee is not None and slot.nominee == key)
        or (slot.guests and key in slot.guests)
    ]


def free_slots(ctx: Context, node: NodeEntry) -> list[GpuSlot]:
    """GPUs that can be promised now: free ones first, then those being vacated. A GPU with a
    foreign process is left out: its node would wait for that process to end.
    """
    free: list[GpuSlot] = []
    vacated: list[GpuSlot] = []
    last: WorkerKey | None = None
    last_leaves, healthy, trespassed = False, GpuHealth.OK, node.trespassed
    out = node.out_uuids if node.gpu_conditions else NONE_BARRED
    for slot in node.gpus:
        if slot.nominee is not None or slot.health is not healthy or slot.is_gone:
            continue
        if (trespassed and slot.uuid in trespassed) or slot.uuid in out:
            continue
        if slot.holder is None:
            free.append(slot)
            continue
        if slot.holder is not last:  # a worker's GPUs stand in a row
            last, last_leaves = slot.holder, is_leaving(ctx, node, slot.holder)
        if last_leaves and all(is_leaving(ctx, node, guest) for guest in slot.guests):
            vacated.append(slot)
    return free + vacated


def barred_uuids(node: NodeEntry) -> frozenset[GpuUuid]:
    """GPUs of a node that do not come free whichever worker leaves: `free_slots` never has them."""
    healthy, trespassed = GpuHealth.OK, node.trespassed
    out = node.out_uuids if node.gpu_conditions else NONE_BARRED
    found = [
        slot.uuid
        for slot in node.gpus
        if slot.health is not healthy
        or slot.is_gone
        or (trespassed and slot.uuid in trespassed)
        or slot.uuid in out
    ]
    return frozenset(found) if found else NONE_BARRED


def mark_holders(ctx: Context, node: NodeEntry) -> None:
    """The state of a node's GPUs changed, and with it what its workers would free."""
    ctx.changed_jobs.update(dict.fromkeys(sorted(key.job_id for key in keys_on(node))))


def sick_slots(node: NodeEntry) -> list[GpuSlot]:
    """GPUs of a node that are not well, out after a fault, or that it does not report any more."""
    healthy, out = GpuHealth.OK, node.out_uuids
    return [
        slot for slot in node.gpus if slot.health != healthy or slot.is_gone or slot.uuid in out
    ]


def hold_gpus(
    ctx: Context,
    node: NodeEntry,
    gpus: int,
    key: WorkerKey,
    *,
    shared: Collection[GpuUuid] = (),
    kind: str | None = None,
) -> tuple[GpuUuid, ...]:
    """Give a worker GPUs of a node; on those being vacated it is the nominee.

    The caller has checked that there are enough. GPUs already held for the worker are used.

    shared: on exactly these it is a guest, if they have a holder. kind: GPUs of this type; None: of
        any.
    """
    slots = slots_of(node, key)
    if slots:
        return tuple(slot.uuid for slot in slots)
    if shared:
        slots = [slot for slot in node.gpus if slot.uuid in shared]
    else:
        free = free_slots(ctx, node)
        slots = [slot for slot in free if kind is None or slot.gpu_type == kind][:gpus]
    assert len(slots) == gpus, f"{node.name}: {len(slots)} GPUs can be promised, {gpus} asked"
    for slot in slots:
        if slot.holder is None:
            slot.holder = key
        elif shared:
            slot.guests.append(key)
            ctx.state.shared_nodes[node.name] = None
        else:
            slot.nominee = key
    ctx.changed_nodes[node.name] = None
    return tuple(slot.uuid for slot in slots)


def release_gpus(ctx: Context, node_name: NodeName, key: WorkerKey) -> None:
    """A worker is gone: its nominees move up."""
    node = ctx.state.nodes.get(node_name)
    if node is None:
        return
    is_gone = False
    for slot in node.gpus:
        if slot.nominee is not None and slot.nominee == key:
            slot.nominee = None
        if slot.guests and key in slot.guests:
            slot.guests.remove(key)
        if slot.holder is not None and slot.holder == key:
            if slot.guests:
                slot.holder = slot.guests.pop(0)
            else:
                slot.holder, slot.nominee = slot.nominee, None
        is_gone |= slot.is_gone
    if is_gone:
        node.gpus = [slot for slot in node.gpus if slot.holder is not None or not slot.is_gone]
    ctx.changed_nodes[node_name] = None
    ctx.needs_pass = True
