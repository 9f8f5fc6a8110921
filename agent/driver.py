"""The node driver: observe the node, let `agent.core.node_lifecycle` decide, carry out the actions.

`agent.agent` adds the coordinator to it; `agent.go_home` runs it alone, without a bus.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

import msgspec

from agent.background_tasks import Errands
from agent.core.gpu_handover import MAX_TRESPASSES
from agent.core.node_lifecycle import Life
from agent.core.state import (
    Action,
    CheckReserve,
    EndHook,
    Facts,
    ForgetWorker,
    HookKind,
    PauseWorker,
    ResizeWorker,
    RunHook,
    StartWorker,
    StopWorker,
    WorkerAction,
    WorkerFact,
    WorkerState,
)
from agent.gpu.known_gpus import GPU_COLLECTOR, completed, identities
from agent.gpu.xids import UntoldXids
from agent.hooks.runner import Commands, OneCommand
from agent.hooks.running_command import NODE_VARIABLE
from agent.settings import AgentSettings
from agent.storage.ledger import LedgerPort
from agent.telemetry.gpu_attribution import Look, Strangers
from agent.telemetry.machine import Machine
from agent.telemetry.sample import Sample, Sampler
from agent.watchdog import Duties
from agent.workers.lost import ASK_S, END_ALL_S
from agent.workers.reserve_check import CHECK_TIMEOUT_S
from agent.workers.runner import StorageSilentError, WorkerRunner, WorkerStatus
from agent.workers.starters import START_TIMEOUT_S
from common.clock import Clock
from common.errors import ArylError, Unavailable
from common.faults import Fault
from common.messages import (
    UNTOLD_PID,
    GpuReport,
)
from common.model import GpuUuid, WorkerKey

log = logging.getLogger(__name__)

FIRST_READING_S = 5.0
"""How long a new agent waits for NVML's first answer before it reports without it. NVML takes
seconds to open on a large machine, and a report without GPUs alarms people."""
FIRST_START_S = 30.0
"""The same for an agent whose ledger has no GPUs: it has next to no work that could wait."""
PAGE = "inference"
"""The collector that reads the server's metrics page."""


