"""Writes docs/foresight.md from the runs that docs/research/play_foresight.py kept.

    ARYL_TRACES=... .venv/bin/python docs/research/foresight_page.py

The traces are read for their bounds alone. Must not know how a run is played. Figures are computed
here from what was kept; only sentences are typed, in `templates/foresight.md.j2`, and what they
claim of a figure is told by a figure beside.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from common.errors import ConfigError
from coordinator.sim.report.statistics import Estimate, estimate
from coordinator.sim.run.compare import with_gaps
from coordinator.sim.run.play import Run
from docs.research.foresight_bounds import least_of
from docs.research.foresight_pooled import least_queueing_s
from docs.research.pages import rendered
from docs.research.pages import table as _table
from docs.research.play_foresight import (
    CURVE,
    FIXED,
    REAL,
    WITH,
    WITHOUT,
    Kept,
    read_kept,
    workload_of,
)

PAGE = Path(__file__).parents[1] / "foresight.md"

POLICIES = ("sjf", "aryl", "foresight")
TITLES = {
    "paper": "`paper-1` to `paper-5`",
    "paper-overload": "`paper-overload`",
    "itp-cluster02": "ITP cluster02, a real trace",
    "itp-cluster03": "ITP cluster03, a real trace",
    "itp-cluster06": "ITP cluster06, a real trace",
}
FAMILY = re.compile(r"-(\d+)$")
OVERLOADED = ("paper-overload-1",)
ABLATED = tuple(f"itp-cluster06-{seed}" for seed in range(1, 6))

Figure = Callable[[Kept], float]
Runs = Mapping[tuple[str, str], Kept]
"""By workload and policy."""
Least = Callable[[Runs, str], tuple[float, float]]
"""(mean queueing, mean JCT) that no policy is below on a workload, in seconds."""

FIGURES: dict[str, Figure] = {
    "queueing": lambda run: run.result.queueing_s.mean,
    "body": lambda run: run.body.queueing_s,
    "queueing p95": lambda run: run.result.queueing_s.p95,
    "longest wait of the body, h": lambda run: run.body.largest_wait_s / 3600.0,
    "JCT": lambda run: run.result.jct_s.mean,
    "JCT p95": lambda run: run.result.jct_s.p95,
    "preemptions": lambda run: run.result.preemptions,
    "lost GPU-h": lambda run: run.result.lost_gpu_s / 3600.0,
    "reclaims": lambda run: run.result.reclaims,
    "late": lambda run: run.result.reclaims_late,
    "training use": lambda run: run.result.training_gpu_ratio,
}

ABSOLUTE = ("queueing", "body", "JCT", "preemptions", "lost GPU-h")
"""Figures of each policy by itself; `paired` has the differences of all."""

RHO: dict[str, Figure] = {
    "rho": lambda run: run.result.finish_time_fairness.mean,
    "rho p95": lambda run: run.result.finish_time_fairness.p95,
    "rho max": lambda run: run.result.finish_time_fairness.max,
    "share of rho above 1": lambda run: run.result.finish_time_fairness.share_above_1,
}
"""Finish-time fairness (coordinator/sim/report/fairness.py)."""

WORDS = {
    "rho p95": "the 95th percentile of rho",
    "rho max": "the highest rho",
    "share of rho above 1": "the share of apps that a private part would serve better",
}
"""Figures whose names say little, in a sentence."""

COMPARED = {
    name: FIGURES[name] for name in FIGURES if name not in ("reclaims", "training use")
} | RHO
"""Figures of which less is better."""


# --- what no policy can do better than ------------------------------------------------------------


def least(runs: Runs, workload: str) -> tuple[float, float]:
    """(mean queueing, mean JCT) that no policy is below on a workload, in seconds."""
    queueing_s = least_queueing_s(workload)
    jct_s = runs[workload, "aryl"].result.jct_bound_s
    if queueing_s is not None:
        return queueing_s, jct_s + queueing_s
    queueing_s, found_s = least_of(workload_of(workload))
    return queueing_s, max(found_s, jct_s + queueing_s)


# --- tables -------------------------------------------------------------------------------------


def family(workload: str) -> str:
    """A workload without its seed."""
    return FAMILY.sub("", workload)


def _shown(found: Estimate, digits: int = 0) -> str:
    if found.half_width is None:
        return f"{found.mean:,.{digits}f}"
    return f"{found.mean:,.{digits}f}±{found.half_width:,.{digits}f}"


def _digits(name: str) -> int:
    if name in RHO:
        return 4 if name.startswith("share") else 3
    return 3 if name == "training use" else 1 if name in ("preemptions", "body", "late") else 0


def _complete(runs: Runs, name: str) -> list[str]:
    """Workloads of a family that all three policies have played."""
    there = sorted({workload for workload, _ in runs if family(workload) == name})
    return [each for each in there if all((each, policy) in runs for policy in POLICIES)]


def _closed(runs: Runs, workload: str) -> dict[str, float]:
    """Per policy the share of the gap in mean JCT between sjf and the bound that it closes."""
    played = [Run(result=runs[workload, policy].result, rows=(), samples=()) for policy in POLICIES]
    ratios = [run.result.gap_closed_ratio for run in with_gaps(played)]
    found = zip(POLICIES, ratios, strict=True)
    return {policy: ratio for policy, ratio in found if ratio is not None}


def _absolute(runs: Runs, families: Mapping[str, Sequence[str]]) -> str:
    """Means over the seeds, policy by policy; `paired` has the intervals of the differences."""
    rows = [
        [name, *(_by_policy(runs, workloads, name) for workloads in families.values())]
        for name in ABSOLUTE
    ]
    closed: list[str] = []
    for workloads in families.values():
        gaps = [_closed(runs, w) for w in workloads]
        closed.append("/".join(f"{100 * fmean(gap[p] for gap in gaps):.1f}" for p in POLICIES))
    rows.append(["gap from sjf to the JCT bound closed, %", *closed])
    return _table(["/".join(POLICIES), *(f"`{name}`" for name in families)], rows)


def _by_policy(runs: Runs, workloads: Sequence[str], name: str) -> str:
    means = [fmean(FIGURES[name](runs[w, policy]) for w in workloads) for policy in POLICIES]
    return "/".join(f"{mean:,.{_digits(name)}f}" for mean in means)


def _ratio(
    runs: Runs, workloads: Sequence[str], figure: Figure, policy: str = "foresight"
) -> Estimate:
    return estimate(
        [figure(runs[w, "aryl"]) / max(1e-9, figure(runs[w, policy])) for w in workloads]
    )


def _against(runs: Runs, workloads: Sequence[str], bound: Least) -> str:
    """Aryl over foresight, trace by trace, and the most that is possible."""
    bounds = [bound(runs, w) for w in workloads]
    aryl = [runs[w, "aryl"].result for w in workloads]
    pairs = list(zip(aryl, bounds, strict=True))
    jct_most = _shown(estimate([run.jct_s.mean / s for run, (_, s) in pairs]), 3)
    queue_most = "no bound known"
    if all(s > 0.0 for s, _ in bounds):
        queue_most = _shown(estimate([run.queueing_s.mean / s for run, (s, _) in pairs]), 2)
    stopped = [sum(runs[w, p].result.preemptions for w in workloads) for p in POLICIES[1:]]
    share = f"{stopped[1]} of {stopped[0]}"
    if stopped[0]:
        share += f" ({stopped[1] / stopped[0]:.2f})"
    rows = [
        [
            "mean queueing",
            _shown(_ratio(runs, workloads, FIGURES["queueing"]), 2),
            queue_most,
            "1.3",
        ],
        ["body alone", _shown(_ratio(runs, workloads, FIGURES["body"]), 2), "-", ""],
        ["mean JCT", _shown(_ratio(runs, workloads, FIGURES["JCT"]), 3), jct_most, "1.05"],
        ["preemptions, foresight of aryl", share, "-", "0.25"],
    ]
    return _table(["aryl / foresight", "measured", "possible at most", "aim"], rows)


def _beside(runs: Runs, groups: Mapping[str, Sequence[str]], policies: Mapping[str, str]) -> str:
    """Per policy and group of workloads the means of what a choice between them rests on."""
    names = ("queueing", "JCT", "preemptions", "lost GPU-h")
    rows: list[list[str]] = []
    for name, policy in policies.items():
        cells: list[str] = []
        for workloads in groups.values():
            if not all((each, policy) in runs for each in workloads):
                cells.append("")
                continue
            means = [fmean(FIGURES[key](runs[each, policy]) for each in workloads) for key in names]
            cells.append("/".join(f"{mean:,.0f}" for mean in means))
        if any(cells):
            rows.append([name, *cells])
    return _table([f"{' / '.join(names)}", *(f"`{group}`" for group in groups)], rows)


def _difference(runs: Runs, workloads: Sequence[str], figure: Figure) -> Estimate:
    """Foresight less aryl, seed by seed; no interval where no seed differs from another."""
    return estimate([figure(runs[w, "foresight"]) - figure(runs[w, "aryl"]) for w in workloads])


def is_beyond(found: Estimate) -> bool:
    """Whether a difference is above nothing by more than its interval."""
    return found.half_width is not None and found.mean > found.half_width


def worse_rows(runs: Runs) -> list[tuple[str, str]]:
    """(figure, family) of what is worse than `aryl` beyond chance."""
    return [
        (name, family_of)
        for name, figure in COMPARED.items()
        for family_of in TITLES
        if (found := _complete(runs, family_of)) and is_beyond(_difference(runs, found, figure))
    ]


def by_seed(runs: Runs) -> str:
    """Aryl's mean queueing over foresight's on each real trace, and the worst seed by name."""
    rows: list[list[str]] = []
    worst: list[str] = []
    for name in REAL:
        workloads = _complete(runs, name)
        if not workloads:
            continue
        ratios = {w: _ratio(runs, [w], FIGURES["queueing"]).mean for w in workloads}
        rows.append([f"`{name}`", *(f"{ratio:.2f}" for ratio in ratios.values())])
        last = min(workloads, key=lambda each: ratios[each])
        ours, theirs = (FIGURES["queueing"](runs[last, p]) for p in ("foresight", "aryl"))
        told = f"{ours:,.0f} s against {theirs:,.0f} s, {100 * abs(ours / theirs - 1):.0f} %"
        worst.append(f"`{last}` ({told} {'longer' if ours > theirs else 'shorter'})")
    seeds = max((len(row) for row in rows), default=1)
    head = ["aryl / foresight, mean queueing", *(f"seed {n}" for n in range(1, seeds))]
    return _table(head, rows) + f"\nThe worst seed of each: {'; '.join(worst)}.\n"


def paired(runs: Runs) -> str:
    """Per family and figure the difference to aryl, and which of them are worse beyond chance."""
    there = {name: found for name in TITLES if (found := _complete(runs, name))}
    rows: list[list[str]] = []
    worse: list[str] = []
    for name, figure in COMPARED.items():
        cells: list[str] = []
        for workload, workloads in there.items():
            less = _difference(runs, workloads, figure)
            told = _shown(less, _digits(name))
            if is_beyond(less):
                worse.append(f"{WORDS.get(name, name)} on `{workload}` ({told})")
                told = f"**{told}**"
            cells.append(told)
        rows.append([name, *cells])
    said = f"Worse than `aryl` by more than the interval: {'; '.join(worse) or 'nothing'}.\n"
    return _table(["", *(f"`{name}`" for name in there)], rows) + "\n" + said


def _curve(runs: Runs) -> str:
    """Per quantile, in order, with odds by the job beside them."""
    curve = {policy.rpartition("=")[2]: policy for policy in CURVE}
    curve |= {"0.25": FIXED, "off": WITHOUT["lifetimes"]}
    rows = {"aryl": "aryl", "odds (default)": "foresight"}
    rows |= {name: curve[name] for name in sorted(curve)}
    groups = {"paper-overload-1": OVERLOADED, **{name: _complete(runs, name) for name in REAL}}
    return _beside(runs, {name: found for name, found in groups.items() if found}, rows)


def page(runs: Runs, bound: Least = least) -> str:
    """The page as Markdown; bound: what alone reads the traces."""
    there = {name: found for name in TITLES if (found := _complete(runs, name))}
    rows = {"aryl": "aryl", "foresight": "foresight", "fixed quantiles": FIXED}
    parts = rows | {f"without {part}": policy for part, policy in WITHOUT.items()}
    parts |= {f"with {part}": policy for part, policy in WITH.items()}
    return rendered(
        "foresight.md",
        families=[
            {
                "title": TITLES[name],
                "against": _against(runs, workloads, bound),
            }
            for name, workloads in there.items()
        ],
        absolute=_absolute(runs, there),
        paired=paired(runs),
        by_seed=by_seed(runs),
        ablation=_beside(runs, {"paper-overload-1": OVERLOADED, "itp-cluster06": ABLATED}, parts),
        curve=_curve(runs),
    )


def main() -> int:
    """Write it, or say in a line what it lacks; it then stays as it is."""
    runs = {(run.workload, run.policy): run for run in read_kept()}
    try:
        for name in REAL:  # before what takes long: these alone may be missing
            workload_of(f"{name}-1")
        PAGE.write_text(page(runs))
    except ConfigError as error:
        sys.stderr.write(f"foresight_page.py: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
