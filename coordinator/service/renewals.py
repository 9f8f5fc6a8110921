"""Lease renewals, answered at once and from memory: the one request that must never queue.

Must not know the journal; whether a lease may be kept is asked of whoever leads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from common import subjects
from common.bus import BusMessage
from common.errors import ProtocolError
from common.messages import RenewReply, RenewRequest, decode, encode
from common.model import NodeName

log = logging.getLogger(__name__)


class Renewals:
    """Answers `renew`.

    Args:
        refusal: why this node may not keep this lease; empty when it may.
        ttl_s: the TTL that is granted. epoch: of whoever answers.
    """

    def __init__(
        self,
        *,
        refusal: Callable[[NodeName, str], str],
        ttl_s: Callable[[], float],
        epoch: Callable[[], int],
    ) -> None:
        self._refusal = refusal
        self._ttl_s = ttl_s
        self._epoch = epoch
        self.bad_messages = 0
        self.refusals = 0

    async def answer(self, message: BusMessage) -> None:
        """One request; one that does not fit is counted and dropped."""
        try:
            request = decode(message.data, RenewRequest)
        except ProtocolError as error:
            self.bad_messages += 1
            log.warning("bad renewal on %s: %s", message.subject, error)
            return
        if request.node != subjects.node_of(message.subject):
            self.bad_messages += 1
            log.warning("renewal on %s is signed %s", message.subject, request.node)
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