class Node:
    """One node without its coordinator.

    Every dependency on the world is an argument, so a test can put a model in its place.

    Args:
        duties: receives each duty's time limits; by default one on this clock.
    """

    def __init__(
        self,
        settings: AgentSettings,
        life: Life,
        *,
        ledger: LedgerPort,
        clock: Clock,
        runner: WorkerRunner,
        sampler: Sampler,
        commands: Commands,
        machine: Machine,
        duties: Duties | None = None,
    ) -> None:
        self.settings = settings
        self.life = life
        self.runner = runner
        self.clock = clock
        self.duties = Duties(clock.now_s) if duties is None else duties
        self.last_sample = Sample(began_at_s=clock.now_s())
        self.contact_at_s: float | None = None
        self.changed = asyncio.Event()
        """Set when `step` should be called at once."""
        self._ledger = ledger
        self._sampler = sampler
        self._command = OneCommand(commands)
        self._machine = machine
        self._strangers = Strangers(
            machine,
            settings.server,
            after_s=settings.stranger_after_s,
            free_memory_ratio=settings.device_free_memory_ratio,
        )
        self._errands = Errands(on_failure=self.changed.set)
        self._xids = UntoldXids()
        self._first_look_at_s: float | None = None
        self._has_reading = False
        """NVML was read since this agent started."""

    def contacted(self, at_s: float) -> None:
        """Record that the coordinator answered a report that was sent at this instant."""
        self.contact_at_s = at_s
        self.runner.contacted(at_s)

    # --- sampling -----------------------------------------------------------------------------

    async def sample(self) -> None:
        """Take a sample of the machine."""
        if self._first_look_at_s is None:
            self._first_look_at_s = self.clock.now_s()
        with self.duties.leg("sample", within_s=self.settings.collect_deadline_s):
            sample = await self._sampler.sample()
        gpus = self._with_known(sample)
        if gpus is not None:
            gpus = self._xids.saw(gpus)
        self.last_sample = msgspec.structs.replace(sample, gpus=gpus)

    def _with_known(self, sample: Sample) -> tuple[GpuReport, ...] | None:
        """A sample's GPUs, completed from the ledger; None: none was ever read on this node."""
        memory = self.life.memory
        found = next((part for part in sample.collectors if part.name == GPU_COLLECTOR), None)
        error = "" if found is None else found.error
        read, lost = sample.gpus or (), sample.lost_indices
        is_empty = not read and found is not None and found.is_success
        if is_empty:
            lost = tuple(gpu.index for gpu in memory.gpus)
            error = "NVML reports 0 GPUs on this node"
        is_whole = bool(read) and not error
        gpus = completed(read, memory.gpus, is_whole=is_whole, lost_indices=lost)
        if not read and (is_empty or not lost or not gpus):
            if not self._has_reading:
                what = "those of the ledger are reported" if gpus else "none are known"
                self.life.gpus_error = f"GPUs cannot be read, {what}: {error or 'no answer'}"
            return gpus or None
        self._has_reading, self.life.gpus_error = True, ""
        known = identities(gpus)
        if known != memory.gpus:
            before, now = ({gpu.uuid for gpu in found} for found in (memory.gpus, known))
            if before - now:  # a new child may only have been slow to answer
                log.warning(
                    "GPUs differ from those in the ledger: gone: %s; new: %s",
                    ", ".join(sorted(before - now)),
                    ", ".join(sorted(now - before)) or "none",
                )
            memory.gpus = known
        return gpus

    @property
    def may_report(self) -> bool:
        """True if NVML was read, or had its time to answer."""
        began_at_s = self._first_look_at_s
        if self._has_reading or began_at_s is None:
            return self._has_reading
        wait_s = FIRST_READING_S if self.life.memory.gpus else FIRST_START_S
        return self.last_sample.began_at_s >= began_at_s + wait_s

    def told(self, gpus: Sequence[GpuReport]) -> None:
        """Record that a report with these GPUs was sent; their XIDs are not reported again."""
        self._xids.told(gpus)
        sample = self.last_sample
        if sample.gpus is not None:
            gpus = self._xids.untold(sample.gpus)
            self.last_sample = msgspec.structs.replace(sample, gpus=gpus)

    async def sample_for_ever(self) -> None:
        """Take one sample per period, more often while something is in transition."""
        while True:
            began_at_s = self.clock.now_s()
            await self.sample()
            if self.life.is_in_transition:
                self.changed.set()
            await self.clock.sleep(max(0.0, began_at_s + self.period_s - self.clock.now_s()))

    @property
    def period_s(self) -> float:
        """Time between two samples now."""
        if self.life.is_in_transition:
            return self.settings.step_period_s
        return self.settings.report_period_s

    def _facts(self, statuses: Sequence[WorkerStatus], leaving: frozenset[WorkerKey]) -> Facts:
        sample = self.last_sample
        running = [held for held in self.life.workers.live() if self._may_run(held)]
        look = Look(
            at_s=sample.began_at_s,
            gpus=sample.gpus if self._has_reading else None,
            owners=_owners(statuses),
            is_healthy=sample.is_healthy,
            unnamed=_unnamed(running, statuses),
            held=frozenset(uuid for held in running for uuid in held.order.gpu_uuids),
        )
        self._strangers.saw(look, self.life.memory)
        strangers = {pid for pid, _ in self._strangers.found[:MAX_TRESPASSES]} - {UNTOLD_PID}
        return Facts(
            now_s=self.clock.now_s(),
            gpus=sample.gpus,
            sampled_at_s=sample.began_at_s,
            inference=sample.inference,
            is_page_whole=sample.is_page_whole,
            page_error=_page_error(sample),
            is_healthy=sample.is_healthy,
            statuses=tuple(_fact(status) for status in statuses),
            leaving=leaving,
            trespassers=self._strangers.found,
            owners={pid: self._machine.owner(pid) for pid in sorted(strangers)},
            suspects=self._strangers.suspects,
            others=self._strangers.others,
            unknown_server=self._strangers.unknown_server,
            listening_ports=self._machine.listening_ports()
            if self.life.workers.awaits_store
            else frozenset(),
            contact_at_s=self.contact_at_s,
        )

    def _may_run(self, held: WorkerState) -> bool:
        """True if a worker may be on its GPUs before any status shows it, or still.

        A start that is not under way and left no shim, as on a full disk, has had no effect.
        """
        key = held.order.key
        if held.is_started or not held.is_begun:  # most are started: their locks are not tried
            return held.is_started
        return self.life.workers.is_to_start(key) or self.runner.has_shim(key)

    # --- actions ------------------------------------------------------------------------------

    async def save(self) -> bool:
        """Write to disk what must outlive a restart; True if it is on disk.

        A disk that fails ends nothing: a caller that would begin something new checks the result,
        and the next save tries again.
        """
        try:
            with self.duties.leg("ledger"):
                await self._ledger.save(self.life.memory)
        except Unavailable as error:
            if not self.life.ledger_error:
                log.error("%s; no new work starts here until it can be written", error)
            self.life.ledger_error = str(error)
            return False
        if self.life.ledger_error:
            log.warning("the ledger can be written again")
        self.life.ledger_error = ""
        return True

    async def step(self) -> None:
        """Compare the actual with the desired state, write down conclusions, and begin actions.

        The step waits for none of its actions: a later step sees their results. An action whose
        conclusion cannot be written is begun only if it gives something back.
        """
        self._errands.raise_failure()
        live = self.life.workers.live()
        started = [held.order.key for held in live if held.is_started]
        with self.duties.leg("statuses", within_s=ASK_S):
            statuses = await self.runner.statuses(started)
            leaving = await self.runner.leaving(self.life.workers.withdrawn)
        actions = self.life.step(self._facts(statuses, leaving))
        for move in self.life.moves:
            log.info("%s", move)
        self.life.moves.clear()
        self._errands.drop_all_but(self.life.workers.checking)
        is_saved = await self.save()
        for action in actions:
            if is_saved or not _needs_ledger(action):
                self._begin(action)
            else:
                self._put_off(action)

    def _put_off(self, action: Action) -> None:
        if isinstance(action, RunHook):
            error = self.life.ledger_error
            self.life.hook_done(action.kind, error=error, now_s=self.clock.now_s())
        elif not isinstance(action, EndHook):  # which needs no ledger
            self.life.workers.not_done(action)

    def _begin(self, action: Action) -> None:
        """Begin an action; one that is under way already is not begun twice."""
        if isinstance(action, RunHook):
            self._errands.begin(self._hook(action.kind), name=f"hook {action.kind}")
        elif isinstance(action, EndHook):
            self._command.end()
        elif not self._errands.is_under_way(action):
            checked = action.order.key if isinstance(action, CheckReserve) else None
            name = type(action).__name__
            self._errands.begin(self._do(action, name), name=name, what=action, droppable=checked)

    async def _do(self, action: WorkerAction, name: str) -> None:
        try:
            with self.duties.leg(name, within_s=_limit_s(action)):
                await self._do_or_raise(action)
        except (ArylError, OSError) as error:
            log.warning("%s: %s", name, error)
            if isinstance(action, StartWorker):
                is_silent = isinstance(error, StorageSilentError)
                fault = Fault.STORAGE if is_silent else Fault.NODE
                self.life.workers.started(action.order.key, error=str(error), fault=fault)
                self.changed.set()
            else:
                self.life.workers.not_done(action)
        self.duties.progressed()

    async def _do_or_raise(self, action: WorkerAction) -> None:
        match action:
            case CheckReserve():
                refusal = await self.runner.check_reserve(action.order)
                endpoint = f"{self.settings.advertised_host}:{self._machine.free_port()}"
                self.life.workers.checked(action.order.key, endpoint=endpoint, refusal=refusal)
                self.changed.set()
            case StartWorker():
                if not self.life.workers.is_to_start(action.order.key):
                    self.life.workers.not_done(action)  # withdrawn since the step that asked for it
                    return
                await self.runner.start(action.order, endpoint=action.order.endpoint)
                self.life.workers.started(action.order.key, error="")
                self.changed.set()
            case StopWorker():
                await self.runner.stop(action.key, action.reason, action.grace_s)
            case ResizeWorker():
                await self.runner.resize(action.key, action.worker_count)
            case PauseWorker():
                await self.runner.pause(action.key, is_suspended=action.is_suspended)
            case ForgetWorker():
                await self.runner.forget(action.key)

    async def _hook(self, kind: HookKind) -> None:
        server = self.settings.server
        assert server is not None
        argv = {
            HookKind.START: server.start,
            HookKind.STOP: server.stop,
            HookKind.ROUTE: server.route,
            HookKind.UNROUTE: server.unroute,
        }[kind]
        gpus = self.last_sample.gpus or ()
        variables = {
            NODE_VARIABLE: self.settings.node,
            "ARYL_SERVICE": self.settings.service or "",
            "ARYL_GPU_UUIDS": ",".join(gpu.uuid for gpu in gpus),
        }
        timeout_s = server.hook_timeout_s
        try:
            with self.duties.leg(f"{kind} command", within_s=timeout_s):
                error = await self._command.run(argv, timeout_s=timeout_s, variables=variables)
        except OSError as failure:  # a hook that never answered would block all later tries
            error = str(failure)
        if error:
            log.warning("%s command: %s", kind, error)
        left = self._command.left
        self.life.hook_done(kind, error=error, now_s=self.clock.now_s(), left=left)
        self.changed.set()

    async def close(self) -> None:
        """Leave; workers and the server stay as they are."""
        await self._errands.close()
        await self._sampler.close()
        self._ledger.close()


