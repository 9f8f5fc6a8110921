"""The NATS permissions that each identity needs, and no more, derived from the subjects. Pure.

The server's `authorization` is made of them (docs/reference.md), and so are the tests that try
each subject as each identity on a real server.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from msgspec import Struct

from common import streams, subjects

_ANY = "*"
_LINE = 110


_ASKS_NODE = (subjects.node_desired, subjects.node_ledger, subjects.node_logs)


class Permissions(Struct, frozen=True, kw_only=True):
    """The rights of one NATS user; anything not listed is refused.

    may_answer: one answer to each message that it gets. Only where each subject of `subscribe` is
        one on which the coordinator alone may publish: the sender of a message chooses the reply
        address, and the server lets the answer through.
    is_on_mqtt: it connects over MQTT, and not otherwise.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    may_answer: bool = False
    is_on_mqtt: bool = False


def of_coordinator(cell: str, *, has_mqtt_agents: bool = False) -> Permissions:
    """The rights of each coordinator of a cell, the leader and its standby."""
    asks = tuple(build(cell, _ANY) for build in _ASKS_NODE)
    hears = (subjects.node_report(cell), subjects.node_renew(cell))
    return Permissions(
        publish=(
            *asks,
            *(map(_by_topic, asks) if has_mqtt_agents else ()),
            f"{subjects.node_inbox(cell, _ANY)}.>",
            f"{subjects.user_inbox(cell, _ANY, _ANY)}.>",
            subjects.journal(cell),
            subjects.snapshots(cell),
            subjects.history(cell),
            streams.leader_subject(cell),
            *_log(streams.journal(cell), subjects.journal(cell)),
            *_log(streams.snapshots(cell), subjects.snapshots(cell)),
            # Where the answer to a write was lost, the record itself names its writer.
            _read_one(streams.journal(cell)),
            _read_one(streams.snapshots(cell)),
            *_history(streams.history(cell)),
            *_made(streams.leader_stream(cell)),
            _read_one(streams.leader_stream(cell)),
        ),
        subscribe=(
            *hears,
            *(map(_by_topic, hears) if has_mqtt_agents else ()),
            subjects.api_all(cell),
            f"{subjects.coordinator_inbox(cell)}.>",
        ),
    )


def of_node(cell: str, node: str) -> Permissions:
    """The rights of a node's agent."""
    node = subjects.token(node, what="node")
    return Permissions(
        publish=(subjects.node_report(cell, node), subjects.node_renew(cell, node)),
        subscribe=(
            subjects.node_desired(cell, node),
            subjects.node_ledger(cell, node),
            subjects.node_logs(cell, node),
            f"{subjects.node_inbox(cell, node)}.>",
        ),
        may_answer=True,
    )


def of_mqtt_node(cell: str, node: str) -> Permissions:
    """The rights of a node's agent on MQTT, where a request gives no right to answer."""
    node = subjects.token(node, what="node")
    return Permissions(
        publish=(
            _by_topic(subjects.node_report(cell, node)),
            _by_topic(subjects.node_renew(cell, node)),
            f"{subjects.node_answers(cell, node)}.*.*",
        ),
        subscribe=(
            *(_by_topic(build(cell, node)) for build in _ASKS_NODE),
            f"{subjects.node_inbox(cell, node)}.>",
        ),
        is_on_mqtt=True,
    )


def of_user(cell: str, tenant: str, user: str, verbs: Sequence[str] = (_ANY,)) -> Permissions:
    """The rights of a person, or of a program that asks.

    Args:
        verbs: all that it may ask; by default every verb. The coordinator decides which verbs a
            tenant's user may use, because it knows the owners of jobs.
    """
    tenant, user = subjects.token(tenant, what="tenant"), subjects.token(user, what="user")
    return Permissions(
        publish=tuple(subjects.api(cell, tenant, user, verb) for verb in verbs),
        subscribe=(f"{subjects.user_inbox(cell, tenant, user)}.>",),
    )


def person(tenant: str, user: str) -> str:
    """The NATS user of a person: the name in the URL that the person is given."""
    return f"{tenant}-{user}"


class Login(Struct, frozen=True, kw_only=True):
    """One NATS user with its rights."""

    name: str
    password: str
    permissions: Permissions


def users_file(logins: Sequence[Login]) -> str:
    """nats-server's `authorization` block."""
    entries = "\n".join(map(_entry, logins))
    return f"authorization {{\n  users: [\n{textwrap.indent(entries, '    ')}\n  ]\n}}"


def _entry(login: Login) -> str:
    name, password = json.dumps(login.name), json.dumps(login.password)
    rights = login.permissions
    lines = [
        f"{{ user: {name}, password: {password}, permissions: {{",
        f"    publish: {_listed(rights.publish)}",
        f"    subscribe: {_listed(rights.subscribe)}",
        *(["    allow_responses: true"] if rights.may_answer else []),
        "}" + (', allowed_connection_types: ["MQTT"] }' if rights.is_on_mqtt else " }"),
    ]
    return "\n".join(lines)


def _listed(patterns: tuple[str, ...]) -> str:
    one_line = f"[{', '.join(map(json.dumps, patterns))}]"
    if len(one_line) <= _LINE:
        return one_line
    return "[\n" + "".join(f"        {json.dumps(one)}\n" for one in patterns) + "    ]"


def _by_topic(subject: str) -> str:
    """The subjects of messages whose subject contains the reply address."""
    return subjects.with_reply(subject, _ANY, _ANY)


def _made(stream: str) -> tuple[str, ...]:
    """Create a missing stream, and inspect it: no right to change or delete it."""
    return f"$JS.API.STREAM.INFO.{stream}", f"$JS.API.STREAM.CREATE.{stream}"


def _log(stream: str, subject: str) -> tuple[str, ...]:
    """A stream that is read by consumers; its start may be dropped where it was made for that."""
    return (
        *_made(stream),
        f"$JS.API.STREAM.PURGE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.*.{subject}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
    )


def _history(stream: str) -> tuple[str, ...]:
    """A stream that is read by filters, and whose age limit is a setting."""
    return (
        *_made(stream),
        f"$JS.API.STREAM.UPDATE.{stream}",
        _read_one(stream),
        f"$JS.API.CONSUMER.CREATE.{stream}.*",
        f"$JS.API.CONSUMER.INFO.{stream}.*",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
    )


def _read_one(stream: str) -> str:
    """Read the message at one place of a stream."""
    return f"$JS.API.STREAM.MSG.GET.{stream}"
