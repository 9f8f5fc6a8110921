"""The last resort, with a real process that waits and pretend programs of systemd."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from agent import keeper_process, shim_files
from agent.keeper import KeeperLastResort, SystemdLastResort, arm_argv, disarm_argv
from agent.keeper_process import Orders, nap_s
from agent.lease import LastResort
from common.clock import SystemClock
from common.errors import Unavailable
from tests.agent.worker_house import PATIENCE_S, is_alive, kill, rss_bytes

CLOCK = SystemClock()


class KeeperHouse:
    """A keeper's file whose command writes down that it ran."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "go-home"
        self.mark = directory / "fired"
        self.resort = self.new_resort()

    def new_resort(self, script: str = "") -> KeeperLastResort:
        """A last resort as an agent that starts anew would make it."""
        argv = ("sh", "-c", script or f"echo fired >> {self.mark}")
        return KeeperLastResort(self.path, argv, clock=CLOCK)

    @property
    def fired_count(self) -> int:
        """How often the command ran."""
        return self.mark.read_text().count("fired") if self.mark.exists() else 0

    def keepers(self) -> list[int]:
        """The keeper processes of the file."""
        wanted = os.fsencode(self.path)
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and is_alive(int(entry.name)):
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if wanted in words:
                    found.append(int(entry.name))
        return found

    async def until(self, fact: Callable[[], bool], what: str) -> None:
        """Return when a fact holds."""
        try:
            async with CLOCK.timeout(PATIENCE_S):
                while not fact():
                    await CLOCK.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not in {PATIENCE_S:g} s: {what}") from None


@pytest.fixture
async def house(tmp_path: Path) -> AsyncGenerator[KeeperHouse, None]:
    """A keeper's file; whatever waits at the end of a test is ended."""
    house = KeeperHouse(tmp_path)
    yield house
    for pid in house.keepers():
        kill(pid)


@pytest.mark.slow
async def test_the_command_runs_once_when_its_instant_has_come(house: KeeperHouse) -> None:
    """Nobody but the keeper is needed, and afterwards nothing is armed."""
    await house.resort.arm(0.0)
    await house.until(lambda: not house.keepers() and house.fired_count > 0, "fired and left")
    assert house.fired_count == 1
    assert not house.path.exists()


@pytest.mark.slow
async def test_arming_again_puts_it_off_and_has_one_keeper(house: KeeperHouse) -> None:
    """A renewal replaces the instant; even another agent's renewal finds the same keeper."""
    await house.resort.arm(600.0)
    await house.until(lambda: len(house.keepers()) == 1, "one keeper")
    before = house.keepers()
    await house.new_resort().arm(900.0)
    await house.resort.arm(1200.0)
    assert house.keepers() == before
    orders = keeper_process.read_orders(str(house.path))
    assert orders is not None
    assert orders.fire_at_s > CLOCK.now_s() + 1100.0
    assert house.fired_count == 0


@pytest.mark.slow
async def test_disarming_ends_the_keeper_and_nothing_runs(house: KeeperHouse) -> None:
    """A node that is home needs no last resort; a second disarm is no error."""
    await house.resort.arm(600.0)
    await house.until(lambda: len(house.keepers()) == 1, "one keeper")
    await house.resort.disarm()
    await house.resort.disarm()
    await house.until(lambda: not house.keepers(), "the keeper left")
    assert house.fired_count == 0


@pytest.mark.slow
async def test_a_keeper_that_was_killed_is_replaced_by_the_next_renewal(
    house: KeeperHouse,
) -> None:
    """The file alone brings nobody home, so each arming makes sure of a process."""
    await house.resort.arm(600.0)
    await house.until(lambda: len(house.keepers()) == 1, "one keeper")
    [pid] = house.keepers()
    kill(pid)
    await house.until(lambda: not house.keepers(), "it is dead")
    await house.resort.arm(600.0)
    await house.until(lambda: len(house.keepers()) == 1, "another keeper")


@pytest.mark.slow
async def test_arming_right_after_disarming_is_never_lost(house: KeeperHouse) -> None:
    """A keeper on its way out notices that it is wanted again, or a new one is there."""
    for _ in range(10):
        await house.resort.arm(600.0)
        await house.resort.disarm()
    await house.resort.arm(0.0)
    await house.until(lambda: house.fired_count == 1, "fired")


@pytest.mark.slow
async def test_a_keeper_is_nobody_s_child(house: KeeperHouse) -> None:
    """The end of the agent, or of its session, does not reach it."""
    await house.resort.arm(600.0)
    await house.until(lambda: len(house.keepers()) == 1, "one keeper")
    [pid] = house.keepers()
    assert os.getsid(pid) not in (os.getsid(0), 0)
    assert pid not in shim_files.descendants(os.getpid())


