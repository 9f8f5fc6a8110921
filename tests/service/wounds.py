"""What a damaged disk or a careless hand does to the journal's stream of a real nats-server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from coordinator.demo.nats_server import NatsServer

UNACKNOWLEDGED = 3
"""More messages than a leader has on their way at a time."""


def blocks(server: NatsServer, stream: str = "ARYL_JOURNAL") -> list[Path]:
    """The block files of a stream, oldest first; where several are named so, of all of them."""
    found = (server.directory / "jetstream").rglob("*.blk")
    return sorted(path for path in found if stream in str(path))


def flip_tail(server: NatsServer) -> None:
    """One bit of the last message."""
    _flip(blocks(server)[-1], lambda size: size - 12)


def flip_acknowledged(server: NatsServer) -> None:
    """One bit of a message before the last ones, which a frozen server may not have acknowledged.

    Of a leader that decides all the time: a record without an acknowledgement is no loss to it.
    """
    data = blocks(server)[-1].read_bytes()
    ends = list(_message_ends(data))
    _flip(blocks(server)[-1], lambda _: ends[-UNACKNOWLEDGED - 1] - 12)


def _message_ends(data: bytes) -> Iterator[int]:
    """Where each whole message of a block ends: it begins with its length, of 31 bits."""
    end = 0
    while end + 4 <= len(data):
        end += int.from_bytes(data[end : end + 4], "little") & 0x7FFFFFFF
        if end > len(data):
            return
        yield end


def flip_middle(server: NatsServer) -> None:
    """One bit in the middle of the newest block.

    Not in the length of a message: nats-server 2.15 does not come up again after that.
    """
    _flip(blocks(server)[-1], lambda size: size // 2 + 30)


def cut(server: NatsServer) -> None:
    """The second half of the newest block."""
    os.truncate(blocks(server)[-1], blocks(server)[-1].stat().st_size // 2)


def remove_blocks(server: NatsServer) -> None:
    """All of its messages, while the stream is still known."""
    for path in blocks(server):
        path.unlink()


def remove_stream(server: NatsServer) -> None:
    """The stream with its settings."""
    for path in (server.directory / "jetstream").rglob("ARYL_JOURNAL*"):
        shutil.rmtree(path)


def remove_all(server: NatsServer) -> None:
    """Journal, snapshots and the leader's lease."""
    shutil.rmtree(server.directory / "jetstream")


WOUNDS: dict[str, Callable[[NatsServer], None]] = {
    "flip_tail": flip_tail,
    "flip_middle": flip_middle,
    "cut": cut,
    "remove_blocks": remove_blocks,
    "remove_stream": remove_stream,
}


async def hurt(
    server: NatsServer, wound: Callable[[NatsServer], None], *, is_stopped: bool = False
) -> None:
    """Hurt the store while the server is frozen and kill it, or while it is stopped; start it.

    A server that was stopped has an index of its blocks, which hides damage until it reads them.
    """
    pid = server.pid
    assert pid is not None
    if is_stopped:
        await server.stop()
    else:
        os.kill(pid, signal.SIGSTOP)
    with contextlib.suppress(IndexError):  # no block was written yet
        wound(server)
    if not is_stopped:
        await server.kill()
    await server.start()


def _flip(path: Path, where: Callable[[int], int]) -> None:
    data = bytearray(path.read_bytes())
    data[where(len(data))] ^= 1
    path.write_bytes(bytes(data))
