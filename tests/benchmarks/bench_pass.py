"""Time of one allocate + lend pass over generated clusters, as a table; run by hand, never by CI.

    python -m tests.benchmarks.bench_pass [--nodes 100 500 1000] [--jobs 100 1000 5000]
                                          [--repeats 9] [--policy aryl] [--tenants]
                                          [--deadlines] [--profile]

The clusters are shaped like the one of Lyra, EuroSys'23, sections 2 and 7.1: 46 % training nodes
of one GPU type and inference nodes of another, 21 % fungible jobs, few elastic ones that hold a
third of the GPUs. GPUs per job are not published; here they are powers of two, small ones often.
Every repetition decides on a snapshot read back from bytes, so that nothing is remembered.
With `--tenants` their jobs are of eight teams in a tree of three levels with guarantees and limits,
and one waiting job in ten has a deadline. With `--deadlines` every waiting job has one, and may
have up to four times its gang.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import statistics
import sys
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from common.model import JobState, NodeRole, Preemptibility, WorkerRange
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import (
    ClusterSnapshot,
    JobView,
    LoadSample,
    NodeView,
    TenantView,
    WorkerView,
)
from coordinator.policies.registry import POLICIES, Policy
from tests.harness.builders import (
    NOW_S,
    SERVICE,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
    make_worker_view,
)

GPUS = 8
TRAINING_RATIO = 443 / 963
LENT_RATIO = 0.3
"""Share of the inference nodes that are on loan: the daily mean that the paper's load leaves."""
BUSY_RATIO = 0.9
FUNGIBLE_RATIO = 0.21
ELASTIC_RATIO = 0.05
HOME_TYPE, LENT_TYPE = "V100", "T4"
DEMANDS = ((1, 1), (1, 1), (1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8))
"""(workers, GPUs per worker) of inelastic jobs and base gangs; small ones are most of them."""


class Host:
    """A node that takes workers, while the cluster is made."""

    def __init__(self, name: str, role: NodeRole, gpu_type: str) -> None:
        self.name, self.role, self.gpu_type = name, role, gpu_type
        self.workers: list[WorkerView] = []
        self.free = GPUS

    def view(self) -> NodeView:
        return make_node_view(
            self.name, role=self.role, gpu_type=self.gpu_type, gpus=GPUS, workers=self.workers
        )


def make_job(
    chance: random.Random, name: str, *, state: JobState = JobState.PENDING, gpu_type: str = ""
) -> JobView:
    """One job; those that hold lent nodes are fungible."""
    workers, gpus = chance.choice(DEMANDS)
    is_elastic = chance.random() < ELASTIC_RATIO
    is_fungible = gpu_type == LENT_TYPE or chance.random() < FUNGIBLE_RATIO
    if is_elastic:
        workers, gpus = chance.choice(((1, 4), (1, 8), (2, 8)))
    return make_job_view(
        name,
        state=state,
        workers=(workers, workers * 3 if is_elastic else workers),
        gpus_per_worker=gpus,
        types=() if is_fungible else (HOME_TYPE,),
        multiplier={LENT_TYPE: 2} if is_fungible else {},
        remaining_work_s=chance.lognormvariate(7.0, 2.0) * workers,
        submitted_at_s=chance.uniform(0.0, NOW_S),
        preemptibility=chance.choice((*[Preemptibility.FULL] * 4, Preemptibility.NON))
        if gpu_type != LENT_TYPE
        else Preemptibility.FULL,
        gpu_type=gpu_type or None,
    )


