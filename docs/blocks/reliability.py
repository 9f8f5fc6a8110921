"""Figures of the nemesis' recorded run, from docs/results/reliability.json. Must not judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "reliability.json"
PROMISES = (
    ("lost", "acknowledged jobs lost, or failed by no fault of their own"),
    ("unended", "short jobs that had not ended two minutes after the last fault"),
    ("run twice", "attempts that began before the attempt before them had ended"),
    ("done again", "attempts that began although every base worker had done its work"),
    ("GPU given twice", "GPUs with two workers, or with a worker and a server"),
    ("healthy job ended", "attempts that ended without a cause of their own"),
    ("node late", "nodes that served again after their deadline"),
    ("takeover late", "takeovers that took longer than 10 s"),
)
"""Each kind of broken promise, as the results name it, and in words."""
TIMES = (
    ("returns", "a node's way home: from the call, or the last renewal, until it serves"),
    ("takeovers", "from SIGKILL of the leader until the next leader answers"),
    ("handovers", "from SIGTERM of the leader until the next leader answers (a goal)"),
)


def results() -> dict[str, Any]:
    """The recorded run."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def run() -> str:
    """Which run it was."""
    found = results()
    facts = [
        f"`make chaos DURATION={found['planned_s']:g} SEED={found['seed']}"
        f" PAUSE={found['mean_pause_s']:g} NATS={found['nats_servers']}`, {found['date']},"
        f" {found['cores']} cores, Python {found['python']}, {found['duration_s']:,.0f} s",
        f"{found['faults']:,} faults, up to {found['longest_overlap']} at a time",
        f"{found['jobs_acknowledged']:,} jobs acknowledged, {found['attempts']:,} attempts that"
        " computed",
        f"{found['requests_answered']:,} requests to the service answered,"
        f" {found['requests_refused']:,} refused",
        f"{found['stalled_s']:,.1f} s lost by the machine itself",
    ]
    return "\n".join(f"- {fact}" for fact in facts)


def promises() -> str:
    """How often each promise was broken."""
    found = results()
    lines = ["| broken promise | times |", "|---|---|"]
    lines += [f"| {text} | {found['broken'][kind]} |" for kind, text in PROMISES]
    lines += [
        "| nodes that were late by less than the machine itself lost meanwhile |"
        f" {found['late_by_stall']} |"
    ]
    lines += [
        "| loans that Aryl's own list calls late: it counts until it hears that the node serves |"
        f" {found['late_by_own_word']} |"
    ]
    lines += [f"\n- {text}" for text in found["violations"]]
    return "\n".join(lines)


def times() -> str:
    """How long returns and takeovers took, against their limits."""
    found = results()
    lines = [
        "| what | count | p50 | p99 | worst | limit | within the limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, text in TIMES:
        row = found[name]
        shown = [
            "-" if row[key] is None else f"{row[key]:.1f} s"
            for key in ("p50_s", "p99_s", "worst_s")
        ]
        lines.append(
            f"| {text} | {row['count']} | {' | '.join(shown)} | {row['limit_s']:g} s |"
            f" {row['within']} |"
        )
    return "\n".join(lines)


def faults() -> str:
    """How often each kind of fault was injected, and how long it was on in the mean."""
    lines: list[str] = []
    for row in results()["kinds"]:
        length = f" ({row['mean_s']:.1f} s)" if row["mean_s"] else ""
        lines.append(f"- {row['count']} x {row['text']}{length}")
    return "\n".join(lines)


def ends() -> str:
    """Why attempts ended before their work was done."""
    return ", ".join(f"{why} {count}" for why, count in results()["ends"].items()) + "."
