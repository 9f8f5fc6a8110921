"""Hooks that put a node into a service's routing, take it out, and ask whether it is drained.

Must not know Aryl's packages and stays on the standard library, so that it starts quickly.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Sequence

EXIT_NOT_DRAINED = 1
EXIT_UNREACHABLE = 4

_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def quoted(text: str) -> str:
    """Percent-encoding (RFC 3986, section 2.1); urllib would cost most of the start-up time."""
    encoded = text.encode()
    return "".join(chr(byte) if byte in _UNRESERVED else f"%{byte:02X}" for byte in encoded)


def ask(router_url: str, method: str, target: str, timeout_s: float) -> tuple[int, bytes]:
    """One HTTP/1.0 exchange: status and body.

    Raises:
        OSError: no router there, or it did not answer in time.
        ValueError: the URL is no http://host:port, or the answer is no HTTP.
    """
    scheme, _, rest = router_url.partition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    if scheme != "http" or not host:
        raise ValueError(f"{router_url!r} is not http://host:port")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        head = f"{method} {target} HTTP/1.0\r\nHost: {host}:{port}\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(head.encode())
        answer = bytearray()
        while chunk := connection.recv(65536):
            answer += chunk
    head_bytes, _, body = bytes(answer).partition(b"\r\n\r\n")
    return int(head_bytes.split(maxsplit=2)[1]), body


def act(action: str, router_url: str, node: str, url: str, timeout_s: float) -> int:
    """The exit status of one action; raises what `ask` raises."""
    target = f"/nodes/{quoted(node)}"
    if action == "add":
        status, body = ask(router_url, "PUT", f"{target}?url={quoted(url)}", timeout_s)
    elif action == "remove":
        status, body = ask(router_url, "DELETE", target, timeout_s)
    else:
        status, body = ask(router_url, "GET", target, timeout_s)
        if status == 404:
            return 0  # a router that does not know the node sends it nothing
        if status == 200:
            seen = json.loads(body)
            return EXIT_NOT_DRAINED if seen["is_routed"] or seen["in_flight"] else 0
    if status != 200:
        raise ValueError(f"the router answered {status}: {body[:200].decode(errors='replace')}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`route.py add|remove|drained`; 0 done or drained, 1 not drained, 2 usage, 4 no answer."""
    parser = argparse.ArgumentParser(prog="route.py", description=__doc__)
    parser.add_argument("action", choices=("add", "remove", "drained"))
    parser.add_argument("router_url", help="http://host:port")
    parser.add_argument("node")
    parser.add_argument("url", nargs="?", default="", help="the node's server; add needs it")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    given = parser.parse_args(arguments)
    if given.action == "add" and not given.url:
        parser.error("add needs the URL of the node's server")
    try:
        return act(given.action, given.router_url, given.node, given.url, given.timeout_s)
    except (OSError, ValueError, IndexError, KeyError) as error:
        sys.stderr.write(f"route.py {given.action} {given.node}: {error}\n")
        return EXIT_UNREACHABLE


if __name__ == "__main__":
    sys.exit(main())
