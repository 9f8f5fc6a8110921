"""`aryl simulate`: what policies would do with a workload; asks no cell. Must not decide."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from msgspec import structs

from common.errors import ConfigError
from coordinator import plugins
from coordinator.cli.session import EXIT_ERROR, say, session
from coordinator.cli.simulate_output import (
    Output,
    put_runs,
    say_seedless,
    say_skipped,
    write_page,
)
from coordinator.cli.simulate_progress import watching
from coordinator.policies.bundles import COMPARED
from coordinator.policies.bundles import policy as find_policy
from coordinator.sim.compare import Task, compare, with_gaps
from coordinator.sim.failure_sources import FailureSource
from coordinator.sim.inputs import (
    Shares,
    parse_cluster,
    parse_crash,
    parse_seeds,
    read_tenants,
    unused,
    within,
)
from coordinator.sim.stage import RunOptions, never_lends
from coordinator.sim.sweep import parse_saves, parse_speedup, sweep
from coordinator.workloads.paper_runs import Scene, find_scene
from coordinator.workloads.records import Workload
from coordinator.workloads.shaping import RuntimeModel

DEFAULT_POLICIES = "fifo,aryl"
ALL = "all"

MOST_RESTARTS = 1_000_000
"""What a job may ask for, see docs/job-contract.md."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("simulate")(simulate)


# --- options ------------------------------------------------------------------------------------


