"""A node comes home although its settings file was spoilt while it was lent."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.daemon import main
from agent.go_home import fires_in_s
from agent.lease.renewal import LAST_RESORT_MARGIN_S
from agent.settings import AgentSettings
from agent.settings_file import way_home
from agent.storage import accepted_settings
from agent.storage.ledger import exclusive, peek
from common.model import NodeRole
from common.settings import load
from tests.harness.fakes import FakeClock
from tests.harness.node.daemon import DaemonHarness, kill_9, lend, make_daemon_harness
from tests.harness.node.lent_node import (
    Spoil,
    home,
    make_lent,
    make_quiet_harness,
    role,
    with_line,
    with_other,
    with_rules,
    with_server_line,
    without_server,
)
from tests.harness.node.workers import is_alive
from tests.harness.programs import ended

R = NodeRole
pytestmark = [pytest.mark.nats, pytest.mark.slow]
harness = pytest.fixture(make_daemon_harness)


quiet_harness = pytest.fixture(make_quiet_harness)


SPOILT: dict[str, Spoil] = {
    "nats_url": with_other("nats_url", "nats://192.0.2.1:4222"),
    "rules that are none": with_rules("[[reason]\n"),
    "rules that are gone": with_rules(None),
    "no such account": with_line('job_user = "no-such-account-here"'),
    "root's account": with_line('job_user = "root"'),
    "engine": with_server_line('engine = "vlm"'),
    "units": with_server_line('units = ["vllm"]'),
    "unknown key": with_line("report_perid_s = 1.0"),
    "out of range": with_line("stranger_after_s = 100.0"),
    "no server": without_server,
    "health_url": with_other("health_url", "htp://127.0.0.1:1/health"),
    "another node's name": with_other("node", "n2"),
}
BEYOND_READING: dict[str, Spoil] = {
    "another state_dir": lambda config: with_other("state_dir", str(config.parent / "new"))(config),
    "not TOML": with_line("nats_url ="),
    "gone": lambda config: config.unlink(),
}
"""Of these the file does not say any more where the node's state is."""


@pytest.mark.parametrize("spoilt", SPOILT)
async def test_going_home_needs_no_file_that_fits(
    quiet_harness: DaemonHarness, spoilt: str
) -> None:
    """A file that was spoilt while the node is lent must not keep it away."""
    harness = quiet_harness
    config = await make_lent(harness)
    SPOILT[spoilt](config)
    await home(way_home(config, state_dir=None), harness)
    assert role(harness) == R.SERVING
    assert harness.mark("up").exists()
    assert harness.mark("routed").exists()


@pytest.mark.parametrize("spoilt", BEYOND_READING)
async def test_going_home_needs_no_file_at_all(quiet_harness: DaemonHarness, spoilt: str) -> None:
    """Where the state directory is named, what the agent accepted last is found there."""
    harness = quiet_harness
    config = await make_lent(harness)
    BEYOND_READING[spoilt](config)
    await home(way_home(config, state_dir=harness.state_dir), harness)
    assert role(harness) == R.SERVING
    assert harness.mark("routed").exists()


async def test_going_home_says_on_what_it_goes(quiet_harness: DaemonHarness) -> None:
    """As a process, with a file that is gone: it serves again, and says why it could."""
    harness = quiet_harness
    config = await make_lent(harness)
    config.unlink()
    arguments = ("--go-home", "--config", str(config), "--fake-nvml", str(harness.fleet))
    status, text = await harness.run(*arguments, "--state-dir", str(harness.state_dir))
    assert (status, "serving again" in text, role(harness)) == (0, True, R.SERVING), text
    assert f"{config}: cannot be read" in text
    assert "accepted last" in text


@pytest.mark.parametrize("spoilt", ["no such account", "engine", "rules that are gone"])
async def test_what_a_way_home_does_not_need_is_not_read(
    quiet_harness: DaemonHarness, spoilt: str
) -> None:
    """Also where what the agent accepted is written down nowhere any more."""
    harness = quiet_harness
    config = await make_lent(harness)
    (harness.state_dir / accepted_settings.FILE).unlink()
    SPOILT[spoilt](config)
    await home(way_home(config, state_dir=harness.state_dir), harness)
    assert role(harness) == R.SERVING


