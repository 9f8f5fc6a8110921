"""The options of `aryl simulate`, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.simulate.output import Output
from coordinator.sim.inputs.failure_sources import FailureSource
from coordinator.sim.inputs.sweep import MOST_RESTARTS
from coordinator.sim.inputs.tasks import DEFAULT_POLICIES

PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="A,B,..",
        help="Policies to compare, as in `aryl policies`, with knobs as in `aryl:reclaim=random`; "
        f"all: one of each system; without, {DEFAULT_POLICIES}, or each scenario's own.",
    ),
]
ScenarioOption = Annotated[
    str | None,
    typer.Option(
        "--scenario",
        metavar="A,B,..",
        help="Runs of the paper by name: baseline, basic, advanced, heterogeneous, ideal, "
        "loan-aryl, ..; see docs/simulate.md. They take no time by themselves (--no-delays).",
    ),
]
SweepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=V,V,..",
        help="The same at several values of an option (elastic=0,0.2) or of a field "
        "(policy.resize_cost_s=0,5); may be repeated: every combination.",
    ),
]
WorkloadOption = Annotated[
    str,
    typer.Option(
        "--workload",
        "--trace",
        metavar="NAME|FILE",
        help="paper, paper-1 .. paper-5, paper-overload, or a trace file.",
    ),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=0, metavar="N", help="Seed; `paper` N is paper-N.")
]
SeedsOption = Annotated[
    str | None, typer.Option("--seeds", metavar="1..10", help="Several seeds: means, intervals.")
]
SkipZeroGpusOption = Annotated[
    bool,
    typer.Option(
        "--skip-zero-gpus",
        help="Leave rows of a trace without a GPU out, and count them; else they are an error.",
    ),
]
LoadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--load",
        metavar="[NAME=]FILE[:SERIES]",
        help="Inference load instead of the own one; may be repeated: one service each, which "
        "share the inference nodes equally.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="443x8+520x8|FILE",
        help="Training + inference nodes x GPUs, a TOML file, or an OpenB node list.",
    ),
]
DelaysOption = Annotated[
    bool | None,
    typer.Option(
        "--delays/--no-delays",
        help="Nodes and jobs take time to drain, start, resize, save and warm up; they do, but "
        "in a scenario.",
    ),
]
SpeedupOption = Annotated[
    str | None,
    typer.Option(
        "--speedup",
        metavar="linear|lossy|goodput|tuned|DIR",
        help="How elastic jobs speed up with workers: linear, or as a scenario says.",
    ),
]
CheckpointsOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoints",
        metavar="trace|never|on-request|SECONDS",
        help="What a preempted job keeps: as the trace says, nothing, all, or its last save; with "
        "--policy all everything, else as the trace says.",
    ),
]
ElasticOption = Annotated[
    float | None,
    typer.Option(
        "--elastic",
        metavar="SHARE",
        help="Share of elastic jobs; each share is drawn apart, by seed.",
    ),
]
FungibleOption = Annotated[
    float | None,
    typer.Option(
        "--fungible",
        metavar="SHARE",
        help="Share of jobs for both GPU types; without, who names none takes any, one for one.",
    ),
]
CheckpointShareOption = Annotated[
    float | None,
    typer.Option("--checkpoint-share", metavar="SHARE", help="Share of jobs that save."),
]
LossOption = Annotated[
    float,
    typer.Option("--loss", metavar="RATIO", help="Part of lost messages."),
]
CrashOption = Annotated[
    list[str] | None,
    typer.Option("--crash", metavar="NODE@S+S", help="A node that crashes; may be repeated."),
]
TenantsOption = Annotated[
    str | None,
    typer.Option(
        "--tenants",
        metavar="FILE",
        help="Guarantees, weights and limits: [[tenants]] tables as in a cell's settings.",
    ),
]
OracleOption = Annotated[
    bool,
    typer.Option("--oracle/--learned", help="Estimates are true running times, or learned."),
]
PassPeriodOption = Annotated[
    float | None,
    typer.Option("--pass-period", metavar="S", help="Passes also without a reason."),
]
CoalesceOption = Annotated[
    float | None,
    typer.Option("--coalesce", metavar="S", help="Facts are gathered before a pass."),
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Look at the engine's invariants after every event.")
]
CoresOption = Annotated[
    int | None, typer.Option("--cores", min=1, metavar="N", help="Runs at a time; else all cores.")
]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="loky, multiprocessing, threading, sequential, dask=ADDRESS or ray.",
    ),
]
FailuresOption = Annotated[
    FailureSource,
    typer.Option(
        "--failures", help="What lets jobs fail by themselves; see docs/policies/philly.md."
    ),
]
RestartsOption = Annotated[
    int,
    typer.Option(
        "--restarts",
        min=0,
        max=MOST_RESTARTS,
        metavar="N",
        help="Retries that a job allows, if it may fail.",
    ),
]
PrerunOption = Annotated[
    float | None,
    typer.Option(
        "--prerun",
        metavar="S",
        help="Gangs that may fail first run on one GPU for so long.",
    ),
]
OutputOption = Annotated[
    Output, typer.Option("-o", "--output", help="table, json, or csv of the jobs.")
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="A page with plots, self-contained.")
]
