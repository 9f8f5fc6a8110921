"""An agent one of whose steps never ends, from the moment that a file says so.

Run by tests/live/agent/test_hung_agent.py as a process. Must not differ from `agent.daemon` in
anything else: its loop turns, and everything that it awaits but this goes on.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from agent import daemon
from agent.driver import Node

STALL = "stall"
"""Beside the settings: whether the next look at the workers ends."""


def main() -> int:
    """As the daemon's, with a node whose looks at its workers can be halted."""
    make, stall = daemon.make_node, Path(sys.argv[sys.argv.index("--config") + 1]).parent / STALL

    def made(*given: object, **named: object) -> Node:
        node: Node = make(*given, **named)  # type: ignore[arg-type]
        look = node.runner.statuses

        async def statuses(*given: Any) -> object:
            if stall.exists():
                await asyncio.Event().wait()
            return await look(*given)

        setattr(node.runner, "statuses", statuses)  # noqa: B010 - on this one alone
        return node

    setattr(daemon, "make_node", made)  # noqa: B010 - of this process alone
    return daemon.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
