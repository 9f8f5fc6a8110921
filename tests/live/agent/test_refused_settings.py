"""An agent that refuses to start has its node brought home, for whatever reason it refuses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from agent.daemon import main, run_agent
from agent.lease.last_resort import go_home_argv
from agent.settings import AgentSettings
from agent.settings_file import expected_homes, way_home
from agent.storage import accepted_settings
from agent.storage.node_lock import monotonic_s
from agent.watchdog import Duties
from common.errors import ConfigError
from common.model import NodeRole
from common.settings import load
from tests.harness.node.daemon import DaemonHarness, is_free
from tests.harness.node.lent_node import (
    Spoil,
    append,
    make_lent,
    make_quiet_harness,
    role,
    with_line,
    with_other,
)
from tests.harness.programs import ended

R = NodeRole
pytestmark = pytest.mark.slow
quiet_harness = pytest.fixture(make_quiet_harness)
LOADED = (
    "Failed to start transient service unit: Unit aryl-go-home-n1-b.service was already loaded or"
    " has a fragment file."
)
LONG_S = 600.0
"""Of a lease: what is armed for its end does not fire in a test."""


def access(line: str) -> Spoil:
    """A key or a certificate that is not there."""
    return lambda config: append(config, f"[access]\n{line}")


REFUSED: dict[str, tuple[Spoil, str]] = {
    "another node's name": (with_other("node", "n2"), "node: n2, and state_dir belongs to node n1"),
    "no certificate": (access('tls_ca_path = "/nonexistent/ca.pem"'), "tls_ca_path: /nonexistent"),
    "no seed": (access('nkey_seed_path = "/nonexistent/agent.nk"'), "nkey_seed_path: /nonexistent"),
    "unknown key": (with_line("report_perid_s = 1.0"), "report_perid_s"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_whatever_an_agent_refuses_its_node_comes_home(
    quiet_harness: DaemonHarness, name: str
) -> None:
    """Also what is found only when the node is held; after a boot nothing else would be armed."""
    harness = quiet_harness
    spoil, why = REFUSED[name]
    config = await make_lent(harness, boot_id="earlier")
    spoil(config)
    code, text = await harness.run("--config", str(config), "--fake-nvml", str(harness.fleet))
    assert (code, why in text, "is away; its last resort fires" in text) == (2, True, True), text
    await harness.until(lambda: role(harness) == R.SERVING, "the node serves")


@pytest.mark.parametrize("name", ["another node's name", "no certificate"])
async def test_checking_a_file_finds_what_its_agent_would_refuse(
    quiet_harness: DaemonHarness, name: str
) -> None:
    """And arms nothing. A seed may be there for the agent's unit alone, so it is not looked for."""
    harness = quiet_harness
    spoil, why = REFUSED[name]
    config = await make_lent(harness)
    spoil(config)
    status, text = ended(main, "--check", "--config", str(config))
    assert (status, why in text) == (2, True), text
    assert not (harness.state_dir / "last-resort.json").exists()
    config = await make_lent(harness)
    access('nkey_seed_path = "/nonexistent/agent.nk"')(config)
    assert ended(main, "--check", "--config", str(config)) == (0, "")


def armed(state_dir: Path) -> list[str]:
    """The command that would bring a node home; empty: none."""
    path = state_dir / "last-resort.json"
    return json.loads(path.read_text())["argv"] if path.exists() else []


@asynccontextmanager
async def disarmed(harness: DaemonHarness, *state_dirs: Path) -> AsyncGenerator[None]:
    """Whatever is armed in the block is gone after it, with its keepers."""
    resorts = [state_dir / "last-resort.json" for state_dir in state_dirs]
    try:
        yield
    finally:
        for resort in resorts:
            resort.unlink(missing_ok=True)
        await harness.until(lambda: all(map(is_free, resorts)), "the keepers have left")


