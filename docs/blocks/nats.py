"""The users of a NATS server, with the rights that each identity needs. Must not hold rights of its
own: `common.permissions` has them.
"""

from __future__ import annotations

import textwrap

from common.permissions import Login, of_coordinator, of_node, of_user, person, users_file

_CELL = "prod"
_IDENTITIES = {
    "coordinator": of_coordinator(_CELL),
    "train-1": of_node(_CELL, "train-1"),
    person("ops", "ada"): of_user(_CELL, "ops", "ada"),
    person("research", "grace"): of_user(_CELL, "research", "grace"),
    person("watch", "cron"): of_user(_CELL, "watch", "cron", ("get_status", "list_services")),
}


def nats_users() -> str:
    """The file of the example in docs/reference.md."""
    logins = [
        Login(name=name, password=f"change-me-{number}", permissions=permissions)
        for number, (name, permissions) in enumerate(_IDENTITIES.items(), start=1)
    ]
    return textwrap.indent(users_file(logins), "    ")
