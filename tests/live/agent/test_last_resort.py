"""The last resort, with a real process that waits and pretend programs of systemd."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from agent.lease import last_resort_process
from agent.lease.last_resort import (
    ARM_LIMIT_S,
    SLOTS,
    SystemdLastResort,
    arm_argv,
    disarm_argv,
    is_armed_argv,
)
from agent.lease.last_resort_process import Orders, nap_s
from agent.lease.renewal import RESORT_LIMIT_S, LastResort
from agent.shim import files as shim_files
from common.clock import SystemClock
from common.errors import Unavailable
from tests.harness.node.last_resort_keeper import CLOCK, KeeperHarness, make_keeper_harness
from tests.harness.node.workers import kill, rss_bytes
from tests.tables import each_row

harness = pytest.fixture(make_keeper_harness)


@pytest.mark.slow
async def test_the_command_runs_once_when_its_instant_has_come(harness: KeeperHarness) -> None:
    """Nobody but the keeper is needed, and afterwards nothing is armed."""
    await harness.resort.arm(0.0)
    await harness.until(lambda: not harness.keepers() and harness.fired_count > 0, "fired and left")
    assert harness.fired_count == 1
    assert not harness.path.exists()


@pytest.mark.slow
async def test_arming_again_puts_it_off_and_has_one_keeper(harness: KeeperHarness) -> None:
    """A renewal replaces the instant; even another agent's renewal finds the same keeper."""
    await harness.resort.arm(600.0)
    await harness.until(lambda: len(harness.keepers()) == 1, "one keeper")
    before = harness.keepers()
    await harness.new_resort().arm(900.0)
    await harness.resort.arm(1200.0)
    assert harness.keepers() == before
    orders = last_resort_process.read_orders(str(harness.path))
    assert orders is not None
    assert orders.fire_at_s > CLOCK.now_s() + 1100.0
    assert harness.fired_count == 0


@pytest.mark.slow
async def test_disarming_ends_the_keeper_and_nothing_runs(harness: KeeperHarness) -> None:
    """A node that is home needs no last resort; a second disarm is no error."""
    await harness.resort.arm(600.0)
    await harness.until(lambda: len(harness.keepers()) == 1, "one keeper")
    await harness.resort.disarm()
    await harness.resort.disarm()
    await harness.until(lambda: not harness.keepers(), "the keeper left")
    assert harness.fired_count == 0


@pytest.mark.slow
async def test_a_keeper_that_was_killed_is_replaced_by_the_next_renewal(
    harness: KeeperHarness,
) -> None:
    """The file alone brings nobody home, so each arming makes sure of a process."""
    await harness.resort.arm(600.0)
    await harness.until(lambda: len(harness.keepers()) == 1, "one keeper")
    [pid] = harness.keepers()
    kill(pid)
    await harness.until(lambda: not harness.keepers(), "it is dead")
    await harness.resort.arm(600.0)
    await harness.until(lambda: len(harness.keepers()) == 1, "another keeper")


@pytest.mark.slow
async def test_arming_right_after_disarming_is_never_lost(harness: KeeperHarness) -> None:
    """A keeper on its way out notices that it is wanted again, or a new one is there."""
    for _ in range(10):
        await harness.resort.arm(600.0)
        await harness.resort.disarm()
    await harness.resort.arm(0.0)
    await harness.until(lambda: harness.fired_count == 1, "fired")


@pytest.mark.slow
async def test_a_keeper_is_nobody_s_child(harness: KeeperHarness) -> None:
    """The end of the agent, or of its session, does not reach it."""
    await harness.resort.arm(600.0)
    await harness.until(lambda: len(harness.keepers()) == 1, "one keeper")
    [pid] = harness.keepers()
    assert os.getsid(pid) not in (os.getsid(0), 0)
    assert pid not in shim_files.descendants(os.getpid())


def test_a_keeper_looks_often_and_fires_on_time() -> None:
    """It never sleeps past the instant, and leaves when there is none of this boot."""
    orders = Orders("this", 100.0, ["true"])
    assert nap_s(orders, "this", 0.0) == last_resort_process.LONGEST_NAP_S
    assert nap_s(orders, "this", 99.75) == 0.25
    assert nap_s(orders, "this", 100.0) == 0.0
    assert nap_s(orders, "other", 100.0) is None
    assert nap_s(None, "this", 100.0) is None


