"""What the dashboard costs: bytes to each browser and CPU time of its server per update.

A client of answers that are made here, through the real encoder and decoder; nothing is sent.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from statistics import median

import msgspec
from msgspec import structs

from common.api import (
    Describe,
    Description,
    Events,
    GetEvents,
    GetStatus,
    Jobs,
    ListJobs,
    ListLoans,
    ListNodes,
    ListServices,
    Loans,
    NodeRow,
    Nodes,
    Services,
)
from common.clock import SystemClock
from common.model import JobState, NodeRole, Pool
from coordinator.client import Client
from coordinator.web.feed import Topic
from coordinator.web.looks import CellLook
from coordinator.web.pages import Pages
from tests.cli.fake_cell import (
    NOW_S,
    FakeCell,
    job_row,
    loan_row,
    node_row,
    service_row,
    status,
    story_row,
)

JOBS, WAITING, LOANS, EVENTS = 400, 500, 60, 200


class Fleet:
    """Answers for a fleet, of which a share of the nodes differs each time."""

    def __init__(self, nodes: int, *, share: float) -> None:
        self._share = share
        self._chance = random.Random(0)
        self._step = 0
        self.nodes = [_node(number) for number in range(nodes)]
        states = [JobState.RUNNING] * JOBS + [JobState.PENDING] * WAITING
        blockers = ("needs 8 GPUs of type H100, 1 worker of 8; 0 free on 0 nodes",)
        self.jobs = tuple(
            job_row(f"j{number}", state=state, blockers=blockers, step=1, total_steps=100)
            for number, state in enumerate(states)
        )
        self.loans = tuple(
            loan_row(f"l{n}", node=f"infer-{n}", state="coming home" if n % 6 == 0 else "on loan",
                     reclaim_ordered_at_s=NOW_S if n % 6 == 0 else None)
            for n in range(LOANS)
        )  # fmt: skip
        self.events = [story_row(number) for number in range(1, EVENTS + 1)]

    def cell(self) -> FakeCell:
        """The bus that answers."""
        total = len(self.nodes)
        return FakeCell(
            {
                GetStatus: status(nodes=total, nodes_heard=total, inference_nodes=total // 2),
                ListNodes: self._next_nodes,
                ListJobs: self._next_jobs,
                ListServices: Services(rows=(service_row(),)),
                ListLoans: Loans(rows=self.loans),
                Describe: Description(kind="service", name="chat"),
                GetEvents: self._next_events,
            }
        )

    def _next_nodes(self, request: ListNodes) -> Nodes:
        count = int(len(self.nodes) * self._share)
        for place in self._chance.sample(range(len(self.nodes)), count):
            row = self.nodes[place]
            held, busy = self._chance.randrange(9), self._chance.random()
            self.nodes[place] = structs.replace(row, gpus_held=held, gpu_busy_ratio=busy)
        heard = self._chance.random()
        rows = [structs.replace(row, heard_ago_s=heard) for row in self.nodes]
        half = len(rows) // 2  # as many as one message carries
        return Nodes(rows=tuple(rows[half:] if request.after else rows[:half]),
                     has_more=not request.after)  # fmt: skip

    def _next_jobs(self, _request: ListJobs) -> Jobs:
        self._step += 1
        return Jobs(
            rows=tuple(
                structs.replace(row, step=self._step + place % 7 if self._share else 1)
                for place, row in enumerate(self.jobs)
            )
        )

    def _next_events(self, request: GetEvents) -> Events:
        if self._share and request.after > EVENTS * 1000:
            last = self.events[-1].number
            self.events += [story_row(last + more) for more in range(1, 6)]
        rows = tuple(row for row in self.events if row.number > request.after)
        return Events(rows=rows, last=self.events[-1].number)


def _node(number: int) -> NodeRow:
    if number % 2 == 0:
        return node_row(f"train-{number // 2}")
    role = NodeRole.ON_LOAN if number // 2 < LOANS else NodeRole.SERVING
    return node_row(
        f"infer-{number // 2}", home_pool=Pool.INFERENCE, service="chat", role=role,
        desired_role=role, jobs=(),
    )  # fmt: skip


async def measured(nodes: int, *, share: float, repeats: int) -> dict[str, float]:
    """Bytes of the first update and of the later ones, and milliseconds of CPU of each."""
    client = Client(Fleet(nodes, share=share).cell(), cell="lab", tenant="ops", user="ada")
    pages = Pages(cell="lab")
    topic = Topic(CellLook(client, pages), clock=SystemClock(), show_link=pages.link)
    sizes: list[int] = []
    costs_ms: list[float] = []
    seen = 0
    for _ in range(repeats + 1):
        began_s = time.process_time()
        await topic.poll()
        update = topic.changes(seen)
        costs_ms.append((time.process_time() - began_s) * 1e3)
        sizes.append(len(update))
        seen = topic.board.version
    return {
        "nodes": nodes,
        "changed_ratio": share,
        "first_bytes": sizes[0],
        "first_ms": costs_ms[0],
        "update_bytes": median(sizes[1:]),
        "update_ms": median(costs_ms[1:]),
    }


async def run(nodes: list[int], repeats: int) -> None:
    """Measure and print, one line each."""
    for count in nodes:
        for share in (0.0, 0.1, 1.0):
            found = await measured(count, share=share, repeats=repeats)
            sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    asyncio.run(run(args.nodes, args.repeats))


if __name__ == "__main__":
    main()
