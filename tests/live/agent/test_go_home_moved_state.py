"""A node comes home where its state is now, whatever place its agent knew it by."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from agent.settings_file import expected_homes, way_home
from agent.storage.ledger import exclusive, peek
from common.errors import Unavailable
from common.model import NodeRole
from tests.harness.node.daemon import DaemonHarness, kill_9, lend, make_daemon_harness
from tests.harness.node.lent_node import (
    home,
    make_lent,
    make_quiet_harness,
    role,
    with_line,
    with_other,
)
from tests.harness.node.workers import is_alive

R = NodeRole
pytestmark = pytest.mark.slow
harness = pytest.fixture(make_daemon_harness)
quiet_harness = pytest.fixture(make_quiet_harness)
STALE_AND_TRUE = {
    "lock": ((1, 1, 600.0), (0, 0, 300.0)),
    "epoch": ((1, 3, 600.0), (2, 0, 300.0)),
    "generation": ((1, 0, 600.0), (1, 1, 300.0)),
    "lease": ((1, 0, 300.0), (1, 0, 600.0)),
}
"""By what the true one of two states of a node is told from the stale one: of each the epoch, the
generation, and the seconds left of its lease."""


def moved(harness: DaemonHarness, config: Path) -> tuple[Path, Path]:
    """The state is elsewhere now, as its file says, which is spoilt; its old and its new place."""
    old, new = harness.state_dir, harness.directory / "new"
    old.rename(new)
    harness.use_state_dir(new)
    with_other("state_dir", str(new))(config)
    with_line("report_perid_s = 1.0")(config)
    return old, new


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_node_whose_state_was_moved_comes_home_where_it_is(
    quiet_harness: DaemonHarness, *, is_told: bool
) -> None:
    """What its agent accepted names the old place, which is not made anew: the way home would end
    well in an empty ledger there, and the node's own would go on saying that it is away."""
    harness = quiet_harness
    config = await make_lent(harness)
    old, new = moved(harness, config)
    told = new if is_told else None
    assert [found.state_dir for found in expected_homes(config, state_dir=told)] == [str(new)]
    await home(way_home(config, state_dir=told), harness)
    assert role(harness) == R.SERVING
    assert harness.mark("routed").exists()
    assert not old.exists()


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_node_comes_home_from_outside_the_container_of_its_agent(
    quiet_harness: DaemonHarness, *, is_known: bool
) -> None:
    """The file fits, and names the state as the agent sees it; whoever is outside names it as it
    is there, and nothing is made anew where the agent would look, ledger or no ledger."""
    harness = quiet_harness
    config = await make_lent(harness)
    inside, outside = harness.state_dir, harness.directory / "outside"
    inside.rename(outside)
    harness.use_state_dir(outside)
    if not is_known:
        (outside / "ledger").unlink()
    settings = way_home(config, state_dir=outside)
    assert settings.state_dir == str(outside)
    await home(settings, harness)
    assert role(harness) == R.SERVING
    assert harness.mark("routed").exists()
    assert not inside.exists()


async def test_an_agent_that_refuses_its_file_has_a_moved_node_brought_home(
    quiet_harness: DaemonHarness,
) -> None:
    """As one that was moved while its machine was down: what is armed finds it."""
    harness = quiet_harness
    config = await make_lent(harness)
    old, _ = moved(harness, config)
    code, text = await harness.run("--config", str(config), "--fake-nvml", str(harness.fleet))
    assert (code, "is away; its last resort fires" in text) == (2, True), text
    await harness.until(lambda: role(harness) == R.SERVING, "the node serves")
    assert harness.mark("routed").exists()
    assert not old.exists()


