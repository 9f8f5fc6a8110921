"""CPU time of a pass over a full cell of tenants with guarantees; run by hand, never by CI.

    python -m tests.benchmarks.bench_tenants [--policy fifo srtf] [--nodes 100] [--waiting 1500]
                                             [--repeats 3]

Ten tenants have three quarters of the GPUs guaranteed, all alike, and no limits. Every GPU is in
use: in the cell *even* by jobs of all of them, in *few* by those of two, which borrow most of what
they have. *first* is a pass over the cell as it is generated, which is as another policy has left
it; *settled* one over the cell as passes leave it once none of them starts or stops anybody (after
a dozen passes at the latest), with one job more that waits and that a guarantee covers.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from common.model import JobId, JobState, NodeRole
from coordinator.policies.contract.decisions import Allocation, Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, TenantView
from coordinator.policies.registry import Policy, policy
from coordinator.policies.tenants.gpu_flow import Flow
from coordinator.policies.tenants.stability import after
from tests.benchmarks.bench_pass import GPUS, Host, settle
from tests.harness.builders import NOW_S, job_with, make_job_view, make_snapshot

TENANTS = tuple(f"t{number}" for number in range(10))
GUARANTEED_RATIO = 0.75
CELLS = {"even": TENANTS, "few": TENANTS[:2]}
"""Whose jobs run in it."""

DEMANDS = (1, 1, 1, 2, 2, 4)
"""GPUs of jobs and base gangs, of one worker each."""

ELASTIC_RATIO = 0.2
DEADLINE_RATIO = 0.1
MOST_PASSES = 12
"""Until a cell is taken for settled, or for one that never is."""


def make_cell(nodes: int, waiting: int, owners: Sequence[str], *, seed: int = 1) -> ClusterSnapshot:
    """A cell whose GPUs are all in use, by jobs of these tenants; jobs of all of them wait."""
    chance = random.Random(seed)
    hosts = [Host(f"n{number:05}", NodeRole.TRAINING, "H100") for number in range(nodes)]
    jobs: list[JobView] = []
    for index, host in enumerate(hosts):
        while host.free:
            job = _job(chance, f"r{len(jobs):06}", owners, most_gpus=host.free, is_running=True)
            placed = settle(job, hosts[index : index + 1])
            assert placed is not None
            jobs.append(placed)
    jobs += [_job(chance, f"w{number:06}", TENANTS, most_gpus=GPUS) for number in range(waiting)]
    guarantee_gpus = round(nodes * GPUS * GUARANTEED_RATIO / len(TENANTS))
    tenants = tuple(TenantView(name=name, guarantee_gpus=guarantee_gpus) for name in TENANTS)
    snapshot = make_snapshot(nodes=[host.view() for host in hosts], jobs=jobs)
    return replace(snapshot, tenants=tenants, index=None)


def _job(
    chance: random.Random,
    name: str,
    owners: Sequence[str],
    *,
    most_gpus: int,
    is_running: bool = False,
) -> JobView:
    """One job; what runs has its base gang."""
    gpus = chance.choice([gpus for gpus in DEMANDS if gpus <= most_gpus])
    attained_s = chance.expovariate(1 / 3600.0) if is_running else 0.0
    has_deadline = chance.random() < DEADLINE_RATIO
    job = make_job_view(
        name,
        state=JobState.RUNNING if is_running else JobState.PENDING,
        workers=(1, 3 if chance.random() < ELASTIC_RATIO else 1),
        gpus_per_worker=gpus,
        remaining_work_s=chance.lognormvariate(7.0, 2.0),
        submitted_at_s=chance.uniform(0.0, NOW_S / 2) + (0.0 if is_running else NOW_S / 2),
    )
    return job_with(
        job,
        tenant=chance.choice(owners),
        attained_gpu_s=attained_s * gpus,
        first_started_at_s=NOW_S - attained_s if is_running else None,
        deadline_at_s=NOW_S + chance.uniform(600.0, 86400.0) if has_deadline else None,
    )


def settled(made: Policy, snapshot: ClusterSnapshot) -> tuple[ClusterSnapshot, bytes, int]:
    """The cell after as many passes as start or stop somebody, what the policy then remembers, and
    how many these are."""
    memory = b""
    for passed in range(MOST_PASSES):
        found = made.allocate(snapshot, memory)
        memory = found.memory
        if not any(isinstance(each, Start | Preempt) for each in found.decisions):
            return snapshot, memory, passed
        snapshot = after(snapshot, found.decisions, Flow(snapshot))
    return snapshot, memory, MOST_PASSES


def one_more(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """The same cell when a job of one GPU comes, of the tenant that uses the least."""
    used = dict.fromkeys(TENANTS, 0)
    for job in snapshot.jobs:
        used[job.tenant] += sum(worker.gpus for worker in job.placed)
    name = min(TENANTS, key=lambda each: (used[each], each))
    job = replace(make_job_view("x", submitted_at_s=NOW_S), job_id=JobId("x"), tenant=name)
    return replace(snapshot, jobs=(*snapshot.jobs, job), index=None)


def measure(made: Policy, snapshot: ClusterSnapshot, memory: bytes, repeats: int) -> float:
    """CPU seconds of one pass, the median; each on a fresh snapshot, the first only warms up."""
    blob = msgspec.msgpack.encode(snapshot)
    times_s: list[float] = []
    for _ in range(repeats + 1):
        fresh = msgspec.msgpack.decode(blob, type=ClusterSnapshot)
        gc.collect()
        before_s = time.process_time()
        made.allocate(fresh, memory)
        times_s.append(time.process_time() - before_s)
    return statistics.median(times_s[1:])


def counts(found: Allocation) -> tuple[int, int]:
    """How many jobs start and stop in a pass."""
    starts = sum(isinstance(each, Start) for each in found.decisions)
    return starts, sum(isinstance(each, Preempt) for each in found.decisions)


def main(arguments: Sequence[str]) -> None:
    """Print one row per policy and cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", nargs="+", default=["fifo", "las", "tiresias", "srtf", "drf"])
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--waiting", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args(arguments)
    say = sys.stdout.write
    say("policy             cell  running  starts  stops  first s  passes  settled s\n")
    for name in asked.policy:
        made = policy(name)
        for cell, owners in CELLS.items():
            snapshot = make_cell(asked.nodes, asked.waiting, owners)
            starts, stops = counts(made.allocate(snapshot, b""))
            first_s = measure(made, snapshot, b"", asked.repeats)
            last, memory, passes = settled(made, snapshot)
            later_s = measure(made, one_more(last), memory, asked.repeats)
            running = len(snapshot.jobs) - asked.waiting
            say(
                f"{name:<18} {cell:<5} {running:7} {starts:7} {stops:6} {first_s:8.2f} "
                f"{passes:7} {later_s:10.2f}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
