"""Jobs preempted and time per reclaim, against the optimum; run by hand, never by CI.

    python -m tests.benchmarks.bench_reclaim [--sizes 50:15 200:60 1000:300] [--seeds 3]
                                             [--exact-s 20] [--cases gangs scattered]

For each case, number of lent nodes and number to return: the jobs that random, SCF (fewest jobs),
the paper's greedy and our search preempt, means over seeds; and the best that HiGHS finds, in a
process that is killed when it runs over. "proven" counts the seeds whose optimum HiGHS or our own
bound proves; the gaps of greedy and ours are to that optimum, over these seeds alone, and the last
one is of ours to the better bound, over all. Times are CPU time of one core for one choice, from a
snapshot to nodes and victims: per seed the shortest of three, and of the seeds the longest; for
HiGHS the median of the wall time, its process included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from coordinator.policies.aryl.reclaim.choose_nodes import Choice, Reclaiming, choose_nodes
from coordinator.policies.aryl.reclaim.occupancy import Occupancy
from coordinator.policies.aryl.reclaim.preemption_cost import Costs
from coordinator.policies.aryl.reclaim.problem import merge
from coordinator.policies.aryl.reclaim.rules import choose_at_random, choose_fewest_jobs
from coordinator.policies.aryl.reclaim.search import solve
from coordinator.policies.contract.snapshot import ClusterSnapshot
from tests.harness.builders import NOW_S
from tests.policies.aryl.reclaim.exact_solver import Exact, Question, solve_in_process
from tests.policies.aryl.reclaim.lent_nodes import CASES, Held, snapshot_of

KILL_AFTER_S = 5.0
"""Beyond the solver's own limit, which it does not always keep; its process starts in less."""

REPEATS = 3
WAYS = ("random", "SCF", "greedy", "ours")
COLUMNS = (
    "case",
    "lent",
    "to return",
    *WAYS,
    "HiGHS",
    "bound",
    "proven",
    "gap of greedy",
    "gap of ours",
    "ours to bound",
    "ms greedy",
    "ms ours",
    "ms HiGHS",
)


class Row(Struct, frozen=True, kw_only=True):
    """One instance. jobs, ms: by way. exact: None when HiGHS was killed. bound: the best proven."""

    jobs: dict[str, int]
    ms: dict[str, float]
    exact: Exact | None
    exact_ms: float
    bound: int

    @property
    def optimum(self) -> int | None:
        """As far as it is proven, by HiGHS or by our own bound."""
        if self.exact is not None and self.exact.is_proven:
            return self.exact.weight
        return self.bound if self.jobs["ours"] == self.bound else None


def choices(snapshot: ClusterSnapshot, wanted: int) -> dict[str, Callable[[], Choice]]:
    """Each way, with an occupancy of its own."""

    def ours() -> Choice:
        how = Reclaiming(costs=Costs(snapshot), is_searching=True)
        return choose_nodes(Occupancy(snapshot), snapshot.nodes, wanted, how)

    at_random = choose_at_random(NOW_S)
    return {
        "random": lambda: at_random(Occupancy(snapshot), snapshot.nodes, wanted),
        "SCF": lambda: choose_fewest_jobs(Occupancy(snapshot), snapshot.nodes, wanted),
        "greedy": lambda: choose_nodes(Occupancy(snapshot), snapshot.nodes, wanted),
        "ours": ours,
    }


def _cpu_ms(choose: Callable[[], Choice]) -> float:
    gc.collect()
    before_s = time.process_time()
    choose()
    return (time.process_time() - before_s) * 1e3


def measure(held: Held, wanted: int, exact_s: float) -> Row:
    """All ways on one instance."""
    snapshot = snapshot_of(held)
    jobs: dict[str, int] = {}
    ms: dict[str, float] = {}
    for way, choose in choices(snapshot, wanted).items():
        jobs[way] = len(choose().victims)
        ms[way] = min(_cpu_ms(choose) for _ in range(REPEATS))
    nodes = tuple(tuple(sorted(here)) for here in held.values() if here)
    count = 1 + max(job for here in nodes for job in here)
    left = wanted - (len(held) - len(nodes))
    if left <= 0:
        return Row(jobs=jobs, ms=ms, exact=Exact(weight=0, bound=0), exact_ms=0.0, bound=0)
    problem = merge(nodes, [1] * count, left).problem
    own = solve(problem, frozenset(range(len(problem.weights)))).bound
    question = Question(nodes=nodes, weights=(1,) * count, wanted=left, limit_s=exact_s)
    before_s = time.perf_counter()
    exact = solve_in_process(question, kill_after_s=exact_s + KILL_AFTER_S)
    exact_ms = (time.perf_counter() - before_s) * 1e3
    bound = max(own, exact.bound if exact is not None else 0)
    return Row(jobs=jobs, ms=ms, exact=exact, exact_ms=exact_ms, bound=bound)


def _gap(rows: Sequence[Row], way: str, least: Callable[[Row], int]) -> str:
    """Jobs beyond the least, over all rows together."""
    if not rows:
        return ""
    total = sum(least(row) for row in rows)
    over = sum(row.jobs[way] for row in rows) - total
    return f"{100 * over / total if total else 0.0:.1f} %"


def cells(rows: Sequence[Row]) -> list[str]:
    """Means over seeds, gaps and times, in the order of the columns."""
    known = [row for row in rows if row.optimum is not None]
    found = [row.exact.weight for row in rows if row.exact is not None]
    return [
        *(f"{statistics.mean(row.jobs[way] for row in rows):.1f}" for way in WAYS),
        f"{statistics.mean(found):.1f}" if len(found) == len(rows) else "killed",
        f"{statistics.mean(row.bound for row in rows):.1f}",
        f"{len(known)} of {len(rows)}",
        *(_gap(known, way, lambda row: row.optimum or 0) for way in ("greedy", "ours")),
        _gap(rows, "ours", lambda row: row.bound),
        *(f"{max(row.ms[way] for row in rows):.0f}" for way in ("greedy", "ours")),
        f"{statistics.median(row.exact_ms for row in rows):.0f}",
    ]


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["50:5", "50:15", "200:20", "200:60", "1000:100", "1000:300"],
        help="lent nodes : nodes to return",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--exact-s", type=float, default=20.0, help="time for one exact solution")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table, one row per case and size."""
    asked = options(arguments)
    say = sys.stdout.write
    say(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    for name in asked.cases:
        for size in asked.sizes:
            nodes, wanted = (int(part) for part in size.split(":"))
            rows = [
                measure(CASES[name](nodes, seed), wanted, asked.exact_s)
                for seed in range(1, asked.seeds + 1)
            ]
            say(f"| {' | '.join([name, str(nodes), str(wanted), *cells(rows)])} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
