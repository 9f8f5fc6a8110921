"""Time of a plan: how long the leader's loop encodes, and how long the process plays; run by hand.

    python -m tests.benchmarks.bench_plan [--nodes 1000] [--jobs 500] [--limit 10] [--repeats 20]

A simulated cell of training and inference nodes with 8 GPUs, half of them lent or busy, is asked
after two hours. A tenth of its jobs declare no running time. Times are of CPU, and --limit too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from common.clock import SystemClock
from common.model import JobId, Mode, NodeName, Pool, ServiceName
from common.plans import Plan, PlanKind
from coordinator.engine import what_if
from coordinator.engine.engine import Engine
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.plan.answer import answer
from coordinator.service.api.plans import asked
from coordinator.sim.run.cluster import Delays, NodeSpec
from coordinator.sim.run.simulation import Simulation, Submission
from tests.harness.builders import make_spec

CHAT = ServiceName("chat")
TRAINING_RATIO = 0.46
"""Lyra, EuroSys'23, section 7.1: 443 of 963 servers train."""
GANGS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8))
MUTE_RATIO = 0.1
LIVED_S = 7_200.0


def cell(nodes: int, jobs: int, *, seed: int = 1) -> Engine:
    """An engine that has led a cell for two hours; that many jobs are there at the end."""
    chance = random.Random(seed)
    count = round(nodes * TRAINING_RATIO)
    specs = [
        NodeSpec(name=NodeName(f"t{i:04}"), home_pool=Pool.TRAINING, gpu_type="H100", gpus=8)
        for i in range(count)
    ] + [
        NodeSpec(
            name=NodeName(f"i{i:04}"),
            home_pool=Pool.INFERENCE,
            gpu_type="H100",
            gpus=8,
            service=CHAT,
        )
        for i in range(nodes - count)
    ]
    service = ServiceSettings(
        name=CHAT, capacity_per_node=10.0, mode=Mode.ACT, reclaim_deadline_s=300.0
    )
    sim = Simulation(
        EngineSettings(services=(service,)),
        specs,
        delays=Delays(report_s=1.0, drain_s=5.0, device_free_s=5.0, warm_up_s=40.0),
        keep_decisions=False,
    )
    need = 0.7 * (nodes - count) * 10.0
    sim.load(CHAT, ((300.0 * turn, need) for turn in range(100)))
    sim.submit(_submission(chance, number) for number in range(jobs))
    sim.begin()
    sim.loop.run(LIVED_S)
    return sim.engine


def _submission(chance: random.Random, number: int) -> Submission:
    """A job of hours; some end within the two hours before the question."""
    workers, gpus = chance.choice(GANGS)
    runtime_s = chance.uniform(1.0, 12.0) * 3600.0
    is_mute = chance.random() < MUTE_RATIO
    spec = make_spec(
        name=f"job{number}",
        command=("train",),
        workers=(workers, workers),
        gpus_per_worker=gpus,
        expected_runtime_s=None if is_mute else runtime_s,
    )
    return Submission(
        at_s=chance.uniform(0.0, LIVED_S),
        job_id=JobId(f"j{number:05}"),
        spec=spec,
        work_s=runtime_s * workers,
    )


def question(engine: Engine, **request: Any) -> bytes:
    """As the leader asks it."""
    now_s = engine.state.now_s
    return what_if.ask(
        engine, Plan(**request), tenant="ops", user="u", now_s=now_s, loan_pass_at_s=now_s + 60.0
    )


def main(arguments: Sequence[str]) -> None:
    """Print the time of the loop, and one row per kind of plan."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--limit", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    say = sys.stdout.write
    engine = cell(options.nodes, options.jobs)
    live = engine.state.live()
    waiting = sum(not job.workers for job in live)
    say(f"{options.nodes} nodes, {len(live)} live jobs, {waiting} of them wait\n")
    times_ms: list[float] = []
    for _ in range(options.repeats):
        before_s = time.process_time()
        data = question(engine, kind=PlanKind.RECALL)
        times_ms.append((time.process_time() - before_s) * 1e3)
    say(
        f"the loop encodes {len(data) / 1e6:.2f} MB in {statistics.median(times_ms):.1f} ms of CPU "
        f"(longest {max(times_ms):.1f})\n"
    )
    spec = make_spec(
        name="new",
        command=("train",),
        workers=(4, 4),
        gpus_per_worker=8,
        expected_runtime_s=3600.0,
    )
    busy = next(worker.node for job in live for worker in job.workers.values())
    for request in (
        {"kind": PlanKind.JOB, "spec": spec},
        {"kind": PlanKind.DRAIN, "target": busy},
        {"kind": PlanKind.RECALL, "target": CHAT},
    ):
        data = question(engine, limit_s=options.limit, **request)
        found = answer(what_if.read(data), clock_s=time.process_time)
        start = "" if found.start is None else f", starts in {found.start.in_s} s"
        say(
            f"{request['kind']:8} {found.took_s:5.1f} s of CPU, {found.played_s / 3600.0:5.1f} h "
            f"ahead, {len(found.effects)} jobs affected{start}\n"
        )
    asyncio.run(asked(data, clock=SystemClock(), limit_s=options.limit + 120.0))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s, size_mb = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6
    say(f"process  {cpu_s:5.1f} s of CPU in all for the last one, {size_mb:.0f} MB at most\n")


if __name__ == "__main__":
    main(sys.argv[1:])
