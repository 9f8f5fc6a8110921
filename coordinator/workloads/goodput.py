"""Goodput: how fast a job trains by GPUs, nodes and batch size, as Pollux models it. Pure.

Qiao et al., OSDI'21, section 3: throughput times statistical efficiency. The throughput models
below were fitted to measured curves (microsoft/elasticflow's A100 profiles) by
`docs/research/fit_goodput.py`; noise scales were not measured there, and are a stated
assumption. Must not know traces.
"""

from __future__ import annotations

from math import ceil, exp, log
from random import Random
from typing import NamedTuple

from msgspec import Struct

from common.model import WorkerRange
from coordinator.workloads.records import SpeedUp

BATCH_SIZES_TRIED = 50
NOISE_PER_BATCH = 10.0
"""Gradient noise scale over the base batch size, assumed: twice the batch is 11/12 as efficient."""
MAX_BATCH_FACTOR = 16
"""A tuned job goes up to this many times its base batch size."""
MAX_ACCUMULATION = 15


class GoodputModel(Struct, frozen=True, kw_only=True):
    """One model on one GPU type; times in seconds, batches in examples.

    alpha_grad, beta_grad: of a gradient: alpha + beta x examples on a GPU.
    alpha_local, beta_local: of a synchronization within a node: alpha + beta x (GPUs - 2).
    alpha_node, beta_node: of one over several nodes.
    gamma: how much of both overlaps: 1 nothing, 10 nearly all.
    base_batch: global batch size that its hyper-parameters are for (M0).
    local_batch: most examples that fit a GPU at once.
    """

    alpha_grad: float
    beta_grad: float
    alpha_local: float
    beta_local: float
    alpha_node: float
    beta_node: float
    gamma: float
    base_batch: int
    local_batch: int

    def iteration_s(
        self, gpus: int, nodes: int, local_batch: float, accumulations: int = 0
    ) -> float:
        """Time of one step: `accumulations` gradients more than one before each synchronization."""
        gradient_s = self.alpha_grad + self.beta_grad * local_batch
        if gpus <= 1:
            sync_s = 0.0
        elif nodes <= 1:
            sync_s = self.alpha_local + self.beta_local * (gpus - 2)
        else:
            sync_s = self.alpha_node + self.beta_node * (gpus - 2)
        both_s: float = (gradient_s**self.gamma + sync_s**self.gamma) ** (1.0 / self.gamma)
        return accumulations * gradient_s + both_s

    def efficiency(self, batch: float) -> float:
        """Progress per example at a global batch size, over that at the base one (section 3.1)."""
        noise = NOISE_PER_BATCH * self.base_batch
        return (noise + self.base_batch) / (noise + batch)

    def at(self, gpus: int, nodes: int, batch: float) -> Goodput:
        """Goodput with a given global batch, accumulated where it does not fit at once."""
        accumulations = max(0, ceil(batch / (gpus * self.local_batch)) - 1)
        local = batch / (gpus * (accumulations + 1))
        rate = batch / self.iteration_s(gpus, nodes, local, accumulations)
        return Goodput(rate * self.efficiency(batch), batch)

    def fixed(self, gpus: int, nodes: int) -> Goodput:
        """With the base batch size, whatever the GPUs."""
        return self.at(gpus, nodes, self.base_batch)

    def tuned(self, gpus: int, nodes: int) -> Goodput:
        """With the best batch size of about fifty between the base one and the largest."""
        most = min(
            self.base_batch * MAX_BATCH_FACTOR, gpus * self.local_batch * (MAX_ACCUMULATION + 1)
        )
        span = log(max(1.0, most / self.base_batch))
        steps = range(BATCH_SIZES_TRIED)
        sizes = (self.base_batch * exp(span * step / (BATCH_SIZES_TRIED - 1)) for step in steps)
        return max(self.at(gpus, nodes, size) for size in sizes)


class Goodput(NamedTuple):
    """Examples a second that count, and the global batch size that gives them."""

    per_s: float
    batch: float


FITTED: dict[str, GoodputModel] = {
    "bert": GoodputModel(
        alpha_grad=0.04532,
        beta_grad=0.001861,
        alpha_local=0.06034,
        beta_local=0.001868,
        alpha_node=0.06908,
        beta_node=0.0004673,
        gamma=2.221,
        base_batch=64,
        local_batch=128,
    ),  # 0.014
    "deepspeech2": GoodputModel(
        alpha_grad=0.02973,
        beta_grad=0.009231,
        alpha_local=0.01533,
        beta_local=0.003151,
        alpha_node=0.03212,
        beta_node=1.87e-06,
        gamma=1,
        base_batch=32,
        local_batch=64,
    ),  # 0.034
    "gpt2": GoodputModel(
        alpha_grad=0.02282,
        beta_grad=0.000884,
        alpha_local=0.02141,
        beta_local=0.001825,
        alpha_node=0.03099,
        beta_node=0.0003484,
        gamma=1.64,
        base_batch=128,
        local_batch=256,
    ),  # 0.018
    "inception3": GoodputModel(
        alpha_grad=0.02652,
        beta_grad=0.002839,
        alpha_local=0.033,
        beta_local=0.0031,
        alpha_node=0.0552,
        beta_node=0.0002427,
        gamma=1.764,
        base_batch=64,
        local_batch=128,
    ),  # 0.014
    "resnet50": GoodputModel(
        alpha_grad=0.008805,
        beta_grad=0.002122,
        alpha_local=0.01467,
        beta_local=0.002023,
        alpha_node=0.03093,
        beta_node=0.000158,
        gamma=1.208,
        base_batch=64,
        local_batch=256,
    ),  # 0.024
    "vgg16": GoodputModel(
        alpha_grad=0.003626,
        beta_grad=0.003032,
        alpha_local=0.01093,
        beta_local=0.00205,
        alpha_node=0.02346,
        beta_node=9.218e-05,
        gamma=1,
        base_batch=64,
        local_batch=256,
    ),  # 0.044
}
"""By model, on A100s in nodes of eight; beside each the root mean squared error of logarithms.

ResNet-50 on CIFAR-10 was measured on one node only, so that it has no model.
"""


def model_for(name: str, key: str) -> GoodputModel:
    """The fitted model of that name, however it is written; else one drawn by `key`."""
    plain = "".join(mark for mark in name.lower() if mark.isalnum())
    if plain in FITTED:
        return FITTED[plain]
    return FITTED[Random(key).choice(sorted(FITTED))]


def speedup_of(
    model: GoodputModel,
    workers: WorkerRange,
    gpus_per_worker: int,
    gpus_per_node: int,
    *,
    is_tuned: bool,
) -> SpeedUp:
    """Goodput by workers on as few nodes as they fit, relative to the base gang as submitted.

    A tuned job is faster than that also with its base gang where another batch size is better.
    """

    def nodes(gpus: int) -> int:
        return -(-gpus // gpus_per_node)

    base_gpus = workers.min * gpus_per_worker
    base = model.fixed(base_gpus, nodes(base_gpus)).per_s
    rates: list[float] = []
    for count in range(workers.min, workers.max + 1):
        gpus = count * gpus_per_worker
        goodput = (model.tuned if is_tuned else model.fixed)(gpus, nodes(gpus)).per_s
        rates.append(workers.min * goodput / base)
    return SpeedUp(min_workers=workers.min, rates=tuple(rates))
