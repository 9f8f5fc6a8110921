"""The workers and rendezvous stores of one node, from order to end. Pure.

The table also explains why a worker cannot have its GPUs yet, from the GPUs' owners and the
devices' state. It builds the part of a report that describes each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import structs

from agent.core import gpu_handover
from agent.core.state import (
    FORGOTTEN_KEPT,
    CheckReserve,
    Facts,
    ForgetWorker,
    Memory,
    PauseWorker,
    Refusal,
    ResizeWorker,
    StartWorker,
    StopWorker,
    WorkerAction,
    WorkerFact,
    WorkerState,
)
from common.faults import Fault
from common.messages import (
    DesiredState,
    GpuHealth,
    GpuReport,
    OrderPhase,
    StopOrder,
    WorkerOrder,
    WorkerPhase,
    WorkerReport,
)
from common.model import GpuUuid, StopReason, WorkerKey
from common.telemetry import instances


def phase_of(held: WorkerState, fact: WorkerFact, facts: Facts) -> WorkerPhase:
    """The phase that the shim reports.

    A store is starting until it listens, so that no worker joins early.
    """
    is_new = fact.phase == WorkerPhase.RUNNING and held.phase != WorkerPhase.RUNNING
    if not (held.order.key.is_store and is_new):
        return fact.phase
    port = int(held.endpoint.rpartition(":")[2] or 0)
    return WorkerPhase.RUNNING if port in facts.listening_ports else WorkerPhase.RESERVING


def worker_report(
    held: WorkerState, fact: WorkerFact | None, *, waits_for: str, now_s: float
) -> WorkerReport:
    """The report of a held worker at an instant.

    fact: the last status of its shim, if there was one.
    waits_for: why it cannot begin yet.
    """
    saved_at_s = held.saved_at_s if held.is_over or fact is None else fact.saved_at_s
    return WorkerReport(
        key=held.order.key,
        phase=held.phase,
        gpu_uuids=held.order.gpu_uuids,
        is_flexible=held.order.is_flexible,
        endpoint=held.endpoint,
        exit_code=held.exit_code,
        stop_reason=held.stop_reason,
        error=held.error or waits_for,
        progress=fact.progress if fact else None,
        checkpoint=held.checkpoint or (fact.checkpoint if fact else None),
        saved_ago_s=_ago_s(saved_at_s, now_s),
        running_s=held.running_s or (fact.running_s if fact else 0.0),
        ended_ago_s=_ago_s(held.ended_at_s, now_s),
        failure=held.failure,
        fault=held.fault,
        refused_for=held.refused_for,
    )


def _ago_s(at_s: float | None, now_s: float) -> float:
    return 0.0 if at_s is None else max(0.0, now_s - at_s)


P = WorkerPhase


def who_holds(held: WorkerState, live: Iterable[WorkerState]) -> str:
    """The other worker that has its GPUs and must leave them first; empty when there is none.

    On shared GPUs it waits only for workers that are leaving, or that are to be suspended and still
    run.
    """
    wanted, is_sharing = set(held.order.gpu_uuids), held.order.is_sharing
    for other in live:
        holds = other.is_begun or other.phase in (P.READY, P.RUNNING, P.SUSPENDED, P.STOPPING)
        is_going = other.phase == P.RUNNING and other.order.is_suspended
        may_stay = is_sharing and not is_going and other.phase != P.STOPPING
        is_near = other is not held and wanted & set(other.order.gpu_uuids)
        if is_near and holds and not may_stay:
            return f"waits for worker {other.order.key} to leave"
    return ""


def why_not_free(
    order: WorkerOrder,
    known: Mapping[GpuUuid, GpuReport],
    *,
    sampled_at_s: float,
    left_at_s: float,
    free_memory_ratio: float,
) -> str:
    """Why the devices show that its GPUs are not free; empty when they are free.

    known: all GPUs of the node by a sample begun at `sampled_at_s`.
    left_at_s: when the last worker left one of the wanted GPUs; an older sample proves nothing.
    """
    wanted = sorted(set(order.gpu_uuids))
    if order.is_sharing:  # the other jobs' memory there proves nothing
        bad = [uuid for uuid in wanted if known[uuid].health != GpuHealth.OK]
    elif sampled_at_s <= left_at_s:
        return "waits for a GPU sample after the last worker left"
    else:
        bad = wanted
    found = (gpu_handover.busy(known[uuid], free_memory_ratio=free_memory_ratio) for uuid in bad)
    return next((why for why in found if why), "")


SHORTEN_MARGIN_S = 1.0
"""A stop is not repeated for a smaller gain: steps come often and time passes between them."""


class WorkerTable:
    """Every worker that the node holds, or held until its end is acknowledged.

    Args:
        memory: only this table changes its `workers` and `forgotten`.
        free_memory_ratio: a GPU without processes and with less memory used counts as free.
    """

    def __init__(self, memory: Memory, *, free_memory_ratio: float) -> None:
        self._memory = memory
        self._free_memory_ratio = free_memory_ratio
        self._latest: dict[WorkerKey, WorkerFact] = {}
        self._waits_for: dict[WorkerKey, str] = {}
        self._checking: set[WorkerKey] = set()
        self._starting: set[WorkerKey] = set()
        self._answered: set[WorkerKey] = set()  # since the last step, whose sample may be older
        self._told_count: dict[WorkerKey, int] = {}
        self._told_suspended: dict[WorkerKey, bool] = {}
        self._told_stop_ends_at_s: dict[WorkerKey, float] = {}
        self._gpu_left_at_s: dict[GpuUuid, float] = {}
        self._to_forget: list[WorkerKey] = []
        self._doubted: set[WorkerKey] = set()
        """Workers that may be over, and run elsewhere, as far as the memory can tell."""

    # --- desired state ------------------------------------------------------------------------

    def take(self, desired: DesiredState) -> None:
        """Fold in a newer desired state. Absence of a worker ends nothing; only a stop does."""
        for key in desired.acknowledged:
            self._forget(key)
        for order in desired.workers:
            held = self._memory.workers.get(str(order.key))
            if held is not None:
                held.order = order
            elif order.key not in self._memory.forgotten:
                self._memory.workers[str(order.key)] = WorkerState(order=order)
        for stop in desired.stops:
            held = self._memory.workers.get(str(stop.key))
            if held is not None and held.stop is None:
                held.stop = stop

    def _forget(self, key: WorkerKey) -> None:
        """Forget a worker whose end is in the journal, except that it must never start again."""
        held = self._memory.workers.get(str(key))
        if held is not None:
            if not held.is_over:
                return
            del self._memory.workers[str(key)]
        if key not in self._memory.forgotten:
            self._memory.forgotten.append(key)
            del self._memory.forgotten[:-FORGOTTEN_KEPT]
        for table in (self._latest, self._waits_for, self._told_count, self._told_suspended):
            table.pop(key, None)
        self._told_stop_ends_at_s.pop(key, None)
        self._checking.discard(key)
        self._to_forget.append(key)

    def doubt(self) -> None:
        """Doubt the memory, which may be old.

        An agent may have reported an end that it does not have. A worker that was not seen running,
        and is not seen now, never begins.
        """
        self._doubted = {held.order.key for held in self.live() if not held.is_started}

    # --- queries ------------------------------------------------------------------------------

    def held(self) -> list[WorkerState]:
        """All workers, by key."""
        return sorted(self._memory.workers.values(), key=lambda held: held.order.key)

    def live(self) -> list[WorkerState]:
        """The workers that have not ended."""
        return sorted(self._unended(), key=lambda held: held.order.key)

    def _unended(self) -> Iterator[WorkerState]:
        return (held for held in self._memory.workers.values() if not held.is_over)

    @property
    def is_in_transition(self) -> bool:
        """True if some worker is between two phases."""
        return any(
            held.phase in (P.RESERVING, P.READY, P.STOPPING)
            or held.stop is not None
            or held.order.is_suspended != (held.phase == P.SUSPENDED)
            for held in self._unended()
        )

    @property
    def awaits_store(self) -> bool:
        """True if some rendezvous store has started and has not been seen to listen."""
        return any(
            held.order.key.is_store and held.is_started and held.phase == P.RESERVING
            for held in self._unended()
        )

    @property
    def withdrawn(self) -> list[WorkerKey]:
        """Workers begun, and to stop before they were seen running.

        No start of this agent is under way.
        """
        keys = (held.order.key for held in self.live() if held.is_withdrawn)
        return [key for key in keys if key not in self._starting]

    @property
    def checking(self) -> set[WorkerKey]:
        """Workers whose check is still awaited; the check of a withdrawn order may be dropped."""
        return {key for key in self._checking if self._is_wanted(key)}

    def is_to_start(self, key: WorkerKey) -> bool:
        """True if a requested start is still wanted."""
        return key in self._starting and self._is_wanted(key)

    def _is_wanted(self, key: WorkerKey) -> bool:
        held = self._memory.workers.get(str(key))
        return held is not None and not held.is_over and held.stop is None

    @property
    def least_stop_after_s(self) -> float | None:
        """The shortest `stop_after_s` of the held workers.

        None: no worker ends for lack of contact.
        """
        found = (held.order.spec.stop_after_s for held in self._unended())
        return min((stop_after_s for stop_after_s in found if stop_after_s), default=None)

    def gpu_left_at_s(self, gpus: Iterable[GpuUuid]) -> float:
        """When the last worker known here left one of these GPUs."""
        return max((self._gpu_left_at_s.get(uuid, 0.0) for uuid in gpus), default=0.0)

    def reports(self, now_s: float = 0.0) -> tuple[WorkerReport, ...]:
        """The workers' part of the node's report at an instant."""
        latest, waits_for = self._latest, self._waits_for
        return tuple(
            worker_report(held, latest.get(key), waits_for=waits_for.get(key, ""), now_s=now_s)
            for key, held in ((held.order.key, held) for held in self.held())
        )

    # --- actions ------------------------------------------------------------------------------

    def checked(self, key: WorkerKey, *, endpoint: str, refusal: Refusal | None) -> None:
        """Take the answer to `CheckReserve`: the gang's endpoint, or a refusal."""
        self._checking.discard(key)
        held = self._memory.workers.get(str(key))
        if held is None or held.phase != P.RESERVING:
            return
        if refusal is not None:
            held.refuse(refusal.error, refusal.fault, refusal.refused_for)
        else:
            held.endpoint = endpoint

    def started(self, key: WorkerKey, *, error: str, fault: Fault = Fault.NODE) -> None:
        """Take the answer to `StartWorker`, which may come late.

        The shim's status in between counts. For a worker that got a stop in between, the next step
        decides. fault: whose the error is.
        """
        self._starting.discard(key)
        held = self._memory.workers.get(str(key))
        if held is None or held.is_over or held.is_started:
            return
        if not error:
            self._is_there(held)
            self._answered.add(key)
            if not key.is_store:  # which runs as soon as it listens
                held.phase = P.RUNNING
        elif held.stop is None:
            held.refuse(f"cannot start the worker: {error}", fault)

    def _is_there(self, held: WorkerState) -> None:
        """Keep the worker: its shim lives, and may have missed a stop while it started."""
        if not held.is_started:
            held.is_started = True
            self._told_stop_ends_at_s.pop(held.order.key, None)

    def end_all(self, error: str, *, now_s: float) -> None:
        """End all workers: the machine has rebooted, so nothing runs."""
        for held in self.live():
            held.error, held.fault = held.error or error, Fault.NODE
            self._end(held, now_s)
        for held in self.held():  # an earlier value is of an earlier boot's clock
            held.ended_at_s = held.saved_at_s = 0.0

    def vacate(self, *, grace_s: float, now_s: float) -> None:
        """Empty the node: stop every worker within its own grace and the node's.

        A stop under way that would end later is shortened: a return has a deadline. A rendezvous
        store leaves after the workers, which may need it for their last save.
        """
        for held in self.live():
            key, stop = held.order.key, held.stop
            if key.is_store and self._has_workers_here(key):
                continue
            if stop is None:
                least_s = min(grace_s, held.order.spec.checkpoint.grace_s)
                held.stop = StopOrder(key=key, reason=StopReason.PREEMPT, grace_s=least_s)
                continue
            ends_at_s = self._told_stop_ends_at_s.get(key, now_s + stop.grace_s)
            if ends_at_s > now_s + grace_s + SHORTEN_MARGIN_S:
                held.stop = StopOrder(key=key, reason=stop.reason, grace_s=grace_s)
                self._told_stop_ends_at_s.pop(key, None)

    def _has_workers_here(self, store: WorkerKey) -> bool:
        attempt = (store.job_id, store.attempt)
        keys = (held.order.key for held in self.live())
        return any((key.job_id, key.attempt) == attempt and not key.is_store for key in keys)

    def not_done(self, action: WorkerAction) -> None:
        """Record that an action failed for now: the next step repeats the order to its worker."""
        match action:
            case CheckReserve():
                self._checking.discard(action.order.key)
            case StartWorker():
                self._starting.discard(action.order.key)
            case StopWorker():
                self._told_stop_ends_at_s.pop(action.key, None)
            case ResizeWorker():
                self._told_count.pop(action.key, None)
            case PauseWorker():
                self._told_suspended.pop(action.key, None)
            case ForgetWorker():
                pass

    def step(self, facts: Facts, *, closed: str) -> list[WorkerAction]:
        """Examine every worker. closed: why nothing may start on this node; empty when it may."""
        actions: list[WorkerAction] = [ForgetWorker(key) for key in self._to_forget]
        actions += self._given_up(facts)
        self._to_forget = []
        by_key = {fact.key: fact for fact in facts.statuses}
        for held in self.live():
            fact = by_key.get(held.order.key)
            if fact is None and held.order.key in self._doubted:
                self._give_up(held)
            self._doubted.discard(held.order.key)
            if fact is not None:
                actions += self._running(held, fact, facts)
            elif held.is_over:  # it was given up
                continue
            elif held.is_started and held.order.key in self._answered:
                continue  # this sample may have begun before its start was answered
            elif held.is_started:
                held.error, held.fault = "the worker and its supervisor are gone", Fault.SHIM_LOST
                self._end(held, facts.now_s)
            elif held.stop is not None:
                actions += self._withdrawn(held, held.stop, facts)
            elif held.order.key not in self._starting:
                actions += self._reserve(held, facts, closed)
        self._answered.clear()
        return actions

    def _give_up(self, held: WorkerState) -> None:
        """End a doubted worker as a fault of its node, or stop one whose shim may yet start."""
        if not held.is_begun:
            held.refuse("the ledger could not be written when its agent ended", Fault.NODE)
        elif held.stop is None:
            held.stop = StopOrder(key=held.order.key, reason=StopReason.PREEMPT, grace_s=0.0)

    def _withdrawn(self, held: WorkerState, stop: StopOrder, facts: Facts) -> list[WorkerAction]:
        """Handle a worker that is to stop before it was seen running.

        A start under way cannot be cancelled. So the worker gets a stop, and keeps its GPUs until
        this agent's start is answered. After a start of another agent it keeps them until no
        process can be left. It has computed nothing that it could save.
        """
        key = held.order.key
        if held.is_begun and key not in self._told_stop_ends_at_s:
            self._told_stop_ends_at_s[key] = facts.now_s
            return [StopWorker(key, stop.reason, 0.0)]
        if key not in self._starting and key not in facts.leaving:
            held.stop_reason = stop.reason
            self._end(held, facts.now_s)
        return []

    def _given_up(self, facts: Facts) -> list[WorkerAction]:
        """Find the remains of workers that the node reported as over, or has forgotten.

        A shim that started after its start was given up runs a worker that may run elsewhere by
        now. The files of a forgotten worker stay behind when the agent dies before it removes them.
        """
        actions: list[WorkerAction] = []
        for fact in facts.statuses:
            held = self._memory.workers.get(str(fact.key))
            is_forgotten = held is None and fact.key in self._memory.forgotten
            if is_forgotten and fact.phase == P.EXITED and fact.key not in self._to_forget:
                actions.append(ForgetWorker(fact.key))
            is_given_up = is_forgotten or (held is not None and held.is_over)
            if is_given_up and fact.phase != P.EXITED:
                actions.append(StopWorker(fact.key, StopReason.STALE, 0.0))
        return actions

    def _running(self, held: WorkerState, fact: WorkerFact, facts: Facts) -> list[WorkerAction]:
        key, now_s = held.order.key, facts.now_s
        held.phase = phase_of(held, fact, facts)
        self._is_there(held)
        self._latest[key] = fact
        self._waits_for.pop(key, None)
        if held.is_over:
            held.take_end(fact)
            self._end(held, now_s)
            return []
        if held.stop is not None:
            if key in self._told_stop_ends_at_s:
                return []
            self._told_stop_ends_at_s[key] = now_s + held.stop.grace_s
            return [StopWorker(key, held.stop.reason, held.stop.grace_s)]
        if key.is_store:
            return []
        actions = self._paused(held)
        count = held.order.worker_count
        if self._told_count.get(key) != count:
            self._told_count[key] = count
            actions.append(ResizeWorker(key, count))
        return actions

    def _paused(self, held: WorkerState) -> list[WorkerAction]:
        """Suspend the worker as ordered; resume it once the jobs that had its turn have left."""
        key, wanted = held.order.key, held.order.is_suspended
        is_so = held.phase == P.SUSPENDED
        if wanted == is_so:
            self._told_suspended.pop(key, None)
            return []
        if self._told_suspended.get(key) == wanted:
            return []
        why = "" if wanted else who_holds(held, self.live())
        if why:
            self._waits_for[key] = why
            return []
        self._told_suspended[key] = wanted
        return [PauseWorker(key, wanted)]

    def _end(self, held: WorkerState, now_s: float) -> None:
        held.phase = P.EXITED
        held.ended_at_s = now_s if held.ended_at_s is None else held.ended_at_s
        if held.is_begun or held.is_started:
            for uuid in held.order.gpu_uuids:
                self._gpu_left_at_s[uuid] = now_s

    def _reserve(self, held: WorkerState, facts: Facts, closed: str) -> list[WorkerAction]:
        key = held.order.key
        why = closed or self._not_yet(held, facts)
        if held.is_over:  # it was refused
            return []
        if why:
            held.phase = P.RESERVING
            self._waits_for[key] = why
            return []
        if not held.endpoint:
            if key in self._checking:
                return []
            self._checking.add(key)
            return [CheckReserve(held.order)]
        self._waits_for.pop(key, None)
        if key.is_store:  # at its final endpoint; the gang has none yet
            return self._begin(held, structs.replace(held.order, endpoint=held.endpoint))
        held.phase = P.READY
        is_to_run = held.order.phase == OrderPhase.RUN and not held.order.is_suspended
        return self._begin(held, held.order) if is_to_run else []

    def _begin(self, held: WorkerState, order: WorkerOrder) -> list[WorkerAction]:
        """Start the worker; an earlier agent may have begun it, and a shim is started once."""
        self._starting.add(order.key)
        if not held.is_begun:
            self._told_count[order.key] = order.worker_count
        held.is_begun = True
        return [StartWorker(order)]

    def _not_yet(self, held: WorkerState, facts: Facts) -> str:
        """Why its GPUs are not available now; a worker that can never have them is refused."""
        if facts.gpus is None:
            return "no GPU sample yet"
        stop_after_s, contact_at_s = held.order.spec.stop_after_s, facts.contact_at_s
        if stop_after_s is not None and (
            contact_at_s is None or facts.now_s - contact_at_s >= stop_after_s
        ):
            return "waits for an answer of the coordinator, without which it would be stopped"
        wanted = set(held.order.gpu_uuids)
        units = [*facts.gpus, *(part for gpu in facts.gpus for part in instances(gpu))]
        known = {gpu.uuid: gpu for gpu in units}
        missing = sorted(wanted - set(known))
        if missing:
            held.refuse(f"GPU {missing[0]} is not on this node", Fault.NODE)
            return held.error
        for uuid in sorted(wanted):
            if parted := gpu_handover.parted(known[uuid]):
                held.refuse(parted, Fault.NODE)
                return held.error
        why = who_holds(held, self.live())
        return why or why_not_free(
            held.order,
            known,
            sampled_at_s=facts.sampled_at_s,
            left_at_s=self.gpu_left_at_s(wanted),
            free_memory_ratio=self._free_memory_ratio,
        )
