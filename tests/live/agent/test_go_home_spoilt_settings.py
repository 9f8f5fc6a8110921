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
from tests.agent.daemon_house import DaemonHouse, kill_9, lend, make_daemon_house
from tests.agent.lent_node import (
    Spoil,
    home,
    make_lent,
    make_quiet_house,
    role,
    with_line,
    with_other,
    with_rules,
    with_server_line,
    without_server,
)
from tests.agent.worker_house import is_alive
from tests.fakes import FakeClock
from tests.programs import ended

R = NodeRole
pytestmark = [pytest.mark.nats, pytest.mark.slow]
house = pytest.fixture(make_daemon_house)


quiet_house = pytest.fixture(make_quiet_house)


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
async def test_going_home_needs_no_file_that_fits(quiet_house: DaemonHouse, spoilt: str) -> None:
    """A file that was spoilt while the node is lent must not keep it away."""
    house = quiet_house
    config = await make_lent(house)
    SPOILT[spoilt](config)
    await home(way_home(config, state_dir=None), house)
    assert role(house) == R.SERVING
    assert house.mark("up").exists()
    assert house.mark("routed").exists()


@pytest.mark.parametrize("spoilt", BEYOND_READING)
async def test_going_home_needs_no_file_at_all(quiet_house: DaemonHouse, spoilt: str) -> None:
    """Where the state directory is named, what the agent accepted last is found there."""
    house = quiet_house
    config = await make_lent(house)
    BEYOND_READING[spoilt](config)
    await home(way_home(config, state_dir=house.state_dir), house)
    assert role(house) == R.SERVING
    assert house.mark("routed").exists()


async def test_going_home_says_on_what_it_goes(quiet_house: DaemonHouse) -> None:
    """As a process, with a file that is gone: it serves again, and says why it could."""
    house = quiet_house
    config = await make_lent(house)
    config.unlink()
    arguments = ("--go-home", "--config", str(config), "--fake-nvml", str(house.fleet))
    status, text = await house.run(*arguments, "--state-dir", str(house.state_dir))
    assert (status, "serving again" in text, role(house)) == (0, True, R.SERVING), text
    assert f"{config}: cannot be read" in text
    assert "accepted last" in text


@pytest.mark.parametrize("spoilt", ["no such account", "engine", "rules that are gone"])
async def test_what_a_way_home_does_not_need_is_not_read(
    quiet_house: DaemonHouse, spoilt: str
) -> None:
    """Also where what the agent accepted is written down nowhere any more."""
    house = quiet_house
    config = await make_lent(house)
    (house.state_dir / accepted_settings.FILE).unlink()
    SPOILT[spoilt](config)
    await home(way_home(config, state_dir=house.state_dir), house)
    assert role(house) == R.SERVING


async def test_a_lent_node_comes_home_although_its_agent_refuses_the_spoilt_file(
    house: DaemonHouse,
) -> None:
    """What the agent before it armed does not need the file, and the refusal disarms nothing; nor
    does it end anything before the lease is over."""
    config = house.config(inference=True)
    agent = await house.start(config)
    pid = await lend(house, ttl_s=4.0)
    assert stat.S_IMODE((house.state_dir / accepted_settings.FILE).stat().st_mode) == 0o600
    house.is_renewing = False
    config.write_text("nats_url =\n")
    await kill_9(agent)
    lent = peek(house.state_dir)
    assert lent is not None
    assert lent.lease_ends_at_s is not None
    status, text = await house.run("--config", str(config), "--fake-nvml", str(house.fleet))
    assert (status, "not TOML" in text) == (2, True), text
    await house.until(lambda: role(house) == R.SERVING, "the node serves")
    assert house.mark("routed").exists()
    assert not is_alive(pid)
    home = peek(house.state_dir)
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
    quiet_house: DaemonHouse, spoil: Spoil, why: str
) -> None:
    """After a boot nothing is armed any more, and a spoilt file would leave the service waiting."""
    house = quiet_house
    config = await make_lent(house)
    spoil(config)
    state = ("--state-dir", str(house.state_dir))  # as the unit says
    arguments = ("--config", str(config), *state, "--fake-nvml", str(house.fleet))
    status, text = ended(main, "--check", *arguments)
    assert (status, "is away" in text) == (2, False), text
    assert not (house.state_dir / "last-resort.json").exists()
    code, text = await house.run(*arguments)
    assert (code, why in text, "is away" in text) == (2, True, True), text
    await house.until(lambda: house.mark("routed").exists(), "the node is routed again")
    await house.until(lambda: role(house) == R.SERVING, "the node serves")


async def test_a_last_resort_is_called_at_once_or_when_the_lease_is_over(
    quiet_house: DaemonHouse,
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
        settings = load(await make_lent(quiet_house, clock=clock, **changes), AgentSettings)
        assert fires_in_s(settings, clock=clock) == expected_s
    nowhere = str(quiet_house.directory / "none")
    new = msgspec.structs.replace(load(quiet_house.config(), AgentSettings), state_dir=nowhere)
    assert fires_in_s(new, clock=clock) is None


async def test_whoever_has_the_node_is_left_to_bring_it_home(quiet_house: DaemonHouse) -> None:
    """A living agent, beside which somebody starts another one, or a way home that has begun."""
    clock = FakeClock()
    settings = load(await make_lent(quiet_house, clock=clock), AgentSettings)
    with exclusive(quiet_house.state_dir):
        assert fires_in_s(settings, clock=clock) is None
    assert fires_in_s(settings, clock=clock) == 0.0


async def test_an_agent_starts_although_its_settings_cannot_be_kept(house: DaemonHouse) -> None:
    """A disk that takes nothing more stops no node."""
    blocked = house.state_dir / f"{accepted_settings.FILE}.new"
    blocked.mkdir(parents=True)
    (blocked / "in the way").touch()
    await house.start(house.config())
    assert accepted_settings.kept(house.state_dir) is None


async def test_a_file_that_fits_goes_before_what_was_accepted(quiet_house: DaemonHouse) -> None:
    """An operator who mends a command that keeps the node away is heard."""
    house = quiet_house
    config, new = await make_lent(house), house.mark("new")
    config.write_text(config.read_text().replace(str(house.mark("routed")), str(new)))
    await home(way_home(config, state_dir=house.state_dir), house)
    assert role(house) == R.SERVING
    assert new.exists()


async def test_without_file_and_without_state_the_error_says_what_helps(
    quiet_house: DaemonHouse,
) -> None:
    """Nothing is touched."""
    house = quiet_house
    config = house.directory / "agent.toml"
    status, text = ended(main, "--go-home", "--config", str(config))
    assert (status, "--state-dir" in text, str(config) in text) == (2, True, True), text
    code, text = await house.run(
        "--go-home", "--config", str(config), "--state-dir", "a", "--state-dir", "b"
    )
    assert (code, "--state-dir: give it once for each --config" in text) == (2, True), text
    assert not house.state_dir.exists()
