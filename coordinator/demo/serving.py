"""Shared parts of the demo's HTTP processes: log lines, signals, one listening application."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

log = logging.getLogger(__name__)

PORT_IS_HELD = "the parent process holds the port for this process"


def set_up_log() -> None:
    """One line per fact on stderr."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set, on the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def serve(
    application: web.Application,
    *,
    host: str,
    port: int,
    stop: asyncio.Event,
    drain_s: float,
    is_port_held: bool = False,
) -> None:
    """Listen until `stop`, then let running requests end for at most `drain_s`.

    Port 0 takes a free one; the line `listening host=... port=...` on stderr shows which.

    Args:
        is_port_held: another process reserves this port for this one, as `ports.HeldPorts` does.

    Raises:
        OSError: the address is taken.
    """
    if is_port_held:
        await _check_nobody_listens(host, port)
    # An access log would cost more than the requests themselves.
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=drain_s)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=512, reuse_port=is_port_held).start()
        log.info("listening host=%s port=%d", host, runner.addresses[0][1])
        await stop.wait()
    finally:
        await runner.cleanup()


async def _check_nobody_listens(host: str, port: int) -> None:
    """Refuse a reserved port that has a listener.

    Each of two listeners would get half of the requests.
    """
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return
    writer.close()
    await writer.wait_closed()
    raise OSError(errno.EADDRINUSE, f"another process listens on {host}:{port} already")


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Replace `path` by `values` as JSON in one step: a reader sees the old or the new file."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(values), encoding="utf-8")
    scratch.replace(path)
