"""A run of the nemesis: a live cell, work and load on it, faults from a seed, and the verdict.

    .venv/bin/python -m tests.live.chaos --duration-s 3600 --seed 1

prints a line for each fault and for each kind of fault, writes the summary that
docs/reliability.md is made from if --results names a file, and ends with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from common.api import Done, JobRow, Jobs, ListJobs, ListLoans, LoanRow, Loans, Operate
from common.bus import NatsBus, connect_nats
from common.clock import SystemClock
from common.errors import ArylError
from common.log import set_up
from common.messages import Message
from coordinator.client import Client
from coordinator.demo.plan import CELL, SERVICE, CellPlan, Periods
from coordinator.demo.supervise import mentioning
from tests.live.faults import DEFAULT_KINDS, FaultKind, draw
from tests.live.hurt_cell import LiveCell
from tests.live.nemesis import Nemesis
from tests.live.recorder import Recorder, now_s
from tests.live.recording import (
    Job,
    Limits,
    Order,
    Recording,
    load,
    read_stalls,
    read_workers,
    save,
)
from tests.live.summary import summary_of
from tests.live.verdict import Verdict, judge
from tests.live.workload import Workload, settle

log = logging.getLogger(__name__)

PERIODS = Periods(
    report_s=0.5,
    pass_s=0.5,
    loan_pass_s=0.5,
    load_sample_s=0.5,
    lease_ttl_s=6.0,
    grace_s=3.0,
    device_free_s=2.0,
    warm_up_s=5.0,
    reclaim_deadline_s=22.0,
    hold_off_s=2.0,
    resize_cooldown_s=2.0,
    min_runtime_s=2.0,
    lost_after_s=8.0,
    leader_ttl_s=3.0,
    rebuild_wait_s=1.0,
)
"""The deadline: TTL, grace, device-free, warm-up, and 6 s for an agent that is dead or hangs."""
ASK_S = 2.0
LAST_LOOK_S = 1.0
SETTLE_S = 120.0
"""Patience for short jobs to end after the last fault, and for the last answers."""


M = TypeVar("M", bound=Message)


class Plan(Struct, frozen=True, kw_only=True):
    """One run."""

    seed: int
    duration_s: float
    mean_pause_s: float = 2.5
    training_nodes: int = 3
    inference_nodes: int = 3
    gpus_per_node: int = 2
    headroom_nodes: int = 1
    nats_servers: int = 1
    peak_req_per_s: float = 20.0
    kinds: tuple[FaultKind, ...] = DEFAULT_KINDS

    @property
    def limits(self) -> Limits:
        """What is promised in this cell."""
        return Limits(
            lease_ttl_s=PERIODS.lease_ttl_s, reclaim_deadline_s=PERIODS.reclaim_deadline_s
        )


@contextlib.asynccontextmanager
async def stall_watch(path: Path) -> AsyncIterator[None]:
    """Measure what this machine itself loses, in a process of its own."""
    script = Path(__file__).with_name("stall_watch.py")
    process = await asyncio.create_subprocess_exec(sys.executable, "-S", str(script), str(path))
    try:
        yield
    finally:
        process.kill()
        await process.wait()


class Run:
    """One run in a directory of its own."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self.beats_dir = directory / "beats"
        self.stalls_path = directory / "stalls"
        self._clock = SystemClock()

    async def record(self) -> Recording:
        """Start a cell, hurt it as planned, and bring away what is to be judged."""
        plan = self.plan
        self.beats_dir.mkdir()
        cell_plan = CellPlan(
            training_nodes=plan.training_nodes,
            inference_nodes=plan.inference_nodes,
            gpus_per_node=plan.gpus_per_node,
            peak_req_per_s=plan.peak_req_per_s,
            headroom_nodes=plan.headroom_nodes,
            periods=PERIODS,
        )
        cell = LiveCell(
            cell_plan,
            self.directory / "cell",
            clock=self._clock,
            seed=plan.seed,
            nats_servers=plan.nats_servers,
        )
        async with stall_watch(self.stalls_path):
            try:
                await cell.open()
                bus = await connect_nats(cell.urls, identity="chaos", clock=self._clock)
                try:
                    return await self._hurt(cell, bus)
                finally:
                    await bus.close()
            finally:
                await cell.close()
                assert mentioning(cell.run_dir) == []

    async def _hurt(self, cell: LiveCell, bus: NatsBus) -> Recording:
        plan = self.plan
        client = Client(bus, cell=CELL, tenant="ops", user="chaos", timeout_s=ASK_S)
        hasty = Client(bus, cell=CELL, tenant="ops", user="watch", timeout_s=0.5)
        await cell.ready(client)
        begin_s = now_s()
        calm, high = plan.peak_req_per_s / 20, plan.peak_req_per_s * 0.75
        recorder = Recorder(cell, hasty, calm_req_per_s=calm)

        def set_load(is_high: bool) -> None:
            recorder.req_per_s = high if is_high else calm

        workload = Workload(
            client,
            beats_dir=self.beats_dir,
            checkpoint_root=cell.checkpoint_root,
            grace_s=PERIODS.grace_s,
            most_waiting=plan.training_nodes + plan.inference_nodes,
            long_count=plan.training_nodes - 1,
            rng=random.Random(plan.seed),
        )
        nemesis = Nemesis(
            cell,
            workload,
            bus=bus,
            client=client,
            rest_s=PERIODS.reclaim_deadline_s,
            set_load=set_load,
        )
        schedule = draw(
            plan.seed,
            duration_s=plan.duration_s,
            mean_pause_s=plan.mean_pause_s,
            kinds=plan.kinds,
        )
        async with running(recorder.run()):
            async with running(workload.run()):
                await nemesis.run(schedule)
            await settle(workload, within_s=SETTLE_S)
            recalled_at_s = await self._recall(client)
            end_s = recalled_at_s + PERIODS.reclaim_deadline_s + LAST_LOOK_S
            while now_s() < end_s and not recorder.do_all_serve:
                await self._clock.sleep(LAST_LOOK_S)
            recording = await self._facts(cell, client, recorder, workload, nemesis)
        calls = tuple(
            Order(node=node.name, at_s=at_s, by="recall")
            for at_s in (recalled_at_s, *nemesis.recalled_at_s)
            for node in cell.nodes
            if node.server_port
        )
        return msgspec.structs.replace(
            recording, begin_s=begin_s, orders=(*recording.orders, *calls)
        )

    async def _recall(self, client: Client) -> float:
        """Every node is to come home; when that was acknowledged."""
        await self._asked(client, Operate(action="recall", target=SERVICE), Done)
        return now_s()

    async def _asked(self, client: Client, request: Message, kind: type[M]) -> M:
        """An answer, asked for until there is one."""
        async with self._clock.timeout(SETTLE_S):
            while True:
                try:
                    return await client.ask(request, kind)
                except ArylError as error:
                    log.info("asked again: %s", error)
                    await self._clock.sleep(0.5)

    async def _facts(
        self,
        cell: LiveCell,
        client: Client,
        recorder: Recorder,
        workload: Workload,
        nemesis: Nemesis,
    ) -> Recording:
        rows = (await self._asked(client, ListJobs(), Jobs)).rows
        loans = (await self._asked(client, ListLoans(is_live_only=False), Loans)).rows
        row_by_job = {row.job_id: row for row in rows}
        alive = frozenset(worker.name for worker in cell.workers())
        wall_ahead_s = time.time() - now_s()
        downs, ups = recorder.finish()
        return Recording(
            seed=self.plan.seed,
            begin_s=0.0,
            end_s=now_s(),
            limits=self.plan.limits,
            nats_servers=self.plan.nats_servers,
            planned_s=self.plan.duration_s,
            mean_pause_s=self.plan.mean_pause_s,
            faults=tuple(nemesis.faults),
            skipped={str(kind): count for kind, count in sorted(nemesis.skipped.items())},
            jobs=tuple(_ended(job, row_by_job.get(job.job)) for job in workload.jobs),
            workers=tuple(read_workers(self.beats_dir)),
            alive=alive,
            orders=tuple(_calls(loans, wall_ahead_s)),
            downs=downs,
            ups=ups,
            leads=tuple(recorder.leads),
            stalls=read_stalls(self.stalls_path),
            requests_answered=recorder.answered,
            requests_refused=recorder.refused,
            said_late=tuple(_late(loan, wall_ahead_s) for loan in loans if loan.is_late),
        )


