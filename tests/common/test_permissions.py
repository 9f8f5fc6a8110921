"""Who may send and hear what on NATS: every pair of identity and subject, on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from common import permissions, streams, subjects
from common.api import REQUESTS
from common.natscalls import round_trip
from common.natsclient import NatsClient
from common.permissions import Login
from coordinator.demo.nats_server import find_binary
from tests.harness.servers import client_url

PATIENCE_S = 60.0
CELL = "c"
NODES = ("n1", "n2")
PEOPLE = {"ada": ("ops", "ada"), "ann": ("team", "ann"), "bob": ("rest", "bob")}
WATCHER = ("watch", "cron")
WATCHED = ("get_status", "list_services")
VERBS = tuple(str(kind.__struct_config__.tag) for kind in REQUESTS)
STREAMS = {
    streams.journal(CELL): subjects.journal(CELL),
    streams.snapshots(CELL): subjects.snapshots(CELL),
    streams.leader_stream(CELL): streams.leader_subject(CELL),
    streams.history(CELL): subjects.history(CELL, "j1"),
}
RIGHTS = {
    "coordinator": permissions.of_coordinator(CELL),
    **{node: permissions.of_node(CELL, node) for node in NODES},
    **{name: permissions.of_user(CELL, *person) for name, person in PEOPLE.items()},
    "watcher": permissions.of_user(CELL, *WATCHER, WATCHED),
}


class Rule(NamedTuple):
    """A subject, and all who may send and hear on it."""

    subject: str
    senders: frozenset[str] = frozenset()
    listeners: frozenset[str] = frozenset()


def rule(subject: str, sender: str = "", listener: str = "") -> Rule:
    """One identity at most on each side."""
    return Rule(subject, frozenset(filter(None, [sender])), frozenset(filter(None, [listener])))


def _of_api(tenant: str, user: str, verb: str) -> Rule:
    subject = subjects.api(CELL, tenant, user, verb)
    if (tenant, user) == WATCHER:
        return rule(subject, "watcher" if verb in WATCHED else "", "coordinator")
    return rule(subject, user if PEOPLE.get(user) == (tenant, user) else "", "coordinator")


def _inbox_of_user(tenant: str, user: str) -> Rule:
    name = {WATCHER: "watcher", **{v: k for k, v in PEOPLE.items()}}.get((tenant, user), "")
    return rule(f"{subjects.user_inbox(CELL, tenant, user)}.x.1", "coordinator", name)


def to_node(build: Callable[[str, str], str]) -> Callable[..., Rule]:
    """A subject on which only the coordinator asks."""
    return lambda node: rule(build(CELL, node), "coordinator", node)


def from_node(build: Callable[[str, str], str]) -> Callable[..., Rule]:
    """A subject on which only a node speaks."""
    return lambda node: rule(build(CELL, node), node, "coordinator")


BUILDERS: dict[str, Callable[..., Rule]] = {
    "node_report": from_node(subjects.node_report),
    "node_renew": from_node(subjects.node_renew),
    "node_desired": to_node(subjects.node_desired),
    "node_ledger": to_node(subjects.node_ledger),
    "node_logs": to_node(subjects.node_logs),
    "api": _of_api,
    "api_all": lambda: rule(subjects.api_all(CELL), listener="coordinator"),
    "journal": lambda: rule(subjects.journal(CELL), "coordinator"),
    "snapshots": lambda: rule(subjects.snapshots(CELL), "coordinator"),
    "history": lambda about: rule(subjects.history(CELL, about), "coordinator"),
    "coordinator_inbox": lambda: rule(
        f"{subjects.coordinator_inbox(CELL)}.x.1", listener="coordinator"
    ),
    "node_answers": lambda node: rule(
        f"{subjects.node_answers(CELL, node)}.x.1", listener="coordinator"
    ),
    "node_inbox": lambda node: rule(f"{subjects.node_inbox(CELL, node)}.x.1", "coordinator", node),
    "user_inbox": _inbox_of_user,
}
"""By the name of the function of `common.subjects`: who is on each side of what it builds."""

NAMES: dict[str, tuple[str, ...]] = {
    "node": NODES,
    "about": ("j1", "n1"),
    "tenant": (*(tenant for tenant, _ in PEOPLE.values()), WATCHER[0]),
    "user": (*PEOPLE, WATCHER[1]),
    "verb": (*VERBS, "none"),
}


def of_subjects() -> Iterator[Rule]:
    """Whatever `common.subjects` can build of these names."""
    for name, build in inspect.getmembers(subjects, inspect.isfunction):
        parameters = list(inspect.signature(build).parameters)
        if build.__module__ == subjects.__name__ and parameters[:1] == ["cell"]:
            for values in itertools.product(*(NAMES[one] for one in parameters[1:])):
                yield BUILDERS[name](*values)


def of_jetstream() -> Iterator[Rule]:
    """Whatever JetStream can be asked of a cell's streams; and the leader's key."""
    api = "$JS.API"
    kept, _, leader, past = STREAMS
    yield rule(streams.leader_subject(CELL), "coordinator")
    for stream, subject in STREAMS.items():
        is_log = stream not in (leader, past)
        used = {
            f"STREAM.INFO.{stream}",
            f"STREAM.CREATE.{stream}",
            f"STREAM.MSG.GET.{stream}",
            *([f"STREAM.PURGE.{stream}"] if is_log else []),
            *([f"CONSUMER.CREATE.{stream}.x.{subject}"] if is_log else []),
            *([f"STREAM.UPDATE.{stream}"] if stream == past else []),
            *([f"CONSUMER.CREATE.{stream}.x"] if stream == past else []),
            *([f"CONSUMER.INFO.{stream}.x"] if stream == past else []),
            *([f"CONSUMER.MSG.NEXT.{stream}.x"] if stream != leader else []),
        }
        unused = {
            *(f"STREAM.{verb}.{stream}" for verb in ("PURGE", "UPDATE", "DELETE", "MSG.GET")),
            *(f"STREAM.{verb}.{stream}" for verb in ("MSG.DELETE", "SNAPSHOT", "RESTORE")),
            *(f"STREAM.{verb}.{stream}" for verb in ("LEADER.STEPDOWN", "PEER.REMOVE")),
            *(f"CONSUMER.{verb}.{stream}.x" for verb in ("CREATE", "DURABLE.CREATE", "DELETE")),
            *(f"CONSUMER.{verb}.{stream}.x" for verb in ("INFO", "PAUSE", "RESET", "MSG.NEXT")),
            *(f"CONSUMER.{verb}.{stream}" for verb in ("CREATE", "LIST", "NAMES")),
            f"CONSUMER.CREATE.{stream}.x.{kept}",
            f"DIRECT.GET.{stream}",
            f"DIRECT.GET.{stream}.{subject}",
        }
        for operation in used | unused:
            yield rule(f"{api}.{operation}", "coordinator" if operation in used else "")
        yield rule(f"$JS.ACK.{stream}.x.1.1.1.1.0")
    for operation in (
        "INFO",
        "STREAM.LIST",
        "STREAM.NAMES",
        "STREAM.CREATE.OTHER",
        "META.STEPDOWN",
    ):
        yield rule(f"{api}.{operation}")


def of_others() -> Iterator[Rule]:
    """What nobody may: another cell, the server itself, and what covers more than one identity."""
    yield from (rule(subject) for subject in ("$SYS.REQ.SERVER.PING", "_INBOX.x", "x", "_R_.x"))
    yield rule(subjects.journal("d"))
    yield rule(subjects.api("d", "ops", "ada", "submit"))
    yield rule(f"{subjects.node_inbox(CELL, 'n1')}")
    yield rule(subjects.node_report("d", "n1"))


WIDE = [
    ">",
    "*.>",
    "aryl.>",
    f"aryl.v1.{CELL}.>",
    f"aryl.v1.{CELL}.node.n1.*",
    f"aryl.v1.{CELL}.node.*.desired",
    f"aryl.v1.{CELL}.inbox.>",
    f"aryl.v1.{CELL}.inbox.node.>",
    f"aryl.v1.{CELL}.inbox.user.ops.>",
    "$JS.>",
    "$KV.>",
    "$SYS.>",
    "_INBOX.>",
]
"""Patterns that no identity may listen to."""


class Peer:
    """One identity on the server, and what the server refused it."""

    def __init__(self) -> None:
        self.client = NatsClient()
        self.refused: list[str] = []

    async def connect(self, url: str, name: str) -> None:
        """As the user of this name."""

        async def note(error: Exception) -> None:
            self.refused.append(str(error))

        host = url.removeprefix("nats://")
        await self.client.connect(f"nats://{name}:{name}@{host}", error_cb=note)

    async def refusals(self, kind: str) -> set[str]:
        """The subjects, in lower case, that it was refused since it asked last."""
        await round_trip(self.client)
        said, self.refused[:] = list(self.refused), []
        assert all(f" to {kind} to " in one for one in said), said
        return {one.partition(f" to {kind} to ")[2].lower() for one in said}


@pytest.fixture
async def peers(tmp_path: Path) -> AsyncIterator[dict[str, Peer]]:
    """Every identity, connected to one server with the rights that it needs."""
    logins = [Login(name=k, password=k, permissions=v) for k, v in RIGHTS.items()]
    config = tmp_path / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:-1"\nports_file_dir: {json.dumps(str(tmp_path))}\n'
        f"{permissions.users_file(logins)}\n"
    )
    server = await asyncio.create_subprocess_exec(
        str(find_binary()), "-c", str(config), stderr=asyncio.subprocess.DEVNULL
    )
    found = {name: Peer() for name in RIGHTS}
    try:
        url = await client_url(tmp_path)
        for name, peer in found.items():
            await peer.connect(url, name)
        yield found
    finally:
        for peer in found.values():
            with contextlib.suppress(Exception):
                await peer.client.close()
        server.terminate()
        await server.wait()


@pytest.mark.nats
@pytest.mark.slow
async def test_each_identity_sends_and_hears_what_it_needs_and_nothing_else(
    peers: dict[str, Peer],
) -> None:
    """For each subject that the code builds, and for what JetStream and the server answer to."""
    rules = [*of_subjects(), *of_jetstream(), *of_others(), *map(rule, WIDE)]
    assert len({one.subject for one in rules}) == len(rules)
    for name, peer in peers.items():
        sent = [one for one in rules if "*" not in one.subject and ">" not in one.subject]
        for one in sent:
            await peer.client.publish(one.subject, b"")
        may_not_send = {one.subject.lower() for one in sent if name not in one.senders}
        assert await peer.refusals("publish") == may_not_send, name
        for one in rules:
            await peer.client.subscribe(one.subject)
        may_not_hear = {one.subject.lower() for one in rules if name not in one.listeners}
        assert await peer.refusals("subscribe") == may_not_hear, name


@pytest.mark.nats
@pytest.mark.slow
async def test_a_node_answers_the_coordinator_once_and_nobody_else(
    peers: dict[str, Peer],
) -> None:
    """The right to an answer comes with the question and ends with the answer."""
    node, coordinator = peers["n1"].client, peers["coordinator"].client
    inbox, ledger = subjects.coordinator_inbox(CELL), subjects.node_ledger(CELL, "n1")
    asked, heard = await node.subscribe(ledger), await coordinator.subscribe(f"{inbox}.>")
    await round_trip(node)
    await round_trip(coordinator)
    await coordinator.publish(ledger, b"?", reply=f"{inbox}.a.1")
    reply = (await asked.next_msg(timeout=PATIENCE_S)).reply
    for subject in (f"{inbox}.a.2", reply, reply):
        await node.publish(subject, b"!")
    assert await peers["n1"].refusals("publish") == {f"{inbox}.a.2", reply}
    await round_trip(coordinator)
    answer = await heard.next_msg(timeout=PATIENCE_S)
    assert (answer.subject, answer.data, heard.pending_msgs) == (reply, b"!", 0)
