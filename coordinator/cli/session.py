"""One run of the CLI: its environment, the connection to the coordinator, errors as exit codes.

Everything from outside (environment, clock, bus, terminal) comes in here and nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from common.access import ADVICE, AccessError, Cause
from common.api import ApiErrorCode
from common.clock import Clock, SystemClock
from common.errors import ArylError, ConfigError, ProtocolError, Unavailable
from common.messages import Message
from common.terminal import visible
from coordinator.cli.interrupt import EXIT_INTERRUPTED as EXIT_INTERRUPTED
from coordinator.client import EXIT_CODES, ApiRefused, Client, NoCoordinator, registry
from coordinator.client.target import Choice, Connect, Target, over_nats, resolve

T = TypeVar("T")
M = TypeVar("M", bound=Message)

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 6
EXIT_TIMEOUT = 7

NEXT_BY_FIELD = {
    "job": "aryl job list --all",
    "job_id": "aryl job list --all",
    "depends_on": "aryl job list --all",
    "worker_index": "aryl job describe JOB",
    "attempt": "aryl job describe JOB",
    "node": "aryl node list",
    "gpu.types": "aryl node list",
    "gpus_per_worker": "aryl node list",
    "service": "aryl service list",
    "mode": "aryl service mode --help",
    "loan": "aryl loan list --all",
    "lease_id": "aryl loan list --all",
    "subject": "aryl job list --all, aryl node list, aryl service list or aryl loan list --all",
    "tenant": "aryl --tenant ops ... (if you may)",
}
"""The command to run after a refusal, by the field that did not fit."""


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of the CLI; tests pass their own."""

    environ: Mapping[str, str]
    connect: Connect
    clock: Clock
    is_interactive: Callable[[], bool]
    """Whether a person can be asked."""

    @classmethod
    def real(cls) -> Surroundings:
        """This process's own."""
        return cls(
            environ=os.environ,
            connect=over_nats,
            clock=SystemClock(),
            is_interactive=lambda: sys.stdin.isatty() and sys.stderr.isatty(),
        )


class Session:
    """One run; `typer.Context.obj` of every command.

    Args:
        flags: the options before the command.
        timeout_s: how long one answer may take.
    """

    def __init__(
        self, around: Surroundings, *, flags: Choice | None = None, timeout_s: float = 10.0
    ) -> None:
        self.environ = around.environ
        self.clock = around.clock
        self.is_interactive = around.is_interactive
        self._connect = around.connect
        self._flags = flags or Choice()
        self._timeout_s = timeout_s
        self.is_of_this_machine = False
        """The cell was found on this machine; nothing else names its server."""

    @property
    def timeout_s(self) -> float:
        """How long one answer may take."""
        return self._timeout_s

    @property
    def out(self) -> Console:
        """Where data goes."""
        return console(self.environ)

    def target(self) -> Target:
        """The cell and the user; ConfigError when no source names them."""
        directory = registry.home(self.environ)
        found = resolve(self._flags, self.environ, lambda: registry.find(directory))
        self.is_of_this_machine = found.is_of_this_machine
        return found

    def run(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Connect, do the work, leave. Errors are those of `Client.ask` and `over_nats`."""
        return asyncio.run(self._run(work))

    async def _run(self, work: Callable[[Client], Awaitable[T]]) -> T:
        target = self.target()
        async with self._connect(target) as bus:
            client = Client(
                bus,
                cell=target.cell,
                tenant=target.tenant,
                user=target.user,
                timeout_s=self._timeout_s,
            )
            return await work(client)

    def ask(self, request: Message, kind: type[M]) -> M:
        """One request, one answer; errors as `Client.ask`."""

        async def work(client: Client) -> M:
            return await client.ask(request, kind)

        return self.run(work)


def session(ctx: typer.Context) -> Session:
    """The session of a command."""
    found = ctx.find_object(Session)
    assert found is not None, "the root command makes the session before any other runs"
    return found


class PlainConsole(Console):
    """A console that prints control codes in text as visible characters, and obeys only its own."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of a renderable; every text on its way to the terminal passes here."""
        for segment in super().render(renderable, options):
            is_own = segment.control is not None
            yield segment if is_own else Segment(visible(segment.text), segment.style)


def console(environ: Mapping[str, str]) -> Console:
    """Standard output: the terminal's width, or COLUMNS, or no limit without a terminal.

    Color needs a terminal and no NO_COLOR (https://no-color.org: set and not empty).
    """
    is_tty = sys.stdout.isatty()
    columns = environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) > 0 else None
    return PlainConsole(
        width=width or (None if is_tty else 10_000),
        no_color=bool(environ.get("NO_COLOR")) or not is_tty,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )


def say(message: str) -> None:
    """A message to the person: stderr, so that data stays clean."""
    typer.echo(visible(message), err=True)


def exit_code(error: ArylError) -> int:
    """The exit code of an error; docs/cli.md lists them."""
    match error:
        case ApiRefused():
            return EXIT_CODES[error.error.code]
        case registry.CellRuns():
            return EXIT_CODES[ApiErrorCode.CONFLICT]
        case ConfigError():
            return EXIT_USAGE
        case AccessError(cause=Cause.CREDENTIALS | Cause.PERMISSION):
            return EXIT_CODES[ApiErrorCode.DENIED]
        case Unavailable():
            return EXIT_TIMEOUT if is_timeout(error) else EXIT_UNREACHABLE
        case _:
            return EXIT_ERROR


def is_timeout(error: BaseException | None) -> bool:
    """True if a coordinator was asked and did not answer in time, rather than none being there."""
    if isinstance(error, AccessError):
        return False
    while error is not None:
        if isinstance(error, TimeoutError):
            return True
        # As in a traceback: `from None` means that the earlier error is not the cause.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def report(error: ArylError, *, is_of_this_machine: bool = False) -> None:
    """Print the failure, its cause, and the command to run next.

    is_of_this_machine: the cell runs here by `aryl up`; else it is a fleet's, with units.
    """
    say(f"aryl: {error}")
    advice = _next(error, is_of_this_machine)
    if advice:
        say(f"next: {advice}")


def _next(error: ArylError, is_of_this_machine: bool) -> str:
    match error:
        case ApiRefused():
            if error.error.code == ApiErrorCode.UNAVAILABLE:
                return "aryl status"
            return NEXT_BY_FIELD.get(error.error.field, "")
        case Unavailable() if is_timeout(error):
            return "aryl status; what was asked may still happen, so look before you repeat it"
        case AccessError() if not is_of_this_machine:
            return ADVICE[error.cause]
        case Unavailable() if is_of_this_machine:
            return "ask again; if that stays so, stop the cell here and start it with `aryl up`"
        case NoCoordinator():
            return "`systemctl status aryl-coordinator` on its machines, and check --cell"
        case ProtocolError():
            return "aryl --version here and on the coordinator: they may differ too much"
        case _:
            return ""
