"""Every subject of the bus, built here and nowhere else."""

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
    """The events of one job, node or service, or of each of them."""
    return f"{_PREFIX}.{cell}.history.{about}"


# --- inboxes: where answers may go ----------------------------------------------------------


def coordinator_inbox(cell: str) -> str:
    """Prefix of the answers to the coordinators of a cell."""
    return f"{_PREFIX}.{cell}.inbox.coordinator"


def node_inbox(cell: str, node: str) -> str:
    """Prefix of the answers to a node's agent."""
    return f"{_PREFIX}.{cell}.inbox.node.{node}"


def user_inbox(cell: str, tenant: str, user: str) -> str:
    """Prefix of the answers to one person."""
    return f"{_PREFIX}.{cell}.inbox.user.{tenant}.{user}"


def reply_inbox(subject: str) -> str | None:
    """The inbox of the identity that may send on this subject; None of one without answers."""
    tokens = subject.split(".")
    if ".".join(tokens[:2]) != _PREFIX or not _are_tokens(*tokens[2:]):
        return None
    match tokens[2:]:
        case [cell, "node", node, "report" | "renew"]:
            return node_inbox(cell, node)
        case [cell, "node", _, "desired" | "ledger" | "logs"]:
            return coordinator_inbox(cell)
        case [cell, "api", tenant, user, _]:
            return user_inbox(cell, tenant, user)
        case _:
            return None


def may_answer(subject: str, reply: str) -> bool:
    """True if an answer to a message on `subject` may go to `reply`.

    A sender chooses the reply subject of its message, and the receiver publishes there with rights
    of its own. So the sender's own inbox is the only one that counts.
    """
    inbox = reply_inbox(subject)
    if inbox is None or not reply.startswith(f"{inbox}."):
        return False
    return _are_tokens(*reply[len(inbox) + 1 :].split("."))


# --- without a reply subject: MQTT 3.1.1 ----------------------------------------------------


NO_ANSWER = "_"
"""In both places of a reply: the sender needs no answer."""


def node_answers(cell: str, node: str = "*") -> str:
    """Prefix of the answers for which a node's agent needs a right of its own.

    No broker lets an MQTT client answer just because it got a request.
    """
    return f"{coordinator_inbox(cell)}.{node}"


def is_asked(pattern: str) -> bool:
    """True if messages on these subjects, wildcards or not, may need an answer."""
    return reply_inbox(pattern.replace("*", NO_ANSWER)) is not None


def answers_inbox(subject: str, *, of_all_nodes: bool = False) -> str:
    """The inbox of answers to requests made by `with_reply`.

    It is that of `reply_inbox`. For a request to a node it is the part that only this node may send
    to.

    Args:
        of_all_nodes: the pattern of these parts, for a caller that asks many nodes.

    Raises:
        ValueError: no permission to answer on this subject.
    """
    match subject.split("."):
        case [_, _, cell, "node", node, "desired" | "ledger" | "logs"]:
            return node_answers(cell, "*" if of_all_nodes else node)
        case _:
            inbox = reply_inbox(subject)
    if inbox is None:
        raise ValueError(f"{subject}: no permission to answer on this subject")
    return inbox


def with_reply(subject: str, inbox: str = NO_ANSWER, token: str = NO_ANSWER) -> str:
    """`subject` and the reply address below `answers_inbox`, in one."""
    return f"{subject}.{inbox}.{token}"


def split_reply(subject: str) -> tuple[str, str | None]:
    """Split a subject of `with_reply` into the subject and the reply address.

    None: it needs no answer.

    Raises:
        ValueError: `with_reply` never makes this subject.
    """
    head, *tokens = subject.rsplit(".", 2)
    if len(tokens) != 2 or not _are_tokens(*tokens):
        raise ValueError(f"{subject}: expects no answer")
    inbox = answers_inbox(head)
    return head, None if tokens == [NO_ANSWER, NO_ANSWER] else ".".join((inbox, *tokens))


def _are_tokens(*values: str) -> bool:
    return all(map(_TOKEN.fullmatch, values))
