"""The two sockets of a shim: orders from the agent, and newline-delimited JSON with the job.

Nothing here waits for a peer: one that is slow, dead or misbehaving loses its connection, and costs
the shim no time. Standard library only and without `typing`, because a shim must stay under 12 MB.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Iterator

from agent.shim import files as shim_files

MAX_LINE_BYTES = 65_536
MAX_CLIENTS = 8
MAX_UNIX_PATH_BYTES = 107
"""Bytes that fit into sockaddr_un on Linux, without the final zero."""
FOLDER_NOTE = "job-socket-folder"
"""In a worker's directory: where its job's socket is, if it is elsewhere."""
FOLDER_PREFIX = "/tmp/aryl-"
"""Start of that folder's name; the rest are a pid and a random part."""
_FOLDER_REST = frozenset("0123456789abcdef-")
_MAX_NOTE_BYTES = 100


def parse(data: bytes) -> dict[str, object] | None:
    """One message; None for anything that is not a JSON object."""
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return shim_files.as_object(value)


def bind_control(path: str) -> socket.socket:
    """The datagram socket for the agent's orders; `path` is relative, so always short."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    control.setblocking(False)
    control.bind(path)
    os.chmod(path, 0o666)  # the directory decides who has access
    return control


def receive_all(control: socket.socket) -> list[bytes]:
    """Every datagram that is waiting."""
    datagrams: list[bytes] = []
    while len(datagrams) < 64:
        try:
            datagrams.append(control.recv(MAX_LINE_BYTES))
        except (BlockingIOError, InterruptedError):
            break
    return datagrams


class JobClient:
    """One connection of a worker's process, with its incomplete line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.has_greeted = False
        self.suspends = False
        """It frees its GPUs by itself when it gets an order to suspend."""
        self._received = b""
        self._is_skipping = False
        self._unsent = b""

    def receive(self) -> tuple[list[bytes], int, bool]:
        """The complete lines, how many were too long, and whether the peer is still there."""
        try:
            data = self.connection.recv(MAX_LINE_BYTES)
        except (BlockingIOError, InterruptedError):
            return [], 0, True
        except OSError:
            return [], 0, False
        if not data:
            return [], 0, False
        too_long = 0
        *lines, rest = (self._received + data).split(b"\n")
        if self._is_skipping and lines:
            lines = lines[1:]
            self._is_skipping = False
        elif self._is_skipping:
            rest = b""
        if len(rest) > MAX_LINE_BYTES:
            self._is_skipping = True
            rest = b""
            too_long += 1
        self._received = rest
        fitting = [line for line in lines if len(line) <= MAX_LINE_BYTES]
        return fitting, too_long + len(lines) - len(fitting), True

    def send(self, line: bytes) -> bool:
        """Send a line as far as the peer takes it; false when it takes nothing any more."""
        self._unsent += line
        return self.flush()

    def flush(self) -> bool:
        """Send the rest; false when the peer is gone or too far behind."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return len(self._unsent) <= MAX_LINE_BYTES
        except OSError:
            return False
        return True

    @property
    def is_behind(self) -> bool:
        """True if something waits to be sent."""
        return bool(self._unsent)


class JobSocket:
    """The listening socket named in the worker's environment, and all its connections."""

    def __init__(self, directory: str) -> None:
        self._folder = ""
        self.path = os.path.join(directory, shim_files.JOB_SOCKET)
        name = shim_files.JOB_SOCKET
        if len(os.fsencode(self.path)) > MAX_UNIX_PATH_BYTES:
            # The job gets an absolute path and cannot be asked to use tricks to shorten it.
            self._folder = f"{FOLDER_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
            _note(self._folder)  # first: a shim killed in between has left only a named folder
            os.mkdir(self._folder, 0o700)
            self.path = name = os.path.join(self._folder, shim_files.JOB_SOCKET)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.setblocking(False)
        self.listener.bind(name)
        os.chmod(name, 0o600)
        self.listener.listen(MAX_CLIENTS)
        self.clients: dict[int, JobClient] = {}

    def accept_all(self) -> Iterator[int]:
        """Descriptors of all waiting connections, one by one, up to the limit.

        The limit keeps a job that connects without end from blocking its shim.
        """
        for _ in range(MAX_CLIENTS):
            client = self._accept()
            if client is None:
                return
            yield client.connection.fileno()

    def _accept(self) -> JobClient | None:
        """Accept one connection; one above the limit is closed at once."""
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return None
        if len(self.clients) >= MAX_CLIENTS:
            connection.close()
            return None
        connection.setblocking(False)
        client = JobClient(connection)
        self.clients[connection.fileno()] = client
        return client

    def drop(self, fd: int) -> None:
        """Remove a connection."""
        client = self.clients.pop(fd, None)
        if client is not None:
            client.connection.close()

    @property
    def is_connected(self) -> bool:
        """True if any process of the worker has sent a hello and is still there."""
        return any(client.has_greeted for client in self.clients.values())

    @property
    def suspends(self) -> bool:
        """True if at least one process sent a hello, and all of them suspend by themselves."""
        greeted = [client.suspends for client in self.clients.values() if client.has_greeted]
        return bool(greeted) and all(greeted)

    def broadcast(self, message: dict[str, object]) -> list[int]:
        """Send a message to all processes that sent a hello.

        Returns the descriptors of those that do not read.
        """
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        return [
            fd
            for fd, client in self.clients.items()
            if client.has_greeted and not client.send(line)
        ]

    def close(self) -> None:
        """Remove the socket from the file system."""
        for fd in list(self.clients):
            self.drop(fd)
        self.listener.close()
        with contextlib.suppress(OSError):  # a disk that went read-only keeps it
            os.unlink(self.path)
            if self._folder:
                os.rmdir(self._folder)
                os.unlink(FOLDER_NOTE)


def _note(folder: str) -> None:
    """Record the folder in the worker's directory, the shim's working directory."""
    fd = os.open(FOLDER_NOTE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    try:
        os.write(fd, folder.encode("ascii"))
    finally:
        os.close(fd)


def remove_folder(directory: str) -> None:
    """Remove the folder that a shim named in a worker's directory and left behind.

    A missing folder is no error. The directory is its job's, which may have written any name there,
    and the caller may be root. So only a folder with a shim's kind of name counts, and only one of
    the account that owns the directory. Only the socket in it is removed. No link is followed:
    every removal is one that this account could make itself.
    """
    with contextlib.suppress(OSError):
        owner = os.lstat(directory).st_uid
        folder = _noted(os.path.join(directory, FOLDER_NOTE))
        if folder is None:
            return
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid != owner:
                return
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(shim_files.JOB_SOCKET, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISSOCK(found.st_mode):
                    os.unlink(shim_files.JOB_SOCKET, dir_fd=fd)
        finally:
            os.close(fd)
        os.rmdir(folder)


def _noted(path: str) -> str | None:
    """The name in a note, if only a shim can have written it; a fifo or a link is not opened."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        name = os.read(fd, _MAX_NOTE_BYTES).decode("ascii", errors="replace")
    finally:
        os.close(fd)
    rest = name.removeprefix(FOLDER_PREFIX)
    is_ours = name != rest and bool(rest) and _FOLDER_REST.issuperset(rest)
    return name if is_ours else None
