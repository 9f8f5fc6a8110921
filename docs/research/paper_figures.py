"""What the paper and public simulators print, by our row names. Data only; measures nothing.

Lyra, "Elastic Scheduling for Deep Learning Clusters", EuroSys'23 (Aryl in its preprint), and the
output of Tiresias' and Alibaba PAI's simulators on the ITP traces of microsoft/elasticflow-traces.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

FIGURES_5 = (
    ("queueing_s.mean", "queueing mean", "s"),
    ("queueing_s.p50", "queueing p50", "s"),
    ("queueing_s.p95", "queueing p95", "s"),
    ("jct_s.mean", "JCT mean", "s"),
    ("jct_s.p50", "JCT p50", "s"),
    ("jct_s.p95", "JCT p95", "s"),
    ("training_gpu_ratio", "training use", "%"),
    ("overall_gpu_ratio", "overall use", "%"),
    ("preemption_ratio", "preempted", "%"),
)
"""Table 5: figure, heading, unit; preempted is preemptions over submissions."""

TABLE_5: dict[str, tuple[float, ...]] = {
    "baseline": (3072, 55, 8357, 16610, 791, 82933, 0.72, 0.52, 0.0),
    "basic": (2010, 26, 3358, 11236, 568, 56477, 0.86, 0.65, 0.1224),
    "advanced": (1835, 24, 3238, 10434, 525, 56553, 0.86, 0.68, 0.0735),
    "heterogeneous": (1944, 27, 3574, 12113, 604, 57392, 0.78, 0.64, 0.1123),
    "ideal": (1157, 22, 3204, 8891, 422, 41146, 0.93, 0.72, 0.0572),
    "loan-opportunistic": (2788, 22, 5256, 14828, 744, 67843, 0.74, 0.63, 0.1935),
    "loan-random": (2901, 23, 5478, 14678, 731, 62923, 0.76, 0.64, 0.2089),
    "loan-scf": (2783, 24, 4994, 14923, 695, 62456, 0.76, 0.64, 0.1748),
    "loan-aryl": (2212, 23, 3427, 12947, 662, 57987, 0.76, 0.65, 0.1494),
    "elastic-gandiva": (3035, 49, 6632, 15912, 755, 80567, 0.79),
    "elastic-afs": (2284, 47, 3488, 15045, 686, 60883, 0.95),
    "elastic-pollux": (2791, 58, 5883, 14534, 721, 72123, 0.93),
    "elastic-aryl": (2275, 47, 3475, 12048, 602, 57597, 0.92),
    "elastic-tuned": (2054, 43, 2749, 10229, 564, 52458, 0.91),
}
"""Elastic rows print no overall use and no preemptions."""

FIGURES_6 = (
    ("queueing_s.mean", "queueing mean", "s"),
    ("jct_s.mean", "JCT mean", "s"),
    ("preemption_ratio", "preempted", "%"),
)
TABLE_6: dict[str, tuple[float, ...]] = {
    "naive-basic": (2231, 13872, 0.1322),
    "naive-advanced": (1944, 12474, 0.1004),
    "naive-ideal": (1273, 9982, 0.1093),
}

FIGURES_7 = (
    ("queueing_s.mean", "queueing mean", "s"),
    ("queueing_s.p50", "queueing p50", "s"),
    ("queueing_s.p95", "queueing p95", "s"),
    ("jct_s.mean", "JCT mean", "s"),
    ("jct_s.p50", "JCT p50", "s"),
    ("jct_s.p95", "JCT p95", "s"),
)
TABLE_7: dict[str, tuple[float, ...]] = {
    "before": (4573, 1283, 23351, 11547, 2122, 60170),
    "loan-aryl": (1119, 274, 7256, 6887, 1373, 35776),
}
"""Jobs that ran on lent nodes: under Baseline (`before`), and under Aryl."""

FIGURES_8 = (
    ("queueing_s.p50", "queueing p50", "s"),
    ("queueing_s.p75", "queueing p75", "s"),
    ("queueing_s.p95", "queueing p95", "s"),
    ("queueing_s.p99", "queueing p99", "s"),
    ("jct_s.p50", "JCT p50", "s"),
    ("jct_s.p75", "JCT p75", "s"),
    ("jct_s.p95", "JCT p95", "s"),
    ("jct_s.p99", "JCT p99", "s"),
)
TABLE_8: dict[str, tuple[float, ...]] = {
    "baseline": (55, 1892, 8357, 14323, 791, 29163, 82933, 376513),
    "elastic-gandiva": (49, 1764, 6632, 11806, 755, 27244, 80567, 323626),
    "elastic-afs": (47, 772, 3488, 9031, 686, 20143, 60883, 247435),
    "elastic-pollux": (58, 1297, 5883, 11124, 721, 12304, 72123, 323513),
    "elastic-aryl": (47, 697, 3475, 8731, 602, 12072, 57597, 223815),
    "elastic-tuned": (43, 566, 2749, 7112, 564, 9293, 52458, 194391),
}
"""In print the rows of AFS and Pollux stand in each other's place; here as in Table 5."""

FIGURES_9 = (("queueing gain", "queueing gain", "x"), ("JCT gain", "JCT gain", "x"))
TABLE_9: dict[str, tuple[float, ...]] = {
    "wrong-20": (2.21, 1.52),
    "wrong-40": (2.17, 1.49),
    "wrong-60": (1.76, 1.38),
}
"""Mean of Baseline over mean of the row."""

