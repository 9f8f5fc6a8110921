"""Answers lease renewals at once and from memory: the one request that must never queue.

The leader decides whether a lease may be kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from common import subjects
from common.bus import BusMessage
from common.clock import Clock
from common.errors import ProtocolError
from common.messages import RenewReply, RenewRequest, decode, encode
from common.model import NodeName
from coordinator.service.nodes.log_throttle import Complaints

log = logging.getLogger(__name__)


class Renewals:
    """Answers `renew`.

    Args:
        doubt: why this coordinator cannot decide now whether a node may keep its lease; empty when
            it can.
        refusal: why this node may not keep this lease; empty when it may. It sends the node home.
        ttl_s: the TTL that is granted.
        epoch: of the coordinator that answers.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        doubt: Callable[[NodeName], str],
        refusal: Callable[[NodeName, str], str],
        ttl_s: Callable[[], float],
        epoch: Callable[[], int],
    ) -> None:
        self._bad = Complaints(clock, "bad renewals")
        self._doubt = doubt
        self._refusal = refusal
        self._ttl_s = ttl_s
        self._epoch = epoch
        self.bad_messages = 0
        self.refusals = 0
        self.unanswered = 0

    async def answer(self, message: BusMessage) -> None:
        """Answer one request; an invalid one is counted and dropped.

        While there is doubt there is no answer: an agent without an answer asks again, and goes
        home when its TTL ends; a refusal would send it home at once.
        """
        try:
            request = decode(message.data, RenewRequest)
        except ProtocolError as error:
            self._count_bad(message.subject, str(error))
            return
        if request.node != subjects.node_of(message.subject):
            self._count_bad(message.subject, f"it is signed {request.node}")
            return
        doubt = self._doubt(NodeName(request.node))
        if doubt:
            self.unanswered += 1
            log.info("lease renewal of %s not answered: %s", request.node, doubt)
            return
        refusal = self._refusal(NodeName(request.node), request.lease_id)
        self.refusals += bool(refusal)
        reply = RenewReply(
            lease_id=request.lease_id,
            nonce=request.nonce,
            is_granted=not refusal,
            epoch=self._epoch(),
            ttl_s=0.0 if refusal else self._ttl_s(),
            reason=refusal,
        )
        await message.respond(encode(reply))

    def _count_bad(self, subject: str, why: str) -> None:
        self.bad_messages += 1
        self._bad.note(subjects.node_of(subject), why)
