"""The account that workers run as, looked up on this machine. An edge; must not know orders."""

from __future__ import annotations

import os
import pwd

from agent.worker_spec import Account
from common.errors import ConfigError


def job_account(name: str) -> Account | None:
    """The account of this name, which workers are to run as; None for the agent's own user.

    Raises:
        ConfigError: there is none, it is root, or this agent may not become somebody else.
    """
    if not name:
        return None
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"job_user: there is no account {name!r} on this machine") from None
    if found.pw_uid == 0:
        raise ConfigError(f"job_user: {name!r} is root; jobs never are")
    if os.geteuid() == found.pw_uid:
        return None
    if os.geteuid() != 0:
        raise ConfigError(f"job_user: only an agent that is root can start workers as {name!r}")
    return Account(name=name, uid=found.pw_uid, gid=found.pw_gid, home=found.pw_dir)
