"""How long a cell is without a leader when the one that leads is killed, or told to end; by hand.

    python -m tests.benchmarks.bench_takeover [--repeats 5] [--nodes 1000] [--jobs 200] [-o json]

A real nats-server, a pretend fleet that reports once a second, and two real coordinators with the
default settings, each as if on a machine of its own: no standby can see that a process has ended,
so after a kill it waits for the lease. A takeover is over when a caller has an answer of the next
leader. It asserts nothing about time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, to_builtins

from tests.benchmarks.running import RunningCell, running_cell

LISTEN_S = 4.0
"""A standby listens for `rebuild_wait_s` before it asks for the lease; this is longer."""


class Takeovers(Struct, frozen=True, kw_only=True):
    """Seconds from the signal to the first answer of the next leader."""

    kind: str
    took_s: tuple[float, ...]


async def measure(cell: RunningCell, number: signal.Signals, repeats: int) -> Takeovers:
    """End the leader so many times; the other one takes over, and the first stands by again."""
    took_s: list[float] = []
    for _ in range(repeats):
        before = await cell.until_led()
        leader = f"machine-{before.epoch}"
        await cell.until_stands_by(f"machine-{before.epoch + 1}")
        await asyncio.sleep(LISTEN_S)
        began_s = time.monotonic()
        cell.units.signal(leader, number)
        after = await cell.until_led(above_epoch=before.epoch)
        took_s.append(time.monotonic() - began_s)
        assert after.epoch == before.epoch + 1
        cell.start_coordinator(f"machine-{after.epoch + 1}")
    return Takeovers(kind=number.name, took_s=tuple(took_s))


async def run(repeats: int, nodes: int, jobs: int) -> list[Takeovers]:
    """Kills first, then handovers, in one cell."""
    with tempfile.TemporaryDirectory(prefix="aryl-bench-") as directory:
        async with running_cell(Path(directory)) as cell:
            cell.start_coordinator("machine-1")
            await cell.until_led()
            cell.start_coordinator("machine-2")
            cell.start_fleet(nodes)
            await cell.until_led(nodes_heard=nodes)
            for number in range(jobs):
                await cell.submit(f"r{number}")
            return [
                await measure(cell, number, repeats) for number in (signal.SIGKILL, signal.SIGTERM)
            ]


def table(found: Sequence[Takeovers]) -> str:
    """The takeovers as lines of text."""
    lines = ["signal     repeats   median s   longest s"]
    lines += [
        f"{one.kind:9}  {len(one.took_s):7}   {statistics.median(one.took_s):8.2f}   "
        f"{max(one.took_s):9.2f}"
        for one in found
    ]
    return "\n".join([*lines, f"load average {os.getloadavg()[0]:.1f}"])


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    asked = parser.parse_args(arguments)
    found = asyncio.run(run(asked.repeats, asked.nodes, asked.jobs))
    result = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "takeovers": to_builtins(found),
    }
    text = table(found) if asked.output == "table" else json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
