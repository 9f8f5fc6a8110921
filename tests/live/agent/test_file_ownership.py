"""Root may bring home the node of another account, whose agent goes on with its files then."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agent.core.state import first_memory
from agent.settings_file import way_home
from agent.storage import accepted_settings, file_ownership
from agent.storage.ledger import Ledger, exclusive
from common.model import NodeRole
from tests.harness.node.daemon import DaemonHarness
from tests.harness.node.lent_node import home, make_lent, make_quiet_harness, role
from tests.harness.node.life import settings

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
quiet_harness = pytest.fixture(make_quiet_harness)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """Of an agent that is not root."""
    path = tmp_path / "state"
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)
    return path


def owners(directory: Path) -> dict[str, tuple[int, int]]:
    """Of everything below, links as themselves."""
    found = {str(path.relative_to(directory)): path.lstat() for path in directory.rglob("*")}
    return {name: (stat.st_uid, stat.st_gid) for name, stat in found.items()}


THEIRS = (NOBODY, NOBODY)


async def test_what_root_writes_is_the_accounts_at_once(state_dir: Path) -> None:
    """A way home that is killed leaves nothing behind that its node's agent cannot open."""
    memory = first_memory(settings(), "boot")
    for generation in (1, 2):
        memory.generation = generation
        with exclusive(state_dir):
            ledger = Ledger(state_dir)
            ledger.load()
            await ledger.save(memory)
            ledger.close()
        with (state_dir / "ledger").open("ab") as file:
            file.write(b"torn")
    accepted_settings.keep(state_dir, settings())
    names = ("ledger", "ledger.current", "ledger.torn", "lock", accepted_settings.FILE)
    assert owners(state_dir) == dict.fromkeys(names, THEIRS)


@pytest.mark.slow
async def test_a_way_home_as_root_locks_out_no_agent(quiet_harness: DaemonHarness) -> None:
    """Ledger, lock and whatever else it left are their account's again."""
    harness = quiet_harness
    config = await make_lent(harness)
    for path in (harness.state_dir, *harness.state_dir.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    await home(way_home(config, state_dir=None), harness)
    assert role(harness) == NodeRole.SERVING
    assert set(owners(harness.state_dir).values()) == {THEIRS}


def test_nothing_is_given_that_is_not_the_nodes(state_dir: Path, tmp_path: Path) -> None:
    """Whoever has the directory could lead root to a file of its own, by either kind of link; and
    what a job keeps is not looked at."""
    outside, linked = tmp_path / "outside", tmp_path / "linked"
    outside.touch()
    linked.touch()
    (state_dir / "by-name").symlink_to(outside)
    os.link(linked, state_dir / "by-link")
    deep = state_dir / "workers" / "job-1" / "data"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    (deep.parent / "status.json").touch()
    file_ownership.give_all(state_dir)
    assert (outside.stat().st_uid, linked.stat().st_uid) == (0, 0)
    assert owners(state_dir) == {
        "by-name": (0, 0),
        "by-link": (0, 0),
        "workers": THEIRS,
        "workers/job-1": THEIRS,
        "workers/job-1/status.json": THEIRS,
        "workers/job-1/data": THEIRS,
        "workers/job-1/data/file": (0, 0),
    }


def test_what_is_roots_stays_roots(tmp_path: Path) -> None:
    """An agent that is root, with jobs of another account."""
    (tmp_path / "job").mkdir()
    os.chown(tmp_path / "job", NOBODY, NOBODY)
    (tmp_path / "job" / "spec.json").touch()
    file_ownership.give_all(tmp_path)
    assert owners(tmp_path)["job/spec.json"] == (0, 0)


@pytest.mark.parametrize("name", ["ledger", "lock"])
async def test_no_link_is_followed(state_dir: Path, tmp_path: Path, name: str) -> None:
    """Neither is a file emptied nor closed nor given that only a link leads to."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (state_dir / name).symlink_to(outside)
    before = outside.stat()

    def write() -> None:
        with exclusive(state_dir):
            asyncio.run(Ledger(state_dir).save(first_memory(settings(), "boot")))

    with pytest.raises(Exception, match="symbolic links"):
        await asyncio.to_thread(write)
    assert outside.read_text() == "mine"
    assert (outside.stat().st_uid, outside.stat().st_mode) == (before.st_uid, before.st_mode)
