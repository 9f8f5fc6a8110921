"""As whom workers run: the account of the settings, or why it cannot be."""

from __future__ import annotations

import os
import pwd

import pytest

from agent.workers.accounts import job_account
from agent.workers.shim_runner import make_runner
from common.clock import SystemClock
from common.errors import ConfigError
from tests.harness.node.life import settings

ME = pwd.getpwuid(os.geteuid()).pw_name
OTHER = next((found for found in pwd.getpwall() if found.pw_uid not in (0, os.geteuid())), None)


def test_no_name_is_the_agent_s_own_user() -> None:
    """Most agents are nobody special, and can be nobody else."""
    assert job_account("", uid=os.geteuid()) is None


def test_an_account_that_is_not_there_names_the_field() -> None:
    """Before the first worker fails of it."""
    with pytest.raises(ConfigError, match="job_user: there is no account"):
        job_account("no-such-account-here", uid=os.geteuid())


def test_root_is_refused_whoever_asks() -> None:
    """Jobs never run as root."""
    with pytest.raises(ConfigError, match="job_user: 'root' is root"):
        job_account("root", uid=os.geteuid())


@pytest.mark.skipif(OTHER is None, reason="this machine has no second account")
def test_another_account_needs_root() -> None:
    """An agent of root gets it; any other is told that it may not."""
    assert OTHER is not None
    if os.geteuid() != 0:
        with pytest.raises(ConfigError, match="only an agent that is root"):
            job_account(OTHER.pw_name, uid=os.geteuid())
        return
    found = job_account(OTHER.pw_name, uid=os.geteuid())
    assert found is not None
    assert (found.name, found.uid, found.gid, found.home) == (
        OTHER.pw_name,
        OTHER.pw_uid,
        OTHER.pw_gid,
        OTHER.pw_dir,
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root is refused as an account")
def test_the_agent_s_own_account_by_name_is_no_change() -> None:
    """Naming what is so anyway asks for no privilege."""
    assert job_account(ME, uid=os.geteuid()) is None


def test_the_settings_reach_the_runner() -> None:
    """A name in the file that is no account stops the start."""
    with pytest.raises(ConfigError, match="job_user"):
        make_runner(settings(job_user="no-such-account-here"), clock=SystemClock())
