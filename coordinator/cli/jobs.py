"""`aryl job`: submit, list, describe, explain, cancel, logs."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path
from typing import Annotated

import typer
from msgspec import UnsetType
from typer.core import TyperCommand

from common.api import (
    Cancel,
    Done,
    GetLogs,
    JobRow,
    Jobs,
    ListJobs,
    Logs,
    Submit,
    Submitted,
    Throttle,
)
from common.arrays import MAX_TASKS
from common.errors import ConfigError, Unavailable
from common.model import STORE_INDEX, ArraySpec, JobSpec
from common.terminal import visible_log
from coordinator import plain_text
from coordinator.cli import columns
from coordinator.cli.complete import complete_jobs
from coordinator.cli.follow import exit_code_of, follow_logs, until_ended
from coordinator.cli.job_file import FileKind
from coordinator.cli.output import (
    Format,
    NoHeadersOption,
    OutputOption,
    QuietOption,
    Show,
    put_json,
    put_rows,
)
from coordinator.cli.reconnect import Patience
from coordinator.cli.session import is_timeout, say, session
from coordinator.cli.shared import add_describe, add_explain
from coordinator.cli.submit import SubmitFlags, job_spec
from coordinator.client import Client

app = typer.Typer(no_args_is_help=True, help="Submit jobs and follow them.")

WATCH_PERIOD_S = 2.0
SUBMIT_ATTEMPTS = 3

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="Id, number or name.", autocompletion=complete_jobs)
]

_COMMAND = "aryl.command"


class SubmitCommand(TyperCommand):
    """Keeps everything after the first `--` as the job's command, its options untouched."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's own base is wider
        """Split off the command before the rest is parsed."""
        if "--" in args:
            place = args.index("--")
            ctx.meta[_COMMAND] = tuple(args[place + 1 :])
            args = args[:place]
        return super().parse_args(ctx, args)