def _ended(job: Job, row: JobRow | None) -> Job:
    """A job with what became of it."""
    if row is None:
        return job
    return msgspec.structs.replace(job, state=str(row.state), error=row.error)


def _calls(loans: Sequence[LoanRow], wall_ahead_s: float) -> Iterator[Order]:
    """When a loan's node had to begin its way home: at an order, or at the last renewal."""
    for loan in loans:
        if loan.reclaim_ordered_at_s is not None:
            at_s = loan.reclaim_ordered_at_s - wall_ahead_s
            yield Order(node=loan.node, at_s=at_s, by=loan.reclaim_reason)
        elif loan.lapse_s is not None and loan.returned_at_s is not None:
            ended_at_s = loan.returned_at_s - loan.lapse_s - wall_ahead_s
            at_s = ended_at_s - PERIODS.lease_ttl_s
            yield Order(node=loan.node, at_s=at_s, by="the end of its lease")


def _late(loan: LoanRow, wall_ahead_s: float) -> str:
    """A loan that Aryl calls late."""
    decided_at_s = loan.decided_at_s - wall_ahead_s
    return (
        f"{loan.lease_id} of {loan.node}, decided at {decided_at_s:.1f} s: reclaim"
        f" {loan.reclaim_s}, lapse {loan.lapse_s} of {loan.lapse_deadline_s}, turned back"
        f" {loan.turn_back_s} of {loan.turn_back_deadline_s} s, {loan.stage_durations_s}"
    )


