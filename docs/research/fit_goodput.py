"""Fits Pollux's throughput model to measured scaling curves and prints what `goodput.py` holds.

    .venv/bin/python docs/research/fit_goodput.py TRACES/elasticflow_scaling/throughputs_A100

Root mean squared error of logarithms with the paper's penalties (OSDI'21, section 4.1), by cyclic
search along each parameter from several starts. Must not know jobs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import ceil, log, sqrt
from pathlib import Path

from msgspec import structs

from coordinator.workloads.formats import read_all_curves
from coordinator.workloads.goodput import GoodputModel
from coordinator.workloads.records import ScalingCurve

GPUS_PER_NODE = 8
SEARCHED = (
    *("alpha_grad", "beta_grad", "alpha_local", "beta_local"),
    *("alpha_node", "beta_node", "gamma"),
)
LEAST = 1e-9
ROUNDS = 400


def error(model: GoodputModel, curves: Sequence[ScalingCurve]) -> float:
    """RMS of log(model / measured) over all points."""
    terms: list[float] = []
    for curve in curves:
        for gpus, rate in curve.points:
            nodes = ceil(gpus / GPUS_PER_NODE)
            took_s = model.iteration_s(gpus, nodes, curve.batch_size / gpus)
            terms.append(log(took_s * rate) ** 2)
    return sqrt(sum(terms) / len(terms))


def penalized(model: GoodputModel, curves: Sequence[ScalingCurve]) -> float:
    """The paper's loss: prefers gamma near 1 and synchronization that hardly grows."""
    growth = sum(
        (beta / max(alpha, LEAST)) ** 2
        for alpha, beta in (
            (model.alpha_local, model.beta_local),
            (model.alpha_node, model.beta_node),
        )
    )
    return error(model, curves) + 1e-3 * (model.gamma - 1.0) ** 2 + 1e-2 * min(growth, 1e6)


def fit(curves: Sequence[ScalingCurve]) -> GoodputModel:
    """The best of several searches."""
    first = curves[0]
    one_s = 1.0 / dict(first.points)[first.points[0][0]]
    per_example = one_s * first.points[0][0] / first.batch_size
    largest = max(curve.batch_size for curve in curves)
    fewest = min(curve.points[0][0] for curve in curves)
    starts = [
        GoodputModel(
            alpha_grad=one_s * share,
            beta_grad=per_example * (1.0 - share),
            alpha_local=one_s * sync,
            beta_local=one_s * sync / 10,
            alpha_node=one_s * sync * 2,
            beta_node=one_s * sync / 50,
            gamma=2.0,
            base_batch=min(curve.batch_size for curve in curves),
            local_batch=ceil(largest / fewest),
        )
        for share in (0.01, 0.2)
        for sync in (0.01, 0.1)
    ]
    return min((_descend(start, curves) for start in starts), key=lambda m: penalized(m, curves))


def _descend(model: GoodputModel, curves: Sequence[ScalingCurve]) -> GoodputModel:
    """Each parameter in turn up or down by a factor that shrinks while nothing helps."""
    best, factor = penalized(model, curves), 2.0
    for _ in range(ROUNDS):
        before = best
        for name in SEARCHED:
            for by in (factor, 1.0 / factor):
                value = max(LEAST, getattr(model, name) * by)
                if name == "gamma":
                    value = min(10.0, max(1.0, value))
                tried: GoodputModel = structs.replace(model, **{name: value})
                found = penalized(tried, curves)
                if found < best:
                    model, best = tried, found
        if best == before:
            factor = 1.0 + (factor - 1.0) / 2.0
        if factor < 1.0001:
            break
    return model


def main(arguments: Sequence[str]) -> int:
    """Print one entry per model, with its error."""
    by_model: dict[str, list[ScalingCurve]] = {}
    for curve in read_all_curves(Path(arguments[0])).values():
        by_model.setdefault(curve.model, []).append(curve)
    for name, curves in sorted(by_model.items()):
        model = fit(curves)
        fields = ", ".join(
            f"{field}={getattr(model, field):.4g}" for field in GoodputModel.__struct_fields__
        )
        sys.stdout.write(f'    "{name}": GoodputModel({fields}),\n')
        sys.stdout.write(f"    # RMS log error {error(model, curves):.3f}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
