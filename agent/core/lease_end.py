"""Why and when a node's lease ends: expired, refused, given up or wanted back. Pure."""

from __future__ import annotations

from agent.core import return_timing
from agent.core.state import ENDED_LEASES_KEPT, Memory
from common.messages import DesiredState
from common.model import LeaseId, NodeRole, TurnBack


class Leasehold:
    """The lease of one memory, and why the node must end it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._refusal = ""

    def take(self, desired: DesiredState, now_s: float) -> None:
        """Take the lease of an order, if it has one that the node may begin now."""
        memory = self._memory
        wanted = desired.lease if desired.role == NodeRole.ON_LOAN else None
        if wanted is None or wanted.lease_id in memory.ended_leases:
            return
        if memory.lease is None and memory.role in (NodeRole.SERVING, NodeRole.DRAINING):
            memory.lease, memory.lease_until_s = wanted, None
            memory.lease_unconfirmed_until_s = now_s + wanted.ttl_s
            memory.turned_back = None
            self._refusal = ""
            return_timing.forget(memory)

    def renewed(self, lease_id: LeaseId, until_s: float) -> None:
        """Record a renewal up to this instant of the boot clock.

        Another lease's renewal has no effect.
        """
        lease = self._memory.lease
        if lease is not None and lease.lease_id == lease_id:
            self._memory.lease_until_s = until_s

    def refused(self, lease_id: LeaseId, reason: str) -> None:
        """Record that the coordinator refused the lease and wants the node back."""
        lease = self._memory.lease
        if lease is not None and lease.lease_id == lease_id:
            self._refusal = f"the lease was refused: {reason or 'no reason given'}"

    def over(self, now_s: float, *, given_up: str = "") -> str:
        """Why the node must no longer be on loan; empty while it may.

        given_up: why the node itself cannot begin the loan, unless another cause has ended it. The
        node then turns back for good, even if a restarted agent receives the order to go on: on the
        way back, nothing is as the drain left it.
        """
        memory = self._memory
        if memory.lease is None:
            return "it holds no lease"
        if memory.desired_role != NodeRole.ON_LOAN:
            return "the coordinator asked for it back"
        if self._refusal:
            return self._refusal
        turned_back = memory.turned_back
        if turned_back is not None and turned_back.lease_id == memory.lease.lease_id:
            return turned_back.reason
        ends_at_s = memory.lease_ends_at_s
        if ends_at_s is not None and now_s >= ends_at_s:
            return "the lease ran out without an answer"
        if given_up:
            memory.turned_back = TurnBack(lease_id=memory.lease.lease_id, reason=given_up)
        return given_up

    def end(self) -> None:
        """End the lease; the node never honors it again."""
        memory = self._memory
        if memory.lease is not None:
            memory.ended_leases.append(memory.lease.lease_id)
            del memory.ended_leases[:-ENDED_LEASES_KEPT]
        memory.lease = memory.lease_until_s = memory.lease_unconfirmed_until_s = None
        self._refusal = ""