@each_row(
    "text",
    ["", "[]", "{}", '{"boot_id":"b","fire_at_s":1,"argv":[]}', '{"boot_id":"b","argv":["x"]}',
     '{"boot_id":"b","fire_at_s":"soon","argv":["x"]}', "[" * 200_000],
)  # fmt: skip
def test_a_file_that_does_not_fit_asks_for_nothing(tmp_path: Path, text: str) -> None:
    """Half an order never fires."""
    path = tmp_path / "file"
    path.write_text(text)
    assert last_resort_process.read_orders(str(path)) is None


def test_a_command_s_exit_code_is_known() -> None:
    """A failure is told from a success, because it is tried again."""
    assert last_resort_process.run(["sh", "-c", "exit 3"]) == 3
    assert last_resort_process.run(["true"]) == 0
    assert last_resort_process.run(["/no/such/command"]) == 127


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
    assert is_armed_argv("n1", "a") == (
        "systemctl",
        "is-active",
        "--quiet",
        "aryl-go-home-n1-a.timer",
    )
    assert ARM_LIMIT_S <= RESORT_LIMIT_S


@pytest.fixture
def pretend_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """systemd-run and systemctl that keep timers as files, refuse a name that is in use, and write
    down after each command what is armed."""
    folder, timers = tmp_path / "bin", tmp_path / "timers"
    folder.mkdir()
    timers.mkdir()
    moment = f'echo "$(cd {timers} && echo *.timer)" >> {timers}/moments'
    programs = {
        "systemd-run": f"""#!/bin/sh
for word; do case $word in --unit=*) unit=${{word#--unit=}};; esac; done
[ -e {timers}/$unit.timer ] && exit 1
[ -e {timers}/broken ] && exit 1
echo "$@" > {timers}/$unit.timer
{moment}
[ -e {timers}/lost ] && exit 1
exit 0
""",
        "systemctl": f"""#!/bin/sh
verb=$1
shift
case $verb in
is-active)
    [ -e {timers}/silent ] && exit 1
    [ -e {timers}/$2 ] || exit 3;;
stop)
    [ -e {timers}/stuck ] && exit 1
    for unit; do rm {timers}/$unit || missing=1; done
    {moment}
    [ -z "$missing" ] || exit 5;;
*)
    exit 2;;
esac
""",
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return timers


def moments(timers: Path) -> list[str]:
    """What was armed after each command that arms or stops; `*.timer` is none."""
    return (timers / "moments").read_text().splitlines()


def timers_in(folder: Path) -> list[str]:
    """The command lines of the timers that are armed."""
    return [path.read_text() for path in sorted(folder.glob("*.timer"))]


@pytest.mark.slow
async def test_one_timer_is_armed_however_often(pretend_systemd: Path, tmp_path: Path) -> None:
    """Names take turns, the old timer goes when the new one runs, and a disarm leaves none. A
    renewal has nothing to log."""
    log = tmp_path / "log"

    def new_resort() -> SystemdLastResort:
        return SystemdLastResort("n1", ("home",), clock=CLOCK, log=log)

    resort: LastResort = new_resort()
    await resort.arm(5.0)
    told = log.read_text()
    for after_s in (10.0, 20.0, 30.0):
        await resort.arm(after_s)
        [timer] = timers_in(pretend_systemd)
        assert f"--on-active={after_s * 1000:.0f}ms" in timer
    assert log.read_text() == told
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
@pytest.mark.parametrize(("fault", "program"), [("lost", "systemd-run"), ("stuck", "systemctl")])
async def test_a_timer_that_could_be_there_stands_in_no_way(
    pretend_systemd: Path, tmp_path: Path, fault: str, program: str
) -> None:
    """One whose start was not answered, or that could not be stopped, has the name that comes
    next."""
    resort = SystemdLastResort("n1", ("home",), clock=CLOCK, log=tmp_path / "log")
    await resort.arm(10.0)
    await resort.arm(15.0)
    (pretend_systemd / fault).touch()
    with pytest.raises(Unavailable, match=program):
        await resort.arm(20.0)
    (pretend_systemd / fault).unlink()
    await resort.arm(30.0)
    [timer] = timers_in(pretend_systemd)
    assert "30000ms" in timer
    assert "*.timer" not in moments(pretend_systemd)


LEFT = [("a",), ("b",), ("a", "b")]
"""What the agent before may have left: killed between two commands, it left both."""


def leave(timers: Path, slots: tuple[str, ...]) -> list[str]:
    """Timers of an agent that is dead; their names."""
    names = [f"aryl-go-home-n1-{slot}.timer" for slot in slots]
    for name in names:
        (timers / name).write_text(f"--unit={name} --on-active=10000ms\n")
    return names


@pytest.mark.slow
@pytest.mark.parametrize("slots", LEFT, ids=["".join(slots) for slots in LEFT])
async def test_an_agent_started_again_replaces_a_timer_and_is_never_without_one(
    pretend_systemd: Path, tmp_path: Path, slots: tuple[str, ...]
) -> None:
    """Whichever name the agent before it used last, one may be killed between any two commands."""
    leave(pretend_systemd, slots)
    again = SystemdLastResort("n1", ("home",), clock=CLOCK, log=tmp_path / "log")
    for after_s in (20.0, 30.0):
        await again.arm(after_s)
        [timer] = timers_in(pretend_systemd)
        assert f"{after_s * 1000:.0f}ms" in timer
    assert "*.timer" not in moments(pretend_systemd)


@pytest.mark.slow
@pytest.mark.parametrize("slots", LEFT, ids=["".join(slots) for slots in LEFT])
async def test_a_disarm_finds_whatever_timer_there_is(
    pretend_systemd: Path, tmp_path: Path, slots: tuple[str, ...]
) -> None:
    """An agent started again, which armed none itself, is home and wants none."""
    leave(pretend_systemd, slots)
    await SystemdLastResort("n1", ("home",), clock=CLOCK, log=tmp_path / "log").disarm()
    assert timers_in(pretend_systemd) == []


@pytest.mark.slow
@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("slot", SLOTS)
async def test_a_timer_refused_to_an_agent_started_again_leaves_the_earlier_one_armed(
    pretend_systemd: Path, tmp_path: Path, slot: str, *, is_silent: bool
) -> None:
    """The failure of its first command takes nothing away, nor does that of its second one; and
    where it was not told what there is it stops nothing."""
    [name] = leave(pretend_systemd, (slot,))
    again = SystemdLastResort("n1", ("home",), clock=CLOCK, log=tmp_path / "log")
    (pretend_systemd / "broken").touch()
    if is_silent:
        (pretend_systemd / "silent").touch()
    for _ in range(2):
        with pytest.raises(Unavailable, match="systemd-run"):
            await again.arm(20.0)
        [timer] = timers_in(pretend_systemd)
        assert name in timer
    for fault in ("broken", "silent"):
        (pretend_systemd / fault).unlink(missing_ok=True)
    await again.arm(30.0)
    [timer] = timers_in(pretend_systemd)
    assert "30000ms" in timer


class ImpatientClock(SystemClock):
    """One on which all of an arming's time is over at once, and that of no single command."""

    def timeout(self, delay_s: float | None) -> AbstractAsyncContextManager[object]:
        """As of a clock."""
        return super().timeout(0.0 if delay_s == ARM_LIMIT_S else delay_s)


@pytest.mark.slow
async def test_an_arming_that_takes_too_long_fails_and_leaves_the_earlier_timer(
    pretend_systemd: Path, tmp_path: Path
) -> None:
    """Each of its commands may take its time, but not all of them together."""
    [name] = leave(pretend_systemd, ("b",))
    slow = SystemdLastResort("n1", ("home",), clock=ImpatientClock(), log=tmp_path / "log")
    with pytest.raises(Unavailable, match="no timer armed in 30 s"):
        await slow.arm(20.0)
    [timer] = timers_in(pretend_systemd)
    assert name in timer


@pytest.mark.slow
async def test_a_waiting_keeper_is_small(harness: KeeperHarness) -> None:
    """A keeper costs a node less than a shim does."""
    await harness.resort.arm(600.0)
    await harness.until(lambda: len(harness.keepers()) == 1, "one keeper")
    [pid] = harness.keepers()
    assert rss_bytes(pid) <= 12 * 1024 * 1024