FIGURES_10 = (
    ("preemption_ratio", "preempted", "%"),
    ("reclaim.collateral_ratio", "collateral damage", "%"),
)
FIGURE_10: dict[str, tuple[float, ...]] = {
    "loan-random": (0.200, 0.220),
    "loan-scf": (0.176, 0.184),
    "loan-aryl": (0.120, 0.134),
    "basic-random": (0.186, 0.160),
    "basic-scf": (0.150, 0.182),
    "basic": (0.088, 0.060),
}
"""Bars, digitized to about 0.003. Its preemption ratio is per running job, ours per submission."""


FIGURE_12: dict[str, tuple[float, ...]] = {
    "bootstrap-basic": (1.45, 1.44),
    "bootstrap-ideal": (2.47, 1.78),
}
"""Gains over Baseline, means of ten traces of ten days, as the text has them."""

FIGURE_12_DRAWS: dict[str, tuple[float, ...]] = {
    "bootstrap-basic": (1.38, 1.44, 1.47, 1.54, 1.34, 1.45, 1.48, 1.52, 1.54, 1.37),
    "bootstrap-ideal": (2.27, 2.52, 2.57, 2.68, 2.24, 2.52, 2.48, 2.52, 2.49, 2.42),
}
"""Its queueing gains by trace, digitized."""


class Published(Struct, frozen=True, kw_only=True):
    """What another simulator printed on a public trace, and the time that it took.

    makespan_s: PAI's are counted from 1.
    tolerance: how far off ours may be, as a part, where what theirs ran is not wholly in the trace.
    has_our_rules: our run leaves a known fault of that simulator out, so that figures differ.
    """

    simulator: str
    policy: str
    jct_s: float
    queueing_s: float | None = None
    makespan_s: float | None = None
    preemptions: int | None = None
    time: str = ""
    has_our_rules: bool = False
    tolerance: float = 1e-3


_GOLDEN: dict[str, Published] = {
    "golden-cluster01-fifo": Published(
        simulator="Tiresias", policy="fifo", jct_s=144176.149, time="2.2 s wall"
    ),
    "golden-cluster01-srsf": Published(
        simulator="Tiresias", policy="shortest-gpu", jct_s=22159.126, time="5.8 s wall"
    ),
    "golden-cluster06-fifo": Published(simulator="Tiresias", policy="fifo", jct_s=81210.788),
    "golden-cluster06-srsf": Published(
        simulator="Tiresias", policy="shortest-gpu", jct_s=29251.870
    ),
    "golden-cluster01-yarn": Published(
        simulator="Tiresias", policy="fifo", jct_s=144176.149, time="2.2 s wall"
    ),
    "golden-cluster06-yarn": Published(simulator="Tiresias", policy="fifo", jct_s=81210.788),
    "golden-cluster02-fifo": Published(
        simulator="Tiresias", policy="fifo", jct_s=174038.211, time="46.8 s wall"
    ),
    "golden-cluster02-fifo-skip": Published(
        simulator="PAI",
        policy="FIFO, which skips",
        jct_s=49377.09,
        queueing_s=26407.54,
        makespan_s=5263038,
        time="58 s wall",
    ),
    "golden-cluster02-sjf": Published(
        simulator="PAI",
        policy="SJF",
        jct_s=35624.69,
        queueing_s=12655.15,
        makespan_s=5310316,
        time="64 s wall",
    ),
    "golden-cluster04-srsf": Published(
        simulator="Tiresias",
        policy="shortest-gpu",
        jct_s=20368.879,
        queueing_s=386.816,
        makespan_s=5175866,
        preemptions=1429,
        time="156 s CPU",
    ),
    "golden-cluster01-tiresias": Published(
        simulator="Tiresias",
        policy="dlas-gpu",
        jct_s=29812.344,
        time="3.2 s wall",
    ),
    "golden-cluster06-tiresias": Published(
        simulator="Tiresias",
        policy="dlas-gpu",
        jct_s=38548.362,
    ),
    "golden-cluster02-tiresias": Published(
        simulator="Tiresias",
        policy="dlas-gpu",
        jct_s=26896.731,
        time="24.3 s wall",
    ),
    "golden-cluster04-tiresias": Published(
        simulator="Tiresias",
        policy="dlas-gpu",
        jct_s=21363.479,
        queueing_s=1381.416,
        makespan_s=5175866,
        preemptions=6712,
        time="161 s CPU",
    ),
    "golden-shockwave120-las": Published(
        simulator="Shockwave's artefact",
        policy="max_min_fairness",
        jct_s=11274.117,
        makespan_s=33207.663,
        time="2.9 to 5.6 s CPU",
        tolerance=0.05,
    ),
    "golden-shockwave120-themis-lp": Published(
        simulator="Shockwave's artefact",
        policy="finish_time_fairness",
        jct_s=11301.977,
        makespan_s=31928.739,
        tolerance=0.05,
    ),
}


def _golden() -> Iterator[tuple[str, Published]]:
    """Every row; behind Tiresias' own the same beside our run without that simulator's fault."""
    for name, row in _GOLDEN.items():
        yield name, row
        if name.endswith("-tiresias"):
            policy = f"{row.policy}; ours without its late crossings"
            yield f"{name}-exact", structs.replace(row, policy=policy, has_our_rules=True)


GOLDEN: dict[str, Published] = dict(_golden())
"""Run on one machine with two cores, which was busy: wall times are upper bounds."""
