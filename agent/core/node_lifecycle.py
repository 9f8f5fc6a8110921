"""The life cycle of a node: its role, its lease, its inference server. Pure: no clock, no I/O.

Theory of operation
===================

                 lease                 idle, stopped, GPUs free
     SERVING ------------> DRAINING ----------------------------> ON_LOAN
       ^  ^                 |    |                                   |
       |  |  lease over,    |    |  lease over, server stopped       |  lease over
       |  +-----------------+    +----------------+  +---------------+
       |     server runs                          v  v
       |                                        VACATING
       |  healthy, routed                           |  workers ended, GPUs free
       +---------------------- WARMING <------------+
                                  ^
                                  |  quiet for `quarantine_s`, or an operator's order
     any role --- fault ---> QUARANTINED ---> TRAINING (a node of the training pool)

    A reboot leads from any role to WARMING, or to TRAINING in the training pool. From VACATING a
    GPU that does not come free, and from WARMING a server that does not start, lead to QUARANTINED.

Roles change by `common.node_role_table` alone. Any other event in a role is an error.

There is one loop, run by `agent.driver` or a test. The coordinator's desired states and its answers
to renewals come in between:

    accept(desired)            the coordinator's desired state: role, workers, lease. Refused if it
                               names another node, an older epoch or an older generation.
    renewed(...), refused(...) the coordinator's answer to a renewal of the lease.
    step(facts) -> [Action]    facts are one reading of GPUs, server, hooks and workers. The result
                               is all that should happen now: run a hook, start or stop a worker.
    hook_done(...)             the answer to a `RunHook`.

Each role but TRAINING and LOST has one method (`_serving`, `_draining`, ...). It looks at the
facts, returns actions, and changes the role when its conditions hold. `step` is called again and
again with fresh facts.

Guarantees:

- The node alone ends a lease. When `lease_ends_at_s` passes without a renewal, the node vacates and
  returns to its service, even if no coordinator answers.
- The server and workers never use one GPU together. The GPUs change hands only after a sample newer
  than the last stop shows them free (`gpu_handover`).
- VACATING and WARMING are bounded by timeouts of `AgentSettings`; when one passes, the node goes to
  QUARANTINED.
- Everything that must survive a restart is in `Memory`, which the ledger writes before actions are
  carried out. While it cannot be written nothing new begins (`ledger_error`).
- Settings may change while the agent is away. A node found in another pool than its memory names
  goes through QUARANTINED first, so that work of the old pool ends (`left_pool`).
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET, UnsetType

from agent.core import gpu_handover, return_timing
from agent.core.inference_server import Health, Idleness, ServerCommands
from agent.core.lease_end import Leasehold
from agent.core.state import Action, Facts, HookKind, Memory
from agent.core.worker_table import WorkerTable
from agent.settings import AgentSettings
from common.messages import CommandReport, DesiredReply, DesiredState, Trespass
from common.model import LeaseId, NodeRole, Pool
from common.node_role_table import NodeEvent, next_role


def left_pool(memory: Memory, pool: Pool) -> Pool | None:
    """The pool that a node belonged to before its settings named `pool`; None without a move."""
    return None if memory.home_pool == pool else memory.home_pool


def refusal(desired: DesiredState, memory: Memory) -> str:
    """Why a node does not take it, naming the field; empty when it does."""
    if desired.node != memory.node:
        return f"node: this is {memory.node}, not {desired.node}"
    if desired.epoch < memory.epoch:
        return f"epoch: {desired.epoch} is over, epoch {memory.epoch} leads"
    if desired.epoch == memory.epoch and desired.generation < memory.generation:
        return f"generation: {desired.generation} is older than {memory.generation}"
    return ""


R = NodeRole


class Life:
    """One node.

    Args:
        boot_id: of this boot; a memory of another one means that nothing of it still runs.
        is_behind: the agent before this one knew more than the memory does; see
            `agent.storage.ledger`.
    """

    def __init__(
        self,
        settings: AgentSettings,
        memory: Memory,
        *,
        boot_id: str,
        now_s: float,
        is_behind: bool = False,
    ) -> None:
        self.settings = settings
        self.memory = memory
        self._lease = Leasehold(memory)
        self.may_begin: Callable[[LeaseId], bool] = lambda _: True  # once its way home is sure
        self.workers = WorkerTable(memory, free_memory_ratio=settings.device_free_memory_ratio)
        if is_behind:
            self.workers.doubt()
        self._health = Health()
        self._why = ""
        self.trespasses: tuple[Trespass, ...] = ()
        self._unknown_server = self._slow = ""
        self.ledger_error = ""
        """Why the memory is not on disk; until it is, running work continues or ends, and none
        begins.
        """
        self.gpus_error = ""
        """Why NVML has not been read since this agent started; empty once it was."""
        self.moves: list[str] = []
        """Changes of its role that are not logged yet, each with its reason."""
        self._role_at_s = now_s
        self._emptied_at_s: float | None = None
        self._saved_at_s = 0.0
        self._commands = ServerCommands(now_s)
        self._stop_began_at_s: float | None = None
        self._idleness = Idleness()
        self._kept_by = ""
        """The reason why a node stays in quarantine."""
        if memory.boot_id != boot_id:
            self._booted(boot_id, now_s)
        elif old := left_pool(memory, settings.home_pool):
            self._moved(old, now_s)
        memory.home_pool = settings.home_pool

    def _booted(self, boot_id: str, now_s: float) -> None:
        memory = self.memory
        memory.boot_id = boot_id
        self.workers.end_all("the node rebooted", now_s=now_s)
        memory.left_behind, memory.strangers, memory.serve_by_s = [], [], None
        return_timing.booted(memory)
        self._lease.end()
        self._want_home()
        event = NodeEvent.BOOTED if self._is_inference else NodeEvent.BOOTED_TRAINING
        self._fire(event, now_s, "rebooted")

    def _moved(self, old: Pool, now_s: float) -> None:
        """The settings put the node into another pool, without the reboot that ends all old work.

        Old work ends first: the node is in quarantine until its workers have left and its GPUs are
        free, also of a server that was never stopped.
        """
        return_timing.forget(self.memory)
        self._lease.end()
        self._want_home()
        why = f"moved from the {old} pool to the {self.settings.home_pool} pool"
        self._fire(NodeEvent.FAULT, now_s, why)
        self.memory.is_quarantine_over = True

    @property
    def _is_inference(self) -> bool:
        return self.settings.home_pool == Pool.INFERENCE

    def _want_home(self) -> None:
        """Whatever was ordered before is void."""
        self.memory.desired_role = R.SERVING if self._is_inference else R.TRAINING

    #   --- desired state -----------------------------------------------------------------------

    def accept(self, desired: DesiredState, *, now_s: float) -> DesiredReply:
        """Take a desired state, or say why not; a refusal changes nothing."""
        memory = self.memory
        error = refusal(desired, memory)
        if not error and (desired.epoch, desired.generation) != (memory.epoch, memory.generation):
            memory.epoch, memory.generation = desired.epoch, desired.generation
            self.workers.take(desired)
            memory.desired_role = desired.role
            in_s = desired.reclaim_in_s
            memory.serve_by_s = None if in_s is None else now_s + in_s
            self._lease.take(desired, now_s)
            self._take_validation(desired.validation)
        return DesiredReply(
            is_accepted=not error, epoch=memory.epoch, generation=memory.generation, error=error
        )

    def _take_validation(self, validation: int | UnsetType) -> None:
        """An operator states that the cause of the quarantine is repaired; stated once."""
        memory = self.memory
        if validation is not UNSET and validation != memory.validation:
            memory.validation = validation
            memory.is_quarantine_over = True  # elsewhere it means nothing: see `_fire`

    # --- the lease ----------------------------------------------------------------------------

    def renewed(self, lease_id: LeaseId, until_s: float) -> None:
        """The coordinator prolonged the lease up to this instant of the boot clock."""
        self._lease.renewed(lease_id, until_s)

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """The coordinator wants the node back."""
        self._lease.refused(lease_id, reason)

    @property
    def lease_ends_at_s(self) -> float | None:
        """When the lease is over unless the coordinator answers; None without one."""
        return self.memory.lease_ends_at_s

    #   --- facts and actions -------------------------------------------------------------------

    @property
    def takes_nothing(self) -> str:
        """Why nothing new begins here; empty when it may."""
        return self.ledger_error or ("" if self.memory.gpus else self.gpus_error)

    @property
    def is_in_transition(self) -> bool:
        """Whether something is under way that should be looked at often."""
        is_between_roles = self.memory.role in (R.DRAINING, R.VACATING, R.WARMING)
        return is_between_roles or self.workers.is_in_transition

    @property
    def is_server_down(self) -> bool:
        """Whether the node is there to serve, and its server missed several checks in a row."""
        return self.memory.role == R.SERVING and self._health.is_down

    @property
    def detail(self) -> str:
        """Why the node is where it is, in words."""
        trespass = gpu_handover.in_words(self.trespasses, self.memory)
        kept = f"kept in quarantine: {self._kept_by}" if self._kept_by else ""
        commands = (self._commands.error, self._commands.left, self._slow)
        errors = (self.gpus_error, self.ledger_error)
        parts = (self._why, kept, *commands, trespass, self._unknown_server, *errors)
        return "; ".join(part for part in parts if part)

    def slow_command(self, now_s: float) -> CommandReport | UnsetType:
        """The server command that does not end, if there is one."""
        return self._commands.report(now_s)

    def hook_done(self, kind: HookKind, *, error: str, now_s: float, left: str = "") -> None:
        """The answer to `RunHook`. left: processes of a command that did not end with it."""
        if kind == HookKind.START and not error:
            self.memory.is_server_stopped = False
        self._commands.answered(kind, error=error, left=left, now_s=now_s)

    def step(self, facts: Facts) -> list[Action]:
        """All actions that should happen now, given the facts."""
        self.trespasses = gpu_handover.told(facts)
        self._unknown_server = facts.unknown_server
        gpu_handover.forget_gone(self.memory, facts)
        actions = self._role_step(facts)
        self._slow = self._commands.slow(facts.now_s)
        closed = self.takes_nothing
        if self.memory.role not in (R.TRAINING, R.ON_LOAN):
            closed = f"the node is {self.memory.role}"
        return actions + self.workers.step(facts, closed=closed)

    def _fire(self, event: NodeEvent, now_s: float, why: str) -> None:
        memory, old = self.memory, self.memory.role
        memory.role = next_role(old, event, who=memory.node)
        self.moves.append(return_timing.in_words(memory, old, event, why))
        self._role_at_s, self._why = now_s, why
        self._commands.new_role(now_s)
        self._idleness = Idleness()
        self._emptied_at_s = self._stop_began_at_s = None
        self._kept_by, memory.is_quarantine_over = "", False

    def _role_step(self, facts: Facts) -> list[Action]:
        if self.memory.desired_role == R.QUARANTINED and self.memory.role != R.QUARANTINED:
            self.workers.vacate(grace_s=self.settings.vacate_grace_s, now_s=facts.now_s)
            if self.memory.lease is not None:
                return_timing.began(self.memory, now_s=facts.now_s)
            self._fire(NodeEvent.FAULT, facts.now_s, "quarantined by the coordinator")
        steps = {
            R.SERVING: self._serving,
            R.DRAINING: self._draining,
            R.ON_LOAN: self._on_loan,
            R.VACATING: self._vacating,
            R.WARMING: self._warming,
            R.QUARANTINED: self._quarantined,
        }
        found = steps.get(self.memory.role)
        return [] if found is None else found(facts)

    def _serving(self, facts: Facts) -> list[Action]:
        if self.memory.lease is not None:
            over = self._lease.over(facts.now_s, given_up=self.takes_nothing)
            if over:
                self._lease.end()
            elif self.may_begin(self.memory.lease.lease_id):
                self._fire(NodeEvent.LEND, facts.now_s, f"lease {self.memory.lease.lease_id}")
                return self._draining(facts)
        is_down = self._health.saw(facts, since_s=self._role_at_s)
        self._why = "the server does not answer its health check" if is_down else ""
        return []

    def _draining(self, facts: Facts) -> list[Action]:
        given_up = self.takes_nothing
        if not self.memory.is_server_stopped:
            given_up = given_up or gpu_handover.unusable(facts)
        if over := self._lease.over(facts.now_s, given_up=given_up):
            return self._back_from_draining(facts, over)
        unrouted_at_s = self._commands.done_at_s(HookKind.UNROUTE)
        if unrouted_at_s is None:
            return self._commands.run(HookKind.UNROUTE, facts.now_s)
        if not self.memory.is_server_stopped:
            is_idle = self._idleness.saw(facts, since_s=unrouted_at_s)
            self._why = self._idleness.why
            limit_s = self.settings.unread_page_timeout_s
            if given_up := self._idleness.given_up(facts, limit_s=limit_s):
                return self._back_from_draining(
                    facts, self._lease.over(facts.now_s, given_up=given_up)
                )
            if facts.suspects and not self._why:
                self._why = f"waits to see whether process {min(facts.suspects)} stays on its GPU"
            if not is_idle or facts.suspects:
                return []
            self.memory.is_server_stopped = True
        return self._stopped(facts)

    def _stopped(self, facts: Facts) -> list[Action]:
        """Hand the GPUs over once they are free; a server must not wait for ever."""
        stopped_at_s = self._commands.done_at_s(HookKind.STOP)
        if self._stop_began_at_s is None:
            self._stop_began_at_s = facts.now_s
        since_s = self._stop_began_at_s if stopped_at_s is None else stopped_at_s
        busy = self._commands.error
        if stopped_at_s is not None:
            busy = self._busy(facts, since_s=stopped_at_s)
        is_out_of_time = facts.now_s - since_s > self.settings.device_free_timeout_s
        is_hopeless = stopped_at_s is not None and gpu_handover.is_beside(
            facts, since_s=stopped_at_s
        )
        if busy and self._commands.is_idle and (is_out_of_time or is_hopeless):
            if is_hopeless:
                gpu_handover.keep(self.memory, (pid for pid, _ in facts.trespassers))
                busy = gpu_handover.unusable(facts)
            if is_out_of_time and stopped_at_s is not None:
                gpu_handover.keep(self.memory, facts.others)
            return self._turn_home(facts, self._lease.over(facts.now_s, given_up=busy))
        if stopped_at_s is None:
            return self._commands.run(HookKind.STOP, facts.now_s)
        self._why = busy
        if not self._why and self.memory.lease_until_s is None:
            self._why = "the lease was not confirmed yet"
        if not self._why:
            assert self.memory.lease is not None
            self._fire(NodeEvent.DRAINED, facts.now_s, f"lease {self.memory.lease.lease_id}")
        return []

    def _back_from_draining(self, facts: Facts, why: str) -> list[Action]:
        if not self._commands.is_idle:
            limit_s = self.settings.device_free_timeout_s
            until_s = self.memory.serve_by_s
            return self._commands.end_drain(facts.now_s, stop_limit_s=limit_s, until_s=until_s)
        if self.memory.is_server_stopped:
            return self._turn_home(facts, why)
        if self._commands.done_at_s(HookKind.ROUTE) is None:
            return self._commands.run(HookKind.ROUTE, facts.now_s)
        self._lease.end()
        self._fire(NodeEvent.LOAD_ROSE, facts.now_s, why)
        return []

    def _on_loan(self, facts: Facts) -> list[Action]:
        over = self._lease.over(facts.now_s)
        return self._turn_home(facts, over) if over else []

    def _turn_home(self, facts: Facts, why: str) -> list[Action]:
        is_draining = self.memory.role == R.DRAINING
        if is_draining and self._commands.done_at_s(HookKind.STOP) is None:
            self.memory.is_server_stopped = False  # as far as the agent knows
        return_timing.began(self.memory, now_s=facts.now_s)
        self._lease.end()
        self._fire(NodeEvent.VACATE, facts.now_s, why)
        return self._vacating(facts)

    def _vacating(self, facts: Facts) -> list[Action]:
        grace_s = self.settings.vacate_grace_s
        if self.memory.serve_by_s is not None:
            grace_s = min(grace_s, max(0.0, self.memory.serve_by_s - facts.now_s))
        self.workers.vacate(grace_s=grace_s, now_s=facts.now_s)
        self._saved_at_s = max(self._saved_at_s, return_timing.saved_at_s(facts))
        live = self.workers.live()
        if live:
            self._emptied_at_s = None
            # Nothing that the agent can do is left: each was killed at the end of its grace, and
            # so was its shim. The node is no help to its service, which must have another one.
            until_s = self._role_at_s + self.settings.vacate_grace_s
            if facts.now_s - until_s > self.settings.device_free_timeout_s:
                why = f"worker {live[0].order.key} does not end, {len(live)} in all"
                self._fire(NodeEvent.DEVICE_STUCK, facts.now_s, why)
            return []
        if self._emptied_at_s is None:
            self._emptied_at_s = facts.now_s
        is_out_of_time = facts.now_s - self._emptied_at_s > self.settings.device_free_timeout_s
        if facts.gpus is not None and facts.sampled_at_s <= self._emptied_at_s:
            is_out_of_time = False  # a look at GPUs that hang takes longest, and comes all the same
        beside = gpu_handover.known(self.memory, facts)
        if is_out_of_time:
            beside |= facts.others
            if self.memory.is_server_stopped:  # else it may be the server that is there, and stays
                gpu_handover.keep(self.memory, facts.others)
        waited_s = facts.now_s - self._emptied_at_s
        is_patient = not is_out_of_time and waited_s <= self.settings.unresponsive_gpu_wait_s
        busy = self._kept_out(
            facts, since_s=self._emptied_at_s, is_patient=is_patient, beside=beside
        )
        if not busy:
            instants_s = (self._role_at_s, self._saved_at_s, self._emptied_at_s, facts.now_s)
            return_timing.vacated(self.memory, *instants_s)
            self._fire(NodeEvent.DEVICE_FREE, facts.now_s, "")
            return self._warming(facts)
        if is_out_of_time:
            self._fire(NodeEvent.DEVICE_STUCK, facts.now_s, busy)
        return []

    def _busy(self, facts: Facts, *, since_s: float) -> str:
        """Why workers cannot have the GPUs."""
        ratio = self.settings.device_free_memory_ratio
        return gpu_handover.to_workers(facts, since_s=since_s, free_memory_ratio=ratio)

    def _kept_out(
        self,
        facts: Facts,
        *,
        since_s: float,
        is_patient: bool = False,
        beside: frozenset[int] = frozenset(),
    ) -> str:
        """Why the server cannot be started; not by one that answers already: it has the GPUs.

        It was started on a way home that the ledger missed, or by hand, or never stopped.
        """
        if facts.is_healthy and facts.sampled_at_s > since_s:
            return ""
        ratio = self.settings.device_free_memory_ratio
        return gpu_handover.to_server(
            facts,
            since_s=since_s,
            free_memory_ratio=ratio,
            is_patient=is_patient,
            beside=beside,
        )

    def _warming(self, facts: Facts) -> list[Action]:
        if facts.gpus is None:
            actions: list[Action] = []  # commands need the list of GPUs
        elif (started_at_s := self._commands.done_at_s(HookKind.START)) is None:
            actions = self._commands.run(HookKind.START, facts.now_s)
        elif facts.sampled_at_s <= started_at_s or not facts.is_healthy:
            actions = []
        elif self._commands.done_at_s(HookKind.ROUTE) is None:
            actions = self._commands.run(HookKind.ROUTE, facts.now_s)
        else:
            server_ready_s = facts.now_s - self._role_at_s
            return_timing.arrived(self.memory, now_s=facts.now_s, server_ready_s=server_ready_s)
            self._fire(NodeEvent.HEALTHY, facts.now_s, "")
            return []
        is_late = facts.now_s - self._role_at_s > self.settings.warm_up_timeout_s
        if is_late and self._commands.is_idle:
            why = self._commands.error or "the server did not become healthy"
            self._fire(NodeEvent.WARM_UP_FAILED, facts.now_s, why)
            return []
        return actions or self._commands.end_late(facts.now_s, until_s=self.memory.serve_by_s)

    def _quarantined(self, facts: Facts) -> list[Action]:
        """Return home once the node was quiet and empty for `quarantine_s`, or on an operator's
        order.

        The health check decides whether a server can run without a lost GPU.
        """
        self.workers.vacate(grace_s=self.settings.vacate_grace_s, now_s=facts.now_s)
        self._kept_by = self._kept_in_quarantine(facts)
        if self._kept_by:
            return []
        event = NodeEvent.VALIDATED if self._is_inference else NodeEvent.VALIDATED_TRAINING
        self._lease.end()
        self._fire(event, facts.now_s, "left quarantine")
        return []

    def _kept_in_quarantine(self, facts: Facts) -> str:
        """Why it cannot leave now; empty when it can."""
        memory, settings = self.memory, self.settings
        if memory.desired_role == R.QUARANTINED:
            return "the coordinator wants it there"
        if live := self.workers.live():
            return f"worker {live[0].order.key} has not ended, {len(live)} in all"
        keeps = self._kept_out if self._is_inference else self._busy
        if busy := keeps(facts, since_s=self._role_at_s):
            return busy
        is_over = facts.now_s - self._role_at_s >= settings.quarantine_s
        if not (is_over or memory.is_quarantine_over):
            return f"for {settings.quarantine_s:g} s, or until aryl node uncordon {memory.node}"
        return ""
