"""On which settings a node goes home: never on those that would leave it where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.settings import AgentSettings
from agent.settings_file import checked, expected_homes, way_home
from agent.storage import accepted_settings
from agent.storage.ledger import peek
from common.errors import ConfigError, Unavailable
from common.model import NodeRole, Pool
from common.settings import load
from tests.harness.node.daemon import DaemonHarness
from tests.harness.node.lent_node import (
    Spoil,
    append,
    home,
    make_lent,
    make_quiet_harness,
    role,
    with_other,
    without_server,
)

R = NodeRole
pytestmark = pytest.mark.slow
quiet_harness = pytest.fixture(make_quiet_harness)


def of_training(config: Path) -> None:
    """The file of a training node, of the same name."""
    without_server(config)
    with_other("home_pool", "training")(config)
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("service")))


MISFIT: dict[str, Spoil] = {
    "of the other pool": of_training,
    "of another service": with_other("service", "mail"),
}


@pytest.mark.parametrize("name", MISFIT)
async def test_a_file_of_another_pool_or_service_does_not_keep_a_node_away(
    quiet_harness: DaemonHarness, name: str
) -> None:
    """A wrong template: its node goes home as what it was lent as."""
    harness = quiet_harness
    config = await make_lent(harness)
    MISFIT[name](config)
    settings = way_home(config, state_dir=harness.state_dir)
    assert (settings.home_pool, settings.service) == (Pool.INFERENCE, "chat")
    await home(settings, harness)
    assert role(harness) == R.SERVING
    assert harness.mark("routed").exists()


async def test_a_file_of_another_pool_is_no_way_home_where_nothing_else_is_known(
    quiet_harness: DaemonHarness,
) -> None:
    """The ledger names the pool of the node."""
    harness = quiet_harness
    config = await make_lent(harness)
    (harness.state_dir / accepted_settings.FILE).unlink()
    of_training(config)
    with pytest.raises(ConfigError, match="home_pool: training, and the node is of the inference"):
        way_home(config, state_dir=harness.state_dir)


async def test_what_was_accepted_and_never_done_is_not_gone_home_on(
    quiet_harness: DaemonHarness,
) -> None:
    """An agent was ended between accepting a move and making it; the file is as it was again."""
    harness = quiet_harness
    config = await make_lent(harness)
    lent = config.read_text()
    of_training(config)
    accepted_settings.keep(harness.state_dir, load(config, AgentSettings))
    config.write_text(lent)
    assert way_home(config, state_dir=None).home_pool == Pool.INFERENCE
    of_training(config)
    with pytest.raises(ConfigError, match="home_pool: training"):
        way_home(config, state_dir=None)


async def test_going_home_is_not_done_while_the_ledger_says_away(
    quiet_harness: DaemonHarness,
) -> None:
    """Whatever the settings: success would disarm whoever tries again."""
    harness = quiet_harness
    config = await make_lent(harness)
    of_training(config)
    with pytest.raises(Unavailable, match="is on_loan, and with these settings"):
        await home(load(config, AgentSettings), harness)
    memory = peek(harness.state_dir)
    assert memory is not None
    assert memory.role == R.ON_LOAN


async def test_a_node_may_still_be_moved(quiet_harness: DaemonHarness) -> None:
    """An agent that starts takes the other pool: what becomes of its loan is the agent's to do."""
    config = await make_lent(quiet_harness)
    of_training(config)
    assert checked(config).home_pool == Pool.TRAINING


async def test_a_drop_in_names_the_state_as_well(quiet_harness: DaemonHarness) -> None:
    """Where another one cannot be read; and a file that names none needs it named."""
    harness = quiet_harness
    config = await make_lent(harness)
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("state_dir")))
    folder = config.with_name("agent.toml.d")
    folder.mkdir()
    (folder / "10-state.toml").write_text(f'state_dir = "{harness.state_dir}"\n')
    (folder / "20-spoilt.toml").write_text("nats_url =\n")
    await home(way_home(config, state_dir=None), harness)
    assert role(harness) == R.SERVING


ODD: dict[str, tuple[Spoil, str]] = {
    "state_dir": (with_other("state_dir", "a\0b"), "state_dir: holds a zero"),
    "in a table": (
        lambda config: append(config, '[access]\ntls_ca_path = "a\\u0000b"'),
        "access.tls_ca_path: holds a zero",
    ),
    "in a list": (
        lambda config: append(config, 'units = ["a", "b\\u0000"]'),
        r"server.units\[1\]: holds a zero",
    ),
    "too deep": (
        lambda config: append(config, f"deep = {'[' * 3000}"),
        "nested tables and lists",
    ),
}


@pytest.mark.parametrize("name", ODD)
async def test_a_file_that_is_odd_is_one_that_does_not_fit(
    quiet_harness: DaemonHarness, name: str
) -> None:
    """Its error names the key, and its node goes home all the same."""
    harness = quiet_harness
    config = await make_lent(harness)
    spoil, why = ODD[name]
    spoil(config)
    with pytest.raises(ConfigError, match=why):
        checked(config)
    await home(way_home(config, state_dir=harness.state_dir), harness)
    assert role(harness) == R.SERVING


async def test_a_file_whose_state_dir_leads_to_itself_keeps_no_node_away(
    quiet_harness: DaemonHarness,
) -> None:
    """No state can be there, and the node's own is named beside it."""
    harness = quiet_harness
    config = await make_lent(harness)
    loop = harness.directory / "loop"
    loop.symlink_to(loop)
    with_other("state_dir", str(loop))(config)
    assert way_home(config, state_dir=harness.state_dir).state_dir == str(harness.state_dir)
    found = expected_homes(config, state_dir=harness.state_dir)
    assert [settings.state_dir for settings in found] == [str(harness.state_dir), str(loop)]


async def test_of_two_state_dirs_the_one_whose_node_is_away_counts(
    quiet_harness: DaemonHarness,
) -> None:
    """The file names another one since, with what was left there long ago."""
    harness = quiet_harness
    lent_dir, old_dir = harness.state_dir, harness.directory / "old"
    harness.use_state_dir(old_dir)
    await make_lent(harness, role=R.SERVING)
    harness.use_state_dir(lent_dir)
    config = await make_lent(harness)
    with_other("state_dir", str(old_dir))(config)
    assert way_home(config, state_dir=lent_dir).state_dir == str(lent_dir)
    config = await make_lent(harness, role=R.SERVING)
    assert way_home(config, state_dir=old_dir).state_dir == str(lent_dir)