@app.command(
    "submit",
    cls=SubmitCommand,
    options_metavar="[OPTIONS]",
    epilog="The command comes after `--`: aryl job submit --workers 2:4 -- python train.py",
)
def submit(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="Job file in TOML, YAML or JSON, or - for standard input; flags override it.",
        ),
    ] = None,
    kind: Annotated[
        FileKind | None,
        typer.Option("--format", help="Format of the job file; default: by its name, else toml."),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job.")] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="MIN[:MAX]", help="Smallest and largest worker count.")
    ] = None,
    gpus_per_worker: Annotated[
        int | None, typer.Option(metavar="N", help="GPUs of each worker.")
    ] = None,
    workdir: Annotated[
        str | None, typer.Option(metavar="PATH", help="Working directory, on every node.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Environment variable; may be repeated."),
    ] = None,
    gpu_type: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="Accepted GPU type; repeat in order of preference."),
    ] = None,
    priority: Annotated[
        int | None, typer.Option(metavar="N", help="Jobs of higher priority start first.")
    ] = None,
    preemptibility: Annotated[
        str | None,
        typer.Option(metavar="non|semi|full", help="Which workers may run on lent nodes."),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time to save between SIGTERM and SIGKILL, such as 30s."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="PATH", help="Path of its checkpoints.")
    ] = None,
    expected_runtime: Annotated[
        str | None, typer.Option(metavar="TIME", help="Running time with MIN workers, such as 2h.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="Deadline, counted from submission.")
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Longest running time; then the job is stopped."),
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(metavar="none|torchrun", help="Program that starts the ranks.")
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHEN:JOB",
            help="Start only after another job, by its id or number: started:, ok:, not_ok: or "
            "ended:JOB; may be repeated, and all must hold.",
        ),
    ] = None,
    hold: Annotated[
        bool, typer.Option("--hold", help="Keep the job out of the queue until `aryl job release`.")
    ] = False,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="INDICES[%N]",
            help="One task for each index, such as 0-99 or 1,3,7; with %5, at most 5 at once.",
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL",
            help="Run only on nodes with this label: key, key=value or key=value,value; "
            "alternatives are joined by |; may be repeated, and all must hold.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Run on no node with this label; may be repeated."),
    ] = None,
    require_nodes: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE[,NODE]", help="Run only on these nodes; may be repeated."),
    ] = None,
    exclude_nodes: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE[,NODE]", help="Run on none of these nodes; may be repeated."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the job ends and return its exit code.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Queue nothing: show what would happen, as `aryl plan job` does."
        ),
    ] = False,
    output: OutputOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Queue a job, from a file, from flags, or from both.

    Once this returns, the job is in the coordinator's journal: no crash loses it. A job is refused
    if no node has its GPU types, or if one worker needs more GPUs than any node of its types has.
    A job that the present fleet could never run, such as a gang larger than the fleet, is queued
    with a warning, as nodes may join.
    """
    flags = SubmitFlags(
        name=name,
        workers=workers,
        gpus_per_worker=gpus_per_worker,
        workdir=workdir,
        env=env or (),
        gpu_types=gpu_type or (),
        priority=priority,
        preemptibility=preemptibility,
        grace=grace,
        checkpoint=checkpoint,
        expected_runtime=expected_runtime,
        deadline=deadline,
        time_limit=time_limit,
        launcher=launcher,
        after=after or (),
        is_held=hold,
        array=array,
        require=require or (),
        exclude=exclude or (),
        require_nodes=require_nodes or (),
        exclude_nodes=exclude_nodes or (),
    )
    spec = job_spec(file, flags, ctx.meta.get(_COMMAND, ()), here=Path.cwd(), kind=kind)
    show = Show(output=output, is_quiet=quiet)
    here = session(ctx)
    if dry_run:
        from coordinator.cli import plan  # here, as few submissions are dry runs

        plan.finish(plan.plan_job(here, spec), spec.name, output, here)
        return

    async def work(client: Client) -> JobRow | None:
        answer = await _submit(client, spec)
        job_id = answer.job_id
        _submitted(show, spec, answer)
        if not wait:
            return None
        try:
            return await until_ended(client, here.clock, job_id)
        finally:
            say(f"see: aryl job describe {job_id}")

    row = here.run(work)
    if row is not None:
        raise typer.Exit(exit_code_of(row))


async def _submit(client: Client, spec: JobSpec) -> Submitted:
    """Submit to the cell. A lost answer is asked for again: same request, same job."""
    request = Submit(spec=spec, request_id=uuid.uuid4().hex)
    for attempt in range(1, SUBMIT_ATTEMPTS + 1):
        try:
            return await client.ask(request, Submitted)
        except Unavailable as error:
            if attempt == SUBMIT_ATTEMPTS or not is_timeout(error):
                raise
            say(f"no answer yet; asking again ({attempt} of {SUBMIT_ATTEMPTS - 1})")
    raise AssertionError("the last attempt returns or raises")


def _submitted(show: Show, spec: JobSpec, answer: Submitted) -> None:
    """Say that it is queued; and, in every form of output, why it could never run as things are."""
    match show.form:
        case Format.JSON:
            gate = {} if isinstance(answer.gate, UnsetType) else {"gate": answer.gate}
            put_json({"job_id": answer.job_id, "warnings": list(answer.warnings), **gate})
        case Format.NAME:
            typer.echo(answer.job_id)
        case Format.TABLE | Format.WIDE:
            what = "is queued" if isinstance(answer.gate, UnsetType) else "is not in the queue yet"
            typer.echo(f"{_what(spec)} {answer.job_id} ({spec.name}) {what}")
    if not isinstance(answer.gate, UnsetType):
        say(answer.gate)
    for warning in answer.warnings:
        say(f"warning: {warning}")
    if answer.warnings:
        say("it waits until the fleet or the settings of the cell change")


def _what(spec: JobSpec) -> str:
    return "array" if isinstance(spec.array, ArraySpec) else "job"


@app.command("list")
def list_(
    ctx: typer.Context,
    is_all: Annotated[bool, typer.Option("--all", "-a", help="List ended jobs too.")] = False,
    tasks: Annotated[
        bool,
        typer.Option("--tasks", help="List the tasks of arrays too: those in the line or later."),
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every 2 s.")] = False,
    output: OutputOption = Format.TABLE,
    no_headers: NoHeadersOption = False,
    quiet: QuietOption = False,
) -> None:
    """List jobs, oldest first; ended ones only with --all. An array is one line."""
    here = session(ctx)
    show = Show(output=output, has_headings=not no_headers, is_quiet=quiet)

    async def work(client: Client) -> None:
        patience = Patience()
        while True:
            request = ListJobs(is_live_only=not is_all, in_full=True)
            found = await patience.answer(client.ask(request, Jobs))
            if found is not None:
                if watch:
                    here.out.clear()
                table = columns.jobs(here.clock.wall_s())
                rows = plain_text.in_order(found.rows)
                rows = rows if tasks else plain_text.without_tasks(rows)
                put_rows(here, show, "jobs", rows, table, lambda row: row.job_id)
            if not watch:
                return
            await here.clock.sleep(WATCH_PERIOD_S)

    # Ctrl-C is how a watch ends, not an error.
    with contextlib.suppress(KeyboardInterrupt) if watch else contextlib.nullcontext():
        here.run(work)


add_describe(
    app,
    "job",
    JobArgument,
    about="Show one job in full: its request, allocation, reasons and events.",
)
add_explain(
    app,
    "job",
    JobArgument,
    about="Explain why a job is in its state: blockers, estimates with sources, events.",
)


@app.command("cancel")
def cancel(
    ctx: typer.Context,
    job: JobArgument,
    output: OutputOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Cancel a job, an array, or some tasks of an array; workers get their grace first.

    Tasks go by their array and index: ARRAY_7, or 'ARRAY_[10-20,30]' in quotes. Tasks that wait
    never start.
    """
    done = session(ctx).ask(Cancel(job_id=job), Done)
    if output == Format.JSON:
        put_json({"detail": done.detail})
    elif not quiet:
        say(done.detail)


