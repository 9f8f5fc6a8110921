"""Play Themis against others and over its knobs, keep the figures, draw them. Must not decide.

    ARYL_TRACES=DIRECTORY python docs/research/play_themis.py
    python docs/research/play_themis.py page                    the page alone, from what is kept

Shockwave's 120-job trace on 8 nodes of 4 GPUs in racks of two, where spreading slows known models
down; with delays unless a row says otherwise. Figures go to docs/results/themis.jsonl, the plot of
f and the lease to docs/results/themis-knobs.html.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from html import escape

from msgspec import Struct

from common.clock import SystemClock
from coordinator.sim.inputs.inputs import read_workload
from coordinator.sim.report.plots import Axis, Line, distribution, lines
from coordinator.sim.report.style import document
from coordinator.sim.run.build import RunOptions
from coordinator.sim.run.play import Run, play
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.records import Workload
from docs.research import kept as kept_runs

KEPT = kept_runs.RESULTS / "themis.jsonl"
PAGE = kept_runs.RESULTS / "themis-knobs.html"
TRACE = "shockwave/120_0.2_5_100_40_25_0-0.5-0.5_0.6-0.3-0.09-0.01_multigpu_dynamic.trace.gz"
CLUSTER = "8x4/2"

FS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
LEASES_MIN = (2, 5, 10, 20, 30, 40)
"""One minute is less than a stop and a start take: no job would ever get further."""
COMPARED = (
    "fifo",
    "fifo-skip",
    "srtf",
    "tiresias",
    "las",
    "themis",
    "themis:payment=floor",
    "themis:payment=none",
    "themis:horizon=good",
    "themis-simple",
    "themis-lp",
)


class Figures(Struct, frozen=True, kw_only=True):
    """One run in numbers; rho over apps, seconds simulated but for `cpu_s`.

    rho_by_app: of every app, so that each can see whether sharing has cost it more than it gave.
    """

    policy: str
    jct_s: float
    queueing_s: float
    makespan_s: float
    preemptions: int
    lost_gpu_s: float
    rho_mean: float
    rho_max: float
    rho_share_above_1: float
    cpu_s: float
    rho_by_app: dict[str, float] = {}


class Sweep(Struct, frozen=True, kw_only=True):
    """Runs over one knob, by its value."""

    workload: str
    cluster: str
    knob: str
    runs: dict[str, Figures]


def played(policy: str, workload: Workload, *, has_delays: bool, keeps_apps: bool) -> Figures:
    """One run."""
    options = RunOptions(
        policy=policy,
        has_delays=has_delays,
        has_locality=True,
        saves=Saves.ON_REQUEST,
    )
    began_s = time.process_time()
    run = play(workload, options, clock=SystemClock())
    cpu_s = time.process_time() - began_s
    found, by_app = run.result, rho_by_app(run)
    return Figures(
        policy=policy,
        jct_s=round(found.jct_s.mean, 3),
        queueing_s=round(found.queueing_s.mean, 3),
        makespan_s=round(found.makespan_s, 3),
        preemptions=found.preemptions,
        lost_gpu_s=round(found.lost_gpu_s, 3),
        rho_mean=round(found.finish_time_fairness.mean, 6),
        rho_max=round(found.finish_time_fairness.max, 6),
        rho_share_above_1=round(found.finish_time_fairness.share_above_1, 6),
        cpu_s=round(cpu_s, 2),
        rho_by_app={app: round(rho, 4) for app, rho in by_app.items()} if keeps_apps else {},
    )


def rho_by_app(run: Run) -> dict[str, float]:
    """Finish-time fairness of every app, in the order of their names."""
    return dict(sorted((row.app, row.rho) for row in run.rows if row.rho is not None))


def sweep(knob: str, policies: Mapping[str, str], *, has_delays: bool, keeps_apps: bool) -> Sweep:
    """Runs of policies, by what they are called here."""
    workload = read_workload(TRACE, cluster=CLUSTER)
    runs: dict[str, Figures] = {}
    for name, policy in policies.items():
        runs[name] = played(policy, workload, has_delays=has_delays, keeps_apps=keeps_apps)
        found = runs[name]
        sys.stdout.write(
            f"{knob} {name}: JCT {found.jct_s:.0f} s, rho max {found.rho_max:.2f}, "
            f"{found.preemptions} preemptions, {found.cpu_s:.1f} s CPU\n"
        )
        sys.stdout.flush()
    return Sweep(workload=TRACE, cluster=CLUSTER, knob=knob, runs=runs)


def keep(name: str, found: Sweep) -> None:
    """Add runs to the file."""
    kept_runs.keep(KEPT, Sweep, name, found)


# --- the plots ------------------------------------------------------------------------------------


def knob_plots(found: Sweep, title: str, unit: str) -> str:
    """Fairness and efficiency over a knob, side by side."""
    xs = [float(value) for value in found.runs]
    runs = list(found.runs.values())
    axis = Axis(title=unit, text=lambda value: f"{value:g}", top=max(xs))
    rho = lines(
        [
            Line(name="largest rho", xs=xs, ys=[run.rho_max for run in runs], color=1),
            Line(name="mean rho", xs=xs, ys=[run.rho_mean for run in runs], color=2),
            Line(
                name="share above 1",
                xs=xs,
                ys=[run.rho_share_above_1 for run in runs],
                color=3,
                is_faint=True,
            ),
        ],
        x=axis,
        y=Axis(title="finish-time fairness", text=lambda value: f"{value:g}"),
        label=f"{title}: finish-time fairness",
    )
    time_s = lines(
        [
            Line(name="mean JCT, h", xs=xs, ys=[run.jct_s / 3600 for run in runs], color=4),
            Line(
                name="preemptions, hundreds",
                xs=xs,
                ys=[run.preemptions / 100 for run in runs],
                color=5,
            ),
        ],
        x=axis,
        y=Axis(title="efficiency", text=lambda value: f"{value:g}"),
        label=f"{title}: completion time and preemptions",
    )
    return f"<h2>{escape(title)}</h2><div class=plots>{figure(rho)}{figure(time_s)}</div>"


def app_plot(found: Sweep, policies: Sequence[str]) -> str:
    """How rho is distributed over the apps, policy by policy."""
    curves: list[Line] = []
    for color, name in enumerate(policies):
        xs, ys = distribution(list(found.runs[name].rho_by_app.values()))
        curves.append(Line(name=name, xs=xs, ys=ys, color=color))
    drawn = lines(
        curves,
        x=Axis(title="finish-time fairness of an app", text=lambda value: f"{value:g}", top=4.0),
        y=Axis(title="share of apps", text=lambda value: f"{value:.0%}", top=1.0),
        label="finish-time fairness over apps",
    )
    return f"<h2>Sharing incentive, app by app</h2><div class=plots>{figure(drawn)}</div>"


def figure(drawn: str) -> str:
    """One plot on the page."""
    return f"<figure>{drawn}</figure>"


def page(by_f: Sweep, by_lease: Sweep, compared: Sweep) -> str:
    """All plots as one page with nothing from outside."""
    shown = ("fifo-skip", "srtf", "tiresias", "themis", "themis-simple", "themis-lp")
    parts = (
        f"<p>{escape(by_f.workload)} on {escape(by_f.cluster)} GPUs, with delays; the lease is 20 "
        "minutes where f varies, f is 0.8 where the lease varies.</p>",
        knob_plots(by_f, "f, the part of the apps that is left out of an auction", "f"),
        knob_plots(by_lease, "Lease", "minutes"),
        app_plot(compared, shown),
    )
    return document("Themis: f and lease", "".join(parts))


def draw() -> None:
    """The page, from what is kept."""
    found = kept_runs.read(KEPT, Sweep)
    PAGE.write_text(page(found["f"], found["lease"], found["delays"]), "utf-8")


def main(arguments: Sequence[str]) -> int:
    """Play, keep and draw; or draw alone."""
    if list(arguments) not in ([], ["page"]):
        sys.stderr.write("usage: play_themis.py [page]\n")
        return 2
    if not arguments:
        _play()
    draw()
    return 0


def _play() -> None:
    compared = {name: name for name in COMPARED}
    keep("ideal", sweep("policy", compared, has_delays=False, keeps_apps=True))
    delayed = sweep("policy", compared, has_delays=True, keeps_apps=True)
    by_f = sweep("f", {f"{f:g}": f"themis:f={f:g}" for f in FS}, has_delays=True, keeps_apps=False)
    by_lease = sweep(
        "lease_min",
        {str(minutes): f"themis:lease_s={60 * minutes}" for minutes in LEASES_MIN},
        has_delays=True,
        keeps_apps=False,
    )
    for name, found in (("delays", delayed), ("f", by_f), ("lease", by_lease)):
        keep(name, found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