@contextlib.asynccontextmanager
async def running(what: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """A coroutine beside the block; its failure is the block's."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(what)
        yield
        task.cancel()


def story(recording: Recording, verdict: Verdict) -> str:
    """What a person wants to read of a run that broke a promise."""
    begin_s = recording.begin_s
    faults = [
        f"{fault.at_s - begin_s:7.1f} s {fault.kind} {fault.target}"
        f" for {fault.end_s - fault.at_s:.1f} s"
        for fault in recording.faults
    ]
    broken = [
        f"BROKEN at {each.at_s - begin_s:.1f} s: {each.kind}: {each.subject}: {each.text}"
        for each in verdict.violations
    ]
    return "\n".join([f"seed {recording.seed}", *faults, *broken])


def kinds_of(words: str, *, with_journal_flips: bool) -> tuple[FaultKind, ...]:
    """The kinds that a caller names; those of every run where none is named."""
    chosen: Collection[FaultKind] = DEFAULT_KINDS
    if words:
        chosen = [FaultKind(word) for word in words.split(",")]
    return tuple(sorted({*chosen, *([FaultKind.JOURNAL_FLIP] if with_journal_flips else [])}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="chaos", description="Hurt a live cell; judge it.")
    parser.add_argument("--duration-s", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mean-pause-s", type=float, default=2.5, help="between two faults")
    parser.add_argument("--nodes", default="3+3", help="training and inference nodes")
    parser.add_argument("--nats-servers", type=int, default=1, choices=(1, 3))
    parser.add_argument("--kinds", default="", help="kinds of faults, with commas between")
    parser.add_argument("--journal-flips", action="store_true", help="hurt the journal's file too")
    parser.add_argument("--results", type=Path, help="where the summary goes, as JSON")
    parser.add_argument("--keep", type=Path, help="where the recording goes")
    parser.add_argument("--judge", type=Path, help="judge a recording that was kept; run nothing")
    given = parser.parse_args(arguments)
    set_up(level="INFO", style="plain")
    # As Ctrl-C: whatever is told to end takes its cell and its disks along.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    if given.judge:
        recording = load(given.judge)
    else:
        training, _, inference = given.nodes.partition("+")
        plan = Plan(
            seed=given.seed,
            duration_s=given.duration_s,
            mean_pause_s=given.mean_pause_s,
            training_nodes=int(training),
            inference_nodes=int(inference),
            nats_servers=given.nats_servers,
            kinds=kinds_of(given.kinds, with_journal_flips=given.journal_flips),
        )
        recording = record(plan, keep=given.keep)
    verdict = judge(recording)
    summary = summary_of(
        recording,
        verdict,
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
    )
    print(story(recording, verdict) if verdict.violations else "", file=sys.stderr)  # noqa: T201
    print(summary.text())  # noqa: T201
    if given.results:
        given.results.write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    return 1 if verdict.violations else 0


def record(plan: Plan, *, keep: Path | None) -> Recording:
    """Run it in a new directory, which is removed if no promise was broken."""
    directory = Path(tempfile.mkdtemp(prefix="aryl-chaos-"))
    recording = asyncio.run(Run(plan, directory).record())
    save(recording, keep or directory / "recording.json")
    if judge(recording).violations:
        print(f"kept: {directory}", file=sys.stderr)  # noqa: T201
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return recording


if __name__ == "__main__":
    sys.exit(main())
