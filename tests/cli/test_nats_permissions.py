"""`aryl nats-permissions`: the users file of a fleet, as the server takes it."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from common.permissions import Login, of_coordinator, of_node, of_user, users_file
from coordinator.cli.app import app
from tests.tables import each_row

ASKED = ["prod", "--node", "n1", "--node", "n2", "--user", "ops/ada", "--watcher", "watch/cron"]


def test_each_identity_has_its_rights_and_a_password_of_its_own() -> None:
    """What is printed is what the rights are made of, and no two calls make one password."""
    done = [CliRunner().invoke(app, ["nats-permissions", *ASKED]) for _ in range(2)]
    passwords = [re.findall(r'password: "([0-9a-f]{32})"', one.stdout) for one in done]
    rights = {
        "coordinator": of_coordinator("prod"),
        "n1": of_node("prod", "n1"),
        "n2": of_node("prod", "n2"),
        "ops-ada": of_user("prod", "ops", "ada"),
        "watch-cron": of_user("prod", "watch", "cron", ("get_status", "list_services")),
    }
    for one, own in zip(done, passwords, strict=True):
        logins = [
            Login(name=name, password=password, permissions=rights[name])
            for name, password in zip(rights, own, strict=True)
        ]
        assert one.stdout == users_file(logins) + "\n"
    assert len({*passwords[0], *passwords[1]}) == 2 * len(rights)


@each_row(
    ("arguments", "said"),
    [
        (["a.b"], "cell: 'a.b'"),
        (["c", "--user", "ada"], "--user: 'ada', expected TENANT/USER"),
        (["c", "--user", "ops/a/b"], "--user: user: 'a/b'"),
        (["c", "--node", "*"], "--node: '*'"),
        (["c", "--node", "n1", "--node", "n1"], "n1: two users of this name"),
        (["c", "--node", "ops-ada", "--user", "ops/ada"], "ops-ada: two users of this name"),
        (["c", "--node", "coordinator"], "coordinator: two users of this name"),
    ],
)
def test_a_name_that_would_mean_others_is_refused(arguments: list[str], said: str) -> None:
    """A wildcard or a second user of one name would give rights to somebody else."""
    done = CliRunner().invoke(app, ["nats-permissions", *arguments])
    assert (done.exit_code, said in done.stderr, done.stdout) == (2, True, ""), done.stderr
