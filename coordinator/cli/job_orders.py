"""`aryl job hold`, `release`, `requeue` and `change`: orders about jobs that were submitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer
from msgspec import UNSET, UnsetType, ValidationError, convert

from common.api import Change, Done, Hold, Release, Requeue
from common.errors import ConfigError
from common.jobspec import readable
from common.messages import Message
from common.model import Dependency, WorkerRange
from coordinator.cli import jobs
from coordinator.cli.complete import complete_jobs
from coordinator.cli.jobs import JobArgument
from coordinator.cli.output import Format, OutputOption, QuietOption, put_json
from coordinator.cli.session import say, session
from coordinator.cli.submit import dependencies, node_names, seconds, worker_range

T = TypeVar("T")

JobsArgument = Annotated[
    list[str],
    typer.Argument(metavar="JOB", help="Ids or names; all or none.", autocompletion=complete_jobs),
]
NONE = "none"
"""The value of a flag that takes the old value away."""


app = jobs.app
"""The group of all commands about jobs, with these orders among them."""


@app.command("hold", epilog="Example: aryl job hold j3f2k1b")
def hold(
    ctx: typer.Context,
    jobs: JobsArgument,
    output: OutputOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Keep waiting jobs out of the queue until their release.

    A running job is refused: `aryl job requeue JOB --hold` stops and holds it.
    """
    _give(ctx, Hold(job_ids=tuple(jobs)), output, is_quiet=quiet)


@app.command("release", epilog="Example: aryl job release j3f2k1b")
def release(
    ctx: typer.Context,
    jobs: JobsArgument,
    output: OutputOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """End the hold of jobs: they wait in the queue again.

    What an operator holds of another tenant, only an operator releases.
    """
    _give(ctx, Release(job_ids=tuple(jobs)), output, is_quiet=quiet)


@app.command("requeue", epilog="Example: aryl job requeue j3f2k1b --hold")
def requeue(
    ctx: typer.Context,
    jobs: JobsArgument,
    hold: Annotated[
        bool, typer.Option("--hold", help="Keep them out of the queue until their release.")
    ] = False,
    output: OutputOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Stop running jobs and queue them again.

    Workers get their grace and save. It counts as a preemption, and costs no restart.
    """
    _give(ctx, Requeue(job_ids=tuple(jobs), is_held=hold), output, is_quiet=quiet)


@app.command(
    "change",
    epilog="Example: aryl job change j3f2k1b --priority 10 --time-limit 2h --deadline none",
)
def change(
    ctx: typer.Context,
    job: JobArgument,
    priority: Annotated[
        int | None, typer.Option(metavar="N", help="Jobs of higher priority start first.")
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(metavar="TIME|none", help="Longest running time of an attempt, such as 2h."),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME|none", help="Deadline, counted from submission.")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="MIN[:MAX]",
            help="Smallest and largest worker count; while it has workers, only MAX may change.",
        ),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHEN:JOB|none",
            help="All dependencies of a waiting job, as in `aryl job submit`; may be repeated.",
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL|none", help="As in `aryl job submit`; replaces all."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL|none", help="As in `aryl job submit`; replaces all."),
    ] = None,
    require_nodes: Annotated[
        list[str] | None, typer.Option(metavar="NODE[,NODE]|none", help="The only nodes to run on.")
    ] = None,
    exclude_nodes: Annotated[
        list[str] | None, typer.Option(metavar="NODE[,NODE]|none", help="Nodes not to run on.")
    ] = None,
    output: OutputOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Change a job that has not ended; `none` takes a limit away.

    What it requires of nodes counts from its next start or growth on; its workers stay.

    The values are checked as at submission. A job that has run beyond its new time limit ends with
    its grace, and workers beyond a lower maximum are released.
    """
    request = Change(
        job_id=job,
        priority=_or_unset(priority),
        time_limit_s=_limit(time_limit, "time-limit"),
        deadline_s=_limit(deadline, "deadline"),
        workers=_workers(workers),
        depends_on=_after(after),
        require=_list(require, "require"),
        exclude=_list(exclude, "exclude"),
        require_nodes=_list(require_nodes, "require-nodes", node_names),
        exclude_nodes=_list(exclude_nodes, "exclude-nodes", node_names),
    )
    _give(ctx, request, output, is_quiet=quiet)


def _give(ctx: typer.Context, request: Message, output: Format, *, is_quiet: bool) -> None:
    answer = session(ctx).ask(request, Done)
    if output == Format.JSON:
        put_json({"detail": answer.detail})
    elif not is_quiet:
        say(answer.detail)


def _or_unset(value: T | None) -> T | UnsetType:
    return UNSET if value is None else value


def _limit(text: str | None, flag: str) -> float | UnsetType | None:
    if text is None:
        return UNSET
    return None if text == NONE else seconds(text, flag=flag)


def _workers(text: str | None) -> WorkerRange | UnsetType:
    if text is None:
        return UNSET
    try:
        return convert(worker_range(text), WorkerRange)
    except ValidationError as error:
        raise ConfigError(f"--workers: {text!r}: {readable(str(error))}") from None


def _list(
    texts: list[str] | None, flag: str, parts: Callable[[list[str]], list[str]] = list
) -> tuple[str, ...] | UnsetType:
    if not texts:
        return UNSET
    if NONE in texts:
        if len(texts) > 1:
            raise ConfigError(f"--{flag}: none stands alone")
        return ()
    return tuple(parts(texts))


def _after(texts: list[str] | None) -> tuple[Dependency, ...] | UnsetType:
    if not texts:
        return UNSET
    if NONE in texts:
        if len(texts) > 1:
            raise ConfigError("--after: none stands alone")
        return ()
    return convert(dependencies(texts), tuple[Dependency, ...])
