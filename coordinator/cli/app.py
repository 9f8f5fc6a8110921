"""The `aryl` command: all subcommands, and errors as exit codes."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from common.errors import ArylError
from common.version import version
from coordinator.cli import plain_values
from coordinator.cli.arguments import check_text, in_our_words
from coordinator.cli.interrupt import importing
from coordinator.cli.session import EXIT_INTERRUPTED, Session, Surroundings, exit_code, report
from coordinator.client.target import Choice

LATE = {
    "status": "coordinator.cli.status",
    "explain": "coordinator.cli.cell",
    "freeze": "coordinator.cli.cell",
    "recall": "coordinator.cli.cell",
    "events": "coordinator.cli.events",
    "nats-permissions": "coordinator.cli.nats_permissions",
    "job": "coordinator.cli.job_orders",
    "node": "coordinator.cli.nodes",
    "service": "coordinator.cli.services",
    "loan": "coordinator.cli.loans",
    "tenant": "coordinator.cli.tenants",
    "monitoring": "coordinator.cli.monitoring",
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
"""All commands in the order of the help, and their modules, each loaded where it is asked for.

Some bring every policy, numpy and the demo. The options of all the others take longer to build than
one command takes to run.
"""


class Root(TyperGroup):
    """Answers every foreseeable error with a message and an exit code, never with a traceback."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # its base is wider
        """Check the whole line before any part of it is parsed."""
        if not ctx.resilient_parsing:  # a line that a person is still typing is only completed
            check_text(ctx, args)
        with in_our_words():
            return super().parse_args(ctx, args)

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]  # its base is wider
        """The options of the root."""
        return plain_values.spared(super().get_params(ctx))

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # its base is wider
        """The names of all commands, also of those that are not loaded."""
        return list(LATE)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]  # its base is wider
        """A command by its name, which is loaded now.

        A name that no command has loads all of them: one of them may be meant.
        """
        names = (cmd_name,) if cmd_name in LATE else LATE
        if cmd_name not in self.commands:
            self.commands.update({name: _loaded(name) for name in names})
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


def _loaded(name: str) -> Any:
    """The command that its module registers, alone or with others, or has as its group `app`."""
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    with importing():
        module = import_module(LATE[name])
    if hasattr(module, "register"):
        module.register(alone)
    else:
        alone.add_typer(module.app, name=name)
    made: Any = typer.main.get_command(alone)
    made = made.commands.get(name, made) if isinstance(made, TyperGroup) else made
    plain_values.spare(made)
    return made


app = typer.Typer(
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 2 usage, 3 not found, 4 conflict, 5 denied, 6 unreachable, 7 timeout",
)


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
    made.commands.update({name: _loaded(name) for name in LATE})
    return made
