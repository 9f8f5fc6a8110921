"""Reserves TCP ports for the processes of a cell.

A free port may be taken by any program while its process is away. Here a socket stays bound to each
port and never listens: a client that connects in the meantime is refused at once, as on any port
without a listener.
"""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


class HeldPorts:
    """Ports on loopback that are reserved for this cell.

    socket(7), SO_REUSEPORT: another socket gets a reserved port only if it sets that option itself
    and belongs to the same user. Of the two only the one that listens has connections. SO_REUSEADDR
    is not set: with it, any socket that sets it too could listen here.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def hold(self, count: int) -> list[int]:
        """Reserve a number of further ports, all different.

        Raises:
            OSError: there are no more, or no more files may be open.
        """
        ports: list[int] = []
        for _ in range(count):
            holder = socket.socket()
            self._sockets.append(holder)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind((HOST, 0))
            ports.append(holder.getsockname()[1])
        return ports

    def close(self) -> None:
        """Release the ports."""
        for holder in self._sockets:
            holder.close()
        self._sockets.clear()


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different, and not reserved.

    They are for listeners that share their port with no other socket, so that they notice when it
    is taken.

    Raises:
        OSError: there are no more, or no more files may be open.
    """
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
