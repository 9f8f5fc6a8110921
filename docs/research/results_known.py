"""Known numbers of others, ours beside theirs: the tables of docs/results.md below the paper's.

Must not run a simulation. Fair shares, which need none, are computed here by the shipped rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from coordinator.policies.contract.snapshot import TenantView
from coordinator.policies.tenants.tenancy import fair_split
from docs.research.golden_elasticflow import KEPT, ROWS
from docs.research.golden_elasticflow import Kept as KeptBar
from docs.research.paper_figures import GOLDEN, Published
from docs.research.play_results import GOLDEN as PLAYED
from docs.research.play_results import Kept
from docs.research.results_figures import text_of

# --- other simulators on public traces ----------------------------------------------------------


def golden_text(rows: Mapping[str, list[Kept]]) -> list[str]:
    """Other simulators' figures and ours, and the bound beside our mean JCT."""
    lines = [
        "| trace, GPUs | simulator, policy | mean JCT, s, published | ours | off by | "
        "others off by | its time/our CPU s | JCT bound, s | gap closed |",
        "|---" * 9 + "|",
    ]
    for name, published in GOLDEN.items():
        lines += [_golden_row(published, run, PLAYED[name].gpus) for run in rows.get(name, [])]
    return lines


def _golden_row(published: Published, run: Kept, gpus: int) -> str:
    result = run.result
    others = (
        ("queueing", published.queueing_s, result.queueing_s.mean),
        ("makespan", published.makespan_s, run.makespan_s),
        ("preemptions", published.preemptions, result.preemptions),
    )
    off = [f"{name} {_off(theirs, ours)}" for name, theirs, ours in others if theirs is not None]
    closed = "" if result.gap_closed_ratio is None else text_of(result.gap_closed_ratio, "%")
    cells = [
        f"{run.workload}, {gpus}",
        f"{published.simulator}, {published.policy}; ours {result.policy}",
        f"{published.jct_s:,}",
        f"{round(result.jct_s.mean, 3):,}",
        _off(published.jct_s, result.jct_s.mean),
        ", ".join(off),
        f"{published.time or '-'}/{run.cpu_s:.1f}",
        f"{result.jct_bound_s:,.0f}",
        closed,
    ]
    return f"| {' | '.join(cells)} |"


def _off(published: float, ours: float) -> str:
    off = f"{100 * abs(ours - published) / published:.4f}"
    return "0" if float(off) == 0.0 else f"{off} %"


# --- ElasticFlow, Figure 8(a) -------------------------------------------------------------------


def read_bars() -> list[KeptBar]:
    """The rows of ElasticFlow's Figure 8(a) as they were measured."""
    return msgspec.json.decode(KEPT.read_bytes(), type=list[KeptBar])


def elasticflow_text(bars: Sequence[KeptBar]) -> list[str]:
    """Share of jobs in time, ours beside theirs, each row's knobs, and both sides' CPU time.

    Raises:
        KeyError: a row is kept that nobody can play.
    """
    lines = [
        "| row | policy and knobs | a change takes, s | setting | in time, published | "
        "in time, ours | jobs apart | refused | mean JCT, s | its CPU s | our CPU s |",
        "|---" * 11 + "|",
    ]
    for bar in bars:
        row = ROWS[bar.row]
        setting = "theirs" if row.is_comparable else "what if"
        apart = round(bar.jobs * bar.deadlines_met_ratio) - round(bar.jobs * bar.published)
        lines.append(
            f"| {bar.row} | `{bar.policy}` | {row.change_s:g} | {setting} | {bar.published:.4f} | "
            f"{bar.deadlines_met_ratio:.4f} | {apart:+d} | {bar.jobs_rejected} | "
            f"{bar.jct_s:,.0f} | {bar.published_cpu_s:g} | {bar.cpu_s:g} |"
        )
    return lines


MARGINS = {
    "ElasticFlow": "it",
    "ElasticFlow, without the margin": "none",
    "ElasticFlow, a margin of 2 %": "`margin=1.02`",
}
"""Rows that differ by their margin alone, and what stands for it in a sentence."""


def margins_text(bars: Sequence[KeptBar]) -> str:
    """What the margin of ElasticFlow's row is, and how near the figure comes out with others."""
    found = {bar.row: bar for bar in bars}
    said: list[str] = []
    for row, name in MARGINS.items():
        bar = found[row]
        off = bar.deadlines_met_ratio - bar.published
        said.append(f"With {name} {bar.deadlines_met_ratio:.4f} are in time ({off:+.4f})")
    return (
        "`margin=1.01` of ElasticFlow is our choice, made with the published figure in sight: it "
        f"stands for the seconds of a change, which our predictions lack. {'; '.join(said)}."
    )


# --- KAI-Scheduler's fair shares ----------------------------------------------------------------


class Queue(Struct, frozen=True, kw_only=True):
    """One queue of KAI-Scheduler's documented example; all but the weight in GPUs.

    published: its fair share as documented.
    """

    name: str
    deserved: int
    weight: float
    asked: int
    published: float


KAI_GPUS = 100
KAI_QUEUES = (
    Queue(name="a", deserved=10, weight=3.0, asked=100, published=70.0),
    Queue(name="b", deserved=10, weight=1.0, asked=100, published=30.0),
)
"""Its documentation of fair shares: deserved quota first, what is over by weight."""


def fair_shares_text(queues: Sequence[Queue] = KAI_QUEUES, gpus: int = KAI_GPUS) -> list[str]:
    """Fair shares by our rule for tenants, computed now, beside the documented ones."""
    views = [
        TenantView(name=queue.name, weight=queue.weight, guarantee_gpus=queue.deserved)
        for queue in queues
    ]
    ours = fair_split(float(gpus), views, {queue.name: float(queue.asked) for queue in queues})
    lines = ["| queue | deserved | weight | asks for | published | ours |", "|---" * 6 + "|"]
    lines += [
        f"| {queue.name} | {queue.deserved} | {queue.weight:g} | {queue.asked} | "
        f"{queue.published:g} | {ours[queue.name]:g} |"
        for queue in queues
    ]
    return lines
