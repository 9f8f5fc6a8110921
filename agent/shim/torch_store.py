"""The rendezvous store of a torchrun job: hosts PyTorch's TCPStore.

    python3 torch_store.py HOST:PORT

The job's own Python runs it, as the job's user and in the job's environment. It therefore uses only
torch and the standard library, of any Python that PyTorch supports. The launchers join it as
clients, with `--rdzv-backend=c10d --rdzv-conf=is_host=0` (torch.distributed.elastic, "C10d
Rendezvous Backend": `is_host`).
"""

from __future__ import annotations

import importlib
import signal
import socket
import sys
from pathlib import Path

EX_USAGE = 64
EX_TEMPFAIL = 75
"""The port is taken: that is no fault, and another attempt gets another one."""


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[IPv6]:port`.

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{text!r} is no HOST:PORT")
    return host, int(port)


def is_taken(port: int) -> bool:
    """True if another process listens on this TCP port; TCPStore itself only reports "failed"."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def host_store(host: str, port: int) -> object:
    """A TCPStore that serves until this process ends.

    It waits for no worker: the launchers decide how many there are, and that changes.
    """
    here = Path(__file__).resolve().parent
    # Python put this file's folder first, whose modules share names with others.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    distributed = importlib.import_module("torch.distributed")
    return distributed.TCPStore(host, port, is_master=True, wait_for_workers=False)


def main(arguments: list[str]) -> int:
    """Serve until a signal; otherwise the exit status gives the reason."""
    try:
        [text] = arguments
        host, port = parse_endpoint(text)
    except ValueError as error:
        sys.stderr.write(f"usage: torch_store.py HOST:PORT ({error})\n")
        return EX_USAGE
    if is_taken(port):
        sys.stderr.write(f"port {port} is in use\n")
        return EX_TEMPFAIL
    store = host_store(host, port)
    sys.stderr.write(f"rendezvous store at {host}:{port}, {type(store).__name__}\n")
    sys.stderr.flush()
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
