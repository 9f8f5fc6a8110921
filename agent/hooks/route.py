"""`aryl-route`: the route and unroute commands of an inference node behind haproxy or nginx.

    aryl-route haproxy add|remove|state --socket PATH|HOST:PORT --backend NAME [--server NAME]
    aryl-route nginx add|remove|state --upstream FILE --server HOST:PORT

Each command is idempotent and returns once its change is in effect. The module uses the standard
library only, because it also runs by ssh on a router's machine, without the rest of Aryl.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_UNREACHABLE = 4
TIMEOUT_S = 5.0
POLL_S = 0.02
FORCED_MAINTENANCE, FORCED_DRAIN = 0x01, 0x08
"""Bits of `srv_admin_state`: HAProxy's management guide, section "show servers state"."""
_HOST = r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]"


class Refused(Exception):  # noqa: N818 - said to an operator, in one line
    """The router is there and refuses the change."""


class Unreachable(Exception):  # noqa: N818 - as above
    """The router does not answer."""


# --- haproxy ----------------------------------------------------------------------------------


def haproxy_ask(where: str, command: str, timeout_s: float) -> str:
    """The answer of one haproxy's runtime API to one command.

    where: path of a Unix socket, or HOST:PORT of a TCP one (`stats socket ... level admin`).

    Raises:
        Unreachable: no listener, or no whole answer came in time.
    """
    try:
        with _connected(where, timeout_s) as connection:
            connection.sendall(f"{command}\n".encode())
            answer = bytearray()
            while chunk := connection.recv(65536):
                answer += chunk
    except OSError as error:
        raise Unreachable(f"haproxy at {where}: {error.strerror or error}") from error
    return answer.decode(errors="replace").strip()


@contextlib.contextmanager
def _connected(where: str, timeout_s: float) -> Generator[socket.socket]:
    host, colon, port = where.rpartition(":")
    if not where.startswith("/") and colon and port.isdecimal():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as found:
            yield found
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as found:
        found.settimeout(timeout_s)
        found.connect(where)
        yield found


def haproxy_is_routed(where: str, backend: str, server: str, timeout_s: float) -> bool:
    """True if haproxy's administrative state lets new requests go to this server.

    Health does not count.

    Raises:
        Refused: haproxy knows no backend or server of this name.
        Unreachable: as `haproxy_ask`.
    """
    lines = haproxy_ask(where, f"show servers state {backend}", timeout_s).splitlines()
    names = next((line[1:].split() for line in lines if line.startswith("#")), list[str]())
    for line in lines:
        row = dict(zip(names, line.split(), strict=False))
        if row.get("srv_name") == server and row.get("be_name") == backend:
            return not int(row["srv_admin_state"]) & (FORCED_DRAIN | FORCED_MAINTENANCE)
    said = lines[-1] if lines and not names else f"no server {backend}/{server}"
    raise Refused(f"haproxy at {where}: {said}")


def haproxy_set(
    where: str, backend: str, server: str, *, is_routed: bool, timeout_s: float
) -> None:
    """Let new requests go to a server, or stop them; requests in flight finish.

    Raises:
        Refused: haproxy gives a reason, or the change is not in effect afterwards.
        Unreachable: as `haproxy_ask`.
    """
    haproxy_is_routed(where, backend, server, timeout_s)  # a wrong name is reported as one
    state = "ready" if is_routed else "drain"
    said = haproxy_ask(where, f"set server {backend}/{server} state {state}", timeout_s)
    if said:
        raise Refused(f"haproxy at {where}: {said}")
    if haproxy_is_routed(where, backend, server, timeout_s) != is_routed:
        raise Refused(f"haproxy at {where}: {backend}/{server} did not become {state}")


