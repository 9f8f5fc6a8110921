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
        f"all: one of each system; default: {DEFAULT_POLICIES}, or each scenario's own.",
    ),
]
ScenarioOption = Annotated[
    str | None,
    typer.Option(
        "--scenario",
        metavar="A,B,..",
        help="Runs of the paper by name: baseline, basic, advanced, heterogeneous, ideal, "
        "loan-aryl, ..; see docs/simulate.md. Their operations take no time (--no-delays).",
    ),
]
SweepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=V,V,..",
        help="Runs with several values of an option (elastic=0,0.2) or of a field "
        "(policy.resize_cost_s=0,5); may be repeated: all combinations.",
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
    int | None,
    typer.Option("--seed", min=0, metavar="N", help="Seed of the run; `paper` with N is paper-N."),
]
SeedsOption = Annotated[
    str | None,
    typer.Option("--seeds", metavar="1..10", help="Run several seeds; print means and intervals."),
]
SkipZeroGpusOption = Annotated[
    bool,
    typer.Option(
        "--skip-zero-gpus",
        help="Skip and count trace rows without a GPU; default: they are an error.",
    ),
]
LoadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--load",
        metavar="[NAME=]FILE[:SERIES]",
        help="Inference load instead of the workload's own; may be repeated: one service each, "
        "which share the inference nodes equally.",
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
        help="Whether nodes and jobs take time to drain, start, resize, save and warm up; "
        "default: yes, except in a scenario.",
    ),
]
SpeedupOption = Annotated[
    str | None,
    typer.Option(
        "--speedup",
        metavar="linear|lossy|goodput|tuned|DIR",
        help="Speed-up of elastic jobs by workers: linear, or as a scenario defines it.",
    ),
]
CheckpointsOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoints",
        metavar="trace|never|on-request|SECONDS",
        help="Work that a preempted job keeps: as in the trace, none, all, or up to its last "
        "save; default: as in the trace, or all with --policy all.",
    ),
]
ElasticOption = Annotated[
    float | None,
    typer.Option(
        "--elastic",
        metavar="SHARE",
        help="Share of elastic jobs; each share is drawn separately, by seed.",
    ),
]
FungibleOption = Annotated[
    float | None,
    typer.Option(
        "--fungible",
        metavar="SHARE",
        help="Share of jobs for both GPU types; default: a job that names no type takes any, "
        "one for one.",
    ),
]
CheckpointShareOption = Annotated[
    float | None,
    typer.Option(
        "--checkpoint-share", metavar="SHARE", help="Share of jobs that save checkpoints."
    ),
]
LossOption = Annotated[
    float,
    typer.Option("--loss", metavar="RATIO", help="Share of lost messages."),
]
CrashOption = Annotated[
    list[str] | None,
    typer.Option(
        "--crash",
        metavar="NODE@S+S",
        help="Crash of a node at a time for a duration; may be repeated.",
    ),
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
    typer.Option(
        "--oracle/--learned", help="Use true running times as estimates, or learned ones."
    ),
]
PassPeriodOption = Annotated[
    float | None,
    typer.Option(
        "--pass-period", metavar="S", help="Time between two scheduling passes without an event."
    ),
]
CoalesceOption = Annotated[
    float | None,
    typer.Option(
        "--coalesce", metavar="S", help="Collect events for this long before a scheduling pass."
    ),
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Check the engine's invariants after every event.")
]
CoresOption = Annotated[
    int | None,
    typer.Option(
        "--cores", min=1, metavar="N", help="Number of runs at a time; default: all cores."
    ),
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
    typer.Option("--failures", help="Source of job failures; see docs/policies/philly.md."),
]
RestartsOption = Annotated[
    int,
    typer.Option(
        "--restarts",
        min=0,
        max=MOST_RESTARTS,
        metavar="N",
        help="Number of retries of a job, if it may fail.",
    ),
]
PrerunOption = Annotated[
    float | None,
    typer.Option(
        "--prerun",
        metavar="S",
        help="Gangs that may fail run on one GPU first, for this long.",
    ),
]
OutputOption = Annotated[
    Output, typer.Option("-o", "--output", help="Output format: table, json, or csv of the jobs.")
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a self-contained page with plots."),
]
