"""Keeps the pretend inference servers of a cell running, as systemd would.

An edge. The stop hook records that a server shall be gone; a server that ends without it is
restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from common.children import send_signal
from common.clock import Clock
from coordinator.demo import server_ctl
from coordinator.demo.supervise import RESTART_S

log = logging.getLogger(__name__)

LOOK_S = 0.5
LONGEST_WAIT_S = 10.0
"""Between two starts of a server that ends again and again."""
STEADY_S = 10.0
"""A server that ran for this long starts again with the shortest wait."""


class Backoff:
    """When to restart a server that has ended.

    Soon at first; a server that ends again and again waits twice as long each time.
    """

    def __init__(self) -> None:
        self.wait_s = RESTART_S
        self._ended_at_s: float | None = None
        self._started_at_s: float | None = None

    def ended(self, now_s: float) -> bool:
        """Record that it has ended; True if that is new."""
        if self._ended_at_s is not None:
            return False
        is_quick = self._started_at_s is not None and now_s - self._started_at_s < STEADY_S
        self.wait_s = min(2 * self.wait_s, LONGEST_WAIT_S) if is_quick else RESTART_S
        self._ended_at_s = now_s
        return True

    def is_due(self, now_s: float) -> bool:
        """True if a server that has ended has waited long enough."""
        return self._ended_at_s is not None and now_s >= self._ended_at_s + self.wait_s

    def started(self, now_s: float) -> None:
        """Record that it was started here."""
        self._ended_at_s, self._started_at_s = None, now_s

    def runs(self) -> None:
        """Record that it runs, or was stopped on purpose."""
        self._ended_at_s = None


class _Kept(Struct):
    files: server_ctl.Files
    directory: Path
    backoff: Backoff


class ServerKeeper:
    """Restarts servers that ended without a stop.

    Args:
        directories: where the hooks of each node's server keep their files, by node.
        env: added to the environment of a server that is started here.
    """

    def __init__(
        self, directories: Mapping[str, Path], *, env: Mapping[str, str], clock: Clock
    ) -> None:
        self._servers = {
            node: _Kept(server_ctl.Files(str(directory), node), directory, Backoff())
            for node, directory in directories.items()
        }
        self._env = dict(env)
        self._clock = clock
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to look after the servers."""
        self._keeping = asyncio.create_task(self._keep(), name="unit servers")

    async def leave_alone(self) -> None:
        """Stop restarting them; running servers keep running."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping

    async def _keep(self) -> None:
        while True:
            await self._clock.sleep(LOOK_S)
            for node, kept in self._servers.items():
                try:
                    await self._look(node, kept)
                except OSError as error:  # no memory, no file: the next try may find it better
                    log.error("the server of %s cannot be started: %s", node, error)

    async def _look(self, node: str, kept: _Kept) -> None:
        if not server_ctl.has_died(kept.files):
            kept.backoff.runs()
        elif kept.backoff.ended(self._clock.now_s()):
            wait_s = kept.backoff.wait_s
            log.warning("the server of %s exited; restarting it in %g s", node, wait_s)
        elif kept.backoff.is_due(self._clock.now_s()):
            kept.backoff.started(self._clock.now_s())
            await self._revive(node, kept)

    async def _revive(self, node: str, kept: _Kept) -> None:
        """Start it by the hook, so that it is no child of this process.

        The hook's lock also keeps any other process from starting it.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", server_ctl.__file__, "revive"),
            *("--node", node, "--state-dir", str(kept.directory)),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **self._env},
        )
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                send_signal(process, signal.SIGKILL)
                await process.wait()
        if status != 0:
            log.error("the server of %s cannot be started: see %s", node, kept.files.log)