def haproxy_set_all(
    sockets: Sequence[str], backend: str, server: str, *, is_routed: bool, timeout_s: float
) -> None:
    """The same at each of several haproxys.

    A haproxy that does not answer may still send requests, so no node leaves the routing without
    its answer. A node that comes back needs one that answers: the others start with their
    configuration file.

    Raises:
        Refused: one of them refuses.
        Unreachable: one does not answer and the node is to leave; or none answers.
    """
    errors: list[Unreachable] = []
    for where in sockets:
        try:
            haproxy_set(where, backend, server, is_routed=is_routed, timeout_s=timeout_s)
        except Unreachable as error:
            errors.append(error)
    if errors and (not is_routed or len(errors) == len(sockets)):
        raise Unreachable("; ".join(map(str, errors)))
    for silent in errors:
        sys.stderr.write(f"aryl-route: {silent}; it begins with what its configuration says\n")


# --- nginx ------------------------------------------------------------------------------------


def with_server(text: str, address: str, *, is_routed: bool) -> str:
    """The text of an upstream with or without `down` at one of its servers.

    Raises:
        Refused: no server has this address, or two have.
    """
    pattern = re.compile(
        rf"^(?P<head>[^#\n]*?\bserver\s+{re.escape(address)})(?P<rest>(?:\s+[^;#\n]*)?);",
        re.MULTILINE,
    )
    found = list(pattern.finditer(text))
    if len(found) != 1:
        raise Refused(f"{len(found)} lines `server {address}`, expected one")
    [line] = found
    words = [word for word in line["rest"].split() if word != "down"]
    rest = "".join(f" {word}" for word in (*words, *([] if is_routed else ["down"])))
    return f"{text[: line.start()]}{line['head']}{rest};{text[line.end() :]}"


def nginx_is_routed(upstream: Path, address: str) -> bool:
    """True if the file lets new requests go to this server.

    Raises:
        Refused: as `with_server`, or the file cannot be read.
    """
    text = _read(upstream)
    return with_server(text, address, is_routed=True) == text


def nginx_set(
    upstream: Path, address: str, *, is_routed: bool, nginx: Sequence[str], pid_file: Path,
    timeout_s: float,
) -> None:  # fmt: skip
    """Write the file, have nginx check it, and return once no old worker takes connections.

    nginx's free edition has no runtime API, so the change is a file and a reload.

    Raises:
        Refused: nginx refuses the file; the old file is then in place.
        Unreachable: no nginx runs, or its new workers do not start.
    """
    with _only_one(upstream):
        before = _read(upstream)
        after = with_server(before, address, is_routed=is_routed)
        if after != before:
            _replace(upstream, after)
        said = _run([*nginx, "-t"], timeout_s)
        if said:
            _replace(upstream, before)
            raise Refused(f"nginx refuses {upstream}: {said}")
        # Also where the file is right already: its writer may have ended before this.
        master, old = _workers(pid_file)
        if said := _run([*nginx, "-s", "reload"], timeout_s):
            raise Unreachable(f"nginx -s reload: {said}")
        _wait(lambda: _are_replaced(master, old), timeout_s, f"nginx {master}: no new workers")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: {error}") from error


def _replace(path: Path, text: str) -> None:
    """Replace a file as a whole or not at all, keeping its mode and owner."""
    status = path.stat()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(name).chmod(status.st_mode & 0o7777)
    with contextlib.suppress(PermissionError):
        os.chown(name, status.st_uid, status.st_gid)
    Path(name).replace(path)


