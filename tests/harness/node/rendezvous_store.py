"""Rendezvous stores for tests: their orders, and a real one of standard library."""

from __future__ import annotations

import socket
import sys

from msgspec.structs import replace

from common.messages import OrderPhase, WorkerOrder
from common.model import STORE_INDEX, Launcher, RendezvousSpec
from tests.harness.node.workers import make_order

ENDPOINT = "n1:29500"

KEY_VALUE_SERVER = """
import os, socketserver
class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            name, _, value = line.decode().strip().partition("=")
            if value:
                kept[name] = value
            self.wfile.write((kept.get(name, "") + "\\n").encode())
kept = {}
host, _, port = os.environ["ARYL_RENDEZVOUS_ENDPOINT"].rpartition(":")
socketserver.ThreadingTCPServer.daemon_threads = True
with socketserver.ThreadingTCPServer((host, int(port)), Answer) as server:
    print("pid", os.getpid(), flush=True)
    server.serve_forever()
"""
KEY_VALUE_STORE = (sys.executable, "-I", "-S", "-c", KEY_VALUE_SERVER)
"""A rendezvous store of standard library: a line `name=value` sets, `name` asks."""


def store_order(given: WorkerOrder | None = None, *, command: tuple[str, ...] = ()) -> WorkerOrder:
    """The order for the store of a gang."""
    given = given or make_order("train.py", launcher=Launcher.TORCHRUN, workers=(1, 4))
    return replace(
        given,
        key=replace(given.key, worker_index=STORE_INDEX),
        spec=replace(given.spec, rendezvous=RendezvousSpec(command=command)),
        gpu_uuids=(),
        phase=OrderPhase.RESERVE,
        has_store=True,
    )


def ask(endpoint: str, line: str) -> str:
    """One line to a key-value server and its answer."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as connection:
        connection.sendall(f"{line}\n".encode())
        return connection.makefile().readline().strip()