async def test_one_file_that_does_not_fit_leaves_no_node_behind(
    quiet_harness: DaemonHarness, tmp_path: Path
) -> None:
    """Several nodes of one process start all or none; each comes home on its own file and state."""
    harness = quiet_harness
    state_dirs = [tmp_path / name for name in ("s1", "s2", "s3")]
    configs: list[Path] = []
    arguments: list[str] = []
    for state_dir in state_dirs:
        harness.use_state_dir(state_dir)
        config = await make_lent(harness, left_s=LONG_S)
        configs.append(config.rename(tmp_path / f"{state_dir.name}.toml"))
        arguments += ["--config", str(configs[-1]), "--state-dir", str(state_dir)]
    configs[1].unlink()
    configs[2].write_text("nats_url =\n")
    async with disarmed(harness, *state_dirs):
        code, text = await harness.run(*arguments, "--fake-nvml", str(harness.fleet))
        assert code == 2, text
        for config, state_dir in zip(configs, state_dirs, strict=True):
            argv = armed(state_dir)
            assert argv[argv.index("--config") + 1] == str(config), text
            assert argv[argv.index("--state-dir") + 1] == str(state_dir)


@pytest.mark.parametrize("is_fit", [False, True])
async def test_a_unit_that_names_another_state_dir_hides_no_node(
    quiet_harness: DaemonHarness, tmp_path: Path, *, is_fit: bool
) -> None:
    """A file that can be read so far says where the node is; that the two differ is told."""
    harness = quiet_harness
    config = await make_lent(harness, left_s=LONG_S)
    stock = ("--state-dir", str(tmp_path / "of-the-unit"))
    status, text = ended(main, "--check", "--config", str(config), *stock)
    assert (status, "--state-dir says" in text) == (2, True), text
    if is_fit:
        access('nkey_seed_path = "/nonexistent/agent.nk"')(config)
    else:
        with_line("report_perid_s = 1.0")(config)
    async with disarmed(harness, harness.state_dir):
        arguments = ("--config", str(config), *stock, "--fake-nvml", str(harness.fleet))
        code, text = await harness.run(*arguments)
        assert (code, "--state-dir says" in text) == (2, is_fit), text
        assert str(harness.state_dir) in armed(harness.state_dir)


async def test_of_two_state_dirs_of_a_node_that_is_away_the_stale_one_brings_nobody_home(
    quiet_harness: DaemonHarness, tmp_path: Path
) -> None:
    """What was left of an earlier loan is over, and a job of the loan as it is now may run on."""
    harness = quiet_harness
    stale, real = tmp_path / "stale", tmp_path / "real"
    for state_dir, left_s in ((stale, -LONG_S), (real, LONG_S)):
        harness.use_state_dir(state_dir)
        config = await make_lent(harness, left_s=left_s)
    with_line("report_perid_s = 1.0")(config)
    async with disarmed(harness, stale, real):
        arguments = ("--config", str(config), "--state-dir", str(stale))
        code, text = await harness.run(*arguments, "--fake-nvml", str(harness.fleet))
        fires_in_s = [float(each) for each in re.findall(r"last resort fires in ([\d.]+) s", text)]
        # Of the loan as it is now: of the stale one it would fire at once.
        assert (code, [after_s > LONG_S / 2 for after_s in fires_in_s]) == (2, [True]), text
        argv = armed(real)
        assert argv[argv.index("--state-dir") + 1] == str(real)
        assert not armed(stale)


async def test_of_two_state_dirs_with_a_node_that_is_away_none_is_left_behind(
    quiet_harness: DaemonHarness, tmp_path: Path
) -> None:
    """The file names one and the unit another: each node has a last resort, and that one brings
    home the node which it was armed for."""
    harness = quiet_harness
    of_unit, of_file = tmp_path / "of-the-unit", tmp_path / "of-the-file"
    for state_dir, node in ((of_unit, "n2"), (of_file, "n1")):
        harness.use_state_dir(state_dir)
        config = await make_lent(harness, left_s=LONG_S, node=node)
    with_line("report_perid_s = 1.0")(config)
    async with disarmed(harness, of_unit, of_file):
        arguments = ("--config", str(config), "--state-dir", str(of_unit))
        code, text = await harness.run(*arguments, "--fake-nvml", str(harness.fleet))
        assert (code, text.count("is away; its last resort fires")) == (2, 2), text
        for state_dir in (of_unit, of_file):
            argv = armed(state_dir)
            assert argv[argv.index("--state-dir") + 1] == str(state_dir)
            assert way_home(config, state_dir=state_dir).state_dir == str(state_dir)
    found = expected_homes(config, state_dir=of_unit)
    assert [settings.state_dir for settings in found] == [str(of_unit), str(of_file)]
    (tmp_path / "link").symlink_to(of_file)
    [settings] = expected_homes(config, state_dir=tmp_path / "link")
    assert settings.state_dir == str(of_file)


