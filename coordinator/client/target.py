"""The cell that a command talks to, and the user that it acts as.

Flags win over the environment, the environment over the configuration file, and that over the cell
that runs on this machine.
"""

from __future__ import annotations

import difflib
import getpass
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from common.clock import SystemClock
from common.decoding import parse_toml
from common.errors import ConfigError
from common.jobspec import readable
from common.model import NatsAccess
from common.subjects import token
from coordinator.client.registry import CellInfo

if TYPE_CHECKING:  # as in `over_nats`
    from common.bus import Bus

CONNECT_TIMEOUT_S = 5.0

LOCAL_TENANT = "ops"
"""The person who runs a cell on their own machine operates it."""


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of one source; None leaves a field to the next. The configuration file has these
    keys.
    """

    nats_url: str | None = None
    cell: str | None = None
    tenant: str | None = None
    user: str | None = None
    insecure: bool | None = None
    """Allow a plain-text URL that is not of this machine."""
    access: NatsAccess | None = None
    """Keys and certificates; only the file can say."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A cell, and the user of the connection."""

    nats_url: str
    cell: str
    tenant: str
    user: str
    insecure: bool = False
    access: NatsAccess = NatsAccess()
    is_of_this_machine: bool = False
    """It runs here and was found here; nothing else names its server."""


Connect = Callable[[Target], "AbstractAsyncContextManager[Bus]"]


@asynccontextmanager
async def over_nats(
    target: Target, *, timeout_s: float = CONNECT_TIMEOUT_S
) -> AsyncGenerator[Bus, None]:
    """A connection for the block.

    Raises:
        AccessError: no NATS server lets this person in within `timeout_s`, or each refuses it.
        ConfigError: the URL would send names and jobs in plain text over a network.
    """
    from common.bus import connect_nats  # only here: `--help` need not load a NATS client

    bus = await connect_nats(
        target.nats_url,
        identity=f"{target.tenant}/{target.user}",
        clock=SystemClock(),
        insecure=target.insecure,
        access=target.access,
        timeout_s=timeout_s,
    )
    try:
        yield bus
    finally:
        await bus.close()


def resolve(
    flags: Choice,
    environ: Mapping[str, str],
    find: Callable[[], CellInfo | None],
) -> Target:
    """The cell and the caller.

    Args:
        find: looks for a cell on this machine; asked only when nothing names one.

    Raises:
        ConfigError: no cell is named and none runs here; or what names it does not fit.
    """
    file = config_path(environ)
    choices = (flags, _of_environment(environ), _of_file(file))
    nats_url = _first(*(choice.nats_url for choice in choices))
    cell = _first(*(choice.cell for choice in choices))
    tenant = _first(*(choice.tenant for choice in choices))
    user = _first(*(choice.user for choice in choices))
    insecure = next((c.insecure for c in choices if c.insecure is not None), False)
    if cell is not None:
        token(cell, what="cell")  # before its server is looked for: it would be blamed for this
    is_of_this_machine = nats_url is None
    if nats_url is None:
        info = _of_this_machine(find(), cell, file)
        nats_url, cell, tenant = info.nats_url, info.cell, tenant or LOCAL_TENANT
    return Target(
        nats_url=nats_url,
        cell=token(_named(cell, "cell", file), what="cell"),
        tenant=token(_named(tenant, "tenant", file), what="tenant"),
        user=token(user or login_token(), what="user"),
        insecure=insecure,
        access=next((c.access for c in choices if c.access is not None), NatsAccess()),
        is_of_this_machine=is_of_this_machine,
    )


def config_path(environ: Mapping[str, str]) -> Path:
    """Where a person's configuration lies: ~/.config/aryl/config.toml, as XDG has it."""
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or Path.home()) / ".config"
    return Path(base) / "aryl" / "config.toml"


def login_token() -> str:
    """The login name as one subject token: what does not fit becomes a hyphen."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a user id without an account, as in some containers
        name = "nobody"
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:64] or "nobody"


def _first(*values: str | None) -> str | None:
    """The first that says something; an empty variable says nothing."""
    return next((value for value in values if value), None)


def _of_this_machine(found: CellInfo | None, cell: str | None, file: Path) -> CellInfo:
    """The cell that runs here, where it is the one that is meant; `cell` None means any."""
    if found is None and cell is None:
        raise ConfigError(
            "no cell is named and none runs on this machine; start one with `aryl up`, or "
            f"name one with --nats-url and --cell, ARYL_NATS_URL and ARYL_CELL, or in {file}"
        )
    if found is None or cell not in (None, found.cell):
        here = "no cell does" if found is None else f"cell {found.cell} does"
        raise ConfigError(
            f"cell {cell} does not run on this machine, {here}; name its NATS server too, "
            f"with --nats-url, ARYL_NATS_URL, or nats_url in {file}"
        )
    return found


def _named(value: str | None, field: str, file: Path) -> str:
    if value is None:
        flag = "--" + field.replace("_", "-")
        raise ConfigError(
            f"field {field} is missing; give {flag}, set ARYL_{field.upper()}, "
            f"or write {field} into {file}"
        )
    return value


def _of_environment(environ: Mapping[str, str]) -> Choice:
    insecure = environ.get("ARYL_INSECURE", "")
    if insecure not in ("", "0", "1"):
        raise ConfigError(f"ARYL_INSECURE: {insecure!r}, expected 0 or 1")
    return Choice(
        nats_url=environ.get("ARYL_NATS_URL"),
        cell=environ.get("ARYL_CELL"),
        tenant=environ.get("ARYL_TENANT"),
        user=environ.get("ARYL_USER"),
        insecure=insecure == "1" if insecure else None,
    )


def _of_file(path: Path) -> Choice:
    try:
        values = parse_toml(path.read_text())
    except FileNotFoundError:
        return Choice()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    for key in values:
        if key not in Choice.__struct_fields__:
            near = difflib.get_close_matches(key, Choice.__struct_fields__, n=1)
            known = ", ".join(Choice.__struct_fields__)
            hint = f"did you mean {near[0]}?" if near else f"there are {known}"
            raise ConfigError(f"{path}: unknown field {key}; {hint}")
    try:
        return msgspec.convert(values, Choice)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {readable(str(error))}") from None
