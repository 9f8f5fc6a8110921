"""A node comes home where its state is now, whatever place its agent knew it by."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from agent.ledger import exclusive, peek
from agent.settings_file import expected_homes, way_home
from common.errors import Unavailable
from common.model import NodeRole
from tests.agent.daemon_house import DaemonHouse, kill_9, lend, make_daemon_house
from tests.agent.lent_house import home, make_lent, make_quiet_house, role, with_line, with_other
from tests.agent.worker_house import is_alive

R = NodeRole
pytestmark = pytest.mark.slow
house = pytest.fixture(make_daemon_house)
quiet_house = pytest.fixture(make_quiet_house)
STALE_AND_TRUE = {
    "lock": ((1, 600.0), (0, 300.0)),
    "generation": ((0, 600.0), (1, 300.0)),
    "lease": ((0, 300.0), (0, 600.0)),
}
"""By what the true one of two states of a node is told from the stale one: of each the generation,
and the seconds left of its lease."""


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_node_whose_state_was_moved_comes_home_where_it_is(
    quiet_house: DaemonHouse, *, is_told: bool
) -> None:
    """What its agent accepted names the old place, which is not made anew: the way home would end
    well in an empty ledger there, and the node's own would go on saying that it is away."""
    house = quiet_house
    config = await make_lent(house)
    old, new = house.state_dir, house.directory / "new"
    old.rename(new)
    house.use_state_dir(new)
    with_other("state_dir", str(new))(config)
    with_line("report_perid_s = 1.0")(config)
    told = new if is_told else None
    assert [found.state_dir for found in expected_homes(config, state_dir=told)] == [str(new)]
    await home(way_home(config, state_dir=told), house)
    assert role(house) == R.SERVING
    assert house.mark("routed").exists()
    assert not old.exists()


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_node_comes_home_from_outside_the_container_of_its_agent(
    quiet_house: DaemonHouse, *, is_known: bool
) -> None:
    """The file fits, and names the state as the agent sees it; whoever is outside names it as it
    is there, and nothing is made anew where the agent would look, ledger or no ledger."""
    house = quiet_house
    config = await make_lent(house)
    inside, outside = house.state_dir, house.directory / "outside"
    inside.rename(outside)
    house.use_state_dir(outside)
    if not is_known:
        (outside / "ledger").unlink()
    settings = way_home(config, state_dir=outside)
    assert settings.state_dir == str(outside)
    await home(settings, house)
    assert role(house) == R.SERVING
    assert house.mark("routed").exists()
    assert not inside.exists()


async def test_an_agent_that_refuses_its_file_has_a_moved_node_brought_home(
    quiet_house: DaemonHouse,
) -> None:
    """As one that was moved while its machine was down: what is armed finds it."""
    house = quiet_house
    config = await make_lent(house)
    old, new = house.state_dir, house.directory / "new"
    old.rename(new)
    house.use_state_dir(new)
    with_other("state_dir", str(new))(config)
    with_line("report_perid_s = 1.0")(config)
    code, text = await house.run("--config", str(config), "--fake-nvml", str(house.fleet))
    assert (code, "is away; its last resort fires" in text) == (2, True), text
    await house.until(lambda: role(house) == R.SERVING, "the node serves")
    assert house.mark("routed").exists()
    assert not old.exists()


@pytest.mark.parametrize("newer_by", STALE_AND_TRUE)
@pytest.mark.parametrize("is_of_file", [True, False])
async def test_of_a_copied_state_that_counts_which_is_the_nodes_now(
    quiet_house: DaemonHouse, newer_by: str, *, is_of_file: bool
) -> None:
    """Whether the file names it or the command line: an agent works there, or more was ordered
    there, or its lease ends later."""
    house = quiet_house
    stale, true = house.directory / "stale", house.directory / "true"
    for where, known in zip((stale, true), STALE_AND_TRUE[newer_by], strict=True):
        house.use_state_dir(where)
        await make_lent(house, generation=known[0], left_s=known[1])
    named, told = (true, stale) if is_of_file else (stale, true)
    house.use_state_dir(named)
    config = house.config(inference=True)
    with exclusive(true) if newer_by == "lock" else nullcontext():
        assert way_home(config, state_dir=told).state_dir == str(true)
        assert [found.state_dir for found in expected_homes(config, state_dir=told)] == [str(true)]


async def test_a_copy_of_its_state_brings_no_node_home_whose_agent_works(
    quiet_house: DaemonHouse,
) -> None:
    """It was taken with the lease of that time, which is over; the node's own is renewed since."""
    house = quiet_house
    config = await make_lent(house)
    copied, now = house.state_dir, house.directory / "now"
    house.use_state_dir(now)
    config = await make_lent(house, left_s=600.0)
    with exclusive(now), pytest.raises(Unavailable, match="another agent works on this node"):
        await home(way_home(config, state_dir=copied), house)
    assert not house.mark("routed").exists()
    for state_dir in (copied, now):
        memory = peek(state_dir)
        assert memory is not None and memory.role == R.ON_LOAN


@pytest.mark.nats
async def test_what_an_agent_armed_finds_a_node_that_was_moved_after_it_died(
    house: DaemonHouse,
) -> None:
    """By the file, which names the new place; it ends the workers that have run on there, too."""
    config = house.config(inference=True)
    agent = await house.start(config)
    pid = await lend(house, ttl_s=3.0)
    house.is_renewing = False
    await kill_9(agent)
    old, new = house.state_dir, house.directory / "new"
    old.rename(new)
    house.use_state_dir(new)
    with_other("state_dir", str(new))(config)
    with_line("report_perid_s = 1.0")(config)
    await house.until(lambda: role(house) == R.SERVING, "the node serves")
    assert house.mark("routed").exists()
    assert not is_alive(pid)
    memory = peek(new)
    assert memory is not None
    [worker] = memory.workers.values()
    assert worker.ended_at_s is not None
    assert not old.exists()
