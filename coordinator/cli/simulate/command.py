"""`aryl simulate`: runs policies over a workload; it needs no cell."""

from __future__ import annotations

import os
from collections.abc import Sequence

import typer
from msgspec import structs

from common.errors import ConfigError
from coordinator.cli.interrupt import tidying_up_on_sigterm
from coordinator.cli.session import EXIT_ERROR, say, session
from coordinator.cli.simulate.options import (
    BackendOption,
    CheckOption,
    CheckpointShareOption,
    CheckpointsOption,
    ClusterOption,
    CoalesceOption,
    CoresOption,
    CrashOption,
    DelaysOption,
    ElasticOption,
    FailuresOption,
    FungibleOption,
    HtmlOption,
    LoadOption,
    LossOption,
    OracleOption,
    OutputOption,
    PassPeriodOption,
    PolicyOption,
    PrerunOption,
    RestartsOption,
    ScenarioOption,
    SeedOption,
    SeedsOption,
    SkipZeroGpusOption,
    SpeedupOption,
    SweepOption,
    TenantsOption,
    WorkloadOption,
)
from coordinator.cli.simulate.output import (
    Output,
    put_runs,
    say_begun_again,
    say_seedless,
    say_skipped,
    write_page,
)
from coordinator.cli.simulate.progress import watching
from coordinator.cli.simulate.provenance import command, options
from coordinator.sim.inputs.any_type import lines as of_any_type
from coordinator.sim.inputs.failure_sources import FailureSource
from coordinator.sim.inputs.inputs import (
    Shares,
    parse_cluster,
    parse_crash,
    read_tenants,
    reordered,
    unkept,
    unused,
    within,
)
from coordinator.sim.inputs.sweep import parse_saves, parse_speedup, sweep
from coordinator.sim.inputs.tasks import ALL, plays, refuse_idle, seeds_of, tasks
from coordinator.sim.run.build import RunOptions, never_lends
from coordinator.sim.run.compare import Task, compare, with_gaps
from coordinator.workloads.records import Workload


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("simulate")(simulate)


def usable_cores() -> int:
    """Cores that this process may use; a container or a batch job often has some of them."""
    return len(os.sched_getaffinity(0))


def _say_unused(tasks: Sequence[Task], played: Workload) -> None:
    """A line for each thing that was asked for and cannot be had; `played` is the first task's."""
    said: dict[str, None] = {}
    differing = {
        (each.cluster, each.load, repr(each.options.engine.get("tenants"))): each for each in tasks
    }
    for task in differing.values():
        nodes = played.nodes if task.cluster is None else parse_cluster(task.cluster)
        here = structs.replace(played, nodes=nodes)
        promised = task.options.engine.get("tenants", ())
        for line in (reordered(here), unused(here, task.load), unkept(here, promised)):
            if line:
                said[line] = None
    for task in tasks:
        line = never_lends(task.options)
        if line and played.loads:
            said[line] = None
    for line in said:
        say(f"aryl: {line}")


def _say_left_out(unfinished: Sequence[str]) -> None:
    """A line for each run that did not come to its end, with the reason."""
    for why in unfinished:
        say(f"aryl: left out: {why}")


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
    """Simulate a workload under one or more policies, with the engine of the live coordinator.

    aryl simulate --workload paper --seed 1 --policy fifo,aryl -o json
    """
    here = session(ctx)
    if html is not None and not html.parent.is_dir():
        raise ConfigError(f"html {html}: No such directory as {html.parent}")
    if html is not None and html.is_dir():
        raise ConfigError(f"html {html}: is a directory, expected the name of a file")
    # Public traces do not record which jobs save, and under some policies only saving jobs survive
    # turns.
    kept = checkpoints or ("on-request" if policy == ALL else "trace")
    saves, save_period_s = parse_saves(kept)
    model, curves = (None, None) if speedup is None else parse_speedup(speedup)
    numbers = {"coalesce": coalesce, "loss": loss, "pass-period": pass_period, "prerun": prerun}
    for option, value in numbers.items():
        if value is not None:
            within(option, value)
    crashes = tuple(parse_crash(text) for text in crash or ())
    promised = {} if tenants is None else {"tenants": read_tenants(tenants)}
    base = Task(
        workload=workload,
        cluster=cluster,
        load=tuple(load) if load else None,
        skip_zero_gpus=skip_zero_gpus,
        shares=Shares(elastic=elastic, fungible=fungible, checkpoint=checkpoint_share),
        curves=curves,
        keeps_jobs=html is not None or output == Output.CSV,
        options=RunOptions(
            policy="",
            loss_ratio=loss,
            crashes=crashes,
            saves=saves,
            save_period_s=save_period_s,
            coalesce_s=coalesce,
            pass_period_s=pass_period,
            is_oracle=oracle,
            check=check,
            failures=failures,
            restarts=restarts,
            prerun_s=prerun,
            engine=promised,
        ),
    )
    plain = tasks(
        base, plays(scenario, policy), seeds_of(seed, seeds), delays=delays, speedup=model
    )
    asked = sweep(plain, sweeps or ())
    refuse_idle(asked)
    played = asked[0].read()  # a mistake in what they share is reported at once, and once
    _say_unused(asked, played)
    notes = of_any_type(asked, played)
    for line in notes:
        say(f"aryl: {line}")
    with tidying_up_on_sigterm(), watching(asked, jobs=len(played.jobs)) as watched:
        unfinished: list[str] = []
        runs = with_gaps(
            list(
                compare(
                    watched,
                    cores=min(cores or usable_cores(), len(asked)),
                    backend=backend,
                    unfinished=unfinished.append,
                )
            )
        )
    if not runs:
        _say_left_out(unfinished[:-1])
        raise ConfigError(unfinished[-1])
    say_skipped(runs)
    say_seedless(runs)
    if checkpoints is None and saves is None:
        say_begun_again(played, runs)
    resolved = {"delays": asked[0].options.has_delays, "checkpoints": kept}
    told = options(ctx, resolved, swept=asked[0].swept)
    put_runs(here, output, played, runs, options=told, notes=notes)
    _say_left_out(unfinished)
    if html is not None:  # last: if it cannot be written, all other output is done already
        write_page(html, played, asked[0], runs, command=command(ctx), notes=notes)
    if unfinished:
        raise typer.Exit(EXIT_ERROR)