@contextlib.contextmanager
def _only_one(upstream: Path) -> Generator[None]:
    """Lock the file: the nodes of a service change one file, one after the other."""
    folder = os.open(upstream.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _run(argv: Sequence[str], timeout_s: float) -> str:
    """A failed command's output, in one line; empty when it succeeded."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unreachable(f"{shlex.join(argv)}: {error}") from error
    words = " ".join((done.stderr + done.stdout).split())
    return "" if done.returncode == 0 else words or f"exit {done.returncode}"


def _workers(pid_file: Path) -> tuple[int, frozenset[int]]:
    """nginx's master, and the workers that take connections."""
    try:
        master = int(pid_file.read_text())
        children = Path(f"/proc/{master}/task/{master}/children").read_text()
    except (OSError, ValueError) as error:
        raise Unreachable(f"{pid_file}: no nginx runs: {error}") from error
    return master, frozenset(int(pid) for pid in children.split() if _takes_connections(int(pid)))


def _takes_connections(pid: int) -> bool:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # it has ended
    return b"worker process" in title and b"shutting down" not in title


def _are_replaced(master: int, old: frozenset[int]) -> bool:
    try:
        children = Path(f"/proc/{master}/task/{master}/children").read_text()
    except OSError as error:
        raise Unreachable(f"nginx {master} has ended") from error
    now = {int(pid) for pid in children.split() if _takes_connections(int(pid))}
    return bool(now) and not now & old


def _wait(holds: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end_s:
            raise Unreachable(f"{otherwise} within {timeout_s:g} s")
        time.sleep(POLL_S)


# --- the command ------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aryl-route", description="Send new requests to a node behind a router, or none."
    )
    routers = parser.add_subparsers(dest="router", required=True)
    haproxy = routers.add_parser("haproxy", help="by its runtime API")
    nginx = routers.add_parser("nginx", help="by `down` in the file of an upstream, and a reload")
    for router in (haproxy, nginx):
        router.add_argument("action", choices=("add", "remove", "state"))
        router.add_argument(
            "--timeout-s",
            type=_seconds,
            default=TIMEOUT_S,
            help="time limit of each step, in seconds",
        )
    haproxy.add_argument(
        "--socket", action="append", required=True, metavar="PATH|HOST:PORT",
        help="stats socket with `level admin`; once for each haproxy",
    )  # fmt: skip
    haproxy.add_argument("--backend", required=True, type=_name, help="backend of the service")
    haproxy.add_argument(
        "--server", type=_name, default=os.environ.get("ARYL_NODE"),
        help="server name in the backend; default: the node's, from ARYL_NODE",
    )  # fmt: skip
    nginx.add_argument("--upstream", required=True, type=Path, help="file with the upstream block")
    nginx.add_argument("--server", required=True, type=_address, metavar="HOST:PORT")
    nginx.add_argument(
        "--nginx", default="nginx", type=shlex.split, help="nginx command, such as 'sudo nginx'"
    )
    nginx.add_argument("--pid-file", type=Path, default=Path("/run/nginx.pid"))
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}, expected a number of seconds above 0")
    return value


def _name(text: str) -> str:
    """A valid haproxy name; any other text could be a command of its own to the runtime API."""
    if not re.fullmatch(r"[A-Za-z0-9_.:-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a name of A-Z a-z 0-9 _ . : -")
    return text


def _address(text: str) -> str:
    if not re.fullmatch(rf"(?:{_HOST}):\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r}, expected HOST:PORT as in the file")
    return text


def _haproxy(given: argparse.Namespace) -> bool:
    if given.action == "state":
        states = [
            haproxy_is_routed(where, given.backend, given.server, given.timeout_s)
            for where in given.socket
        ]
        return any(states)
    is_routed = bool(given.action == "add")
    haproxy_set_all(
        given.socket, given.backend, given.server, is_routed=is_routed, timeout_s=given.timeout_s
    )
    return is_routed


def _nginx(given: argparse.Namespace) -> bool:
    if given.action == "state":
        return nginx_is_routed(given.upstream, given.server)
    is_routed = bool(given.action == "add")
    nginx_set(
        given.upstream, given.server, is_routed=is_routed, nginx=given.nginx,
        pid_file=given.pid_file, timeout_s=given.timeout_s,
    )  # fmt: skip
    return is_routed


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 done, 2 usage, 3 refused, 4 unreachable."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.server is None:
        parser.error("--server: needed where ARYL_NODE is not set")
    try:
        is_routed = _haproxy(given) if given.router == "haproxy" else _nginx(given)
    except Refused as error:
        sys.stderr.write(f"aryl-route: {error}\n")
        return EXIT_REFUSED
    except Unreachable as error:
        sys.stderr.write(f"aryl-route: {error}\n")
        return EXIT_UNREACHABLE
    if given.action == "state":
        sys.stdout.write("routed\n" if is_routed else "not routed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