def _page_error(sample: Sample) -> str:
    """Why a sample could not read the metrics page; empty where it could."""
    failed = (one for one in sample.collectors if one.name == PAGE and not one.is_success)
    return next((one.error for one in failed), "")


def _needs_ledger(action: Action) -> bool:
    """True if an action takes something on, or removes something that an old ledger would need.

    An agent that dies then starts from the last memory on disk: whatever that agent would begin
    again must still show that it was begun.
    """
    match action:
        case CheckReserve() | StartWorker() | ForgetWorker():
            return True
        case EndHook():
            return False
        case RunHook(kind):
            return kind in (HookKind.UNROUTE, HookKind.STOP)
        case StopWorker() | ResizeWorker() | PauseWorker():
            return False


def _limit_s(action: WorkerAction) -> float:
    """The sum of the time limits inside an action."""
    match action:
        case StartWorker():
            return 2 * (START_TIMEOUT_S + END_ALL_S)  # of unit and first status; before, and after
        case CheckReserve():
            return CHECK_TIMEOUT_S
        case StopWorker():
            return END_ALL_S
        case ResizeWorker() | PauseWorker() | ForgetWorker():
            return 0.0


def _owners(statuses: Sequence[WorkerStatus]) -> list[int]:
    """Ancestors of all processes that were granted GPUs; a store was granted none.

    A shim is an ancestor too: a process that daemonizes leaves its worker's session, and the shim
    adopts and ends it.
    """
    granted = [status for status in statuses if not status.key.is_store]
    return [pid for status in granted for pid in (status.pid, status.shim_pid) if pid]


def _unnamed(maybe: Iterable[WorkerState], statuses: Sequence[WorkerStatus]) -> frozenset[GpuUuid]:
    """GPUs of those of these workers for which no status names a process.

    A shim starts its worker first and then writes down its process, as fast as its disk allows. The
    remains of a worker whose status is gone or unreadable are unknown as well.
    """
    named = {status.key for status in statuses if status.pid or status.shim_pid}
    unnamed = (held.order for held in maybe if held.order.key not in named)
    return frozenset(uuid for order in unnamed for uuid in order.gpu_uuids)


def _fact(status: WorkerStatus) -> WorkerFact:
    return WorkerFact(
        key=status.key,
        phase=status.phase,
        exit_code=status.exit_code,
        error=status.error,
        stop_reason=status.stop_reason,
        progress=status.progress,
        checkpoint=status.checkpoint,
        running_s=status.running_s,
        ended_at_s=status.ended_at_s,
        saved_at_s=status.saved_at_s,
        save_over_at_s=status.save_over_at_s,
        failure=status.failure,
        fault=status.fault,
    )
