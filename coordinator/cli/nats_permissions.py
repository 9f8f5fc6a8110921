"""`aryl nats-permissions`: the users of a NATS server with the rights that they need.

It contacts no server, because a fleet that is being set up has none yet.
"""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from common.errors import ConfigError
from common.permissions import (
    Login,
    Permissions,
    of_coordinator,
    of_mqtt_node,
    of_node,
    of_user,
    person,
    users_file,
)
from common.subjects import token

WATCHED = ("get_status", "list_services")
"""What a watcher asks: docs/operate.md says what for."""
PASSWORD_BYTES = 16

NodesOption = Annotated[
    list[str] | None, typer.Option("--node", metavar="NODE", help="Node; may be repeated.")
]
MqttNodesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--mqtt-node", metavar="NODE", help="Node whose agent uses MQTT; may be repeated."
    ),
]
UsersOption = Annotated[
    list[str] | None,
    typer.Option("--user", metavar="TENANT/USER", help="User; may be repeated."),
]
WatchersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--watcher",
        metavar="TENANT/USER",
        help="User who may ask only what a monitor needs to know; may be repeated.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add `aryl nats-permissions`."""

    @app.command("nats-permissions")
    def nats_permissions(  # pyright: ignore[reportUnusedFunction]
        cell: Annotated[str, typer.Argument(metavar="CELL", help="Name of the cell.")],
        node: NodesOption = None,
        mqtt_node: MqttNodesOption = None,
        user: UsersOption = None,
        watcher: WatchersOption = None,
    ) -> None:
        """Print the `authorization` block of nats-server, with the rights that each identity needs.

        It always has the coordinator, with MQTT rights if a node uses MQTT. A person's NATS user
        is TENANT-USER. Each call makes new passwords: to add an identity later, copy only its
        entry.
        """
        token(cell, what="cell")
        rights: dict[str, Permissions] = {}
        _add(rights, "coordinator", of_coordinator(cell, has_mqtt_agents=bool(mqtt_node)))
        for name in node or ():
            _add(rights, token(name, what="--node"), of_node(cell, name))
        for name in mqtt_node or ():
            _add(rights, token(name, what="--mqtt-node"), of_mqtt_node(cell, name))
        for name in user or ():
            tenant, who = _person(name, "--user")
            _add(rights, person(tenant, who), of_user(cell, tenant, who))
        for name in watcher or ():
            tenant, who = _person(name, "--watcher")
            _add(rights, person(tenant, who), of_user(cell, tenant, who, WATCHED))
        logins = [
            Login(name=name, password=secrets.token_hex(PASSWORD_BYTES), permissions=permissions)
            for name, permissions in rights.items()
        ]
        typer.echo(users_file(logins))


def _add(rights: dict[str, Permissions], name: str, permissions: Permissions) -> None:
    """One NATS user more.

    Raises:
        ConfigError: NATS knows a user by its name alone, and this one is there.
    """
    if name in rights:
        raise ConfigError(f"{name}: two users of this name; give one of them another in the file")
    rights[name] = permissions


def _person(value: str, option: str) -> tuple[str, str]:
    tenant, slash, user = value.partition("/")
    if not slash:
        raise ConfigError(f"{option}: {value!r}, expected TENANT/USER")
    return token(tenant, what=f"{option}: tenant"), token(user, what=f"{option}: user")