@app.command(
    "throttle", epilog="Example: aryl job throttle jbqk7x2pd 10; none takes the bound away."
)
def throttle_(
    ctx: typer.Context,
    job: JobArgument,
    most: Annotated[
        str, typer.Argument(metavar="N|none", help="Most tasks at once, from 1; none: no bound.")
    ],
    output: OutputOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Change how many tasks of an array may wait in the line and run at once.

    Tasks that run go on. With a lower number, those that wait leave the line first.
    """
    done = session(ctx).ask(Throttle(job_id=job, throttle=_count(most)), Done)
    if output == Format.JSON:
        put_json({"detail": done.detail})
    elif not quiet:
        say(done.detail)


def _count(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_TASKS:
        raise ConfigError(f"N: {text!r}, expected a count from 1 to {MAX_TASKS}, or none")
    return int(text)


@app.command("logs")
def logs_(
    ctx: typer.Context,
    job: JobArgument,
    worker: Annotated[
        int | None,
        typer.Option(
            min=STORE_INDEX,
            metavar="INDEX",
            help="Index of the worker, -1 for the rendezvous store; default: the lowest.",
        ),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of an attempt; default: the latest."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new output until the job ends.")
    ] = False,
    max_bytes: Annotated[
        int,
        typer.Option(
            min=1, max=500_000, metavar="BYTES", help="Size of the end of the log to print."
        ),
    ] = 65_536,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print control codes unchanged: the terminal obeys them.")
    ] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Print the end of a worker's log, or follow it with -f.

    Colors are left out, and other control codes are shown as characters, unless --raw is given.

    With -o json the text comes with its job, node, worker and attempt; with -f one object for each
    piece. Nodes keep logs for a while: `kept_logs_count` and `kept_logs_bytes` of the agent.
    """
    if output == Format.NAME:
        raise ConfigError("-o name: a log has no name; leave -o out for its text, or -o json")
    here = session(ctx)

    def show(found: Logs) -> None:
        if output == Format.JSON:
            whose = {"node": found.node, "worker_index": found.worker_index}
            put_json({"logs": {"job": job, **whose, "attempt": found.attempt, "text": found.text}})
        else:
            # click takes codes out of what goes to no terminal; raw is raw there too.
            text = found.text if raw else visible_log(found.text)
            typer.echo(text, nl=False, color=raw or None)

    request = GetLogs(job_id=job, worker_index=worker, attempt=attempt, max_bytes=max_bytes)

    async def work(client: Client) -> None:
        if follow:
            await follow_logs(client, here.clock, request, show=show)
        else:
            show(await client.ask(request, Logs))

    with contextlib.suppress(KeyboardInterrupt) if follow else contextlib.nullcontext():
        here.run(work)
