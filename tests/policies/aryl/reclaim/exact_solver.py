"""The exact reclaim by HiGHS, as a judge of ours: here, or in a process that is killed in time.

    python -m tests.policies.aryl.reclaim.exact_solver < problem.json

A time limit of the solver alone does not hold: on jobs that are spread over many nodes it has run
tens of seconds past it. So whoever needs an answer in time asks `solve_in_process`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import highspy
import msgspec
import numpy as np
from msgspec import Struct


class Exact(Struct, frozen=True, kw_only=True):
    """weight: of the best choice found. bound: no choice is below it. Equal when it is proven."""

    weight: int
    bound: int

    @property
    def is_proven(self) -> bool:
        """Whether the choice is the best there is."""
        return self.weight == self.bound


class Question(Struct, frozen=True, kw_only=True):
    """Base jobs of each node, what each job costs, nodes to empty, and seconds for the answer."""

    nodes: tuple[tuple[int, ...], ...]
    weights: tuple[int, ...]
    wanted: int
    limit_s: float


def solve(question: Question) -> Exact:
    """One column per job (stops) and per node (goes home), one row per pair of both.

    Minimise the weights of the jobs that stop; a node goes home only if each of its jobs stops, and
    as many do as are wanted.
    """
    nodes, weights = question.nodes, question.weights
    pairs = [(job, node) for node, held in enumerate(nodes) for job in held]
    first_node = len(weights)
    columns = first_node + len(nodes)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, len(pairs) + 1
    model.col_cost_ = np.array([*map(float, weights), *[0.0] * len(nodes)])
    model.col_lower_, model.col_upper_ = np.zeros(columns), np.ones(columns)
    model.row_lower_ = np.array([0.0] * len(pairs) + [float(question.wanted)])
    model.row_upper_ = np.full(len(pairs) + 1, highspy.kHighsInf)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array(
        [*range(0, 2 * len(pairs) + 1, 2), 2 * len(pairs) + len(nodes)]
    )
    model.a_matrix_.index_ = np.array(
        [column for job, node in pairs for column in (job, first_node + node)]
        + list(range(first_node, columns))
    )
    model.a_matrix_.value_ = np.array([1.0, -1.0] * len(pairs) + [1.0] * len(nodes))
    model.integrality_ = [highspy.HighsVarType.kInteger] * columns
    solver = highspy.Highs()  # type: ignore[no-untyped-call]  # it says nothing of its result
    solver.silent()
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("time_limit", question.limit_s)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.passModel(model)
    solver.run()
    info = solver.getInfo()
    if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
        return Exact(weight=sum(weights), bound=0)  # that all jobs stop is always a choice
    weight = round(info.objective_function_value)
    if solver.getModelStatus() == highspy.HighsModelStatus.kOptimal:
        return Exact(weight=weight, bound=weight)
    return Exact(weight=weight, bound=max(0, int(np.ceil(max(-1.0, info.mip_dual_bound) - 1e-6))))


def solve_in_process(question: Question, *, kill_after_s: float) -> Exact | None:
    """The same in a process of its own; None when it had to be killed."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.policies.aryl.reclaim.exact_solver"],
            input=msgspec.json.encode(question),
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[4],
            check=True,
            timeout=kill_after_s,
        )
    except subprocess.TimeoutExpired:
        return None
    return msgspec.json.decode(done.stdout, type=Exact)


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.buffer.write(msgspec.json.encode(solve(asked)))