async def test_why_a_file_is_refused_is_told_though_nothing_can_be_armed(
    quiet_harness: DaemonHarness,
) -> None:
    """The one error does not hide the other."""
    harness = quiet_harness
    config = await make_lent(harness)
    with_line("report_perid_s = 1.0")(config)
    blocked = harness.state_dir / "last-resort.json"
    blocked.mkdir()
    code, text = await harness.run("--config", str(config), "--fake-nvml", str(harness.fleet))
    blocked.rmdir()
    assert (code, "report_perid_s" in text) == (2, True), text
    assert "cannot arm the last resort" in text
    assert "Traceback" not in text


async def test_a_last_resort_that_runs_already_is_no_error(
    quiet_harness: DaemonHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that is started again and again finds it on its way, in systemd's words."""
    harness = quiet_harness
    config = await make_lent(harness)
    with_other("last_resort", "systemd")(config)
    accepted_settings.keep(harness.state_dir, load(config, AgentSettings))
    with_line("report_perid_s = 1.0")(config)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, line in (("systemctl", "exit 0"), ("systemd-run", f'echo "{LOADED}"; exit 1')):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    code, text = await harness.run("--config", str(config), "--fake-nvml", str(harness.fleet))
    assert (code, "is away; its last resort already runs" in text) == (2, True), text
    assert "cannot arm" not in text
    (programs / "systemd-run").write_text("#!/bin/sh\necho no such bus; exit 1\n")
    code, text = await harness.run("--config", str(config), "--fake-nvml", str(harness.fleet))
    assert (code, "cannot arm the last resort" in text) == (2, True), text


async def test_an_agent_that_is_another_nodes_keeps_no_settings(
    quiet_harness: DaemonHarness,
) -> None:
    """What the state's own node accepted is what brings it home."""
    harness = quiet_harness
    config = await make_lent(harness)
    other = msgspec.structs.replace(load(config, AgentSettings), node="n2")
    with pytest.raises(ConfigError, match="belongs to node n1"):
        await run_agent(other, config=config, fake_nvml=harness.fleet, duties=Duties(monotonic_s))
    kept = accepted_settings.kept(harness.state_dir)
    assert kept is not None
    assert kept.node == "n1"


async def test_a_node_of_which_nothing_was_kept_is_called_home_on_its_file(
    quiet_harness: DaemonHarness,
) -> None:
    """As right after an upgrade: the file is of this node, and fits but for what no way needs."""
    harness = quiet_harness
    config = await make_lent(harness, left_s=LONG_S)
    (harness.state_dir / accepted_settings.FILE).unlink()
    with_line('job_user = "no-such-account-here"')(config)
    async with disarmed(harness, harness.state_dir):
        code, text = await harness.run("--config", str(config), "--fake-nvml", str(harness.fleet))
        assert (code, "job_user: there is no account" in text) == (2, True), text
        assert str(harness.state_dir) in armed(harness.state_dir)


def test_what_is_armed_holds_from_anywhere_and_follows_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drop-ins lie beside a link, and the process that runs it has another directory."""
    (tmp_path / "releases").mkdir()
    (tmp_path / "releases" / "agent.toml").touch()
    (tmp_path / "agent.toml").symlink_to(tmp_path / "releases" / "agent.toml")
    monkeypatch.chdir(tmp_path)
    argv = go_home_argv(Path("agent.toml"), Path("state"), None)
    assert argv[argv.index("--config") + 1] == str(tmp_path / "agent.toml")
    assert argv[argv.index("--state-dir") + 1] == str(tmp_path / "state")