@pytest.mark.parametrize("newer_by", STALE_AND_TRUE)
@pytest.mark.parametrize("is_of_file", [True, False])
async def test_of_a_copied_state_that_counts_which_is_the_nodes_now(
    quiet_harness: DaemonHarness, newer_by: str, *, is_of_file: bool
) -> None:
    """Whether the file names it or the command line: an agent works there, or more was ordered
    there, or its lease ends later."""
    harness = quiet_harness
    stale, true = harness.directory / "stale", harness.directory / "true"
    for where, known in zip((stale, true), STALE_AND_TRUE[newer_by], strict=True):
        harness.use_state_dir(where)
        epoch, generation, left_s = known
        await make_lent(harness, epoch=epoch, generation=generation, left_s=left_s)
    named, told = (true, stale) if is_of_file else (stale, true)
    harness.use_state_dir(named)
    config = harness.config(inference=True)
    with exclusive(true) if newer_by == "lock" else nullcontext():
        assert way_home(config, state_dir=told).state_dir == str(true)
        assert [found.state_dir for found in expected_homes(config, state_dir=told)] == [str(true)]


async def test_a_copy_of_its_state_brings_no_node_home_whose_agent_works(
    quiet_harness: DaemonHarness,
) -> None:
    """It was taken with the lease of that time, which is over; the node's own is renewed since."""
    harness = quiet_harness
    config = await make_lent(harness)
    copied, now = harness.state_dir, harness.directory / "now"
    harness.use_state_dir(now)
    config = await make_lent(harness, left_s=600.0)
    with exclusive(now), pytest.raises(Unavailable, match="another agent works on this node"):
        await home(way_home(config, state_dir=copied), harness)
    assert not harness.mark("routed").exists()
    for state_dir in (copied, now):
        memory = peek(state_dir)
        assert memory is not None and memory.role == R.ON_LOAN


@pytest.mark.parametrize("is_of_file", [True, False])
@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_copied_state_with_a_lease_counts_unless_the_other_saw_that_lease_end(
    quiet_harness: DaemonHarness, *, has_ended: bool, is_of_file: bool
) -> None:
    """Its lease has minutes left and the other one has none: that one is on its way home from the
    same loan, or was not lent yet."""
    harness = quiet_harness
    lent, without = harness.directory / "lent", harness.directory / "without"
    harness.use_state_dir(lent)
    await make_lent(harness, generation=3, left_s=600.0)
    harness.use_state_dir(without)
    role_then = R.VACATING if has_ended else R.WARMING
    ended = ("l1-1",) if has_ended else ()
    await make_lent(harness, role=role_then, generation=3, ended=ended)
    named, told = (lent, without) if is_of_file else (without, lent)
    harness.use_state_dir(named)
    config = harness.config(inference=True)
    true = str(without if has_ended else lent)
    assert way_home(config, state_dir=told).state_dir == true
    assert [found.state_dir for found in expected_homes(config, state_dir=told)] == [true]


async def test_of_two_states_of_a_later_loan_the_one_that_saw_that_loan_end_counts(
    quiet_harness: DaemonHarness,
) -> None:
    """Both name the loan before it as over, which says nothing of which is later."""
    harness = quiet_harness
    lent, true = harness.directory / "lent", harness.directory / "true"
    harness.use_state_dir(lent)
    await make_lent(harness, generation=3, left_s=600.0, ended=("l0-1",))
    harness.use_state_dir(true)
    await make_lent(harness, role=R.VACATING, generation=3, ended=("l0-1", "l1-1"))
    harness.use_state_dir(lent)
    config = harness.config(inference=True)
    assert way_home(config, state_dir=true).state_dir == str(true)
    assert [found.state_dir for found in expected_homes(config, state_dir=true)] == [str(true)]


@pytest.mark.nats
async def test_what_an_agent_armed_finds_a_node_that_was_moved_after_it_died(
    harness: DaemonHarness,
) -> None:
    """By the file, which names the new place; it ends the workers that have run on there, too."""
    config = harness.config(inference=True)
    agent = await harness.start(config)
    pid = await lend(harness, ttl_s=3.0)
    harness.is_renewing = False
    await kill_9(agent)
    old, new = moved(harness, config)
    await harness.until(lambda: role(harness) == R.SERVING, "the node serves")
    assert harness.mark("routed").exists()
    assert not is_alive(pid)
    memory = peek(new)
    assert memory is not None
    [worker] = memory.workers.values()
    assert worker.ended_at_s is not None
    assert not old.exists()
