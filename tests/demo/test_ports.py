"""Ports that a cell keeps while nobody listens on them."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

import pytest

from coordinator.demo.ports import HOST, HeldPorts

IP_LOCAL_PORT_RANGE = 51
"""ip(7): from which ports the kernel chooses for a socket; Linux 6.3, no name in Python yet."""


@pytest.fixture
def ports() -> Iterator[HeldPorts]:
    """Nothing is held afterwards."""
    found = HeldPorts()
    yield found
    found.close()


def bound(port: int, *options: int) -> socket.socket:
    """A socket that listens there, as any program's would."""
    asking = socket.socket()
    try:
        for option in options:
            asking.setsockopt(socket.SOL_SOCKET, option, 1)
        asking.bind((HOST, port))
        asking.listen()
    except OSError:
        asking.close()
        raise
    return asking


def test_all_that_are_held_are_different(ports: HeldPorts) -> None:
    """Also over two calls."""
    assert len({*ports.hold(50), *ports.hold(50)}) == 100
    assert ports.hold(0) == []


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,)])
def test_a_held_port_is_nobody_elses(ports: HeldPorts, options: tuple[int, ...]) -> None:
    """Neither with the options that programs use nor without them; once it is left, anybody's."""
    [port] = ports.hold(1)
    with pytest.raises(OSError, match="in use") as refused:
        bound(port, *options)
    assert refused.value.errno == errno.EADDRINUSE
    ports.close()
    bound(port, *options).close()


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)])
def test_the_kernel_offers_a_held_port_to_nobody(
    ports: HeldPorts, options: tuple[int, ...]
) -> None:
    """Whoever asks for any port gets another one, another cell that holds ports itself too."""
    [port] = ports.hold(1)
    asking = socket.socket()
    with asking:
        only = struct.pack("I", port << 16 | port)
        try:
            asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only)
        except OSError as error:
            pytest.skip(f"this kernel has no range of ports per socket: {error}")
        for option in options:
            asking.setsockopt(socket.SOL_SOCKET, option, 1)
        with pytest.raises(OSError, match="in use"):
            asking.bind((HOST, 0))
    ports.close()


def test_whoever_connects_while_nobody_listens_is_refused_at_once(ports: HeldPorts) -> None:
    """It is not queued for a server that is away; the one that the port is for may listen."""
    [port] = ports.hold(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))
    with (
        bound(port, socket.SO_REUSEADDR, socket.SO_REUSEPORT),
        socket.create_connection((HOST, port)),
    ):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))
