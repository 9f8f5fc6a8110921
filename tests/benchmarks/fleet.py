"""A fleet of pretend nodes for benchmarks: cheap reports, and an answer to each order.

    python -m tests.benchmarks.fleet --url nats://127.0.0.1:4222 --cell bench --nodes 10000 [--hz 1]

Each report is made once and sent again with another sequence number, over a plain socket, so that
this program needs a fraction of what the coordinator needs to read the reports. Nodes accept every
order and show its generation with their next report. They run no workers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from common import subjects
from common.messages import (
    CostReport,
    DesiredReply,
    DesiredState,
    GpuReport,
    HostReport,
    LedgerReply,
    NodeReport,
    decode,
    encode,
)
from common.model import GpuUuid, NodeRole, Pool

CHUNKS = 50
"""Parts of a second in which a part of the nodes reports."""
MARK = 2**52 + 123_456_789
"""A sequence number whose place in the bytes is found; of nine bytes, as all that replace it."""
FIRST = 2**40


class PretendNode:
    """The bytes of one node's report, whose sequence number is written over."""

    def __init__(self, cell: str, name: str, gpus: int) -> None:
        self._cell = cell
        self._name = name
        self._gpus = gpus
        self._subject = subjects.node_report(cell, name)
        self.obey(0, 0)

    def obey(self, epoch: int, generation: int) -> None:
        """From the next report on it shows this generation."""
        data = encode(self._report(epoch, generation))
        mark = msgspec.msgpack.encode(MARK)
        at = data.index(mark) + 1
        reply = f"{subjects.node_inbox(self._cell, self._name)}.r"
        head = f"PUB {self._subject} {reply} {len(data)}\r\n".encode()
        self._before = head + data[:at]
        self._after = data[at + len(mark) - 1 :] + b"\r\n"

    def report(self, sequence: bytes) -> bytes:
        """What goes onto the socket."""
        return self._before + sequence + self._after

    def _report(self, epoch: int, generation: int) -> NodeReport:
        return NodeReport(
            node=self._name,
            boot_id=f"boot-of-{self._name}",
            sequence=MARK,
            home_pool=Pool.TRAINING,
            role=NodeRole.TRAINING,
            epoch=epoch,
            generation=generation,
            instance="one",
            period_s=1.0,
            gpus=tuple(
                GpuReport(
                    uuid=GpuUuid(f"GPU-{self._name}-{index}"),
                    index=index,
                    gpu_type="H100",
                    memory_total_bytes=80 * 2**30,
                    memory_used_bytes=2**30,
                    gpu_busy_ratio=0.5,
                    power_w=400.0,
                    temperature_c=55.0,
                )
                for index in range(self._gpus)
            ),
            host=HostReport(
                cpu_count=128,
                cpu_busy_ratio=0.3,
                memory_total_bytes=2**40,
                memory_used_bytes=2**38,
            ),
            cost=CostReport(cpu_s=1.0, rss_bytes=2**26),
        )


class Connection(asyncio.Protocol):
    """One connection to nats-server that speaks no more than it must."""

    def __init__(self, name: str, wanted: Sequence[str]) -> None:
        self.nodes: dict[str, PretendNode] = {}
        self.transport: asyncio.Transport | None = None
        self._name = name
        self._wanted = wanted
        self._left = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        lines = [f'CONNECT {{"verbose":false,"pedantic":false,"name":"{self._name}"}}']
        lines += [f"SUB {subject} {number}" for number, subject in enumerate(self._wanted, 1)]
        transport.write("".join(f"{line}\r\n" for line in lines).encode())

    def data_received(self, data: bytes) -> None:
        """Answer orders, requests for ledgers, and the server's PING."""
        assert self.transport is not None
        self._left += data
        answers: list[bytes] = []
        while (end := self._left.find(b"\r\n")) >= 0:
            line, rest = self._left[:end], self._left[end + 2 :]
            if line.startswith(b"MSG "):
                _, subject, *_, reply, size = line.decode().split()
                if len(rest) < int(size) + 2:
                    break
                answer = self._answer(subject, rest[: int(size)])
                answers.append(f"PUB {reply} {len(answer)}\r\n".encode() + answer + b"\r\n")
                rest = rest[int(size) + 2 :]
            elif line == b"PING":
                answers.append(b"PONG\r\n")
            self._left = rest
        self.transport.write(b"".join(answers))

    def _answer(self, subject: str, data: bytes) -> bytes:
        name = subjects.node_of(subject)
        if subject.endswith("ledger"):
            return encode(LedgerReply(node=name, orders=()))
        desired = decode(data, DesiredState)
        self.nodes[name].obey(desired.epoch, desired.generation)
        return encode(
            DesiredReply(is_accepted=True, epoch=desired.epoch, generation=desired.generation)
        )


async def run(url: str, cell: str, nodes: int, gpus: int, hz: float) -> None:
    """Report until the process is ended."""
    loop = asyncio.get_running_loop()
    at = urlsplit(url)
    assert at.hostname is not None
    assert at.port is not None
    wanted = (subjects.node_desired(cell, "*"), subjects.node_ledger(cell, "*"))
    _, orders = await loop.create_connection(
        lambda: Connection("orders", wanted), at.hostname, at.port
    )
    _, reports = await loop.create_connection(
        lambda: Connection("reports", ()), at.hostname, at.port
    )
    fleet = [PretendNode(cell, f"n{number:05d}", gpus) for number in range(nodes)]
    orders.nodes = {f"n{number:05d}": node for number, node in enumerate(fleet)}
    assert reports.transport is not None
    step = -(-nodes // CHUNKS)
    due_s = time.monotonic()
    while True:
        for begin in range(0, nodes, step):
            now_ms = FIRST + int(time.monotonic() * 1000)
            sequence = now_ms.to_bytes(8, "big")
            part = fleet[begin : begin + step]
            reports.transport.write(b"".join(node.report(sequence) for node in part))
            due_s += len(part) / nodes / hz
            # One that is late goes on at its rate, without a burst that no fleet would send.
            due_s = max(due_s, time.monotonic() - 1.0)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))


def main(arguments: Sequence[str]) -> None:
    """Report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--cell", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--hz", type=float, default=1.0)
    asked = parser.parse_args(arguments)
    asyncio.run(run(asked.url, asked.cell, asked.nodes, asked.gpus, asked.hz))


if __name__ == "__main__":
    main(sys.argv[1:])
