"""The paper's training cluster as a generator: parameters and a seed in, one trace out.

Values that the paper (Lyra, EuroSys'23) gives are constants here with their section. Others are
fields of `PaperParameters`, fitted to its FIFO row only: docs/workload-paper.md has the fit, what
resists, and why.

Four rules keep seeds similar: running times are stratified (one draw in each of n equal parts of
the distribution), sizes come in exact counts, offered GPU-seconds are pinned, and jobs alike in
GPU-seconds are dealt evenly over the trace. Chance is `random.Random(seed)` alone, drawn in one
fixed order; times are whole seconds, so that the last bits of a logarithm cannot show.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct, structs
from numpy.typing import NDArray

from common.model import Pool
from coordinator.workloads.chance import (
    Chance,
    Floats,
    Ints,
    at_rate,
    dealt,
    exact_sizes,
    normal_quantile,
    tilted,
    wander,
    weights_for_mean,
)
from coordinator.workloads.records import NodeGroup

DAY_S = 86_400.0
LENGTH_S = 15 * DAY_S
JOBS = 50_390
NODES = 443
INFERENCE_NODES = 520
GPUS_PER_NODE = 8
TRAINING_GPUS = NODES * GPUS_PER_NODE
"""Section 7.1: 15 days, 50,390 jobs, 3,544 training GPUs; section 1: 4,160 inference GPUs."""

MEAN_RUNTIME_S = 16_610.0 - 3_072.0
"""Table 5, Baseline: mean JCT less mean queueing."""

ELASTIC_SHARE = 0.05
ELASTIC_GPU_TIME_SHARE = 0.36
ELASTIC_MEAN_S = 14.2 * 3600.0
"""Section 2.2: about 5 % of the jobs hold 36 % of the resources and run 14.2 h on average."""

FUNGIBLE_SHARE = 0.21
"""Section 2.1."""

TRAINING_GPU = "V100"
RARE_GPU = "V100-32GB"
INFERENCE_GPU = "T4"
"""Section 2.1: *mainly* V100 and T4; the rare type is ours, the cause of the long tail."""

SIZES = np.array([1, 2, 4, 8, 16, 32, 64], dtype=np.int64)
SIZE_WEIGHTS = np.array([0.47, 0.13, 0.13, 0.20, 0.045, 0.02, 0.005])
"""GPUs per job: the paper has no distribution; public traces are near to these weights."""

ELASTIC_SIZES = np.array([4, 8, 16, 32], dtype=np.int64)
ELASTIC_WEIGHTS = np.array([0.2, 0.5, 0.25, 0.05])
ELASTIC_SIGMA = 0.7
"""Base GPUs of elastic jobs before the tilt that gives them their 36 %, and the spread of their
running times; ours. Twice as long jobs (`is_elastic_at_base`) are half as wide for the same time.
"""
GANG_STEP_GPUS = 64
EARLY_S = 2 * 3600.0
BETWEEN_S = 20.0
"""Mean time between the jobs of a batch."""

MOST_SECONDS = 1e8
SHORTEST_S = 20.0
"""No job runs shorter: where the short mode begins."""
SHARE_95 = 0.95

Sigma = Annotated[float, Meta(ge=0, le=10)]
Runs = Annotated[float, Meta(ge=SHORTEST_S, le=MOST_SECONDS)]
Some = Annotated[int, Meta(ge=0, le=JOBS)]


class PaperParameters(Struct, frozen=True, kw_only=True):
    """What the paper leaves open.

    load: offered GPU-seconds over what the training GPUs have in the 15 days.
    elastic_ratio: w_max over w_min of elastic jobs.
    is_elastic_at_base: whether 14.2 h is at w_min; else at w_max, the running time that the paper
        calls minimum. The fit is of the first reading.
    rate_sigma, long_sigma, rate_tau_h: the arrival rate is exp(sigma * z), z an hourly AR(1) of
        that memory; one sigma for short jobs, one for long ones.
    batch: mean number of short jobs that come together.
    initial: how full the cluster is when the trace begins: long jobs that a cluster at work would
        be running come in the first two hours; 0.5 is as in the long run, 0 is empty.
    short_share, short_s: this share of the jobs runs shorter than that.
    long_s, q95_s, q99_s, longest_s: running times where the long mode begins, at two quantiles, and
        at the end; between them x(u) = lo * (hi / lo) ** (v ** c), c set by the mean.
    short_tilt: sizes of short jobs are weighted by size ** -tilt.
    gangs, gang_gpus, gang_sigma, gang_s: short-lived large gangs: how many, their lognormal median
        and sigma in GPUs, their mean running time.
    rare_jobs, rare_nodes, rare_load: jobs of one node each that accept only the rare type, how many
        nodes have it, and their demand over its capacity; no rare_jobs: a cluster without the tail.
    pass_period_s: the scheduler passes at multiples of this only; whole seconds, as all times.
    """

    load: Annotated[float, Meta(gt=0, le=10)] = 0.775
    elastic_ratio: Annotated[int, Meta(ge=1, le=1024)] = 2
    is_elastic_at_base: bool = True
    rate_sigma: Sigma = 0.2
    long_sigma: Sigma = 0.03
    rate_tau_h: Annotated[float, Meta(ge=0.01, le=1e6)] = 5.2
    batch: Annotated[float, Meta(ge=1, le=JOBS)] = 5.0
    initial: Annotated[float, Meta(ge=0, le=2)] = 0.53
    short_share: Annotated[float, Meta(gt=0, lt=SHARE_95)] = 0.76
    short_s: Runs = 800.0
    long_s: Runs = 20_600.0
    q95_s: Runs = 82_000.0
    q99_s: Runs = 253_000.0
    longest_s: Runs = 600_000.0
    short_tilt: Annotated[float, Meta(ge=-10, le=10)] = 0.0
    gangs: Some = 115
    gang_gpus: Annotated[float, Meta(ge=1, le=TRAINING_GPUS)] = 755.0
    gang_sigma: Sigma = 0.14
    gang_s: Annotated[float, Meta(ge=0, le=MOST_SECONDS)] = 190.0
    rare_jobs: Some = 504
    rare_nodes: Annotated[int, Meta(ge=0, lt=NODES)] = 3
    rare_load: Annotated[float, Meta(ge=0, le=100)] = 1.22
    pass_period_s: Annotated[int, Meta(ge=1, le=int(DAY_S))] = 82


def check(parameters: PaperParameters) -> None:
    """Check parameters against each other; the type of each one limits it alone.

    Raises:
        ValueError: running times that do not rise, rare jobs without a node for them, or no jobs
            left beside the rare ones and the gangs.
    """
    p = parameters
    for low, high in pairwise(("short_s", "long_s", "q95_s", "q99_s", "longest_s")):
        low_s, high_s = getattr(p, low), getattr(p, high)
        if low_s > high_s:
            raise ValueError(f"{low}: {low_s:g}, expected at most {high}, which is {high_s:g}")
    if p.rare_jobs and not p.rare_nodes:
        raise ValueError(f"rare_nodes: 0, expected one or more for {p.rare_jobs} rare_jobs")
    most = JOBS - round(ELASTIC_SHARE * JOBS) - 1
    if p.rare_jobs + p.gangs > most:
        raise ValueError(
            f"rare_jobs and gangs: {p.rare_jobs + p.gangs} jobs, expected at most {most} together"
        )


def with_fastest_reading(elastic_ratio: int) -> PaperParameters:
    """14.2 h read as running time at w_max; the base then takes `elastic_ratio` times as long.

    Elastic jobs alone make up the longest 5 %, so others are shorter for the same mean. Not fitted.
    """
    return structs.replace(
        PaperParameters(),
        elastic_ratio=elastic_ratio,
        is_elastic_at_base=False,
        long_s=6_000.0 if elastic_ratio > 2 else 12_000.0,
        q95_s=30_000.0,
        q99_s=60_000.0,
        longest_s=200_000.0,
    )


class Drawn(Struct, frozen=True, kw_only=True):
    """A trace as columns, in order of submission.

    gpus: base demand; size: GPUs per worker; is_rare: accepts only the rare type; is_initial: would
    be running when the trace begins, see `PaperParameters.initial`.
    """

    submit_s: Floats
    duration_s: Floats
    gpus: Ints
    size: Ints
    is_elastic: NDArray[np.bool_]
    is_rare: NDArray[np.bool_]
    is_initial: NDArray[np.bool_]


def nodes(parameters: PaperParameters) -> tuple[NodeGroup, ...]:
    """443 training nodes, the rare ones among them, and 520 inference nodes."""
    groups = (
        NodeGroup(count=NODES - parameters.rare_nodes, gpus=GPUS_PER_NODE, gpu_type=TRAINING_GPU),
        NodeGroup(count=parameters.rare_nodes, gpus=GPUS_PER_NODE, gpu_type=RARE_GPU),
        NodeGroup(
            count=INFERENCE_NODES,
            gpus=GPUS_PER_NODE,
            gpu_type=INFERENCE_GPU,
            home_pool=Pool.INFERENCE,
        ),
    )
    return tuple(group for group in groups if group.count)


def draw(parameters: PaperParameters, seed: int, *, jobs: int = JOBS) -> Drawn:
    """One trace. The same arguments give the same columns on every machine.

    jobs: fewer make a thinner trace of the same length; tests do.

    Raises:
        ValueError: as `check`, or parameters that no trace can have, for example a mean below the
            shortest mix.
    """
    check(parameters)
    chance = Chance(seed)
    part = jobs / JOBS
    rare_count = round(parameters.rare_jobs * part)
    gang_count = round(parameters.gangs * part)
    elastic_count = round(ELASTIC_SHARE * jobs)
    rest_count = jobs - rare_count - gang_count - elastic_count

    rare = _rare(parameters, chance, rare_count)
    gangs = _gangs(parameters, chance, gang_count)
    budget_s = MEAN_RUNTIME_S * jobs - rare.duration_s.sum() - gangs.duration_s.sum()
    total_gpu_s = parameters.load * TRAINING_GPUS * LENGTH_S * part
    elastic = _elastic(parameters, chance, elastic_count, ELASTIC_GPU_TIME_SHARE * total_gpu_s)
    budget_s -= elastic.duration_s.sum()
    rest_gpu_s = total_gpu_s - sum(
        float((some.duration_s * some.gpus).sum()) for some in (rare, gangs, elastic)
    )
    rest = _rest(parameters, chance, rest_count, budget_s / rest_count, rest_gpu_s)
    body = _joined(elastic, rest)
    body = _submitted(parameters, chance, body)
    return _sorted(_joined(_joined(rare, gangs), body))


# --- when -----------------------------------------------------------------------------------------


def _submitted(parameters: PaperParameters, chance: Chance, body: Drawn) -> Drawn:
    """Long jobs evenly over the trace, jobs alike in GPU-seconds each; short ones in bursts.

    A cluster's load is its long jobs: were they to come in bursts, one seed's luck with a few
    hundred jobs would decide its queue. Both follow the same wandering rate, each as much as its
    sigma says.
    """
    hours = int(LENGTH_S // 3600)
    z = wander(chance, hours, parameters.rate_tau_h)
    is_long = body.duration_s >= parameters.long_s
    submit_s = np.empty(len(body.gpus))
    place = dealt(chance, (body.duration_s * body.gpus)[is_long])
    submit_s[is_long] = at_rate(place, parameters.long_sigma * z, LENGTH_S)
    # Of the jobs that run for D, D / LENGTH would be at work at the start, with half of D left.
    early = parameters.initial * body.duration_s / LENGTH_S
    is_early = is_long & (chance.uniform(len(submit_s)) < early)
    submit_s[is_early] = EARLY_S * chance.uniform(int(is_early.sum()))
    short = np.flatnonzero(~is_long)
    instants = _bursts(parameters, chance, len(short), parameters.rate_sigma * z)
    submit_s[short[np.argsort(dealt(chance, body.gpus[short]), kind="stable")]] = instants
    return structs.replace(body, submit_s=submit_s, is_initial=is_early)


def _bursts(parameters: PaperParameters, chance: Chance, count: int, log_rate: Floats) -> Floats:
    """Instants in order: batches of geometric size come at the rate, some seconds between jobs."""
    another = 1.0 - 1.0 / parameters.batch
    sizes = np.ones(count, dtype=np.int64)
    if another > 0.0:
        sizes += np.floor(np.log1p(-chance.uniform(count)) / np.log(another)).astype(np.int64)
    sizes = sizes[: np.searchsorted(np.cumsum(sizes), count) + 1]  # no more than there are jobs
    batch_of = np.repeat(np.arange(len(sizes)), sizes)[:count]
    starts = at_rate(chance.strata(int(batch_of[-1]) + 1 if count else 0), log_rate, LENGTH_S)
    within = np.cumsum(-BETWEEN_S * np.log1p(-chance.uniform(count)))
    first = np.searchsorted(batch_of, batch_of)
    return np.sort(np.minimum(starts[batch_of] + within - within[first], LENGTH_S - 1.0))


# --- what -----------------------------------------------------------------------------------------


def _rare(parameters: PaperParameters, chance: Chance, count: int) -> Drawn:
    """A line of its own, longer than its nodes can serve, of jobs so alike that no order helps."""
    submit_s = chance.strata(count) * LENGTH_S
    mean_s = parameters.rare_load * parameters.rare_nodes * LENGTH_S / max(1, parameters.rare_jobs)
    duration_s = mean_s * (0.9 + 0.2 * chance.shuffled(chance.strata(count)))
    gpus = np.full(count, GPUS_PER_NODE, dtype=np.int64)
    return _drawn(submit_s, duration_s, gpus, gpus, is_rare=True)


def _gangs(parameters: PaperParameters, chance: Chance, count: int) -> Drawn:
    """Large gangs of whole nodes that soon end; at the head of a strict line they hold all up."""
    submit_s = chance.strata(count) * LENGTH_S
    z = normal_quantile(chance.shuffled(chance.strata(count)))
    asked = parameters.gang_gpus * np.exp(parameters.gang_sigma * z)
    most = (NODES - parameters.rare_nodes) * GPUS_PER_NODE // GANG_STEP_GPUS * GANG_STEP_GPUS
    steps = np.rint(asked / GANG_STEP_GPUS).astype(np.int64)
    gpus = np.clip(steps * GANG_STEP_GPUS, GANG_STEP_GPUS, most)
    duration_s = 60.0 - parameters.gang_s * np.log1p(-chance.shuffled(chance.strata(count)))
    return _drawn(submit_s, duration_s, gpus, np.full(count, GPUS_PER_NODE, dtype=np.int64))


def _elastic(parameters: PaperParameters, chance: Chance, count: int, gpu_s: float) -> Drawn:
    """Lognormal running times of the stated mean; sizes weighted so that they hold `gpu_s`."""
    z = normal_quantile(chance.strata(count))
    duration_s = np.exp(ELASTIC_SIGMA * z)
    duration_s *= ELASTIC_MEAN_S / duration_s.mean()
    if not parameters.is_elastic_at_base:
        duration_s *= parameters.elastic_ratio
    sizes = ELASTIC_SIZES if parameters.is_elastic_at_base else ELASTIC_SIZES // 2
    weights = weights_for_mean(sizes, ELASTIC_WEIGHTS, gpu_s / float(duration_s.sum()))
    gpus = exact_sizes(chance, sizes, weights, count)
    duration_s *= gpu_s / float((duration_s * gpus).sum())
    size = np.where(gpus <= GPUS_PER_NODE, 2, 4).astype(np.int64)
    return _drawn(np.zeros(count), duration_s, gpus, size, is_elastic=True)


def _rest(
    parameters: PaperParameters, chance: Chance, count: int, mean_s: float, gpu_s: float
) -> Drawn:
    """All others: two modes of running time; the sizes of the long mode make up the load."""
    share = chance.strata(count)
    duration_s = _runtimes(parameters, share, mean_s)
    is_long = share >= parameters.short_share
    gpus = np.empty(count, dtype=np.int64)
    short_weights = tilted(SIZES, SIZE_WEIGHTS, -parameters.short_tilt)
    gpus[~is_long] = exact_sizes(chance, SIZES, short_weights, int((~is_long).sum()))
    long_gpu_s = gpu_s - float((duration_s * gpus)[~is_long].sum())
    long_s = float(duration_s[is_long].sum())
    weights = weights_for_mean(SIZES, SIZE_WEIGHTS, long_gpu_s / long_s)
    gpus[is_long] = exact_sizes(chance, SIZES, weights, int(is_long.sum()))
    # The rest of the load that exact counts leave: some thousandths, taken from running times.
    duration_s[is_long] *= long_gpu_s / float((duration_s * gpus)[is_long].sum())
    return _drawn(np.zeros(count), duration_s, gpus, np.minimum(gpus, GPUS_PER_NODE))


def _runtimes(parameters: PaperParameters, share: Floats, mean_s: float) -> Floats:
    """The quantile function, with the exponent that gives the mean."""
    low, high = 0.2, 20.0
    for _ in range(50):
        middle = (low + high) / 2.0
        # A larger exponent keeps more jobs at the lower end of each part.
        is_above = _quantile(parameters, share, middle).mean() > mean_s
        low, high = (middle, high) if is_above else (low, middle)
    found: Floats = _quantile(parameters, share, low)
    if abs(found.mean() - mean_s) > 0.01 * mean_s:
        raise ValueError(
            f"short_share, short_s .. longest_s: a mean of {found.mean():.0f} s at the nearest, "
            f"expected {mean_s:.0f} s of all jobs but elastic and rare ones and gangs"
        )
    return found


def _quantile(parameters: PaperParameters, share: Floats, exponent: float) -> Floats:
    p = parameters
    anchors = [(p.short_share, p.long_s), (SHARE_95, p.q95_s), (0.99, p.q99_s), (1.0, p.longest_s)]
    of_short = np.minimum(share, p.short_share) / p.short_share  # the others come below
    out: Floats = SHORTEST_S * (p.short_s / SHORTEST_S) ** of_short
    for (low_u, low_s), (high_u, high_s) in pairwise(anchors):
        inside = (share >= low_u) & (share < high_u)
        v = (share[inside] - low_u) / (high_u - low_u)
        out[inside] = low_s * (high_s / low_s) ** (v**exponent)
    return out


# --- columns --------------------------------------------------------------------------------------


def _drawn(
    submit_s: Floats,
    duration_s: Floats,
    gpus: Ints,
    size: Ints,
    *,
    is_elastic: bool = False,
    is_rare: bool = False,
) -> Drawn:
    return Drawn(
        submit_s=submit_s,
        duration_s=duration_s,
        gpus=gpus,
        size=size,
        is_elastic=np.full(len(gpus), is_elastic),
        is_rare=np.full(len(gpus), is_rare),
        is_initial=np.zeros(len(gpus), dtype=np.bool_),
    )


def _joined(one: Drawn, other: Drawn) -> Drawn:
    return Drawn(
        **{
            name: np.concatenate((getattr(one, name), getattr(other, name)))
            for name in Drawn.__struct_fields__
        }
    )


def _sorted(drawn: Drawn) -> Drawn:
    """In order of submission, all times in whole seconds."""
    order = np.argsort(drawn.submit_s, kind="stable")
    columns = {name: getattr(drawn, name)[order] for name in Drawn.__struct_fields__}
    columns["submit_s"] = np.floor(columns["submit_s"])
    columns["duration_s"] = np.maximum(1.0, np.rint(columns["duration_s"]))
    return Drawn(**columns)
