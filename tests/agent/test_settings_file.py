"""An agent's settings: what of them is kept for a way home, and as whom they let workers run."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
from pathlib import Path

import msgspec
import pytest

from agent.daemon import main
from agent.settings import AgentSettings
from agent.settings_file import checked, way_home
from agent.storage import accepted_settings
from common.errors import ConfigError
from common.model import Pool
from common.settings import load
from tests.harness.node.daemon import DaemonHarness
from tests.harness.programs import ended


@pytest.fixture
def harness(tmp_path: Path) -> DaemonHarness:
    """A node's files; nothing runs."""
    directory = tmp_path / "harness"
    directory.mkdir()
    return DaemonHarness(directory, nats_url="nats://127.0.0.1:4222")


DEEP = "[" * 200_000
"""More than any reader of JSON follows."""


# --- what is kept -----------------------------------------------------------------------------


def test_what_is_kept_is_what_was_accepted_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    """Under any umask: a URL may hold a password. Nothing but what was set is in it, and the way
    to the state directory holds from anywhere."""
    settings = AgentSettings(
        cell="c1",
        node="n1",
        home_pool=Pool.TRAINING,
        nats_url="tls://n1:secret@nats.example:4222",
        state_dir=os.path.relpath(tmp_path),
    )
    before = os.umask(0)
    try:
        accepted_settings.keep(tmp_path, settings)
    finally:
        os.umask(before)
    path = tmp_path / accepted_settings.FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    told = json.loads(path.read_text())
    assert sorted(told) == ["cell", "home_pool", "nats_url", "node", "state_dir"]
    found = accepted_settings.kept(tmp_path)
    assert found is not None
    assert (found.nats_url, found.state_dir) == (settings.nats_url, str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == [accepted_settings.FILE]


def test_a_label_that_is_none_names_the_field(harness: DaemonHarness) -> None:
    """An agent does not start with labels that its coordinator would refuse."""
    config = harness.config()
    with config.open("a") as file:
        file.write('[labels]\nnvlink = ""\n"bad key" = "x"\n')
    with pytest.raises(ConfigError, match="labels: 'bad key' is no name of a label"):
        checked(config)


def test_what_another_version_kept_is_no_error(tmp_path: Path) -> None:
    """It is as if there were none; so is what no version would write."""
    for text in ('{"cel": "c1"}', "[]", "{", "", DEEP):
        (tmp_path / accepted_settings.FILE).write_text(text)
        assert accepted_settings.kept(tmp_path) is None


def test_every_setting_outlives_being_kept(harness: DaemonHarness, tmp_path: Path) -> None:
    """Also those of the server and of the access; what is there already is not written again."""
    config = harness.config(inference=True, rack="r1", kernel_log="off", job_user="somebody")
    with config.open("a") as file:
        file.write('units = ["vllm.service"]\nengine = "tgi"\n')
        file.write('[access]\ntls_ca_path = "/etc/ssl/ca.pem"\n')
    settings = load(config, AgentSettings)
    accepted_settings.keep(tmp_path, settings)
    expected = msgspec.structs.replace(settings, state_dir=str(tmp_path))
    assert accepted_settings.kept(tmp_path) == expected
    path = tmp_path / accepted_settings.FILE
    written = path.stat().st_ino
    accepted_settings.keep(tmp_path, settings)
    assert path.stat().st_ino == written


def test_settings_that_cannot_be_kept_leave_what_was_kept(
    harness: DaemonHarness, tmp_path: Path
) -> None:
    """And nothing half written beside it: a full disk needs what that took."""
    settings = load(harness.config(inference=True), AgentSettings)
    accepted_settings.keep(tmp_path, settings)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            accepted_settings.keep(tmp_path, msgspec.structs.replace(settings, rack="r2"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    found = accepted_settings.kept(tmp_path)
    assert found is not None
    assert found.rack == ""
    assert not (tmp_path / f"{accepted_settings.FILE}.new").exists()


# --- as whom workers run ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "uid", "words"),
    [
        ("no-such-account-here", 0, "job_user: there is no account"),
        ("no-such-account-here", 1000, "job_user: there is no account"),
        ("root", 0, "job_user: 'root' is root"),
        ("", 0, "job_user: workers would run as root"),
        ("", 1000, ""),
    ],
)
def test_an_account_that_does_not_fit_is_found_before_the_first_worker(
    harness: DaemonHarness, name: str, uid: int, words: str
) -> None:
    """Every job would be refused here later; an agent that goes home asks for no account."""
    config = harness.config(is_root_allowed=False, job_user=name)
    if words:
        with pytest.raises(ConfigError, match=f"{config}: {words}"):
            checked(config, uid=uid)
    else:
        assert checked(config, uid=uid).job_user == name
    assert way_home(config, state_dir=None).job_user == ""


def test_checking_a_file_finds_a_rack_by_which_no_job_can_select(harness: DaemonHarness) -> None:
    """`--check` exits with 2 and names the field; an agent that runs with it starts again."""
    config = harness.config(rack="bad rack")
    status, text = ended(main, "--check", "--config", str(config))
    assert status == 2
    assert "rack: 'bad rack' is no value of label rack" in text
    assert checked(config, uid=0).rack == "bad rack"


def test_checking_a_file_finds_an_account_that_does_not_fit(harness: DaemonHarness) -> None:
    """`--check` exits with 2 and names the field."""
    config = harness.config(job_user="no-such-account-here")
    status, text = ended(main, "--check", "--config", str(config))
    assert (status, "job_user: there is no account" in text) == (2, True), text
