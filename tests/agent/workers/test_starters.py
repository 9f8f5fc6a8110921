"""A worker's unit where there is one of its name already: the node is not at fault for that."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from msgspec import Struct

from agent.shim.files import STATUS_FILE
from agent.workers.starters import (
    SHIM_LOG,
    START_TIMEOUT_S,
    RealSystemd,
    SystemdStarter,
    own_unit_name,
    shim_argv,
    unit_name,
)
from common.clock import SystemClock
from common.errors import Unavailable
from tests.harness.fake_clock import FakeClock
from tests.harness.node.workers import make_order

ORDER = make_order("x")
T = 60.0
NAME = unit_name(ORDER.key)
EXISTS = (
    f"Failed to start transient service unit: Unit {NAME} was already loaded or has a fragment "
    "file.",
    f"Failed to start transient service unit: Unit {NAME} already exists.",
)


class Unit(Struct):
    """What systemd knows of one."""

    state: str
    argv: tuple[str, ...]


class Manager:
    """Systemd as far as a starter asks it: units by name, in its own words."""

    def __init__(self, *, words: str = EXISTS[0]) -> None:
        self.units: dict[str, Unit] = {}
        self.is_down = False
        self.clock = FakeClock()
        self.takes_s = 0.0
        self._words = words

    async def _takes(self, what: str, timeout_s: float) -> None:
        await self.clock.sleep(min(self.takes_s, timeout_s))
        if self.takes_s > timeout_s:
            raise Unavailable(f"{what}: no end in {timeout_s:g} s")

    async def run(self, argv: tuple[str, ...], *, log: Path, timeout_s: float) -> None:
        """`systemd-run`, or `systemctl reset-failed`."""
        assert log.name == SHIM_LOG
        await self._takes(argv[0], timeout_s)
        if self.is_down:
            raise Unavailable(f"{argv[0]}: exit code 1: Failed to connect to bus")
        if argv[0] == "systemctl":
            assert argv[-2] == "reset-failed"
            if argv[-1] not in self.units:
                raise Unavailable(f"systemctl: exit code 1: Unit {argv[-1]} not loaded.")
            del self.units[argv[-1]]
            return
        [name] = [word.removeprefix("--unit=") for word in argv if word.startswith("--unit=")]
        if name in self.units:
            raise Unavailable(f"systemd-run: exit code 1: {self._words}")
        self.units[name] = Unit("active", argv[argv.index("--") + 1 :])

    async def ask(self, argv: tuple[str, ...], *, timeout_s: float) -> str:
        """`systemctl show`."""
        await self._takes(argv[0], timeout_s)
        assert argv[-3:-1] == ("show", "--property=ActiveState,ExecStart")
        unit = self.units.get(argv[-1])
        if unit is None:
            return "ActiveState=inactive\n"
        command = f"{{ path={unit.argv[0]} ; argv[]={' '.join(unit.argv)} ; ignore_errors=no }}"
        return f"ActiveState={unit.state}\nExecStart={command}\n"

    def there(self) -> dict[str, str]:
        """The directory of each unit's shim."""
        return {name: unit.argv[-1] for name, unit in self.units.items()}


def starter(manager: Manager) -> SystemdStarter:
    """One that asks this manager."""
    return SystemdStarter(manager.clock, systemd=manager)


@pytest.mark.parametrize("words", EXISTS)
async def test_a_unit_that_an_agent_left_in_the_middle_of_a_start_is_adopted(
    words: str, tmp_path: Path
) -> None:
    """It is the shim that was wanted, and a second one would be no other."""
    manager = Manager(words=words)
    await starter(manager).start(tmp_path, ORDER)
    await starter(manager).start(tmp_path, ORDER)
    assert manager.there() == {NAME: str(tmp_path)}


@pytest.mark.parametrize("state", ["failed", "inactive"])
async def test_a_unit_that_has_ended_is_started_anew(state: str, tmp_path: Path) -> None:
    """Systemd remembers it, and nothing of it runs."""
    manager = Manager()
    manager.units[NAME] = Unit(state, shim_argv(tmp_path))
    await starter(manager).start(tmp_path, ORDER)
    assert manager.units == {NAME: Unit("active", shim_argv(tmp_path))}


async def test_a_unit_that_is_forgotten_meanwhile_is_started_anew(tmp_path: Path) -> None:
    """It was there when its name was asked for, and could not be reset any more."""

    class Forgets(Manager):
        async def ask(self, argv: tuple[str, ...], *, timeout_s: float) -> str:
            self.units.clear()
            return await super().ask(argv, timeout_s=timeout_s)

    manager = Forgets()
    manager.units[NAME] = Unit("failed", shim_argv(tmp_path))
    await starter(manager).start(tmp_path, ORDER)
    assert manager.there() == {NAME: str(tmp_path)}


async def test_a_unit_of_another_directory_is_left_alone(tmp_path: Path) -> None:
    """As of a second agent on the machine: ours gets a name of its own, and is adopted by that."""
    other = Unit("active", shim_argv(tmp_path / "other"))
    manager = Manager()
    manager.units[NAME] = other
    await starter(manager).start(tmp_path, ORDER)
    own = own_unit_name(ORDER.key, tmp_path)
    assert manager.there() == {NAME: str(tmp_path / "other"), own: str(tmp_path)}
    assert manager.units[NAME] == other


async def test_any_other_failure_is_the_nodes_own(tmp_path: Path) -> None:
    """A systemd that does not answer starts nothing; nobody asks it for more."""
    manager = Manager()
    manager.is_down = True
    with pytest.raises(Unavailable, match="connect to bus"):
        await starter(manager).start(tmp_path, ORDER)
    assert not (tmp_path / STATUS_FILE).exists()


async def test_however_much_is_asked_of_systemd_a_start_takes_no_longer(tmp_path: Path) -> None:
    """A node's watchdog counts on one time limit, not on one for each question."""
    manager = Manager()
    manager.takes_s = 0.4 * START_TIMEOUT_S
    manager.units[NAME] = Unit("failed", shim_argv(tmp_path))
    began_s = manager.clock.now_s()
    starting = asyncio.ensure_future(starter(manager).start(tmp_path, ORDER))
    await manager.clock.advance_until(starting.done, limit_s=10 * START_TIMEOUT_S)
    with pytest.raises(Unavailable, match="no end in"):
        starting.result()
    assert manager.clock.now_s() - began_s <= START_TIMEOUT_S + 1.0


async def test_what_a_program_of_systemd_says_is_read_apart_from_the_shims_log(
    tmp_path: Path,
) -> None:
    """The answer is its own output, and a program that fails is told with its words."""
    systemd = RealSystemd(SystemClock())
    assert await systemd.ask(("echo", "ActiveState=active"), timeout_s=T) == "ActiveState=active\n"
    with pytest.raises(Unavailable, match="No such file"):
        await systemd.ask(("ls", os.fspath(tmp_path / "nothing")), timeout_s=T)
    assert not any(os.scandir(tmp_path))
