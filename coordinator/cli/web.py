"""`aryl web`: a read-only page of the cell for browsers, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from common import systemd
from common.errors import ConfigError
from common.log import set_up
from coordinator.cli.session import Session, say, session
from coordinator.client import Client
from coordinator.web.address import DEFAULT_HOST, DEFAULT_PORT, Address
from coordinator.web.guard import Guard, read_token


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("web")(web)


def web(
    ctx: typer.Context,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address to serve on; one beyond this machine needs --token-file.",
        ),
    ] = f"{DEFAULT_HOST}:{DEFAULT_PORT}",
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Ask for the token in this file: at a login form, or as a bearer token.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Serve https with this certificate chain (PEM)."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key of --tls-cert.")
    ] = None,
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A further name of this server in URLs, such as that of a proxy; repeatable.",
        ),
    ] = None,
) -> None:
    """Serve a read-only page of the cell for browsers, live, until Ctrl-C.

    Every visitor sees what the user of this command may read. Nothing is loaded from elsewhere.
    """
    here = session(ctx)
    address = Address.parsed(listen)
    address = Address(host=address.host, port=address.port, certificate=tls_cert, key=tls_key)
    token = None if token_file is None else read_token(token_file)
    _check(address, token=token, is_insecure=here.target().insecure)
    set_up(level="WARNING", style="plain")
    guard = Guard(token=token, host_names=frozenset(host_name or ()))

    async def work(client: Client) -> None:
        await _serve(here, client, guard, address)

    here.run(work)


def _check(address: Address, *, token: str | None, is_insecure: bool) -> None:
    """Refuse what would show the cell to a network.

    Raises:
        ConfigError: names the option.
    """
    if (address.certificate is None) != (address.key is None):
        raise ConfigError("--tls-cert and --tls-key: expected both or neither")
    if address.is_loopback:
        return
    if token is None:
        raise ConfigError(
            f"--listen {address.host}: other machines reach this address; --token-file FILE makes "
            "them give a token"
        )
    if address.certificate is None and not is_insecure:
        raise ConfigError(
            f"--listen {address.host}: the token would cross the network in plain text; give "
            "--tls-cert and --tls-key, or --insecure before the command"
        )


async def _serve(here: Session, client: Client, guard: Guard, address: Address) -> None:
    from coordinator.web.server import Dashboard, serving  # only here: it takes long

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    dashboard = Dashboard(client, cell=here.target().cell, guard=guard, clock=here.clock)
    async with serving(dashboard, address) as url:
        say(f"dashboard: {url}")
        systemd.ready("serving")
        await stop.wait()
        systemd.stopping()
