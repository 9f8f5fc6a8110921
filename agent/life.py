"""A node's life: its role, its lease, its inference server. Pure: no clock, no I/O, no processes.

`accept` takes what is wanted, `step` takes what is, and both change only the memory; what the
world must do comes back as actions. Roles move by `common.lifecycle.NODE_TRANSITIONS` alone.
"""

from __future__ import annotations

from agent import trespasses, way_home
from agent.holding import Holding
from agent.settings import AgentSettings
from agent.state import ENDED_LEASES_KEPT, Action, Facts, HookKind, Memory, RunHook
from common.lifecycle import NODE_TRANSITIONS, NodeEvent, advance
from common.messages import DesiredReply, DesiredState, GpuHealth, InferenceReport, Trespass
from common.model import LeaseId, NodeRole, Pool

R = NodeRole
HOOK_RETRY_S = 1.0
PROBES_MISSED_WHEN_DOWN = 3
"""So many health checks in a row must fail before a server counts as down."""


class Life:
    """One node.

    Args:
        boot_id: of this boot; a memory of another one means that nothing of it still runs.
    """

    def __init__(
        self, settings: AgentSettings, memory: Memory, *, boot_id: str, now_s: float
    ) -> None:
        self.settings = settings
        self.memory = memory
        self.workers = Holding(memory, free_memory_ratio=settings.device_free_memory_ratio)
        self._reclaim_at_s: float | None = None
        self._missed_probes = 0
        self._missed_at_s: float | None = None
        self._why = ""
        self.trespasses: tuple[Trespass, ...] = ()
        self.ledger_error = ""
        """Why the memory is not on disk; until it is, what was begun goes on or home, no more."""
        self._role_at_s = now_s
        self._emptied_at_s: float | None = None
        self._hook: HookKind | None = None
        self._hook_role_at_s = now_s
        self._hook_error = ""
        self._hook_retry_at_s = now_s
        self._hook_done_at_s: dict[HookKind, float] = {}
        self._quiet: InferenceReport | None = None
        self._quiet_at_s = -1.0
        self._quiet_samples = 0
        self._refusal = ""
        if memory.boot_id != boot_id:
            self._booted(boot_id, now_s)

    def _booted(self, boot_id: str, now_s: float) -> None:
        memory = self.memory
        memory.boot_id = boot_id
        self.workers.end_all("the node rebooted", now_s=now_s)
        way_home.booted(memory)
        self._end_lease()
        inference = self.settings.home_pool == Pool.INFERENCE
        memory.desired_role = R.SERVING if inference else R.TRAINING
        self._fire(NodeEvent.BOOTED if inference else NodeEvent.BOOTED_TRAINING, now_s, "rebooted")

    # --- what is wanted -----------------------------------------------------------------------

    def accept(self, desired: DesiredState, *, now_s: float) -> DesiredReply:
        """Take a desired state, or say why not; a refusal changes nothing."""
        memory = self.memory
        error = ""
        if desired.node != memory.node:
            error = f"node: this is {memory.node}, not {desired.node}"
        elif desired.epoch < memory.epoch:
            error = f"epoch: {desired.epoch} is over, epoch {memory.epoch} leads"
        elif desired.epoch == memory.epoch and desired.generation < memory.generation:
            error = f"generation: {desired.generation} is older than {memory.generation}"
        elif (desired.epoch, desired.generation) != (memory.epoch, memory.generation):
            memory.epoch, memory.generation = desired.epoch, desired.generation
            self.workers.take(desired)
            memory.desired_role = desired.role
            self._reclaim_at_s = (
                None if desired.reclaim_in_s is None else now_s + desired.reclaim_in_s
            )
            self._take_lease(desired, now_s)
        return DesiredReply(
            is_accepted=not error, epoch=memory.epoch, generation=memory.generation, error=error
        )

    def _take_lease(self, desired: DesiredState, now_s: float) -> None:
        memory = self.memory
        wanted = desired.lease if desired.role == R.ON_LOAN else None
        if wanted is None or wanted.lease_id in memory.ended_leases:
            return
        if memory.lease is None and memory.role in (R.SERVING, R.DRAINING):
            memory.lease, memory.lease_until_s = wanted, None
            memory.lease_unconfirmed_until_s = now_s + wanted.ttl_s
            self._refusal = ""
            way_home.forget(memory)

    # --- the lease ----------------------------------------------------------------------------

    def renewed(self, lease_id: LeaseId, until_s: float) -> None:
        """The coordinator prolonged the lease up to this instant of the boot clock."""
        lease = self.memory.lease
        if lease is not None and lease.lease_id == lease_id:
            self.memory.lease_until_s = until_s

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """The coordinator wants the node back."""
        lease = self.memory.lease
        if lease is not None and lease.lease_id == lease_id:
            self._refusal = reason or "no reason given"

    @property
    def lease_ends_at_s(self) -> float | None:
        """When the lease is over unless the coordinator answers; None without a lease."""
        memory = self.memory
        if memory.lease is None:
            return None
        until_s = memory.lease_until_s
        return memory.lease_unconfirmed_until_s if until_s is None else until_s

    def _lease_is_over(self, now_s: float) -> str:
        """Why the node must not be lent any longer; empty while it may."""
        memory = self.memory
        if memory.lease is None:
            return "it holds no lease"
        if memory.desired_role != R.ON_LOAN:
            return "the coordinator asked for it back"
        if self._refusal:
            return f"the lease was refused: {self._refusal}"
        ends_at_s = self.lease_ends_at_s
        if ends_at_s is not None and now_s >= ends_at_s:
            return "the lease ran out without an answer"
        return ""

    def _end_lease(self) -> None:
        memory = self.memory
        if memory.lease is not None:
            memory.ended_leases.append(memory.lease.lease_id)
            del memory.ended_leases[:-ENDED_LEASES_KEPT]
        memory.lease = memory.lease_until_s = memory.lease_unconfirmed_until_s = None
        self._refusal = ""

    # --- what is ------------------------------------------------------------------------------

    @property
    def is_in_transition(self) -> bool:
        """Whether something is under way that should be looked at often."""
        moving = self.memory.role in (R.DRAINING, R.VACATING, R.WARMING)
        return moving or self.workers.is_in_transition

    @property
    def is_server_down(self) -> bool:
        """Whether the node is there to serve, and its server missed several checks in a row.

        One missed check may be a server that is busy; to be counted out costs its service a node.
        """
        return self.memory.role == R.SERVING and self._missed_probes >= PROBES_MISSED_WHEN_DOWN

    @property
    def detail(self) -> str:
        """Why the node is where it is, in words."""
        trespass = trespasses.in_words(self.trespasses)
        parts = (self._why, self._hook_error, trespass, self.ledger_error)
        return "; ".join(part for part in parts if part)

    def hook_done(self, kind: HookKind, *, error: str, now_s: float) -> None:
        """The answer to `RunHook`."""
        self._hook = None
        if kind == HookKind.START and not error:
            self.memory.is_server_stopped = False
        if self._hook_role_at_s != self._role_at_s:
            return  # begun in a role that is over: the present one asks for itself
        if error:
            self._hook_error = f"{kind} command: {error}"
            self._hook_retry_at_s = now_s + HOOK_RETRY_S
            return
        self._hook_error = ""
        self._hook_done_at_s[kind] = now_s

    def step(self, facts: Facts) -> list[Action]:
        """Everything that should happen now, given what is."""
        is_granted = self.memory.role in (R.TRAINING, R.ON_LOAN)
        self.trespasses = trespasses.told(facts.trespassers) if is_granted else ()
        actions = self._role_step(facts)
        closed = self.ledger_error
        if self.memory.role not in (R.TRAINING, R.ON_LOAN):
            closed = f"the node is {self.memory.role}"
        return actions + self.workers.step(facts, closed=closed)

    def _fire(self, event: NodeEvent, now_s: float, why: str) -> None:
        memory = self.memory
        memory.role = advance(NODE_TRANSITIONS, memory.role, event, who=f"node {memory.node}")
        self._role_at_s, self._why = now_s, why
        self._hook_done_at_s = {}
        self._hook_error = ""
        self._hook_retry_at_s = now_s
        self._quiet, self._quiet_samples = None, 0
        self._emptied_at_s = None

    def _role_step(self, facts: Facts) -> list[Action]:
        if self.memory.desired_role == R.QUARANTINED and self.memory.role != R.QUARANTINED:
            self.workers.vacate(grace_s=self.settings.vacate_grace_s, now_s=facts.now_s)
            if self.memory.lease is not None:
                ends_at_s = self.lease_ends_at_s
                way_home.began(self.memory, now_s=facts.now_s, lease_ends_at_s=ends_at_s)
            self._fire(NodeEvent.FAULT, facts.now_s, "quarantined by the coordinator")
        match self.memory.role:
            case R.SERVING:
                return self._serving(facts)
            case R.DRAINING:
                return self._draining(facts)
            case R.ON_LOAN:
                return self._on_loan(facts)
            case R.VACATING:
                return self._vacating(facts)
            case R.WARMING:
                return self._warming(facts)
            case R.QUARANTINED:
                self._quarantined(facts)
            case _:
                pass
        return []

    def _serving(self, facts: Facts) -> list[Action]:
        if self.memory.lease is not None:
            over = self._lease_is_over(facts.now_s) or self.ledger_error
            if over:
                self._end_lease()
            else:
                self._fire(NodeEvent.LEND, facts.now_s, f"lease {self.memory.lease.lease_id}")
                return self._draining(facts)
        is_down = facts.probed_at_s > self._role_at_s and not facts.is_healthy
        if not is_down:
            self._missed_probes = 0
        elif facts.probed_at_s != self._missed_at_s:
            self._missed_probes, self._missed_at_s = self._missed_probes + 1, facts.probed_at_s
        self._why = "the server does not answer its health check" if is_down else ""
        return []

    def _draining(self, facts: Facts) -> list[Action]:
        over = self._lease_is_over(facts.now_s) or self.ledger_error
        if over:
            return self._back_from_draining(facts, over)
        if HookKind.UNROUTE not in self._hook_done_at_s:
            return self._run(HookKind.UNROUTE, facts.now_s)
        if not self.memory.is_server_stopped:
            if not self._is_idle(facts):
                return []
            self.memory.is_server_stopped = True
        if HookKind.STOP not in self._hook_done_at_s:
            return self._run(HookKind.STOP, facts.now_s)
        self._why = self._device_busy(facts, since_s=self._hook_done_at_s[HookKind.STOP])
        until_s = self.memory.lease_until_s
        if not self._why and until_s is None:
            self._why = "the lease was not confirmed yet"
        if not self._why:
            assert self.memory.lease is not None
            self._fire(NodeEvent.DRAINED, facts.now_s, f"lease {self.memory.lease.lease_id}")
        return []

    def _back_from_draining(self, facts: Facts, why: str) -> list[Action]:
        if self._hook is not None:
            return []
        if self.memory.is_server_stopped:
            return self._turn_home(facts, why)
        if HookKind.ROUTE not in self._hook_done_at_s:
            return self._run(HookKind.ROUTE, facts.now_s)
        self._end_lease()
        self._fire(NodeEvent.LOAD_ROSE, facts.now_s, why)
        return []

    def _is_idle(self, facts: Facts) -> bool:
        """Nothing running, nothing waiting, the success counter still, two samples in a row.

        A server whose page and health check are both gone serves nobody either.
        """
        since_s = max(self._hook_done_at_s[HookKind.UNROUTE], self._quiet_at_s)
        if facts.probed_at_s <= since_s:
            return False
        self._quiet_at_s = facts.probed_at_s
        page, last = facts.inference, self._quiet
        self._quiet = page
        if page is None:
            is_quiet = not facts.is_healthy
            self._why = "" if is_quiet else "waits for the server's metrics page"
        else:
            in_flight = page.running_count + page.waiting_count
            is_still = last is not None and last.success_total == page.success_total
            is_quiet = in_flight == 0 and (is_still or self._quiet_samples == 0)
            self._why = f"waits for {in_flight:g} requests" if in_flight else ""
        self._quiet_samples = self._quiet_samples + 1 if is_quiet else 0
        return self._quiet_samples >= 2

    def _on_loan(self, facts: Facts) -> list[Action]:
        over = self._lease_is_over(facts.now_s)
        return self._turn_home(facts, over) if over else []

    def _turn_home(self, facts: Facts, why: str) -> list[Action]:
        way_home.began(self.memory, now_s=facts.now_s, lease_ends_at_s=self.lease_ends_at_s)
        self._end_lease()
        self._fire(NodeEvent.VACATE, facts.now_s, why)
        return self._vacating(facts)

    def _vacating(self, facts: Facts) -> list[Action]:
        grace_s = self.settings.vacate_grace_s
        if self._reclaim_at_s is not None:
            grace_s = min(grace_s, max(0.0, self._reclaim_at_s - facts.now_s))
        self.workers.vacate(grace_s=grace_s, now_s=facts.now_s)
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
        busy = self._device_busy(facts, since_s=self._emptied_at_s)
        # A server that answers has the GPUs: it was started on a way home that the ledger missed,
        # or never stopped.
        is_served = facts.is_healthy and facts.probed_at_s > self._emptied_at_s
        if is_served or not busy:
            way_home.vacated(
                self.memory,
                vacate_s=self._emptied_at_s - self._role_at_s,
                device_free_s=facts.now_s - self._emptied_at_s,
            )
            self._fire(NodeEvent.DEVICE_FREE, facts.now_s, "")
            return self._warming(facts)
        if facts.now_s - self._emptied_at_s > self.settings.device_free_timeout_s:
            self._fire(NodeEvent.DEVICE_STUCK, facts.now_s, busy)
        return []

    def _device_busy(self, facts: Facts, *, since_s: float) -> str:
        """Why the GPUs cannot be handed over; a sample from before `since_s` proves nothing."""
        if facts.gpus is None or facts.gpus_at_s <= since_s:
            return "waits for a GPU sample"
        return next((why for gpu in facts.gpus if (why := self.workers.busy_gpu(gpu))), "")

    def _warming(self, facts: Facts) -> list[Action]:
        if facts.gpus is None:
            actions: list[Action] = []  # commands are told the GPUs
        elif HookKind.START not in self._hook_done_at_s:
            actions = self._run(HookKind.START, facts.now_s)
        elif facts.probed_at_s <= self._hook_done_at_s[HookKind.START] or not facts.is_healthy:
            actions = []
        elif HookKind.ROUTE not in self._hook_done_at_s:
            actions = self._run(HookKind.ROUTE, facts.now_s)
        else:
            server_ready_s = facts.now_s - self._role_at_s
            way_home.arrived(self.memory, now_s=facts.now_s, server_ready_s=server_ready_s)
            self._fire(NodeEvent.HEALTHY, facts.now_s, "")
            return []
        if self._hook is None and facts.now_s - self._role_at_s > self.settings.warm_up_timeout_s:
            why = self._hook_error or "the server did not become healthy"
            self._fire(NodeEvent.WARM_UP_FAILED, facts.now_s, why)
            return []
        return actions

    def _quarantined(self, facts: Facts) -> None:
        """Home again once it was quiet, empty and healthy for `quarantine_s`."""
        if self.memory.desired_role == R.QUARANTINED or self.workers.live():
            return
        if facts.gpus is None or any(gpu.health != GpuHealth.OK for gpu in facts.gpus):
            return
        if facts.now_s - self._role_at_s < self.settings.quarantine_s:
            return
        inference = self.settings.home_pool == Pool.INFERENCE
        is_served = inference and facts.is_healthy and facts.probed_at_s > self._role_at_s
        if not is_served and self._device_busy(facts, since_s=self._role_at_s):
            return
        event = NodeEvent.VALIDATED if inference else NodeEvent.VALIDATED_TRAINING
        self._end_lease()
        self._fire(event, facts.now_s, "left quarantine")

    def _run(self, kind: HookKind, now_s: float) -> list[Action]:
        """Start a command, unless one runs or the last failure is too fresh."""
        if self._hook is not None or now_s < self._hook_retry_at_s:
            return []
        self._hook, self._hook_role_at_s = kind, self._role_at_s
        return [RunHook(kind)]