async def test_a_lent_node_comes_home_although_its_agent_refuses_the_spoilt_file(
    harness: DaemonHarness,
) -> None:
    """What the agent before it armed does not need the file, and the refusal disarms nothing; nor
    does it end anything before the lease is over."""
    config = harness.config(inference=True)
    agent = await harness.start(config)
    pid = await lend(harness, ttl_s=4.0)
    assert stat.S_IMODE((harness.state_dir / accepted_settings.FILE).stat().st_mode) == 0o600
    harness.is_renewing = False
    config.write_text("nats_url =\n")
    await kill_9(agent)
    lent = peek(harness.state_dir)
    assert lent is not None
    assert lent.lease_ends_at_s is not None
    status, text = await harness.run("--config", str(config), "--fake-nvml", str(harness.fleet))
    assert (status, "not TOML" in text) == (2, True), text
    await harness.until(lambda: role(harness) == R.SERVING, "the node serves")
    assert harness.mark("routed").exists()
    assert not is_alive(pid)
    home = peek(harness.state_dir)
    assert home is not None
    [worker] = home.workers.values()
    assert worker.ended_at_s is not None
    assert worker.ended_at_s > lent.lease_ends_at_s


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(with_line("report_perid_s = 1.0"), "report_perid_s"), (Path.unlink, "cannot be read")],
    ids=["unknown key", "gone"],
)
async def test_an_agent_that_refuses_its_file_has_a_node_that_is_away_brought_home(
    quiet_harness: DaemonHarness, spoil: Spoil, why: str
) -> None:
    """After a boot nothing is armed any more, and a spoilt file would leave the service waiting."""
    harness = quiet_harness
    config = await make_lent(harness)
    spoil(config)
    state = ("--state-dir", str(harness.state_dir))  # as the unit says
    arguments = ("--config", str(config), *state, "--fake-nvml", str(harness.fleet))
    status, text = ended(main, "--check", *arguments)
    assert (status, "is away" in text) == (2, False), text
    assert not (harness.state_dir / "last-resort.json").exists()
    code, text = await harness.run(*arguments)
    assert (code, why in text, "is away" in text) == (2, True, True), text
    await harness.until(lambda: harness.mark("routed").exists(), "the node is routed again")
    await harness.until(lambda: role(harness) == R.SERVING, "the node serves")


async def test_a_last_resort_is_called_at_once_or_when_the_lease_is_over(
    quiet_harness: DaemonHarness,
) -> None:
    """An agent that is started again and again does not put it off; a lease is waited for, but
    not one of an earlier boot; and a node at home needs none."""
    clock = FakeClock()
    cases: list[tuple[dict[str, Any], float | None]] = [
        ({}, 0.0),
        ({"left_s": 5.0}, 5.0 + LAST_RESORT_MARGIN_S),
        ({"left_s": 5.0, "boot_id": "earlier"}, 0.0),
        ({"role": R.WARMING}, 0.0),
        ({"role": R.SERVING}, None),
    ]
    for changes, expected_s in cases:
        settings = load(await make_lent(quiet_harness, clock=clock, **changes), AgentSettings)
        assert fires_in_s(settings, clock=clock) == expected_s
    nowhere = str(quiet_harness.directory / "none")
    new = msgspec.structs.replace(load(quiet_harness.config(), AgentSettings), state_dir=nowhere)
    assert fires_in_s(new, clock=clock) is None


async def test_whoever_has_the_node_is_left_to_bring_it_home(quiet_harness: DaemonHarness) -> None:
    """A living agent, beside which somebody starts another one, or a way home that has begun."""
    clock = FakeClock()
    settings = load(await make_lent(quiet_harness, clock=clock), AgentSettings)
    with exclusive(quiet_harness.state_dir):
        assert fires_in_s(settings, clock=clock) is None
    assert fires_in_s(settings, clock=clock) == 0.0


async def test_an_agent_starts_although_its_settings_cannot_be_kept(harness: DaemonHarness) -> None:
    """A disk that takes nothing more stops no node."""
    blocked = harness.state_dir / f"{accepted_settings.FILE}.new"
    blocked.mkdir(parents=True)
    (blocked / "in the way").touch()
    await harness.start(harness.config())
    assert accepted_settings.kept(harness.state_dir) is None


async def test_a_file_that_fits_goes_before_what_was_accepted(quiet_harness: DaemonHarness) -> None:
    """An operator who mends a command that keeps the node away is heard."""
    harness = quiet_harness
    config, new = await make_lent(harness), harness.mark("new")
    config.write_text(config.read_text().replace(str(harness.mark("routed")), str(new)))
    await home(way_home(config, state_dir=harness.state_dir), harness)
    assert role(harness) == R.SERVING
    assert new.exists()


async def test_without_file_and_without_state_the_error_says_what_helps(
    quiet_harness: DaemonHarness,
) -> None:
    """Nothing is touched."""
    harness = quiet_harness
    config = harness.directory / "agent.toml"
    status, text = ended(main, "--go-home", "--config", str(config))
    assert (status, "--state-dir" in text, str(config) in text) == (2, True, True), text
    code, text = await harness.run(
        "--go-home", "--config", str(config), "--state-dir", "a", "--state-dir", "b"
    )
    assert (code, "--state-dir: give it once for each --config" in text) == (2, True), text
    assert not harness.state_dir.exists()