def settle(job: JobView, hosts: Sequence[Host]) -> JobView | None:
    """Put a running job on hosts, its flexible workers on what is left over; None if it is full."""
    span = job.workers_on(hosts[0].gpu_type)
    slots = [host for host in hosts for _ in range(host.free // job.gpus_per_worker)]
    if len(slots) < span.min:
        return None
    placed: list[WorkerView] = []
    for index, host in enumerate(slots[: (span.min + span.max) // 2]):
        worker = make_worker_view(
            job.job_id,
            index,
            host.name,
            gpus=job.gpus_per_worker,
            is_flexible=index >= span.min,
        )
        placed.append(worker)
        host.workers.append(worker)
        host.free -= worker.gpus
    return msgspec.structs.replace(job, placed=tuple(placed))


def make_cluster(node_count: int, waiting_count: int, *, seed: int = 1) -> ClusterSnapshot:
    """A busy cluster with that many nodes and waiting jobs."""
    chance = random.Random(seed)
    home_count = round(node_count * TRAINING_RATIO)
    lent_count = round((node_count - home_count) * LENT_RATIO)
    homes = [Host(f"t{i:05}", NodeRole.TRAINING, HOME_TYPE) for i in range(home_count)]
    lent = [Host(f"l{i:05}", NodeRole.ON_LOAN, LENT_TYPE) for i in range(lent_count)]
    serving_count = node_count - home_count - lent_count
    serving = [Host(f"s{i:05}", NodeRole.SERVING, LENT_TYPE) for i in range(serving_count)]
    jobs: list[JobView] = []
    for hosts in (homes, lent):
        left = int(len(hosts) * GPUS * BUSY_RATIO)
        first = 0
        while left > 0:
            job = make_job(
                chance, f"r{len(jobs):06}", state=JobState.RUNNING, gpu_type=hosts[0].gpu_type
            )
            while first < len(hosts) and not hosts[first].free:
                first += 1
            running = settle(job, hosts[first : first + 40])
            if running is None:
                break
            jobs.append(running)
            left -= sum(worker.gpus for worker in running.placed)
    jobs += [make_job(chance, f"w{i:06}") for i in range(waiting_count)]
    # a rise that calls a twentieth of the service's nodes home, so that the reclaim is in the time
    need = serving_count + max(1, (node_count - home_count) // 20)
    load = [LoadSample(NOW_S - 60.0 * age, need * 10.0) for age in range(30, -1, -1)]
    service = make_service_view(SERVICE, load=load, capacity_per_node=10.0)
    nodes = [host.view() for host in (*homes, *lent, *serving)]
    return make_snapshot(nodes=nodes, jobs=jobs, services=[service])


def with_tenants(snapshot: ClusterSnapshot, *, seed: int = 1) -> ClusterSnapshot:
    """The same cluster shared by two organisations of two divisions of two teams each.

    A team has a tenth of the training GPUs guaranteed, borrows up to as much again, and lends
    half; those above have what their teams have. A deadline is up to a day ahead.
    """
    chance = random.Random(seed)
    training = sum(node.gpus for node in snapshot.nodes if node.role == NodeRole.TRAINING)
    each = training // 10
    tenants: list[TenantView] = []
    teams: list[str] = []
    for top in ("a", "b"):
        tenants.append(TenantView(name=top, guarantee_gpus=4 * each))
        for middle in (f"{top}1", f"{top}2"):
            tenants.append(TenantView(name=middle, parent=top, guarantee_gpus=2 * each))
            for name in (f"{middle}1", f"{middle}2"):
                teams.append(name)
                limits = {"borrow_limit_gpus": each, "lend_limit_gpus": each // 2}
                tenants.append(TenantView(name=name, parent=middle, guarantee_gpus=each, **limits))
    jobs: list[JobView] = []
    for job in snapshot.jobs:
        mine = msgspec.structs.replace(job, tenant=chance.choice(teams))
        if job.state == JobState.PENDING and chance.random() < 0.1:
            at_s = snapshot.now_s + chance.uniform(600.0, 86400.0)
            mine = msgspec.structs.replace(mine, deadline_at_s=at_s)
        jobs.append(mine)
    ordered = tuple(sorted(tenants, key=lambda view: view.name))
    return msgspec.structs.replace(snapshot, jobs=tuple(jobs), tenants=ordered, index=None)


def with_deadlines(snapshot: ClusterSnapshot, *, seed: int = 1) -> ClusterSnapshot:
    """The same cluster; who waits has a deadline from two to ten times as far as it runs alone."""
    chance = random.Random(seed)
    jobs: list[JobView] = []
    for job in snapshot.jobs:
        if job.state == JobState.PENDING:
            alone_s = job.estimate.remaining_work_s / job.workers.min
            job = msgspec.structs.replace(
                job,
                deadline_at_s=snapshot.now_s + chance.uniform(2.0, 10.0) * alone_s,
                workers=WorkerRange(min=job.workers.min, max=4 * job.workers.min),
            )
        jobs.append(job)
    return msgspec.structs.replace(snapshot, jobs=tuple(jobs), index=None)


class Times(Struct, frozen=True, kw_only=True):
    """Milliseconds of repeated passes over one cluster, and what they decided."""

    allocate_ms: list[float]
    lend_ms: list[float]
    started: int
    decided: int


def measure(policy: Policy, snapshot: ClusterSnapshot, repeats: int) -> Times:
    """Both halves of a pass, each on a fresh snapshot; the first run only warms up."""
    blob = msgspec.msgpack.encode(snapshot)
    allocate_ms: list[float] = []
    lend_ms: list[float] = []
    started = decided = 0
    for turn in range(repeats + 1):
        fresh = msgspec.msgpack.decode(blob, type=ClusterSnapshot)
        gc.collect()
        before_s = time.perf_counter()
        decisions = policy.allocate(fresh, b"").decisions
        between_s = time.perf_counter()
        lent = policy.lend(fresh)
        after_s = time.perf_counter()
        if turn:
            allocate_ms.append((between_s - before_s) * 1e3)
            lend_ms.append((after_s - between_s) * 1e3)
        started = sum(1 for decision in decisions if isinstance(decision, Start))
        decided = len(decisions) + len(lent)
    return Times(allocate_ms=allocate_ms, lend_ms=lend_ms, started=started, decided=decided)


def spread(values: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:8.1f} ({low:.1f} .. {high:.1f})"


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 500, 1000])
    parser.add_argument("--jobs", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="aryl")
    parser.add_argument("--tenants", action="store_true", help="a tree of tenants, and deadlines")
    parser.add_argument("--deadlines", action="store_true", help="every waiting job has one")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Print one row per cluster."""
    asked = options(arguments)
    policy = POLICIES[asked.policy]
    say = sys.stdout.write
    head = "nodes  waiting  running  started  decisions"
    say(f"{head}   allocate ms (quartiles)       lend ms (quartiles)\n")
    for node_count in asked.nodes:
        for job_count in asked.jobs:
            snapshot = make_cluster(node_count, job_count)
            if asked.tenants:
                snapshot = with_tenants(snapshot)
            if asked.deadlines:
                snapshot = with_deadlines(snapshot)
            times = measure(policy, snapshot, max(2, asked.repeats))
            running = len(snapshot.jobs) - job_count
            say(
                f"{node_count:5}  {job_count:7}  {running:7}  {times.started:7}  "
                f"{times.decided:9}   {spread(times.allocate_ms):<28}  {spread(times.lend_ms)}\n"
            )
            if asked.profile:
                profile = cProfile.Profile()
                with profile:
                    policy.allocate(snapshot, b"")
                    policy.lend(snapshot)
                pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main(sys.argv[1:])
