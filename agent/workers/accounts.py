"""Looks up the account that workers run as. An edge."""

from __future__ import annotations

import pwd

from agent.workers.spec import Account
from common.errors import ConfigError


def worker_account(name: str, *, uid: int, is_root_allowed: bool) -> Account | None:
    """As `job_account`, where workers may run as that account at all.

    uid: of the agent.

    Raises:
        ConfigError: as of `job_account`, or workers would run as root.
    """
    account = job_account(name, uid=uid)
    check_not_root(account, uid=uid, is_root_allowed=is_root_allowed)
    return account


def check_not_root(account: Account | None, *, uid: int, is_root_allowed: bool) -> None:
    """Check that workers may run as this account; None is the agent's own user, `uid`.

    Raises:
        ConfigError: it is root.
    """
    if (uid if account is None else account.uid) == 0 and not is_root_allowed:
        raise ConfigError("job_user: workers would run as root, jobs never do: name an account")


def job_account(name: str, *, uid: int) -> Account | None:
    """The account of this name, which workers are to run as; None for the agent's own user.

    uid: of the agent.

    Raises:
        ConfigError: the account is missing, it is root, or this agent may not change its account.
    """
    if not name:
        return None
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"job_user: there is no account {name!r} on this machine") from None
    if found.pw_uid == 0:
        raise ConfigError(f"job_user: {name!r} is root; jobs never are")
    if uid == found.pw_uid:
        return None
    if uid != 0:
        raise ConfigError(f"job_user: only an agent that is root can start workers as {name!r}")
    return Account(name=name, uid=found.pw_uid, gid=found.pw_gid, home=found.pw_dir)
