"""Imports nats-py without the HTTP client, which it needs only for URLs that Aryl refuses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from types import ModuleType
from typing import cast


@contextlib.contextmanager
def _missing(name: str) -> Generator[None]:
    """Make imports in this block find no module of this name, unless it has been imported before.

    None in its place is the import system's own mark for a module that must not be found.
    """
    modules = cast("dict[str, ModuleType | None]", sys.modules)
    if name in modules:
        yield
        return
    modules[name] = None
    try:
        yield
    finally:
        del modules[name]


# nats-py uses aiohttp for websockets where it is installed. No URL of ours needs that: `natsrules`
# refuses ws:// and wss://. On a coordinator's machine, which has aiohttp, the import would take a
# third of the start-up time of every agent, coordinator and command.
with _missing("aiohttp"):
    import nats.errors as errors
    import nats.js.errors as js_errors
    from nats.aio.client import Client, Server
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.js import JetStreamContext

__all__ = [
    "Client",
    "JetStreamContext",
    "Msg",
    "Server",
    "Subscription",
    "errors",
    "js_errors",
]
