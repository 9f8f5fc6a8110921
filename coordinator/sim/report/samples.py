"""Samples for plots over time: both pools' GPUs, lent nodes, the queue.

The engine counts what training holds (`series`). What inference serves follows from the load, so it
is integrated here from the load itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from msgspec import Struct

from common.model import Pool, ServiceName
from coordinator.policies.contract.snapshot import ServiceView, nodes_for
from coordinator.sim.inputs.loads import busy_nodes
from coordinator.sim.report.series import Point, Usage
from coordinator.sim.run.build import Stage
from coordinator.sim.run.cluster import NodeSpec
from coordinator.workloads.records import LoadSeries


class Sample(Struct, frozen=True, kw_only=True):
    """One point for plots: ratios and loads are means since the point before.

    training_gpu_ratio, on_loan_gpu_ratio: GPUs held over those there.
    serving_gpu_ratio: GPUs that serve, over all of the inference pool's, lent ones included.
    inference_gpu_ratio: those and what training holds on lent nodes, over the same.
    """

    at_s: float
    training_gpu_ratio: float
    on_loan_gpu_ratio: float
    lent_nodes: int
    lendable_nodes: int
    queue_jobs: int
    queue_gpus: int
    serving_gpu_ratio: float = 0.0
    inference_gpu_ratio: float = 0.0


class Serving:
    """GPU-seconds that a service's load keeps busy, the series again and again.

    Args:
        nodes: the service's own; a load beyond all of them keeps no more than them busy.
    """

    def __init__(self, load: LoadSeries, nodes: Sequence[NodeSpec]) -> None:
        count = len(nodes)
        gpus_per_node = sum(node.gpus for node in nodes) / count if count else 0.0
        self._step_s = load.step_s
        self._gpus = [
            min(count, busy_nodes(load, value, count)) * gpus_per_node for value in load.values
        ]
        self._before = list(accumulate((busy * load.step_s for busy in self._gpus), initial=0.0))

    def gpu_s(self, at_s: float) -> float:
        """In [0, at_s]; a step counts from its own instant on."""
        rounds, step, into_s = self._place(at_s)
        return rounds * self._before[-1] + self._before[step] + self._gpus[step] * into_s

    def gpus(self, at_s: float) -> float:
        """Busy at an instant."""
        return self._gpus[self._place(at_s)[1]]

    def _place(self, at_s: float) -> tuple[float, int, float]:
        """Rounds of the series before an instant, the step that it is in, and seconds into it."""
        rounds, rest_s = divmod(at_s, self._step_s * len(self._gpus))
        step = min(int(rest_s / self._step_s), len(self._gpus) - 1)
        return rounds, step, rest_s - step * self._step_s


def serving_of(stage: Stage) -> list[Serving]:
    """The load and the nodes of each service of a stage."""
    return [Serving(load, stage.nodes_of[ServiceName(load.name)]) for load in stage.loads]


def samples(stage: Stage, points: Sequence[Point]) -> tuple[Sample, ...]:
    """Means between the points of a run that is over.

    Of two points at one instant the later one counts; the first of all has no time before it, and
    shows the load of its instant.
    """
    services = serving_of(stage)
    views = {view.name: view for view in stage.sim.engine.snapshot().services}
    gpus = sum(spec.gpus for spec in stage.specs if spec.home_pool == Pool.INFERENCE)
    found: list[Sample] = []
    before, before_s, served_before = Usage(), 0.0, 0.0
    passed = [point for point, after in pairwise(points) if after.at_s > point.at_s]
    for point in (*passed, *points[-1:]):
        usage = point.usage
        held = usage.training_held_gpu_s - before.training_held_gpu_s
        lent = usage.on_loan_gpu_s - before.on_loan_gpu_s
        on_loan = usage.on_loan_held_gpu_s - before.on_loan_held_gpu_s
        served = sum(service.gpu_s(point.at_s) for service in services)
        serving, there = served - served_before, gpus * (point.at_s - before_s)
        if point.at_s == before_s:
            serving, there = sum(service.gpus(point.at_s) for service in services), gpus
        found.append(
            Sample(
                at_s=point.at_s,
                training_gpu_ratio=ratio(held, usage.training_gpu_s - before.training_gpu_s),
                on_loan_gpu_ratio=ratio(on_loan, lent),
                lent_nodes=point.lent_nodes,
                lendable_nodes=_lendable(stage, views, point.at_s),
                queue_jobs=point.queue_jobs,
                queue_gpus=point.queue_gpus,
                serving_gpu_ratio=ratio(serving, there),
                inference_gpu_ratio=ratio(serving + on_loan, there),
            )
        )
        before, before_s, served_before = usage, point.at_s, served
    return tuple(found)


def _lendable(stage: Stage, views: Mapping[ServiceName, ServiceView], at_s: float) -> int:
    """Nodes that the load of this instant leaves over, headroom and least kept."""
    spare = 0
    for load in stage.loads:
        name = ServiceName(load.name)
        count = len(stage.nodes_of[name])
        if name in views:
            value = load.values[int(at_s / load.step_s) % len(load.values)]
            spare += count - nodes_for(views[name], busy_nodes(load, value, count), count)
    return spare


def ratio(part: float, whole: float) -> float:
    """A part of a whole; 0 of nothing."""
    return part / whole if whole else 0.0