def test_a_keeper_looks_often_and_fires_on_time() -> None:
    """It never sleeps past the instant, and leaves when there is none of this boot."""
    orders = Orders("this", 100.0, ["true"])
    assert nap_s(orders, "this", 0.0) == keeper_process.LONGEST_NAP_S
    assert nap_s(orders, "this", 99.75) == 0.25
    assert nap_s(orders, "this", 100.0) == 0.0
    assert nap_s(orders, "other", 100.0) is None
    assert nap_s(None, "this", 100.0) is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"boot_id":"b","fire_at_s":1,"argv":[]}', '{"boot_id":"b","argv":["x"]}',
     '{"boot_id":"b","fire_at_s":"soon","argv":["x"]}'],
)  # fmt: skip
def test_a_file_that_does_not_fit_asks_for_nothing(tmp_path: Path, text: str) -> None:
    """Half an order never fires."""
    path = tmp_path / "file"
    path.write_text(text)
    assert keeper_process.read_orders(str(path)) is None


def test_a_command_s_exit_code_is_known() -> None:
    """A failure is told from a success, because it is tried again."""
    assert keeper_process.run(["sh", "-c", "exit 3"]) == 3
    assert keeper_process.run(["true"]) == 0
    assert keeper_process.run(["/no/such/command"]) == 127


def test_a_timer_s_command_line() -> None:
    """What systemd is asked for, word by word."""
    assert arm_argv("n1", "a", ("aryl-agent", "--go-home"), 12.5) == (
        "systemd-run",
        "--quiet",
        "--collect",
        "--no-ask-password",
        f"--uid={os.geteuid()}",
        f"--gid={os.getegid()}",
        "--unit=aryl-go-home-n1-a",
        "--on-active=12500ms",
        "--timer-property=AccuracySec=100ms",
        "--property=Restart=on-failure",
        "--property=RestartSec=5",
        "--property=StartLimitIntervalSec=0",
        "--",
        "aryl-agent",
        "--go-home",
    )
    assert disarm_argv("n1", ("a", "b"), is_user_manager=True) == (
        "systemctl",
        "--user",
        "stop",
        "aryl-go-home-n1-a.timer",
        "aryl-go-home-n1-b.timer",
    )


@pytest.fixture
def pretend_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """systemd-run and systemctl that keep timers as files and refuse a name that is in use."""
    folder, timers = tmp_path / "bin", tmp_path / "timers"
    folder.mkdir()
    timers.mkdir()
    programs = {
        "systemd-run": f"""#!/bin/sh
for word; do case $word in --unit=*) unit=${{word#--unit=}};; esac; done
[ -e {timers}/$unit.timer ] && exit 1
[ -e {timers}/broken ] && exit 1
echo "$@" > {timers}/$unit.timer
""",
        "systemctl": f"""#!/bin/sh
shift
for unit; do rm {timers}/$unit || missing=1; done
[ -z "$missing" ] || exit 5
""",
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return timers


def timers_in(folder: Path) -> list[str]:
    """The command lines of the timers that are armed."""
    return [path.read_text() for path in sorted(folder.glob("*.timer"))]


@pytest.mark.slow
async def test_one_timer_is_armed_however_often(pretend_systemd: Path, tmp_path: Path) -> None:
    """Names take turns, the old timer goes when the new one runs, and a disarm leaves none."""

    def new_resort() -> SystemdLastResort:
        return SystemdLastResort("n1", ("home",), clock=CLOCK, log=tmp_path / "log")

    resort: LastResort = new_resort()
    for after_s in (10.0, 20.0, 30.0):
        await resort.arm(after_s)
        [timer] = timers_in(pretend_systemd)
        assert f"--on-active={after_s * 1000:.0f}ms" in timer
    again = new_resort()
    await again.arm(40.0)
    [timer] = timers_in(pretend_systemd)
    assert "40000ms" in timer
    await again.disarm()
    await again.disarm()
    assert timers_in(pretend_systemd) == []


@pytest.mark.slow
async def test_a_refused_timer_leaves_the_earlier_one_armed(
    pretend_systemd: Path, tmp_path: Path
) -> None:
    """A node is never without a last resort because a renewal of it failed."""
    resort = SystemdLastResort("n1", ("home",), clock=CLOCK, log=tmp_path / "log")
    await resort.arm(10.0)
    (pretend_systemd / "broken").touch()
    with pytest.raises(Unavailable, match="systemd-run"):
        await resort.arm(20.0)
    [timer] = timers_in(pretend_systemd)
    assert "10000ms" in timer


@pytest.mark.slow
async def test_a_waiting_keeper_is_small(house: KeeperHouse) -> None:
    """A keeper costs a node less than a shim does."""
    await house.resort.arm(600.0)
    await house.until(lambda: len(house.keepers()) == 1, "one keeper")
    [pid] = house.keepers()
    assert rss_bytes(pid) <= 12 * 1024 * 1024
