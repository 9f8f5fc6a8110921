"""What arrays cost a pass and a snapshot, beside as many plain jobs as their windows; run by hand.

    python -m tests.benchmarks.bench_arrays [--arrays 10] [--tasks 10000] [--nodes 100]
                                            [--repeats 9] [--policy aryl]

All GPUs are held by the first tasks. The rest of each array waits: its window in the line, the
others in the array. Beside it stand plain jobs, as many as run and wait in the line there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from msgspec.structs import replace

from common.model import ArraySpec, JobId, NodeName, Pool
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.events import JobSubmitted, PassDue
from coordinator.engine.state.settings import EngineSettings
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.simulation import Simulation
from coordinator.workloads.shaping import linear
from tests.harness.builders import make_spec

SPEC = make_spec("sweep", expected_runtime_s=3600.0)
WORK_S = 1e6


def cell(nodes: int, policy: str) -> Simulation:
    """An empty cell."""
    specs = [
        NodeSpec(name=NodeName(f"t{n}"), home_pool=Pool.TRAINING, gpu_type="H100", gpus=8)
        for n in range(nodes)
    ]
    made = Simulation(EngineSettings(policy=policy), specs)
    made.run(until_s=0.0)
    return made


def submit(sim: Simulation, name: str, tasks: int) -> None:
    """An array, or one plain job where `tasks` is 0."""
    spec = SPEC
    if tasks:
        spec = replace(SPEC, array=ArraySpec(indices=f"0-{tasks - 1}"))
    for job_id in [f"{name}_{n}" for n in range(tasks)] or [name]:
        sim.runtime.add(
            JobId(job_id), work_s=WORK_S, speedup=linear(SPEC.workers), gpus_per_worker=1
        )
    sim.handle(JobSubmitted(job_id=JobId(name), spec=spec, tenant="lab", user="ada"))


def settled(sim: Simulation) -> Engine:
    """After all passes that start something."""
    sim.ask_pass()
    sim.loop.run(until_s=300.0)
    return sim.engine


def measured(engine: Engine, repeats: int) -> tuple[float, int, int, int]:
    """Median seconds of a leader's first pass, which has no view yet, bytes of a snapshot, and jobs
    with GPUs and in the line.
    """
    took_s: list[float] = []
    blob = engine.encode_state()
    for _ in range(repeats):
        engine = Engine(engine.settings, decode_state(blob))
        began_s = time.process_time()
        engine.handle(PassDue(), now_s=engine.state.now_s + 1.0)
        took_s.append(time.process_time() - began_s)
    live = engine.state.live()
    running = sum(bool(job.workers) for job in live)
    return statistics.median(took_s), len(blob), running, len(live) - running


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both cells and their ratio."""
    parser = argparse.ArgumentParser(description="What arrays cost a pass and a snapshot.")
    parser.add_argument("--arrays", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--policy", default="aryl")
    asked = parser.parse_args(arguments)
    arrays, plain = cell(asked.nodes, asked.policy), cell(asked.nodes, asked.policy)
    for number in range(asked.arrays):
        submit(arrays, f"a{number}", asked.tasks)
    first = measured(settled(arrays), asked.repeats)
    for number in range(first[2] + first[3]):
        submit(plain, f"j{number}", 0)
    second = measured(settled(plain), asked.repeats)
    for name, (pass_s, size_bytes, running, waiting) in (("arrays", first), ("jobs", second)):
        sys.stdout.write(
            f"{name:<7} pass {pass_s * 1000:.1f} ms, snapshot {size_bytes / 1e6:.2f} MB, "
            f"{running} run, {waiting} in the line\n"
        )
    ratios = f"pass {first[0] / second[0]:.2f}, snapshot {first[1] / second[1]:.2f}"
    sys.stdout.write(f"ratio   {ratios}\n")


if __name__ == "__main__":
    main()
