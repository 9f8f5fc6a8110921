"""Every NATS subject, built here and nowhere else. Must not know the bus."""

from __future__ import annotations

import re

from common.errors import ConfigError
from common.model import TOKEN_PATTERN

_PREFIX = "aryl.v1"
_TOKEN = re.compile(TOKEN_PATTERN)


def token(value: str, *, what: str) -> str:
    """`value` if it is one subject token, else `ConfigError` naming `what`."""
    if not _TOKEN.match(value):
        raise ConfigError(f"{what}: {value!r} is not a name of 1 to 64 of A-Z a-z 0-9 _ -")
    return value


def node_report(cell: str, node: str = "*") -> str:
    """Reports of a node, or of all nodes."""
    return f"{_PREFIX}.{cell}.node.{node}.report"


def node_desired(cell: str, node: str) -> str:
    """Requests that carry a node's desired state."""
    return f"{_PREFIX}.{cell}.node.{node}.desired"


def node_renew(cell: str, node: str = "*") -> str:
    """Lease renewals asked by a node, or by all nodes."""
    return f"{_PREFIX}.{cell}.node.{node}.renew"


def node_ledger(cell: str, node: str) -> str:
    """Requests for a node's ledger."""
    return f"{_PREFIX}.{cell}.node.{node}.ledger"


def node_logs(cell: str, node: str) -> str:
    """Requests for the tail of a worker's log."""
    return f"{_PREFIX}.{cell}.node.{node}.logs"


def api(cell: str, tenant: str, user: str, verb: str) -> str:
    """One verb of the API, called by one person."""
    return f"{_PREFIX}.{cell}.api.{tenant}.{user}.{verb}"


def api_all(cell: str) -> str:
    """Every API request of a cell."""
    return f"{_PREFIX}.{cell}.api.*.*.*"


def api_caller(subject: str) -> tuple[str, str, str]:
    """(tenant, user, verb) of an API request's subject."""
    tokens = subject.split(".")
    return tokens[-3], tokens[-2], tokens[-1]


def node_of(subject: str) -> str:
    """The node token of a `node.<node>.*` subject."""
    return subject.split(".")[-2]


def journal(cell: str) -> str:
    """The journal's one subject."""
    return f"{_PREFIX}.{cell}.journal"


def snapshots(cell: str) -> str:
    """Engine snapshots, newest kept."""
    return f"{_PREFIX}.{cell}.snapshot"


def history(cell: str, about: str = "*") -> str:
    """What happened to one job, node or service, or to each of them."""
    return f"{_PREFIX}.{cell}.history.{about}"


def inbox(identity: str) -> str:
    """The caller's own reply prefix: nobody else may read it."""
    return f"_INBOX_{identity}"
