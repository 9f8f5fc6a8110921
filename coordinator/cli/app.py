"""The `aryl` command: all subcommands, and errors as exit codes."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from common.errors import ArylError
from common.version import version
from coordinator.cli import (
    cell,
    events,
    job_orders,
    jobs,
    loans,
    monitoring,
    nats_permissions,
    nodes,
    services,
    tenants,
)
from coordinator.cli.arguments import check_text, in_our_words
from coordinator.cli.interrupt import importing
from coordinator.cli.session import EXIT_INTERRUPTED, Session, Surroundings, exit_code, report
from coordinator.client.target import Choice

LATE = {
    "audit": "coordinator.cli.audit",
    "history": "coordinator.cli.history",
    "plan": "coordinator.cli.plan",
    "policies": "coordinator.cli.policies",
    "replay": "coordinator.cli.replay",
    "report": "coordinator.cli.report",
    "simulate": "coordinator.cli.simulate.command",
    "slurm": "coordinator.cli.slurm.link",
    "top": "coordinator.cli.top",
    "up": "coordinator.cli.up",
    "web": "coordinator.cli.web",
}
"""Commands and their modules, which are loaded only where they are asked for.

They bring every policy, numpy and the demo. A command that only asks a coordinator takes half the
CPU without them.
"""


class Root(TyperGroup):
    """Answers every foreseeable error with a message and an exit code, never with a traceback."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # its base is wider
        """Check the whole line before any part of it is parsed."""
        if not ctx.resilient_parsing:  # a line that a person is still typing is only completed
            check_text(ctx, args)
        with in_our_words():
            return super().parse_args(ctx, args)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # its base is wider
        """The names of all commands, also of those that are not loaded."""
        return [*super().list_commands(ctx), *(name for name in LATE if name not in self.commands)]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]  # its base is wider
        """A command by its name; a late one is loaded now.

        A name that no command has loads all of them: one of them may be meant.
        """
        names = (cmd_name,) if cmd_name in LATE else LATE
        if cmd_name not in self.commands:
            self.commands.update({name: _loaded(LATE[name]) for name in names})
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # its base is wider
        """Run a command."""
        try:
            with in_our_words():
                return super().invoke(ctx)
        except ArylError as error:
            here = ctx.find_object(Session)
            report(error, is_of_this_machine=here is not None and here.is_of_this_machine)
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


def _loaded(module: str) -> Any:
    """The command that a module registers."""
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    with importing():
        import_module(module).register(alone)
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 2 usage, 3 not found, 4 conflict, 5 denied, 6 unreachable, 7 timeout",
)
job_orders.register(jobs.app)
app.add_typer(jobs.app, name="job")
app.add_typer(nodes.app, name="node")
app.add_typer(services.app, name="service")
app.add_typer(loans.app, name="loan")
app.add_typer(tenants.app, name="tenant")
app.add_typer(monitoring.app, name="monitoring")
cell.register(app)
events.register(app)
nats_permissions.register(app)


def _version(is_asked: bool) -> None:
    if is_asked:
        found = version()
        typer.echo(f"aryl {found}" if found else "aryl from source, not installed")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    nats_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="nats://host:port or tls://host:port [$ARYL_NATS_URL]"),
    ] = None,
    cell: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the cell. [$ARYL_CELL]")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tenant to act for. [$ARYL_TENANT]")
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Your user name; default: the login name. [$ARYL_USER]"),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow plain text over a network. [$ARYL_INSECURE]")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="Seconds to wait for an answer.")
    ] = 10.0,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Aryl lends idle inference nodes to training and takes them back in time.

    Without flags, variables and ~/.config/aryl/config.toml it talks to the cell on this machine.
    """
    flags = Choice(
        nats_url=nats_url, cell=cell, tenant=tenant, user=user, insecure=insecure or None
    )
    around = ctx.find_object(Surroundings) or Surroundings.real()
    ctx.obj = Session(around, flags=flags, timeout_s=timeout)


def whole() -> Any:
    """The command with all that it would load late; for those that read its help and options."""
    made: Any = typer.main.get_command(app)
    made.commands.update({name: _loaded(module) for name, module in LATE.items()})
    return made
