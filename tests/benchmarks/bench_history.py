"""How long questions about the past take after millions of lines; by hand.

    .venv/bin/python -m tests.benchmarks.bench_history [--lines 5000000] [--repeats 5] [-o json]

A real nats-server gets the lines of 90 days: jobs of 20 tenants and 200 people on 1,000 nodes, with
preemptions, and loans of 300 nodes. A keeper reads the stream into an index, as a new coordinator
does. Then each question is asked of the index, and the two that JetStream can answer by itself are
asked of the stream as well. It asserts nothing about time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from common import subjects
from common.bus import NatsBus, connect_nats
from common.clock import SystemClock
from common.history import (
    AttemptRecord,
    HistoryLine,
    JobRecord,
    LentRecord,
    LossRecord,
    OrderRecord,
    StoryKind,
    Use,
    WaitRecord,
)
from coordinator.demo.nats_server import NatsServer, find_binary
from coordinator.service.history.facts import about, of_tenant, of_user
from coordinator.service.history.index import Asked, HistoryIndex
from coordinator.service.history.keeper import IndexKeeper
from coordinator.service.history.usage_sum import Sums
from coordinator.service.journal.history_stream import History

CELL = "bench"
DAY_S = 86_400.0
DAYS = 90
FLUSH_LINES = 2_000
K = StoryKind


class Maker:
    """Lines of a cell, in the order of time."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._chance = random.Random(1)
        self.number = 0

    def lines(self) -> Iterator[HistoryLine]:
        """So many lines, and a few more."""
        job = 0
        while self.number < self._count:
            job += 1
            yield from self._job(f"j{job:07}")
            if job % 3 == 0:
                yield from self._loan(f"i{self._chance.randrange(300)}", job)

    def _at_s(self) -> float:
        return DAYS * DAY_S * self.number / self._count

    def _line(
        self, subject: str, what: str, kind: StoryKind = K.EVENT, **more: object
    ) -> HistoryLine:
        self.number += 1
        values = {"reason": "by policy aryl: first in line and it fits", **more}
        return HistoryLine(
            number=self.number,
            at_s=self._at_s(),
            subject=subject,
            what=what,
            kind=kind,
            **values,  # type: ignore[arg-type]  # the fields of a line
        )

    def _job(self, name: str) -> Iterator[HistoryLine]:
        chance = self._chance
        user = f"u{chance.randrange(200)}"
        tenant = f"team-{int(user[1:]) % 20}"
        who: dict[str, Any] = {"tenant": tenant, "user": user}
        order = OrderRecord(verb="submit", target=name, client="host-1, aryl 1.0", **who)
        yield self._line(name, "submitted", K.ORDER, detail=order, **who)
        at_s = self._at_s()
        for attempt in range(1, 3 if chance.random() < 0.2 else 2):
            yield self._line(name, "start -> starting", K.DECISION, **who)
            waited = WaitRecord(
                job_id=name, gpus=8, began_at_s=at_s, ended_at_s=self._at_s() + 60, **who
            )
            yield self._line(name, "gang_ready -> running", detail=waited, **who)
            if attempt > 1:
                loss = LossRecord(job_id=name, cause="reclaim", gpu_s=900.0, **who)
                yield self._line(name, "preempt -> preempting", K.DECISION, **who)
                yield self._line(name, "work lost", K.LOSS, detail=loss, **who)
            uses = tuple(
                Use(
                    node=f"n{chance.randrange(1000)}",
                    gpu_type="H100",
                    gpus=8.0,
                    pool="training",
                    began_at_s=at_s,
                    ended_at_s=at_s + 3600.0,
                )
                for _ in range(chance.choice((1, 1, 1, 2, 4)))
            )
            record = AttemptRecord(job_id=name, attempt=attempt, uses=uses, **who)
            yield self._line(name, f"attempt {attempt}", K.ATTEMPT, detail=record, **who)
        ended = JobRecord(
            job_id=name,
            name="train",
            submitted_at_s=at_s,
            ended_at_s=self._at_s(),
            state="succeeded",
            held_gpu_s={"training/H100": 28_800.0},
            nodes=tuple(use.node for use in uses),
            **who,
        )
        yield self._line(name, "succeed -> succeeded", **who)
        yield self._line(name, "succeeded", K.JOB, detail=ended, **who)

    def _loan(self, node: str, number: int) -> Iterator[HistoryLine]:
        yield self._line(node, f"lend (lease l1-{number})", K.DECISION)
        yield self._line(node, "serving -> draining")
        yield self._line(node, "draining -> on_loan")
        yield self._line(node, f"reclaim (lease l1-{number})", K.DECISION)
        at_s = self._at_s()
        use = Use(
            node=node, gpu_type="H100", gpus=8.0, pool="loan", service="chat",
            began_at_s=at_s, ended_at_s=at_s + 1800.0,
        )  # fmt: skip
        yield self._line(node, "was lent", K.LENT, detail=LentRecord(uses=(use,)))
        if number % 300 == 0:
            order = OrderRecord(tenant="ops", user="ada", verb="drain", target=node)
            yield self._line(node, "drain", K.ORDER, detail=order, tenant="ops", user="ada")


