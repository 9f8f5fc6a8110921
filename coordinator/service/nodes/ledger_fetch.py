"""Fetches the ledgers of nodes beside the decisions, one request at a time for each node."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from common.errors import ProtocolError, Unavailable
from common.messages import LedgerReply
from common.model import NodeName
from coordinator.service.nodes.per_node_queue import OneEach

log = logging.getLogger(__name__)


class LedgerAsker:
    """Asks nodes for their ledgers; no request outlives `run`.

    Args:
        fetch: asks one node; raises Unavailable or ProtocolError where there is no good answer.
        got: called with a node and its ledger.
        lacked: called with a node that gave no good answer.
    """

    def __init__(
        self,
        fetch: Callable[[NodeName], Awaitable[LedgerReply]],
        *,
        got: Callable[[NodeName, LedgerReply], None],
        lacked: Callable[[NodeName], None],
    ) -> None:
        self._fetch = fetch
        self._got = got
        self._lacked = lacked
        self._line = OneEach(self._ask, name="ledger")

    def ask(self, node: NodeName) -> None:
        """Request a node's ledger; at most one request per node is under way."""
        if not self._line.is_busy(node):
            self._line.want(node)

    async def run(self) -> None:
        """Send the requests, for ever."""
        await self._line.run()

    async def _ask(self, node: NodeName) -> None:
        try:
            reply = await self._fetch(node)
        except (Unavailable, ProtocolError) as error:
            log.warning("ledger of %s: %s", node, error)
            self._lacked(node)
        else:
            self._got(node, reply)
