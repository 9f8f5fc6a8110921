"""A node comes home where its state is now, whatever place its agent knew it by."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from agent.settings_file import expected_homes, way_home
from agent.storage.ledger import exclusive, peek
from common.errors import Unavailable
from common.model import NodeRole
from tests.agent.daemon_house import DaemonHouse, kill_9, lend, make_daemon_house
from tests.agent.lent_node import home, make_lent, make_quiet_house, role, with_line, with_other
from tests.agent.worker_house import is_alive

R = NodeRole
pytestmark = pytest.mark.slow
house = pytest.fixture(make_daemon_house)
quiet_house = pytest.fixture(make_quiet_house)
STALE_AND_TRUE = {
    "lock": ((1, 1, 600.0), (0, 0, 300.0)),
    "epoch": ((1, 3, 600.0), (2, 0, 300.0)),
    "generation": ((1, 0, 600.0), (1, 1, 300.0)),
    "lease": ((1, 0, 300.0), (1, 0, 600.0)),
}
"""By what the true one of two states of a node is told from the stale one: of each the epoch, the
generation, and the seconds left of its lease."""


def moved(house: DaemonHouse, config: Path) -> tuple[Path, Path]:
    """The state is elsewhere now, as its file says, which is spoilt; its old and its new place."""
    old, new = house.state_dir, house.directory / "new"
    old.rename(new)
    house.use_state_dir(new)
    with_other("state_dir", str(new))(config)
    with_line("report_perid_s = 1.0")(config)
    return old, new


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_node_whose_state_was_moved_comes_home_where_it_is(
    quiet_house: DaemonHouse, *, is_told: bool
) -> None:
    """What its agent accepted names the old place, which is not made anew: the way home would end
    well in an empty ledger there, and the node's own would go on saying that it is away."""
    house = quiet_house
    config = await make_lent(house)
    old, new = moved(house, config)
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
    old, _ = moved(house, config)
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
        epoch, generation, left_s = known
        await make_lent(house, epoch=epoch, generation=generation, left_s=left_s)
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


@pytest.mark.parametrize("is_of_file", [True, False])
@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_copied_state_with_a_lease_counts_unless_the_other_saw_that_lease_end(
    quiet_house: DaemonHouse, *, has_ended: bool, is_of_file: bool
) -> None:
    """Its lease has minutes left and the other one has none: that one is on its way home from the
    same loan, or was not lent yet."""
    house = quiet_house
    lent, without = house.directory / "lent", house.directory / "without"
    house.use_state_dir(lent)
    await make_lent(house, generation=3, left_s=600.0)
    house.use_state_dir(without)
    role_then = R.VACATING if has_ended else R.WARMING
    ended = ("l1-1",) if has_ended else ()
    await make_lent(house, role=role_then, generation=3, ended=ended)
    named, told = (lent, without) if is_of_file else (without, lent)
    house.use_state_dir(named)
    config = house.config(inference=True)
    true = str(without if has_ended else lent)
    assert way_home(config, state_dir=told).state_dir == true
    assert [found.state_dir for found in expected_homes(config, state_dir=told)] == [true]


async def test_of_two_states_of_a_later_loan_the_one_that_saw_that_loan_end_counts(
    quiet_house: DaemonHouse,
) -> None:
    """Both name the loan before it as over, which says nothing of which is later."""
    house = quiet_house
    lent, true = house.directory / "lent", house.directory / "true"
    house.use_state_dir(lent)
    await make_lent(house, generation=3, left_s=600.0, ended=("l0-1",))
    house.use_state_dir(true)
    await make_lent(house, role=R.VACATING, generation=3, ended=("l0-1", "l1-1"))
    house.use_state_dir(lent)
    config = house.config(inference=True)
    assert way_home(config, state_dir=true).state_dir == str(true)
    assert [found.state_dir for found in expected_homes(config, state_dir=true)] == [str(true)]


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
    old, new = moved(house, config)
    await house.until(lambda: role(house) == R.SERVING, "the node serves")
    assert house.mark("routed").exists()
    assert not is_alive(pid)
    memory = peek(new)
    assert memory is not None
    [worker] = memory.workers.values()
    assert worker.ended_at_s is not None
    assert not old.exists()