async def feed(bus: NatsBus, count: int) -> float:
    """Publish lines, without waiting for each; the seconds that it took."""
    began_s = time.monotonic()
    stream = bus.jetstream(timeout_s=30.0)
    lines = Maker(count).lines()
    while batch := list(islice(lines, FLUSH_LINES)):
        for line in batch:
            await bus.publish(subjects.history(CELL, line.subject), msgspec.msgpack.encode(line))
        info = await stream.stream_info(f"ARYL_HISTORY_{CELL}")
        while info.state.last_seq < batch[-1].number:
            await asyncio.sleep(0.005)
            info = await stream.stream_info(f"ARYL_HISTORY_{CELL}")
    return time.monotonic() - began_s


def questions(last: int) -> dict[str, Callable[[HistoryIndex], object]]:
    """What is asked, by name."""
    end_s = DAYS * DAY_S
    job = f"j{last // 25:07}"

    def lines(**asked: object) -> Callable[[HistoryIndex], object]:
        question = Asked(**asked)  # type: ignore[arg-type]  # the fields of a question
        return lambda index: len(index.lines(question))

    def usage(days: float, *by: str) -> Callable[[HistoryIndex], object]:
        def ask(index: HistoryIndex) -> object:
            sums = Sums(by, since_s=end_s - days * DAY_S, until_s=end_s)
            index.usage(sums)
            return len(sums.rows)

        return ask

    day_30 = {"since_s": 30 * DAY_S, "until_s": 31 * DAY_S}
    return {
        "all lines of one job": lines(words=(about(job),)),
        "newest 100 of one node": lines(words=(about("n7"),)),
        "newest 100 of one tenant": lines(words=(of_tenant("team-3"),)),
        "newest 100 of one person, a day 60 days ago": lines(words=(of_user("u7"),), **day_30),
        "newest 100 orders of one tenant": lines(
            words=(of_tenant("ops"),), kinds=frozenset({K.ORDER})
        ),
        "newest 100 decisions on one node": lines(
            words=(about("i7"),), kinds=frozenset({K.DECISION})
        ),
        "usage of one day by tenant and user": usage(1, "tenant", "user"),
        "usage of 30 days by tenant and user": usage(30, "tenant", "user"),
        "usage of 90 days by tenant and user": usage(90, "tenant", "user"),
        "usage of 90 days by job": usage(90, "job"),
        "1,000 jobs that ended in one day": lambda index: len(
            index.ended_jobs(since_s=40 * DAY_S, until_s=41 * DAY_S)
        ),
    }


async def of_stream(history: History, words: Sequence[str], repeats: int) -> list[float]:
    """What JetStream needs to find all lines of some subjects by itself."""
    took_s: list[float] = []
    for _ in range(repeats):
        began_s = time.monotonic()
        await history.read(words, after=0, before=10**9, most_bytes=800_000, newest=True)
        took_s.append(time.monotonic() - began_s)
    return took_s


@asynccontextmanager
async def _bus(directory: Path) -> AsyncIterator[NatsBus]:
    server = NatsServer(directory, clock=SystemClock(), binary=find_binary())
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        bus = await connect_nats(server.url, identity="bench", clock=SystemClock())
        stack.push_async_callback(bus.close)
        yield bus


async def build(
    history: History, path: Path, last: int
) -> tuple[IndexKeeper, asyncio.Task[None], float]:
    """A keeper that has read the stream to its end."""
    keeper = IndexKeeper(history, path=path, clock=SystemClock())
    began_s = time.monotonic()
    task = asyncio.create_task(keeper.run())
    while keeper.number < last:
        await keeper.caught_up(last, within_s=60.0)
    return keeper, task, time.monotonic() - began_s


async def run(count: int, repeats: int) -> dict[str, object]:
    """Feed, build, ask."""
    with tempfile.TemporaryDirectory(prefix="aryl-bench-") as directory:
        async with _bus(Path(directory) / "nats") as bus:
            history = History(bus, cell=CELL, kept_s=0.0)
            await history.open()
            fed_s = await feed(bus, count)
            last = await history.open()
            path = Path(directory) / "index.sqlite3"
            cpu_s = time.process_time()
            keeper, task, built_s = await build(history, path, last)
            cpu_s = time.process_time() - cpu_s
            found: dict[str, object] = {
                "lines": last,
                "feed_s": fed_s,
                "build_s": built_s,
                "build_cpu_s": cpu_s,
                "index_bytes": path.stat().st_size,
                "stream_bytes": sum(
                    one.stat().st_size for one in (Path(directory) / "nats").rglob("*.blk")
                ),
            }
            asked: dict[str, object] = {}
            for name, question in questions(last).items():
                took_s: list[float] = []
                for _ in range(repeats):
                    began_s = time.monotonic()
                    size = await keeper.ask(question)
                    took_s.append(time.monotonic() - began_s)
                asked[name] = (statistics.median(took_s), max(took_s), size)
            found["asked"] = asked
            job = await of_stream(history, [f"j{last // 25:07}"], repeats)
            node = await of_stream(history, ["i7"], repeats)
            found["stream_one_job_s"] = statistics.median(job)
            found["stream_one_node_s"] = statistics.median(node)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return found


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=5_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    args = parser.parse_args(arguments)
    found = asyncio.run(run(args.lines, args.repeats))
    if args.output == "json":
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for name, value in found.items():
        if not isinstance(value, dict):
            sys.stdout.write(f"{name}: {value}\n")
            continue
        for question, answer in value.items():
            sys.stdout.write(f"{question}: {answer}\n")
    sys.stdout.write(f"load average {os.getloadavg()[0]:.1f}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