def _names(option: str, text: str, hint: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(f"{option}: none named; {hint}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{option}: {', '.join(twice)} stands twice")
    return names


def _played(scenario: str | None, policy: str | None) -> list[tuple[Scene | None, str]]:
    """Scenarios and policies: each scenario under its own, or under those that are named."""
    if scenario is None:
        scenes: Sequence[Scene | None] = (None,)
    else:
        listed = _names("scenario", scenario, "docs/simulate.md lists them")
        scenes = [find_scene(name) for name in listed]
    if scenario is not None and policy is None:
        return [(scene, scene.policy) for scene in scenes if scene is not None]
    names = _policies(DEFAULT_POLICIES if policy is None else policy)
    return [(scene, name) for scene in scenes for name in names]


def _policies(text: str) -> tuple[str, ...]:
    """The policies that `--policy` names, each one that there is."""
    names = _names(
        "policy", ",".join(COMPARED) if text == ALL else text, "`aryl policies` lists them"
    )
    if ALL in {name.partition(":")[0] for name in names} and text != ALL:
        raise ConfigError(
            f"policy: {ALL!r} stands for one of each system; it is named alone, without knobs"
        )
    plugins.load()
    for name in names:
        find_policy(name, also=(ALL,))
    return names


def _seeds(workload: str, seed: int | None, seeds: str | None) -> tuple[int | None, ...]:
    if seed is not None and seeds is not None:
        raise ConfigError("seeds: give --seed or --seeds, not both")
    if seeds is not None:
        return parse_seeds(seeds)
    return (seed,)


def _say_unused(tasks: Sequence[Task], played: Workload) -> None:
    """A line for each thing that was asked for and does nothing; `played` is the first task's."""
    said: dict[str, None] = {}
    for task in {(each.cluster, each.load): each for each in tasks}.values():
        nodes = played.nodes if task.cluster is None else parse_cluster(task.cluster)
        line = unused(structs.replace(played, nodes=nodes), task.load)
        if line is not None:
            said[line] = None
    for task in tasks:
        line = never_lends(task.options)
        if line and played.loads:
            said[line] = None
    for line in said:
        say(f"aryl: {line}")


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
    str | None,
    typer.Option("--load", metavar="FILE[:SERIES]", help="Inference load instead of the own one."),
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
    float | None, typer.Option("--elastic", metavar="SHARE", help="Share of elastic jobs.")
]
FungibleOption = Annotated[
    float | None,
    typer.Option("--fungible", metavar="SHARE", help="Share of jobs for both GPU types."),
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


def simulate(
    ctx: typer.Context,
    workload: WorkloadOption,
    policy: PolicyOption = None,
    scenario: ScenarioOption = None,
    seed: SeedOption = None,
    seeds: SeedsOption = None,
    sweeps: SweepOption = None,
    skip_zero_gpus: SkipZeroGpusOption = False,
    load: LoadOption = None,
    cluster: ClusterOption = None,
    delays: DelaysOption = None,
    speedup: SpeedupOption = None,
    checkpoints: CheckpointsOption = None,
    elastic: ElasticOption = None,
    fungible: FungibleOption = None,
    checkpoint_share: CheckpointShareOption = None,
    loss: LossOption = 0.0,
    crash: CrashOption = None,
    tenants: TenantsOption = None,
    oracle: OracleOption = True,
    pass_period: PassPeriodOption = None,
    coalesce: CoalesceOption = None,
    check: CheckOption = False,
    failures: FailuresOption = FailureSource.NONE,
    restarts: RestartsOption = 2,
    prerun: PrerunOption = None,
    cores: CoresOption = None,
    backend: BackendOption = "loky",
    output: OutputOption = Output.TABLE,
    html: HtmlOption = None,
) -> None:
    """Play a workload under one or more policies, on the engine that runs live.

    aryl simulate --workload paper --seed 1 --policy fifo,aryl -o json
    """
    here = session(ctx)
    if html is not None and not html.parent.is_dir():
        raise ConfigError(f"html {html}: No such directory as {html.parent}")
    if html is not None and html.is_dir():
        raise ConfigError(f"html {html}: is a directory, expected the name of a file")
    # Public traces do not tell who saves, and some systems take turns that nobody else survives.
    saves, save_period_s = parse_saves(checkpoints or ("on-request" if policy == ALL else "trace"))
    model, curves = parse_speedup(speedup or RuntimeModel.LINEAR)
    numbers = {"coalesce": coalesce, "loss": loss, "pass-period": pass_period, "prerun": prerun}
    for option, value in numbers.items():
        if value is not None:
            within(option, value)
    crashes = tuple(parse_crash(text) for text in crash or ())
    promised = {} if tenants is None else {"tenants": read_tenants(tenants)}
    tasks = [
        Task(
            workload=workload,
            seed=chosen,
            cluster=cluster,
            load=load,
            skip_zero_gpus=skip_zero_gpus,
            shares=Shares(elastic=elastic, fungible=fungible, checkpoint=checkpoint_share),
            scenario=None if scene is None else scene.name,
            curves=curves,
            keeps_jobs=html is not None or output == Output.CSV,
            options=RunOptions(
                policy=name,
                seed=1 if chosen is None else chosen,
                has_delays=scene is None if delays is None else delays,
                loss_ratio=loss,
                crashes=crashes,
                saves=saves,
                save_period_s=save_period_s,
                speedup=scene.speedup if scene is not None and speedup is None else model,
                coalesce_s=coalesce,
                pass_period_s=pass_period,
                is_oracle=oracle,
                tells_progress=scene is None or scene.tells_progress,
                check=check,
                failures=failures,
                restarts=restarts,
                prerun_s=prerun,
                engine=promised,
            ),
        )
        for scene, name in _played(scenario, policy)
        for chosen in _seeds(workload, seed, seeds)
    ]
    tasks = sweep(tasks, sweeps or ())
    played = tasks[0].read()  # a mistake in what they share is said at once, and once
    _say_unused(tasks, played)
    with watching(tasks, jobs=len(played.jobs)) as watched:
        unfinished: list[str] = []
        runs = with_gaps(
            list(
                compare(
                    watched,
                    cores=min(cores or os.cpu_count() or 1, len(tasks)),
                    backend=backend,
                    unfinished=unfinished.append,
                )
            )
        )
    if not runs:
        raise ConfigError(unfinished[0])
    if html is not None:
        write_page(html, played, tasks[0], runs)
    say_skipped(runs)
    say_seedless(runs)
    put_runs(here, output, played, runs)
    for why in unfinished:
        say(f"aryl: left out: {why}")
    if unfinished:
        raise typer.Exit(EXIT_ERROR)
