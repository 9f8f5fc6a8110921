"""Time of a pass where every waiting job requires a label, against the same pass without labels.

    python -m tests.benchmarks.bench_labels [--nodes 10000] [--jobs 2000] [--labels 50]
                                            [--policy aryl] [--repeats 5]

A real engine: nodes report, jobs are submitted, and passes are due. Gangs of 40 workers want eight
times the GPUs of the fleet, so most jobs wait. The first pass also makes the views of all jobs and
the nodes of each selection; the later ones come after one node has reported other labels.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence

from msgspec import UNSET
from msgspec.structs import replace

from common.model import GpuUuid, JobId, NodeName, NodeRole, Pool
from coordinator.engine.engine import Engine
from coordinator.engine.state.events import (
    GpuFact,
    JobSubmitted,
    LeaderStarted,
    NodeReported,
    PassDue,
)
from coordinator.engine.state.settings import EngineSettings
from tests.harness.builders import make_spec

GPUS, WORKERS = 8, 40


def report(number: int, labels: int, **more: str) -> NodeReported:
    """A node of one of the racks."""
    name = f"n{number:05d}"
    return NodeReported(
        node=NodeName(name),
        boot_id="b",
        home_pool=Pool.TRAINING,
        role=NodeRole.TRAINING,
        epoch=1,
        generation=0,
        gpus=tuple(GpuFact(GpuUuid(f"{name}-{index}"), "H100") for index in range(GPUS)),
        labels={"rack": f"r{number % labels}", **more},
    )


def engine_of(nodes: int, jobs: int, labels: int, policy: str, *, has_terms: bool) -> Engine:
    """An engine whose jobs have not been seen by a pass."""
    engine = Engine(EngineSettings(policy=policy))
    engine.handle(LeaderStarted(epoch=1, holder="bench"), now_s=0.0)
    for number in range(nodes):
        engine.handle(report(number, labels), now_s=1.0)
    spec = make_spec("j", workers=(WORKERS, WORKERS), gpus_per_worker=GPUS)
    for number in range(jobs):
        terms = (f"rack=r{number % labels}",)
        event = JobSubmitted(
            job_id=JobId(f"j{number:05d}"),
            spec=replace(spec, require=terms if has_terms else UNSET),
            tenant="t",
            user="u",
        )
        engine.handle(event, now_s=2.0)
    return engine


def pass_s(engine: Engine, now_s: float) -> float:
    """Seconds that one pass takes."""
    gc.collect()
    begun_s = time.perf_counter()
    engine.handle(PassDue(), now_s=now_s)
    return time.perf_counter() - begun_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each kind of job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2_000)
    parser.add_argument("--labels", type=int, default=50)
    parser.add_argument("--policy", default="aryl")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args(arguments)
    sys.stdout.write(
        f"{asked.nodes} nodes, {asked.jobs} jobs, {asked.labels} labels, {asked.policy}\n"
    )
    for has_terms in (False, True):
        engine = engine_of(asked.nodes, asked.jobs, asked.labels, asked.policy, has_terms=has_terms)
        first_s, later_s = pass_s(engine, 3.0), list[float]()
        for number in range(asked.repeats):
            now_s = 40.0 + 40.0 * number
            engine.handle(report(number, asked.labels, disk=f"d{number}"), now_s=now_s)
            later_s.append(pass_s(engine, now_s))
        running = sum(1 for job in engine.state.live() if job.workers)
        what = "one label each" if has_terms else "no labels"
        sys.stdout.write(
            f"{what:16} first pass {first_s:6.2f} s, later {statistics.median(later_s):6.3f} s; "
            f"{running} jobs have workers\n"
        )


if __name__ == "__main__":
    main()
